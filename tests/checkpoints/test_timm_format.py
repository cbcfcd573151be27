"""timm's names and their variations (DeiT, DINO, …): round trips are bit-exact."""

from dataclasses import replace

import pytest
import torch
from small_models import load_tensors, random_model, same_weights

from vitrail import NUMERICS, BitConfig, CheckpointError, MixerConfig
from vitrail.checkpoints import bit, dinov3, timm
from vitrail.checkpoints.metadata import Metadata
from vitrail.checkpoints.rules import write
from vitrail.data.preprocessing import Preprocessing, preset

pytestmark = pytest.mark.slow

TIMM = NUMERICS["timm"]


@pytest.fixture
def small(tiny):
    return tiny.change(numerics="timm", num_classes=5)


def tensors_of(config):
    return write(random_model(config), timm.VIT.rules(config))


def loaded(tensors, settings):
    return load_tensors("timm", tensors, settings)[0]


@pytest.mark.parametrize("prefix", ["", "module."])
def test_big_transfer_round_trip(prefix):
    config = BitConfig(blocks=(1, 2, 1, 1), num_classes=5)
    model = random_model(config)
    tensors = write(model, bit.PYTORCH.rules(config))
    assert "body.block2.unit02.gn1.weight" in tensors
    tables = (timm.VIT, timm.BIT, timm.MIXER, bit.PYTORCH)
    assert [each for each in tables if each.matches(tensors)] == [bit.PYTORCH]
    again, _ = load_tensors("bit_pytorch", {prefix + n: t for n, t in tensors.items()})
    assert again.config == config
    assert same_weights(again, model)


