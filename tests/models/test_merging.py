"""Token merging against the plainest way to write it, and what it must leave alone."""

import copy

import pytest
import torch
import torch.nn.functional as F

from vitrail import ConfigError, VisionTransformer, create, load, save
from vitrail.models.token_merging import Match, bipartite_matching, merge

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
def forty_two(tiny):
    """The tiny model with a third block and 6 x 7 patches: neither a square nor a power of two."""
    return tiny.change(depth=3, image_size=(24, 28))


def awake(config):
    torch.manual_seed(0)
    model = VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model.eval().double()


def pictures(count=3, height=24, width=28):
    torch.manual_seed(1)
    return torch.randn(count, 3, height, width, dtype=torch.float64)


def plain_matching(keys, pairs, prefix):
    """Of one picture's keys (H, N, K), by trying all pairs: who joins whom, and who might have."""
    mean = F.normalize(keys.mean(dim=0), dim=-1)
    likeness = (mean @ mean.mT).tolist()
    places = range(prefix, len(mean))
    options = []
    for leaving in places[0::2]:
        most, partner = max((likeness[leaving][other], other) for other in places[1::2])
        options.append((most, leaving, partner))
    options.sort(reverse=True)
    by_likeness = [leaving for _, leaving, _ in options]
    return [(leaving, partner) for _, leaving, partner in options[:pairs]], by_likeness


