"""The closed-form probe: least squares onto +1 and -1 with a penalty, exactly as in big_vision.

Features are whitened, a constant 100 is appended, which leaves the bias almost free of the penalty,
and the map W to classes is the one with the least |XW - Y|^2 + l2 |W|^2, where Y is +1 at a row's
label and -1 elsewhere (section 4.1 of the paper). Everything is float64, and rows are read a chunk
at a time; equations.py has the algebra.

Leaving a row out needs no second fit. With h the diagonal of X (X'X + l2)^-1 X', what the probe
would miss row i by, had it not seen it, is what it does miss it by, divided by 1 - h_i.

Shapes: n rows, m of them at a time, D features, C classes, L values of l2.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.calibration import fit_temperature
from vitrail.probing.equations import (
    BIAS,
    Spectrum,
    System,
    decompose,
    normal_equations,
    set_up,
)
from vitrail.probing.rows import (
    Features,
    Labels,
    Rows,
    check,
    check_features,
    chunks,
    joined,
    likeliest,
    rows_at_once,
)

USUAL_L2 = 2.0**10  # big_vision's, for all data sets
PATH = tuple(4.0**power for power in range(-1, 9))  # 0.25 to 65,536, with 1,024
TINY = 1e-300  # keeps the logarithm finite
SCALES = (0.5, 100.0)  # bounds of `Path.scale`
USUAL_SCALE = 8.0  # where no row can be left out: the median on test images (docs/notebook.md)


@dataclass(frozen=True, eq=False)
class Probe:
    """A linear classifier of features, and the whitening that belongs to it."""

    l2: float
    weights: Tensor  # (D + 1, C), for whitened features; the constant feature's are the last row
    mean: Tensor  # (D,)
    std: Tensor  # (D,), over the rows, with 1e-5 added

    def scores(self, features: Features) -> Tensor:
        """(n, C), about +1 for the class of a row and -1 for the others."""
        return joined(self.parts(features), len(features), self.weights.shape[1])

    def predict(self, features: Features) -> Tensor:
        """The class with the highest score, the first of equal ones. (n,)"""
        return likeliest(self.parts(features), len(features))

    def parts(self, features: Features) -> Iterator[tuple[slice, Tensor]]:
        """Chunk by chunk: which rows, and their scores."""
        check_features(features, len(self.mean))
        for rows, part in chunks(features, rows_at_once(self.weights.shape[1])):
            x = part.sub_(self.mean).div_(self.std)
            yield rows, torch.addmm(BIAS * self.weights[-1], x, self.weights[:-1])

    def linear(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Weight (C, D) and bias (C,) that map raw features to `scale` times the scores.

        `Path.scale` makes the result calibrated logits.
        """
        weight = scale * (self.weights[:-1] / self.std[:, None]).T.contiguous()
        return weight, scale * BIAS * self.weights[-1] - weight @ self.mean


