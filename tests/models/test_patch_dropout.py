import pytest
import torch

from tiny_models import random_model
from vitrail import load, save
from vitrail.models.config import from_dict, to_dict
from vitrail.models.vit import drop_patches

STEMS = {
    "patches": {},
    "conv": {"stem": "conv"},
    "resnet": {"stem": "resnet", "patch_size": 1, "image_size": 16},
}


@pytest.fixture
def config16(tiny):
    return tiny.change(image_size=16)


@pytest.mark.parametrize(("rate", "kept"), [(0.5, 8), (0.25, 12), (0.4, 10), (0.99, 1)])
def test_number_of_kept_patches(config16, rate, kept):
    model = random_model(config16.change(patch_dropout=rate)).train()
    assert model.tokens(torch.randn(2, 3, 16, 16)).shape == (2, 1 + kept, 8)


def test_patches_are_dropped_uniformly_in_order():
    torch.manual_seed(0)
    numbers = torch.arange(10)[None, :, None].expand(20_000, 10, 1)
    kept = drop_patches(numbers, 0.3)[..., 0]
    assert (kept.diff(dim=1) > 0).all()
    counts = kept.flatten().bincount() / 20_000
    torch.testing.assert_close(counts, torch.full((10,), 0.7), atol=0.02, rtol=0)


@pytest.mark.parametrize("position", ["learned", "learned-2d", "sincos-2d", "none"])
def test_kept_patches_keep_their_position(config16, position):
    model = random_model(config16.change(patch_dropout=0.5, position=position))
    images = torch.randn(3, 3, 16, 16)
    kept, full = model.train().tokens(images), model.eval().tokens(images)
    for image, (ours, theirs) in enumerate(zip(kept, full, strict=True)):
        matches = (ours[1:, None] == theirs[None, 1:]).all(dim=-1)
        assert matches.any(dim=1).all(), image
        assert torch.equal(ours[0], theirs[0])


def test_prefix_tokens_are_never_dropped_and_no_token_in_eval_mode(config16):
    model = random_model(config16.change(patch_dropout=0.75, distillation=True, registers=3))
    images = torch.randn(4, 3, 16, 16)
    kept, full = model.train().tokens(images), model.eval().tokens(images)
    assert kept.shape == (4, 5 + 4, 8)
    assert torch.equal(kept[:, :5], full[:, :5])
    dropping, plain = random_model(config16.change(patch_dropout=0.5)), random_model(config16)
    images = torch.randn(2, 3, 16, 16)
    assert torch.equal(dropping.eval()(images), plain.eval()(images))
    for ours, theirs in zip(dropping.layers(images), plain.layers(images), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("pool", ["cls", "mean", "map"])
@pytest.mark.parametrize("stem", STEMS)
def test_every_parameter_gets_a_gradient_with_patch_dropout(config16, stem, pool):
    config = config16.change(**STEMS[stem], pool=pool, patch_dropout=0.5)
    model = random_model(config).train()
    torch.manual_seed(1)
    torch.stack([model(torch.randn(8, 3, 16, 16)) for _ in range(2)]).square().sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_patch_dropout_follows_the_seed_also_with_checkpointing(config16):
    model = random_model(config16.change(patch_dropout=0.5)).train()
    images, draws, grads = torch.randn(2, 3, 16, 16), [], []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model(images))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    for switch in (False, True):
        model.checkpointing = switch
        model.zero_grad()
        torch.manual_seed(0)
        model(images).square().sum().backward()
        grads.append(model.position.table.grad.clone())
    torch.testing.assert_close(*grads)


@pytest.mark.slow
def test_patch_dropout_compiles_without_graph_breaks(config16):
    model = random_model(config16.change(depth=1, patch_dropout=0.5)).train()
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert compiled(torch.randn(2, 3, 16, 16)).isfinite().all()


def test_saving_with_patch_dropout(tiny, tmp_path):
    model = random_model(tiny.change(patch_dropout=0.5, numerics="timm"))
    images = torch.randn(2, 3, 8, 8)
    save(model, tmp_path / "bundle")
    assert load(tmp_path / "bundle").config == model.config
    save(model, tmp_path / "timm", "timm")
    torch.testing.assert_close(load(tmp_path / "timm").eval()(images), model(images))
    values = to_dict(tiny)
    del values["patch_dropout"]  # as in bundles from before it existed
    assert from_dict(values) == tiny
