import json

import numpy as np
import pytest
from test_matching import Listed
from vitrail.evaluation.findings import Predictions
from vitrail.evaluation.matching import Match
from vitrail.evaluation.real import read_real, real_hits

from vitrail import DataError


class Validation(Listed):
    """Pictures of ImageNet's validation set, by their numbers."""

    def __init__(self, numbers):
        super().__init__(["a", "b", "c"], np.zeros(len(numbers), int))
        self.numbers = numbers

    def name(self, index):
        return f"val/n01440764/ILSVRC2012_val_{self.numbers[index]:08}.JPEG"


def predictions(best):
    return Predictions(
        classes=("a", "b", "c"),
        logits=np.eye(3, dtype=np.float32)[best],
        labels=np.zeros(len(best), int),
        indices=np.arange(len(best)),
    )


def hits_of(path, source, said, columns=None):
    return real_hits(read_real(path), Match(source, columns, []), said)


def write(tmp_path, entries):
    path = tmp_path / "real.json"
    path.write_text(json.dumps(entries))
    return path


def test_a_picture_is_right_if_any_real_label_is_said_and_left_out_without_one(tmp_path):
    path = write(tmp_path, [[0, 2], [], [1]])
    hits = hits_of(path, Validation([3, 2, 1, 1]), predictions([1, 0, 2, 1]))
    assert hits.tolist() == [True, True, False]


def test_a_picture_without_a_number_is_named(tmp_path):
    with pytest.raises(DataError, match="'0' is no ImageNet validation picture"):
        hits_of(write(tmp_path, [[0]]), Listed(["a"], np.zeros(1)), predictions([0]))


def test_a_number_beyond_the_list_is_named(tmp_path):
    with pytest.raises(DataError, match=r"val_00000002\.JPEG' is no ImageNet validation picture"):
        hits_of(write(tmp_path, [[0]]), Validation([2]), predictions([0]))


@pytest.mark.parametrize("content", ['{"a": 1}', "[1, 2]", "no json"])
def test_what_is_no_list_of_lists_is_refused(tmp_path, content):
    path = tmp_path / "real.json"
    path.write_text(content)
    with pytest.raises(DataError, match=r"real\.json (must be a list|cannot be read)"):
        hits_of(path, Validation([1]), predictions([0]))


def test_real_labels_are_numbers_of_the_models_classes_whatever_the_order_of_the_data(tmp_path):
    path = write(tmp_path, [[2], [0]])
    hits = hits_of(path, Validation([1, 2]), predictions([0, 1]), columns=[2, 0, 1])
    assert hits.tolist() == [True, True]
