"""Attention statistics, against plain sums over maps that are all held at once."""

import math

import numpy as np
import pytest
import torch

from tiny_models import awake
from vitrail import DataError, VitConfig
from vitrail.inspection import attention
from vitrail.inspection.attention import attention_for_browser, attention_stats, iter_layers
from vitrail.inspection.relevance import rollout
from vitrail.models.attention import SelfAttention
from vitrail.models.config import pair

pytestmark = pytest.mark.slow

BASE = VitConfig(
    depth=3, width=24, mlp_width=32, heads=3, patch_size=4, image_size=16, num_classes=5
)
SHAPES = {
    "class token": {},
    "oblong": {"image_size": (12, 40), "patch_size": (4, 8)},
    "registers": {"registers": 3, "image_size": (8, 20)},
    "distillation": {"distillation": True},
    "distillation, registers": {"distillation": True, "registers": 2},
    "mean": {"pool": "mean", "image_size": (20, 12)},
    "mean, registers": {"pool": "mean", "registers": 2},
    "map": {"pool": "map"},
    "map, registers": {"pool": "map", "registers": 2, "image_size": (8, 20)},
    "relative": {"position": "relative"},
    "relative, mean, oblong": {"position": "relative", "pool": "mean", "image_size": (8, 16)},
    "every layer": {"position_place": "every-layer"},
    "2-D, shared": {"position": "learned-2d", "position_place": "shared"},
    "hybrid": {"stem": "resnet", "resnet_blocks": (1,), "patch_size": 1},
    "conv stem": {"stem": "conv", "pool": "mean"},
    "everything": {"layer_scale": 0.5, "mlp": "swiglu", "dropout": 0.1, "patch_dropout": 0.2},
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-10}


def random_vit(seed=0, dtype=torch.float64, **changes):
    """A model without zero weights, so that heads differ, in training mode."""
    return awake(BASE.change(**changes), seed).to(dtype).train()


