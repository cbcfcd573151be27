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
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file

import vitrail
from page_reader import Reader
from vitrail.checkpoints.bundle import GENERATED
from vitrail.checkpoints.files import write_file
from vitrail.checkpoints.hub import parse
from vitrail.cli import main
from vitrail.data import arrays, tar_shards
from vitrail.data.datasets import open_dataset
from vitrail.data.storage import write_atomic
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.export.html import render
from vitrail.probing.teach import features_digest, load_memory, recall

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


@pytest.mark.parametrize("name", ["images.npy", "train-images-idx3-ubyte"])
def test_pipes_in_place_of_arrays_do_not_block(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError):
        open_dataset(tmp_path, "all")


@pytest.mark.parametrize("attack", ["rows", "items of no bytes"])
def test_small_archives_hold_few_rows(tmp_path, monkeypatch, attack):
    monkeypatch.setattr(arrays, "MIN_ROWS", 1000)
    count = 10**6 if attack == "rows" else 1
    names = np.zeros(10, "U1" if attack == "rows" else "V0")
    images, labels = np.zeros((count, 1, 1), np.uint8), np.zeros(count, np.uint8)
    np.savez_compressed(tmp_path / "a.npz", images=images, labels=labels, class_names=names)
    with pytest.raises(DataError, match=r"too many for its size|items of no bytes"):
        open_dataset(tmp_path / "a.npz", "all")


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (b"}K\1" + b"q\0h\0\x86" * 40 + b"Ns.", "too many times"),
        (b"}U\x0blabel_names]]as.", "in place of text"),
    ],
)
def test_cifar_pickles_are_of_plain_keys_and_names(tmp_path, pickled, message):
    (tmp_path / "meta").write_bytes(b"\x80\2" + pickled)
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path, "all")