@dataclass(frozen=True, eq=False)
class Path:
    """Probes that differ in l2 alone, and what leaving each row out says of them."""

    probes: tuple[Probe, ...]
    errors: tuple[float, ...]  # mean squared error of each
    accuracies: tuple[float, ...]  # share of rows each gets right
    unexplained: tuple[float, ...]  # 1 - R^2 of each, scores rebalanced and rescaled
    rows: Rows = field(repr=False)
    spectrum: Spectrum = field(repr=False)

    @cached_property
    def best(self) -> int:
        """Index of the probe with the most probable l2; of equal ones, the largest l2.

        Gaussian likelihood of the left-out scores, times a Gaussian prior on ln(l2) with mean
        ln(1024) and standard deviation 1. Scores are rescaled and rebalanced first: the plain
        squared error rewards scores of the right size, which argmax ignores, and so prefers an l2
        that is too small (docs/fewshot.md).
        """
        degrees = len(self.rows) * (int(self.rows.counts().count_nonzero()) - 1)

        def cost(i: int) -> tuple[float, float]:
            l2, unexplained = self.probes[i].l2, max(self.unexplained[i], TINY)
            return degrees * math.log(unexplained) + math.log(l2 / USUAL_L2) ** 2, -l2

        return min(range(len(self.probes)), key=cost)

    @cached_property
    def held_out(self) -> Tensor:
        """Scores of the best probe for every row, each fitted without that row. (n, C)

        Made when asked for, and then kept.
        """
        found = torch.empty(len(self.rows), self.rows.classes, dtype=torch.float64)
        best = self.probes[self.best]
        for rows, missed, label in left_out(self.rows, self.spectrum, [best]):
            found[rows] = with_targets(missed, label).sub_(1)[:, 0]
        return found

    @cached_property
    def scale(self) -> float:
        """Factor that turns the scores of the best probe into calibrated logits.

        Minimizes the cross-entropy of the rebalanced held-out scores within `SCALES`. Rows that
        are the only example of their class are ignored; `USUAL_SCALE` if no row remains.
        """
        labels = self.rows.labels
        judged = self.rows.counts()[labels] > 1
        if not judged.any():
            return USUAL_SCALE
        scores = self.held_out[:, None].clone()
        rebalance(scores, labels[:, None, None], self.rows, [self.probes[self.best]])
        return fit_scale(scores[judged, 0], labels[judged])


def fit(
    features: Features, labels: Labels, classes: int | None = None, l2: float = USUAL_L2
) -> Probe:
    """The probe of features (n, D) and labels (n,), for `classes` or the largest label + 1."""
    check_l2(l2)
    system = set_up(check(features, labels, classes))
    return probe(system, system.solve(l2), l2)


def fit_path(
    features: Features,
    labels: Labels,
    classes: int | None = None,
    l2: Sequence[float] = PATH,
) -> Path:
    """The probe for each l2, from one decomposition, and how good each is on rows left out.

    The whitening stays that of all rows when one is left out.
    """
    if not len(l2):
        raise ConfigError("the path has no l2; give one value at least, such as 1024")
    for value in l2:
        check_l2(value)
    data = check(features, labels, classes)
    system = set_up(data)
    spectrum = decompose(system)
    probes = tuple(probe(system, spectrum.solve(value), value) for value in l2)
    errors, accuracies, unexplained = judge(data, spectrum, probes)
    return Path(probes, errors, accuracies, unexplained, data, spectrum)


def fit_moments(counts: Tensor, sums: Tensor, gram: Tensor, l2: float = USUAL_L2) -> Probe:
    """The same probe from sums: rows of each class (C,), their features (C, D), and X'X (D, D).

    X is not whitened here. A feature whose mean is a million times its deviation has lost half its
    digits in such sums; otherwise this is `fit` to about 1e-9.
    """
    check_l2(l2)
    counts, sums, gram = counts.double(), sums.double(), gram.double()
    wide = sums.shape[-1]
    if sums.shape != (len(counts), wide) or gram.shape != (wide, wide):
        raise DataError(
            f"{len(counts)} classes, sums of shape {tuple(sums.shape)} and a Gram matrix of shape "
            f"{tuple(gram.shape)} differ; (C, D) and (D, D) are needed"
        )
    if not (sums.isfinite().all() and gram.isfinite().all()):
        raise DataError("the sums are not finite; a row that was added is not")
    if int((counts > 0).sum()) < 2:
        raise DataError("a probe needs examples of two classes; the counts have fewer")
    total = counts.sum()
    mean = sums.sum(0) / total
    centered = gram - total * mean.outer(mean)
    system = normal_equations(counts, mean, sums - counts[:, None] * mean, centered)
    return probe(system, system.solve(l2), l2)


def probe(system: System, weights: Tensor, l2: float) -> Probe:
    return Probe(float(l2), weights, system.mean, system.std)


