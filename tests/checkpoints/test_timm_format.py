"""timm's names and their variations (DeiT, DINO, …): round trips are bit-exact."""

import random
from dataclasses import replace

import pytest
import torch
from small_models import as_checkpoint, random_model, same_weights

from vitrail import NUMERICS, BitConfig, CheckpointError, MixerConfig, VitConfig
from vitrail.checkpoints import google, timm
from vitrail.checkpoints.load import strip_wrappers
from vitrail.checkpoints.metadata import Metadata
from vitrail.checkpoints.rules import read, write
from vitrail.data.preprocessing import Preprocessing, preset
from vitrail.models.config import pair

pytestmark = pytest.mark.slow

TIMM = NUMERICS["timm"]


@pytest.fixture
def small(tiny):
    """The tiny model with timm's numerics and five classes."""
    return tiny.change(numerics="timm", num_classes=5)


def metadata_for(config, **more):
    how = preset("timm", pair(config.image_size), config.channels)
    return Metadata(preprocessing=how, **more)


def settings_of(config, table=timm.VIT):
    return table.json_files(config, metadata_for(config))["config.json"]


def loaded(weights, table=timm.VIT, normalize=timm.normalize):
    """Load a checkpoint; return the model and the skipped tensors."""
    normalized = normalize(replace(weights, tensors=strip_wrappers(weights.tensors)))
    assert table.matches(normalized.tensors)
    config = table.infer_config(normalized)
    return read(normalized.tensors, table.rules(config), config), normalized.skipped


def assert_same_logits(one, other):
    assert one.config.image_size == other.config.image_size
    config = one.config
    images = torch.randn(2, config.channels, *pair(config.image_size))
    with torch.no_grad():
        assert torch.equal(one.eval()(images), other.eval()(images))


def random_vit(seed):
    """A small ViT or hybrid that timm supports."""
    rng = random.Random(seed)
    stem = rng.choice(["patches", "patches", "resnet"])
    mlp = rng.choice(["gelu", "gelu", "swiglu"]) if stem == "patches" else "gelu"
    pool = rng.choice(["cls", "mean", "map"] if mlp == "gelu" else ["cls", "mean"])
    special = rng.choice(["registers", "distillation", "neither"])
    distilled = special == "distillation" and (pool, mlp, stem) == ("cls", "gelu", "patches")
    blocks = rng.choice([(), (), (2, 2, 2, 2)]) if stem == "resnet" else ()
    patch = rng.choice([1, 2, (1, 2)]) if stem == "resnet" else rng.choice([2, 4, (2, 4)])
    config = VitConfig(
        depth=rng.choice([1, 2, 11]),
        width=rng.choice([8, 12]),
        mlp_width=rng.choice([5, 16, 29]),
        heads=rng.choice([1, 2, 4]),
        patch_size=patch,
        image_size=1024,  # whatever the stride
        channels=rng.choice([1, 3, 4]),
        num_classes=3 if distilled else rng.choice([0, 3]),
        stem=stem,
        resnet_blocks=blocks,
        position="learned" if distilled else rng.choice(["learned", "learned", "none"]),
        pool=pool,
        registers=rng.choice([1, 4]) if special == "registers" else 0,
        distillation=distilled,
        layer_scale=rng.choice([None, 1e-5, 0.1]),
        qkv_bias=rng.choice([True, False]),
        mlp=mlp,
        numerics=replace(TIMM, gelu=rng.choice(["exact", "tanh"]) if mlp == "gelu" else "exact"),
    )
    down, across = config.stride
    return config.change(image_size=(rng.randint(1, 4) * down, rng.randint(1, 4) * across))


@pytest.mark.parametrize("seed", range(50))
def test_vit_round_trip(seed):
    config = random_vit(seed)
    assert timm.VIT.unsupported(config) == []
    model = random_model(config)
    tensors = write(model, timm.VIT.rules(config))
    again, skipped = loaded(as_checkpoint(tensors, settings_of(config)))
    assert again.config == config
    assert not skipped
    assert same_weights(again, model)


