"""Two other probes of the same features: nearest neighbors and logistic regression.

Shapes: n rows, D features, C classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import ConfigError
from vitrail.probing.equations import EPSILON
from vitrail.probing.rows import (
    Features,
    Labels,
    check,
    check_features,
    chunks,
    joined,
    likeliest,
    rows_at_once,
    whole,
)

NEIGHBORS = 20
TEMPERATURE = 0.07  # both as in DINO (Caron et al. 2021, arXiv:2104.14294)
AT_ONCE = 256  # rows whose similarities to all others are held at a time

DECAY = 1e-2  # strong enough for a few examples of each class
STEPS = 1000
SETTLED = 1e-7  # the largest gradient at which the fit is done


@dataclass(frozen=True, eq=False)
class Neighbors:
    """Rows that vote for their class, the more the smaller the angle between them and the asker."""

    directions: Tensor  # (n, D) float32, of length 1
    labels: Tensor  # (n,)
    classes: int
    k: int
    temperature: float

    def scores(self, features: Features) -> Tensor:
        """The k nearest rows' votes, each exp(cosine / temperature), by class. (m, C)"""
        return joined(self.parts(features), len(features), self.classes)

    def predict(self, features: Features) -> Tensor:
        """The class with most votes. (m,)"""
        return likeliest(self.parts(features), len(features))

    def parts(self, features: Features) -> Iterator[tuple[slice, Tensor]]:
        """Chunk by chunk: which rows, and their votes."""
        check_features(features, self.directions.shape[1])
        for rows, part in chunks(features, min(AT_ONCE, rows_at_once(self.classes))):
            cosines = F.normalize(part, dim=1).float() @ self.directions.T  # (m, n)
            nearest, places = cosines.topk(self.k, dim=1)
            votes = (nearest.double() / self.temperature).exp()
            none = torch.zeros(len(part), self.classes, dtype=torch.float64)
            yield rows, none.scatter_add_(1, self.labels[places], votes)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear classifier of features as they are."""

    weight: Tensor  # (C, D) float64
    bias: Tensor  # (C,) float64

    def scores(self, features: Features) -> Tensor:
        """Logits. (n, C)"""
        return joined(self.parts(features), len(features), len(self.bias))

    def predict(self, features: Features) -> Tensor:
        """The class with the highest logit. (n,)"""
        return likeliest(self.parts(features), len(features))

    def parts(self, features: Features) -> Iterator[tuple[slice, Tensor]]:
        """Chunk by chunk: which rows, and their logits."""
        check_features(features, self.weight.shape[1])
        for rows, part in chunks(features, rows_at_once(len(self.bias))):
            yield rows, torch.addmm(self.bias, part, self.weight.T)

    def linear(self) -> tuple[Tensor, Tensor]:
        """Weight (C, D) and bias (C,)."""
        return self.weight, self.bias


def fit_neighbors(
    features: Features,
    labels: Labels,
    classes: int | None = None,
    *,
    k: int = NEIGHBORS,
    temperature: float = TEMPERATURE,
) -> Neighbors:
    """The classifier that looks for the k nearest of these rows (all, if there are fewer)."""
    if k < 1:
        raise ConfigError(f"k={k} neighbors cannot vote; 1 is the least")
    if not temperature > 0:
        raise ConfigError(f"temperature={temperature} must be above 0, such as {TEMPERATURE}")
    data = check(features, labels, classes)
    directions = torch.empty(len(data), data.width)
    for rows, part in chunks(features):
        directions[rows] = F.normalize(part, dim=1).float()
    return Neighbors(directions, data.labels, data.classes, min(k, len(data)), temperature)


def fit_logistic(
    features: Features, labels: Labels, classes: int | None = None, *, decay: float = DECAY
) -> Linear:
    """Multinomial logistic regression: the least mean cross-entropy + decay / 2 |W|^2.

    W acts on standardized features and the bias is free, as in scikit-learn's LogisticRegression
    with C = 1 / (decay n); the result has the standardizing folded in. By L-BFGS in float64 from
    zero, so the same rows always give the same classifier; it stops after 1,000 steps at most and
    gives what it has then, which with a weak decay may not be the minimum yet. Keeps all rows in
    float64 meanwhile.
    """
    if not decay > 0:
        raise ConfigError(f"decay={decay} must be above 0, or separable classes have no solution")
    data = check(features, labels, classes)
    x = whole(features)
    mean, std = x.mean(0), x.std(0, correction=0) + EPSILON
    x.sub_(mean).div_(std)
    weight, bias = settle(x, data.labels, data.classes, decay)
    weight = weight / std
    return Linear(weight, bias - weight @ mean)


def settle(x: Tensor, labels: Tensor, classes: int, decay: float) -> tuple[Tensor, Tensor]:
    """Weight (C, D) and bias (C,) at the minimum, which is unique but for a shift of the bias, or
    as near to it as `STEPS` steps come."""
    weight = torch.zeros(classes, x.shape[1], dtype=torch.float64)
    bias = torch.zeros(classes, dtype=torch.float64)
    targets = F.one_hot(labels, classes).double()

    def closure() -> float:
        logs = torch.addmm(bias, x, weight.T).log_softmax(1)  # (n, C)
        loss = -logs.gather(1, labels[:, None]).mean() + decay / 2 * weight.square().sum()
        surplus = logs.exp_().sub_(targets).div_(len(x))  # the gradient of the logits
        weight.grad = torch.addmm(weight, surplus.T, x, beta=decay)
        bias.grad = surplus.sum(0)
        return float(loss)

    optimizer = torch.optim.LBFGS(
        [weight, bias],
        max_iter=STEPS,
        tolerance_grad=SETTLED,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )
    optimizer.step(closure)
    if not (weight.isfinite().all() and bias.isfinite().all()):
        raise ConfigError(f"decay={decay} gives weights that are not finite; try {DECAY}")
    return weight, bias
