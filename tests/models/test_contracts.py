"""Contracts that hold for every named model and every option.

Shapes are checked at full size on the meta device, values on tiny copies of each architecture.
"""

import copy
import shutil

import pytest
import torch
from torch.nn import functional

from tiny_models import awake
from vitrail import BitConfig, DataError, VitConfig, create
from vitrail.models.config import Numerics
from vitrail.models.registry import CONFIGURATIONS

pytestmark = pytest.mark.slow


def tiny_copy(config):
    """The same architecture with the smallest sizes that keep its structure."""
    if isinstance(config, BitConfig):
        return config.change(blocks=(1, 1, 1, 1), width_factor=1, num_classes=3)
    small = {"depth": 2, "width": 16, "num_classes": 3}
    if isinstance(config, VitConfig):
        stride = config.stride[0]
        small |= {"mlp_width": 24, "heads": 2, "image_size": 2 * stride}
        small |= {"resnet_blocks": (1,) * len(config.resnet_blocks)}
    else:
        small |= {"tokens_mlp": 6, "channels_mlp": 10, "image_size": 2 * config.patch_size}
    return config.change(**small)


# Equal tiny copies of different models are tested once.
TINY = {}
for name in ("ViT-B/16", "R50+ViT-B/16", *CONFIGURATIONS):
    if (small := tiny_copy(CONFIGURATIONS[name])) not in TINY.values():
        TINY[name] = small
AXIAL, DROP = {"attention": "axial", "pool": "map"}, {"dropout": 0.1, "drop_path": 0.1}
VARIANTS = {
    "mean": {"pool": "mean"},
    "map": {"pool": "map"},
    "representation": {"representation": 6},
    "registers": {"registers": 3},
    "distillation": {"distillation": True},
    "layer scale": {"layer_scale": 0.1},
    "no qkv bias": {"qkv_bias": False},
    "swiglu": {"mlp": "swiglu"},
    "gray": {"channels": 1},
    "not square": {"image_size": (8, 24), "patch_size": (4, 8)},
    "conv stem": {"stem": "conv"},
    "no position": {"position": "none"},
    "1-D, every layer": {"position_place": "every-layer"},
    "1-D, shared": {"position_place": "shared"},
    "2-D": {"position": "learned-2d"},
    "2-D, every layer": {"position": "learned-2d", "position_place": "every-layer"},
    "2-D, shared": {"position": "learned-2d", "position_place": "shared"},
    "relative": {"position": "relative"},
    "relative, shared": {"position": "relative", "position_place": "shared"},
    "relative, mean": {"position": "relative", "pool": "mean"},
    "relative, registers": {"position": "relative", "registers": 2},
    "sines": {"position": "sincos-2d"},
    "rotary": {"position": "rotary"},
    "rotary, map": {"position": "rotary", "pool": "map", "image_size": (8, 12)},
    "DINOv3": {"position": "rotary", "registers": 2, "layer_scale": 0.1, "key_bias": False},
    "no key bias": {"key_bias": False},
    "CLIP": {"pre_norm": True, "numerics": Numerics(gelu="quick", norm_eps=1e-5)},
    "rms norm, qk norm": {"norm": "rmsnorm", "qk_norm": True},
    "qk norm, rotary": {"qk_norm": True, "position": "rotary"},
    "class token and mean": {"pool": "cls+mean"},
    "class token, mean": {"pool": "mean", "class_token": True},
    "axial": {"attention": "axial", "pool": "mean", "image_size": (8, 12)},
    "axial, every layer, map": AXIAL | {"image_size": (12, 8), "position_place": "every-layer"},
    "everything": DROP
    | {"registers": 2, "distillation": True, "layer_scale": 0.1, "mlp": "swiglu"},
}
BASE = TINY["ViT-B/16"].change(patch_size=4, image_size=8, width=16)
TINY |= {name: BASE.change(**changes) for name, changes in VARIANTS.items()}


def make_images(config, count=2):
    size = config.image_size
    size = (size, size) if isinstance(size, int) else size
    if isinstance(config, BitConfig):
        size = (64, 64)
    return torch.randn(count, config.channels, *size)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_output_shapes(name):
    config = CONFIGURATIONS[name]
    with torch.device("meta"):
        model, images = create(name), make_images(config)
        assert model(images).shape == (2, 1000)
        assert model.features(images).shape == (2, config.num_features)
        tokens = model.tokens(images)
        layers = list(model.layers(images))
        if isinstance(config, VitConfig):
            shapes = {each.shape for each in model.attention_maps(images, heads=[0, 1])}
            assert shapes == {(2, 2, config.num_tokens, config.num_tokens)}
    if isinstance(config, BitConfig):
        assert len(layers) == sum(config.blocks)
    else:
        assert tokens.shape == (2, config.num_tokens, config.width)
        assert [layer.shape for layer in layers] == [tokens.shape] * config.depth


