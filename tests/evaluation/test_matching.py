import numpy as np
import pytest

from vitrail import ConfigError
from vitrail.data.datasets import LabelSets, Sample
from vitrail.evaluation.matching import match


class Listed:
    """Samples of some classes, without pictures."""

    def __init__(self, classes, labels):
        self.classes = tuple(classes)
        self.found = labels
        self.multi_label = isinstance(labels, LabelSets)

    def __len__(self):
        return len(self.found)

    def __getitem__(self, index):
        return Sample(b"", self.found[index], self.name(index))

    def name(self, index):
        return str(index)

    def labels(self):
        return self.found


PETS = Listed(["cat", "dog"], np.array([0, 1, 1]))


def test_the_same_names_in_the_same_order_need_nothing():
    assert match(["cat", "dog"], 2, PETS) == (PETS, None, [])


def test_another_order_of_the_classes_is_put_right():
    found = match(["dog", "cat"], 2, PETS)
    assert (found.source, found.columns) == (PETS, [1, 0])


def test_a_set_of_some_classes_gets_the_numbers_of_the_model():
    found = match(["ape", "dog", "bee", "cat"], 4, PETS)
    assert found.columns is None
    assert found.source.classes == ("ape", "dog", "bee", "cat")
    assert found.source.labels().tolist() == [3, 1, 1]
    assert [found.source[i].label for i in range(3)] == [3, 1, 1]
    assert found.notes == ["the pictures show 2 of the model's 4 classes"]


def test_restricted_the_other_classes_do_not_compete():
    found = match(["ape", "dog", "bee", "cat"], 4, PETS, restrict=True)
    assert (found.source, found.columns) == (PETS, [3, 1])
    assert found.notes == ["2 classes of the model are left out of the choice"]


def test_several_labels_are_renumbered_too():
    sets = LabelSets(np.array([0, 1, 1]), np.array([2, 2, 3]))  # {cat, dog}, {}, {dog}
    found = match(["dog", "ape", "cat"], 3, Listed(["cat", "dog"], sets)).source
    assert list(found.labels()) == [(2, 0), (), (0,)]
    assert [found[i].label for i in range(3)] == [(2, 0), (), (0,)]


def test_a_class_the_model_does_not_know_is_refused_by_name():
    with pytest.raises(ConfigError, match="does not know 'dog'; it knows 'cat', 'cow'"):
        match(["cat", "cow"], 2, PETS)


def test_a_model_without_names_is_matched_by_order_and_that_is_told():
    found = match((), 2, PETS)
    assert (found.source, found.columns) == (PETS, None)
    assert "does not say what its classes are called" in found.notes[0]


def test_quite_other_names_are_refused_unless_the_order_is_said_to_be_right():
    with pytest.raises(ConfigError, match=r"tells 'Katze', 'Hund' apart .* say --by-order"):
        match(["Katze", "Hund"], 2, PETS)
    found = match(["Katze", "Hund"], 2, PETS, by_order=True)
    assert (found.source, found.columns) == (PETS, None)
    assert "calls its classes otherwise" in found.notes[0]


def test_another_number_of_unnamed_classes_is_refused():
    with pytest.raises(ConfigError, match="tells 1,000 classes apart and the data has 2: 'cat'"):
        match((), 1000, PETS)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ConfigError, match=r"no head .* `vitrail fewshot`"):
        match((), 0, PETS)
