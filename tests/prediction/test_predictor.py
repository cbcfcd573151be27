"""Pictures in, answers out: whatever they are given as, in their order, bad ones named."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close as close

import vitrail
from vitrail import ConfigError, DataError, Metadata, Predictor, Preprocessing
from vitrail.data.preprocessing import preset
from vitrail.data.transforms import EvaluationTransform, normalize
from vitrail.evaluation.api import evaluate

CLASSES = ("ape", "bee", "cat")


@pytest.fixture(scope="module")
def model(answering):
    return answering(CLASSES)


@pytest.fixture(scope="module")
def predictor(model):
    return Predictor(model)


def slowly(model, path):
    """The answer by the longest way: decode, prepare, normalize, run, one picture at a time."""
    how = model.metadata.preprocessing
    image = EvaluationTransform(preprocessing=how)(path.read_bytes())
    with torch.inference_mode():
        return model.eval()(normalize(image[None], how))[0].softmax(0)


def test_an_answer_is_what_the_model_says(predictor, model, folder):
    answer = predictor(folder / "0.png")
    chances = slowly(model, folder / "0.png")
    assert answer.label == CLASSES[chances.argmax()]
    assert answer.name == str(folder / "0.png")
    told = {guess.label: guess.probability for guess in answer.guesses}
    assert list(told.values()) == sorted(told.values(), reverse=True)
    close(torch.tensor([told[name] for name in CLASSES]), chances, check_dtype=False)


def test_a_picture_may_be_a_path_bytes_pillow_an_array_or_a_tensor(predictor, folder):
    path = folder / "1.png"
    image = Image.open(path)
    pixels = np.asarray(image)
    expected = predictor(path).guesses
    for given in (
        str(path),
        path.read_bytes(),
        image,
        pixels,
        torch.tensor(pixels.copy()).permute(2, 0, 1),
    ):
        assert predictor(given).guesses == expected


def test_a_pillow_image_is_turned_upright_as_its_file_would_be(predictor):
    pixels = np.random.default_rng(1).integers(0, 255, (6, 12, 3), np.uint8)
    image = Image.fromarray(pixels)
    exif = image.getexif()
    exif[274] = 6
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    opened = Image.open(io.BytesIO(file.getvalue()))
    assert predictor(opened).guesses == predictor(file.getvalue()).guesses
    assert predictor(opened).guesses != predictor(pixels).guesses


def test_a_list_gives_a_list_in_its_order_whatever_the_batches(predictor, folder):
    paths = sorted(folder.iterdir())
    singly = [predictor(path) for path in paths]
    for size in (1, 3, 7, 16):
        many = list(predictor.stream(paths, batch_size=size))
        assert [answer.name for answer in many] == [answer.name for answer in singly]
        for one, other in zip(many, singly, strict=True):
            assert one.label == other.label
            assert one.probability == pytest.approx(other.probability, abs=1e-6)
    assert predictor([]) == []
    assert [answer.label for answer in predictor(paths)] == [answer.label for answer in singly]


def test_a_stream_names_bad_pictures_and_goes_on(predictor, folder):
    given = [b"GIF", folder / "0.png", folder / "none.png", folder / "1.png", b""]
    found = list(predictor.stream(given, batch_size=2))
    assert [bool(answer.error) for answer in found] == [True, False, True, False, True]
    assert found[0].name == "picture 1"
    assert "there is no file" in found[2].error
    assert found[3].guesses == predictor(folder / "1.png").guesses
    assert not any(answer.label for answer in found if answer.error)


def test_a_stream_holds_no_more_than_two_batches_of_an_endless_one(predictor, folder):
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


@pytest.mark.parametrize("asked", ["call", "features"])
def test_a_picture_that_cannot_be_read_is_an_error_where_nobody_asked_to_go_on(predictor, asked):
    ask = predictor if asked == "call" else predictor.features
    with pytest.raises(DataError, match="picture 2: an empty file"):
        ask([np.zeros((9, 9, 3), np.uint8), b""])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (np.zeros((4, 4, 3)), "float64 values of shape"),
        (np.zeros((4, 4, 2), np.uint8), "have 2 channels"),
        (np.zeros((0, 4, 3), np.uint8), "are no pixels"),
        (torch.zeros(4, 4, dtype=torch.uint8), "are no pixels"),
        (7, "a int is no picture"),
        ("nowhere.jpg", "there is no file nowhere.jpg"),
    ],
)
def test_what_is_no_picture_is_said_in_one_line(predictor, given, reason):
    with pytest.raises(DataError, match=reason) as caught:
        predictor(given)
    assert "\n" not in str(caught.value)


def test_features_are_the_vectors_before_the_head(predictor, model, folder):
    paths = sorted(folder.iterdir())
    vectors = predictor.features(paths)
    assert vectors.shape == (7, 16)
    logits = model.head(torch.from_numpy(vectors[3])).softmax(0)
    told = {guess.label: guess.probability for guess in predictor(paths[3]).guesses}
    close(torch.tensor([told[n] for n in CLASSES]), logits.detach(), check_dtype=False)
    close(predictor.features(paths[3]), vectors[3])


def test_below_the_threshold_it_abstains(predictor, folder):
    sure = predictor(folder / "0.png")
    assert predictor(folder / "0.png", threshold=sure.probability - 1e-6).label == sure.label
    unsure = predictor(folder / "0.png", threshold=sure.probability + 1e-6)
    assert unsure.label == ""
    assert unsure.guesses == sure.guesses


def test_several_classes_may_apply_where_the_model_says_so(model, folder):
    several = Predictor(model)
    several.metadata = Metadata(
        preprocessing=model.metadata.preprocessing, class_names=CLASSES, multi_label=True
    )
    chances = slowly_several(model, folder / "2.png")
    answer = several(folder / "2.png", top=1)
    expected = {name for name, chance in zip(CLASSES, chances, strict=True) if chance >= 0.5}
    assert set(answer.labels) == expected
    assert answer.probability == pytest.approx(float(chances.max()), abs=1e-6)
    assert set(several(folder / "2.png", threshold=0.0).labels) == set(CLASSES)
    assert several(folder / "2.png", threshold=1.0).labels == ()


def slowly_several(model, path):
    how = model.metadata.preprocessing
    image = EvaluationTransform(preprocessing=how)(path.read_bytes())
    with torch.inference_mode():
        return model.eval()(normalize(image[None], how))[0].sigmoid()


def test_classes_without_names_go_by_their_numbers(model, folder):
    nameless = Predictor(model)
    nameless.metadata = Metadata(preprocessing=model.metadata.preprocessing)
    assert nameless(folder / "0.png").label in {"0", "1", "2"}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top": 0}, "top=0 leaves nothing to tell"),
        ({"threshold": 1.5}, "threshold=1.5 is no probability"),
    ],
)
def test_impossible_questions_are_refused(predictor, folder, options, reason):
    with pytest.raises(ConfigError, match=reason):
        predictor(folder / "0.png", **options)


def test_what_is_measured_is_what_answers(predictor, model, tmp_path):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 255, (12, 8, 8, 3), np.uint8), np.arange(12) % 3
    path = tmp_path / "set.npz"
    np.savez(path, x_test=pixels, y_test=labels, class_names=np.array(CLASSES))
    answers = predictor(list(pixels))
    right = np.mean([a.label == CLASSES[label] for a, label in zip(answers, labels, strict=True)])
    assert evaluate(predictor.runner, path).accuracy == pytest.approx(right)
    assert evaluate(model, path).accuracy == pytest.approx(right)


def test_a_bundle_is_all_that_is_needed(model, folder, tmp_path):
    vitrail.save(model, tmp_path / "bundle")
    loaded = Predictor(tmp_path / "bundle")
    assert loaded(folder / "0.png").guesses == Predictor(model)(folder / "0.png").guesses
    assert loaded.classes == CLASSES


def test_preprocessing_may_be_chosen_for_a_checkpoint(model, tmp_path):
    vitrail.save(model, tmp_path / "bundle")
    predictor = Predictor(tmp_path / "bundle", preprocessing="deit")
    assert predictor.metadata.preprocessing == preset("deit", (8, 8))
    for given in (model, "model.onnx"):
        with pytest.raises(ConfigError, match="preprocessing is for a checkpoint"):
            Predictor(given, preprocessing="deit")


def test_a_model_without_classes_says_so_instead_of_inventing_some(folder):
    headless = vitrail.create(
        "ViT-Mu/4", image_size=8, patch_size=4, width=16, mlp_width=32, heads=2, depth=1,
        num_classes=0,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="knows no classes"):
        Predictor(headless)(folder / "0.png")
    assert Predictor(headless).features(folder / "0.png").shape == (16,)


@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_predictor_answers_without_dropout_whatever_the_engine(answering, folder, engine):
    shaky = answering(CLASSES, dropout=0.5)
    expected = Predictor(shaky.eval())(folder / "0.png").probability
    answer = Predictor(shaky.train(), engine=engine)(folder / "0.png")
    assert answer.probability == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("asked", "merge"), [({}, 1), ({"merge": 0}, 0), ({"merge": 2}, 2)])
def test_a_model_keeps_its_merging_unless_another_is_asked_for(answering, asked, merge):
    model = answering(CLASSES)
    model.merge = 1
    Predictor(model, **asked)
    assert model.merge == merge


def test_pictures_are_prepared_ahead_where_the_model_has_another_device(model, folder):
    ahead = Predictor(model)
    ahead.device = torch.device("meta")
    assert isinstance(ahead.early(folder / "0.png"), torch.Tensor)
    assert isinstance(Predictor(model).early(folder / "0.png"), bytes)


def test_a_picture_too_thin_to_be_resized_by_its_short_side_is_refused(model):
    thin = Predictor(model)
    thin.transform = EvaluationTransform(
        preprocessing=Preprocessing(size=(8, 8), resize="short-side", resize_to=(9, 9))
    )
    with pytest.raises(DataError, match="1000 x 1 pixels is too thin"):
        thin(np.zeros((1, 1000, 3), np.uint8))
    assert thin(np.zeros((10, 1000, 3), np.uint8)).label