def left_out(
    data: Rows, spectrum: Spectrum, probes: Sequence[Probe]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Chunk by chunk: which rows, by how much each probe misses them unseen, where the label is.

    Prediction minus target, (m, L, C), the caller's to change; and (m, L, 1).
    """
    l2 = torch.tensor([probe.l2 for probe in probes], dtype=torch.float64)
    weights = torch.cat([probe.weights for probe in probes], 1)  # (D + 1, L * C): one product
    mean, std = spectrum.system.mean, spectrum.system.std
    for rows, part in chunks(data.features, rows_at_once(weights.shape[1])):
        x = part.sub_(mean).div_(std)
        missed = torch.addmm(BIAS * weights[-1] + 1, x, weights[:-1])  # as if all targets were -1
        missed = missed.unflatten(1, (len(probes), -1))  # (m, L, C)
        label = data.labels[rows, None, None].expand(-1, len(probes), 1)
        missed.scatter_add_(2, label, torch.full(label.shape, -2.0, dtype=torch.float64))
        yield rows, missed.div_(spectrum.freedom(rows, x, l2)[..., None]), label


def with_targets(missed: Tensor, label: Tensor) -> Tensor:
    """The scores + 1, in place."""
    return missed.scatter_add_(2, label, torch.full(label.shape, 2.0, dtype=torch.float64))


def rebalance(scores: Tensor, label: Tensor, data: Rows, probes: Sequence[Probe]) -> None:
    """Give left-out scores (m, L, C) the bias of all rows, in place.

    Without a row, its class is rarer, so its bias is lower: with few rows, this alone makes strong
    penalties look wrong.
    """
    l2 = torch.tensor([[probe.l2] for probe in probes], dtype=torch.float64)  # (L, 1)
    total = 2.0 * data.counts() - len(data)  # of the targets, (C,)
    every, without = (BIAS**2 / (BIAS**2 * n + l2) for n in (len(data), len(data) - 1))
    scores += every * total - without * (total + 1)
    scores.scatter_add_(2, label, (2 * without).expand(label.shape))


def judge(data: Rows, spectrum: Spectrum, probes: Sequence[Probe]) -> tuple[tuple[float, ...], ...]:
    """Mean squared error, accuracy and unexplained share of each probe on rows left out.

    The last is of rebalanced scores, centered per row: argmax ignores what is added to a row. Rows
    that are the only example of their class do not count for it.
    """
    squares, own, spread = torch.zeros(3, len(probes), dtype=torch.float64)
    right = torch.zeros(len(probes), dtype=torch.int64)
    counted = (data.counts()[data.labels] > 1).double()  # (n,)
    for rows, missed, label in left_out(data, spectrum, probes):
        squares += missed.square().sum((0, 2))
        scores = with_targets(missed, label)
        right += (scores.argmax(2, keepdim=True) == label).sum((0, 2))
        rebalance(scores, label, data, probes)
        scores -= scores.mean(2, keepdim=True)
        own += counted[rows] @ scores.gather(2, label)[..., 0]
        spread += counted[rows] @ scores.square().sum(2)
    # Centered targets are 2 at the label minus 2 / C: their square is 4 (1 - 1 / C) for each row.
    explained = own.clamp_min(0) ** 2 / (spread * counted.sum() * (1 - 1 / data.classes))
    errors = squares / (len(data) * data.classes)
    accuracies = right.double() / len(data)
    unexplained = 1 - explained.nan_to_num(0.0)
    return tuple(tuple(x.tolist()) for x in (errors, accuracies, unexplained))


def fit_scale(scores: Tensor, labels: Tensor) -> float:
    """Factor on scores (n, C) with the least cross-entropy, within `SCALES`.

    If every row is correct, the loss has no minimum; the row with the smallest margin then counts
    as wrong, since a few correct rows do not justify certainty.
    """
    top, order = scores.topk(2, dim=1)
    if bool((order[:, 0] == labels).all()):
        closest = int((top[:, 0] - top[:, 1]).argmin())
        labels = labels.clone()
        labels[closest] = order[closest, 1]
    low, high = SCALES
    return min(max(1 / fit_temperature(scores.numpy(), labels.numpy(), "softmax"), low), high)


def check_l2(l2: float) -> None:
    if not (math.isfinite(l2) and l2 > 0):
        raise ConfigError(f"l2={l2} is no penalty; give a number above 0, such as 1024")
