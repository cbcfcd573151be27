"""Muon: momentum, orthogonalized before it is applied (Jordan et al. 2024).

Five Newton-Schulz steps orthogonalize closely enough, in float32 on every device: bfloat16, which
torch's own Muon requires, is many times slower on most CPUs. Matrices of one shape, or of its
transpose, are orthogonalized as a batch; on a CPU each core takes a share of the batch. A
convolution is treated as an (out, in * kh * kw) matrix. Only for weights inside the network; use
another optimizer for everything else (positions, tokens, heads, norms, biases).

Shapes: B matrices of m rows and n columns, m <= n.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import start_pool
from vitrail.distributed import distribute_like, full_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero, so that small singular values grow fast
STEPS = 5
MOMENTUM = 0.8  # 0.95 is usual, for runs of many thousand steps (docs/notebook.md)
EPS = 1e-7  # a zero gradient stays zero
SMALL = 2**18  # elements of a matrix up to which one core per matrix is faster than all cores


class Muon(torch.optim.Optimizer):
    """For matrices and convolutions; `parts` in a group is the number of matrices in each weight.

    The fused weight of queries, keys and values is three matrices, stacked along the rows. The
    update of an (m, n) matrix is scaled by sqrt(max(1, m / n)), so that its effect on the output
    does not depend on the shape. `step` overwrites the gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        *,
        momentum: float = MOMENTUM,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "parts": 1}
        super().__init__(params, defaults)
        self.cores = torch.get_num_threads()  # `step` may be called with fewer threads
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.ndim >= 2, "Muon is for matrices"
                assert parameter.shape[0] % group["parts"] == 0, "rows must divide evenly"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        matrices, updated = [], []  # updated: groups and those of their weights with a gradient
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            updated.append((group, params))
            for parameter in params:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[p]["momentum"] for p in params]
            gradients = [p.grad for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            torch._foreach_lerp_(gradients, momenta, group["momentum"])  # Nesterov, in place
            for gradient in gradients:
                matrices += full_tensor(gradient).flatten(1).chunk(group["parts"])
        updates = iter(orthogonalize(matrices, self.cores))
        for group, params in updated:
            parts = [[next(updates) for _ in range(group["parts"])] for _ in params]
            full = [torch.cat(u).view(p.shape) for u, p in zip(parts, params, strict=True)]
            shares = [distribute_like(u, p) for u, p in zip(full, params, strict=True)]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, shares, alpha=-group["lr"])


def orthogonalize(matrices: list[Tensor], cores: int = 1) -> list[Tensor]:
    """Return the orthogonalized matrices, scaled by their shape."""
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(index)
    if not all(type(m) is Tensor and m.is_cpu and m.numel() <= SMALL for m in matrices):
        cores = 1  # all cores work on one product after the other; or tensors are fake
    jobs = [same[start::cores] for same in by_shape.values() for start in range(cores)]
    jobs = [job for job in jobs if job]

    def run(job: list[int]) -> Tensor:
        batch = (matrices[index] for index in job)
        return newton_schulz(torch.stack([m.mT if m.shape[0] > m.shape[1] else m for m in batch]))

    updates = list(matrices)
    batches = map(run, jobs) if cores == 1 else thread_pool(cores).map(run, jobs)
    for job, batch in zip(jobs, batches, strict=True):
        for index, update in zip(job, batch, strict=True):
            rows, columns = matrices[index].shape
            scale = (rows / columns) ** 0.5
            updates[index] = update.mT * scale if rows > columns else update
    return updates


@cache
def thread_pool(cores: int) -> ThreadPoolExecutor:
    return start_pool(cores, torch_threads=1, name="muon")


def newton_schulz(x: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthogonal rows: (B, m, n).

    A step is x ← (a + b g + c g²) x with g = x xᵀ, which moves singular values towards one.
    """
    a, b, c = COEFFICIENTS
    x = x.float()
    norm = x.flatten(1).norm(dim=1)[:, None, None] + EPS
    if x.shape[2] >= 2 * x.shape[1]:
        return newton_schulz_map(x @ x.mT / norm**2) / norm @ x
    x = x / norm
    for _ in range(STEPS):
        g = x @ x.mT  # (B, m, m)
        x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_map(g: Tensor) -> Tensor:
    """Return the (B, m, m) matrices by which the steps multiply x, from g = x xᵀ.

    The steps need only g, and (a + b g + c g²) commutes with it: all products are of small
    matrices, half the work for the matrices of an MLP.
    """
    a, b, c = COEFFICIENTS
    product = torch.eye(g.shape[1], dtype=g.dtype, device=g.device).expand_as(g)
    for step in range(STEPS):
        change = torch.baddbmm(g, g, g, beta=b, alpha=c)  # b g + c g²
        product = torch.baddbmm(product, change, product, beta=a)
        if step < STEPS - 1:
            half = torch.baddbmm(g, change, g, beta=a)
            g = torch.baddbmm(half, change, half, beta=a)
    return product
