import pytest
import torch
import torch.nn.functional as F

from vitrail import ConfigError, VisionTransformer, create
from vitrail.models.init import initialize, whiten, whitening_filters


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create("ViT-Ti/16", depth=2, representation=192, num_classes=10)


def assert_uniform(weight, bound):
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.02)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_google_init(model):
    for block in model.encoder.blocks:
        for part in (*block.attention.qkv.weight.chunk(3), block.attention.merge.weight):
            assert_uniform(part, (6 / (192 + 192)) ** 0.5)
        assert not block.attention.qkv.bias.any()
    mlp = model.encoder.blocks[0].mlp
    assert_uniform(mlp.fc1.weight, (6 / (192 + 768)) ** 0.5)
    assert mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.1)
    weight = model.stem.projection.weight
    std = (3 * 16 * 16) ** -0.5
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert weight.abs().max().item() <= 2 * std / 0.8796 * 1.001
    assert model.representation.weight.std().item() == pytest.approx(192**-0.5, rel=0.02)
    assert model.position.table.std().item() == pytest.approx(0.02, rel=0.02)
    zero = (model.stem.projection.bias, model.cls_token, model.head.weight, model.head.bias)
    assert not any(parameter.any() for parameter in zero)


def test_head_bias_and_position_schemes():
    model = create("ViT-Mu/4", num_classes=5, head_bias=-10.0)
    assert torch.equal(model(torch.rand(1, 3, 32, 32)), torch.full((1, 5), -10.0))
    model = create("ViT-Ti/16", depth=1, init="big_vision")
    assert model.position.table.std().item() == pytest.approx(192**-0.5, rel=0.02)
    model = create("ViT-Mu/4", init="quick")
    fixed = create("ViT-Mu/4", position="sincos-2d")
    assert torch.allclose(model.position.table[1:], fixed.position.embedding((8, 8))[1:].float())
    assert model.position.table[0].abs().max() < 0.2
    with pytest.raises(ConfigError, match=r"unknown initialization 'jax'; known: google"):
        create("ViT-Mu/4", init="jax")


def test_timm_init():
    model = create("ViT-Ti/16", depth=1, init="timm")
    for weight in (model.encoder.blocks[0].attention.qkv.weight, model.head.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.02)
    bound = (3 * 16 * 16) ** -0.5
    assert_uniform(model.stem.projection.weight, bound)
    assert model.cls_token.abs().max().item() < 1e-5


def test_layer_scale_register_and_pool_init():
    model = create("ViT-Mu/4", layer_scale=0.25, registers=3)
    assert (model.encoder.blocks[0].branch2.scale == 0.25).all()
    assert model.registers.std().item() == pytest.approx(0.02, rel=0.3)
    wide = create("ViT-B/16", depth=1, position="learned-2d", init="big_vision")
    assert wide.position.columns.std().item() == pytest.approx(384**-0.5, rel=0.1)
    pooled = create("ViT-B/16", depth=1, pool="map", init="timm")
    assert pooled.pool.probe.std().item() == pytest.approx(0.8796 * 768**-0.5, rel=0.1)


def test_hybrid_and_mixer_init():
    model = create("R26+ViT-S/32", depth=1)
    unit = model.stem.resnet.stages[1][1]
    assert not unit.norm3.weight.any()
    images = torch.rand(1, 512, 4, 4)
    assert torch.equal(unit(images), images)
    model = create("Mixer-S/32", depth=1)
    weight = model.blocks[0].channel_mixing.fc1.weight
    assert weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert not model.blocks[0].channel_mixing.fc1.bias.any()


@pytest.mark.parametrize("name", ["ViT-Mu/4", "R+ViT-Ti/16", "BiT-R50x1", "Mixer-S/32"])
@pytest.mark.parametrize("init", ["google", "big_vision", "timm", "quick"])
def test_every_parameter_is_initialized(name, init):
    extras = {"layer_scale": 0.1, "registers": 2, "distillation": True, "stem": "conv"}
    small = {"ViT-Mu/4": extras, "BiT-R50x1": {"blocks": (1, 1)}}.get(name, {"depth": 1})
    if init in ("timm", "quick") and "ViT" not in name:
        with pytest.raises(ConfigError, match="needs a Vision Transformer"):
            create(name, init=init, **small)
        return
    model = create(name, **small)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    initialize(model, init)
    assert [n for n, p in model.named_parameters() if p.isnan().any()] == []


def test_generator_makes_init_reproducible(tiny, monkeypatch):
    def made(seed):
        return create("ViT-Mu/4", pool="map", generator=torch.Generator().manual_seed(seed))

    one, same, other = made(1).state_dict(), made(1).state_dict(), made(2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["position.table"], other["position.table"])
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda _: pytest.fail("GPUs were reseeded"))
    state = torch.get_rng_state()
    made(1)
    assert torch.equal(torch.get_rng_state(), state)
    model = VisionTransformer(tiny)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not model.cls_token.any()


def smooth_images(count=40, side=24, channels=3):
    """Noise with correlated neighbors, as in photographs."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(count, channels, side + 4, side + 4, generator=generator)
    return F.avg_pool2d(noise, 5, stride=1)


def responses(filters, images):
    return F.conv2d(images, filters).transpose(0, 1).flatten(1)  # (n, .)


def test_whitening_filters_decorrelate_and_have_both_signs():
    images = smooth_images()
    filters = whitening_filters(images, 24, 3)[:12]
    covariance = torch.cov(responses(filters, images))
    assert torch.allclose(covariance, torch.eye(12), atol=0.05)
    random = torch.randn(12, 3, 3, 3, generator=torch.Generator().manual_seed(1))
    correlation = torch.corrcoef(responses(random, images)).fill_diagonal_(0).abs().max()
    assert correlation > 0.5  # of random filters
    filters = whitening_filters(smooth_images(), 16, 3)
    assert filters.shape == (16, 3, 3, 3)
    assert torch.equal(filters[8:], -filters[:8])
    assert whitening_filters(smooth_images(channels=1), 40, 3).shape == (18, 1, 3, 3)
    assert whitening_filters(torch.ones(4, 3, 16, 16), 48, 3).isfinite().all()  # constant images


def test_whiten_keeps_surplus_filters():
    model = create("ViT-Mu/4", stem="conv", channels=1, width=64)
    before = model.stem.layers[0].weight.clone()
    whiten(model.stem, smooth_images(channels=1))
    after = model.stem.layers[0].weight
    assert len(after) == 32
    assert torch.equal(after[18:], before[18:])
    assert after[:18].std().item() == pytest.approx(before.std().item(), rel=1e-4)
