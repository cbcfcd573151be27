"""timm's names and everybody's who builds on them: what is written is read, bit for bit."""

import random
from dataclasses import replace

import pytest
import torch

from vitrail import NUMERICS, BitConfig, CheckpointError, MixerConfig, VitConfig
from vitrail.checkpoints import bit_pytorch, timm_bit, timm_mixer, timm_vit
from vitrail.checkpoints.facts import Facts
from vitrail.checkpoints.files import Weights, read_file, write_file
from vitrail.checkpoints.formats import unwrapped
from vitrail.checkpoints.rules import read, write
from vitrail.data.preprocessing import preset
from vitrail.models.build import build
from vitrail.models.config import pair

TIMM = NUMERICS["timm"]


@pytest.fixture
def small(tiny):
    """The tiny model with timm's numerics and five classes."""
    return tiny.change(numerics="timm", num_classes=5)


@torch.no_grad()
def awake(config):
    """A model none of whose weights is zero or one."""
    model = build(config, device="cpu").eval()
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


def facts_for(config, **more):
    how = preset("timm", pair(config.image_size), config.channels)
    return Facts(preprocessing=how, **more)


def settings_of(config, table=timm_vit):
    return table.companions(config, facts_for(config))["config.json"]


def stored(path, tensors, settings=None):
    """The tensors as a file gives them back, with a config.json's settings beside them."""
    write_file(path / "model.safetensors", tensors, None)
    return Weights(read_file(path / "model.safetensors").entries, settings or {})


def loaded(weights, table=timm_vit, tidy=timm_vit.tidy):
    """The model that weights make, and what was left out of them."""
    tidied = tidy(replace(weights, entries=unwrapped(weights.entries)))
    assert table.recognizes(tidied.entries)
    config = table.describe(tidied)
    return read(tidied.entries, table.rules(config), config), tidied.left_out


def assert_same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def assert_same_logits(one, other):
    assert one.config.image_size == other.config.image_size
    config = one.config
    images = torch.randn(2, config.channels, *pair(config.image_size))
    with torch.no_grad():
        assert torch.equal(one.eval()(images), other.eval()(images))


def random_vit(seed):
    """A small ViT or hybrid of a shape that timm has arguments for."""
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
def test_a_vit_comes_back_bit_for_bit(tmp_path, seed):
    config = random_vit(seed)
    assert timm_vit.cannot(config) == []
    model = awake(config)
    tensors = write(model, timm_vit.rules(config))
    again, left_out = loaded(stored(tmp_path, tensors, settings_of(config)))
    assert again.config == config
    assert not left_out
    assert_same_weights(again, model)


@pytest.mark.parametrize(
    ("config", "table", "tidy"),
    [
        (BitConfig(blocks=(3, 4), numerics=TIMM, num_classes=5), timm_bit, timm_vit.tidy),
        (
            BitConfig(blocks=(3,), numerics=TIMM, width_factor=2, channels=1, num_classes=0),
            timm_bit,
            timm_vit.tidy,
        ),
        (
            MixerConfig(
                depth=2,
                width=8,
                tokens_mlp=5,
                channels_mlp=13,
                patch_size=(2, 4),
                image_size=(4, 12),
                num_classes=3,
                numerics=TIMM,
            ),
            timm_mixer,
            timm_vit.tidy,
        ),
        (BitConfig(blocks=(1, 2, 1, 1), num_classes=5), bit_pytorch, lambda weights: weights),
    ],
    ids=["BiT", "wide gray BiT without a head", "oblong Mixer", "big_transfer's BiT"],
)
@pytest.mark.parametrize("prefix", ["", "module."])
def test_the_other_families_come_back_bit_for_bit(tmp_path, config, table, tidy, prefix):
    model = awake(config)
    tensors = write(model, table.rules(config))
    weights = stored(tmp_path, {prefix + name: tensor for name, tensor in tensors.items()})
    if table is not bit_pytorch:
        weights = Weights(weights.entries, settings_of(config, table))
    again, _ = loaded(weights, table, tidy)
    assert again.config == config
    assert_same_weights(again, model)


