"""torchvision's logits, and its state dicts in both directions."""

import pytest
import torch
from weights import TOLERANCE, difference, random_model, randomize, to_peer

from tiny_runs import equal
from vitrail import save
from vitrail.checkpoints import torchvision
from vitrail.checkpoints.files import Checkpoint, LazyTensor, read_file
from vitrail.checkpoints.load import open_reference

peer = pytest.importorskip("torchvision.models.vision_transformer")
pytestmark = pytest.mark.reference


def load(ours, weights, image_size):
    model = peer.VisionTransformer(
        image_size=image_size,
        patch_size=16,
        num_layers=ours.config.depth,
        num_heads=ours.config.heads,
        hidden_dim=ours.config.width,
        mlp_dim=ours.config.mlp_width,
        num_classes=ours.config.num_classes,
        representation_size=ours.config.representation or None,
    ).to(ours.head.weight.dtype)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize(
    ("side", "changes"),
    [(224, {}), (224, {"depth": 2, "representation": 64}), (96, {"depth": 2}), (384, {"depth": 2})],
    ids=str,
)
def test_logits_match_at_any_image_size(side, changes, dtype):
    ours = random_model("ViT-Ti/16", **changes, numerics="torchvision").to(dtype)
    weights = peer.interpolate_embeddings(side, 16, to_peer(ours, "torchvision"))
    theirs = load(ours, weights, image_size=side)
    assert difference(ours, theirs, size=(side, side), dtype=dtype) <= TOLERANCE[dtype]


def theirs_of(**changes):
    sizes = {"image_size": 24, "patch_size": 8, "num_layers": 2, "num_heads": 4}
    widths = {"hidden_dim": 32, "mlp_dim": 48, "num_classes": 5}
    return peer.VisionTransformer(**{**sizes, **widths, **changes}).eval()


def read_here(path, heads):
    model, format, _, _ = open_reference(path, heads=heads)
    assert format == "torchvision"
    return model.eval()


@pytest.mark.parametrize(
    ("changes", "headless"),
    [({}, False), ({"representation_size": 20}, False), ({"num_heads": 8}, False), ({}, True)],
)
def test_state_dicts_round_trip(changes, headless, tmp_path):
    theirs = randomize(theirs_of(**changes))
    if headless:
        theirs.heads = torch.nn.Identity()
    heads = changes.get("num_heads", 4)
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    for name in ("vit.pth", "checkpoint.pth"):
        ours = read_here(tmp_path / name, heads)
        assert bool(ours.config.num_classes) != headless
        assert difference(ours, theirs) <= TOLERANCE[torch.float32]
    for name in () if headless else ("ours.pth", "ours.safetensors"):
        save(ours, tmp_path / name, "torchvision")
        written = {key: entry.read() for key, entry in read_file(tmp_path / name).tensors.items()}
        assert equal(written, theirs.state_dict())
        assert read_here(tmp_path / name, heads).config == ours.config


@pytest.mark.parametrize("name", ["vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14"])
def test_default_heads_of_named_models(name):
    with torch.device("meta"):
        theirs = getattr(peer, name)()
    shapes = {
        name: LazyTensor(tuple(t.shape), torch.empty) for name, t in theirs.state_dict().items()
    }
    config = torchvision.VIT.infer_config(Checkpoint(shapes))
    assert config.heads == theirs.encoder.layers[0].num_heads
    assert config.image_size == theirs.image_size
    assert config.patch_size == theirs.patch_size