OBLONG_MIXER = MixerConfig(
    depth=2,
    width=8,
    tokens_mlp=5,
    channels_mlp=13,
    patch_size=(2, 4),
    image_size=(4, 12),
    num_classes=3,
    numerics=TIMM,
)
WIDE_GRAY_BIT = BitConfig(blocks=(3,), numerics=TIMM, width_factor=2, channels=1, num_classes=0)


@pytest.mark.parametrize("prefix", ["", "module."])
@pytest.mark.parametrize(
    ("config", "table"),
    [
        (BitConfig(blocks=(3, 4), numerics=TIMM, num_classes=5), timm.BIT),
        (WIDE_GRAY_BIT, timm.BIT),
        (OBLONG_MIXER, timm.MIXER),
        (BitConfig(blocks=(1, 2, 1, 1), num_classes=5), google.PYTORCH_BIT),
    ],
    ids=["BiT", "wide gray BiT without a head", "oblong Mixer", "big_transfer's BiT"],
)
def test_bit_and_mixer_round_trip(config, table, prefix):
    model = random_model(config)
    tensors = {prefix + name: t for name, t in write(model, table.rules(config)).items()}
    if table is google.PYTORCH_BIT:
        again, _ = loaded(as_checkpoint(tensors), table, google.BIT_PYTORCH.normalize)
    else:
        again, _ = loaded(as_checkpoint(tensors, settings_of(config, table)), table)
    assert again.config == config
    assert same_weights(again, model)


def test_big_transfer_names():
    config = BitConfig(blocks=(2, 1, 1, 1), num_classes=5)
    names = write(random_model(config), google.PYTORCH_BIT.rules(config)).keys()
    assert {
        "root.conv.weight",
        "body.block1.unit01.gn1.weight",
        "body.block1.unit01.downsample.weight",
        "body.block1.unit02.conv3.weight",
        "head.gn.bias",
        "head.conv.weight",
    } <= names


def test_tables_match_only_their_own_names(small):
    mixer = MixerConfig(
        depth=1, width=8, tokens_mlp=4, channels_mlp=4, patch_size=4, image_size=8, num_classes=3
    )
    models = {timm.VIT: small, timm.MIXER: mixer, timm.BIT: BitConfig(blocks=(1,), num_classes=3)}
    models[google.PYTORCH_BIT] = models[timm.BIT]
    for table, config in models.items():
        names = dict.fromkeys(write(random_model(config), table.rules(config)))
        assert [each for each in models if each.matches(names)] == [table]


@pytest.mark.parametrize(
    "prefix", ["module.", "backbone.", "module.backbone.", "model.", "_orig_mod.module."]
)
def test_wrappers_are_removed(small, prefix):
    model = random_model(small)
    tensors = write(model, timm.VIT.rules(small))
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    again, _ = loaded(as_checkpoint(wrapped, settings_of(small)))
    assert same_weights(again, model)


