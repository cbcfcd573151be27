"""Attacks by files and names; docs/security.md lists these and those of other tests."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import zipfile
from html import unescape

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from page_reader import Reader
from vitrail.checkpoints.bundle import GENERATED
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.hub import parse
from vitrail.cli import main
from vitrail.data import tar_shards
from vitrail.data.datasets import open_dataset
from vitrail.data.storage import write_atomic
from vitrail.errors import CheckpointError, DataError
from vitrail.export.html import render

SECRET = b"only the owner may read this"
INJECTION = "</script><script>alert(1)</script>"
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    return path


@pytest.fixture
def bundle(tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=2)
    vitrail.save(model, tmp_path / "bundle", class_names=("cat", "dog"))
    return tmp_path / "bundle"


def png():
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8)).save(buffer, "PNG")
    return buffer.getvalue()


def write_tar(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, data, kind, target in members:
            info = tarfile.TarInfo(name)
            info.size, info.type, info.linkname = len(data), kind, target
            tar.addfile(info, io.BytesIO(data))
    return path


# Datasets


@pytest.mark.parametrize("scheme", ["file://", "local://", "http://127.0.0.1:9", "memory://"])
def test_table_may_not_name_urls(tmp_path, monkeypatch, secret, scheme):
    """Relative to the folder of the table, a URL is a path inside of it."""
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "set"
    folder.mkdir()
    monkeypatch.chdir(folder)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    cell = {"bytes": None, "path": f"{scheme}{secret}"}
    table = datasets.Dataset.from_dict({"image": [cell], "label": ["a"]}, features=features)
    parquet.write_table(table.data.table, folder / "train.parquet")
    with pytest.raises(DataError, match="which is outside"):
        open_dataset(folder / "train.parquet", "all")[0]


@pytest.mark.parametrize("name", ["file://{}", "x::file://{}", "simplecache::file://{}", "{}"])
def test_list_may_not_name_urls(tmp_path, monkeypatch, secret, name):
    folder = tmp_path / "set"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "labels.csv").write_text(f"file,class\n{name.format(secret)},a\n")
    with pytest.raises(DataError):
        open_dataset("labels.csv", "all")[0]


def test_links_and_paths_in_a_tar_lead_nowhere(tmp_path, secret):
    image = png()
    path = write_tar(
        tmp_path / "set.tar",
        ("cat/link.png", b"", tarfile.SYMTYPE, str(secret)),
        ("cat/hard.png", b"", tarfile.LNKTYPE, "../secret"),
        ("cat/pipe.png", b"", tarfile.FIFOTYPE, ""),
        ("../../cat/up.png", image, tarfile.REGTYPE, ""),
        ("/cat/root.png", image, tarfile.REGTYPE, ""),
        ("cat/inside.png", image, tarfile.REGTYPE, ""),
    )
    before = sorted(tmp_path.rglob("*"))
    dataset = open_dataset(path, "all")
    assert [sample.data for sample in dataset] == [image] * len(dataset)
    assert "inside.png" in dataset.name(len(dataset) - 1)
    assert [p for p in sorted(tmp_path.rglob("*")) if p not in before] == [
        tmp_path / ".set.tar.index.npz"
    ]


def test_huge_image_in_a_sparse_tar_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(tar_shards, "MAX_IMAGE_BYTES", 2**16)
    path = write_tar(
        tmp_path / "set.tar",
        ("cat/small.png", png(), tarfile.REGTYPE, ""),
        ("cat/large.png", bytes(2**16 + 1), tarfile.REGTYPE, ""),
    )
    dataset = open_dataset(path, "all")
    assert dataset[0].data == png()
    with pytest.raises(DataError, match="above the limit"):
        dataset[1]


# Checkpoints


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_pipes_and_devices_in_a_bundle_are_rejected(bundle, name, kind):
    (bundle / name).unlink()
    os.mkfifo(bundle / name) if kind == "pipe" else (bundle / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="not a regular file"):
        vitrail.load(bundle)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 10**6, "corrupt"),
        (b'{"vitrail": ' + b'{"a":' * 10**5, "corrupt"),
        (b"\xff\xfe", "corrupt"),
        (None, "above the limit"),
    ],
)
def test_config_json_is_bounded(bundle, content, message):
    if content is None:
        os.truncate(bundle / "config.json", 2**33)  # sparse
    else:
        (bundle / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as error:
        vitrail.load(bundle)
    assert "\n" not in str(error.value)


def test_shards_may_not_leave_their_folder(bundle, tmp_path):
    (tmp_path / "folder").mkdir()
    index = {"weight_map": {"head.weight": "../bundle/model.safetensors"}}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its folder"):
        vitrail.load(tmp_path / "folder")


class Exploit:
    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


def test_pickles_run_no_code(tmp_path):
    target = tmp_path / "owned"
    torch.save({"model": Exploit(target)}, tmp_path / "model.pth")
    array = np.array([Exploit(target)], dtype=object)
    np.savez(tmp_path / "model.npz", **{"embedding/kernel": array})
    np.savez(tmp_path / "data.npz", images=array, labels=np.array([0]))
    for path in ("model.pth", "model.npz"):
        with pytest.raises(CheckpointError, match="run code"):
            vitrail.load(tmp_path / path)
    with pytest.raises(DataError):
        open_dataset(tmp_path / "data.npz", "all")
    assert not target.exists()


@pytest.mark.slow
@pytest.mark.parametrize("bomb", ["members", "expansion", "header"])
def test_zip_bombs_are_rejected_before_they_are_unpacked(tmp_path, bomb):
    path = tmp_path / "model.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        if bomb == "members":
            for number in range(70_000):
                archive.writestr(f"{number}.npy", b"")
        elif bomb == "expansion":
            with archive.open("a.npy", "w", force_zip64=True) as member:
                for _ in range(400):
                    member.write(bytes(2**20))
        else:
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                header, {"descr": "<f4", "fortran_order": False, "shape": (2**40,)}
            )
            archive.writestr("embedding/kernel.npy", header.getvalue())
    with pytest.raises(CheckpointError) as error:
        vitrail.load(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "address",
    [
        *("hf:../../etc", "hf:owner/..", "hf:owner/.git", "hf:/etc/passwd", "hf:a/b/c", "hf:"),
        *("hf:owner/name@../../x", "hf:owner/name@a/../b", "hf:owner/name\n", "hf:owner/na me"),
        *("hf:owner/name@", "hf:owner\\name", "hf:owner/name?x=1", "hf:http://host/x"),
        "hf:" + "a/" * 50_000,
        "hf:o/n@" + "a/" * 50_000 + "\n",
        "hf:" + "." * 100_000,
    ],
)
def test_hub_addresses_are_names_only(address):
    with pytest.raises(CheckpointError, match="invalid hub address"):
        parse(address)


def test_onnxruntime_reports_nothing_to_its_vendor(tmp_path):
    pytest.importorskip("onnxruntime")
    code = "from vitrail.extras import require; require('onnxruntime', extra='export', feature='')"
    hidden = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["HOME"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.rglob("deviceid"))  # written before the first event is sent


def test_onnx_file_may_not_read_other_files(tmp_path, secret):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    (tmp_path / "folder").mkdir()
    for location in (str(secret), "../secret"):
        tensor = onnx.TensorProto(
            name="x", data_type=onnx.TensorProto.UINT8, dims=[len(SECRET)], data_location=1
        )
        for key, value in {"location": location, "length": str(len(SECRET))}.items():
            tensor.external_data.add(key=key, value=value)
        output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, None)
        node = onnx.helper.make_node("Identity", ["x"], ["y"])
        graph = onnx.helper.make_graph([node], "g", [], [output], [tensor])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
        model.ir_version = 9
        path = tmp_path / "folder" / "model.onnx"
        path.write_bytes(model.SerializeToString())
        with pytest.raises(CheckpointError, match="cannot be opened") as error:
            vitrail.Predictor(path)
        assert SECRET.decode() not in str(error.value)


# Names


@pytest.mark.parametrize(
    "name", [INJECTION, "$script", "5 $", "$weights ${data}", "&lt;b>", ESCAPE]
)
def test_names_in_an_exported_page_stay_text(name):
    about = {"name": name, "classes": [name, "<!--", "\u2028"], "examples": [{"label": name}]}
    page = render(about, b"weights", b"taught", name)
    tags = Reader(page).seen
    assert [tag for tag, _ in tags].count("script") == 6
    assert not [key for _, values in tags for key in values if key.startswith("on")]
    assert unescape(re.search("<title>(.*?)</title>", page, re.DOTALL)[1]).strip() == name


def test_names_in_a_model_card_stay_one_line_of_text(tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=2)
    names = (f"{INJECTION}\n# Install evil", "a | b\r\n---\nlicense: mit")
    vitrail.save(model, tmp_path / "bundle", class_names=names)
    card = (tmp_path / "bundle" / "README.md").read_text()
    assert card.startswith(GENERATED)
    assert card.count("\n# ") == 1
    assert "<script" not in card
    assert "\nlicense" not in card
    assert vitrail.load(tmp_path / "bundle").metadata.class_names == names


@pytest.mark.parametrize("command", ["check", "predict"])
def test_names_cannot_control_the_terminal(tmp_path, bundle, capsys, command):
    folder = tmp_path / "photos"
    for name in ("cat", f"dog{ESCAPE}"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"1{ESCAPE}\nvitrail: all is well.png").write_bytes(png())
        (folder / name / f"2{ESCAPE}.png").write_bytes(b"no image")
    words = {"check": ["check", str(folder)], "predict": ["predict", str(bundle), str(folder)]}
    main(words[command])
    main(["evaluate", str(bundle), str(folder / f"dog{ESCAPE}" / f"2{ESCAPE}.png")])
    captured = capsys.readouterr()
    assert "\x1b" not in captured.out + captured.err
    assert "\x07" not in captured.out + captured.err
    assert "\nvitrail: all is well" not in captured.out + captured.err


# Writing


def test_written_files_follow_no_link_and_keep_the_umask(tmp_path, secret, monkeypatch):
    (tmp_path / "out.json").symlink_to(secret)
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:  # reading it would change it for all threads
            patch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
            write_atomic(tmp_path / "out.json", "{}")
            write_file(tmp_path / "x.safetensors", {"x": torch.zeros(1)}, None)
        for name in ("out.json", "x.safetensors"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
    finally:
        os.umask(before)
    assert secret.read_bytes() == SECRET
    assert not (tmp_path / "out.json").is_symlink()
    with pytest.raises(DataError):
        write_atomic(tmp_path / "out.json" / "below", "x")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"secret", "out.json", "x.safetensors"}
