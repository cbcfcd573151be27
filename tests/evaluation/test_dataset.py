"""Evaluation splits never overlap the training data silently; classes match by name; ReaL."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import vitrail
from tiny_runs import tiny_run, write_folder
from vitrail import ConfigError, DataError
from vitrail.checkpoints.metadata import get_metadata
from vitrail.cli import main
from vitrail.data.datasets import LabelSets, Sample, Splits, open_dataset
from vitrail.data.provenance import image_bytes
from vitrail.data.tar_shards import pack
from vitrail.evaluation import dataset
from vitrail.evaluation.dataset import match_classes, open_evaluation_split
from vitrail.evaluation.results import Predictions
from vitrail.export.verify import measure_int8

pytestmark = pytest.mark.slow

DIVIDED = "dataset defines no splits; using 80% train, 10% val, 10% test (seed 0)"
SOME = "the model was trained on some of these images"
CHANGED = "the train split has changed since training; the model may have been trained on a few"
UNKNOWN = "the model's training data is not recorded; if it contained some of these images"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder without splits, and models trained on two different train splits of it."""
    home = tmp_path_factory.mktemp("home")
    write_folder(home / "pictures", 20)
    tiny_run(home / "pictures", home / "usual")
    tiny_run(home / "pictures", home / "tenth", dev=0.1)
    return home


def evaluation_images(model, data, split=None):
    """The images of the evaluation split, as bytes, and the notes."""
    source, notes = open_evaluation_split(data, split, get_metadata(vitrail.load(model)))
    return {image_bytes(source, row) for row in range(len(source))}, notes


def train_images(data, **splits):
    return {sample.data for sample in open_dataset(data, splits=Splits(**splits))}


def test_training_dataset_is_evaluated_on_its_held_out_split(home, tmp_path):
    images, notes = evaluation_images(home / "usual", home / "pictures")
    assert len(images) == 6
    assert not images & train_images(home / "pictures")
    assert notes == ["split: test", DIVIDED]
    assert evaluation_images(home / "usual", home / "pictures", "all")[1] == ["split: all", SOME]
    images, notes = evaluation_images(home / "tenth", home / "pictures")  # another split
    assert len(images) == 6
    assert not images & train_images(home / "pictures", val=0.1, test=0.0)
    assert notes[0] == "split: val"
    with pytest.raises(DataError, match="has no split 'test'; available: train, val"):
        evaluation_images(home / "tenth", home / "pictures", "test")  # some are train images
    for split in ("all", "train"):
        assert (
            "was trained on" in evaluation_images(home / "tenth", home / "pictures", split)[1][-1]
        )
    images, notes = evaluation_images(home / "usual", write_folder(tmp_path / "pictures", seed=1))
    assert (len(images), notes) == (30, ["split: all"])  # no image of the training data


@pytest.mark.parametrize("model", ["usual", "tenth"])
def test_training_dataset_is_recognized_at_any_path(home, tmp_path, monkeypatch, model):
    plain = evaluation_images(home / model, home / "pictures")
    shutil.copytree(home / "pictures", tmp_path / "copy")
    for name in ("pictures", "link"):
        (tmp_path / name).symlink_to(home / "pictures")
    (tmp_path / "more").mkdir()
    monkeypatch.chdir(tmp_path)
    for place in ("pictures/", "./pictures", "more/../pictures", "link", "copy"):
        assert evaluation_images(home / model, place) == plain


def test_training_dataset_is_recognized_after_resizing(home, tmp_path):
    larger = tmp_path / "larger"
    shutil.copytree(home / "pictures", larger)
    for image in larger.glob("*/*.png"):
        Image.open(image).resize((9, 9)).save(image)
    metadata = get_metadata(vitrail.load(home / "usual"))
    there = replace(metadata, provenance={**metadata.provenance, "data": f"{larger}/"})
    source, notes = open_evaluation_split(larger, None, there)
    assert len(source) == 6
    assert notes[-1].startswith(CHANGED)
    assert open_evaluation_split(larger, "train", there)[1][-1] == SOME


def test_added_image_does_not_move_train_images_into_the_split(home, tmp_path):
    more = tmp_path / "more"
    shutil.copytree(home / "pictures", more)
    new = write_folder(tmp_path / "new", 1, seed=1) / "red" / "0.png"
    shutil.copy(new, more / "red" / "new.png")
    images, notes = evaluation_images(home / "usual", more)
    assert len(images) == 6
    assert not images & train_images(home / "pictures")
    assert notes[-1].startswith(CHANGED)