def plain_merging(tokens, sizes, keys, pairs, prefix):
    """One picture's tokens (N, D) and sizes (N,), pair by pair."""
    pairs = min(pairs, (len(tokens) - prefix) // 2)
    joins, by_likeness = plain_matching(keys, pairs, prefix)
    groups = {place: [place] for place in range(len(tokens))}
    for leaving, partner in joins:
        groups[partner] += groups.pop(leaving)
    first = [*range(prefix), *(place for place in by_likeness if place in groups)]
    merged, counts = [], []
    for place in [*first, *range(prefix + 1, len(tokens), 2)]:
        total = sizes[groups[place]].sum()
        weighted = [tokens[member] * sizes[member] for member in groups[place]]
        merged.append(torch.stack(weighted).sum(dim=0) / total)
        counts.append(total)
    return torch.stack(merged), torch.stack(counts)


def plain_attention(query, key, value, sizes):
    """Each key counts as often as its size: (H, N, K)."""
    likes = (query @ key.mT / query.shape[-1] ** 0.5).exp() * sizes
    return likes / likes.sum(dim=-1, keepdim=True) @ value


def plain_logits(model, image, pairs):
    """The whole model for one picture, every block in full."""
    config = model.config
    tokens = model.tokens(image[None])[0]
    sizes = torch.ones(len(tokens), dtype=tokens.dtype)
    for block in model.encoder.blocks:
        query, key, value = (
            x[0] for x in block.attention.query_key_value(block.norm1(tokens)[None])
        )
        mixed = plain_attention(query, key, value, sizes).transpose(0, 1).flatten(1)
        tokens = tokens + block.branch1(block.attention.merge(mixed))
        tokens, sizes = plain_merging(tokens, sizes, key, pairs, config.num_prefix)
        tokens = tokens + block.branch2(block.mlp(block.norm2(tokens)))
    tokens = model.encoder.norm(tokens)
    patches, sizes = tokens[config.num_prefix :], sizes[config.num_prefix :]
    if config.pool == "mean":
        return model.head((patches * sizes[:, None]).sum(dim=0) / sizes.sum())
    if config.pool == "map":
        query, key, value = (x[0] for x in model.pool.query_key_value(tokens[None]))
        pooled = model.pool.merge(plain_attention(query, key, value, sizes).flatten())
        return model.head(pooled + model.pool.mlp(model.pool.norm(pooled)))
    if config.distillation:
        return (model.head(tokens[0]) + model.distillation_head(tokens[1])) / 2
    return model.head(tokens[0])


@pytest.mark.parametrize("pool", POOLS)
def test_the_model_is_the_plain_algorithm(forty_two, pool):
    model, images = awake(forty_two.change(**POOLS[pool])), pictures()
    for pairs in (5, 999):
        model.merge = 0
        plain = torch.stack([plain_logits(model, image, pairs) for image in images])
        model.merge = pairs
        torch.testing.assert_close(model(images), plain, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize(("prefix", "count"), [(0, 10), (1, 10), (1, 11), (4, 15)])
@pytest.mark.parametrize("pairs", [1, 3, 5])
def test_matching_finds_what_trying_all_pairs_finds(prefix, count, pairs):
    keys = torch.randn(4, 3, count, 5, generator=torch.Generator().manual_seed(count))
    found = bipartite_matching(keys, pairs, prefix)
    for picture, key in enumerate(keys):
        kept = (found.kept[picture] - picture * count).tolist()
        gone = (found.merged[picture] - picture * count).tolist()
        into = [kept[place - picture * (count - pairs)] for place in found.target[picture].tolist()]
        assert list(zip(gone, into, strict=True)) == plain_matching(key, pairs, prefix)[0]
        assert sorted(kept + gone) == list(range(count))
        assert kept[:prefix] == list(range(prefix))


def test_a_merged_token_is_the_mean_of_the_patches_it_stands_for():
    tokens = torch.tensor([[[1.0], [4.0], [10.0]], [[7.0], [8.0], [9.0]]])
    sizes = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    all_into_one = [[[1], [4]], [[0, 2], [3, 5]], [[0, 0], [1, 1]]]
    merged, after = merge(tokens, sizes, Match(*map(torch.tensor, all_into_one)))
    torch.testing.assert_close(merged.flatten(), torch.tensor([39 / 6, 8.0]))
    assert after.flatten().tolist() == [6, 3]


def test_without_merging_every_bit_is_as_before(forty_two):
    model, images = awake(forty_two), pictures()
    before = model(images)
    assert model.merge == 0
    model.merge = 8
    assert not torch.equal(model(images), before)
    model.merge = 0
    assert torch.equal(model(images), before)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("pairs", [1, 7, 999])
def test_merging_equal_patches_changes_nothing(forty_two, pool, pairs):
    model = awake(forty_two.change(position="none", **POOLS[pool])).float()
    plain = torch.randn(2, 3, 1, 1).expand(2, 3, 24, 28)
    model.merge = 0
    expected = model(plain)
    model.merge = pairs
    torch.testing.assert_close(model(plain), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pool", POOLS)
def test_merging_the_copies_of_two_patches_changes_nothing(forty_two, pool):
    model = awake(forty_two.change(position="none", **POOLS[pool])).float()
    kinds = torch.randn(2, 3, 4, 4)
    which = torch.randint(2, (3, 6, 7), generator=torch.Generator().manual_seed(0))
    images = kinds[which].permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 24, 28)
    expected = model(images)
    model.merge = 6
    torch.testing.assert_close(model(images), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("pairs", "left"), [(0, [42, 42, 42]), (5, [37, 32, 27]), (30, [21, 11, 6])]
)
def test_each_mlp_sees_fewer_tokens_and_never_less_than_half(forty_two, pairs, left):
    model = awake(forty_two.change(pool="mean", registers=2))
    seen = []
    for block in model.encoder.blocks:
        block.mlp.register_forward_hook(lambda mlp, given, out: seen.append(given[0].shape[1]))
    model.merge = pairs
    model(pictures())
    assert seen == [2 + count for count in left]


def test_class_distillation_and_register_tokens_are_never_merged(forty_two):
    model = awake(forty_two.change(distillation=True, registers=2))
    model.merge, model.head_tokens = 999, None
    tokens, sizes = model.run_encoder(*model.prepare_tokens(pictures()))
    assert tokens.shape[:2] == sizes.shape == (3, 4 + 6)
    assert sizes[:, :4].eq(1).all()
    assert sizes[:, 4:].sum(dim=1).eq(42).all()


@pytest.mark.parametrize("pool", ["cls", "distillation"])
def test_leaving_out_what_nobody_reads_changes_nothing(forty_two, pool):
    model, images = awake(forty_two.change(**POOLS[pool])), pictures()
    model.merge = 5
    expected = model(images)
    model.head_tokens = None
    torch.testing.assert_close(model(images), expected, atol=1e-10, rtol=1e-8)


def test_the_last_block_computes_only_what_is_read(forty_two):
    model, seen = awake(forty_two), []
    model.encoder.blocks[-1].mlp.register_forward_hook(lambda mlp, given, out: seen.append(out))
    model.merge = 5
    model(pictures())
    assert seen[0].shape[1] == 1


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_a_picture_does_not_depend_on_its_batch(forty_two, pool):
    model = awake(forty_two.change(pool=pool))
    model.merge = 5
    for height, width in ((24, 28), (8, 8), (4, 12), (4, 4)):
        images = pictures(4, height, width)
        alone = torch.cat([model(image[None]) for image in images])
        torch.testing.assert_close(model(images), alone, atol=1e-10, rtol=1e-8)


def test_gradients_are_those_of_the_plain_algorithm(forty_two):
    model, image = awake(forty_two.change(pool="mean")), pictures(1).requires_grad_()
    (expected,) = torch.autograd.grad(plain_logits(model, image[0], 5)[0], image)
    model.merge = 5
    (found,) = torch.autograd.grad(model(image)[0, 0], image)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)


def test_compilers_see_one_graph(forty_two):
    model, images = awake(forty_two.change(depth=1, pool="map")), pictures(2)
    model.merge = 5
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), model(images))


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
def test_bfloat16_gives_about_the_same(tiny, pool):
    model = awake(tiny.change(position="none", pool=pool)).float()
    plain = torch.randn(1, 3, 1, 1).expand(1, 3, 8, 8)  # whichever patches are merged
    expected = model(plain)
    model.merge = 1
    half = model.bfloat16()(plain.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), expected, atol=0.3, rtol=0.1)