def test_offsets_of_an_arrow_file_stay_in_its_buffers(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    cells = {"image": [{"bytes": bytes(16), "path": None}] * 3, "label": ["a"] * 3}
    datasets.Dataset.from_dict(cells, features=features).save_to_disk(tmp_path / "set")
    (path,) = (tmp_path / "set").glob("*.arrow")
    data, offsets = path.read_bytes(), np.array([0, 16, 32, 48], np.int32)
    assert data.count(offsets.tobytes()) == 1
    path.write_bytes(data.replace(offsets.tobytes(), (offsets * 2**20).tobytes()))
    with pytest.raises(DataError, match="cannot open"):
        open_dataset(tmp_path / "set", "all")


def test_patterns_of_shards_are_limited(monkeypatch):
    monkeypatch.setattr(tar_shards, "MAX_PATTERNS", 10)
    with pytest.raises(DataError, match="stands for too many"):
        open_dataset("{0..999999999}*.tar", "all")


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


def write_archive(path, pickled, method=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/version", "3\n")
    return path


HUGE = b"\x8a\x06" + (2**40).to_bytes(6, "little")  # the integer
HOSTILE_PICKLES = {
    "bytes": b"cbuiltins\nbytearray\n" + HUGE + b"\x85R.",
    "old name": b"c__builtin__\nbytearray\n" + HUGE + b"\x85R.",
    "wrapped": b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nbytearray\nN"
    + HUGE
    + b"\x85NtR.",
    "tensor": b"ctorch\nFloatTensor\nJ\xff\xff\xff\x7f\x85R.",
    "new tensor": b"ctorch\nTensor\nJ\xff\xff\xff\x7f\x85\x81.",
    "codec": b"c_codecs\nencode\nX\x01\0\0\0aX\x08\0\0\0punycode\x86R.",
    "key": b"}K\1" + b"q\0h\0\x86" * 40 + b"Ns.",  # ((((1, 1), (1, 1)), …
    "set": b"cbuiltins\nset\n]K\1" + b"q\0h\0\x86" * 40 + b"a\x85R.",
    "list": b"](" + b"K\1" * 1000 + b"eq\0" + b"cbuiltins\nset\nh\0\x85R0" * 20_000 + b"N.",
}


@pytest.mark.parametrize("name", HOSTILE_PICKLES)
@pytest.mark.parametrize("archive", [True, False])
def test_pickles_cost_no_more_than_their_size_allows(tmp_path, monkeypatch, name, archive):
    """torch's weights_only would take terabytes or years."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch has read it"))
    path, pickled = tmp_path / "model.pth", b"\x80\2" + HOSTILE_PICKLES[name]
    write_archive(path, pickled) if archive else path.write_bytes(b"\x80\2K\1." + pickled)
    with pytest.raises(CheckpointError, match="not a checkpoint of torch"):
        vitrail.load(path)


@pytest.mark.parametrize("change", ["compressed", "comment", "two ends", "two directories"])
def test_archives_that_torch_may_read_otherwise_are_rejected(tmp_path, monkeypatch, change):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch has read it"))
    method = zipfile.ZIP_DEFLATED if change == "compressed" else zipfile.ZIP_STORED
    path = write_archive(tmp_path / "model.pth", b"\x80\2}.", method)
    data = path.read_bytes()
    start = data.index(b"PK\1\2")
    match change:
        case "comment":
            data = data[:-2] + b"\1\0x"
        case "two ends":
            data += b"PK\5\6" + bytes(9)
        case "two directories":  # torch reads the first one
            data = data[:-22] + data[start:]
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        vitrail.load(path)


def test_long_tensor_names_are_rejected(tmp_path):
    save_file({"module." * 10**5: torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="more than 500 letters"):
        vitrail.load(tmp_path / "model.safetensors")


def test_bundle_may_not_state_a_huge_input(bundle):
    config = json.loads((bundle / "config.json").read_text())
    config["preprocessing"]["size"] = [10**5, 10**5]
    (bundle / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="at most"):
        vitrail.load(bundle)


@pytest.mark.parametrize("change", [{"owners": [2**40, 0]}, {"sums": [[0.0]]}, {"l2": "1"}])
def test_probe_statistics_must_fit_the_model(bundle, change):
    model = vitrail.load(bundle)
    width = model.config.num_features
    tensors = {"counts": [1, 1], "owners": [0, 1], "sums": [[0.0] * width] * 2}
    tensors |= {"rows": [[0.0] * width] * 2}
    about = {"classes": ["cat", "dog"], "l2": 1.0, "temperature": 1, "backbone": ""}
    about["backbone"] = features_digest(model)
    about |= {key: value for key, value in change.items() if key in about}
    tensors |= {key: value for key, value in change.items() if key in tensors}
    path, metadata = bundle / "probe.safetensors", {"vitrail-probe": json.dumps(about)}
    save_file({name: torch.tensor(x) for name, x in tensors.items()}, path, metadata)
    with pytest.raises(CheckpointError, match="do not fit"):
        load_memory(bundle, model)


@pytest.mark.parametrize(
    "data", ["hf:o/n", "http://127.0.0.1:9/a.tar", "simplecache::file:///a.tar"]
)
def test_data_named_by_a_model_is_not_downloaded(bundle, data):
    model = vitrail.load(bundle)
    model.metadata = replace(model.metadata, provenance={"data": data})
    with pytest.raises(ConfigError, match="no training data on this machine"):
        recall(model, bundle, None, only=False)


def test_index_in_the_cache_may_not_name_files_outside(tmp_path, monkeypatch):
    """Offline, a file named like a hash would be compared with its name, and deleted."""
    victim = tmp_path / ("0" * 64)
    victim.write_bytes(SECRET)
    folder = tmp_path / "hub" / "models--o--n"
    snapshot = folder / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(snapshot.name)
    index = {"weight_map": {"head.weight": str(victim)}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="outside its folder"):
        vitrail.load("hf:o/n")
    assert victim.read_bytes() == SECRET


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
