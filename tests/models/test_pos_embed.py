import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tiny_models import random_model
from vitrail.models.pos_embed import (
    RESIZE_METHODS,
    Learned2dPosEmbed,
    LearnedPosEmbed,
    RelativePosEmbed,
    SinCos2dPosEmbed,
    resize_grid,
    resize_line,
)
from vitrail.models.vit import build


@pytest.fixture
def larger(tiny):
    return tiny.change(image_size=(12, 8), width=16)  # 3 x 2 patches


def randomize(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def test_learned_2d_and_sincos_positions(larger):
    position = randomize(Learned2dPosEmbed(larger))
    vectors = position.embedding((3, 2))
    assert torch.equal(vectors[0], position.prefix[0])
    row, column = 2, 1
    patch = vectors[1 + row * 2 + column]
    assert torch.equal(patch[:8], position.columns[column])
    assert torch.equal(patch[8:], position.rows[row])
    vectors = SinCos2dPosEmbed(larger).embedding((3, 2))
    waves = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 3)  # ends included
    parts = [wave(place * waves) for place in (column, row) for wave in (torch.sin, torch.cos)]
    expected = torch.cat(parts)
    torch.testing.assert_close(vectors[1 + row * 2 + column], expected)
    assert not vectors[0].any()  # zero for the class token


def test_relative_keys_depend_on_offset_only(larger):
    relative = randomize(RelativePosEmbed(larger)).embedding((3, 2))
    keys = relative.keys[relative.offsets]  # (7, 7, 8)
    patches = keys[1:, 1:]
    assert torch.equal(patches[0, 3], patches[2, 5])
    assert not torch.equal(patches[0, 3], patches[3, 0])
    assert torch.equal(keys[0, 1], keys[0, 6])  # class token to any patch
    assert torch.equal(keys[1, 0], keys[6, 0])
    assert len({tuple(keys[q, k].tolist()) for q, k in ((1, 0), (0, 1), (0, 0), (1, 1))}) == 4
    row = relative.keys[: 2 * 6 - 1]
    assert torch.equal(patches[4, 1], row[4 - 1 + 5])  # query minus key, from -5 to 5


def test_relative_bias_in_attention_map(larger):
    model = random_model(larger.change(position="relative"))
    images = torch.randn(2, 3, 12, 8)
    tokens, grid = model.prepare_tokens(images)
    inputs, relative = model.encoder.layer_inputs(0, tokens, grid)
    keys = relative.keys[relative.offsets]
    block = model.encoder.blocks[0]
    query, key, _ = block.attention.query_key_value(block.norm1(inputs))
    scores = query @ key.mT + torch.einsum("bhqk,qnk->bhqn", query, keys)
    expected = (scores / 8**0.5).softmax(dim=-1)
    found = block.attention.attention_map(block.norm1(inputs), relative)
    torch.testing.assert_close(found, expected)


KINDS = [
    {"position": kind, "position_place": place, "pool": pool}
    for kind, places in {
        "none": ["stem"],
        "learned": ["stem", "every-layer", "shared"],
        "learned-2d": ["stem", "every-layer", "shared"],
        "relative": ["every-layer", "shared"],
        "sincos-2d": ["stem"],
    }.items()
    for place in places
    for pool in ("cls", "mean")
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_every_size_works_and_only_no_position_is_permutation_invariant(larger, kind):
    model = random_model(larger.change(**kind)).double()
    for size in ((12, 8), (8, 16), (20, 4)):
        assert model(torch.randn(2, 3, *size, dtype=torch.float64)).isfinite().all()
    images = torch.randn(1, 3, 12, 8, dtype=torch.float64)
    shuffled = images.flip(2)
    for row in range(3):  # patches move as wholes: flip the order of rows, not the pixels in them
        shuffled[:, :, 4 * row : 4 * row + 4] = shuffled[:, :, 4 * row : 4 * row + 4].flip(2)
    same = torch.allclose(model(images), model(shuffled), atol=1e-9)
    assert same == (kind["position"] == "none")


def test_tables_per_placement(tiny):
    images = torch.randn(1, 3, 8, 8)
    for place, count in {"stem": 1, "every-layer": 2, "shared": 1}.items():
        model = random_model(tiny.change(position_place=place))
        assert sum(isinstance(m, LearnedPosEmbed) for m in model.modules()) == count
        tokens, tables = model.tokens(images), model.encoder.positions
        for index, block in enumerate(model.encoder.blocks):  # added before each layer
            tokens = block(tokens + tables[index % count].table if tables else tokens)
        torch.testing.assert_close(model.encode(images), model.encoder.norm(tokens))


def test_resizing_on_the_fly_matches_resized_model(tiny):
    config = tiny.change(image_size=28, num_classes=5)  # 7 x 7, as a model trained at 224
    model = random_model(config)
    images = torch.randn(2, 3, 48, 32)  # 12 x 8, as the same model at 384 x 256
    resized = build(config.change(image_size=(48, 32)), device="cpu").eval()
    state = dict(model.state_dict())
    state["position.table"] = model.position.embedding((12, 8)).detach()
    resized.load_state_dict(state)
    with torch.no_grad():
        first = model(images)
        assert torch.equal(first, resized(images))
        assert torch.equal(first, model(images))
    torch.testing.assert_close(first, model(images))  # with gradients


def test_resize_matches_golden_values(golden):
    arrays = np.load(golden / "position-resize.npz")
    names = [name for name in arrays.files if name.startswith("in_")]
    assert names
    for name in names:
        expected = arrays[name.replace("in_", "out_")]
        ours = resize_grid(torch.from_numpy(arrays[name]), expected.shape[:2])
        assert np.abs(ours.numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("method", RESIZE_METHODS)
@pytest.mark.parametrize("grid", [(24, 24), (24, 16), (5, 9), (1, 3)])
def test_resize_grid_matches_interpolate(method, grid):
    table = torch.randn(14, 10, 6, dtype=torch.float64)
    theirs = F.interpolate(table.permute(2, 0, 1)[None], grid, **RESIZE_METHODS[method])[0]
    ours = resize_grid(table, grid, method)
    torch.testing.assert_close(ours, theirs.permute(1, 2, 0), atol=1e-12, rtol=0)
    torch.testing.assert_close(resize_grid(table, (14, 10), method), table)  # the same grid


def test_resize_of_lines_gradients_and_dtypes():
    line = torch.randn(7, 2, dtype=torch.float64)
    longer = resize_line(line, 13)
    torch.testing.assert_close(longer[::2], line)  # corners are aligned
    table = torch.randn(3, 3, 2, requires_grad=True)
    resize_grid(table, (5, 5)).sum().backward()
    assert table.grad.sum().item() == pytest.approx(50, rel=1e-5)
    table = torch.randn(7, 7, 4)
    for method in RESIZE_METHODS:  # computed in float32
        exact = resize_grid(table.bfloat16().float(), (9, 12), method)
        assert torch.equal(resize_grid(table.bfloat16(), (9, 12), method), exact.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside = resize_grid(table, (9, 12), method)
        assert torch.equal(inside, resize_grid(table, (9, 12), method))
