import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close as close

import vitrail
from tiny_runs import write_colors
from vitrail import ConfigError, DataError, Metadata, Predictor, Preprocessing
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import EvalTransform, normalize
from vitrail.evaluation.evaluate import evaluate

pytestmark = pytest.mark.slow

CLASSES = ("ape", "bee", "cat")


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def predictor(model):
    return Predictor(model)


def reference_logits(model, path):
    """Logits of a single image: decode, transform, normalize, run."""
    preprocessing = model.metadata.preprocessing
    image = EvalTransform(preprocessing=preprocessing)(path.read_bytes())
    with torch.inference_mode():
        return model.eval()(normalize(image[None], preprocessing))[0]


def test_prediction_matches_the_model(predictor, model, folder):
    prediction = predictor(folder / "0.png")
    probabilities = reference_logits(model, folder / "0.png").softmax(0)
    assert prediction.label == CLASSES[probabilities.argmax()]
    assert prediction.name == str(folder / "0.png")
    by_label = {guess.label: guess.probability for guess in prediction.guesses}
    assert list(by_label.values()) == sorted(by_label.values(), reverse=True)
    close(torch.tensor([by_label[name] for name in CLASSES]), probabilities, check_dtype=False)
    for margin, expected in ((-1e-6, prediction.label), (1e-6, "")):
        threshold = prediction.probability + margin  # below it, no label is assigned
        limited = predictor(folder / "0.png", threshold=threshold)
        assert (limited.label, limited.guesses) == (expected, prediction.guesses)


def test_image_may_be_path_bytes_pillow_array_or_tensor(predictor, folder):
    path = folder / "1.png"
    image = Image.open(path)
    pixels = np.asarray(image)
    expected = predictor(path).guesses
    tensor = torch.tensor(pixels.copy()).permute(2, 0, 1)
    for same in (str(path), path.read_bytes(), image, pixels, tensor):
        assert predictor(same).guesses == expected
    exif = image.getexif()
    exif[274] = 6  # the orientation is applied
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    turned = predictor(Image.open(file)).guesses
    assert turned == predictor(file.getvalue()).guesses != expected


def test_list_gives_list_in_order_for_any_batch_size(predictor, folder):
    paths = sorted(folder.iterdir())
    single = [predictor(path) for path in paths]
    for size in (1, 3, 7, 16):
        many = list(predictor.stream(paths, batch_size=size))
        assert [each.name for each in many] == [each.name for each in single]
        for one, other in zip(many, single, strict=True):
            assert one.label == other.label
            assert one.probability == pytest.approx(other.probability, abs=1e-6)
    assert predictor([]) == []
    assert [each.label for each in predictor(paths)] == [each.label for each in single]


def test_unreadable_image_raises_outside_stream_only(predictor, folder):
    images = [b"GIF", folder / "0.png", folder / "none.png", folder / "1.png", b""]
    predictions = list(predictor.stream(images, batch_size=2))
    errors = [bool(prediction.error) for prediction in predictions]
    assert errors == [True, False, True, False, True]
    assert predictions[0].name == "image 1"
    assert "file not found" in predictions[2].error
    assert predictions[3].guesses == predictor(folder / "1.png").guesses
    assert not any(prediction.label for prediction in predictions if prediction.error)
    for ask in (predictor, predictor.features):
        with pytest.raises(DataError, match="image 2: empty file"):
            ask([np.zeros((9, 9, 3), np.uint8), b""])


def test_stream_prefetches_at_most_two_batches(predictor, folder):
    data, taken = (folder / "0.png").read_bytes(), []

    def endless():
        while True:
            taken.append(1)
            yield data

    stream = predictor.stream(endless(), batch_size=4)
    for _ in range(6):
        next(stream)
    assert len(taken) <= 12
    stream.close()


@pytest.mark.parametrize(
    ("images", "reason"),
    [
        (np.zeros((4, 4, 3)), "float64 array of shape"),
        (np.zeros((4, 4, 2), np.uint8), "have 2 channels"),
        (np.zeros((0, 4, 3), np.uint8), "is not an image"),
        (torch.zeros(4, 4, dtype=torch.uint8), "is not an image"),
        (7, "int is not an image"),
        ("nowhere.jpg", "file not found: nowhere.jpg"),
    ],
)
def test_invalid_image_is_a_one_line_error(predictor, images, reason):
    with pytest.raises(DataError, match=reason) as caught:
        predictor(images)
    assert "\n" not in str(caught.value)


