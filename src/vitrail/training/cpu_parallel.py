"""CPU data parallelism: one shard of the batch per core, instead of all cores on each operation.

Threads that share an operation wait for each other at its end, and some operations do not scale at
all: attention is no faster with two threads than with one. So each core runs forward and backward
on a shard of the batch with a replica of the objective that shares its weights, and the gradients
are summed in a fixed order (see docs/benchmarks.md for the speedup).

From outside it is a single operation with a gradient: the loop, gradient accumulation and loss
scaling are unaffected.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from vitrail.data.loader import start_pool, torch_threads_for
from vitrail.models.config import Config, VitConfig
from vitrail.training.objectives import Classification, FeatureDistillation

MIN_SHARD = 60_000  # token values per shard; below, Python overhead dominates


class CpuDataParallel(nn.Module):
    """An objective whose loss is a mean over images; `forward` is that loss."""

    def __init__(self, objective: Classification | FeatureDistillation, shards: int) -> None:
        super().__init__()
        self.objective = objective
        self.replicas: list[nn.Module] = []  # a list: their parameters are not found a second time
        for _ in range(shards):  # same storage, separate gradients
            memo: dict[int, Any] = {
                id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                for p in objective.parameters()
            }
            if isinstance(objective, FeatureDistillation):
                memo[id(objective.teacher)] = objective.teacher  # frozen, and shared
            self.replicas.append(copy.deepcopy(objective, memo=memo))
        each = max(1, torch.get_num_threads() // shards)
        self.threads = start_pool(shards, torch_threads=each, name="shard")

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        if not worth_sharding(self.objective.model.config, images.shape, len(self.replicas)):
            return self.objective(images, targets)
        weights = [p for p in self.objective.parameters() if p.requires_grad]
        return ShardedLoss.apply(self, images, targets, *weights)

    def run(
        self,
        replica: nn.Module,
        images: Tensor,
        targets: Tensor,
        weight: float,
        precision: torch.dtype | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the weighted loss and gradients of one shard; autocast is per thread."""
        originals = self.objective.parameters()
        for parameter, original in zip(replica.parameters(), originals, strict=True):
            parameter.data = original.data  # normally a no-op
        trainable = [p for p in replica.parameters() if p.requires_grad]
        with torch.autocast("cpu", precision, enabled=precision is not None):
            loss = replica(images, targets) * weight
        gradients = torch.autograd.grad(loss, trainable, materialize_grads=True)
        return loss.detach(), list(gradients)


def worth_sharding(config: Config, shape: torch.Size | tuple[int, ...], shards: int) -> bool:
    """Return whether each shard of a batch (B, C, H, W) is enough work for a core."""
    assert isinstance(config, VitConfig)
    height, width = config.stride
    patches = (shape[2] // height) * (shape[3] // width)
    return shape[0] // shards * patches * config.width >= MIN_SHARD


class ShardedLoss(torch.autograd.Function):
    """The loss of a batch; its gradients are computed in the forward pass, shard by shard."""

    @staticmethod
    def forward(
        ctx: Any, parallel: CpuDataParallel, images: Tensor, targets: Tensor, *weights: Tensor
    ) -> Tensor:
        count = len(parallel.replicas)
        shards = zip(images.tensor_split(count), targets.tensor_split(count), strict=True)
        precision = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        tasks = [
            parallel.threads.submit(
                parallel.run, replica, *shard, len(shard[0]) / len(images), precision
            )
            for replica, shard in zip(parallel.replicas, shards, strict=True)
        ]
        (loss, total), *others = [task.result() for task in tasks]
        with torch_threads_for(sum(gradient.numel() for gradient in total)):
            for other_loss, gradients in others:
                loss = loss + other_loss
                torch._foreach_add_(total, gradients)  # pyright: ignore[reportPrivateImportUsage]
        ctx.gradients = total
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "backward can be called once"
        if grad.item() != 1:
            torch._foreach_mul_(gradients, grad.item())  # pyright: ignore[reportPrivateImportUsage]
        return None, None, None, *gradients
