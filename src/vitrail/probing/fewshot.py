"""The few-shot protocol as a plain function: features and labels in, accuracy and weights out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrail.errors import DataError
from vitrail.probing.ridge import USUAL_L2, Probe, fit, fit_path
from vitrail.probing.rows import Features, Labels, check_labels


@dataclass(frozen=True, eq=False)
class Fewshot:
    """A probe, and how it does on the test rows."""

    accuracy: float  # share of the test rows that are right
    predicted: Tensor  # (n,) int64, the class of each test row
    probe: Probe

    @property
    def weights(self) -> Tensor:
        """(D + 1, C) float64, for whitened features with the constant 100 appended."""
        return self.probe.weights

    @property
    def l2(self) -> float:
        """The penalty: the one that was asked for, or the best of several."""
        return self.probe.l2


def fewshot(
    features_train: Features,
    labels_train: Labels,
    features_test: Features,
    labels_test: Labels,
    l2: float | Sequence[float] = USUAL_L2,
) -> Fewshot:
    """Fit the paper's closed-form probe to some features and judge it by others.

        >>> import torch, vitrail
        >>> labels = torch.arange(40) % 4
        >>> features = torch.eye(4)[labels] + 0.1 * torch.randn(40, 4)
        >>> result = vitrail.fewshot(features[:20], labels[:20], features[20:], labels[20:])
        >>> result.accuracy
        1.0
        >>> result.weights.shape  # D features and a constant, C classes
        torch.Size([5, 4])

    Features are (n, D) tensors or arrays of floats, labels (n,) whole numbers from 0; there are as
    many classes as the largest training label says. Weights and accuracy are big_vision's, to the
    last digits of float64. Of several l2, `Path.best` takes one: leave-one-out on the
    training rows, with a prior at 1024.
    """
    if isinstance(l2, Sequence):
        path = fit_path(features_train, labels_train, l2=l2)
        probe = path.probes[path.best]
    else:
        probe = fit(features_train, labels_train, l2=l2)
    truth = check_labels(labels_test, len(features_test), probe.weights.shape[1])
    if not len(truth):
        raise DataError("there are no test rows, so there is no accuracy; give one at least")
    predicted = probe.predict(features_test)
    return Fewshot(int(torch.sum(predicted == truth)) / len(truth), predicted, probe)
