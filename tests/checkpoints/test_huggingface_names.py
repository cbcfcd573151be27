"""transformers' names and settings: every spelling of them, both ways, without transformers."""

import json
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import FAMILIES, VIT, awake, load_by, same_weights

from vitrail import CheckpointError, ConfigError, Facts, Preprocessing, VitConfig
from vitrail.checkpoints import huggingface
from vitrail.checkpoints.files import Entry, Weights
from vitrail.checkpoints.huggingface_processor import cannot_prepare
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

CANNOT = {
    "mean",
    "attention pool",
    "representation",
    "distilled",
    "registers",
    "sines",
    "relative",
    "2-D at every layer",
    "conv stem",
    "hybrid",
    "hybrid root",
}


def weights_of(model, beside):
    """What a file of this model holds, with the settings beside it."""
    tensors = write(model, huggingface.rules(model.config))
    return Weights({n: Entry(tuple(t.shape), lambda t=t: t) for n, t in tensors.items()}, beside)


def config_json(config, names=()):
    """config.json as it comes out of a file."""
    facts = Facts(preprocessing=preset("transformers", (8, 8)), class_names=names)
    return json.loads(json.dumps(huggingface.companions(config, facts)["config.json"]))


def renamed(weights, change):
    return Weights(
        {change(name): entry for name, entry in weights.entries.items()}, weights.settings
    )


def replacing(table):
    def change(name):
        for old, new in table.items():
            name = name.replace(old, new)
        return name

    return change


def load(weights):
    return load_by(huggingface, weights)


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
def test_what_is_written_is_read_back(config, new):
    model = awake(config)
    weights = weights_of(model, config_json(config))
    if new:
        weights = renamed(weights, replacing(NEW_NAMES))
    again = load(weights)
    expected = config.change(numerics=again.config.numerics)
    assert again.config == expected
    assert again.config.numerics.gelu == config.numerics.gelu
    assert again.config.numerics.norm_eps == config.numerics.norm_eps
    assert same_weights(again, model)
    assert huggingface.cannot(config) == []


def test_a_bare_file_is_described_by_its_shapes():
    model = awake(THEIRS)
    assert load(weights_of(model, {"heads": 2})).config == THEIRS
    with pytest.raises(CheckpointError, match="heads"):
        load(weights_of(model, {}))
    usual = awake(THEIRS.change(width=128, heads=2))
    assert load(weights_of(usual, {})).config == usual.config


@pytest.mark.parametrize("representation", [0, 5])
@pytest.mark.parametrize("prefix", ["", "vit."])
def test_a_model_without_a_classifier_has_its_pooler_as_representation(representation, prefix):
    model = awake(THEIRS.change(num_classes=0, representation=representation))
    weights = weights_of(model, config_json(model.config))
    assert not any(name.startswith("vit.") for name in weights.entries)
    again = load(renamed(weights, lambda name: prefix + name))
    assert again.config == model.config
    assert same_weights(again, model)


def test_what_no_model_needs_is_left_out_and_why_is_told():
    weights = weights_of(awake(THEIRS), config_json(THEIRS))
    for name in ("vit.embeddings.mask_token", "decoder.0.weight", "vit.pooler.dense.bias"):
        weights.entries[name] = Entry((8,), lambda: torch.zeros(8))
    tidied = huggingface.tidy(weights)
    assert tidied.left_out == {
        "vit.embeddings.mask_token": "stands for hidden patches, in pre-training only",
        "decoder.0.weight": "paints hidden patches, in pre-training only",
        "vit.pooler.dense.bias": "transformers' classifier does not read it",
    }
    assert same_weights(load(weights), awake(THEIRS))


def test_any_other_tensor_is_an_error():
    weights = weights_of(awake(THEIRS), config_json(THEIRS))
    weights.entries["vit.embeddings.surprise"] = Entry((8,), lambda: torch.zeros(8))
    with pytest.raises(CheckpointError, match=r"no place for vit\.embeddings\.surprise"):
        load(weights)


