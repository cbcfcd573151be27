"""Unusual files and uses: concurrency, wrappers, training checkpoints, full disks."""

import argparse
import itertools
import json
import resource
import signal
import sys
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, VIT, random_model, same_weights
from torch import nn

from processes import fork
from vitrail import CheckpointError, create, load, save
from vitrail.checkpoints.load import OUR_METADATA
from vitrail.checkpoints.save import convert
from vitrail.models.config import to_dict
from vitrail.models.registry import configuration
from vitrail.models.vit import build
from vitrail.planning.request import resident_bytes

pytestmark = pytest.mark.slow

TIMM = VIT.change(width=64, heads=1, numerics="timm")


@pytest.mark.parametrize("format", ["bundle", "timm", "huggingface"])
def test_loading_during_concurrent_saves(tmp_path, format):
    models, stop = [random_model(TIMM, seed) for seed in (0, 1)], threading.Event()
    save(models[0], tmp_path / "model", format)

    def keep_saving():
        for turn in itertools.count():
            if stop.is_set():
                return
            save(models[turn % 2], tmp_path / "model", format)

    thread = threading.Thread(target=keep_saving)
    thread.start()
    try:
        for _ in range(40):
            loaded = load(tmp_path / "model")
            assert any(same_weights(loaded, model) for model in models)
    finally:
        stop.set()
        thread.join()


def overwrite(path):
    model = load(path)
    torch.save(dict(model.state_dict()), path)
    print(sum(p.double().sum().item() for p in model.parameters()))


def test_overwriting_the_source_file_is_safe(tmp_path):
    save(random_model(TIMM), tmp_path / "w.pth", "timm")
    process = fork(overwrite, tmp_path / "w.pth", output=tmp_path / "output")
    process.join()  # a memory map of a file that was cut off would end it
    assert process.exitcode == 0
    expected = sum(p.double().sum().item() for p in random_model(TIMM).parameters())
    assert float((tmp_path / "output").read_text()) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("format", ["bundle", "google"])
def test_weights_are_saved_as_float32(tmp_path, kind, format):
    model = getattr(random_model(VIT), kind)()
    path = tmp_path / ("model" if format == "bundle" else "model.npz")
    save(model, path, format)
    assert same_weights(load(path), model.float())


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel])
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_wrappers_are_removed(tmp_path, wrap):
    save(wrap(random_model(VIT)), tmp_path / "model")
    assert same_weights(load(tmp_path / "model"), random_model(VIT))


@pytest.mark.parametrize("format", ["timm", "huggingface"])
def test_bare_file_cannot_express_numerics(tmp_path, format):
    tanh = random_model(TIMM.change(numerics="google"))
    with pytest.raises(CheckpointError, match=r"cannot express.*gelu='tanh'.*--allow-loss"):
        save(tanh, tmp_path / "model.safetensors", format)
    save(tanh, tmp_path / "folder", format)
    assert load(tmp_path / "folder").config.numerics.gelu == "tanh"


def test_config_json_next_to_a_file_is_used(tmp_path):
    save(random_model(VIT.change(width=64, heads=4)), tmp_path, "huggingface", class_names=[*"abc"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"]["2"] = "edited"
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path / "model.safetensors")
    assert (loaded.config.heads, loaded.config.numerics.gelu) == (4, "tanh")
    assert loaded.metadata.class_names == ("a", "b", "edited")


def test_convert_notes_missing_heads_and_keeps_a_hand_written_card(tmp_path):
    save(random_model(TIMM.change(width=128, heads=4, numerics="torchvision")), tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "out.pth", "torchvision")
    assert any("load it with heads=4" in note for note in done.notes)
    assert load(tmp_path / "out.pth", heads=4).config.heads == 4
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_bytes(b"mine \xe9")
    convert(tmp_path / "source", tmp_path / "out", "bundle")
    assert (tmp_path / "out" / "README.md").read_bytes() == b"mine \xe9"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TIMM.change(depth=10**9), "the config has 1000000000 layers, the file 3. tensors"),
        (TIMM.change(position="relative"), "the format has no tensor for encoder.positions.0"),
        (FAMILIES["mixer"], "a MixerConfig does not fit the tensors of a VitConfig"),
    ],
    ids=["too deep", "position", "family"],
)
def test_header_that_contradicts_the_tensors_raises(tmp_path, config, message):
    save(random_model(TIMM), tmp_path / "model.safetensors", "timm")
    tensors = load_file(tmp_path / "model.safetensors")
    header = {OUR_METADATA: json.dumps({"model": to_dict(config)})}
    save_file(tensors, tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "model.safetensors")


NOT_DENSE = "norm.bias is not a dense CPU tensor"


def torch_file(tmp_path, change, format="timm"):
    save(random_model(TIMM), tmp_path / "model.pth", format)
    torch.save(
        change(torch.load(tmp_path / "model.pth", weights_only=True)), tmp_path / "model.pth"
    )
    return tmp_path / "model.pth"


