"""Probes: classifiers of frozen features, which read and score rows a chunk at a time.

`Probe` is what all have in common; nearest neighbors and logistic regression are here, ridge
regression in ridge.py. Features may be a tensor or an array (also a memory-mapped one) of any float
type and on any device; nothing makes a whole copy of them where a chunk suffices.

Shapes: n rows, m of them in a chunk, D features, C classes.
"""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError, DataError

Array = Tensor | np.ndarray

EPSILON = 1e-5  # added to each standard deviation
CHUNK = 1024  # rows at a time: 6 MB at 768 features, and long enough for fast products
MAX_VALUES = 2**23  # computed from a chunk, 64 MB: with very many classes, chunks are shorter

NEIGHBORS = 20
TEMPERATURE = 0.07  # both as in DINO (Caron et al. 2021, arXiv:2104.14294)
NEIGHBOR_CHUNK = 256  # rows whose similarities to all training rows are held at a time

DECAY = 1e-2  # strong enough for a few examples per class
STEPS = 1000
MAX_GRADIENT = 1e-7  # at which L-BFGS has converged


class Rows:
    """Training features with their labels, checked."""

    def __init__(self, features: Array, labels: Array, classes: int | None = None) -> None:
        """`classes` is the number of classes, by default the largest label plus one."""
        check_features(features)
        self.features, self.width = features, features.shape[1]  # (n, D)
        self.labels = check_labels(labels, len(features), classes)  # (n,) int64
        present = self.labels.unique()
        if len(present) < 2:
            raise DataError(
                f"all {len(self)} labels are {int(present[0])}; a probe needs examples of two "
                "classes"
                if len(self)
                else "no rows given; a probe needs examples of two classes"
            )
        self.classes = int(present[-1]) + 1 if classes is None else classes
        self.counts = torch.bincount(self.labels, minlength=self.classes)  # of each class, (C,)

    def __len__(self) -> int:
        return len(self.labels)


def check_features(features: Array, width: int | None = None) -> None:
    """Raise a `DataError` unless they are (n, D) floats, with D = `width` if given."""
    if features.ndim != 2 or not features.shape[1]:
        raise DataError(f"features have shape {tuple(features.shape)}; expected (rows, features)")
    if width is not None and features.shape[1] != width:
        raise DataError(f"rows have {features.shape[1]} features; the probe was fitted on {width}")
    if isinstance(features, Tensor):
        floating = features.is_floating_point()
    else:
        floating = np.issubdtype(features.dtype, np.floating)
    if not floating:
        raise DataError(f"features are {features.dtype}; expected floats")


def check_labels(labels: Array, rows: int, classes: int | None = None) -> Tensor:
    """Return the labels as an int64 tensor, one for each of `rows`, below `classes` if given."""
    tensor = labels.detach().cpu() if isinstance(labels, Tensor) else torch.tensor(labels)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise DataError(f"labels are {labels.dtype}; expected integers from 0")
    if tensor.ndim != 1 or len(tensor) != rows:
        raise DataError(
            f"labels have shape {tuple(tensor.shape)}; expected one for each of {rows} rows"
        )
    tensor = tensor.long()
    if rows and tensor.min() < 0:
        raise DataError(f"label {int(tensor.min())} is negative; labels count from 0")
    if rows and classes is not None and tensor.max() >= classes:
        raise DataError(f"label {int(tensor.max())} is out of range for {classes} classes, from 0")
    return tensor