def test_a_tensor_under_two_names_is_an_error():
    weights = weights_of(awake(THEIRS), config_json(THEIRS))
    weights.entries.update(renamed(weights, replacing(NEW_NAMES)).entries)
    with pytest.raises(CheckpointError, match="twice"):
        load(weights)


def test_deit_keeps_its_second_head():
    model = awake(THEIRS.change(distillation=True))
    beside = config_json(THEIRS) | {"model_type": "deit"}
    names = {"vit.": "deit."}
    weights = renamed(weights_of(model, beside), replacing(names))
    weights = renamed(weights, lambda name: re.sub(r"^classifier", "cls_classifier", name))
    assert "cls_classifier.weight" in weights.entries
    again = load(weights)
    assert again.config == model.config
    assert same_weights(again, model)


@pytest.mark.parametrize("classes", [0, 3])
def test_a_distillation_token_without_a_head_is_a_register_that_knows_its_position(classes):
    model = awake(THEIRS.change(num_classes=classes, registers=1))
    weights = weights_of(model, config_json(THEIRS) | {"model_type": "deit"})
    start = "vit." if classes else ""
    token = torch.randn(1, 1, 8)
    where = model.registers.detach()[None] - token
    table = model.position.table.detach()[None]
    table = torch.cat([table[:, :1], where, table[:, 1:]], dim=1)
    del weights.entries[f"{start}embeddings.register_tokens"]
    for name, value in (("distillation_token", token), ("position_embeddings", table)):
        weights.entries[f"{start}embeddings.{name}"] = Entry(
            tuple(value.shape), lambda value=value: value
        )
    again = load(weights)
    assert again.config == model.config
    torch.testing.assert_close(again.registers, model.registers)
    assert torch.equal(again.position.table, model.position.table)


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
@pytest.mark.parametrize("registers", [0, 2])
def test_dinov2_is_read(mlp, registers):
    config = THEIRS.change(num_classes=0, layer_scale=1.0, mlp=mlp, registers=registers)
    config = config.change(numerics=replace(config.numerics, norm_eps=1e-6))
    model = awake(config)
    weights = renamed(weights_of(model, {"heads": 2}), replacing(DINO_NAMES))
    assert "encoder.layer.0.norm1.weight" in weights.entries
    again = load(weights)
    assert again.config == config
    assert same_weights(again, model)
    assert huggingface.cannot(config)


def test_gates_that_are_split_in_memory_are_joined():
    config = THEIRS.change(num_classes=0, layer_scale=1.0, mlp="swiglu")
    weights = weights_of(awake(config), {"heads": 2})
    for name in [name for name in weights.entries if "weights_in" in name]:
        whole = weights.entries.pop(name).read()
        for part, value in zip(("gate_proj", "up_proj"), whole.chunk(2), strict=True):
            weights.entries[name.replace("weights_in", part)] = Entry(
                tuple(value.shape), lambda value=value: value
            )
    names = {"weights_out": "down_proj"}
    assert same_weights(load(renamed(weights, replacing(names))), awake(config))
    lonely = weights.entries.pop("encoder.layer.0.mlp.gate_proj.weight")
    assert lonely.shape == (16, 8)
    with pytest.raises(CheckpointError):
        load(renamed(weights, replacing(names)))


def test_dinov2s_classifier_is_refused():
    model = awake(THEIRS.change(layer_scale=1.0))
    weights = weights_of(model, {"heads": 2})
    weights.entries["classifier.weight"] = Entry((3, 16), lambda: torch.zeros(3, 16))
    with pytest.raises(CheckpointError, match="side by side"):
        load(weights)


@pytest.mark.parametrize("kind", ["bert", "clip", "swin", 7, ["vit"]])
def test_another_model_is_refused_by_its_name(kind):
    weights = Weights({}, {"model_type": kind})
    with pytest.raises(CheckpointError, match=re.escape(f"model_type={kind!r}")):
        huggingface.tidy(weights)


