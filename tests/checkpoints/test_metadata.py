"""Metadata: preparing images, and the preprocessing of each kind of checkpoint."""

import io
import json
from typing import get_args

import numpy as np
import pytest
import torch
from PIL import Image
from small_models import FAMILIES, VIT, random_model

from vitrail import ConfigError, DataError, Metadata, Preprocessing, load, save
from vitrail.checkpoints.load import table_for
from vitrail.checkpoints.rules import write
from vitrail.checkpoints.save import convert
from vitrail.cli import main
from vitrail.data.preprocessing import PRESETS, Preset, preset

WIDE = VIT.change(width=64, heads=1)  # the usual number of heads, which no file need say
TIMM = WIDE.change(numerics="timm")
HEADLESS = TIMM.change(num_classes=0)
SCALED = TIMM.change(layer_scale=1e-5, image_size=16)
HF = WIDE.change(numerics="transformers")
OWN = Preprocessing(size=(8, 8), mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))


def bare(
    folder, config=TIMM, format="timm", *, rename=None, extra=(), layout=None, name="model.pth"
):
    """Write bare weights: renamed, with extra tensors, or inside a training checkpoint."""
    tensors = write(random_model(config), table_for(config, format).rules(config))
    if rename:
        tensors = {rename(name): tensor for name, tensor in tensors.items()}
    tensors |= {name: torch.zeros(1, 1, 8) for name in extra}
    torch.save(layout(tensors) if layout else tensors, folder / name)
    return folder / name


def timm_folder(folder, drop=()):
    save(random_model(TIMM), folder / "timm", "timm", preprocessing=OWN)
    settings = json.loads((folder / "timm" / "config.json").read_text())
    for key in drop:
        del settings["pretrained_cfg"][key]
    (folder / "timm" / "config.json").write_text(json.dumps(settings))
    return folder / "timm"


def hf_folder(folder, *, processor=True, model_type="vit", name="hf"):
    save(random_model(HF), folder / name, "huggingface", preprocessing=OWN)
    settings = json.loads((folder / name / "config.json").read_text()) | {"model_type": model_type}
    (folder / name / "config.json").write_text(json.dumps(settings))
    if not processor:
        (folder / name / "preprocessor_config.json").unlink()
    return folder / name


def google(folder, family):
    numerics = "big_transfer" if family == "bit" else "google"
    save(random_model(FAMILIES[family].change(numerics=numerics)), folder / "model.npz", "google")
    return folder / "model.npz"


def our_file(folder, name, format="timm"):
    save(random_model(TIMM), folder / name, format, preprocessing=OWN)
    return folder / name


MIXER, BIT = (FAMILIES[name].change(numerics="timm") for name in ("mixer", "bit"))
HYBRID = FAMILIES["hybrid root"].change(numerics="timm", width=64, heads=1)
DISTILLED = TIMM.change(distillation=True)
DINOV2, DEIT_FILE = SCALED.change(num_classes=0), "deit_tiny_patch16_224-a1311bcf.pth"
REGISTERS = DINOV2.change(registers=4)
BIG_TRANSFER = {"config": BIT.change(numerics="big_transfer"), "format": "bit_pytorch"}
TORCHVISION = {"config": WIDE.change(numerics="torchvision"), "format": "torchvision"}
DINO = {"config": HEADLESS, "rename": "backbone.{}".format}
DINO["layout"] = lambda tensors: {"teacher": tensors, "epoch": 3}
DINO_FILE = "dino_deitsmall16_pretrain.pth"
MAE_DECODER = ["mask_token", "decoder_embed.weight", "decoder_blocks.0.norm1.weight"]
ONLY_MODEL = {"layout": lambda tensors: {"model": tensors}}
TRAINING_STATE = {"layout": lambda tensors: {"model": tensors, "epoch": 3}}


def renamed(old, new):
    return lambda name: name.replace(old, new)