def test_big_transfer_names_its_tensors_as_its_code_does():
    names = write(awake(BitConfig(blocks=(2, 1, 1, 1), num_classes=5)), bit_rules()).keys()
    assert {
        "root.conv.weight",
        "body.block1.unit01.gn1.weight",
        "body.block1.unit01.downsample.weight",
        "body.block1.unit02.conv3.weight",
        "head.gn.bias",
        "head.conv.weight",
    } <= names


def bit_rules():
    return bit_pytorch.rules(BitConfig(blocks=(2, 1, 1, 1), num_classes=5))


def test_tables_do_not_take_each_other_for_their_own(small):
    mixer = MixerConfig(
        depth=1, width=8, tokens_mlp=4, channels_mlp=4, patch_size=4, image_size=8, num_classes=3
    )
    models = {timm_vit: small, timm_mixer: mixer, timm_bit: BitConfig(blocks=(1,), num_classes=3)}
    models[bit_pytorch] = models[timm_bit]
    for table, config in models.items():
        names = dict.fromkeys(write(awake(config), table.rules(config)))
        assert [each for each in models if each.recognizes(names)] == [table]


@pytest.mark.parametrize(
    "prefix", ["module.", "backbone.", "module.backbone.", "model.", "_orig_mod.module."]
)
def test_wrappers_are_taken_off(tmp_path, small, prefix):
    model = awake(small)
    tensors = write(model, timm_vit.rules(small))
    wrapped = {prefix + name: tensor for name, tensor in tensors.items()}
    again, _ = loaded(stored(tmp_path, wrapped, settings_of(small)))
    assert_same_weights(again, model)


def test_names_that_would_fall_together_are_left_alone(tmp_path, small):
    tensors = write(awake(small), timm_vit.rules(small))
    both = tensors | {f"model.{name}": tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"no place for model\."):
        loaded(stored(tmp_path, both, settings_of(small)))


def test_no_tensor_hides_another(tmp_path, dinov2):
    tensors = write(awake(dinov2), timm_vit.rules(dinov2))
    both = tensors | {"register_tokens": torch.ones(1, 4, 8)}
    with pytest.raises(CheckpointError, match=r"no place for register_tokens"):
        loaded(stored(tmp_path, both, {"heads": 2}))


def test_dino_comes_without_its_projection(tmp_path, small):
    model = awake(small.change(num_classes=0))
    tensors = write(model, timm_vit.rules(model.config))
    dino = {f"module.backbone.{name}": tensor for name, tensor in tensors.items()}
    for name in ("mlp.0.weight", "mlp.0.bias", "last_layer.weight_v"):
        dino[f"module.head.{name}"] = torch.ones(3, 3)
    again, left_out = loaded(stored(tmp_path, dino, {"heads": 2}))
    assert_same_weights(again, model)
    assert left_out.keys() == {"head.mlp.*", "head.last_layer.*"}
    assert "pre-training" in left_out["head.mlp.*"]


@pytest.fixture
def dinov2(small):
    """A model with everything DINOv2's giant has, on a grid of 6 x 6."""
    return small.change(
        registers=4, layer_scale=1e-5, mlp="swiglu", num_classes=0, image_size=24, depth=3
    )


def test_dinov2_has_names_of_its_own(tmp_path, dinov2):
    model = awake(dinov2)
    tensors = write(model, timm_vit.rules(dinov2))
    table = tensors["pos_embed"]
    own = {"mask_token": torch.zeros(1, 8), "register_tokens": tensors.pop("reg_token")}
    for name, tensor in tensors.items():
        name = name.replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3")
        chunk = 0 if name.startswith(("blocks.0", "blocks.1")) else 1
        own[name.replace("blocks.", f"blocks.{chunk}.")] = tensor
    own["pos_embed"] = torch.cat([table[:, :1], table[:, 5:]], dim=1)  # registers have no row
    again, left_out = loaded(stored(tmp_path, own, {"heads": 2}))
    assert again.config == dinov2
    assert_same_weights(again, model)
    assert left_out.keys() == {"mask_token"}