def test_other_formats_are_left_alone():
    for beside in ({}, {"architecture": "vit_base_patch16_224"}, {"model_type": "timm_wrapper"}):
        weights = Weights({"patch_embed.proj.weight": Entry((8, 3, 4, 4), torch.empty)}, beside)
        assert huggingface.tidy(weights) is weights
        assert not huggingface.recognizes(weights.entries)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hidden_size", 16, "hidden_size=16; the weights say 8"),
        ("num_hidden_layers", 10**12, "the weights say 2"),
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
def test_settings_that_do_not_belong_to_the_weights_are_refused(name, value, message):
    weights = weights_of(awake(THEIRS), config_json(THEIRS) | {name: value})
    with pytest.raises((CheckpointError, ConfigError), match=re.escape(message)):
        load(weights)


def test_only_a_pooler_with_tanh_is_a_representation_layer():
    model = awake(THEIRS.change(num_classes=0, representation=5))
    weights = weights_of(model, config_json(model.config) | {"pooler_act": "relu"})
    with pytest.raises(CheckpointError, match="tanh"):
        load(weights)


@pytest.mark.parametrize("act", ["gelu_new", "gelu_fast", "gelu_pytorch_tanh"])
def test_every_name_of_the_tanh_gelu_is_known(act):
    weights = weights_of(awake(THEIRS), config_json(THEIRS) | {"hidden_act": act})
    assert load(weights).config.numerics.gelu == "tanh"


def test_a_grid_that_is_not_square_needs_the_settings():
    model = awake(THEIRS.change(image_size=(8, 12)))
    assert load(weights_of(model, config_json(model.config))).config == model.config
    with pytest.raises(CheckpointError, match="6 patches"):
        load(weights_of(model, {"heads": 2}))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_cannot_be_said_is_known_before_writing(name):
    config = FAMILIES[name]
    if isinstance(config, VitConfig):
        assert bool(huggingface.cannot(config)) == (name in CANNOT)
        if name not in CANNOT:
            again = load(weights_of(awake(config), config_json(config)))
            assert same_weights(again, awake(config))


def facts_again(facts, config=THEIRS):
    files = json.loads(json.dumps(huggingface.companions(config, facts)))
    beside = files["config.json"] | {PROCESSOR: files[PROCESSOR]}
    return huggingface.read_facts(beside, config)


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
def test_preprocessing_survives(how):
    assert cannot_prepare(how) == []
    assert facts_again(Facts(preprocessing=how)) == Facts(preprocessing=how)


def test_what_a_processor_cannot_say_is_told():
    told = cannot_prepare(preset("google", (8, 8))) + cannot_prepare(preset("big_vision", (8, 12)))
    assert told == [
        "resizing without antialiasing",
        "the interpolation 'area'",
        "a short side of 9 or 13 pixels",
    ]


def test_class_names_survive_and_placeholders_are_no_names():
    how = preset("transformers", (8, 8))
    named = Facts(preprocessing=how, class_names=("cat", "dog", "owl"))
    assert facts_again(named) == named
    assert facts_again(Facts(preprocessing=how)).class_names == ()
    assert config_json(THEIRS)["id2label"] == {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}
    bare = huggingface.read_facts({"model_type": "vit", "id2label": {"0": "cat"}}, THEIRS)
    assert bare is not None
    assert bare.class_names == ()


def test_a_bare_file_says_nothing_of_preprocessing():
    assert huggingface.read_facts({}, THEIRS) is None
    assert huggingface.read_facts({"format": "pt", "heads": 2}, THEIRS) is None


def processed(**values):
    facts = huggingface.read_facts({PROCESSOR: values}, THEIRS)
    assert facts is not None
    return facts.preprocessing


def test_older_processors_are_understood():
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
def test_a_processor_that_makes_no_sense_is_refused(values):
    with pytest.raises((CheckpointError, ConfigError)):
        processed(**values)
