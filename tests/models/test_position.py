import pytest
import torch

from vitrail.models.build import build
from vitrail.models.init import initialize
from vitrail.models.pos_embed import (
    Learned2dPosEmbed,
    LearnedPosEmbed,
    RelativePosEmbed,
    SinCos2dPosEmbed,
)
from vitrail.models.vit import VisionTransformer


@pytest.fixture
def larger(tiny):
    return tiny.change(image_size=(12, 8), width=16)  # 3 x 2 patches


def filled(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


def awake(config):
    model = build(config, device="cpu")
    initialize(model)
    return filled(model).eval()


def test_a_2d_position_is_its_column_then_its_row(larger):
    position = filled(Learned2dPosEmbed(larger))
    vectors = position.embedding((3, 2))
    assert torch.equal(vectors[0], position.prefix[0])
    row, column = 2, 1
    patch = vectors[1 + row * 2 + column]
    assert torch.equal(patch[:8], position.columns[column])
    assert torch.equal(patch[8:], position.rows[row])


def test_sines_are_big_visions(larger):
    vectors = SinCos2dPosEmbed(larger).embedding((3, 2))
    waves = 10_000.0 ** -(torch.arange(4, dtype=torch.float64) / 3)  # ends included
    row, column = 2, 1
    expected = torch.cat(
        [
            torch.sin(column * waves),
            torch.cos(column * waves),
            torch.sin(row * waves),
            torch.cos(row * waves),
        ]
    )
    torch.testing.assert_close(vectors[1 + row * 2 + column], expected)
    assert not vectors[0].any()  # the class token has none


def test_relative_keys_depend_on_the_offset_alone(larger):
    relative = filled(RelativePosEmbed(larger)).embedding((3, 2))
    keys = relative.keys[relative.offsets]  # (7, 7, 8)
    patches = keys[1:, 1:]
    assert torch.equal(patches[0, 3], patches[2, 5])
    assert not torch.equal(patches[0, 3], patches[3, 0])
    assert torch.equal(keys[0, 1], keys[0, 6])  # class token to any patch
    assert torch.equal(keys[1, 0], keys[6, 0])
    assert len({tuple(keys[q, k].tolist()) for q, k in ((1, 0), (0, 1), (0, 0), (1, 1))}) == 4
    row = relative.keys[: 2 * 6 - 1]
    assert torch.equal(patches[4, 1], row[4 - 1 + 5])  # query minus key, from -5 to 5


def test_relative_attention_adds_the_offsets_score(larger):
    model = awake(larger.change(position="relative"))
    images = torch.randn(2, 3, 12, 8)
    tokens, grid = model.prepare_tokens(images)
    entered, relative = model.encoder.layer_inputs(0, tokens, grid)
    keys = relative.keys[relative.offsets]
    block = model.encoder.blocks[0]
    query, key, _ = block.attention.query_key_value(block.norm1(entered))
    scores = query @ key.mT + torch.einsum("bhqk,qnk->bhqn", query, keys)
    expected = (scores / 8**0.5).softmax(dim=-1)
    torch.testing.assert_close(block.attention_map(entered, relative), expected)


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
def test_every_kind_works_at_every_size(larger, kind):
    model = awake(larger.change(**kind))
    for size in ((12, 8), (8, 16), (20, 4)):
        assert model(torch.randn(2, 3, *size)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(kind.values()))
def test_only_without_positions_the_order_of_patches_does_not_matter(larger, kind):
    model = awake(larger.change(**kind)).double()
    images = torch.randn(1, 3, 12, 8, dtype=torch.float64)
    shuffled = images.flip(2)
    for row in range(3):  # patches move as wholes: flip the order of rows, not the pixels in them
        shuffled[:, :, 4 * row : 4 * row + 4] = shuffled[:, :, 4 * row : 4 * row + 4].flip(2)
    same = torch.allclose(model(images), model(shuffled), atol=1e-9)
    assert same == (kind["position"] == "none")


@pytest.mark.parametrize("place", ["stem", "every-layer", "shared"])
def test_tables_at_every_layer_are_separate_unless_shared(tiny, place):
    model = VisionTransformer(tiny.change(position_place=place))
    tables = [m for m in model.modules() if isinstance(m, LearnedPosEmbed)]
    assert len(tables) == {"stem": 1, "every-layer": 2, "shared": 1}[place]


def test_a_shared_table_is_added_before_each_layer(tiny):
    model = awake(tiny.change(position_place="shared"))
    images = torch.randn(1, 3, 8, 8)
    table = model.encoder.positions[0].table
    tokens = model.tokens(images)
    for block in model.encoder.blocks:
        tokens = block(tokens + table)
    torch.testing.assert_close(model.encode(images), model.encoder.norm(tokens))


def test_resizing_first_and_resizing_on_the_fly_agree(tiny):
    config = tiny.change(image_size=28, num_classes=5)  # 7 x 7, as a model trained at 224
    model = awake(config)
    images = torch.randn(2, 3, 48, 32)  # 12 x 8, as the same model at 384 x 256
    resized = build(config.change(image_size=(48, 32)), device="cpu").eval()
    state = dict(model.state_dict())
    state["position.table"] = model.position.embedding((12, 8)).detach()
    resized.load_state_dict(state)
    with torch.no_grad():
        first = model(images)
        assert torch.equal(first, resized(images))
        assert torch.equal(first, model(images))  # the kept table
    torch.testing.assert_close(first, model(images))  # and the one that gradients flow through


def test_a_stretched_table_is_kept_for_the_next_call_and_never_goes_stale(tiny):
    model = awake(tiny)
    with torch.no_grad():
        stretched = model.position.embedding((3, 3))
        assert model.position.embedding((3, 3)) is stretched
        model.position.table.mul_(2)
        torch.testing.assert_close(model.position.embedding((3, 3)), 2 * stretched)


def test_the_numerics_choose_how_tables_stretch(tiny):
    model = awake(tiny.change(image_size=28))
    other = awake(tiny.change(image_size=28, numerics="transformers"))
    other.position.table.data.copy_(model.position.table)
    assert not torch.allclose(model.position.embedding((9, 9)), other.position.embedding((9, 9)), atol=1e-2)
    assert torch.equal(model.position.embedding((7, 7)), other.position.embedding((7, 7)))
