"""transformers' names and settings in both directions, without transformers."""

import json
import re

import pytest
import torch
from small_models import VIT, load_tensors, random_model, same_weights

from vitrail import CheckpointError, ConfigError, Metadata, Preprocessing
from vitrail.checkpoints import clip, huggingface
from vitrail.checkpoints.files import Checkpoint
from vitrail.checkpoints.rules import write
from vitrail.data.preprocessing import preset

PROCESSOR = "preprocessor_config.json"
THEIRS = VIT.change(numerics="transformers")


def tensors_of(config):
    return write(random_model(config), huggingface.VIT.rules(config))


def config_json(config, names=()):
    """config.json after a JSON round trip."""
    metadata = Metadata(preprocessing=preset("transformers", (8, 8)), class_names=names)
    return json.loads(json.dumps(huggingface.VIT.json_files(config, metadata)["config.json"]))


def load(tensors, stated):
    return load_tensors("huggingface", tensors, stated)[0]


def test_config_is_inferred_from_shapes():
    for act in ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
        again = load(tensors_of(THEIRS), config_json(THEIRS) | {"hidden_act": act})
        assert again.config.numerics.gelu == "tanh"
    dropping = THEIRS.change(dropout=0.1)
    assert load(tensors_of(THEIRS), config_json(dropping)).config == dropping
    assert load(tensors_of(THEIRS), {"heads": 2}).config == THEIRS
    with pytest.raises(CheckpointError, match="heads"):
        load(tensors_of(THEIRS), {})
    usual = THEIRS.change(width=128, heads=2)
    assert load(tensors_of(usual), {}).config == usual
    oblong = THEIRS.change(image_size=(8, 12))
    assert load(tensors_of(oblong), config_json(oblong)).config == oblong
    with pytest.raises(CheckpointError, match="6 patch positions"):
        load(tensors_of(oblong), {"heads": 2})


def test_pre_training_tensors_are_skipped_and_others_raise():
    tensors, stated = tensors_of(THEIRS), config_json(THEIRS)
    unused = ["vit.embeddings.mask_token", "vit.pooler.dense.bias"]
    unused += ["decoder.0.weight", "decoder.0.bias"]
    more = tensors | dict.fromkeys(unused, torch.zeros(8))
    again, skipped = load_tensors("huggingface", more, stated)
    assert skipped == {
        "vit.embeddings.mask_token": "only used in pre-training",
        "decoder.*": "pre-training decoder",
        "vit.pooler.*": "not used by transformers' classifier",
    }
    assert same_weights(again, random_model(THEIRS))
    with pytest.raises(CheckpointError, match=r"unexpected tensors: vit\.embeddings\.surprise"):
        load(tensors | {"vit.embeddings.surprise": torch.zeros(8)}, stated)
    new_name = "vit.layers.0.attention.q_proj.weight"  # what transformers 5 has in memory
    with pytest.raises(CheckpointError, match="duplicate tensors"):
        load(tensors | {new_name: torch.zeros(8, 8)}, stated)


@pytest.mark.parametrize("tower", [{"pool": "map"}, {"pre_norm": True}], ids=str)
def test_towers_of_transformers_are_square(tower):
    config = THEIRS.change(num_classes=0, **tower)
    assert clip.TOWER_TABLE.unsupported(config) == []
    for sizes in ({"image_size": (8, 16)}, {"image_size": (8, 16), "patch_size": (4, 8)}):
        losses = clip.TOWER_TABLE.unsupported(config.change(**sizes))
        assert losses == ["non-square images or patches"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("swinv2", "windowed"), *((kind, "") for kind in ("bert", 7, ["vit"]))],
)
def test_other_architectures_raise_with_a_reason(kind, reason):
    message = re.escape(f"model_type={kind!r}") + ".*" + reason
    with pytest.raises(CheckpointError, match=message):
        huggingface.normalize(Checkpoint({}, {"model_type": kind}))


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
        ("pooler_act", "relu", "tanh"),
    ],
)
def test_contradicting_config_json_raises(name, value, message):
    pooled = {"num_classes": 0, "representation": 5} if name == "pooler_act" else {}
    config = THEIRS.change(**pooled)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(tensors_of(config), config_json(config) | {name: value})


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
    assert bare.class_names == ()
    assert huggingface.read_metadata({"format": "pt", "heads": 2}, THEIRS) is None


def processed(**values):
    return huggingface.read_metadata({PROCESSOR: values}, THEIRS).preprocessing


def test_processor_variants():
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    assert processed(size=224, resample=2, **half) == preset("transformers", (224, 224))
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
