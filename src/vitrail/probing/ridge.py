"""Ridge regression onto +1 and -1 in closed form: the paper's few-shot probe, as in big_vision.

Features are standardized (minus their mean, divided by their standard deviation + 1e-5), which
big_vision calls whitening, and a constant 100 is appended, which leaves the bias almost free of the
penalty; Y is +1 at a row's label and -1 elsewhere. The (D + 1, C) weights W minimize
|XW - Y|^2 + l2 |W|^2 (section 4.1 of the paper). Everything is float64, and rows are read a chunk
at a time.

Whitened features sum to zero, so the constant is orthogonal to all of them: its weight has its own
formula, and what is left to solve is D x D or, with fewer rows than features, n x n.

Leaving a row out needs no second fit. With h the diagonal of X (X'X + l2)^-1 X', the residual of
row i under the fit without it is its residual divided by 1 - h_i.

Shapes: n rows, m of them in a chunk, D features, C classes, L values of l2, r = min(n, D).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, DataError
from vitrail.evaluation.calibration import fit_temperature
from vitrail.probing.probes import EPSILON, Array, Probe, Rows, chunk_size, chunks

DEFAULT_L2 = 2.0**10  # big_vision's, for all datasets
L2_GRID = tuple(4.0**power for power in range(-1, 9))  # 0.25 to 65,536, with 1,024
BIAS = 100.0  # the constant feature; large, so that its weight is small and hardly penalized
BLOCK = 192  # columns of the Gram matrix at a time; only its upper blocks are computed
TINY = 1e-300  # keeps the logarithm finite
SCALES = (0.5, 100.0)  # bounds of `RidgePath.scale`
DEFAULT_SCALE = 8.0  # where no row can be left out: the median on test images (docs/notebook.md)


class RidgeProbe(Probe):
    """A linear classifier of features, with their whitening."""

    def __init__(self, l2: float, weights: Tensor, mean: Tensor, std: Tensor) -> None:
        self.l2, self.weights = l2, weights  # (D + 1, C), the weights of the constant last
        self.mean, self.std = mean, std  # (D,); 1e-5 is added to the standard deviation
        self.width, self.classes = len(mean), weights.shape[1]

    def score(self, x: Tensor) -> Tensor:
        """Return scores near +1 for the class of a row and -1 for the others. (m, C)"""
        x = x.sub_(self.mean).div_(self.std)
        return torch.addmm(BIAS * self.weights[-1], x, self.weights[:-1])

    def linear(self, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return weight (C, D) and bias (C,) that map raw features to `scale` times the scores.

        `RidgePath.scale` makes the result calibrated logits.
        """
        weight = scale * (self.weights[:-1] / self.std[:, None]).T.contiguous()
        return weight, scale * BIAS * self.weights[-1] - weight @ self.mean


@dataclass(eq=False)
class RidgeSystem:
    """Equations (matrix + l2) V = right. V are the weights or, with few rows, X'V are."""

    counts: Tensor  # (C,) rows of each class
    mean: Tensor  # (D,)
    std: Tensor  # (D,)
    matrix: Tensor  # X'X (D, D) or XX' (n, n)
    right: Tensor  # X'Y (D, C) or Y (n, C)
    x: Tensor | None = None  # (n, D) whitened, if XX' is the matrix

    @classmethod
    def from_rows(cls, data: Rows) -> "RidgeSystem":
        """Build the smaller of the two systems, which have the same solution."""
        counts = data.counts.double()
        mean = torch.zeros(data.width, dtype=torch.float64)
        for _, part in chunks(data.features):
            mean += part.sum(0)
        mean /= len(data)
        if len(data) <= data.width:
            x = next(chunks(data.features, len(data)))[1].sub_(mean)
            std = x.square().mean(0).sqrt() + EPSILON
            x.div_(std)
            y = 2 * F.one_hot(data.labels, data.classes).double() - 1
            return cls(counts, mean, std, x @ x.T, y, x)
        sums = torch.zeros(data.classes, data.width, dtype=torch.float64)
        gram = torch.zeros(data.width, data.width, dtype=torch.float64)
        for rows, part in chunks(data.features):
            x = part.sub_(mean)
            sums.index_add_(0, data.labels[rows], x)
            for start in range(0, data.width, BLOCK):
                block = slice(start, start + BLOCK)
                gram[block, start:].addmm_(x[:, block].T, x[:, start:])
        return cls.from_centered(counts, mean, sums, gram.triu() + gram.triu(1).T)

    @classmethod
    def from_centered(
        cls, counts: Tensor, mean: Tensor, sums: Tensor, gram: Tensor
    ) -> "RidgeSystem":
        """Build the normal equations from (C, D) and (D, D) sums of centered features."""
        std = (gram.diagonal() / counts.sum()).clamp_min(0).sqrt() + EPSILON
        right = 2 * sums.T / std[:, None]  # Y is 2 at the label, minus 1; centered rows sum to 0
        return cls(counts, mean, std, gram / std / std[:, None], right)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor, Tensor]:
        """Eigenvalues (r,), not negative; eigenvectors (r, r); the right side in their basis."""
        values, vectors = torch.linalg.eigh(self.matrix)
        return values.clamp_min(0), vectors, vectors.T @ self.right

    def solve(self, l2: float, *, use_eigh: bool = False) -> RidgeProbe:
        """Return the probe for one l2, by Cholesky or by the eigendecomposition that all l2
        share."""
        solution = None
        if not use_eigh:
            shifted = self.matrix.clone()
            shifted.diagonal().add_(l2)
            factor, failed = torch.linalg.cholesky_ex(shifted)
            if not failed:  # else l2 is lost in the rounding of large eigenvalues
                solution = torch.cholesky_solve(self.right, factor)
        if solution is None:
            values, vectors, right = self.spectrum
            solution = vectors @ (right / (values + l2)[:, None])
        weights = solution if self.x is None else self.x.T @ solution  # (D, C)
        constant = BIAS**2 * float(self.counts.sum())  # squared length of the constant feature
        bias = BIAS * (2 * self.counts - self.counts.sum()) / (constant + l2)  # (C,)
        return RidgeProbe(float(l2), torch.cat([weights, bias[None]]), self.mean, self.std)

    def one_minus_leverage(self, rows: slice, x: Tensor, l2: Tensor) -> Tensor:
        """Return 1 - h of some rows, for each l2. (m, L)"""
        values, vectors, _ = self.spectrum
        shrink = 1 / (values[:, None] + l2)  # (r, L)
        if self.x is None:
            leverage = (x @ vectors).square_() @ shrink
        else:
            leverage = vectors[rows].square() @ (values[:, None] * shrink)
        constant = BIAS**2 * float(self.counts.sum())
        leverage += BIAS**2 / (constant + l2)
        least = l2 / (values.sum() + constant + l2)  # lower bound, which rounding could violate
        return (1 - leverage).clamp_min(least)