def test_the_switch_is_no_part_of_what_is_saved(tiny, tmp_path):
    model = awake(tiny).float()
    keys = model.state_dict().keys()
    model.merge = 2
    assert model.state_dict().keys() == keys
    assert copy.deepcopy(model).merge == 2
    save(model, tmp_path / "bundle")
    assert load(tmp_path / "bundle").merge == 0


def test_training_is_refused(tiny):
    model, images = VisionTransformer(tiny).train(), torch.randn(1, 3, 8, 8)
    model.merge = 2
    with pytest.raises(ConfigError, match=r"merge=2 is for inference.*call model.eval\(\)"):
        model(images)
    model.eval()(images)


def test_what_looks_at_each_patch_is_refused(tiny):
    model, images = VisionTransformer(tiny).eval(), torch.randn(1, 3, 8, 8)
    model.merge = 2
    for look in (
        model.encode,
        lambda x: next(model.layers(x)),
        lambda x: next(model.attention_maps(x)),
    ):
        with pytest.raises(ConfigError, match=r"merge=2 leaves no token for each patch.*merge = 0"):
            look(images)


@pytest.mark.parametrize(
    ("changes", "given", "message"),
    [
        ({}, -1, "merge=-1 must be an integer >= 0, pairs per block; 0 is off"),
        ({}, 1.5, "merge=1.5 must be an integer"),
        ({}, True, "merge=True must be an integer"),
        ({"position": "relative"}, 2, "merge=2 removes tokens from the grid that .*'relative'"),
        ({"position_place": "every-layer"}, 2, "only models with position_place='stem'"),
        ({"position_place": "shared"}, 2, "only models with position_place='stem'"),
    ],
)
def test_a_merge_that_cannot_work_says_what_would(tiny, changes, given, message):
    model = VisionTransformer(tiny.change(**changes))
    with pytest.raises(ConfigError, match=message):
        model.merge = given
    assert model.merge == 0
    model.merge = 0  # which is always possible


@pytest.mark.parametrize("name", ["BiT-R50x1", "Mixer-S/32"])
def test_models_without_attention_have_no_such_switch(name):
    with torch.device("meta"):
        assert not hasattr(create(name), "merge")