def test_colliding_names_raise(small):
    tensors = write(random_model(small), timm.VIT.rules(small))
    both = tensors | {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\."):
        loaded(as_checkpoint(both, settings_of(small)))


def test_renamed_duplicate_raises(dinov2):
    tensors = write(random_model(dinov2), timm.VIT.rules(dinov2))
    both = tensors | {"register_tokens": torch.ones(1, 4, 8)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors: register_tokens"):
        loaded(as_checkpoint(both, {"heads": 2}))


def test_dino_projection_is_skipped(small):
    model = random_model(small.change(num_classes=0))
    tensors = write(model, timm.VIT.rules(model.config))
    dino = {f"module.backbone.{name}": tensor for name, tensor in tensors.items()}
    for name in ("mlp.0.weight", "mlp.0.bias", "last_layer.weight_v"):
        dino[f"module.head.{name}"] = torch.ones(3, 3)
    again, skipped = loaded(as_checkpoint(dino, {"heads": 2}))
    assert same_weights(again, model)
    assert skipped.keys() == {"head.mlp.*", "head.last_layer.*"}
    assert "pre-training" in skipped["head.mlp.*"]


@pytest.fixture
def dinov2(small):
    """A config with all features of DINOv2-giant on a 6 x 6 grid."""
    return small.change(
        registers=4, layer_scale=1e-5, mlp="swiglu", num_classes=0, image_size=24, depth=3
    )


def test_dinov2_names(dinov2):
    model = random_model(dinov2)
    tensors = write(model, timm.VIT.rules(dinov2))
    table = tensors["pos_embed"]
    own = {"mask_token": torch.zeros(1, 8), "register_tokens": tensors.pop("reg_token")}
    for name, tensor in tensors.items():
        name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        chunk = 0 if name.startswith(("blocks.0", "blocks.1")) else 1
        own[name.replace("blocks.", f"blocks.{chunk}.")] = tensor
    own["pos_embed"] = torch.cat([table[:, :1], table[:, 5:]], dim=1)  # registers have no row
    again, skipped = loaded(as_checkpoint(own, {"heads": 2}))
    assert again.config == dinov2
    assert same_weights(again, model)
    assert skipped.keys() == {"mask_token"}


def test_positions_for_patches_only(dinov2):
    model = random_model(dinov2)
    tensors = write(model, timm.VIT.rules(dinov2))
    tensors["pos_embed"] = tensors["pos_embed"][:, 5:]
    again, _ = loaded(as_checkpoint(tensors, {"heads": 2}))
    torch.nn.init.zeros_(model.position.table[0])
    assert same_weights(again, model)


def test_register_positions_are_added_to_registers(dinov2):
    model = random_model(dinov2)
    tensors = write(model, timm.VIT.rules(dinov2))
    assert not tensors["pos_embed"][:, 1:5].any()
    moved = torch.randn(1, 4, 8)
    tensors["pos_embed"][:, 1:5] = moved
    again, _ = loaded(as_checkpoint(tensors, {"heads": 2}))
    with torch.no_grad():
        model.registers += moved[0]
    assert same_weights(again, model)


def test_deit_iii_without_class_position(small):
    config = small.change(layer_scale=1e-5, image_size=12)
    model = random_model(config)
    tensors = write(model, timm.VIT.rules(config))
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    for name in [name for name in tensors if ".ls" in name]:  # the authors' own name
        tensors[name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = tensors.pop(
            name
        )
    again, _ = loaded(as_checkpoint(tensors, {"heads": 2}))
    assert again.config == config
    torch.nn.init.zeros_(model.position.table[0])
    assert same_weights(again, model)


def test_distilled_deit(small):
    model = random_model(small.change(distillation=True))
    tensors = write(model, timm.VIT.rules(model.config))
    assert {"dist_token", "head_dist.weight", "head_dist.bias"} <= tensors.keys()
    assert tensors["pos_embed"].shape == (1, 6, 8)
    again, _ = loaded(as_checkpoint(tensors, {"heads": 2}))
    assert again.config == model.config


def test_representation_layer_of_old_timm(small):
    config = small.change(representation=6)
    model = random_model(config)
    tensors = write(model, timm.VIT.rules(config))
    assert tensors["pre_logits.fc.weight"].shape == (6, 8)
    again, _ = loaded(as_checkpoint(tensors, {"heads": 2}))
    assert again.config == config
    assert_same_logits(again, model)
    assert timm.VIT.unsupported(config) == ["a representation layer"]


def test_own_files_keep_their_position_table(small):
    config = small.change(image_size=(8, 16))  # 8 patches and a class token: 9 rows, a square
    tensors = write(random_model(config), timm.VIT.rules(config))
    weights = as_checkpoint(tensors, {"vitrail": "{}"})
    assert timm.normalize(weights).tensors["pos_embed"].shape == (1, 9, 8)


def test_half_precision(small):
    model = random_model(small).half().float()
    tensors = write(model, timm.VIT.rules(small))
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    again, _ = loaded(as_checkpoint(halves, settings_of(small)))
    assert same_weights(again, model)


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({}, 12),
        ({"heads": 6}, 6),
        ({"model_args": {"num_heads": 8}}, 8),
        ({"model_args": {"num_heads": 8}, "heads": 6}, 6),
        ({"architecture": "vit_base_patch16_gap_224"}, 16),
        ({"architecture": "vit_base_patch16_gap_224", "heads": 6}, 6),
        ({"architecture": "vit_base_patch16_224.augreg"}, 12),
    ],
)
def test_heads_priority(small, settings, heads):
    config = small.change(width=768, heads=12, mlp_width=8, depth=1)
    tensors = write(random_model(config), timm.VIT.rules(config))
    again, _ = loaded(as_checkpoint(tensors, settings))
    assert again.config.heads == heads


@pytest.mark.parametrize(
    ("settings", "gelu"),
    [
        ({}, "exact"),
        ({"model_args": {"act_layer": "gelu"}}, "exact"),
        ({"model_args": {"act_layer": "gelu_tanh"}}, "tanh"),
        ({"architecture": "vit_so400m_patch16_siglip_256"}, "tanh"),
        ({"architecture": "vit_so400m_patch14_siglip_224"}, "exact"),
    ],
)
def test_gelu_priority(small, settings, gelu):
    tensors = write(random_model(small), timm.VIT.rules(small))
    again, _ = loaded(as_checkpoint(tensors, settings | {"heads": 2}))
    assert again.config.numerics == replace(TIMM, gelu=gelu)


def test_incomplete_patches_are_ignored(small):
    tensors = write(random_model(small), timm.VIT.rules(small))
    settings = {"heads": 2, "pretrained_cfg": {"input_size": [3, 10, 11]}}
    again, _ = loaded(as_checkpoint(tensors, settings))
    assert again.config.image_size == 8


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"-": "heads"}, {}, r"number of heads.*width 8.*heads="),
        ({"fc_norm.weight": 8, "fc_norm.bias": 8, "-": "norm"}, {}, r"norm after average pooling"),
        ({"norm_pre.weight": 8, "norm_pre.bias": 8}, {}, r"norm_pre.*CLIP"),
        ({"-": "patch_embed.proj.bias"}, {}, r"no bias in patch_embed.proj"),
        ({}, {"global_pool": "avg"}, r"unused class token.*without config\.json"),
        ({}, {"model_args": {"global_pool": "max"}}, r"global_pool='max'"),
        ({"attn_pool.latent": 8}, {}, r"both a class token and attention pooling"),
        ({}, {"model_args": {"act_layer": "quick_gelu"}}, r"act_layer='quick_gelu'.*gelu_tanh"),
        ({}, {"model_args": {"act_layer": ["gelu"]}}, r"act_layer=\['gelu'\]"),
        (
            {"blocks.0.attn.q_norm.weight": 4},
            {},
            r"unexpected tensors: blocks\.0\.attn\.q_norm\.weight",
        ),
        ({"-": "blocks.1.mlp.fc2"}, {}, r"missing tensors: blocks\.1\.mlp\.fc2\.bias"),
        (
            {"patch_embed.backbone.conv1.0.weight": 3},
            {},
            r"missing tensors: patch_embed\.backbone\.stem",
        ),
        ({"pos_embed": (1, 7, 8)}, {}, r"6 patch positions.*not a square grid.*img_size"),
    ],
)
def test_unsupported_checkpoints_raise(small, changes, settings, message):
    tensors = write(random_model(small), timm.VIT.rules(small))
    gone = changes.pop("-", "nothing")
    if gone != "heads":
        settings = {"heads": 2} | settings
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    tensors |= {name: torch.ones(size) for name, size in changes.items()}
    with pytest.raises(CheckpointError, match=message):
        loaded(as_checkpoint(tensors, settings))


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


