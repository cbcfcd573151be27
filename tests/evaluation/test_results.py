import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail import DataError
from vitrail.evaluation import outcome
from vitrail.evaluation.outcome import MOST_MISTAKES, Outcome, Tally

torch.manual_seed(0)
LOGITS = torch.randn(101, 12) * 3
LABELS = torch.randint(0, 12, (101,))
PLACES = torch.randperm(101)


class Named:
    """As much of a source as an outcome asks for."""

    def __init__(self, length=101):
        self.length = length

    def __len__(self):
        return self.length

    def name(self, index):
        return f"picture {index}"


def tallied(logits, labels, places, batch_size, **more) -> Tally:
    tally = Tally(logits.shape[1], **more)
    for start in range(0, len(logits), batch_size):
        part = slice(start, start + batch_size)
        tally.add(logits[part], labels[part], places[part])
    return tally


def found(logits=LOGITS, labels=LABELS, places=PLACES, batch_size=16, **more) -> Outcome:
    return tallied(logits, labels, places, batch_size, **more).finish(Named(), {})  # type: ignore


def test_numbers_are_those_of_the_textbook():
    got = found()
    assert got.samples == 101
    assert got.accuracy == pytest.approx((LOGITS.argmax(1) == LABELS).float().mean().item())
    among = (LOGITS.topk(5).indices == LABELS[:, None]).any(1)
    assert got.top5 == pytest.approx(among.float().mean().item())
    assert got.loss == pytest.approx(F.cross_entropy(LOGITS.double(), LABELS).item(), rel=1e-6)
    assert got.confusion is not None
    assert got.confusion.sum() == 101
    row, column = int(LABELS[0]), int(LOGITS[0].argmax())
    same = (row == LABELS) & (LOGITS.argmax(1) == column)
    assert got.confusion[row, column] == same.sum()


@pytest.mark.parametrize("batch_size", [1, 7, 100, 101, 500])
def test_the_batch_size_does_not_matter(batch_size):
    got, whole = found(batch_size=batch_size), found(batch_size=101)
    assert (got.samples, got.accuracy, got.top5) == (whole.samples, whole.accuracy, whole.top5)
    assert got.loss == pytest.approx(whole.loss, rel=1e-12)
    assert np.array_equal(got.confusion, whole.confusion)  # type: ignore
    assert got.mistakes == whole.mistakes


def test_mistakes_are_the_most_confident_wrong_answers():
    got = found(batch_size=9)
    chances = LOGITS.softmax(1)
    wrong = [n for n in range(101) if chances[n].argmax() != LABELS[n]]
    wrong.sort(key=lambda n: -chances[n].max())
    assert [m.index for m in got.mistakes] == PLACES[wrong[:MOST_MISTAKES]].tolist()
    worst, row = got.mistakes[0], wrong[0]
    assert worst.name == f"picture {PLACES[row]}"
    assert (worst.label, worst.predicted) == (LABELS[row], chances[row].argmax())
    assert worst.confidence == pytest.approx(chances[row].max().item())
    assert worst.chance == pytest.approx(chances[row, LABELS[row]].item())


def test_a_model_that_knows_nothing_gets_no_more_than_chance():
    got = found(torch.zeros(101, 12))
    assert got.accuracy == pytest.approx((LABELS < 1).float().mean().item())
    assert got.top5 == pytest.approx((LABELS < 5).float().mean().item())


def test_logits_that_are_no_numbers_are_wrong_and_the_json_still_is_json():
    got = found(torch.full((101, 12), math.nan))
    assert got.accuracy == got.top5 == 0
    assert math.isnan(got.loss)
    assert json.loads(json.dumps(got.to_dict(), allow_nan=False))["loss"] is None


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("broken", [slice(None), slice(0, 1), slice(5, 12)])
def test_what_is_no_number_is_in_the_confusion_matrix_beside_its_diagonal(broken, loss):
    logits = LOGITS.clone()
    logits[::2, broken] = math.nan
    got = found(logits, loss=loss)
    assert got.confusion is not None
    assert got.confusion.sum(axis=1).tolist() == LABELS.bincount(minlength=12).tolist()
    assert got.confusion.diagonal().sum() / 101 == got.accuracy
    told = [mistake.confidence for mistake in got.mistakes if mistake.index in PLACES[::2]]
    assert all(map(math.isnan, told))


