"""Axial attention of appendix D.6: Axial-ViT and AxialResNet."""

import pytest
import torch
from torch import nn

import vitrail
from tiny_models import awake
from tiny_runs import tiny_run, write_colors
from vitrail import BitConfig, ConfigError, VitConfig, load, save
from vitrail.models.registry import configuration, name_of
from vitrail.models.resnet import AXIAL_HEADS, AxialAttention
from vitrail.models.vit import build
from vitrail.planning.flops import cost_of
from vitrail.training.config import ModelSettings

SIZES = {"depth": 2, "width": 16, "mlp_width": 24, "heads": 2, "patch_size": 4, "num_classes": 3}
AXIAL = VitConfig(image_size=(12, 8), attention="axial", pool="mean", **SIZES)


def test_tokens_read_their_row_and_then_their_column():
    """After one block, a patch affects its row alone; after two, all patches."""
    model = awake(AXIAL.change(image_size=16))
    images = torch.randn(1, 3, 16, 16)
    changed = images.clone()
    changed[:, :, 4:8, 8:12] += 1  # the patch in row 1, column 2
    rows, both = (
        (one != other).any(dim=-1).view(4, 4)
        for one, other in zip(model.layers(images), model.layers(changed), strict=True)
    )
    assert rows.nonzero()[:, 0].unique().tolist() == [1]
    assert rows[1].all()
    assert both.all()


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("cells", [5, 3])
def test_position_sensitive_attention_follows_its_equation(columns, cells):
    """Equation 4 of Wang et al. 2020, one query at a time."""
    torch.manual_seed(0)
    module = AxialAttention(32, 5, BitConfig().numerics, columns=columns).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    shape = (cells, 4) if columns else (4, cells)
    images = torch.randn(2, 32, *shape, dtype=torch.float64)
    with torch.no_grad():
        found = module(images)
        joint = module.norm(module.qkv(images)).unflatten(1, (AXIAL_HEADS, 8))
        table = module.table
        if cells != 5:  # bilinear interpolation from offsets -4 … 4 to -2 … 2
            table = table[::2]
        expected = torch.zeros_like(found).unflatten(1, (AXIAL_HEADS, 4))
        for line in range(4):
            cut = joint[..., line] if columns else joint[..., line, :]
            q, k, v = cut[:, :, :2], cut[:, :, 2:4], cut[:, :, 4:]  # (B, heads, channels, cells)
            for i in range(cells):
                logits, values = [], []
                for j in range(cells):
                    r_q, r_k, r_v = table[j - i + cells - 1].split([2, 2, 4])
                    content = (q[..., i] * k[..., j]).sum(-1)
                    position = q[..., i] @ r_q + k[..., j] @ r_k
                    logits.append((content + position) / 2**0.5)
                    values.append(v[..., j] + r_v)
                weights = torch.stack(logits).softmax(0)
                mixed = (weights[..., None] * torch.stack(values)).sum(0)  # (B, heads, channels)
                place = (..., i, line) if columns else (..., line, i)
                expected[place] = mixed
    torch.testing.assert_close(found, expected.flatten(1, 2), rtol=1e-12, atol=1e-12)


def test_parameters():
    """The appendix publishes none. Without norms, AxialResNet has those of the code it is based on
    (github.com/csrhddlam/axial-deeplab, axial50s and axial50l), and ViT-B's blocks are doubled."""
    for patch_size in (16, 32):
        vit = build(configuration(f"ViT-B/{patch_size}"))
        axial = build(configuration(f"Axial-ViT-B/{patch_size}"))
        blocks, total, doubled = (
            sum(parameter.numel() for parameter in module.parameters())
            for module in (nn.ModuleList(vit.encoder.blocks), vit, axial)
        )
        assert doubled == total + blocks - 2 * 768  # no class token, no position of it
    for factor, expected in ((1, 11_497_704), (2, 43_797_992)):
        model = build(configuration(f"AxialResNet-50x{factor}"))
        norms = [m for m in model.modules() if isinstance(m, nn.GroupNorm)]
        excluded = sum(parameter.numel() for norm in norms for parameter in norm.parameters())
        assert sum(parameter.numel() for parameter in model.parameters()) - excluded == expected


def test_flops_count_rows_and_columns():
    rows, columns, width, hidden = 3, 2, 16, 24
    tokens = rows * columns
    block = 4 * tokens * width**2 + 2 * tokens * width * hidden
    attention = 2 * tokens * columns * width + 2 * tokens * rows * width  # first rows, then columns
    stem = tokens * 4 * 4 * 3 * width
    cost = cost_of(AXIAL.change(num_classes=0))
    assert cost.forward == 2 * (stem + 2 * block + attention)
    axial, plain = (cost_of(configuration(name)) for name in ("Axial-ViT-B/16", "ViT-B/16"))
    assert plain.forward < axial.forward < 2 * plain.forward  # "at the cost of more compute"


def test_names():
    for name in ("Axial-ViT-B/16", "AxialResNet-50x2"):
        config = configuration(name.lower())
        assert name_of(config.change(num_classes=7)) == name
    assert name_of(configuration("Axial-ViT-B/16").change(attention="global")) != "Axial-ViT-B/16"
    assert name_of(AXIAL) == "axial ViT of 2 blocks and width 16"
    unnamed = configuration("AxialResNet-50x1").change(blocks=(1, 1))
    assert name_of(unnamed) == "AxialResNet of 2 units, 1 times as wide"


def test_axial_models_cannot_merge_tokens_nor_be_converted(tmp_path):
    model = awake(AXIAL)
    with pytest.raises(ConfigError, match="that axial attention needs"):
        model.merge = 1
    resnet = awake(BitConfig(blocks=(1, 1), unit="axial", image_size=32, num_classes=3))
    for each in (model, resnet):
        for format in ("timm", "huggingface", "google"):
            with pytest.raises(
                vitrail.CheckpointError, match=f"{format} does not support axial attention"
            ):
                save(each, tmp_path / format, format)
        save(each, tmp_path / each.config.__class__.__name__)
        assert load(tmp_path / each.config.__class__.__name__).config == each.config


def test_axial_resnet_takes_multiples_of_its_stride():
    model = awake(BitConfig(blocks=(1, 1), unit="axial", image_size=32, num_classes=3))
    assert model(torch.randn(2, 3, 24, 40)).shape == (2, 3)
    with pytest.raises(vitrail.DataError, match="not a whole number of 8-pixel"):
        model(torch.randn(2, 3, 24, 36))
    with pytest.raises(ConfigError, match="try image_size=224"):
        vitrail.create("AxialResNet-50x1", image_size=220)


@pytest.mark.parametrize(
    "model",
    [
        ModelSettings(name="Axial-ViT-B/32", image_size=16, patch_size=4, width=16, heads=2),
        ModelSettings(name="AxialResNet-50x1", image_size=32),
    ],
    ids=lambda model: model.name,
)
def test_axial_models_train(model, tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    steps = 8 if "ViT" in model.name else 2
    result = tiny_run(data, tmp_path / "run", model=model, steps=steps)
    assert result.finished
    trained = load(tmp_path / "run").config
    assert "axial" in (getattr(trained, "attention", ""), getattr(trained, "unit", ""))