@pytest.mark.parametrize("name", TINY)
def test_every_parameter_gets_a_gradient(name):
    model, images = awake(TINY[name]).train(), make_images(TINY[name])
    functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    # The bias of the keys cancels in the softmax, so its gradient is rounding noise, not None.
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("name", TINY)
def test_forward_without_head_returns_features(name):
    config = (TINY[name] if name != "everything" else BASE).change(num_classes=0)
    model, images = awake(config), make_images(config)
    assert torch.equal(model(images), model.features(images))
    assert model.features(images).shape == (2, config.num_features)


@pytest.mark.parametrize("name", [n for n, c in TINY.items() if isinstance(c, VitConfig)])
def test_layers_and_attention_maps_match_the_forward_pass(name):
    model, images = awake(TINY[name]), make_images(TINY[name])
    *_, last = model.layers(images)
    torch.testing.assert_close(model.encoder.norm(last), model.encode(images))
    tokens, grid = model.prepare_tokens(images)
    for index, (block, weights) in enumerate(
        zip(model.encoder.blocks, model.attention_maps(images), strict=True)
    ):
        inputs, relative = model.encoder.layer_inputs(index, tokens, grid)
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]))
        attention, normed = block.attention, block.norm1(inputs)
        _, _, value = attention.query_key_value(normed)
        mixed = attention.merge((weights @ value).transpose(1, 2).flatten(2))
        torch.testing.assert_close(mixed, attention(normed, relative), atol=1e-5, rtol=1e-5)
        one_head = attention.attention_map(normed, relative, heads=[1])
        torch.testing.assert_close(one_head, weights[:, [1]])
        tokens = block(inputs, relative)


@pytest.mark.parametrize("name", TINY)
def test_state_dict_is_complete(name):
    model, images = awake(TINY[name]), make_images(TINY[name])
    other = awake(TINY[name], seed=1)
    assert not torch.equal(other(images), model(images))
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    assert torch.equal(other(images), model(images))
    assert list(model.buffers()) == []  # nothing but weights: a meta copy loses nothing


KINDS = ("ViT-B/16", "R50+ViT-B/16", "BiT-R50x1", "AxialResNet-50x1", "Mixer-S/16", "relative")
KINDS += ("axial", "everything")


@pytest.mark.parametrize("name", KINDS)
def test_models_compile_without_graph_breaks(name):
    model, images = awake(TINY[name]), make_images(TINY[name])
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's own compiler needs g++")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch warns of itself
def test_inductor_matches_eager(tiny):
    model, images = awake(tiny), make_images(tiny)
    torch.compiler.reset()
    with torch.no_grad():
        found = torch.compile(model)(images)
        torch.testing.assert_close(found, model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_checkpointing_recomputes_blocks_and_keeps_gradients(name):
    model, images = awake(TINY[name]).train(), make_images(TINY[name])
    first = ("encoder.blocks.0", "blocks.0", "stages.0.0")
    block = next(module for name, module in model.named_modules() if name in first)
    calls, grads = [], []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    for model.checkpointing in (False, True):
        calls.clear()
        model.zero_grad()
        torch.manual_seed(0)
        model(images).square().sum().backward()
        assert len(calls) == 1 + model.checkpointing
        grads.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.rand(2, 1, 8, 8), r"shape \(2, 1, 8, 8\) does not fit a model of 3 channels"),
        (torch.rand(3, 8, 8), r"3, height, width\); add a batch dimension: image\[None\]$"),
        (torch.rand(8, 8, 3), r"expected \(images, 3, height, width\)$"),
        (torch.rand(2, 3, 8, 9), "images of 8x9 pixels are not a whole number of 4-pixel"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "torch.uint8 is not normalized"),
    ],
)
def test_invalid_batches_raise_data_error(tiny, images, message):
    with pytest.raises(DataError, match=message):
        awake(tiny)(images)


def test_mixer_rejects_other_image_sizes():
    config = TINY["Mixer-S/16"]
    with pytest.raises(DataError, match="tied to image_size=32"):
        awake(config)(torch.rand(1, 3, 48, 48))
