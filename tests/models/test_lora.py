import pytest
import torch

from tiny_models import awake
from vitrail.errors import ConfigError
from vitrail.models.config import BitConfig, MixerConfig, VitConfig
from vitrail.models.lora import LoraLinear, add_lora, merge_lora
from vitrail.models.vit import build

SIZES = {"depth": 2, "width": 16, "patch_size": 4, "image_size": 16, "num_classes": 3}
VIT = VitConfig(mlp_width=32, heads=2, **SIZES)
CONFIGS = {
    "ViT": VIT,
    "no bias": VIT.change(qkv_bias=False),
    "DINOv3": VIT.change(position="rotary", key_bias=False, registers=2, mlp="swiglu"),
    "QK-norm": VIT.change(qk_norm=True, pool="mean", position="relative"),
    "attention pooling": VIT.change(pool="map"),
    "axial": VIT.change(attention="axial", pool="mean"),
    "distillation": VIT.change(distillation=True),
    "Mixer": MixerConfig(tokens_mlp=8, channels_mlp=32, **SIZES),
}


def adapted(config, rank=2, alpha=6.0):
    """A model with updates that are not zero, and the state dict before them."""
    model = awake(config)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    add_lora(model, rank, alpha)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model, before


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_merged_model_equals_the_adapted_model(config):
    model, before = adapted(config)
    images = torch.randn(3, 3, 16, 16)
    merged = build(config, device="cpu").eval()
    merged.load_state_dict(merge_lora(model.state_dict(), 3.0))
    expected = model(images)
    assert (merged(images) - expected).abs().max() < 1e-5 * expected.abs().max()
    base = build(config, device="cpu").eval()
    base.load_state_dict(before)
    assert (base(images) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_only_updates_and_head_are_trained(config):
    model, before = adapted(config)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    named = dict(model.named_parameters())
    trained = {name for name, parameter in named.items() if parameter.grad is not None}
    assert {name for name, p in named.items() if p.requires_grad} == trained
    layers = {name.removesuffix(".lora_a") for name in named if name.endswith("lora_a")}
    kinds = {"fc1", "fc2"} if isinstance(config, MixerConfig) else {"qkv", "merge", "fc1", "fc2"}
    assert {name.split(".")[-1] for name in layers} == kinds
    expected = {f"{layer}.{part}" for layer in layers for part in ("lora_a", "lora_b")}
    assert trained == expected | {n for n in before if n.split("_")[-1].startswith("head.")}
    assert all(named[name].grad.abs().max() > 0 for name in trained)
    assert named.keys() - expected == before.keys()


def test_update_is_zero_at_first_and_depends_on_the_seed():
    images, model = torch.randn(2, 3, 16, 16), awake(VIT)
    before = model(images)
    add_lora(model, 4, seed=1)
    torch.testing.assert_close(model(images), before)
    states = []
    for seed in (1, 1, 2):
        states.append(awake(VIT))
        add_lora(states[-1], 4, seed=seed)
    first, again, other = (dict(model.named_parameters()) for model in states)
    name = "encoder.blocks.1.mlp.fc1.lora_a"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("1.mlp", "0.mlp")])


def test_queries_keys_and_values_have_their_own_updates():
    layer = torch.nn.Linear(16, 48)
    lora = LoraLinear(layer, 2, 2.0, parts=3, seed=0)
    torch.nn.init.normal_(lora.lora_b)
    change = merge_lora(lora.state_dict(), 1.0)["weight"] - layer.weight
    assert torch.linalg.matrix_rank(change) == 6
    for part in range(3):
        rows, rank = slice(16 * part, 16 * part + 16), slice(2 * part, 2 * part + 2)
        expected = lora.lora_b[rows] @ lora.lora_a[rank]
        torch.testing.assert_close(change[rows], expected, atol=1e-6, rtol=1e-5)


def test_invalid_ranks_and_models_raise():
    for rank in (0, -1, 9, 1000):
        with pytest.raises(ConfigError, match=f"lora={rank} must be a rank from 1 to 8"):
            add_lora(build(VIT), rank)
    add_lora(build(VIT), 8)
    model = build(BitConfig(blocks=(1, 1), image_size=32, num_classes=3))
    with pytest.raises(ConfigError, match=r"lora=4: LoRA needs nn\.Linear .*; BiT has none"):
        add_lora(model, 4)