def test_train_images_are_recognized_in_another_folder(home, tmp_path):
    """Shards state the default splits; a model with another split was trained on some of test."""
    assert len(list(pack(str(home / "pictures"), tmp_path / "shards"))) == 3
    assert evaluation_images(home / "usual", tmp_path / "shards")[1] == ["split: test"]
    assert evaluation_images(home / "tenth", tmp_path / "shards")[1] == ["split: test", SOME]
    assert evaluation_images(home / "usual", tmp_path / "shards", "train")[1][-1] == SOME
    for picture in (home / "pictures").glob("*/*.png"):
        place = tmp_path / "renamed" / picture.parent.name / f"picture {picture.stem}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, place)
    assert evaluation_images(home / "usual", tmp_path / "renamed", "all")[1][-1] == SOME


def test_unknown_training_data_gives_a_warning(home):
    model = vitrail.load(home / "usual")
    known = dict(get_metadata(model).provenance)
    recorded = [{}, {"data": "elsewhere", "fingerprint": known["fingerprint"]}, {"samples": 3}]
    for provenance in recorded:
        metadata = replace(get_metadata(model), provenance=provenance)
        source, notes = open_evaluation_split(home / "pictures", None, metadata)
        assert len(source) == 60
        assert notes[-1].startswith(UNKNOWN)


def test_dataset_with_only_a_train_split_is_split_as_in_training(tmp_path):
    folder = write_folder(tmp_path / "set" / "train").parent
    tiny_run(folder, tmp_path / "own", dev=0.3)
    images, notes = evaluation_images(tmp_path / "own", folder)
    assert len(images) == 9
    assert notes[0] == "split: val"
    assert not [note for note in notes if "trained on" in note]
    tiny_run(folder, tmp_path / "all")
    assert "exactly these images" in evaluation_images(tmp_path / "all", folder)[1][-1]


def test_commands_use_the_held_out_split(home, monkeypatch, capsys):
    monkeypatch.chdir(home)
    model = vitrail.load(home / "tenth")
    for data in (None, "pictures/"):
        measured = measure_int8(model, model, data)
        assert (measured.images, measured.notes[0]) == (6, "split: val")
    assert main(["evaluate", "tenth", "pictures/"]) == 0
    output = capsys.readouterr().out
    assert "6 images" in output
    assert "note: split: val" in output


def test_compare_says_that_b_was_trained_on_the_images(home, monkeypatch, capsys):
    """The split is A's; `tenth` has another train split of the same folder."""
    monkeypatch.chdir(home)
    unsampled = {"samples": [], "fingerprint": ""}  # as of an older bundle at the same path
    vitrail.save(vitrail.load(home / "tenth"), home / "older", provenance=unsampled)
    cases = ("usual", "tenth", True), ("usual", "older", True), ("usual", "usual", False)
    for a, b, seen in cases:
        assert main(["compare", a, b, "pictures", "--json"]) == 0
        notes = json.loads(capsys.readouterr().out)["notes"]
        assert ("B was trained on some of these images" in notes) is seen


class LabelSource:
    """Labels of some classes, without images."""

    def __init__(self, classes, labels, numbers=None):
        self.classes, self.numbers = tuple(classes), numbers
        self._labels = labels
        self.multi_label = isinstance(labels, LabelSets)

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        return Sample(b"", self._labels[index], self.name(index))

    def name(self, index):
        if self.numbers is None:
            return str(index)
        return f"val/n01440764/ILSVRC2012_val_{self.numbers[index]:08}.JPEG"

    def labels(self):
        return self._labels


PETS = LabelSource(["cat", "dog"], np.array([0, 1, 1]))


@pytest.mark.parametrize(
    ("names", "outputs", "options", "columns", "note"),
    [
        (("cat", "dog"), 2, {}, None, None),
        (("dog", "cat"), 2, {}, [1, 0], None),  # another order permutes the columns
        (("ape", "dog", "bee", "cat"), 4, {"restrict": True}, [3, 1], "2 of the model's classes"),
        ((), 2, {}, None, "the model has no class names"),
        (("Katze", "Hund"), 2, {"by_order": True}, None, "the class names differ"),
    ],
)
def test_matched_classes(names, outputs, options, columns, note):
    match = match_classes(names, outputs, PETS, **options)
    assert (match.source, match.columns) == (PETS, columns)
    assert len(match.notes) == (note is not None)
    assert note is None or note in match.notes[0]