def test_duplicate_tensors_raise(small):
    tensors = tensors_of(small)
    wrapped = {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\."):
        loaded(tensors | wrapped, {"heads": 2})
    registers = dict.fromkeys(("reg_token", "register_tokens"), torch.ones(1, 4, 8))
    with pytest.raises(CheckpointError, match="tensors: register_tokens"):
        loaded(tensors | registers, {"heads": 2})


def wrapped(prefix):
    return lambda model, tensors: {prefix + name: tensor for name, tensor in tensors.items()}


def halves(model, tensors):
    model.half().float()
    return {name: tensor.half() for name, tensor in tensors.items()}


def dino(model, tensors):
    head = {f"module.head.{name}": torch.ones(3, 3) for name in ("mlp.0.weight", "last_layer.g")}
    return {f"module.backbone.{name}": tensor for name, tensor in tensors.items()} | head


def deit_iii(model, tensors):
    torch.nn.init.zeros_(model.position.table[0])  # the file has positions of patches alone
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    renamed = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
    for old, new in renamed.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


VARIATIONS = {  # changes of the config, changes of model and tensors, skipped tensors
    **{prefix: ({}, wrapped(prefix), set()) for prefix in ("backbone.", "_orig_mod.module.")},
    "model.": ({}, wrapped("model."), set()),
    "half precision": ({}, halves, set()),
    "representation layer of old timm": ({"representation": 6}, wrapped(""), set()),
    "DINO": ({"num_classes": 0}, dino, {"head.mlp.*", "head.last_layer.*"}),
    "DeiT III": ({"layer_scale": 1e-5, "image_size": 12}, deit_iii, set()),
}


@pytest.mark.parametrize("name", VARIATIONS)
def test_variations_of_names_and_layouts(small, name):
    changes, change, skipped_names = VARIATIONS[name]
    model = random_model(small.change(**changes))
    tensors = write(model, timm.VIT.rules(model.config))
    with torch.no_grad():
        tensors = change(model, {key: tensor.clone() for key, tensor in tensors.items()})
    again, skipped = load_tensors("timm", tensors, {"heads": 2})
    assert again.config == model.config
    assert same_weights(again, model)
    assert skipped.keys() == skipped_names


def test_own_files_keep_their_position_table(small):
    config = small.change(image_size=(8, 16))  # 8 patches and a class token: 9 rows, a square
    header = {"vitrail-model": "{}"}
    with pytest.raises(CheckpointError, match="invalid model description"):
        loaded(tensors_of(config), header)
    settings = {"vitrail": "{}", "heads": 2, "model_args": {"img_size": [8, 16]}}
    assert loaded(tensors_of(config), settings).config == config


def test_heads_and_gelu_priority(small):
    tensors = tensors_of(small.change(width=768, heads=12, mlp_width=8, depth=1))
    for settings, heads in (
        ({}, 12),
        ({"heads": 6}, 6),
        ({"model_args": {"num_heads": 8}}, 8),
        ({"model_args": {"num_heads": 8}, "heads": 6}, 6),
        ({"architecture": "vit_base_patch16_gap_224"}, 16),
        ({"architecture": "vit_base_patch16_gap_224", "heads": 6}, 6),
        ({"architecture": "vit_base_patch16_224.augreg"}, 12),
    ):
        assert loaded(tensors, settings).config.heads == heads, settings
    for settings, gelu in (
        ({}, "exact"),
        ({"model_args": {"act_layer": "gelu"}}, "exact"),
        ({"model_args": {"act_layer": "gelu_tanh"}}, "tanh"),
        ({"architecture": "vit_so400m_patch16_siglip_256"}, "tanh"),
        ({"architecture": "vit_so400m_patch14_siglip_224"}, "exact"),
    ):
        numerics = loaded(tensors_of(small), settings | {"heads": 2}).config.numerics
        assert numerics == replace(TIMM, gelu=gelu), settings


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"-": "heads"}, {}, r"number of heads.*width 8.*heads="),
        ({"fc_norm.weight": 8, "fc_norm.bias": 8, "-": "norm"}, {}, r"norm after average pooling"),
        ({"norm_pre.weight": 8, "norm_pre.bias": 8}, {}, "a bias in patch_embed.proj before norm_"),
        ({"-": "patch_embed.proj.bias"}, {}, r"no bias in patch_embed.proj"),
        ({"-": "norm.bias"}, {}, r"RMSNorm"),
        ({}, {"model_args": {"global_pool": "max"}}, r"global_pool='max'"),
        ({"attn_pool.latent": 8}, {}, r"both a class token and attention pooling"),
        ({}, {"model_args": {"act_layer": "relu"}}, r"act_layer='relu'.*gelu_tanh"),
        ({}, {"model_args": {"act_layer": ["gelu"]}}, r"act_layer=\['gelu'\]"),
        ({"blocks.0.attn.q_norm.weight": 4}, {}, r"missing tensors: blocks\.0\.attn\.k_norm\.bias"),
        ({"-": "blocks.1.mlp.fc2"}, {}, r"missing tensors: blocks\.1\.mlp\.fc2\.bias"),
        ({"patch_embed.backbone.conv1.0.weight": 3}, {}, r"missing tensors: patch_embed\.backbone"),
        ({"pos_embed": (1, 7, 8)}, {}, r"6 patch positions.*not a square grid.*img_size"),
    ],
)
def test_unsupported_checkpoints_raise(small, changes, settings, message):
    tensors = tensors_of(small)
    gone = changes.pop("-", "nothing")
    if gone != "heads":
        settings = {"heads": 2} | settings
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    tensors |= {name: torch.ones(size) for name, size in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        loaded(tensors, settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position": "learned-2d"}, "position='learned-2d'"),
        ({"position_place": "shared"}, "position_place='shared'"),
        ({"stem": "conv"}, "stem='conv'"),
        ({"stem": "resnet", "resnet_blocks": (1, 1), "image_size": 64}, "resnet_blocks=(1, 1)"),
        ({"stem": "resnet", "resnet_width": 2, "image_size": 64}, "resnet_width=2"),
        ({"distillation": True, "registers": 1}, "a distillation token with registers"),
        ({"distillation": True, "num_classes": 0}, "a distillation token without a head"),
        ({"mlp": "swiglu", "pool": "map"}, "SwiGLU with attention pooling"),
        ({"numerics": "transformers"}, "norm_eps=1e-12 (it uses 1e-06)"),
    ],
)
def test_unsupported_features(small, changes, message):
    assert timm.VIT.unsupported(small.change(**changes)) == [message]


