"""What a served model looks at."""

import base64
import io
import json
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail import ConfigError, DataError, MixerConfig
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.pictures import as_seen
from vitrail.inspection.relevance import METHODS
from vitrail.inspection.rollout import rollout
from vitrail.models.mixer import MlpMixer
from vitrail.models.vit import VisionTransformer
from vitrail.serving.description import Attention
from vitrail.serving.looking import attention, explain, methods_of

NAMES = ("sun", "moon", "star")


def encoded(width, height):
    pixels = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def served(config, **how):
    """A model with opinions, as a server has it."""
    torch.manual_seed(0)
    model = VisionTransformer(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    preprocessing = Preprocessing(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, **how)
    model.metadata = Metadata(preprocessing=preprocessing, class_names=NAMES)
    return model


@pytest.fixture
def model(tiny):
    return served(tiny)


@pytest.fixture
def data():
    return encoded(40, 24)


def mixer():
    return MlpMixer(
        MixerConfig(
            depth=1, width=8, tokens_mlp=4, channels_mlp=8, patch_size=4, image_size=8,
            num_classes=3,
        )
    )  # fmt: skip


def pixels(png):
    return np.asarray(Image.open(io.BytesIO(png)), dtype=int)


def maps_of(found):
    shape = (found["layers"], found["heads"], *found["grid"])
    return np.frombuffer(base64.b64decode(found["maps"]), np.uint8).reshape(shape)


def test_every_map_that_knows_something_can_be_asked_for(model):
    assert set(methods_of(model)) == METHODS.keys() - {"random", "center"}
    assert methods_of(model)[0] == "relevance"


def test_a_model_is_only_asked_what_it_can_answer(tiny):
    assert methods_of(served(replace(tiny, num_classes=0))) == ("rollout", "last layer")
    assert methods_of(mixer()) == ()
    assert methods_of(None) == ()


def test_every_explanation_is_a_png_of_the_picture_s_own_shape(model, data):
    for method in methods_of(model):
        png = explain(model, data, method=method, label=None)
        image = Image.open(io.BytesIO(png))
        assert image.format == "PNG"
        assert image.width / image.height == pytest.approx(40 / 24, abs=0.01)


def test_classes_are_asked_by_name_and_the_likeliest_if_none_is(model, data):
    found = {name: pixels(explain(model, data, method="relevance", label=name)) for name in NAMES}
    assert (found["sun"] != found["moon"]).any()
    with torch.no_grad():
        likeliest = NAMES[int(model(as_seen(model, data)[None]).argmax())]
    unasked = pixels(explain(model, data, method="relevance", label=None))
    assert (unasked == found[likeliest]).all()


@pytest.mark.parametrize(
    ("method", "label", "words"),
    [
        ("relevence", None, "did you mean 'relevance'"),
        ("random", None, "unknown method 'random'"),
        ("relevance", "sunn", "did you mean 'sun'"),
        ("rollout", "comet", "unknown class 'comet'; known: sun, moon, star"),
        ("rollout", "sun", "rollout is the same for every class"),
    ],
)
def test_what_cannot_be_asked_is_refused(model, data, method, label, words):
    with pytest.raises(ConfigError, match=words):
        explain(model, data, method=method, label=label)


def test_without_attention_there_is_nothing_to_see(data):
    with pytest.raises(ConfigError, match="has no attention"):
        explain(mixer(), data, method="relevance", label=None)
    with pytest.raises(ConfigError, match="has no attention"):
        attention(mixer(), data)


def test_what_is_no_picture_is_refused(model):
    with pytest.raises(DataError):
        explain(model, b"no picture", method="rollout", label=None)
    with pytest.raises(DataError):
        attention(model, b"no picture")


@pytest.mark.parametrize(
    "changes", [{"pool": "cls"}, {"pool": "cls", "registers": 2}, {"pool": "mean"}, {"pool": "map"}]
)
def test_maps_show_where_that_looks_what_the_head_reads(tiny, data, changes):
    model = served(replace(tiny, **changes))
    found = attention(model, data)
    image = as_seen(model, data)[None]
    prefix = model.config.num_prefix
    with torch.no_grad():
        if changes["pool"] == "map":
            read = model.pool.attention_map(model.encode(image))[0, :, 0].mean(0)  # (h * w,)
        else:
            read = torch.full((4,), 1 / 4)
        expected = []
        for maps in model.attention_maps(image):  # (1, H, N, N)
            rows = maps[0, :, 0] if changes["pool"] == "cls" else read @ maps[0, :, prefix:]
            expected.append(rows[:, prefix:].unflatten(1, (2, 2)))
    expected = torch.stack(expected)  # (L, H, h, w)
    peaks = torch.tensor(found["peaks"])
    torch.testing.assert_close(peaks, expected.amax(dim=(2, 3)), atol=1e-5, rtol=0)
    shares = torch.tensor(maps_of(found) / 255.0) * peaks[:, :, None, None]
    torch.testing.assert_close(shares.float(), expected, atol=3e-3, rtol=0)
    assert (maps_of(found).max(axis=(2, 3)) == 255).all()


def test_rollout_comes_along(model, data):
    found = attention(model, data)
    rolled = np.frombuffer(base64.b64decode(found["rollout"]), np.uint8).reshape(found["grid"])
    expected = rollout(model, as_seen(model, data)[None])[0].numpy()
    assert np.abs(rolled / 255 - expected / expected.max()).max() < 0.003


def test_the_answer_is_small_and_ready_for_json(model, data):
    found = attention(model, data)
    assert json.loads(json.dumps(found)) == found
    assert (found["layers"], found["heads"], found["grid"]) == (2, 2, [2, 2])
    assert len(json.dumps(found)) < 1000


def test_the_box_is_the_part_that_the_model_sees(tiny):
    cut = served(tiny, resize="short-side", resize_to=(8, 8))
    assert attention(served(tiny), encoded(40, 20))["box"] == [0, 0, 1, 1]
    assert attention(cut, encoded(40, 20))["box"] == [0, 0.25, 1, 0.5]
    assert attention(cut, encoded(20, 40))["box"] == [0.25, 0, 0.5, 1]


def test_looking_leaves_the_model_as_it_was(model, data):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    explain(model, data, method="relevance", label="moon")
    attention(model, data)
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_model_answers_the_same_while_others_look_at_it(model, data):
    image = as_seen(model, data)[None]
    with torch.inference_mode():
        expected = model(image)
    drawn, stop, wrong = [], threading.Event(), []
    alone = explain(model, data, method="relevance", label="sun")

    def predict():
        while not stop.is_set():
            with torch.inference_mode():
                if not torch.equal(model(image), expected):
                    wrong.append("another answer")

    def look():
        for _ in range(10):
            drawn.append(explain(model, data, method="relevance", label="sun"))
            attention(model, data)

    predicting, looking = threading.Thread(target=predict), threading.Thread(target=look)
    predicting.start()
    looking.start()
    looking.join()
    stop.set()
    predicting.join()
    assert wrong == []
    assert drawn == [alone] * 10


def test_a_model_that_merges_tokens_is_looked_at_without_merging(model, data):
    drawn, maps = explain(model, data, method="relevance", label="sun"), attention(model, data)
    model.merge = 1
    assert explain(model, data, method="relevance", label="sun") == drawn
    assert attention(model, data) == maps
    assert model.merge == 1


def test_maps_are_moved_to_what_tokens_see(tiny, data):
    stem = served(replace(tiny, stem="conv"))
    assert attention(served(tiny), data)["lag"] == 0
    assert attention(stem, data)["lag"] == pytest.approx(3 / 8)
    explain(stem, data, method="rollout", label=None)


def test_an_unknown_class_among_many_does_not_list_them_all(tiny, data):
    many = served(replace(tiny, num_classes=21))
    many.metadata = replace(many.metadata, class_names=tuple(f"thing {n}" for n in range(21)))
    with pytest.raises(ConfigError, match=r"^unknown class 'moon'; see /model$"):
        explain(many, data, method="relevance", label="moon")


def test_without_a_method_the_first_that_the_model_has_is_drawn(tiny, model, data):
    drawn = explain(model, data, method=None, label="moon")
    assert drawn == explain(model, data, method="relevance", label="moon")
    bare = served(replace(tiny, num_classes=0))
    bare.metadata = replace(bare.metadata, class_names=())
    drawn = explain(bare, data, method=None, label=None)
    assert drawn == explain(bare, data, method="rollout", label=None)


def test_everything_that_is_told_of_attention_is_described(model, data):
    assert attention(model, data).keys() == Attention.model_fields.keys()