@dataclass(frozen=True, eq=False)
class RidgePath:
    """Probes that differ in l2 alone, and their leave-one-out metrics."""

    probes: tuple[RidgeProbe, ...]
    accuracies: tuple[float, ...]  # of each
    unexplained: tuple[float, ...]  # 1 - R^2 of each, scores rebalanced and rescaled
    rows: Rows = field(repr=False)
    system: RidgeSystem = field(repr=False)

    @cached_property
    def best(self) -> int:
        """Index of the probe with the most probable l2; of equal ones, the largest l2.

        Gaussian likelihood of the left-out scores, times a Gaussian prior on ln(l2) with mean
        ln(1024) and standard deviation 1. Scores are rescaled and rebalanced first: the plain
        squared error rewards scores of the right size, which argmax ignores, and so prefers an l2
        that is too small (docs/fewshot.md).
        """
        degrees = len(self.rows) * (int(self.rows.counts.count_nonzero()) - 1)
        costs = [
            degrees * math.log(max(unexplained, TINY)) + math.log(probe.l2 / DEFAULT_L2) ** 2
            for probe, unexplained in zip(self.probes, self.unexplained, strict=True)
        ]
        return min(range(len(costs)), key=lambda i: (costs[i], -self.probes[i].l2))

    @cached_property
    def held_out(self) -> Tensor:
        """Leave-one-out scores of the best probe: each row scored by the fit without it. (n, C)"""
        scores = torch.empty(len(self.rows), self.rows.classes, dtype=torch.float64)
        best = self.probes[self.best]
        for rows, raised, _ in left_out(self.rows, self.system, [best]):
            scores[rows] = raised.sub_(1)[:, 0]
        return scores

    @cached_property
    def rebalanced(self) -> Tensor:
        """`held_out`, with the bias of the fit to all rows. (n, C)"""
        scores = self.held_out[:, None].clone()
        label = self.rows.labels[:, None, None]
        rebalance(scores, label, self.rows, [self.probes[self.best]])
        return scores[:, 0]

    @cached_property
    def scale(self) -> float:
        """Factor that turns the scores of the best probe into calibrated logits.

        Minimizes the cross-entropy of the rebalanced scores within `SCALES`. Rows that are the only
        example of their class are ignored; `DEFAULT_SCALE` if no row remains. If every row is
        correct, the loss has no minimum; the row with the smallest margin then counts as wrong,
        since a few correct rows do not justify certainty.
        """
        labels = self.rows.labels
        counted = self.rows.counts[labels] > 1
        if not counted.any():
            return DEFAULT_SCALE
        scores, labels = self.rebalanced[counted], labels[counted]
        top, order = scores.topk(2, dim=1)
        if bool((order[:, 0] == labels).all()):
            closest = int((top[:, 0] - top[:, 1]).argmin())
            labels[closest] = order[closest, 1]
        low, high = SCALES
        return min(max(1 / fit_temperature(scores.numpy(), labels.numpy(), "softmax"), low), high)


def fit(
    features: Array, labels: Array, classes: int | None = None, l2: float = DEFAULT_L2
) -> RidgeProbe:
    """Fit features (n, D) and labels (n,), for `classes` or the largest label + 1."""
    check_l2(l2)
    return RidgeSystem.from_rows(Rows(features, labels, classes)).solve(l2)


