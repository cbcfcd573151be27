import pytest
import torch

from vitrail import ConfigError, VisionTransformer, create
from vitrail.models.init import initialize


@pytest.fixture
def model():
    torch.manual_seed(0)
    return create("ViT-Ti/16", depth=2, representation=192, num_classes=10)


def assert_uniform(weight, bound):
    assert weight.abs().max().item() == pytest.approx(bound, rel=0.02)
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.03)


def test_queries_keys_and_values_are_three_maps_of_their_own(model):
    for block in model.encoder.blocks:
        for part in block.attention.qkv.weight.chunk(3):
            assert_uniform(part, (6 / (192 + 192)) ** 0.5)
        assert not block.attention.qkv.bias.any()
        assert_uniform(block.attention.merge.weight, (6 / (192 + 192)) ** 0.5)


def test_mlps_start_from_xavier_with_a_trace_of_bias(model):
    mlp = model.encoder.blocks[0].mlp
    assert_uniform(mlp.fc1.weight, (6 / (192 + 768)) ** 0.5)
    assert mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.1)


def test_patches_start_from_a_truncated_normal(model):
    weight = model.stem.projection.weight
    std = (3 * 16 * 16) ** -0.5
    assert weight.std().item() == pytest.approx(std, rel=0.02)
    assert weight.abs().max().item() <= 2 * std / 0.8796 * 1.001
    assert not model.stem.projection.bias.any()
    assert model.representation.weight.std().item() == pytest.approx(192**-0.5, rel=0.02)


def test_positions_are_small_and_the_class_token_and_head_zero(model):
    assert model.position.table.std().item() == pytest.approx(0.02, rel=0.02)
    assert not model.cls_token.any()
    assert not model.head.weight.any()
    assert not model.head.bias.any()


def test_the_head_can_start_by_saying_no():
    model = create("ViT-Mu/4", num_classes=5, head_bias=-10.0)
    assert torch.equal(model(torch.rand(1, 3, 32, 32)), torch.full((1, 5), -10.0))


def test_big_visions_positions_are_wider():
    model = create("ViT-Ti/16", depth=1, init="big_vision")
    assert model.position.table.std().item() == pytest.approx(192**-0.5, rel=0.02)


def test_quick_positions_are_sines_and_the_class_token_has_none():
    model = create("ViT-Mu/4", init="quick")
    fixed = create("ViT-Mu/4", position="sincos-2d")
    assert torch.allclose(model.position.table[1:], fixed.position.embedding((8, 8))[1:].float())
    assert model.position.table[0].abs().max() < 0.2


def test_timms_values_are_small_normals():
    model = create("ViT-Ti/16", depth=1, init="timm")
    assert model.encoder.blocks[0].attention.qkv.weight.std().item() == pytest.approx(
        0.02, rel=0.02
    )
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.02)
    bound = (3 * 16 * 16) ** -0.5
    assert_uniform(model.stem.projection.weight, bound)
    assert model.cls_token.abs().max().item() < 1e-5


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"unknown initialization 'jax'; known: google"):
        create("ViT-Mu/4", init="jax")


def test_layer_scale_registers_and_pools_have_their_own_first_values():
    model = create("ViT-Mu/4", layer_scale=0.25, registers=3)
    assert (model.encoder.blocks[0].branch2.scale == 0.25).all()
    assert model.registers.std().item() == pytest.approx(0.02, rel=0.3)
    wide = create("ViT-B/16", depth=1, position="learned-2d", init="big_vision")
    assert wide.position.columns.std().item() == pytest.approx(384**-0.5, rel=0.1)
    pooled = create("ViT-B/16", depth=1, pool="map", init="timm")
    assert pooled.pool.probe.std().item() == pytest.approx(0.8796 * 768**-0.5, rel=0.1)


def test_hybrid_units_start_as_their_shortcut():
    model = create("R26+ViT-S/32", depth=1)
    unit = model.stem.resnet.stages[1][1]
    assert not unit.norm3.weight.any()
    images = torch.rand(1, 512, 4, 4)
    assert torch.equal(unit(images), images)


def test_mixers_mlps_start_from_lecun():
    model = create("Mixer-S/32", depth=1)
    weight = model.blocks[0].channel_mixing.fc1.weight
    assert weight.std().item() == pytest.approx(512**-0.5, rel=0.02)
    assert not model.blocks[0].channel_mixing.fc1.bias.any()


@pytest.mark.parametrize("name", ["ViT-Mu/4", "R+ViT-Ti/16", "BiT-R50x1", "Mixer-S/32"])
@pytest.mark.parametrize("init", ["google", "big_vision", "timm", "quick"])
def test_no_weight_is_forgotten(name, init):
    if init in ("timm", "quick") and not hasattr(create(name), "encoder"):
        with pytest.raises(ConfigError, match="is for Vision Transformers"):
            create(name, init=init)
        return
    extras = {"layer_scale": 0.1, "registers": 2, "distillation": True} if "Mu" in name else {}
    model = create(name, **extras, **({"stem": "conv"} if "Mu" in name else {}))
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    initialize(model, init)
    assert [n for n, p in model.named_parameters() if p.isnan().any()] == []


def test_a_generator_decides_every_value():
    def made(seed):
        return create("ViT-Mu/4", pool="map", generator=torch.Generator().manual_seed(seed))

    one, same, other = made(1).state_dict(), made(1).state_dict(), made(2).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["position.table"], other["position.table"])


def test_a_model_made_from_its_class_is_initialized_too(tiny):
    model = VisionTransformer(tiny)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not model.cls_token.any()
