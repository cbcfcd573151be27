"""A batch in parts, one for each core of a processor, in place of all cores at each operation.

Threads that share an operation wait for each other at its end, and some operations are not shared
at all: attention takes two threads as long as one. So each core gets a part of the pictures and a
copy of the objective whose weights are the same memory, goes forward and back alone, and the
gradients are added in a fixed order. docs/benchmarks.md says what that brings.

Seen from outside it is one operation with one gradient: the loop, accumulation and loss scaling
need not know.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail import distributed
from vitrail.data.threads import cores_for, threads_with_cores
from vitrail.errors import ConfigError
from vitrail.models.config import Config, VitConfig
from vitrail.training.objectives import Classification
from vitrail.training.settings import Settings

MOST = 4  # parts; where there are more cores, each part has several
ENOUGH = 60_000  # numbers in the tokens of a part; below, Python's share of the time is too large
LARGEST = 100_000_000  # weights; beyond, another copy of the gradients is too dear
DRAWS = ("dropout", "drop_path", "patch_dropout")  # threads would draw in any order


def parts_for(
    config: Config, settings: Settings, precision: torch.dtype, device: torch.device
) -> int:
    """Into how many parts a batch is cut here; 1 leaves it whole."""
    asked = settings.machine.parts
    reason = obstacle(config, settings, precision, device)
    if distributed.world_size() > 1:
        reason = "each process has a part of the batch already"
    if asked is not None and asked > 1 and reason:
        raise ConfigError(f"machine.parts={asked} cannot be: {reason}; leave it out")
    if asked is not None:
        return asked
    large = isinstance(config, VitConfig) and 12 * config.depth * config.width**2 > LARGEST
    return 1 if reason or large else min(MOST, torch.get_num_threads())


def obstacle(
    config: Config, settings: Settings, precision: torch.dtype, device: torch.device
) -> str:
    """Why a batch must stay whole, or nothing."""
    if device.type != "cpu" or precision == torch.float16:
        return "it is for float32 and bfloat16 on a processor"
    if not isinstance(config, VitConfig) or settings.objective != "classify":
        return "it is for Vision Transformers that learn classes"
    if settings.loss.teacher or any(getattr(config, name) for name in DRAWS):
        return "a teacher and dropout need the batch whole"
    return ""


class EachCoreAPart(nn.Module):
    """An objective whose loss is a mean over pictures; `forward` is that loss."""

    def __init__(self, objective: Classification, parts: int) -> None:
        super().__init__()
        self.objective = objective
        self.copies = Copies(objective, parts)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        parts = len(self.copies.objectives)
        if not pays(self.objective.model.config, images.shape, parts):
            return self.objective(images, targets)
        weights = [p for p in self.objective.parameters() if p.requires_grad]
        return InParts.apply(self.copies, images, targets, *weights)


def pays(config: Config, shape: torch.Size | tuple[int, ...], parts: int) -> bool:
    """Whether each part of a batch (B, C, H, W) is enough work for a core."""
    assert isinstance(config, VitConfig)
    down, across = config.stride
    patches = (shape[2] // down) * (shape[3] // across)
    return shape[0] // parts * patches * config.width >= ENOUGH


class Copies:
    """Objectives that read the weights of the original, and a thread for each.

    No module: its weights are not to be found a second time.
    """

    def __init__(self, objective: nn.Module, parts: int) -> None:
        self.original = objective
        self.objectives = [share(objective) for _ in range(parts)]
        each = max(1, torch.get_num_threads() // parts)
        self.threads = threads_with_cores(parts, each=each, name="part")

    def gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The loss of the whole batch, and the gradient of each weight that learns."""
        count = len(self.objectives)
        cut = zip(images.tensor_split(count), targets.tensor_split(count), strict=True)
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        tasks = [
            self.threads.submit(self.one, objective, *part, len(part[0]) / len(images), precision)
            for objective, part in zip(self.objectives, cut, strict=True)
        ]
        (loss, total), *others = [task.result() for task in tasks]
        with cores_for(sum(gradient.numel() for gradient in total)):
            for more, gradients in others:
                loss = loss + more
                torch._foreach_add_(total, gradients)  # pyright: ignore[reportPrivateImportUsage]
        return loss, total

    def one(
        self,
        objective: nn.Module,
        images: Tensor,
        targets: Tensor,
        weight: float,
        precision: torch.dtype | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """What one part adds to the loss and to the gradients; autocast is per thread."""
        originals = self.original.parameters()
        for own, original in zip(objective.parameters(), originals, strict=True):
            own.data = original.data  # as a rule it is already
        learning = [p for p in objective.parameters() if p.requires_grad]
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = objective(images, targets) * weight
        found = torch.autograd.grad(loss, learning, materialize_grads=True)
        return loss.detach(), list(found)


def share(objective: nn.Module) -> nn.Module:
    """A copy whose weights are the same memory, with gradients of its own."""
    weights = {
        id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for p in objective.parameters()
    }
    return copy.deepcopy(objective, memo=weights)


class InParts(torch.autograd.Function):
    """The loss of a batch. Its gradients are found on the way, while each core is at its part."""

    @staticmethod
    def forward(ctx: Any, copies: Copies, images: Tensor, targets: Tensor, *_: Tensor) -> Tensor:
        loss, ctx.found = copies.gradients(images, targets)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found, ctx.found = ctx.found, None
        assert found is not None, "the gradients are given away once"
        if grad.item() != 1:
            torch._foreach_mul_(found, grad.item())  # pyright: ignore[reportPrivateImportUsage]
        return None, None, None, *found