def test_what_is_no_number_is_taken_for_a_class_that_is_wrong():
    nothing = torch.full((3, 3), math.nan)
    got = outcome.score(nothing, torch.tensor([0, 1, 2]), "softmax")
    assert got.predicted.tolist() == [1, 0, 0]
    several = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    assert outcome.score(nothing, several, "sigmoid").predicted.tolist() == [1, 0, 2]
    alone = outcome.score(nothing[:, :1], torch.tensor([0, 0, 0]), "softmax")
    assert alone.position.tolist() == [1, 1, 1]


def test_of_several_labels_one_must_be_hit_and_the_loss_is_of_sigmoids():
    logits = torch.tensor([[2.0, 1, 0], [2.0, 1, 0], [0, 0, 9.0], [3.0, 0, 0]])
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    got = found(logits, labels, torch.arange(4), 3, multi_label=True)
    assert got.accuracy == 0.5  # a picture of nothing cannot be right
    assert got.confusion is None
    assert got.top5 is None
    want = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / 4
    assert got.loss == pytest.approx(want.item())
    assert [(m.index, m.label, m.predicted) for m in got.mistakes] == [(3, (), 0), (1, (1, 2), 0)]
    assert got.mistakes[0].chance == 0
    assert got.mistakes[1].chance == pytest.approx(torch.tensor(1.0).sigmoid().item())


def test_a_sigmoid_loss_with_one_label_each_is_that_of_its_zeros_and_ones():
    targets = F.one_hot(LABELS, 12).float()
    want = F.binary_cross_entropy_with_logits(LOGITS, targets, reduction="sum") / 101
    assert found(loss="sigmoid").loss == pytest.approx(want.item())


def test_half_precision_logits_are_summed_in_full():
    assert found(LOGITS.bfloat16()).loss == pytest.approx(found().loss, rel=0.01)


def test_processes_together_find_what_one_finds(monkeypatch):
    """Three tallies of a third each, their sums and lists put together as processes would."""
    parts = [tallied(LOGITS[n::3], LABELS[n::3], PLACES[n::3], 7) for n in range(3)]
    asked = {
        int: [torch.from_numpy(part.counts.copy()) for part in parts],
        float: [torch.tensor([part.total_loss], dtype=torch.float64) for part in parts],
        tuple: [torch.from_numpy(part.confusion.copy()) for part in parts],  # type: ignore
    }

    def sum_over(tensor):
        kind = float if tensor.dtype == torch.float64 else tuple if tensor.ndim == 2 else int
        return torch.stack(asked[kind]).sum(0)

    lists = [part.mistakes for part in parts]
    monkeypatch.setattr(outcome, "sum_over", sum_over)
    monkeypatch.setattr(outcome, "gather_objects", lambda value: lists)
    parts[1].reduce()
    got, whole = parts[1].finish(Named(), {}), found()  # type: ignore
    assert (got.samples, got.accuracy, got.top5) == (whole.samples, whole.accuracy, whole.top5)
    assert got.loss == pytest.approx(whole.loss, rel=1e-12)
    assert np.array_equal(got.confusion, whole.confusion)  # type: ignore
    assert got.mistakes == whole.mistakes


@pytest.mark.parametrize(("classes", "kept", "written"), [(100, True, True), (101, True, False)])
def test_a_large_confusion_matrix_stays_out_of_the_json(classes, kept, written):
    got = found(torch.randn(9, classes), torch.arange(9), torch.arange(9))
    assert (got.confusion is not None) is kept
    assert (got.to_dict()["confusion"] is not None) is written


def test_a_huge_confusion_matrix_is_not_kept():
    assert found(torch.randn(9, 1001), torch.arange(9), torch.arange(9)).confusion is None


def test_nothing_that_can_be_read_is_an_error_with_a_reason():
    with pytest.raises(DataError, match=r"none of 3 pictures could be read: a.jpg: cut off"):
        Tally(3).finish(Named(3), {"a.jpg": "cut off"})  # type: ignore
