"""The logits and attention of transformers' ViT at any image size, and the files it writes."""

from dataclasses import replace

import pytest
import torch
from weights import TOLERANCE, difference, random_model, to_peer

import vitrail
from vitrail import NUMERICS, save
from vitrail.checkpoints.files import read_file, read_json
from vitrail.inspection.attention import iter_layers
from vitrail.inspection.relevance import rollout

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]


def test_written_files_equal_their_own(tmp_path):
    sizes = {"depth": 2, "heads": 4, "image_size": 24, "num_classes": 5, "numerics": "timm"}
    ours = random_model("ViT-Mu/8", **sizes)
    save(ours, tmp_path / "ours", "huggingface", class_names=[*"abcde"])
    theirs, report = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()), report
    assert (theirs.config.id2label[3], theirs.config.label2id["d"]) == ("d", 3)
    theirs.save_pretrained(tmp_path / "theirs")
    assert vitrail.load(tmp_path / "theirs").metadata.class_names == tuple("abcde")
    one, other = (
        read_file(tmp_path / who / "model.safetensors").tensors for who in ("ours", "theirs")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].read(), other[name].read()) for name in one)
    ours = read_json(tmp_path / "ours" / "config.json")
    theirs = read_json(tmp_path / "theirs" / "config.json")
    assert ours == {name: theirs[name] for name in ours}
    assert theirs.keys() - ours.keys() == {"dtype", "transformers_version"}


def load(ours):
    sizes = {"num_hidden_layers": ours.config.depth, "num_attention_heads": ours.config.heads}
    sizes |= {"hidden_size": ours.config.width, "intermediate_size": ours.config.mlp_width}
    config = transformers.ViTConfig(**sizes, num_labels=ours.config.num_classes)
    model, report = transformers.ViTForImageClassification.from_pretrained(
        None, config=config, state_dict=to_peer(ours, "huggingface"), output_loading_info=True
    )
    assert not any(report.values()), report
    return model


def logits(model, images):
    return model(images, interpolate_pos_encoding=True).logits


@pytest.mark.parametrize(
    ("depth", "size"), [(12, (224, 224)), (2, (384, 384)), (2, (112, 448)), (2, (96, 320))], ids=str
)
def test_logits_match_at_any_image_size(depth, size):
    ours = random_model("ViT-Ti/16", depth=depth, numerics="transformers")
    theirs = load(ours)
    for dtype, tolerance in TOLERANCE.items():
        assert difference(ours, theirs, call=logits, size=size, dtype=dtype) <= tolerance


@pytest.mark.parametrize("choice", ["gelu", "norm_eps", "position_resize"])
def test_each_numeric_of_transformers_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["transformers"], **{choice: google})
    ours = random_model("ViT-Ti/16", depth=1, numerics=numerics)
    error = difference(ours, load(ours), call=logits, size=(96, 320), dtype=torch.float64)
    assert error > TOLERANCE[torch.float64]


ATTENTION = 1e-6  # tolerance of attention, which is 0 to 1


@torch.no_grad()
def both_attentions(size, dtype=torch.float32):
    """Our model, images, and what the model of transformers attends to with the same weights."""
    ours = random_model("ViT-Ti/16", depth=3, numerics="transformers").to(dtype)
    theirs = load(ours).to(dtype).eval()
    theirs.set_attn_implementation("eager")  # its fused attention outputs no maps
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = theirs(images, output_attentions=True, interpolate_pos_encoding=True).attentions
    assert len(expected) == 3
    return ours, images, expected


@pytest.mark.parametrize("size", [(224, 224), (112, 448), (96, 160)], ids=str)
@torch.no_grad()
def test_attention_maps_match(size, dtype):
    ours, images, expected = both_attentions(size, dtype)
    for map_, their in zip(ours.attention_maps(images), expected, strict=True):
        assert map_.shape == their.shape
        assert their.max() > 0.05
        assert (map_ - their).abs().max() <= ATTENTION
    for layer, their in zip(iter_layers(ours, images), expected, strict=True):
        for some, rows in layer.slices():
            map_ = layer.weights(some, rows)
            assert (map_ - their[some, :, rows]).abs().max() <= ATTENTION


@torch.no_grad()
def test_rollout_matches():
    ours, images, expected = both_attentions((96, 160))
    product = torch.eye(61, dtype=torch.float64)
    for attention in expected:
        layer = attention.double().mean(dim=1) + torch.eye(61)
        product = layer / layer.sum(dim=-1, keepdim=True) @ product
    row = product[:, 0, 1:].unflatten(1, (6, 10))
    error = rollout(ours, images) - row / row.amax(dim=(1, 2), keepdim=True)
    assert error.abs().max() <= ATTENTION
