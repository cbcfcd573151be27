"""Token merging against a straightforward implementation."""

import copy

import pytest
import torch
import torch.nn.functional as F

import tiny_models
from vitrail import ConfigError, VisionTransformer, load, save

pytestmark = pytest.mark.slow

POOLS = {
    "cls": {},
    "mean": {"pool": "mean"},
    "map": {"pool": "map"},
    "registers": {"registers": 2},
    "distillation": {"distillation": True, "registers": 1},
    "mean with registers": {"pool": "mean", "registers": 3},
    "scaled branches": {"pool": "map", "layer_scale": 0.5, "qkv_bias": False, "mlp": "swiglu"},
}


@pytest.fixture
def config(tiny):
    """Three blocks and 6 x 7 patches: neither square nor a power of two."""
    return tiny.change(depth=3, image_size=(24, 28))


def random_model(config):
    return tiny_models.random_model(config).double()


def make_images(count=3, height=24, width=28):
    torch.manual_seed(1)
    return torch.randn(count, 3, height, width, dtype=torch.float64)


def reference_merging(tokens, sizes, keys, pairs, prefix):
    """Merge one image's tokens (N, D) and sizes (N,): try all pairs, then merge pair by pair."""
    mean = F.normalize(keys.mean(dim=0), dim=-1)
    similarity = (mean @ mean.mT).tolist()
    patches = range(prefix, len(tokens))
    options = []
    for merged in patches[0::2]:
        most, partner = max((similarity[merged][other], other) for other in patches[1::2])
        options.append((most, merged, partner))
    options.sort(reverse=True)
    groups = {place: [place] for place in range(len(tokens))}
    for _, merged, partner in options[: min(pairs, len(patches) // 2)]:
        groups[partner] += groups.pop(merged)
    rest = [merged for _, merged, _ in options if merged in groups]
    means, counts = [], []
    for place in [*range(prefix), *rest, *patches[1::2]]:
        total = sizes[groups[place]].sum()
        weighted = [tokens[member] * sizes[member] for member in groups[place]]
        means.append(torch.stack(weighted).sum(dim=0) / total)
        counts.append(total)
    return torch.stack(means), torch.stack(counts)


def reference_attention(query, key, value, sizes):
    """Attention (H, N, K) in which each key counts as often as its size."""
    likes = (query @ key.mT / query.shape[-1] ** 0.5).exp() * sizes
    return likes / likes.sum(dim=-1, keepdim=True) @ value


def reference_logits(model, image, pairs):
    """Logits of one image, with every block in full."""
    config = model.config
    tokens = model.tokens(image[None])[0]
    sizes = torch.ones(len(tokens), dtype=tokens.dtype)
    for block in model.encoder.blocks:
        query, key, value = (
            x[0] for x in block.attention.query_key_value(block.norm1(tokens)[None])
        )
        mixed = reference_attention(query, key, value, sizes).transpose(0, 1).flatten(1)
        tokens = tokens + block.branch1(block.attention.merge(mixed))
        tokens, sizes = reference_merging(tokens, sizes, key, pairs, config.num_prefix)
        tokens = tokens + block.branch2(block.mlp(block.norm2(tokens)))
    tokens = model.encoder.norm(tokens)
    patches, sizes = tokens[config.num_prefix :], sizes[config.num_prefix :]
    if config.pool == "mean":
        return model.head((patches * sizes[:, None]).sum(dim=0) / sizes.sum())
    if config.pool == "map":
        query, key, value = (x[0] for x in model.pool.query_key_value(tokens[None]))
        pooled = model.pool.merge(reference_attention(query, key, value, sizes).flatten())
        return model.head(pooled + model.pool.mlp(model.pool.norm(pooled)))
    if config.distillation:
        return (model.head(tokens[0]) + model.distillation_head(tokens[1])) / 2
    return model.head(tokens[0])


@pytest.mark.parametrize("pool", POOLS)
def test_logits_match_reference_implementation(config, pool):
    model = random_model(config.change(**POOLS[pool]))
    for pairs, size in ((5, (24, 28)), (999, (24, 28)), (1, (12, 20)), (3, (8, 12))):
        images, model.merge = make_images(3, *size), 0
        plain = torch.stack([reference_logits(model, image, pairs) for image in images])
        model.merge = pairs
        torch.testing.assert_close(model(images), plain, atol=1e-10, rtol=1e-8)


def test_disabling_merge_restores_logits_exactly(config, tiny, tmp_path):
    model, images = random_model(config), make_images()
    before = model(images)
    assert model.merge == 0
    model.merge = 8
    assert not torch.equal(model(images), before)
    model.merge = 0
    assert torch.equal(model(images), before)
    model = random_model(tiny).float()
    keys = model.state_dict().keys()
    model.merge = 2
    assert model.state_dict().keys() == keys
    assert copy.deepcopy(model).merge == 2
    save(model, tmp_path / "bundle")
    assert load(tmp_path / "bundle").merge == 0


def test_last_block_computes_only_head_tokens_unless_hooked(config):
    model, counts = random_model(config.change(distillation=True)), []
    model.merge, block = 5, model.encoder.blocks[-1]
    add_mlp = type(block).add_mlp
    block.add_mlp = lambda tokens: counts.append(tokens.shape[1]) or add_mlp(block, tokens)
    logits = model(make_images())
    hook = block.mlp.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(model(make_images()), logits, rtol=1e-9, atol=1e-9)
    hook.remove()
    model(make_images())
    assert counts[0] == counts[2] == 2 < counts[1]


def test_gradients_match_reference_implementation(config):
    model, image = random_model(config.change(pool="mean")), make_images(1).requires_grad_()
    (expected,) = torch.autograd.grad(reference_logits(model, image[0], 5)[0], image)
    model.merge = 5
    (gradient,) = torch.autograd.grad(model(image)[0, 0], image)
    torch.testing.assert_close(gradient, expected, atol=1e-10, rtol=1e-8)


def test_merging_compiles_without_graph_breaks(config):
    model, images = random_model(config.change(depth=1, pool="map")), make_images(2)
    model.merge = 5
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_bfloat16(tiny, pool):
    model = random_model(tiny.change(position="none", pool=pool)).float()
    plain = torch.randn(1, 3, 1, 1).expand(1, 3, 8, 8)  # any pair may be merged
    expected = model(plain)
    model.merge = 1
    half = model.bfloat16()(plain.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.3, rtol=0.1)


def test_training_and_per_patch_outputs_raise_while_merging(tiny):
    model, images = VisionTransformer(tiny).train(), torch.randn(1, 3, 8, 8)
    model.merge = 2
    with pytest.raises(ConfigError, match=r"merge=2 works in inference only.*call model.eval\(\)"):
        model(images)
    model.eval()(images)
    layers, maps = lambda x: next(model.layers(x)), lambda x: next(model.attention_maps(x))
    for call in (model.encode, layers, maps):
        with pytest.raises(ConfigError, match=r"merge=2: token merging is on.*merge = 0"):
            call(images)


@pytest.mark.parametrize(
    ("changes", "merge", "message"),
    [
        ({}, -1, "merge=-1 must be an integer >= 0, pairs per block; 0 is off"),
        ({}, 1.5, "merge=1.5 must be an integer"),
        ({}, True, "merge=True must be an integer"),
        ({"position": "relative"}, 2, "merge=2 removes tokens from the grid that .*'relative'"),
        ({"position_place": "every-layer"}, 2, "only models with position_place='stem'"),
        ({"position_place": "shared"}, 2, "only models with position_place='stem'"),
    ],
)
def test_invalid_merge_raises(tiny, changes, merge, message):
    model = VisionTransformer(tiny.change(**changes))
    with pytest.raises(ConfigError, match=message):
        model.merge = merge
    assert model.merge == 0
    model.merge = 0  # always valid