def log_of(path, **options):
    lines = []
    return load(path, log=lines.append, **options), lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t | {"norm.bias": torch.empty(64, device="meta")}, NOT_DENSE),
        (lambda t: t | {"norm.bias": torch.ones(64).to_sparse()}, NOT_DENSE),
        (lambda t: t | {"norm.bias": torch.ones(1).expand(2**40)}, NOT_DENSE),
        (lambda t: {"optimizer": 1, "epoch": 3}, "contains no state dict; keys: optimizer, epoch"),
        (lambda t: [1], "contains a list; expected a state dict"),
        (lambda t: t | {"history": deque([1])}, "Python objects other than tensors"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse")
def test_pickles_with_unusual_tensors_raise(tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(torch_file(tmp_path, change))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("format", ["timm", "torchvision"])
def test_wrapped_names_in_every_format(tmp_path, prefix, format):
    path = torch_file(tmp_path, lambda t: {prefix + name: x for name, x in t.items()}, format)
    assert same_weights(load(path), random_model(TIMM))


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict", "state_dict_ema"])
def test_state_dict_inside_training_checkpoints(tmp_path, key):
    empty = {} if key == "state_dict_ema" else {"state_dict_ema": None, "net": {}}
    more = {"epoch": 3, "args": argparse.Namespace(lr=0.1)} | empty
    path = torch_file(tmp_path, lambda t: {key: t} | more)
    path = path.rename(path.with_suffix(".pth.tar"))
    model, lines = log_of(path, preprocessing="timm")
    assert same_weights(model, random_model(TIMM))
    assert lines == []


@pytest.mark.parametrize("format", ["timm", "torchvision", "huggingface"])
def test_averaged_weights_are_preferred_and_logged(tmp_path, format):
    raw, average = ("state_dict", "state_dict_ema") if format == "timm" else ("model", "model_ema")
    numerics = {"huggingface": "transformers"}.get(format, format)
    states = {}
    for seed, key in enumerate((average, raw)):
        save(random_model(TIMM.change(numerics=numerics), seed), tmp_path / f"{key}.pth", format)
        states[key] = torch.load(tmp_path / f"{key}.pth", weights_only=True)
    if format == "torchvision":  # torch's AveragedModel
        states[average] = {f"module.{name}": t for name, t in states[average].items()}
        states[average]["n_averaged"] = torch.tensor(3)
    (tmp_path / "folder").mkdir()
    for name in ("last.pth.tar", "folder/pytorch_model.bin"):
        torch.save({**states, "epoch": 3}, tmp_path / name)
        model, lines = log_of((tmp_path / name).parent if "folder" in name else tmp_path / name)
        assert same_weights(model, random_model(TIMM))
        assert f"using the averaged weights {average}, not {raw}" in "\n".join(lines)
        assert ("n_averaged" in "\n".join(lines)) == (format == "torchvision")


def test_skipped_arrays_and_ambiguous_positions_are_logged(tmp_path):
    save(random_model(VIT), tmp_path / "plain.npz", "google")
    arrays = {f"params/{name}": array for name, array in np.load(tmp_path / "plain.npz").items()}
    np.savez(tmp_path / "state.npz", **arrays, **{"opt/step": np.zeros(1), "rng": np.zeros(2)})
    assert "2 arrays outside the prefix params/" in log_of(tmp_path / "state.npz")[1][1]
    save(random_model(TIMM.change(image_size=(24, 32))), tmp_path / "model.pth", "timm")
    guessed, lines = log_of(tmp_path / "model.pth")  # 48 patches + class token
    assert guessed.config.grid == (7, 7)  # wrong, but logged
    assert "all 49 rows are assumed to be patch positions" in lines[1]


DISK = {"m": ("bundle", "google"), "m.npz": ("google", "google"), "m.pth": ("timm", "timm")}


def save_to_full_disk(folder):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for path, (format, numerics) in DISK.items():
        with pytest.raises(CheckpointError, match=r"^cannot write"):
            save(create("ViT-Ti/16", depth=1, numerics=numerics), folder / path, format)


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file size are Linux's")
def test_full_disk_raises_and_keeps_the_old_file(tmp_path):
    for path, (format, numerics) in DISK.items():
        save(random_model(TIMM.change(numerics=numerics)), tmp_path / "models" / path, format)
    process = fork(save_to_full_disk, tmp_path / "models", output=tmp_path / "output")
    process.join()
    assert process.exitcode == 0, (tmp_path / "output.errors").read_text()
    for path in DISK:
        assert same_weights(load(tmp_path / "models" / path), random_model(TIMM))
    assert list(tmp_path.rglob(".*")) == []


def test_saving_an_invalid_model_raises(tmp_path):
    save(random_model(VIT), tmp_path / "model")
    wrong, no_text = random_model(VIT), "is not valid text"
    wrong.head = nn.Linear(8, 5)
    with torch.device("meta"):
        empty = create("ViT-Mu/4")
    for model, names, message in [
        (random_model(VIT), "cat", "is a string"),
        (random_model(VIT), [1, 2, 3], no_text),
        (random_model(VIT), ["a", "b", "\udce9"], no_text),
        (wrong, None, r"head.bias is \(5,\), expected \(3,\)"),
        (nn.Linear(2, 2), None, "a Linear is not a vitrail model"),
        (empty, None, "on the meta device"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            save(model, tmp_path / "model", class_names=names)
    assert same_weights(load(tmp_path / "model"), random_model(VIT))


def measure_loading(path, small):
    """Print the peak memory of loading a model, as a multiple of its size."""
    load(small)  # everything that loading needs is in memory
    before = resident_bytes("VmRSS")
    size = sum(p.nbytes for p in load(path).parameters())
    print((resident_bytes("VmHWM") - before) / size)


FORMATS = {"model": "bundle", "model.npz": "google", "folder": "huggingface"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_of_loading(tmp_path):
    large = configuration("ViT-S/16")
    small = large.change(depth=1, width=64, mlp_width=64, heads=1)
    models = [build(config, device="cpu") for config in (large, small)]  # any values will do
    for name, format in FORMATS.items():
        paths = [tmp_path / size / name for size in ("large", "small")]
        for model, path in zip(models, paths, strict=True):
            save(model, path, format)
        process = fork(measure_loading, *paths, output=tmp_path / "output")
        process.join()
        assert float((tmp_path / "output").read_text()) < 1.3, format
