"""The logits of transformers, its folders here, and ours there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from weights import TOLERANCE, random_model, randomize, relative, to_peer
from weights import difference as peer_difference

from vitrail import NUMERICS, Preprocessing, save
from vitrail.checkpoints.files import read_file, read_json
from vitrail.checkpoints.load import open_reference
from vitrail.data.preprocessing import preset
from vitrail.inspection.attention import iter_layers
from vitrail.inspection.relevance import rollout
from vitrail.models.config import pair

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.reference, pytest.mark.slow]

LIMIT = TOLERANCE[torch.float32]
DINO = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DINO |= {"image_size": 24, "patch_size": 8}
SMALL = DINO | {"intermediate_size": 48}


def read_here(folder):
    """Load a folder of theirs; return model, metadata and skipped tensors."""
    model, format, changes, _ = open_reference(folder)
    assert format == "huggingface"
    skipped = {name for name, change, _ in changes if change == "skipped"}
    return model.eval(), model.metadata, skipped


def save_there(theirs, folder, *, in_memory=False):
    """Save with their library, or the state dict, which has other names."""
    theirs.save_pretrained(folder)
    if in_memory:
        (folder / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), folder / "pytorch_model.bin")


def read_there(kind, folder, **changes):
    """Load a folder with their library, without missing or unexpected tensors."""
    model, report = getattr(transformers, kind).from_pretrained(
        folder, output_loading_info=True, **changes
    )
    assert not any(report.values()), report
    return model.eval()


def images(config):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, config.channels, *pair(config.image_size), generator=generator)


@torch.no_grad()
def difference(ours, theirs, output="logits", dtype=torch.float32):
    batch = images(ours.config).to(dtype)
    answer = theirs.to(dtype)(batch)
    expected = answer[output] if output != "token" else answer.last_hidden_state[:, 0]
    return relative(ours.to(dtype)(batch), expected)


VITS = {
    "usual": {},
    "no qkv bias": {"qkv_bias": False},
    "tanh": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-6},
    "fast tanh": {"hidden_act": "gelu_fast"},
    "gray": {"num_channels": 1},
    "not square": {"image_size": (16, 24)},
    "oblong patches": {"image_size": (16, 24), "patch_size": (4, 8)},
    "two classes": {"num_labels": 2},
    "eight heads": {"num_attention_heads": 8},
}


@pytest.mark.parametrize("name", VITS)
def test_classifier_logits_match(name, tmp_path):
    changes = {"num_labels": 5} | SMALL | VITS[name]
    theirs = randomize(transformers.ViTForImageClassification(transformers.ViTConfig(**changes)))
    for in_memory in (False, True):
        save_there(theirs, tmp_path, in_memory=in_memory)
        ours, metadata, skipped = read_here(tmp_path)
        assert not skipped
        assert metadata.class_names == ()
        assert ours.config.numerics.norm_eps == theirs.config.layer_norm_eps
        assert difference(ours, theirs) <= LIMIT
    assert difference(ours, theirs, dtype=torch.float64) <= TOLERANCE[torch.float64]
    assert "vit.layers.0.attention.q_proj.weight" in theirs.state_dict()


MASKED = {"vit.embeddings.mask_token", "decoder.0.weight", "decoder.0.bias"}
CLASSES = {  # class of transformers, its arguments and config, its output, what is skipped
    "pooler": ("ViTModel", {}, {}, "pooler_output", set()),
    "small pooler": ("ViTModel", {}, {"pooler_output_size": 20}, "pooler_output", set()),
    "no pooler": ("ViTModel", {"add_pooling_layer": False}, {}, "token", set()),
    "masked image model": ("ViTForMaskedImageModeling", {}, {}, "token", MASKED),
}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_transformers_matches(name, tmp_path):
    kind, arguments, changes, output, expected_skipped = CLASSES[name]
    config = transformers.ViTConfig(**SMALL, **changes)
    theirs = randomize(getattr(transformers, kind)(config, **arguments))
    theirs.save_pretrained(tmp_path)
    ours, _, skipped = read_here(tmp_path)
    if kind == "ViTModel" and not arguments:
        assert ours.config.representation == changes.get("pooler_output_size", 32)
    assert skipped == expected_skipped
    theirs = theirs.vit if kind == "ViTForMaskedImageModeling" else theirs
    assert difference(ours, theirs, output) <= LIMIT


@pytest.mark.parametrize("heads", ["", "WithTeacher"])
def test_deit_in_memory_matches(heads, tmp_path):
    kind = getattr(transformers, f"DeiTForImageClassification{heads}")
    theirs = randomize(kind(transformers.DeiTConfig(**SMALL, num_labels=5)))
    save_there(theirs, tmp_path, in_memory=True)
    ours, _, _ = read_here(tmp_path)
    assert ours.config.distillation == bool(heads)
    assert difference(ours, theirs) <= LIMIT


@pytest.mark.parametrize("kind", ["Dinov2", "Dinov2WithRegisters"])
@pytest.mark.parametrize("swiglu", [False, True])
def test_dinov2_in_memory_matches(kind, swiglu, tmp_path):
    config = getattr(transformers, f"{kind}Config")(**DINO, use_swiglu_ffn=swiglu)
    theirs = randomize(getattr(transformers, f"{kind}Model")(config))
    save_there(theirs, tmp_path, in_memory=True)
    ours, _, skipped = read_here(tmp_path)
    assert skipped == {"embeddings.mask_token"}
    assert ours.config.registers == (4 if kind == "Dinov2WithRegisters" else 0)
    assert difference(ours, theirs, "pooler_output") <= LIMIT


OURS = {
    "usual": {},
    "google": {"numerics": "google"},
    "transformers": {"numerics": "transformers"},
    "no qkv bias": {"qkv_bias": False},
    "gray": {"channels": 1},
    "not square": {"image_size": (16, 24)},
    "oblong patches": {"image_size": (16, 24), "patch_size": (4, 8)},
    "one class": {"num_classes": 1},
    "two classes": {"num_classes": 2},
}


def small(**changes):
    sizes = {"image_size": 24, "patch_size": 8, "num_classes": 5, "numerics": "timm"}
    return random_model("ViT-Mu/8", **{"depth": 2, "heads": 4, **sizes, **changes})


@pytest.mark.parametrize("name", OURS)
def test_written_files_give_the_same_logits(name, tmp_path):
    ours = small(**OURS[name])
    save(ours, tmp_path, "huggingface")
    theirs = read_there("ViTForImageClassification", tmp_path)
    assert theirs.config.layer_norm_eps == ours.config.numerics.norm_eps
    assert difference(ours, theirs) <= LIMIT
    again, _, _ = read_here(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(images(ours.config)), ours(images(ours.config)))


def test_written_files_equal_their_own(tmp_path):
    save(small(), tmp_path / "ours", "huggingface")
    theirs = read_there("ViTForImageClassification", tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (
        read_file(tmp_path / who / "model.safetensors").tensors for who in ("ours", "theirs")
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name].read(), other[name].read()) for name in one)
    ours = read_json(tmp_path / "ours" / "config.json")
    theirs = read_json(tmp_path / "theirs" / "config.json")
    assert ours == {name: theirs[name] for name in ours}
    assert theirs.keys() - ours.keys() == {"dtype", "transformers_version"}


def test_auto_classes_and_headless_models_load_our_folders(tmp_path):
    ours, how = small(), preset("transformers", (24, 24))
    save(ours, tmp_path, "huggingface", class_names=[*"abcde"], preprocessing=how)
    theirs = read_there("AutoModelForImageClassification", tmp_path)
    assert difference(ours, theirs) <= LIMIT
    assert (theirs.config.id2label[3], theirs.config.label2id["d"]) == ("d", 3)
    theirs.save_pretrained(tmp_path)
    assert read_here(tmp_path)[1].class_names == tuple("abcde")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    assert processor.size == {"height": 24, "width": 24}
    ours = small(num_classes=0, representation=20)
    save(ours, tmp_path / "pooler", "huggingface")
    theirs = read_there("ViTModel", tmp_path / "pooler")
    assert difference(ours, theirs, "pooler_output") <= LIMIT
    ours = small(num_classes=0)
    save(ours, tmp_path / "bare", "huggingface")
    theirs = read_there("ViTModel", tmp_path / "bare", add_pooling_layer=False)
    assert difference(ours, theirs, "token") <= LIMIT


PREPARED = {
    "transformers": preset("transformers", (24, 24)),
    "torchvision": preset("torchvision", (24, 24)),
    "timm": preset("timm", (24, 24)),
    "cut": Preprocessing(size=(16, 24), resize_to=(20, 30), mean=(0.1, 0.2, 0.3), std=(1, 2, 3)),
}


@pytest.mark.parametrize("name", PREPARED)
def test_processor_matches_our_preprocessing(name, tmp_path):
    how = PREPARED[name]
    save(small(), tmp_path, "huggingface", preprocessing=how)
    processor = transformers.ViTImageProcessor.from_pretrained(tmp_path)
    assert tuple(processor.image_mean) == how.mean
    assert tuple(processor.image_std) == how.std
    image = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    pixels = processor(image, return_tensors="pt").pixel_values
    assert pixels.shape == (1, 3, *how.size)
    black = (0 - torch.tensor(how.mean)) / torch.tensor(how.std)
    plain = processor(np.zeros((40, 60, 3), np.uint8), return_tensors="pt").pixel_values
    torch.testing.assert_close(plain[0, :, 0, 0], black)
    processor.save_pretrained(tmp_path)
    assert read_here(tmp_path)[1].preprocessing == how


def load(ours):
    """The model of transformers that `ours` describes, with the weights of `ours`."""
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
        assert peer_difference(ours, theirs, call=logits, size=size, dtype=dtype) <= tolerance


@pytest.mark.parametrize("choice", ["gelu", "norm_eps", "position_resize"])
def test_each_numeric_of_transformers_matters(choice):
    google = getattr(NUMERICS["google"], choice)
    numerics = replace(NUMERICS["transformers"], **{choice: google})
    ours = random_model("ViT-Ti/16", depth=1, numerics=numerics)
    error = peer_difference(ours, load(ours), call=logits, size=(96, 320), dtype=torch.float64)
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
