"""Losses: logits and targets → the mean over the images of a batch.

Targets are class indices (B,), or probabilities (B, K): mixed labels, or several classes per image.
Computed in float32 at least.

Shapes: B images, K classes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    logits = at_least_float32(logits)
    targets = targets.to(logits.dtype) if targets.ndim == 2 else targets
    return F.cross_entropy(logits, targets, label_smoothing=smoothing)


def sigmoid_cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Binary cross-entropy for each class, summed over the classes as in the authors' code."""
    logits = at_least_float32(logits)
    if targets.ndim == 2:
        targets = targets.to(logits.dtype)
    else:
        targets = torch.zeros_like(logits).scatter_(1, targets[:, None], 1.0)
    if smoothing:
        targets = targets * (1 - smoothing) + smoothing / logits.shape[1]
    summed = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum")
    return summed / len(logits)


def soft_distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """KL(teacher || student) T^2, equation 2 of Touvron et al. 2021, averaged over images.

    T^2 compensates for the gradients that the temperature makes smaller. (DeiT's code also divides
    by K, which makes the teacher negligible for many classes.)
    """
    student = F.log_softmax(at_least_float32(logits) / temperature, dim=1)
    teacher = F.log_softmax(at_least_float32(teacher_logits) / temperature, dim=1)
    return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * temperature**2


def hard_distillation(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Cross-entropy with the teacher's argmax (equation 3 of Touvron et al. 2021)."""
    return F.cross_entropy(at_least_float32(logits), teacher_logits.argmax(dim=1))


LOSSES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "softmax": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
}


def at_least_float32(logits: Tensor) -> Tensor:
    """Half precision is too coarse for sums over thousands of classes."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