def test_tanh_gelu_is_supported_for_vit_only(small):
    assert timm.VIT.unsupported(small.change(numerics="google")) == []
    mixer = MixerConfig(
        depth=8, width=512, tokens_mlp=8, channels_mlp=8, patch_size=16, image_size=32
    )
    assert timm.MIXER.unsupported(mixer) == ["gelu='tanh' (it uses 'exact')"]
    assert timm.MIXER.unsupported(mixer.change(numerics="timm")) == []
    assert timm.MIXER.unsupported(mixer.change(numerics="timm", depth=7)) == [
        "a Mixer with patch_size=16, depth=7, width=512"
    ]


def test_unsupported_bit_depths():
    deep = BitConfig(blocks=(3, 24, 36, 3), numerics=TIMM)
    assert timm.BIT.unsupported(deep) == ["blocks=(3, 24, 36, 3)"]
    assert timm.BIT.unsupported(BitConfig(numerics=TIMM)) == []
    assert google.PYTORCH_BIT.unsupported(BitConfig()) == []
    assert google.PYTORCH_BIT.unsupported(BitConfig(blocks=(1,), channels=1, num_classes=0)) == [
        "1 stages",
        "channels=1",
        "a model without a head",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"model_args": 3, "pretrained_cfg": "none", "architecture": 5, "global_pool": 7},
        {"model_args": {"img_size": "large", "init_values": "x"}, "pretrained_cfg": []},
        {"model_args": {"img_size": [8]}, "pretrained_cfg": {"input_size": 3}},
        {"model_args": {"img_size": -8}, "pretrained_cfg": {"input_size": [3, 0, 0]}},
    ],
    ids=str,
)
def test_invalid_settings_are_ignored(small, settings):
    tensors = write(random_model(small), timm.VIT.rules(small))
    again, _ = loaded(as_checkpoint(tensors, settings | {"heads": 2}))
    assert again.config == small