def test_timm_places_the_patches_of_dinov2_alone(tmp_path, dinov2):
    model = awake(dinov2)
    tensors = write(model, timm_vit.rules(dinov2))
    tensors["pos_embed"] = tensors["pos_embed"][:, 5:]
    again, _ = loaded(stored(tmp_path, tensors, {"heads": 2}))
    torch.nn.init.zeros_(model.position.table[0])
    assert_same_weights(again, model)


def test_positions_of_registers_become_part_of_them(tmp_path, dinov2):
    model = awake(dinov2)
    tensors = write(model, timm_vit.rules(dinov2))
    assert not tensors["pos_embed"][:, 1:5].any()
    moved = torch.randn(1, 4, 8)
    tensors["pos_embed"][:, 1:5] = moved
    again, _ = loaded(stored(tmp_path, tensors, {"heads": 2}))
    with torch.no_grad():
        model.registers += moved[0]
    assert_same_weights(again, model)


def test_deit_iii_does_not_place_the_class_token(tmp_path, small):
    config = small.change(layer_scale=1e-5, image_size=12)
    model = awake(config)
    tensors = write(model, timm_vit.rules(config))
    tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
    for name in [name for name in tensors if ".ls" in name]:  # the authors' own name
        tensors[name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2")] = tensors.pop(
            name
        )
    again, _ = loaded(stored(tmp_path, tensors, {"heads": 2}))
    assert again.config == config
    torch.nn.init.zeros_(model.position.table[0])
    assert_same_weights(again, model)


def test_a_distilled_deit_has_two_of_everything(tmp_path, small):
    model = awake(small.change(distillation=True))
    tensors = write(model, timm_vit.rules(model.config))
    assert {"dist_token", "head_dist.weight", "head_dist.bias"} <= tensors.keys()
    assert tensors["pos_embed"].shape == (1, 6, 8)
    again, _ = loaded(stored(tmp_path, tensors, {"heads": 2}))
    assert again.config == model.config


def test_the_layer_timm_dropped_is_kept(tmp_path, small):
    config = small.change(representation=6)
    model = awake(config)
    tensors = write(model, timm_vit.rules(config))
    assert tensors["pre_logits.fc.weight"].shape == (6, 8)
    again, _ = loaded(stored(tmp_path, tensors, {"heads": 2}))
    assert again.config == config
    assert_same_logits(again, model)
    assert timm_vit.cannot(config) == ["a representation layer"]


def test_a_file_from_here_is_read_as_it_was_written(tmp_path, small):
    config = small.change(image_size=(8, 16))  # 8 patches and a class token: 9 rows, a square
    tensors = write(awake(config), timm_vit.rules(config))
    weights = stored(tmp_path, tensors, {"vitrail": "{}"})
    assert timm_vit.tidy(weights).entries["pos_embed"].shape == (1, 9, 8)


def test_half_precision_is_read(tmp_path, small):
    model = awake(small).half().float()
    tensors = write(model, timm_vit.rules(small))
    halves = {name: tensor.half() for name, tensor in tensors.items()}
    again, _ = loaded(stored(tmp_path, halves, settings_of(small)))
    assert_same_weights(again, model)


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
def test_heads_are_what_is_said_or_usual(tmp_path, small, settings, heads):
    config = small.change(width=768, heads=12, mlp_width=8, depth=1)
    tensors = write(awake(config), timm_vit.rules(config))
    again, _ = loaded(stored(tmp_path, tensors, settings))
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
def test_the_gelu_is_what_is_said_or_usual(tmp_path, small, settings, gelu):
    tensors = write(awake(small), timm_vit.rules(small))
    again, _ = loaded(stored(tmp_path, tensors, settings | {"heads": 2}))
    assert again.config.numerics == replace(TIMM, gelu=gelu)


def test_pixels_that_fill_no_patch_are_not_counted(tmp_path, small):
    tensors = write(awake(small), timm_vit.rules(small))
    settings = {"heads": 2, "pretrained_cfg": {"input_size": [3, 10, 11]}}
    again, _ = loaded(stored(tmp_path, tensors, settings))
    assert again.config.image_size == 8


