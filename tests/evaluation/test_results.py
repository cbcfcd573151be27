import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitrail import DataError
from vitrail.evaluation import results
from vitrail.evaluation.metrics import score_samples
from vitrail.evaluation.results import MAX_MISTAKES, EvaluationResult, ResultAccumulator

torch.manual_seed(0)
LOGITS = torch.randn(101, 12) * 3
LABELS = torch.randint(0, 12, (101,))
INDICES = torch.randperm(101)


class NamedSource:
    """As much of a source as an accumulator needs."""

    def __init__(self, length=101):
        self.length = length

    def __len__(self):
        return self.length

    def name(self, index):
        return f"image {index}"


def accumulated(logits, labels, indices, batch_size, **more) -> ResultAccumulator:
    accumulator = ResultAccumulator(logits.shape[1], **more)
    for start in range(0, len(logits), batch_size):
        part = slice(start, start + batch_size)
        accumulator.update(logits[part], labels[part], indices[part])
    return accumulator


def evaluated(
    logits=LOGITS, labels=LABELS, indices=INDICES, batch_size=16, **more
) -> EvaluationResult:
    return accumulated(logits, labels, indices, batch_size, **more).finish(NamedSource(), {})  # type: ignore


def test_metrics_equal_their_definition():
    got = evaluated()
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
def test_result_is_independent_of_the_batch_size(batch_size):
    got, whole = evaluated(batch_size=batch_size), evaluated(batch_size=101)
    assert (got.samples, got.accuracy, got.top5) == (whole.samples, whole.accuracy, whole.top5)
    assert got.loss == pytest.approx(whole.loss, rel=1e-12)
    assert np.array_equal(got.confusion, whole.confusion)  # type: ignore
    assert got.mistakes == whole.mistakes


def test_mistakes_are_the_most_confident_wrong_predictions():
    got = evaluated(batch_size=9)
    probabilities = LOGITS.softmax(1)
    wrong = [n for n in range(101) if probabilities[n].argmax() != LABELS[n]]
    wrong.sort(key=lambda n: -probabilities[n].max())
    assert [m.index for m in got.mistakes] == INDICES[wrong[:MAX_MISTAKES]].tolist()
    worst, row = got.mistakes[0], wrong[0]
    assert worst.name == f"image {INDICES[row]}"
    assert (worst.label, worst.predicted) == (LABELS[row], probabilities[row].argmax())
    assert worst.confidence == pytest.approx(probabilities[row].max().item())
    assert worst.label_probability == pytest.approx(probabilities[row, LABELS[row]].item())


def test_constant_logits_score_at_chance():
    got = evaluated(torch.zeros(101, 12))
    assert got.accuracy == pytest.approx((LABELS < 1).float().mean().item())
    assert got.top5 == pytest.approx((LABELS < 5).float().mean().item())


def test_nan_logits_are_wrong_and_json_stays_valid():
    got = evaluated(torch.full((101, 12), math.nan))
    assert got.accuracy == got.top5 == 0
    assert math.isnan(got.loss)
    assert json.loads(json.dumps(got.to_dict(), allow_nan=False))["loss"] is None


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
@pytest.mark.parametrize("broken", [slice(None), slice(0, 1), slice(5, 12)])
def test_nan_logits_are_off_the_diagonal_of_the_confusion_matrix(broken, loss):
    logits = LOGITS.clone()
    logits[::2, broken] = math.nan
    got = evaluated(logits, loss=loss)
    assert got.confusion is not None
    assert got.confusion.sum(axis=1).tolist() == LABELS.bincount(minlength=12).tolist()
    assert got.confusion.diagonal().sum() / 101 == got.accuracy
    confidences = [mistake.confidence for mistake in got.mistakes if mistake.index in INDICES[::2]]
    assert all(map(math.isnan, confidences))