def random_images(model, count=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shape = (count, model.config.channels, *pair(model.config.image_size))
    return torch.randn(shape, generator=generator).to(next(model.parameters()).dtype)


def all_maps(model, images):
    """All maps at once, (L, B, H, N, N) in float64."""
    with torch.no_grad():
        return torch.stack(list(model.eval().attention_maps(images))).double().numpy()


def token_distances(model, images):
    """Pixels between any two tokens, (N, N), one by one; the prefix is at the center."""
    (down, across), size = model.config.stride, images.shape[2:]
    places, grid = [(size[0] / 2, size[1] / 2)] * model.config.num_prefix, model.config.grid
    places += [((i + 0.5) * down, (j + 0.5) * across) for i, j in np.ndindex(*grid)]
    return np.array([[math.dist(one, other) for other in places] for one in places])


def close(ours, expected, dtype=torch.float64):
    assert ours.shape == expected.shape
    np.testing.assert_allclose(ours, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_equal_those_of_all_maps(shape, dtype):
    model = random_vit(dtype=dtype, **SHAPES[shape])
    with torch.no_grad():
        model.encoder.blocks[1].mlp.fc2.weight *= 30  # for outliers
        model.encoder.blocks[1].norm2.weight[:5] = 0
    images, prefix = random_images(model), model.config.num_prefix
    found = attention_stats(model, [images])
    maps, pixels = all_maps(model, images), token_distances(model, images)
    between, own = pixels[prefix:, prefix:], maps[..., prefix:, prefix:]
    expected = {"patches": (own * between).sum(-1).mean(axis=(1, 3))}
    if prefix:
        rows = own / own.sum(-1, keepdims=True)
        expected["patches, renormalized"] = (rows * between).sum(-1).mean(axis=(1, 3))
        expected["all tokens"] = (maps * pixels).sum(-1).mean(axis=(1, 3))
    assert list(found.distance) == list(expected)
    for name, values in expected.items():
        assert values.min() > 0
        close(found.distance[name], values, dtype)
    assert found.images == 3
    assert found.patch == model.config.stride
    layers, count, heads, tokens, _ = maps.shape
    close(found.entropy, -(maps * np.log(maps)).sum(-1).mean((1, 3)) / np.log(tokens), dtype)
    flat = maps.reshape(layers, count, heads, -1)
    flat = flat / np.linalg.norm(flat, axis=-1, keepdims=True)
    close(found.redundancy, np.einsum("lbhn,lbgn->lhg", flat, flat) / count, dtype)
    with torch.no_grad():
        walked, outputs = [x.tokens for x in iter_layers(model, images)], list(model.layers(images))
    assert all(map(torch.equal, walked, outputs))  # the forward pass is unchanged
    norms = torch.stack([x.double().norm(dim=-1) for x in outputs]).numpy()
    patches = norms[:, :, prefix:].reshape(len(norms), -1)
    quantiles = [np.quantile(row, [0, 0.25, 0.5, 0.75, 1]) for row in patches]
    np.testing.assert_allclose(found.norms, quantiles, rtol=1e-6)
    np.testing.assert_allclose(found.prefix_norms, norms[:, :, :prefix].mean(1), rtol=1e-6)
    assert found.prefix_norms.shape == (3, prefix)
    outliers = [(row > 3 * np.median(row)).mean() for row in patches]
    np.testing.assert_array_equal(found.outliers, outliers)


class Signed(SelfAttention):
    def weights(self, query, key, bias=None):
        return torch.tanh(query @ key.mT)


def test_statistics_of_an_attention_without_softmax_are_those_of_normalized_rows():
    model = random_vit()
    for block in model.encoder.blocks:
        block.attention.__class__ = Signed
    images = random_images(model)
    found, rows = attention_stats(model, [images]), np.abs(all_maps(model, images))
    rows = rows / rows.sum(-1, keepdims=True)
    close(found.entropy, -(rows * np.log(rows)).sum(-1).mean((1, 3)) / np.log(rows.shape[-1]))
    close(
        found.distance["all tokens"], (rows * token_distances(model, images)).sum(-1).mean((1, 3))
    )
    assert rollout(model, images).isfinite().all()
    assert rollout(model, images).min() >= 0


@pytest.mark.parametrize("rows", [1, 5, 17, 40])
@pytest.mark.parametrize("shape", ["class token", "relative", "distillation, registers", "mean"])
def test_chunk_and_batch_sizes_do_not_matter(shape, rows, monkeypatch):
    model = random_vit(**SHAPES[shape])
    images = random_images(model, count=6)
    whole, in_browser = attention_stats(model, [images]), attention_for_browser(model, images[0])[0]
    monkeypatch.setattr(attention, "CHUNK_BYTES", rows * 3 * model.config.num_tokens * 8)
    parts = attention_stats(model, iter(images.split([1, 3, 2])))
    with torch.no_grad():
        layer = next(iter_layers(model, images))
        assert all(layer.weights(*some).nbytes <= attention.CHUNK_BYTES for some in layer.slices())
    assert parts.images == whole.images == 6
    for name in whole.distance:
        close(parts.distance[name], whole.distance[name])
    for name in ("entropy", "redundancy", "prefix_norms", "norms", "outliers"):
        close(getattr(parts, name), getattr(whole, name))
    assert np.array_equal(attention_for_browser(model, images[0])[0], in_browser)


def test_invalid_images():
    model = random_vit()
    for batches in ([], [torch.zeros(0, 3, 16, 16, dtype=torch.float64)]):
        with pytest.raises(DataError, match="need at least one image"):
            attention_stats(model, batches)
    other = torch.zeros(1, 3, 8, 16, dtype=torch.float64)
    with pytest.raises(DataError, match="2 x 4 patches after images of 4 x 4"):
        attention_stats(model, [random_images(model), other])
    with pytest.raises(DataError, match="whole number"):
        attention_stats(model, [torch.zeros(1, 3, 2, 2, dtype=torch.float64)])


def as_bytes(maps):
    return np.rint(255 * maps / maps.max(-1, keepdims=True)).astype(np.uint8)


def in_blocks(maps, grid, block, prefix):
    """Maps (L, H, N, N) with patches merged, one by one."""
    coarse, blocks = tuple(-(-side // block) for side in grid), {}
    for y, x in np.ndindex(*grid):
        blocks.setdefault((y // block, x // block), []).append(prefix + y * grid[1] + x)
    groups = [*([index] for index in range(prefix)), *(blocks[i] for i in np.ndindex(*coarse))]
    keys = np.stack([maps[..., group].sum(-1) for group in groups], axis=-1)
    return np.stack([keys[..., group, :].mean(-2) for group in groups], axis=-2), coarse


@pytest.mark.parametrize("shape", SHAPES)
def test_browser_maps_as_bytes(shape):
    model = random_vit(**SHAPES[shape])
    image = random_images(model, count=1)[0]
    found, peaks, grid = attention_for_browser(model, image)
    assert found.dtype == np.uint8
    maps = all_maps(model, image[None])[:, 0]
    assert np.array_equal(found, as_bytes(maps))
    np.testing.assert_allclose(peaks, maps.max(-1), rtol=1e-6)
    assert grid == model.config.grid


@pytest.mark.parametrize(
    ("size", "most", "block", "heads"),
    [
        ((88, 72), 9 * 398**2, 1, 3),
        ((88, 72), 9 * 398**2 - 1, 2, 3),
        ((88, 72), 9 * 101**2 - 1, 3, 3),
        ((88, 72), 9 * 50**2 - 1, 3, 1),  # blocks of 4 would do, but leave 30 patches only
        ((88, 72), 3 * 32**2, 4, 1),
        ((16, 16), 300, 2, 1),
        ((16, 16), 1, 4, 1),
    ],
)
def test_browser_merges_patches_of_large_images(size, most, block, heads):
    model = random_vit(registers=1)
    image = torch.randn(3, *size, dtype=torch.float64)
    found, _, grid = attention_for_browser(model, image, max_bytes=most)
    maps = all_maps(model, image[None])[:, 0]
    expected, coarse = in_blocks(maps, (size[0] // 4, size[1] // 4), block, prefix=2)
    if heads == 1:
        expected = expected.mean(1, keepdims=True)
    assert grid == coarse
    assert found.shape == expected.shape
    assert found.size <= most or grid == (1, 1)
    assert np.abs(found.astype(int) - as_bytes(expected)).max() <= 1  # rounding of a half
    assert (found.max(-1) == 255).all()