@pytest.mark.parametrize(
    ("changes", "settings", "words"),
    [
        ({"-": "heads"}, {}, r"how many heads.*width 8.*heads="),
        ({"fc_norm.weight": 8, "fc_norm.bias": 8, "-": "norm"}, {}, r"norm after the average"),
        ({"norm_pre.weight": 8, "norm_pre.bias": 8}, {}, r"norm_pre.*CLIP"),
        ({"-": "patch_embed.proj.bias"}, {}, r"patches without a bias"),
        ({}, {"global_pool": "avg"}, r"class token that nothing reads.*without config\.json"),
        ({}, {"model_args": {"global_pool": "max"}}, r"the pooling 'max'"),
        ({"attn_pool.latent": 8}, {}, r"class token beside attention pooling"),
        ({}, {"model_args": {"act_layer": "quick_gelu"}}, r"act_layer='quick_gelu'.*gelu_tanh"),
        ({}, {"model_args": {"act_layer": ["gelu"]}}, r"act_layer=\['gelu'\]"),
        ({"blocks.0.attn.q_norm.weight": 4}, {}, r"no place for blocks\.0\.attn\.q_norm\.weight"),
        ({"-": "blocks.1.mlp.fc2"}, {}, r"has no blocks\.1\.mlp\.fc2\.bias"),
        ({"patch_embed.backbone.conv1.0.weight": 3}, {}, r"has no patch_embed\.backbone\.stem"),
        ({"pos_embed": (1, 7, 8)}, {}, r"6 patches.*no square grid.*img_size"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path, small, changes, settings, words):
    tensors = write(awake(small), timm_vit.rules(small))
    gone = changes.pop("-", "nothing")
    if gone != "heads":
        settings = {"heads": 2} | settings
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(gone)}
    tensors |= {name: torch.ones(size) for name, size in changes.items()}
    with pytest.raises(CheckpointError, match=words):
        loaded(stored(tmp_path, tensors, settings))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"position": "learned-2d"}, "positions of the kind 'learned-2d'"),
        ({"position_place": "shared"}, "positions placed at 'shared'"),
        ({"stem": "conv"}, "the stem 'conv'"),
        ({"stem": "resnet", "resnet_blocks": (1, 1), "image_size": 64}, "a ResNet of (1, 1) units"),
        ({"stem": "resnet", "resnet_width": 2, "image_size": 64}, "a ResNet 2 times as wide"),
        ({"distillation": True, "registers": 1}, "a distillation token with registers"),
        ({"distillation": True, "num_classes": 0}, "a distillation token without a head"),
        ({"mlp": "swiglu", "pool": "map"}, "SwiGLU with attention pooling"),
        ({"numerics": "transformers"}, "norm_eps=1e-12 (it computes with 1e-06)"),
    ],
)
def test_what_timm_cannot_express_is_said(small, changes, words):
    assert timm_vit.cannot(small.change(**changes)) == [words]


def test_timm_can_compute_googles_gelu_in_a_vit_but_not_in_a_mixer(small):
    assert timm_vit.cannot(small.change(numerics="google")) == []
    mixer = MixerConfig(
        depth=8, width=512, tokens_mlp=8, channels_mlp=8, patch_size=16, image_size=32
    )
    assert timm_mixer.cannot(mixer) == ["gelu='tanh' (it computes with 'exact')"]
    assert timm_mixer.cannot(mixer.change(numerics="timm")) == []
    assert timm_mixer.cannot(mixer.change(numerics="timm", depth=7)) == [
        "a Mixer of patch size 16, depth 7 and width 512"
    ]


def test_timm_has_no_bit_of_other_depths():
    bit = BitConfig(blocks=(3, 24, 36, 3), numerics=TIMM)
    assert timm_bit.cannot(bit) == ["a BiT of (3, 24, 36, 3) units"]
    assert timm_bit.cannot(BitConfig(numerics=TIMM)) == []
    assert bit_pytorch.cannot(BitConfig()) == []
    assert bit_pytorch.cannot(BitConfig(blocks=(1,), channels=1, num_classes=0)) == [
        "1 stages",
        "1 channels",
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
def test_settings_that_make_no_sense_are_not_believed(tmp_path, small, settings):
    tensors = write(awake(small), timm_vit.rules(small))
    again, _ = loaded(stored(tmp_path, tensors, settings | {"heads": 2}))
    assert again.config == small
