"""transformers' names and settings in both directions, without transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VIT, as_checkpoint, load_tensors, random_model, same_weights

from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing, VitConfig
from vitrail.checkpoints import huggingface
from vitrail.checkpoints.files import Checkpoint
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


def tensors_of(config, names=()):
    """The tensors of a random model, with parts of their names replaced."""
    tensors = write(random_model(config), huggingface.VIT.rules(config))
    for old, new in dict(names).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def config_json(config, names=()):
    """config.json after a JSON round trip."""
    metadata = Metadata(preprocessing=preset("transformers", (8, 8)), class_names=names)
    return json.loads(json.dumps(huggingface.VIT.json_files(config, metadata)["config.json"]))


def load(tensors, stated):
    return load_tensors("huggingface", tensors, stated)[0]


def assert_loads(tensors, stated, config):
    again = load(tensors, stated)
    assert again.config == config
    assert same_weights(again, random_model(config))


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
    assert huggingface.VIT.unsupported(config) == []
    tensors = tensors_of(config, NEW_NAMES if new else {})
    again = load(tensors, config_json(config))
    numerics = again.config.numerics
    assert again.config == config.change(numerics=numerics)
    assert (numerics.gelu, numerics.norm_eps) == (config.numerics.gelu, config.numerics.norm_eps)
    assert same_weights(again, random_model(config))


def test_config_is_inferred_from_shapes():
    for act in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        again = load(tensors_of(THEIRS), config_json(THEIRS) | {"hidden_act": act})
        assert again.config.numerics.gelu == "tanh"
    assert load(tensors_of(THEIRS), {"heads": 2}).config == THEIRS
    with pytest.raises(CheckpointError, match="heads"):
        load(tensors_of(THEIRS), {})
    usual = THEIRS.change(width=128, heads=2)
    assert load(tensors_of(usual), {}).config == usual
    oblong = THEIRS.change(image_size=(8, 12))
    assert load(tensors_of(oblong), config_json(oblong)).config == oblong
    with pytest.raises(CheckpointError, match="6 patch positions"):
        load(tensors_of(oblong), {"heads": 2})


@pytest.mark.parametrize("representation", [0, 5])
@pytest.mark.parametrize("prefix", ["", "vit."])
def test_pooler_becomes_representation(representation, prefix):
    config = THEIRS.change(num_classes=0, representation=representation)
    tensors = tensors_of(config)
    assert not any(name.startswith("vit.") for name in tensors)
    prefixed = {prefix + name: tensor for name, tensor in tensors.items()}
    assert_loads(prefixed, config_json(config), config)
    if representation:
        with pytest.raises(CheckpointError, match="tanh"):
            load(prefixed, config_json(config) | {"pooler_act": "relu"})


def test_pre_training_tensors_are_skipped_and_others_raise():
    tensors, stated = tensors_of(THEIRS), config_json(THEIRS)
    reasons = {
        "vit.embeddings.mask_token": "only used in pre-training",
        "decoder.0.weight": "pre-training decoder",
        "vit.pooler.dense.bias": "not used by transformers' classifier",
    }
    more = tensors | dict.fromkeys(reasons, torch.zeros(8))
    again, skipped = load_tensors("huggingface", more, stated)
    assert skipped == reasons
    assert same_weights(again, random_model(THEIRS))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: vit\.embeddings\.surprise"):
        load(tensors | {"vit.embeddings.surprise": torch.zeros(8)}, stated)
    with pytest.raises(CheckpointError, match="duplicate tensors"):
        load(tensors | tensors_of(THEIRS, NEW_NAMES), stated)


@pytest.mark.parametrize("classes", [0, 3])
def test_distillation_token_with_and_without_a_head(classes):
    model = random_model(THEIRS.change(num_classes=classes, registers=1))
    start = "vit.embeddings." if classes else "embeddings."
    tensors, token = tensors_of(model.config), torch.randn(1, 1, 8)
    table, register = tensors[f"{start}position_embeddings"], tensors.pop(f"{start}register_tokens")
    tensors[f"{start}distillation_token"] = token
    tensors[f"{start}position_embeddings"] = torch.cat(
        [table[:, :1], register - token, table[:, 1:]], dim=1
    )
    again = load(tensors, config_json(THEIRS) | {"model_type": "deit"})
    assert again.config == model.config
    torch.testing.assert_close(again.registers, model.registers)
    assert torch.equal(again.position.table, model.position.table)
    config = THEIRS.change(distillation=True)
    tensors = tensors_of(config, {"vit.": "deit."})
    tensors = {re.sub(r"^classifier", "cls_classifier", name): t for name, t in tensors.items()}
    assert "cls_classifier.weight" in tensors
    assert_loads(tensors, config_json(THEIRS) | {"model_type": "deit"}, config)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu", "split swiglu"])
@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2(mlp, registers):
    kind = mlp.removeprefix("split ")
    config = THEIRS.change(num_classes=0, layer_scale=1.0, mlp=kind, registers=registers)
    resize = "timm" if registers else "transformers"  # with antialiasing
    numerics = replace(config.numerics, norm_eps=1e-6, position_resize=resize)
    config = config.change(numerics=numerics)
    tensors = tensors_of(config, DINO_NAMES)
    assert "encoder.layer.0.norm1.weight" in tensors
    if mlp == "split swiglu":
        for name in [name for name in tensors if "weights_in" in name]:
            for part, value in zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True):
                tensors[name.replace("weights_in", f"{part}_proj")] = value
        tensors = {name.replace("weights_out", "down_proj"): t for name, t in tensors.items()}
        incomplete = tensors.keys() - {"encoder.layer.0.mlp.gate_proj.weight"}
        with pytest.raises(CheckpointError):
            load({name: tensors[name] for name in incomplete}, {"heads": 2})
    assert_loads(tensors, {"heads": 2}, config)
    tensors = tensors_of(THEIRS.change(layer_scale=1.0)) | {"classifier.weight": torch.zeros(3, 16)}
    assert load(tensors, {"heads": 2}).config.pool == "cls+mean"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("swinv2", "windowed"),
        ("siglip2", "NaFlex.*fixed resolution.*'siglip'"),
        ("sam_vision_model", "windowed"),
        ("hiera", "hierarchical"),
        *((kind, "") for kind in ("bert", 7, ["vit"])),
    ],
)
def test_other_architectures_raise_with_a_reason(kind, reason):
    message = re.escape(f"model_type={kind!r}") + ".*" + reason
    with pytest.raises(CheckpointError, match=message):
        huggingface.normalize(Checkpoint({}, {"model_type": kind}))


def test_normalize_ignores_other_formats():
    for stated in ({}, {"architecture": "vit_base_patch16_224"}, {"model_type": "timm_wrapper"}):
        weights = as_checkpoint({"patch_embed.proj.weight": torch.empty(8, 3, 4, 4)}, stated)
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
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(tensors_of(THEIRS), config_json(THEIRS) | {name: value})


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
    assert metadata_again(Metadata(preprocessing=how)) == Metadata(preprocessing=how)


def test_class_names_round_trip_without_placeholders():
    how = preset("transformers", (8, 8))
    named = Metadata(preprocessing=how, class_names=("cat", "dog", "owl"))
    assert metadata_again(named) == named
    assert metadata_again(Metadata(preprocessing=how)).class_names == ()
    assert config_json(THEIRS)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    bare = huggingface.read_metadata({"model_type": "vit", "id2label": {"0": "cat"}}, THEIRS)
    assert bare is not None
    assert bare.class_names == ()
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
        *({"size": size} for size in ({"longest_edge": 8}, [8, 8, 8], "large")),
        *({"resample": resample} for resample in (5, [2])),
        *({"image_mean": mean} for mean in ([0.1, 0.2], ["a", "b", "c"], [])),
        {"image_std": 0},
        {"rescale_factor": 0},
    ],
    ids=str,
)
def test_invalid_processor_raises(values):
    with pytest.raises((CheckpointError, ConfigError)):
        processed(**values)
