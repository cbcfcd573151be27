"""State dicts of torchvision load here and vice versa: equal logits."""

import pytest
import torch
from weights import TOLERANCE, difference, random_model, randomize

from vitrail import save
from vitrail.checkpoints import torchvision
from vitrail.checkpoints.files import Checkpoint, LazyTensor, read_file
from vitrail.checkpoints.load import open_reference

peer = pytest.importorskip("torchvision.models.vision_transformer")
pytestmark = pytest.mark.reference

LIMIT = TOLERANCE[torch.float32]


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
def test_state_dict_logits_match(changes, headless, tmp_path):
    theirs = randomize(theirs_of(**changes))
    if headless:
        theirs.heads = torch.nn.Identity()
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    for name in ("vit.pth", "checkpoint.pth"):
        ours = read_here(tmp_path / name, changes.get("num_heads", 4))
        assert bool(ours.config.num_classes) != headless
        assert difference(ours, theirs, size=(24, 24)) <= LIMIT


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


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
@pytest.mark.parametrize("representation", [0, 20])
def test_written_files_give_the_same_logits(suffix, representation, tmp_path):
    ours = random_model(
        "ViT-Mu/8",
        depth=2,
        heads=4,
        mlp_width=48,
        image_size=24,
        num_classes=5,
        representation=representation,
        numerics="torchvision",
    )
    path = tmp_path / f"vit.{suffix}"
    save(ours, path, "torchvision")
    theirs = theirs_of(representation_size=representation or None)
    written = {name: entry.read() for name, entry in read_file(path).tensors.items()}
    theirs.load_state_dict(written, strict=True)
    assert difference(ours, theirs, size=(24, 24)) <= LIMIT
    again = read_here(path, 4)
    assert again.config == ours.config