def test_features_are_the_input_of_the_head(predictor, model, folder):
    paths = sorted(folder.iterdir())
    vectors = predictor.features(paths)
    assert vectors.shape == (7, 16)
    logits = model.head(torch.from_numpy(vectors[3])).softmax(0)
    by_label = {guess.label: guess.probability for guess in predictor(paths[3]).guesses}
    close(torch.tensor([by_label[n] for n in CLASSES]), logits.detach(), check_dtype=False)
    close(predictor.features(paths[3]), vectors[3])


def test_multi_label_model_assigns_several_labels(model, folder):
    several = Predictor(model)
    several.metadata = replace(model.metadata, multi_label=True)
    probabilities = reference_logits(model, folder / "2.png").sigmoid()
    prediction = several(folder / "2.png", top=1)
    expected = {name for name, chance in zip(CLASSES, probabilities, strict=True) if chance >= 0.5}
    assert set(prediction.labels) == expected
    assert prediction.probability == pytest.approx(float(probabilities.max()), abs=1e-6)
    assert set(several(folder / "2.png", threshold=0.0).labels) == set(CLASSES)
    assert several(folder / "2.png", threshold=1.0).labels == ()
    several.metadata = Metadata(preprocessing=model.metadata.preprocessing)
    assert several(folder / "0.png").label in {"0", "1", "2"}  # unnamed classes are numbered


def test_evaluation_uses_the_same_engine(predictor, model, tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 255, (12, 8, 8, 3), np.uint8), np.arange(12) % 3
    path = tmp_path / "set.npz"
    np.savez(path, x_test=pixels, y_test=labels, class_names=np.array(CLASSES))
    predicted = [CLASSES.index(each.label) for each in predictor(list(pixels))]
    for either in (predictor.runner, model):
        assert evaluate(either, path).accuracy == pytest.approx(np.mean(predicted == labels))


def test_other_modules_raise(tmp_path):
    for call in (
        vitrail.Predictor,
        lambda module: vitrail.evaluate(module, write_colors(tmp_path / "colors.npz")),
        lambda module: vitrail.inspect_model(module, []),
    ):
        with pytest.raises(ConfigError, match=r"^Flatten is not a model of vitrail; pass one from"):
            call(torch.nn.Flatten())


def test_bundle_is_self_contained_and_its_preprocessing_can_be_set(model, bundle, folder):
    loaded = Predictor(bundle)
    assert loaded(folder / "0.png").guesses == Predictor(model)(folder / "0.png").guesses
    assert loaded.classes == CLASSES
    predictor = Predictor(bundle, preprocessing="deit")
    assert predictor.metadata.preprocessing == preset("deit", (8, 8))
    for images in (model, "model.onnx"):
        with pytest.raises(ConfigError, match="preprocessing applies to a checkpoint"):
            Predictor(images, preprocessing="deit")


def test_model_without_classes_has_features_only(folder):
    headless = Predictor(vitrail.create("ViT-Mu/4", image_size=8, num_classes=0))
    with pytest.raises(ConfigError, match="has no classes"):
        headless(folder / "0.png")
    assert headless.features(folder / "0.png").shape == (headless.model.config.num_features,)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_dropout_is_off_in_every_engine(make_model, folder, engine):
    model = make_model(dropout=0.5)
    expected = Predictor(model.eval())(folder / "0.png").probability
    prediction = Predictor(model.train(), engine=engine)(folder / "0.png")
    assert prediction.probability == pytest.approx(expected, abs=1e-4)


def test_merge_of_the_model_is_used_unless_overridden_and_does_not_change(make_model):
    for options, merge in (({}, 1), ({"merge": 0}, 0), ({"merge": 2}, 2)):
        model = make_model()
        model.merge = 1
        used = Predictor(model, **options).engine.model
        assert (used.merge, model.merge) == (merge, 1)
        weights = zip(used.parameters(), model.parameters(), strict=True)
        assert all(ours is theirs for ours, theirs in weights)
        assert (used is model) == (merge == 1)


def test_images_are_preprocessed_ahead_for_other_devices(model, folder):
    ahead = Predictor(model)
    ahead.device = torch.device("meta")
    assert isinstance(ahead.load_image(folder / "0.png"), torch.Tensor)
    assert isinstance(Predictor(model).load_image(folder / "0.png"), bytes)


def test_image_too_thin_to_resize_is_rejected(model):
    thin = Predictor(model)
    thin.preprocess = EvalTransform(
        preprocessing=Preprocessing(size=(8, 8), resize="short-side", resize_to=(9, 9))
    )
    with pytest.raises(DataError, match="aspect ratio of 1000 x 1 pixels"):
        thin(np.zeros((1, 1000, 3), np.uint8))
    assert thin(np.zeros((10, 1000, 3), np.uint8)).label