def test_subset_of_classes_is_relabeled():
    match = match_classes(["ape", "dog", "bee", "cat"], 4, PETS)
    assert match.columns is None
    assert match.source.classes == ("ape", "dog", "bee", "cat")
    assert match.notes == ["the dataset has 2 of the model's 4 classes"]
    sets = LabelSets(np.array([0, 1, 1]), np.array([2, 2, 3]))  # {cat, dog}, {}, {dog}
    several = match_classes(["dog", "ape", "cat"], 3, LabelSource(["cat", "dog"], sets))
    for source, labels in ((match.source, [3, 1, 1]), (several.source, [(2, 0), (), (0,)])):
        assert list(source.labels()) == labels
        assert [source[i].label for i in range(3)] == labels
        some = dataset.RelabeledSource(source, source.classes, range(4), np.array([2, 0]))
        assert list(some.labels()) == [some[i].label for i in range(2)] == [labels[2], labels[0]]
        assert (len(some), some.name(0)) == (2, "2")


@pytest.mark.parametrize(
    ("names", "outputs", "message"),
    [
        (("cat", "cow"), 2, "unknown to the model: 'dog'; it has 'cat', 'cow'"),
        (("Katze", "Hund"), 2, r"the model has 'Katze', 'Hund' .* use --by-order"),
        (("a", "b", "c"), 3, r"the dataset 'cat', 'dog'; pass a dataset with classes of the model"),
        ((), 1000, "the model has 1,000 classes and the dataset 2: 'cat'"),
        ((), 0, r"no classification head; .* `vitrail fewshot`"),
    ],
)
def test_class_mismatch_is_an_error(names, outputs, message):
    with pytest.raises(ConfigError, match=message):
        match_classes(names, outputs, PETS)


def validation(*numbers):
    """ImageNet validation images by number."""
    return LabelSource(["a", "b", "c"], np.zeros(len(numbers), int), numbers)


@pytest.fixture
def correct_of(tmp_path):
    def correct(text, source, best, columns=None, broken=()):
        (tmp_path / "real.json").write_text(text)
        logits, labels = np.eye(3, dtype=np.float32)[best], np.zeros(len(best), int)
        logits[list(broken), 0] = np.nan
        known = {"classes": ("a", "b", "c"), "indices": np.arange(len(best))}
        predictions = Predictions(logits=logits, labels=labels, **known)
        labels = dataset.read_real_labels(tmp_path / "real.json")
        match = dataset.ClassMatch(source, columns, [])
        return dataset.real_correct(labels, match, predictions).tolist()

    return correct


def test_real_accuracy_accepts_any_of_the_labels(correct_of):
    source = validation(3, 2, 1, 1)  # the second has no label
    assert correct_of("[[0, 2], [], [1]]", source, [1, 0, 2, 1]) == [True, True, False]
    # Labels are indices of the model's classes.
    correct = correct_of("[[2], [0]]", validation(1, 2), [0, 1], columns=[2, 0, 1])
    assert correct == [True, True]
    # As in the accuracy, NaN logits are wrong, whatever the labels.
    for labels in ("[[0], [0]]", "[[1], [0]]", "[[0, 1, 2], [0]]"):
        assert correct_of(labels, validation(1, 2), [0, 0], broken=[0]) == [False, True]


@pytest.mark.parametrize(
    ("text", "source", "message"),
    [
        ("[[0]]", LabelSource(["a"], np.zeros(1)), "no ReaL label for '0'"),
        ("[[0]]", validation(2), r"no ReaL label for .*val_00000002\.JPEG'"),
        ('{"a": 1}', validation(1), r"real\.json must be a JSON list"),
        ("[1, 2]", validation(1), r"real\.json must be a JSON list"),
        ("no json", validation(1), r"real\.json cannot be read"),
    ],
)
def test_invalid_real_labels(correct_of, text, source, message):
    with pytest.raises(DataError, match=message):
        correct_of(text, source, [0])
