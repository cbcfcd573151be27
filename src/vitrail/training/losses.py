"""What is made small: logits and targets → one number, the mean over the pictures of a batch.

Targets are the number of a class for each picture, (B,), or a share for each class, (B, K): mixed
labels, or several classes at once. Computed in float32 at least.

Shapes: B pictures, K classes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """One class of many: minus the log probability of the target."""
    logits = precise(logits)
    targets = targets.to(logits.dtype) if targets.ndim == 2 else targets
    return F.cross_entropy(logits, targets, label_smoothing=smoothing)


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """A yes or no for each class, summed over the classes as in the authors' code."""
    logits = precise(logits)
    targets = shares(targets, logits)
    if smoothing:
        targets = targets * (1 - smoothing) + smoothing / logits.shape[1]
    summed = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return summed / len(logits)


def soft_teaching(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """How far the probabilities are from the teacher's: KL(teacher || student) T^2.

    Equation 2 of Touvron et al. 2021, the mean over pictures. Both are evened out by the
    temperature T; T^2 makes up for the gradients that become smaller by it. (DeiT's code also
    divides by K, which makes the teacher all but silent for many classes.)
    """
    student = F.log_softmax(precise(logits) / temperature, dim=1)
    teacher = F.log_softmax(precise(teacher_logits) / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def hard_teaching(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The teacher's first choice is the label (equation 3 of Touvron et al. 2021)."""
    return F.cross_entropy(precise(logits), teacher_logits.argmax(dim=1))


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "softmax": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
}


def precise(logits: Tensor) -> Tensor:
    """Sums over thousands of classes are not for half precision."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def shares(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets as (B, K), in the type of the logits."""
    if targets.ndim == 2:
        return targets.to(logits.dtype)
    return torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)
