"""Maps of classes, and rollout: against dense computations through all layers at once."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_attention import SHAPES as ATTENTION_SHAPES
from test_attention import TOLERANCE, all_maps, close, random_images, random_vit

from tiny_models import random_model
from vitrail import BiT, BitConfig, ConfigError, DataError, MixerConfig, MlpMixer, VitConfig
from vitrail.inspection import attention as chunks
from vitrail.inspection import relevance as module
from vitrail.inspection.relevance import METHODS, gradient_rollout, relevance, rollout
from vitrail.models import attention, pooling
from vitrail.models.registry import name_of

SHAPES = ATTENTION_SHAPES | {
    "representation": {"representation": 5},
    "relative, shared": {"position": "relative", "position_place": "shared", "pool": "mean"},
    "no bias, layer scale": {"qkv_bias": False, "layer_scale": 0.1},
    "dropout": {"dropout": 0.5, "drop_path": 0.5, "patch_dropout": 0.5},
}
METHODS_BY_CLASS = {"gradient rollout": gradient_rollout, "relevance": relevance}


def vit(**changes):
    """A ViT of three blocks in float64, every weight random."""
    sizes = {"width": 8, "mlp_width": 16, "heads": 2, "patch_size": 4, "image_size": 12}
    config = VitConfig(depth=3, num_classes=4, **sizes).change(**changes)
    return random_model(config).double()


def dense(model, images, classes, monkeypatch):
    """Every layer's map (B, N, N), first layer first, and the row that is read (B, N).

    The model's own forward pass with attention written out, and one backward pass through it all.
    """
    maps = []

    def written_out(query, key, value, attn_mask=None):
        scores = query @ key.mT / query.shape[-1] ** 0.5
        maps.append((scores if attn_mask is None else scores + attn_mask).softmax(dim=-1))
        maps[-1].retain_grad()
        return maps[-1] @ value

    expected = model(images)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", written_out)
        # compute keys and values in all layers
        patch.setattr(attention, "is_plain_linear", lambda layer: False)
        patch.setattr(pooling, "is_plain_linear", lambda layer: False)
        logits = model(images)
    torch.testing.assert_close(logits, expected)
    logits[torch.arange(len(images)), classes].sum().backward()
    config = model.config
    layers = []
    for found in maps[: config.depth]:
        seen = (found.grad * found).clamp(min=0).mean(dim=1).detach()
        tokens = seen.shape[-1]
        layers.append(F.pad(seen, (0, 0, 0, tokens - seen.shape[1])))  # the last reads few
    row = images.new_zeros(len(images), tokens)
    if config.pool == "map":
        row[:, config.num_prefix :] = maps[-1].detach().mean(dim=1)[:, 0]
    elif config.pool == "mean":
        row[:, config.num_prefix :] = 1 / (tokens - config.num_prefix)
    else:
        row[:, : config.num_class_tokens] = 1 / config.num_class_tokens
    model.zero_grad()
    return layers, row


def reference(name, model, images, classes, monkeypatch):
    layers, row = dense(model, images, classes, monkeypatch)
    identity = torch.eye(row.shape[1], dtype=row.dtype).expand(len(images), -1, -1)
    product = identity
    for seen in layers:
        if name == "relevance":
            product = product + seen @ product
        else:
            seen = seen + identity
            product = seen / seen.sum(dim=-1, keepdim=True) @ product
    patches = torch.einsum("bn,bnm->bm", row, product)[:, model.config.num_prefix :]
    down, across = model.config.stride
    patches = patches / patches.amax(dim=1, keepdim=True)
    return patches.unflatten(1, (images.shape[2] // down, images.shape[3] // across))


@pytest.mark.parametrize("method", METHODS_BY_CLASS)
@pytest.mark.parametrize("shape", SHAPES)
def test_maps_equal_a_dense_computation_through_all_layers(shape, method, monkeypatch):
    model = vit(**SHAPES[shape])
    images, classes = random_images(model, 2), torch.tensor([3, 1])
    if shape == "registers":  # of another size than the model's
        images = torch.randn(2, 3, 16, 8, dtype=torch.float64)
    found = METHODS_BY_CLASS[method](model, images, classes)
    expected = reference(method, model, images, classes, monkeypatch)
    assert expected.std() > 1e-4
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not found.requires_grad
    monkeypatch.setattr(module, "BATCH_VALUES", 1)  # one image at a time
    torch.testing.assert_close(METHODS_BY_CLASS[method](model, images, classes), expected)


@pytest.mark.parametrize("method", METHODS_BY_CLASS)
def test_classes_default_to_the_predicted_ones(method):
    model = vit(distillation=True)
    images = random_images(model, 4)
    predicted = model(images).argmax(dim=1)
    other = METHODS_BY_CLASS[method](model, images, (predicted + 1) % 4)
    found = METHODS_BY_CLASS[method](model, images)
    assert torch.equal(found, METHODS_BY_CLASS[method](model, images, predicted))
    assert not torch.allclose(found, other)


@pytest.mark.parametrize("name", METHODS)
def test_model_is_not_changed(name):
    model = vit(dropout=0.5).train()
    model.encoder.blocks[1].eval()
    model.head.weight.requires_grad_(False)
    modes = [module.training for module in model.modules()]
    wanted = [weight.requires_grad for weight in model.parameters()]
    values = {key: value.clone() for key, value in model.state_dict().items()}
    images = random_images(model, 2)
    METHODS[name](model, images, torch.tensor([0, 1]))
    assert [module.training for module in model.modules()] == modes
    assert [weight.requires_grad for weight in model.parameters()] == wanted
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(value, values[key]) for key, value in model.state_dict().items())
    assert not images.requires_grad


@pytest.mark.parametrize("method", METHODS_BY_CLASS)
def test_frozen_weights_and_grad_modes_do_not_matter(method):
    model = vit()
    images = random_images(model, 2)
    expected = METHODS_BY_CLASS[method](model, images)
    with torch.no_grad():
        assert torch.equal(METHODS_BY_CLASS[method](model, images), expected)
    with torch.inference_mode():
        assert torch.equal(METHODS_BY_CLASS[method](model, images.clone()), expected)
    model.requires_grad_(False)
    assert torch.equal(METHODS_BY_CLASS[method](model, images), expected)


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_last_layer_is_its_attention(pool):
    model = vit(pool=pool, registers=1)
    images = random_images(model, 2)
    with torch.no_grad():
        *_, seen = model.attention_maps(images)
        prefix = model.config.num_prefix
        seen = seen.mean(dim=1)[:, :, prefix:]
        match pool:
            case "cls":
                row = seen[:, 0]
            case "mean":
                row = seen[:, prefix:].mean(dim=1)
            case "map":
                weights = model.pool.attention_map(model.encode(images)).mean(dim=1)
                row = (weights @ seen[:, prefix:])[:, 0]
    expected = (row / row.amax(dim=1, keepdim=True)).unflatten(1, (3, 3))
    torch.testing.assert_close(METHODS["last layer"](model, images, None), expected)


def test_random_map_is_deterministic_and_differs_between_images():
    model = vit()
    images = random_images(model, 2)
    state = torch.random.get_rng_state()
    one = METHODS["random"](model, images, None)
    assert torch.equal(one, METHODS["random"](model, images, None))
    assert not torch.equal(one[0], one[1])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("name", METHODS)
def test_model_without_attention(name):
    sizes = {"width": 8, "tokens_mlp": 8, "channels_mlp": 8, "patch_size": 4, "image_size": 8}
    mixer = MixerConfig(depth=1, num_classes=3, **sizes)
    for model in (BiT(BitConfig(blocks=(1,), num_classes=3)), MlpMixer(mixer)):
        words = f"^{re.escape(name_of(model.config))} has no attention.*filters"
        with pytest.raises(ConfigError, match=words):
            METHODS[name](model, torch.zeros(1, 3, 8, 8), None)


def test_invalid_classes_and_zero_heads():
    model = vit()
    images = random_images(model, 2)
    with pytest.raises(ConfigError, match="the model has classes 0 to 3"):
        relevance(model, images, torch.tensor([0, 4]))
    with pytest.raises(ConfigError, match="one integer for each"):
        relevance(model, images, torch.tensor([0]))
    with pytest.raises(ConfigError, match="no head"):
        relevance(vit(num_classes=0), images)
    torch.nn.init.zeros_(model.head.weight)
    assert torch.equal(relevance(model, images), torch.zeros(2, 3, 3).double())


FUSES = {"mean": np.mean, "max": np.max, "min": np.min}


def by_hand(model, images, fuse="mean", discard=0.0):
    """Rollout of one image after another, in loops."""
    config = model.config
    maps = all_maps(model, images)
    high, wide = images.shape[2] // config.stride[0], images.shape[3] // config.stride[1]
    results = []
    for place in range(len(images)):
        product = np.eye(maps.shape[-1])
        for layer in maps[:, place]:
            fused = FUSES[fuse](layer, axis=0)
            lowest = np.argsort(fused, axis=None)[: int(discard * fused.size)]
            for row, column in zip(*np.unravel_index(lowest, fused.shape), strict=True):
                if column >= config.num_class_tokens:
                    fused[row, column] = 0
            fused = fused + np.eye(len(fused))
            fused = np.array([row / row.sum() for row in fused])
            product = fused @ product
        patches = product[:, config.num_prefix :]
        if config.pool == "cls":
            row = patches[:2].mean(0) if config.distillation else patches[0]
        elif config.pool == "mean":
            row = patches[config.num_prefix :].mean(0)
        else:
            with torch.no_grad():
                weights = model.pool.attention_map(model.encode(images))[place, :, 0].double()
            row = FUSES[fuse](weights.numpy(), axis=0) @ patches[config.num_prefix :]
        results.append(row.reshape(high, wide) / row.max())
    return np.stack(results)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", ATTENTION_SHAPES)
def test_rollout_is_the_product_of_the_layers(shape, dtype):
    model = random_vit(dtype=dtype, **SHAPES[shape])
    images = random_images(model)
    if shape == "class token":  # of another size than the model's
        images = torch.randn(2, 3, 8, 28, dtype=dtype)
    found = rollout(model, images)
    assert found.dtype == dtype
    assert found.std(dim=(1, 2)).min() > 0
    close(found, by_hand(model, images), dtype)


@pytest.mark.parametrize("fuse", FUSES)
@pytest.mark.parametrize("discard", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", ["oblong", "distillation, registers", "mean, registers", "map"])
def test_heads_are_fused_and_the_lowest_values_discarded(shape, fuse, discard):
    model = random_vit(**SHAPES[shape])
    images = random_images(model, count=2)
    expected = by_hand(model, images, fuse, discard)
    close(rollout(model, images, fuse=fuse, discard=discard), expected)


@pytest.mark.parametrize("shape", ["class token", "relative", "mean"])
def test_chunk_and_batch_sizes_do_not_matter(shape, monkeypatch):
    model = random_vit(**SHAPES[shape])
    images = random_images(model, count=5)
    whole = rollout(model, images, discard=0.5)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 2000)  # a few rows
    monkeypatch.setattr(module, "PRODUCT_BYTES", 2 * model.config.num_tokens**2 * 8)  # two images
    close(rollout(model, images, discard=0.5), whole.numpy())


def test_constant_map_is_not_scaled():
    """Tokens that attend to themselves only."""
    model = random_vit(position="relative", pool="mean", image_size=(8, 20))
    for block, position in zip(model.encoder.blocks, model.encoder.positions, strict=True):
        torch.nn.init.zeros_(block.attention.qkv.weight)
        torch.nn.init.constant_(block.attention.qkv.bias, 100.0)
        torch.nn.init.zeros_(position.table)
        torch.nn.init.constant_(position.table[position.patches - 1], 100.0)  # offset 0
    found = rollout(model, random_images(model))
    assert torch.equal(found, torch.full_like(found, 0.1))  # ten patches


def test_invalid_settings():
    model = random_vit()
    with pytest.raises(ConfigError, match="unknown fuse 'maximum'; known: mean, max, min"):
        rollout(model, random_images(model), fuse="maximum")
    for discard in (1.0, -0.1):
        with pytest.raises(ConfigError, match=f"discard={discard} is a fraction of attention"):
            rollout(model, random_images(model), discard=discard)
    with pytest.raises(DataError, match="whole number"):
        rollout(model, torch.zeros(1, 3, 2, 2, dtype=torch.float64))