def chunks(features: Array, size: int | None = None) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of rows, and a copy of these rows in float64 on the CPU."""
    size = size or CHUNK
    for start in range(0, len(features), size):
        part = features[start : start + size]
        if isinstance(part, Tensor):
            rows = part.detach().to("cpu", torch.float64, copy=True)
        else:
            rows = torch.from_numpy(part.astype(np.float64))
        if not rows.sum().isfinite():
            bad = start + int((~rows.isfinite()).any(1).nonzero()[0])
            raise DataError(f"features of row {bad} are not finite; leave that row out")
        yield slice(start, start + len(rows)), rows


def chunk_size(values: int) -> int:
    """Return the rows per chunk if this many values are computed from each row."""
    return max(1, min(CHUNK, MAX_VALUES // values))


class Probe:
    """A classifier of features (n, D) into C classes."""

    width: int
    classes: int

    def score(self, x: Tensor) -> Tensor:
        """Return the scores (m, C) of a float64 chunk (m, D), which may be changed in place."""
        raise NotImplementedError

    def scores(self, features: Array) -> Tensor:
        """Return the score of each class. (n, C)"""
        check_features(features, self.width)
        scores = torch.empty(len(features), self.classes, dtype=torch.float64)
        for rows, x in chunks(features, chunk_size(self.classes)):
            scores[rows] = self.score(x)
        return scores

    def predict(self, features: Array) -> Tensor:
        """Return the class with the highest score, the first of equal ones. (n,)

        The scores of all rows, which may not fit in memory, are never held at once.
        """
        check_features(features, self.width)
        size = chunk_size(self.classes)
        parts = [self.score(x).argmax(1) for _, x in chunks(features, size)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


class NeighborProbe(Probe):
    """The 20 nearest rows by cosine similarity (all, if fewer), each voting exp(cosine / T)."""

    def __init__(self, features: Array, labels: Array, classes: int | None = None) -> None:
        rows = Rows(features, labels, classes)
        self.width, self.classes, self.labels = rows.width, rows.classes, rows.labels
        self.directions = torch.empty(len(rows), rows.width)  # (n, D), unit length
        for chunk, x in chunks(rows.features):
            self.directions[chunk] = F.normalize(x, dim=1).float()

    def score(self, x: Tensor) -> Tensor:
        scores = torch.zeros(len(x), self.classes, dtype=torch.float64)
        for start in range(0, len(x), NEIGHBOR_CHUNK):
            part = slice(start, start + NEIGHBOR_CHUNK)
            cosines = F.normalize(x[part], dim=1).float() @ self.directions.T  # (m, n)
            nearest, indices = cosines.topk(min(NEIGHBORS, len(self.labels)), dim=1)
            votes = (nearest.double() / TEMPERATURE).exp()
            scores[part].scatter_add_(1, self.labels[indices], votes)
        return scores


class LinearProbe(Probe):
    """A linear classifier of raw features; scores are logits."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        self.weight, self.bias = weight, bias  # (C, D) and (C,), float64
        self.classes, self.width = weight.shape

    def score(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight.T)


def fit_logistic(
    features: Array, labels: Array, classes: int | None = None, *, decay: float = DECAY
) -> LinearProbe:
    """Multinomial logistic regression: minimize the mean cross-entropy + decay / 2 |W|^2.

    W acts on standardized features and the bias is free, as in scikit-learn's LogisticRegression
    with C = 1 / (decay n); the result has the standardization folded in. By L-BFGS in float64 from
    zero, so the same rows always give the same classifier; after 1,000 steps it returns what it
    has, which with a weak decay may not be the minimum yet. Holds all rows in memory, in float64.
    """
    if not decay > 0:
        raise ConfigError(f"decay={decay} must be above 0, or separable classes have no solution")
    data = Rows(features, labels, classes)
    x = next(chunks(features, len(features)))[1]
    mean, std = x.mean(0), x.std(0, correction=0) + EPSILON
    x.sub_(mean).div_(std)
    weight = torch.zeros(data.classes, data.width, dtype=torch.float64)
    bias = torch.zeros(data.classes, dtype=torch.float64)
    targets = F.one_hot(data.labels, data.classes).double()

    def closure() -> float:
        logs = torch.addmm(bias, x, weight.T).log_softmax(1)  # (n, C)
        loss = -logs.gather(1, data.labels[:, None]).mean() + decay / 2 * weight.square().sum()
        gradient = logs.exp_().sub_(targets).div_(len(x))  # of the logits
        weight.grad = torch.addmm(weight, gradient.T, x, beta=decay)
        bias.grad = gradient.sum(0)
        return float(loss)

    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        tolerance_grad=MAX_GRADIENT,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise ConfigError(f"decay={decay} gives weights that are not finite; try {DECAY}")
    weight = weight / std
    return LinearProbe(weight, bias - weight @ mean)
