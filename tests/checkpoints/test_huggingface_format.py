"""transformers' names and settings in both directions, without transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VIT, as_checkpoint, random_model, same_weights

from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing, VitConfig
from vitrail.checkpoints import huggingface
from vitrail.checkpoints.files import Checkpoint, LazyTensor
from vitrail.checkpoints.huggingface import unsupported_preprocessing
from vitrail.checkpoints.load import read_foreign
from vitrail.checkpoints.rules import write
from vitrail.data.preprocessing import preset
from vitrail.models.config import Numerics

PROCESSOR = "preprocessor_config.json"
THEIRS = VIT.change(numerics="transformers")
NEW_NAMES = {  # what transformers 5 calls the tensors of its files, in memory
    "encoder.layer.": "layers.",
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "intermediate.dense": "mlp.fc1",
    "output.dense": "mlp.fc2",
}
DINO_NAMES = {
    "intermediate.dense": "mlp.fc1",
    "attention.output.dense": "attention.OUT",
    "output.dense": "mlp.fc2",
    "attention.OUT": "attention.output.dense",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
}


def weights_of(model, stated):
    return as_checkpoint(write(model, huggingface.VIT.rules(model.config)), stated)


def config_json(config, names=()):
    """config.json after a JSON round trip."""
    metadata = Metadata(preprocessing=preset("transformers", (8, 8)), class_names=names)
    return json.loads(json.dumps(huggingface.VIT.json_files(config, metadata)["config.json"]))


def renamed(weights, change):
    return Checkpoint(
        {change(name): entry for name, entry in weights.tensors.items()}, weights.settings
    )


def replacing(table):
    def change(name):
        for old, new in table.items():
            name = name.replace(old, new)
        return name

    return change


def load(weights):
    return read_foreign(weights, "huggingface")[0]


@st.composite
def configs(draw):
    """Any ViT that transformers can express."""
    sizes = st.integers(1, 3)
    heads, patch = draw(sizes), (draw(sizes), draw(sizes))
    classes = draw(st.sampled_from([0, 1, 2, 5]))
    eps, gelu = draw(st.sampled_from([1e-12, 1e-6, 1e-5])), draw(st.sampled_from(["exact", "tanh"]))
    return VitConfig(
        depth=draw(sizes),
        width=heads * draw(sizes),
        mlp_width=draw(st.integers(1, 7)),
        heads=heads,
        patch_size=patch,
        image_size=(patch[0] * draw(sizes), patch[1] * draw(sizes)),
        channels=draw(sizes),
        num_classes=classes,
        representation=0 if classes else draw(st.sampled_from([0, 3])),
        qkv_bias=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        numerics=Numerics(gelu=gelu, norm_eps=eps, position_resize="transformers"),
    )


@given(config=configs(), new=st.booleans())
@settings(max_examples=60, deadline=None)
def test_round_trip_of_random_configs(config, new):
    model = random_model(config)
    weights = weights_of(model, config_json(config))
    if new:
        weights = renamed(weights, replacing(NEW_NAMES))
    again = load(weights)
    expected = config.change(numerics=again.config.numerics)
    assert again.config == expected
    assert again.config.numerics.gelu == config.numerics.gelu
    assert again.config.numerics.norm_eps == config.numerics.norm_eps
    assert same_weights(again, model)
    assert huggingface.VIT.unsupported(config) == []


def test_config_is_inferred_from_shapes():
    model = random_model(THEIRS)
    assert load(weights_of(model, {"heads": 2})).config == THEIRS
    with pytest.raises(CheckpointError, match="heads"):
        load(weights_of(model, {}))
    usual = random_model(THEIRS.change(width=128, heads=2))
    assert load(weights_of(usual, {})).config == usual.config


@pytest.mark.parametrize("representation", [0, 5])
@pytest.mark.parametrize("prefix", ["", "vit."])
def test_pooler_becomes_representation(representation, prefix):
    model = random_model(THEIRS.change(num_classes=0, representation=representation))
    weights = weights_of(model, config_json(model.config))
    assert not any(name.startswith("vit.") for name in weights.tensors)
    again = load(renamed(weights, lambda name: prefix + name))
    assert again.config == model.config
    assert same_weights(again, model)


def test_pre_training_tensors_are_skipped():
    weights = weights_of(random_model(THEIRS), config_json(THEIRS))
    for name in ("vit.embeddings.mask_token", "decoder.0.weight", "vit.pooler.dense.bias"):
        weights.tensors[name] = LazyTensor((8,), lambda: torch.zeros(8))
    normalized = huggingface.normalize(weights)
    assert normalized.skipped == {
        "vit.embeddings.mask_token": "only used in pre-training",
        "decoder.0.weight": "pre-training decoder",
        "vit.pooler.dense.bias": "not used by transformers' classifier",
    }
    assert same_weights(load(weights), random_model(THEIRS))


def test_unexpected_tensor_raises():
    weights = weights_of(random_model(THEIRS), config_json(THEIRS))
    weights.tensors["vit.embeddings.surprise"] = LazyTensor((8,), lambda: torch.zeros(8))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: vit\.embeddings\.surprise"):
        load(weights)


def test_duplicate_tensor_raises():
    weights = weights_of(random_model(THEIRS), config_json(THEIRS))
    weights.tensors.update(renamed(weights, replacing(NEW_NAMES)).tensors)
    with pytest.raises(CheckpointError, match="duplicate tensors"):
        load(weights)


def test_deit_distillation_head():
    model = random_model(THEIRS.change(distillation=True))
    stated = config_json(THEIRS) | {"model_type": "deit"}
    names = {"vit.": "deit."}
    weights = renamed(weights_of(model, stated), replacing(names))
    weights = renamed(weights, lambda name: re.sub(r"^classifier", "cls_classifier", name))
    assert "cls_classifier.weight" in weights.tensors
    again = load(weights)
    assert again.config == model.config
    assert same_weights(again, model)


@pytest.mark.parametrize("classes", [0, 3])
def test_headless_distillation_token_becomes_a_register(classes):
    model = random_model(THEIRS.change(num_classes=classes, registers=1))
    weights = weights_of(model, config_json(THEIRS) | {"model_type": "deit"})
    start = "vit." if classes else ""
    token = torch.randn(1, 1, 8)
    where = model.registers.detach()[None] - token
    table = model.position.table.detach()[None]
    table = torch.cat([table[:, :1], where, table[:, 1:]], dim=1)
    del weights.tensors[f"{start}embeddings.register_tokens"]
    for name, value in (("distillation_token", token), ("position_embeddings", table)):
        weights.tensors[f"{start}embeddings.{name}"] = LazyTensor(
            tuple(value.shape), lambda value=value: value
        )
    again = load(weights)
    assert again.config == model.config
    torch.testing.assert_close(again.registers, model.registers)
    assert torch.equal(again.position.table, model.position.table)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2(mlp, registers):
    config = THEIRS.change(num_classes=0, layer_scale=1.0, mlp=mlp, registers=registers)
    config = config.change(numerics=replace(config.numerics, norm_eps=1e-6))
    model = random_model(config)
    weights = renamed(weights_of(model, {"heads": 2}), replacing(DINO_NAMES))
    assert "encoder.layer.0.norm1.weight" in weights.tensors
    again = load(weights)
    assert again.config == config
    assert same_weights(again, model)
    assert huggingface.VIT.unsupported(config)


def test_split_gates_are_joined():
    config = THEIRS.change(num_classes=0, layer_scale=1.0, mlp="swiglu")
    weights = weights_of(random_model(config), {"heads": 2})
    for name in [name for name in weights.tensors if "weights_in" in name]:
        whole = weights.tensors.pop(name).read()
        for part, value in zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True):
            weights.tensors[name.replace("weights_in", part)] = LazyTensor(
                tuple(value.shape), lambda value=value: value
            )
    names = {"weights_out": "down_proj"}
    assert same_weights(load(renamed(weights, replacing(names))), random_model(config))
    gate = weights.tensors.pop("encoder.layer.0.mlp.gate_proj.weight")
    assert gate.shape == (16, 8)
    with pytest.raises(CheckpointError):
        load(renamed(weights, replacing(names)))


def test_dinov2_classifier_raises():
    model = random_model(THEIRS.change(layer_scale=1.0))
    weights = weights_of(model, {"heads": 2})
    weights.tensors["classifier.weight"] = LazyTensor((3, 16), lambda: torch.zeros(3, 16))
    with pytest.raises(CheckpointError, match="concatenated class token"):
        load(weights)


@pytest.mark.parametrize("kind", ["bert", "clip", "swin", 7, ["vit"]])
def test_unsupported_model_type_raises(kind):
    weights = Checkpoint({}, {"model_type": kind})
    with pytest.raises(CheckpointError, match=re.escape(f"model_type={kind!r}")):
        huggingface.normalize(weights)


def test_normalize_ignores_other_formats():
    for stated in ({}, {"architecture": "vit_base_patch16_224"}, {"model_type": "timm_wrapper"}):
        weights = Checkpoint(
            {"patch_embed.proj.weight": LazyTensor((8, 3, 4, 4), torch.empty)}, stated
        )
        assert huggingface.normalize(weights) is weights
        assert not huggingface.VIT.matches(weights.tensors)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 16, "hidden_size=16, the weights have 8"),
        ("num_hidden_layers", 10**12, "the weights have 2"),
        ("num_attention_heads", 3, "does not split"),
        ("num_attention_heads", "two", "integer"),
        ("intermediate_size", 17, "intermediate_size=17"),
        ("patch_size", [4, 8], "patch_size"),
        ("patch_size", "large", "patch_size"),
        ("num_channels", 1, "num_channels=1"),
        ("qkv_bias", False, "qkv_bias=False"),
        ("image_size", 16, "image_size=16"),
        ("image_size", 10**30, "image_size"),
        ("image_size", [8, 8, 8], "image_size"),
        ("hidden_act", "relu", "hidden_act='relu'"),
        ("hidden_act", ["gelu"], "hidden_act"),
        ("layer_norm_eps", "small", "layer_norm_eps='small'"),
        ("layer_norm_eps", float("nan"), "layer_norm_eps=nan"),
        ("layer_norm_eps", 10**400, "layer_norm_eps"),
        ("layer_norm_eps", 0, "positive"),
        ("hidden_dropout_prob", 2, "probability"),
    ],
)
def test_contradicting_config_json_raises(name, value, message):
    weights = weights_of(random_model(THEIRS), config_json(THEIRS) | {name: value})
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        load(weights)


def test_pooler_without_tanh_raises():
    model = random_model(THEIRS.change(num_classes=0, representation=5))
    weights = weights_of(model, config_json(model.config) | {"pooler_act": "relu"})
    with pytest.raises(CheckpointError, match="tanh"):
        load(weights)


@pytest.mark.parametrize("act", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_tanh_gelu_names(act):
    weights = weights_of(random_model(THEIRS), config_json(THEIRS) | {"hidden_act": act})
    assert load(weights).config.numerics.gelu == "tanh"


def test_non_square_grid_needs_config_json():
    model = random_model(THEIRS.change(image_size=(8, 12)))
    assert load(weights_of(model, config_json(model.config))).config == model.config
    with pytest.raises(CheckpointError, match="6 patch positions"):
        load(weights_of(model, {"heads": 2}))


def metadata_again(metadata, config=THEIRS):
    files = json.loads(json.dumps(huggingface.VIT.json_files(config, metadata)))
    stated = files["config.json"] | {PROCESSOR: files[PROCESSOR]}
    return huggingface.read_metadata(stated, config)


@pytest.mark.parametrize(
    "how",
    [
        preset("transformers", (8, 8)),
        preset("torchvision", (8, 8)),
        preset("timm", (8, 8)),
        Preprocessing(size=(8, 16), interpolation="lanczos", mean=(0.1, 0.2, 0.3), std=(1, 2, 3)),
        Preprocessing(size=(8, 16), resize_to=(10, 20), interpolation="nearest"),
    ],
    ids=str,
)
def test_preprocessing_round_trip(how):
    assert unsupported_preprocessing(how) == []
    assert metadata_again(Metadata(preprocessing=how)) == Metadata(preprocessing=how)


def test_unsupported_preprocessing():
    unsupported = unsupported_preprocessing(preset("google", (8, 8))) + unsupported_preprocessing(
        preset("big_vision", (8, 12))
    )
    assert unsupported == [
        "antialias=False",
        "interpolation='area'",
        "a short side of 9 or 13 pixels",
    ]


def test_class_names_round_trip_without_placeholders():
    how = preset("transformers", (8, 8))
    named = Metadata(preprocessing=how, class_names=("cat", "dog", "owl"))
    assert metadata_again(named) == named
    assert metadata_again(Metadata(preprocessing=how)).class_names == ()
    assert config_json(THEIRS)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    bare = huggingface.read_metadata({"model_type": "vit", "id2label": {"0": "cat"}}, THEIRS)
    assert bare is not None
    assert bare.class_names == ()


def test_bare_file_has_no_metadata():
    assert huggingface.read_metadata({}, THEIRS) is None
    assert huggingface.read_metadata({"format": "pt", "heads": 2}, THEIRS) is None


def processed(**values):
    metadata = huggingface.read_metadata({PROCESSOR: values}, THEIRS)
    assert metadata is not None
    return metadata.preprocessing


def test_processor_variants():
    assert processed(size=224, resample=2, image_mean=[0.5] * 3, image_std=[0.5] * 3) == preset(
        "transformers", (224, 224)
    )
    assert processed(size=256, crop_size=224, do_center_crop=True).resize_to == (256, 256)
    assert processed(size=256, crop_size=224, do_center_crop=False).size == (256, 256)
    assert processed(size={"shortest_edge": 9}).resize == "short-side"
    assert processed(do_resize=False, size=224).size == (8, 8)
    assert processed(do_normalize=False).std == (1.0, 1.0, 1.0)
    assert processed(do_rescale=False, image_mean=127.5, image_std=127.5).mean == (0.5, 0.5, 0.5)
    assert processed(resample=4).interpolation == "area"


@pytest.mark.parametrize(
    "values",
    [
        {"size": {"longest_edge": 8}},
        {"size": [8, 8, 8]},
        {"size": "large"},
        {"resample": 5},
        {"resample": [2]},
        {"image_mean": [0.1, 0.2]},
        {"image_mean": ["a", "b", "c"]},
        {"image_mean": []},
        {"image_std": 0},
        {"rescale_factor": 0},
    ],
    ids=str,
)
def test_invalid_processor_raises(values):
    with pytest.raises((CheckpointError, ConfigError)):
        processed(**values)
