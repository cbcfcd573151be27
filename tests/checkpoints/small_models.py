"""Small models with random weights, for every family and many shapes."""

import torch

from vitrail import BitConfig, MixerConfig, VitConfig
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.load import read_foreign
from vitrail.models.config import pair
from vitrail.models.vit import build

VIT = VitConfig(depth=2, width=8, mlp_width=16, heads=2, patch_size=4, image_size=8, num_classes=3)
FAMILIES = {
    "vit": VIT,
    "mean": VIT.change(pool="mean"),
    "attention pooling": VIT.change(pool="map"),
    "representation": VIT.change(representation=5),
    "no head": VIT.change(num_classes=0),
    "gray": VIT.change(channels=1),
    "not square": VIT.change(image_size=(8, 16)),
    "oblong patches": VIT.change(image_size=(8, 16), patch_size=(4, 8)),
    "distilled": VIT.change(distillation=True),
    "registers": VIT.change(registers=2, layer_scale=0.1, mlp="swiglu"),
    "no qkv bias": VIT.change(qkv_bias=False),
    "sincos": VIT.change(position="sincos-2d", pool="mean"),
    "relative": VIT.change(position="relative"),
    "2-D at every layer": VIT.change(position="learned-2d", position_place="every-layer"),
    "conv stem": VIT.change(stem="conv"),
    "hybrid": VIT.change(stem="resnet", resnet_blocks=(1, 2), patch_size=1, image_size=32),
    "hybrid root": VIT.change(stem="resnet", patch_size=2, image_size=32),
    "bit": BitConfig(blocks=(1, 2), num_classes=3),
    "mixer": MixerConfig(
        depth=2, width=8, tokens_mlp=6, channels_mlp=12, patch_size=4, image_size=8, num_classes=3
    ),
}


def random_model(config, seed=0):
    torch.manual_seed(seed)
    model = build(config, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def random_images(config, count=2):
    """Images of the model's size; small ones for BiT, which accepts any."""
    size = (32, 32) if isinstance(config, BitConfig) else pair(config.image_size)
    return torch.randn(count, config.channels, *size)


def same_weights(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def as_checkpoint(tensors, settings=None):
    lazy = {n: LazyTensor(tuple(t.shape), lambda t=t: t) for n, t in tensors.items()}
    return Checkpoint(lazy, settings or {})


def load_tensors(format, tensors, settings=None):
    model, _, normalized = read_foreign(as_checkpoint(tensors, settings), format)
    return model, normalized.skipped