def test_unsupported_mixers_bits_and_rotary_vits(small):
    assert timm.VIT.unsupported(small.change(numerics="google")) == []  # act_layer selects it
    mixer = MixerConfig(depth=8, width=512, tokens_mlp=8, channels_mlp=8, patch_size=16)
    theirs, bit_config = mixer.change(numerics="timm"), BitConfig(numerics=TIMM)
    deep, small_bit = replace(bit_config, blocks=(3, 24, 36, 3)), BitConfig(blocks=(1,), channels=1)
    rotary = small.change(position="rotary", key_bias=False, numerics=replace(TIMM, norm_eps=1e-5))
    for table, config, expected in [
        (timm.MIXER, mixer, ["gelu='tanh' (it uses 'exact')"]),
        (timm.MIXER, theirs, []),
        (timm.MIXER, theirs.change(depth=7), ["a Mixer with patch_size=16, depth=7, width=512"]),
        (timm.BIT, deep, ["blocks=(3, 24, 36, 3)"]),
        (timm.BIT, bit_config, []),
        (bit.PYTORCH, BitConfig(), []),
        (bit.PYTORCH, small_bit, ["1 stages", "channels=1"]),
        (bit.PYTORCH, BitConfig(num_classes=0), ["a model without a head"]),
        (dinov3.TIMM, rotary, []),
        (dinov3.TIMM, rotary.change(pre_norm=True), ["a norm before the encoder"]),
        (dinov3.TIMM, rotary.change(numerics="timm"), ["norm_eps=1e-06 (it uses 1e-05)"]),
    ]:
        assert table.unsupported(config) == expected


@pytest.mark.parametrize(
    "settings",
    [
        {"pretrained_cfg": {"input_size": [3, 10, 11]}},  # incomplete patches
        {"model_args": 3, "pretrained_cfg": "none", "architecture": 5, "global_pool": 7},
        {"model_args": {"img_size": "large", "init_values": "x"}, "pretrained_cfg": []},
        {"model_args": {"img_size": [8]}, "pretrained_cfg": {"input_size": 3}},
        {"model_args": {"img_size": -8}, "pretrained_cfg": {"input_size": [3, 0, 0]}},
    ],
    ids=str,
)
def test_invalid_settings_are_ignored(small, settings):
    assert loaded(tensors_of(small), settings | {"heads": 2}).config == small


@pytest.mark.parametrize("size", [(224, 224), (96, 160), (7, 7)], ids=str)
@pytest.mark.parametrize("name", ["timm", "torchvision", "big_vision", "transformers"])
def test_metadata_round_trip_through_config_json(small, name, size):
    config, names = small.change(patch_size=1, image_size=size), ("a", "b", "c", "d", "e")
    about = {"class_names": names, "provenance": {"license": "apache-2.0"}}
    metadata = Metadata(preprocessing=preset(name, size), **about)
    settings = timm.VIT.json_files(config, metadata)["config.json"]
    assert timm.read_metadata(settings, config) == metadata
    if (name, size) == ("timm", (224, 224)):
        assert settings["pretrained_cfg"]["crop_pct"] == 0.9


def test_published_config_json(small):
    stated = {"input_size": [3, 8, 8], "interpolation": "box", "crop_pct": 0.8}
    stated |= {"crop_mode": "squash", "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    names = {"10": "e", "2": "c", "0": "a", "1": "b", "3": "d"}
    settings = {"num_classes": 5, "label_names": names, "pretrained_cfg": stated}
    how = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "interpolation": "area"}
    how = Preprocessing(size=(8, 8), resize_to=(10, 10), **how)
    expected = Metadata(preprocessing=how, class_names=("a", "b", "c", "d", "e"))
    assert timm.read_metadata(settings, small) == expected
    gray = {"pretrained_cfg": {"mean": [0.5], "std": [0.5]}}
    for settings in ({"format": "pt"}, gray):
        assert timm.read_metadata(settings, small) is None
    for wrong in (
        {"mean": "dark"}, {"std": [0, 0, 0]}, {"crop_pct": "all"}, {"crop_pct": 1e-320},
        {"interpolation": ["box"]}, {"interpolation": "magic"}, {"crop_mode": "border"},
    ):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"invalid preprocessing in config\.json"):
            timm.read_metadata({"pretrained_cfg": wrong}, small)
