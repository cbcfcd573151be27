"""Round trips through every pair of formats are bit-exact if the formats support the model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import FAMILIES, VIT, random_images, random_model, same_weights

from vitrail import CheckpointError, VitConfig, load, save
from vitrail.checkpoints.rules import unsupported_numerics
from vitrail.checkpoints.save import list_losses
from vitrail.models.vit import build

pytestmark = pytest.mark.slow

FILES = {"bundle": "model", "google": "model.npz", "google-older": "model.npz", "timm": "model"}
FILES |= {"huggingface": "model", "torchvision": "model.pth"}


def through(model, format, folder, heads=None):
    """Save and load the model in a format; torchvision's files do not state unusual heads."""
    folder.mkdir(parents=True, exist_ok=True)
    save(model, folder / FILES[format], format)
    hint = {"heads": heads} if heads and format == "torchvision" else {}
    return load(folder / FILES[format], log=lambda line: None, **hint).eval()


def pairs():
    """Every family with every pair of formats that support it."""
    for name, config in FAMILIES.items():
        if isinstance(config, VitConfig):  # heads of usual width, which files need not state
            config = config.change(width=64, heads=1)
        for first in FILES:
            for second in FILES:
                peers = {first, second} & {"timm", "torchvision"}
                suited = config.change(numerics="timm") if peers else config
                if supports(first, suited) and supports(second, suited):
                    yield pytest.param(suited, first, second, id=f"{name}, {first}, {second}")


def supports(format, config):
    try:
        return not list_losses(build(config), format, Path(FILES[format]))
    except CheckpointError:
        return False  # no models of this family


SUPPORTED = {
    "google": {
        *("vit", "mean", "attention pooling", "representation", "no head", "gray"),
        *("oblong patches", "hybrid", "hybrid root", "bit", "mixer"),
    },
    "timm": {
        *("vit", "mean", "attention pooling", "no head", "gray", "not square", "oblong patches"),
        *("distilled", "registers", "no qkv bias", "hybrid root"),
    },
    "huggingface": {
        *("vit", "mean", "no head", "gray", "not square", "oblong patches", "no qkv bias"),
        "distilled",
    },
    "torchvision": {"vit", "representation"},
}


@pytest.mark.parametrize("format", SUPPORTED)
def test_families_that_a_format_supports(format):
    def suited(config):
        numerics = "timm" if format in ("timm", "torchvision") else config.numerics
        return config.change(numerics=numerics)

    families = {name for name, config in FAMILIES.items() if supports(format, suited(config))}
    assert families == SUPPORTED[format]


@pytest.mark.parametrize(("config", "first", "second"), [*pairs()])
def test_every_pair_of_formats_is_bit_exact(tmp_path, config, first, second):
    model = random_model(config)
    middle = through(model, first, tmp_path / "one")
    last = through(middle, second, tmp_path / "two")
    assert same_weights(last, model)
    if first == second == "bundle":
        assert last.config == config
    images = random_images(model.config)
    with torch.no_grad():
        assert torch.equal(last(images), model(images))


# Changes that leave a ViT that every library has.
PLAIN = {"position": "learned", "pool": "cls", "distillation": False, "registers": 0}
PLAIN |= {"layer_scale": None, "mlp": "gelu", "representation": 0}


@st.composite
def vits(draw):
    heads = draw(st.integers(1, 3))
    pool = draw(st.sampled_from(["cls", "mean", "map"]))
    patch = draw(st.sampled_from([2, 4, (2, 4)]))
    down, across = (patch, patch) if isinstance(patch, int) else patch
    height, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    position = draw(st.sampled_from(["learned", "learned", "learned", "sincos-2d", "relative"]))
    distilled = pool == "cls" and draw(st.booleans())
    return VIT.change(
        depth=draw(st.sampled_from([1, 2, 11])),  # also two digits
        heads=heads,
        width=heads * draw(st.sampled_from([4, 8])),
        mlp_width=draw(st.integers(1, 20)),
        patch_size=patch,
        image_size=(height * down, width * across),
        channels=draw(st.integers(1, 4)),
        num_classes=draw(st.integers(0, 5)),
        pool=pool,
        position=position,
        distillation=distilled,
        representation=0 if distilled else draw(st.sampled_from([0, 0, 6])),
        registers=draw(st.sampled_from([0, 0, 2])),
        layer_scale=draw(st.sampled_from([None, 0.1])),
        qkv_bias=draw(st.booleans()),
        mlp=draw(st.sampled_from(["gelu", "gelu", "swiglu"])),
        numerics=draw(st.sampled_from(["google", "timm", "transformers", "torchvision"])),
    )


# Changes that make a random ViT one that the format supports.
SUITED = {"bundle": {}, "google": PLAIN | {"numerics": "google"}}
SUITED["google-older"] = SUITED["google"]
SUITED["timm"] = {"position": "learned", "representation": 0, "numerics": "timm"}
SUITED["huggingface"] = PLAIN | {"numerics": "transformers", "dropout": 0.1}
SUITED["torchvision"] = PLAIN | {"numerics": "torchvision", "qkv_bias": True, "channels": 3}
SUITED["torchvision"] |= {"image_size": 6, "patch_size": 2, "num_classes": 4}


@settings(max_examples=200, deadline=None)
@given(config=vits(), format=st.sampled_from(sorted(FILES)), suited=st.booleans())
def test_random_models_round_trip(tmp_path_factory, config, format, suited):
    config = config.change(**SUITED[format]) if suited else config
    model = random_model(config)
    folder = tmp_path_factory.mktemp("trip")
    if list_losses(model, format, Path(FILES[format])):
        with pytest.raises(CheckpointError, match="cannot express"):
            save(model, folder / FILES[format], format)
        assert list(folder.iterdir()) == []
        return
    loaded = through(model, format, folder, heads=config.heads)
    assert same_weights(loaded, model)
    assert unsupported_numerics(loaded.config, model.config.numerics) == []
    if suited:
        assert loaded.config == config
    images = random_images(config)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize(
    "name", ["vit-token", "vit-prelogits", "vit-gap", "hybrid", "mixer", "bit"]
)
def test_golden_files_round_trip_through_a_bundle(golden, tmp_path, name):
    save(load(golden / f"{name}.npz"), tmp_path / "bundle")
    save(load(tmp_path / "bundle"), tmp_path / "again.npz", "google")
    before, after = np.load(golden / f"{name}.npz"), np.load(tmp_path / "again.npz")
    assert sorted(before.files) == sorted(after.files)
    for key in before.files:
        assert before[key].dtype == after[key].dtype
        assert np.array_equal(before[key], after[key])
