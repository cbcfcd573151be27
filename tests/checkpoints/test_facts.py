"""From pictures to what a model takes, in one call."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail import DataError, Facts, Preprocessing
from vitrail.data.preprocessing import preset

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
FACTS = Facts(preprocessing=preset("torchvision", (8, 12)))


def png(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def test_one_picture_is_a_batch_of_one_and_a_list_a_batch(tmp_path):
    (tmp_path / "cat.png").write_bytes(png(PIXELS))
    one = FACTS.prepare(tmp_path / "cat.png")
    assert (one.shape, one.dtype) == ((1, 3, 8, 12), torch.float32)
    ways = [str(tmp_path / "cat.png"), png(PIXELS), Image.fromarray(PIXELS), PIXELS]
    many = FACTS.prepare([*ways, torch.tensor(PIXELS).permute(2, 0, 1)])
    assert torch.equal(many, one.expand(5, -1, -1, -1))
    assert FACTS.prepare([]).shape == (0, 3, 8, 12)


def test_pictures_are_resized_cut_and_normalized_as_the_facts_say():
    how = Preprocessing(size=(20, 30), mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    found = Facts(preprocessing=how).prepare(PIXELS)[0].permute(1, 2, 0)
    expected = (PIXELS / 255 - np.array(how.mean)) / np.array(how.std)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_model_answers_what_its_predictor_answers(tmp_path):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    torch.nn.init.normal_(model.head.weight)
    vitrail.save(model, tmp_path / "model", class_names=[*"abc"])
    model = vitrail.load(tmp_path / "model")
    with torch.inference_mode():
        chances = model.facts.probabilities(model(model.facts.prepare(PIXELS)))[0]
    answer = vitrail.Predictor(model)(PIXELS)
    assert answer.label == "abc"[chances.argmax()]
    assert answer.probability == pytest.approx(float(chances.max()), abs=1e-6)


def test_gray_models_get_gray_pictures():
    facts = Facts(preprocessing=preset("google", (4, 4), channels=1))
    assert facts.prepare([PIXELS, PIXELS[:, :, 0]]).shape == (2, 1, 4, 4)


def test_a_picture_that_cannot_be_read_is_named():
    with pytest.raises(DataError, match="image 2: empty file"):
        FACTS.prepare([PIXELS, b""])
    with pytest.raises(DataError, match="File not found: nowhere"):
        FACTS.prepare("nowhere.jpg")