def test_nan_logits_predict_a_wrong_class():
    nan = torch.full((3, 3), math.nan)
    got = score_samples(nan, torch.tensor([0, 1, 2]), "softmax")
    assert got.predicted.tolist() == [1, 0, 0]
    labels = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0]])
    assert score_samples(nan, labels, "sigmoid").predicted.tolist() == [1, 0, 2]
    alone = score_samples(nan[:, :1], torch.tensor([0, 0, 0]), "softmax")
    assert alone.rank.tolist() == [1, 1, 1]


def test_multi_label_accuracy_and_loss():
    logits = torch.tensor([[2.0, 1, 0], [2.0, 1, 0], [0, 0, 9.0], [3.0, 0, 0]])
    labels = torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1], [0, 0, 0]])
    got = evaluated(logits, labels, torch.arange(4), 3, multi_label=True)
    assert got.accuracy == 0.5  # an image without labels cannot be correct
    assert got.confusion is None
    assert got.top5 is None
    want = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / 4
    assert got.loss == pytest.approx(want.item())
    assert [(m.index, m.label, m.predicted) for m in got.mistakes] == [(3, (), 0), (1, (1, 2), 0)]
    assert got.mistakes[0].label_probability == 0
    assert got.mistakes[1].label_probability == pytest.approx(torch.tensor(1.0).sigmoid().item())


def test_sigmoid_loss_of_single_labels_is_bce_of_one_hot():
    targets = F.one_hot(LABELS, 12).float()
    want = F.binary_cross_entropy_with_logits(LOGITS, targets, reduction="sum") / 101
    assert evaluated(loss="sigmoid").loss == pytest.approx(want.item())


def test_half_precision_logits_are_scored_in_float32():
    assert evaluated(LOGITS.bfloat16()).loss == pytest.approx(evaluated().loss, rel=0.01)


def test_processes_combine_to_the_result_of_one(monkeypatch):
    """Three accumulators with a third of the images each, combined as processes would."""
    parts = [accumulated(LOGITS[n::3], LABELS[n::3], INDICES[n::3], 7) for n in range(3)]
    sums = {
        int: [torch.from_numpy(part.counts.copy()) for part in parts],
        float: [torch.tensor([part.total_loss], dtype=torch.float64) for part in parts],
        tuple: [torch.from_numpy(part.confusion.copy()) for part in parts],  # type: ignore
    }

    def all_reduce_sum(tensor):
        kind = float if tensor.dtype == torch.float64 else tuple if tensor.ndim == 2 else int
        return torch.stack(sums[kind]).sum(0)

    lists = [part.mistakes for part in parts]
    monkeypatch.setattr(results, "all_reduce_sum", all_reduce_sum)
    monkeypatch.setattr(results, "all_gather_object", lambda value: lists)
    parts[1].reduce()
    got, whole = parts[1].finish(NamedSource(), {}), evaluated()  # type: ignore
    assert (got.samples, got.accuracy, got.top5) == (whole.samples, whole.accuracy, whole.top5)
    assert got.loss == pytest.approx(whole.loss, rel=1e-12)
    assert np.array_equal(got.confusion, whole.confusion)  # type: ignore
    assert got.mistakes == whole.mistakes


@pytest.mark.parametrize(("classes", "kept", "written"), [(100, True, True), (101, True, False)])
def test_large_confusion_matrix_is_not_in_the_json(classes, kept, written):
    got = evaluated(torch.randn(9, classes), torch.arange(9), torch.arange(9))
    assert (got.confusion is not None) is kept
    assert (got.to_dict()["confusion"] is not None) is written


def test_huge_confusion_matrix_is_not_kept():
    assert evaluated(torch.randn(9, 1001), torch.arange(9), torch.arange(9)).confusion is None


def test_no_readable_image_is_an_error_with_a_reason():
    with pytest.raises(DataError, match=r"none of 3 images could be read: a.jpg: cut off"):
        ResultAccumulator(3).finish(NamedSource(3), {"a.jpg": "cut off"})  # type: ignore


def test_quick_result_has_only_the_basic_json_keys():
    keys = ["samples", "accuracy", "top5", "loss", "confusion", "mistakes", "skipped"]
    assert list(evaluated().to_dict()) == keys