WEIGHTS = {  # name: arguments of `bare`, the preprocessing, the line that is logged
    "timm": ({}, "timm", "warning"),
    "timm, headless": ({"config": HEADLESS}, "timm", "warning"),
    "timm, Mixer": ({"config": MIXER}, "timm", "warning"),
    "timm, BiT": ({"config": BIT}, "timm", "BiT by its tensor stages.0.blocks.0."),
    "big_transfer's BiT": (BIG_TRANSFER, "big_vision", ""),
    "timm, hybrid": ({"config": HYBRID}, "timm", "AugReg hybrid by its tensor patch_embed.back"),
    "timm, distilled DeiT": ({"config": DISTILLED}, "deit", "DeiT by its tensor dist_token"),
    "DeiT's layout": (ONLY_MODEL, "deit", "DeiT by its layout {'model': …}"),
    "another training state": (TRAINING_STATE, "timm", "warning"),
    "DeiT's file name": ({"name": DEIT_FILE}, "deit", f"DeiT by its name {DEIT_FILE}"),
    "DeiT III": ({"config": SCALED, "rename": renamed("ls1.gamma", "gamma_1")}, "deit",
                 "DeiT III by its tensor blocks.0.gamma_1"),
    "DeiT III in timm's names": ({"config": SCALED}, "deit",
                                 "DeiT III by its tensor blocks.0.ls1.gamma and a head"),
    "DINO's training state": (DINO, "dino", "DINO by its state dict 'teacher'"),
    "DINO with its projection": ({"config": HEADLESS, "extra": ["head.mlp.0.weight"]}, "dino",
                                 "DINO by its tensor head.mlp.0.weight"),
    "DINO's file name": ({"config": HEADLESS, "name": DINO_FILE}, "dino", "DINO by its name"),
    "DINOv2": ({"config": DINOV2, "extra": ["mask_token"]}, "dino",
               "DINOv2 by its tensor mask_token"),
    "DINOv2 with registers": (
        {"config": REGISTERS, "rename": renamed("reg_token", "register_tokens")}, "dino",
        "DINOv2 by its tensor register_tokens"),
    "DINOv2 in timm's names": ({"config": DINOV2}, "dino",
                               "DINOv2 by its tensor blocks.0.ls1.gamma and no head"),
    "MAE": ({"config": HEADLESS, "extra": MAE_DECODER}, "dino",
            "MAE by its tensor decoder_embed.weight"),
    "MAE's encoder": ({"config": HEADLESS, **ONLY_MODEL}, "dino", "MAE by its layout"),
    "torchvision": (TORCHVISION, "torchvision", ""),
    "Hugging Face": ({"config": HF, "format": "huggingface"}, "transformers", "warning"),
}  # fmt: skip
HF_FOLDERS = {  # without a processor
    "no processor": ({}, "transformers", "warning"),
    "DeiT": ({"model_type": "deit"}, "dino", "DeiT by model_type='deit' in config.json"),
    "MAE": ({"model_type": "vit_mae"}, "dino", "MAE by model_type='vit_mae' in config.json"),
    "DINO's name": ({"name": "dino-vits16"}, "dino", "DINO by its name dino-vits16"),
}
ORIGINS = {  # how other checkpoints are made, their preprocessing, the line that is logged
    "timm folder": (timm_folder, OWN, ""),
    "timm folder, no mean": (lambda f: timm_folder(f, ["mean"]), None, "warning"),
    "Hugging Face folder": (hf_folder, OWN, ""),
    "bundle": (lambda f: our_file(f, "bundle", "bundle"), OWN, ""),
    "our file in timm's format": (lambda f: our_file(f, "model.safetensors"), OWN, ""),
    "our .pth in timm's format": (lambda f: our_file(f, "model.pth"), "timm", "warning"),
    **{
        f"Google's {family}": (lambda f, family=family: google(f, family), "google", "")
        for family in ("vit", "hybrid root", "mixer", "bit")
    },
    **{
        f"Hugging Face folder, {name}": (
            lambda f, given=given: hf_folder(f, processor=False, **given), how, line
        )
        for name, (given, how, line) in HF_FOLDERS.items()
    },
    **{
        f"weights alone: {name}": (lambda f, given=given: bare(f, **given), how, line)
        for name, (given, how, line) in WEIGHTS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("origin", ORIGINS)
def test_preprocessing_of_every_origin(tmp_path, origin):
    make, expected, logged = ORIGINS[origin]
    path, lines = make(tmp_path), []
    model = load(path, log=lines.append)
    size = model.config.image_size
    if isinstance(expected, str):
        expected = preset(expected, (size, size) if isinstance(size, int) else size)
    if expected is not None:
        assert model.metadata.preprocessing == expected
    about = [line for line in lines if line.startswith(("warning: ", "recognized "))]
    assert len(about) == bool(logged)
    assert all(line.removeprefix("recognized ").startswith(logged) for line in about)
    assumed = model.metadata.provenance.get("preprocessing") == "assumed"
    assert assumed == (logged == "warning")


def test_warning_states_assumption_and_explicit_preprocessing_does_not_warn(tmp_path):
    assert get_args(Preset) == tuple(PRESETS)
    path, lines = bare(tmp_path, TIMM), []
    load(path, log=lines.append)
    (line,) = lines
    for part in (
        f"warning: {path} does not state its preprocessing",
        "mean (0.5, 0.5, 0.5), std (0.5, 0.5, 0.5)",
        "resize short side to 8 (bicubic), center crop 8 x 8",
        "--preprocessing",
        ", ".join(PRESETS),
    ):
        assert part in line
    path, lines = bare(tmp_path, TIMM), []
    for given, expected in (("deit", preset("deit", (8, 8))), (OWN, OWN)):
        model = load(path, preprocessing=given, log=lines.append)
        assert lines == []
        assert model.metadata.preprocessing == expected
        assert "preprocessing" not in model.metadata.provenance
    model = load(path, image_size=16, preprocessing="dino", log=lines.append)
    assert model.metadata.preprocessing == preset("dino", (16, 16))
    load(path, image_size=18 * 4, log=lines.append)
    assert "resize short side to 72 (bicubic), center crop 72 x 72" in lines[-1]
    with pytest.raises(ConfigError, match="unknown preprocessing 'diet'; did you mean 'deit'"):
        load(path, preprocessing="diet", log=lambda line: None)
    gray = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,))
    with pytest.raises(ConfigError, match="for 1 channels does not fit a model of 3"):
        load(path, preprocessing=gray, log=lambda line: None)


