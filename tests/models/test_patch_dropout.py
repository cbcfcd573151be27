"""Patches left out in training: how many, which, and who never is."""

import json

import pytest
import torch

from vitrail import ConfigError, VisionTransformer, load, save
from vitrail.models.build import build
from vitrail.models.config import from_dict, to_dict
from vitrail.models.vit import drop_patches

STEMS = {
    "patches": {},
    "conv": {"stem": "conv"},
    "resnet": {"stem": "resnet", "patch_size": 1, "image_size": 16},
}


@pytest.fixture
def sixteen(tiny):
    """The tiny model with sixteen patches."""
    return tiny.change(image_size=16)


def awake(config):
    torch.manual_seed(0)
    model = VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 8), (0.25, 12), (0.4, 10), (0.99, 1)])
def test_the_share_that_stays_is_rounded_and_never_nothing(sixteen, rate, kept):
    model = awake(sixteen.change(patch_dropout=rate)).train()
    assert model.tokens(torch.randn(2, 3, 16, 16)).shape == (2, 1 + kept, 8)


def test_kept_patches_stay_in_their_order_and_differ_between_pictures():
    torch.manual_seed(0)
    numbers = torch.arange(20.0)[None, :, None].expand(64, 20, 3)
    kept = drop_patches(numbers, 0.5)[..., 0]
    assert (kept.diff(dim=1) > 0).all()
    assert len(kept.unique(dim=0)) > 32


def test_every_patch_is_left_out_as_often_as_any_other():
    torch.manual_seed(0)
    numbers = torch.arange(10)[None, :, None].expand(20_000, 10, 1)
    counts = drop_patches(numbers, 0.3).flatten().bincount() / 20_000
    torch.testing.assert_close(counts, torch.full((10,), 0.7), atol=0.02, rtol=0)


@pytest.mark.parametrize("position", ["learned", "learned-2d", "sincos-2d", "none"])
def test_a_patch_takes_its_position_with_it(sixteen, position):
    model = awake(sixteen.change(patch_dropout=0.5, position=position))
    images = torch.randn(3, 3, 16, 16)
    some, every = model.train().tokens(images), model.eval().tokens(images)
    for picture, (few, all_) in enumerate(zip(some, every, strict=True)):
        found = (few[1:, None] == all_[None, 1:]).all(dim=-1)
        assert found.any(dim=1).all(), picture
        assert torch.equal(few[0], all_[0])


def test_class_distillation_and_register_tokens_always_stay(sixteen):
    model = awake(sixteen.change(patch_dropout=0.75, distillation=True, registers=3))
    images = torch.randn(4, 3, 16, 16)
    some, every = model.train().tokens(images), model.eval().tokens(images)
    assert some.shape == (4, 5 + 4, 8)
    assert torch.equal(some[:, :5], every[:, :5])


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
@pytest.mark.parametrize("stem", STEMS)
def test_every_weight_still_learns(sixteen, stem, pool):
    config = sixteen.change(**STEMS[stem], pool=pool, patch_dropout=0.5)
    model = awake(config).train()
    torch.manual_seed(1)
    torch.stack([model(torch.randn(8, 3, 16, 16)) for _ in range(2)]).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_nothing_is_left_out_after_training(sixteen):
    with_it, without = awake(sixteen.change(patch_dropout=0.5)).eval(), awake(sixteen).eval()
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(with_it(images), without(images))
    assert torch.equal(with_it.encode(images), without.encode(images))
    for ours, theirs in zip(with_it.layers(images), without.layers(images), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(
        with_it.attention_maps(images), without.attention_maps(images), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_the_draw_comes_from_torchs_seed(sixteen):
    model, images = awake(sixteen.change(patch_dropout=0.5)).train(), torch.randn(2, 3, 16, 16)
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model(images))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_checkpointing_sees_the_same_patches(sixteen):
    model, images = awake(sixteen.change(patch_dropout=0.5)).train(), torch.randn(2, 3, 16, 16)
    grads = []
    for switch in (False, True):
        model.checkpointing = switch
        model.zero_grad()
        torch.manual_seed(0)
        model(images).square().sum().backward()
        grads.append(model.position.table.grad.clone())
    torch.testing.assert_close(*grads)


def test_compilers_see_one_graph(sixteen):
    model = awake(sixteen.change(depth=1, patch_dropout=0.5)).train()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(torch.randn(2, 3, 16, 16)).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_dropout": 1.0}, "patch_dropout=1.0 must be a probability"),
        ({"patch_dropout": "half"}, "patch_dropout='half' must be a probability"),
        ({"position": "relative"}, "position='relative' .* use position='learned'"),
        ({"position_place": "every-layer"}, "the grid that position='learned' in .*='stem'"),
        ({"position": "learned-2d", "position_place": "shared"}, "position_place='stem'"),
    ],
)
def test_patch_dropout_that_cannot_work_says_what_would(tiny, changes, message):
    with pytest.raises(ConfigError, match=message):
        tiny.change(**{"patch_dropout": 0.5} | changes)


def test_a_description_from_before_patch_dropout_means_none(tiny):
    values = json.loads(json.dumps(to_dict(tiny)))
    del values["patch_dropout"]
    assert from_dict(values) == tiny


def test_a_bundle_keeps_it_and_foreign_formats_write_the_weights(tiny, tmp_path):
    model = build(tiny.change(patch_dropout=0.5, numerics="timm"), device="cpu").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    images = torch.randn(2, 3, 8, 8)
    save(model, tmp_path / "bundle")
    assert load(tmp_path / "bundle").config == model.config
    save(model, tmp_path / "timm", "timm")
    torch.testing.assert_close(load(tmp_path / "timm").eval()(images), model(images))