def fit_path(
    features: Array, labels: Array, classes: int | None = None, l2: Sequence[float] = L2_GRID
) -> RidgePath:
    """Fit a probe for each l2 from one decomposition, and evaluate each by leave-one-out.

    The whitening stays that of all rows when one is left out. The unexplained share is of
    rebalanced scores, centered per row: argmax ignores what is added to a row. Rows that are the
    only example of their class do not count for it.
    """
    if not len(l2):
        raise ConfigError("no l2 given; pass at least one value, such as 1024")
    for value in l2:
        check_l2(value)
    data = Rows(features, labels, classes)
    system = RidgeSystem.from_rows(data)
    probes = tuple(system.solve(value, use_eigh=True) for value in l2)
    own, spread = torch.zeros(2, len(probes), dtype=torch.float64)
    correct = torch.zeros(len(probes), dtype=torch.int64)
    counted = (data.counts[data.labels] > 1).double()  # (n,)
    for rows, scores, label in left_out(data, system, probes):
        correct += (scores.argmax(2, keepdim=True) == label).sum((0, 2))
        rebalance(scores, label, data, probes)
        scores -= scores.mean(2, keepdim=True)
        own += counted[rows] @ scores.gather(2, label)[..., 0]
        spread += counted[rows] @ scores.square().sum(2)
    # Centered targets are 2 at the label minus 2 / C: their square is 4 (1 - 1 / C) for each row.
    explained = own.clamp_min(0) ** 2 / (spread * counted.sum() * (1 - 1 / data.classes))
    return RidgePath(
        probes=probes,
        accuracies=tuple((correct.double() / len(data)).tolist()),
        unexplained=tuple((1 - explained.nan_to_num(0.0)).tolist()),
        rows=data,
        system=system,
    )


def fit_moments(counts: Tensor, sums: Tensor, gram: Tensor, l2: float = DEFAULT_L2) -> RidgeProbe:
    """Fit from sums: rows of each class (C,), sums of their features (C, D), and X'X (D, D).

    X is not whitened here. A feature whose mean is a million times its deviation has lost half its
    digits in such sums; otherwise the result is that of `fit` to about 1e-9.
    """
    check_l2(l2)
    counts, sums, gram = counts.double(), sums.double(), gram.double()
    wide = sums.shape[-1]
    if sums.shape != (len(counts), wide) or gram.shape != (wide, wide):
        raise DataError(
            f"{len(counts)} classes, sums of shape {tuple(sums.shape)} and a Gram matrix of shape "
            f"{tuple(gram.shape)} do not match; expected (C, D) and (D, D)"
        )
    if not (sums.isfinite().all() and gram.isfinite().all()):
        raise DataError("the sums are not finite: an added row contains NaN or inf")
    if int((counts > 0).sum()) < 2:
        raise DataError("a probe needs examples of two classes; the counts have fewer")
    total = counts.sum()
    mean = sums.sum(0) / total
    centered = gram - total * mean.outer(mean)
    return RidgeSystem.from_centered(counts, mean, sums - counts[:, None] * mean, centered).solve(
        l2
    )


def left_out(
    data: Rows, system: RidgeSystem, probes: Sequence[RidgeProbe]
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield chunks of rows: their leave-one-out scores + 1 (m, L, C), which the caller may change
    in place, and their labels (m, L, 1)."""
    l2 = torch.tensor([probe.l2 for probe in probes], dtype=torch.float64)
    weights = torch.cat([probe.weights for probe in probes], 1)  # (D + 1, L * C): one product
    for rows, part in chunks(data.features, chunk_size(weights.shape[1])):
        x = part.sub_(system.mean).div_(system.std)
        residuals = torch.addmm(BIAS * weights[-1] + 1, x, weights[:-1])  # if all targets were -1
        residuals = residuals.unflatten(1, (len(probes), -1))  # (m, L, C)
        label = data.labels[rows, None, None].expand(-1, len(probes), 1)
        residuals.scatter_add_(2, label, torch.full(label.shape, -2.0, dtype=torch.float64))
        residuals.div_(system.one_minus_leverage(rows, x, l2)[..., None])
        targets = torch.full(label.shape, 2.0, dtype=torch.float64)
        yield rows, residuals.scatter_add_(2, label, targets), label


def rebalance(scores: Tensor, label: Tensor, data: Rows, probes: Sequence[RidgeProbe]) -> None:
    """Give leave-one-out scores (m, L, C) the bias of the fit to all rows, in place.

    Without a row, its class is rarer, so its bias is lower: with few rows, this alone makes strong
    penalties look wrong.
    """
    l2 = torch.tensor([[probe.l2] for probe in probes], dtype=torch.float64)  # (L, 1)
    total = 2.0 * data.counts - len(data)  # of the targets, (C,)
    every, without = (BIAS**2 / (BIAS**2 * n + l2) for n in (len(data), len(data) - 1))
    scores += every * total - without * (total + 1)
    scores.scatter_add_(2, label, (2 * without).expand(label.shape))


def check_l2(l2: float) -> None:
    if not (math.isfinite(l2) and l2 > 0):
        raise ConfigError(f"l2={l2} must be a number above 0, such as 1024")