def test_assumed_preprocessing_warns_until_set(tmp_path):
    path, lines = bare(tmp_path, TIMM), []
    convert(path, tmp_path / "bundle", "bundle")
    model = load(tmp_path / "bundle", log=lines.append)
    assert lines[0].startswith(f"warning: {tmp_path / 'bundle'} does not state")
    save(model, tmp_path / "chosen", preprocessing=model.metadata.preprocessing)
    convert(path, tmp_path / "converted", "bundle", preprocessing="timm")
    for folder in ("chosen", "converted"):
        again = load(tmp_path / folder, log=lines.append)
        assert again.metadata == model.metadata.__class__(
            preprocessing=preset("timm", (8, 8)), provenance=again.metadata.provenance
        )
        assert "preprocessing" not in again.metadata.provenance
    assert len(lines) == 1


def test_convert_passes_the_warning_on(tmp_path, capsys):
    path = str(bare(tmp_path, TIMM))
    arguments = ["convert", path, str(tmp_path / "out"), "--to", "bundle", "--json"]
    assert main(arguments) == 0
    output = capsys.readouterr()
    assert output.err.startswith("warning: ")
    assert json.loads(output.out)["notice"] == output.err.strip()
    assert main([*arguments, "--preprocessing", "deit", "--overwrite"]) == 0
    assert capsys.readouterr().err == ""


PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
METADATA = Metadata(preprocessing=preset("torchvision", (8, 12)))


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_prepare_accepts_one_image_or_a_list(tmp_path):
    (tmp_path / "cat.png").write_bytes(png(PIXELS))
    one = METADATA.prepare(tmp_path / "cat.png")
    assert (one.shape, one.dtype) == ((1, 3, 8, 12), torch.float32)
    ways = [str(tmp_path / "cat.png"), png(PIXELS), Image.fromarray(PIXELS), PIXELS]
    many = METADATA.prepare([*ways, torch.tensor(PIXELS).permute(2, 0, 1)])
    assert torch.equal(many, one.expand(5, -1, -1, -1))
    assert METADATA.prepare([]).shape == (0, 3, 8, 12)
    gray = Metadata(preprocessing=preset("google", (4, 4), channels=1))
    assert gray.prepare([PIXELS, PIXELS[:, :, 0]]).shape == (2, 1, 4, 4)
    with pytest.raises(DataError, match="image 2: empty file"):
        METADATA.prepare([PIXELS, b""])
    with pytest.raises(DataError, match="file not found: nowhere"):
        METADATA.prepare("nowhere.jpg")
