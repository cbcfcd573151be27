import base64
import io
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from serving_helpers import encoded_image

from tiny_models import random_model
from vitrail import ConfigError, DataError, MixerConfig
from vitrail.checkpoints.metadata import Metadata
from vitrail.data.preprocessing import Preprocessing
from vitrail.inspection.images import load_image, preprocess
from vitrail.inspection.relevance import METHODS, rollout
from vitrail.models.mixer import MlpMixer
from vitrail.serving import registry
from vitrail.serving.registry import methods_of

NAMES = ("sun", "moon", "star")


def served(config, **options):
    model = random_model(config)
    preprocessing = Preprocessing(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, **options)
    model.metadata = Metadata(preprocessing=preprocessing, class_names=NAMES)
    return model


def explain(model, data, **options):
    return registry.explain(model, load_image(model, data), **options)


def attention(model, data):
    return registry.attention(model, registry.load_view(model, data))


@pytest.fixture
def model(tiny):
    return served(tiny)


@pytest.fixture
def data():
    return encoded_image(size=(24, 40))


def mixer():
    size = {"depth": 1, "width": 8, "patch_size": 4, "image_size": 8, "num_classes": 3}
    return MlpMixer(MixerConfig(tokens_mlp=4, channels_mlp=8, **size))


def decode_maps(text, *shape):
    return np.frombuffer(base64.b64decode(text), np.uint8).reshape(shape)


@pytest.mark.parametrize("classes", [3, 0])
def test_methods_of_a_model(tiny, data, classes):
    """All but the baselines; without a head, those that need no class. The first is the default."""
    model = served(replace(tiny, num_classes=classes))
    general, baselines = {"rollout", "last layer"}, {"random", "center"}
    expected = METHODS.keys() - baselines if classes else general
    assert set(methods_of(model)) == expected
    assert methods_of(model)[0] == ("relevance" if classes else "rollout")
    assert methods_of(mixer()) == methods_of(None) == ()
    for method in methods_of(model):
        image = Image.open(io.BytesIO(explain(model, data, method=method, label=None)))
        assert image.format == "PNG"
        assert image.width / image.height == pytest.approx(40 / 24, abs=0.01)
    default = explain(model, data, method=None, label=None)
    assert default == explain(model, data, method=methods_of(model)[0], label=None)


def test_label_defaults_to_the_predicted_class(model, data):
    result = {name: explain(model, data, method="relevance", label=name) for name in NAMES}
    assert result["sun"] != result["moon"]
    with torch.no_grad():
        predicted = NAMES[int(model(preprocess(model, data)[None]).argmax())]
    assert explain(model, data, method="relevance", label=None) == result[predicted]


@pytest.mark.parametrize(
    ("method", "label", "message"),
    [
        ("relevence", None, "did you mean 'relevance'"),
        ("random", None, "unknown method 'random'"),
        ("relevance", "sunn", "did you mean 'sun'"),
        ("rollout", "comet", "unknown class 'comet'; known: sun, moon, star"),
        ("rollout", "sun", "rollout is the same for every class"),
    ],
)
def test_invalid_method_or_class_is_rejected(model, data, method, label, message):
    with pytest.raises(ConfigError, match=message):
        explain(model, data, method=method, label=label)


@pytest.mark.parametrize("function", [partial(explain, method=None, label=None), attention])
def test_unreadable_image_or_model_without_attention_is_rejected(model, data, function):
    with pytest.raises(ConfigError, match="has no attention"):
        function(mixer(), data)
    with pytest.raises(DataError):
        function(model, b"not an image")


@pytest.mark.parametrize(
    "changes", [{"pool": "cls"}, {"pool": "cls", "registers": 2}, {"pool": "mean"}, {"pool": "map"}]
)
def test_maps_follow_what_the_head_reads(tiny, data, changes):
    model = served(replace(tiny, **changes))
    result = attention(model, data)
    image = preprocess(model, data)[None]
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
    peaks = torch.tensor(result.peaks)
    torch.testing.assert_close(peaks, expected.amax(dim=(2, 3)), atol=1e-5, rtol=0)
    maps = decode_maps(result.maps, result.layers, result.heads, *result.grid)
    shares = torch.tensor(maps / 255.0) * peaks[:, :, None, None]
    torch.testing.assert_close(shares.float(), expected, atol=3e-3, rtol=0)
    assert (maps.max(axis=(2, 3)) == 255).all()
    rolled = decode_maps(result.rollout, *result.grid)
    expected = rollout(model, image)[0].numpy()
    assert np.abs(rolled / 255 - expected / expected.max()).max() < 0.003
    assert len(result.model_dump_json()) < 1000


def test_box_is_the_visible_part_and_lag_that_of_the_stem(tiny, data):
    stem = served(replace(tiny, stem="conv"))
    assert attention(served(tiny), data).lag == 0
    assert attention(stem, data).lag == pytest.approx(3 / 8)
    cut = served(tiny, resize="short-side", resize_to=(8, 8))
    assert attention(served(tiny), encoded_image(size=(20, 40))).box == [0, 0, 1, 1]
    assert attention(cut, encoded_image(size=(20, 40))).box == [0, 0.25, 1, 0.5]
    assert attention(cut, encoded_image(size=(40, 20))).box == [0.25, 0, 0.5, 1]


def test_explanations_do_not_disturb_concurrent_predictions(model, data):
    image = preprocess(model, data)[None]
    with torch.inference_mode():
        expected = model(image)
    png, stop, wrong = [], threading.Event(), []
    alone = explain(model, data, method="relevance", label="sun")

    def predict():
        while not stop.is_set():
            with torch.inference_mode():
                if not torch.equal(model(image), expected):
                    wrong.append("different logits")

    predicting = threading.Thread(target=predict)
    predicting.start()
    for _ in range(10):
        png.append(explain(model, data, method="relevance", label="sun"))
        attention(model, data)
    stop.set()
    predicting.join()
    assert wrong == []
    assert png == [alone] * 10


def test_explanations_ignore_token_merging(model, data):
    png, maps = explain(model, data, method="relevance", label="sun"), attention(model, data)
    model.merge = 1
    assert explain(model, data, method="relevance", label="sun") == png
    assert attention(model, data) == maps
    assert model.merge == 1
