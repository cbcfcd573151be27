"""State dicts of torchvision load here and vice versa: equal logits."""

from dataclasses import replace

import pytest
import torch
from weights import TOLERANCE, difference, random_model, randomize

from vitrail import CheckpointError
from vitrail.checkpoints import torchvision
from vitrail.checkpoints.files import Checkpoint, LazyTensor, read_file, write_file
from vitrail.checkpoints.rules import read, write

peer = pytest.importorskip("torchvision.models.vision_transformer")
pytestmark = pytest.mark.reference

LIMIT = TOLERANCE[torch.float32]


def theirs_of(**changes):
    sizes = {"image_size": 24, "patch_size": 8, "num_layers": 2, "num_heads": 4}
    widths = {"hidden_dim": 32, "mlp_dim": 48, "num_classes": 5}
    return peer.VisionTransformer(**{**sizes, **widths, **changes}).eval()


def read_here(path, heads):
    weights = torchvision.normalize(replace(read_file(path), settings={"heads": heads}))
    assert torchvision.VIT.matches(weights.tensors)
    config = torchvision.VIT.infer_config(weights)
    return read(weights.tensors, torchvision.VIT.rules(config), config).eval()


@pytest.mark.parametrize("representation", [None, 20])
@pytest.mark.parametrize("heads", [4, 8])
def test_state_dict_logits_match(representation, heads, tmp_path):
    theirs = randomize(theirs_of(representation_size=representation, num_heads=heads))
    torch.save(theirs.state_dict(), tmp_path / "vit.pth")
    ours = read_here(tmp_path / "vit.pth", heads)
    assert difference(ours, theirs, size=(24, 24)) <= LIMIT


@pytest.mark.parametrize("headless", [False, True])
def test_training_checkpoint_and_headless_file_match(headless, tmp_path):
    theirs = randomize(theirs_of())
    if headless:
        theirs.heads = torch.nn.Identity()
    torch.save({"model": theirs.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pth")
    ours = read_here(tmp_path / "checkpoint.pth", 4)
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
    assert torchvision.VIT.unsupported(ours.config) == []
    path = tmp_path / f"vit.{suffix}"
    write_file(path, write(ours, torchvision.VIT.rules(ours.config)), None)
    theirs = theirs_of(representation_size=representation or None)
    written = {name: entry.read() for name, entry in read_file(path).tensors.items()}
    theirs.load_state_dict(written, strict=True)
    assert difference(ours, theirs, size=(24, 24)) <= LIMIT
    again = read_here(path, 4)
    assert again.config == ours.config


def test_conv_stem_raises(tmp_path):
    stem = [peer.ConvStemConfig(8, 3, 2), peer.ConvStemConfig(8, 3, 4)]
    torch.save(theirs_of(conv_stem_configs=stem).state_dict(), tmp_path / "vit.pth")
    with pytest.raises(CheckpointError, match="convolutional stem"):
        read_here(tmp_path / "vit.pth", 4)