@pytest.mark.parametrize("size", [(224, 224), (384, 384), (96, 160), (7, 7)], ids=str)
@pytest.mark.parametrize("name", ["timm", "torchvision", "big_vision", "transformers"])
def test_metadata_round_trip_through_config_json(small, name, size):
    config = small.change(patch_size=1, image_size=size)
    metadata = Metadata(
        preprocessing=preset(name, size),
        class_names=("a", "b", "c", "d", "e"),
        provenance={"license": "apache-2.0"},
    )
    settings = timm.VIT.json_files(config, metadata)["config.json"]
    assert timm.read_metadata(settings, config) == metadata


def test_default_crop_pct(small):
    config = small.change(patch_size=1, image_size=224)
    metadata = Metadata(preprocessing=preset("timm", (224, 224)))
    settings = timm.VIT.json_files(config, metadata)["config.json"]
    assert settings["pretrained_cfg"]["crop_pct"] == 0.9


def test_published_config_json(small):
    settings = {
        "architecture": "vit_base_patch16_224",
        "num_classes": 5,
        "global_pool": "token",
        "label_names": {"10": "e", "2": "c", "0": "a", "1": "b", "3": "d"},
        "pretrained_cfg": {
            "input_size": [3, 8, 8],
            "interpolation": "box",
            "crop_pct": 0.8,
            "crop_mode": "squash",
            "mean": [0.1, 0.2, 0.3],
            "std": [0.4, 0.5, 0.6],
        },
    }
    metadata = timm.read_metadata(settings, small)
    assert metadata == Metadata(
        preprocessing=Preprocessing(
            size=(8, 8),
            resize_to=(10, 10),
            interpolation="area",
            mean=(0.1, 0.2, 0.3),
            std=(0.4, 0.5, 0.6),
        ),
        class_names=("a", "b", "c", "d", "e"),
    )


def test_no_metadata_without_pretrained_cfg(small):
    assert timm.read_metadata({"format": "pt"}, small) is None
    gray = {"pretrained_cfg": {"mean": [0.5], "std": [0.5]}}
    assert timm.read_metadata(gray, small) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"mean": "dark"},
        {"std": [0, 0, 0]},
        {"crop_pct": "all"},
        {"crop_pct": 1e-320},
        {"interpolation": ["box"]},
        {"interpolation": "magic"},
        {"crop_mode": "border"},
    ],
    ids=str,
)
def test_invalid_pretrained_cfg_raises(small, wrong):
    with pytest.raises(CheckpointError, match=r"invalid preprocessing in config\.json"):
        timm.read_metadata({"pretrained_cfg": wrong}, small)
