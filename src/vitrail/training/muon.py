"""Muon: momentum whose matrices are made orthogonal before they are added (Jordan et al. 2024).

A gradient's large directions drown its small ones; an orthogonal matrix gives each the same
weight. Five Newton-Schulz steps come close enough, in float32 on every device: bfloat16, which
torch's own Muon insists on, is many times slower on most processors. Matrices of one shape, or of
that shape turned, go through the steps together; on a processor each core takes a share of them. A
convolution is the matrix that maps what its kernels see to channels. Only for weights inside a
network; everything else (positions, tokens, heads, norms, biases) is for another optimizer.

Shapes: B matrices of m rows and n columns, m <= n.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitrail.data.threads import threads_with_cores
from vitrail.distributed import distribute_like, full_tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero, so that small directions rise quickly
STEPS = 5
MOMENTUM = 0.8  # 0.95 is usual, for runs of many thousand steps (docs/notebook.md)
TINY = 1e-7  # a gradient of zeros stays zeros
SMALL = 2**18  # numbers in a matrix: cores that shared its products would wait for each other


class Muon(torch.optim.Optimizer):
    """For matrices and convolutions; `parts` in a group says of how many matrices each is made.

    The fused weight of queries, keys and values is three matrices, one below the other. The
    update of an (m, n) matrix is scaled by sqrt(max(1, m / n)), which keeps what it does to the
    output alike for all shapes. `step` uses the memory of the gradients: they are not what they
    were after it.
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
        self.cores = torch.get_num_threads()  # whoever calls `step` may have fewer at the time
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.ndim >= 2, "Muon is for matrices"
                assert parameter.shape[0] % group["parts"] == 0, "parts are of one size"

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        matrices = []
        for group in self.param_groups:
            for gradient in self.take_momentum(group):
                matrices += full_tensor(gradient).flatten(1).chunk(group["parts"])
        updates = iter(orthogonal(matrices, self.cores))
        for group in self.param_groups:
            if found := with_gradient(group):
                parts = [[next(updates) for _ in range(group["parts"])] for _ in found]
                full = [torch.cat(u).view(p.shape) for u, p in zip(parts, found, strict=True)]
                shares = [distribute_like(u, p) for u, p in zip(full, found, strict=True)]
                if group["weight_decay"]:
                    torch._foreach_mul_(found, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(found, shares, alpha=-group["lr"])

    def take_momentum(self, group: dict[str, Any]) -> list[Tensor]:
        """A group's gradients after Nesterov's look ahead, in the memory of the gradients."""
        found = with_gradient(group)
        if not found:
            return []
        for parameter in found:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        kept = [self.state[p]["momentum"] for p in found]
        gradients = [p.grad for p in found if p.grad is not None]
        torch._foreach_lerp_(kept, gradients, 1 - group["momentum"])
        torch._foreach_lerp_(gradients, kept, group["momentum"])
        return gradients


def with_gradient(group: dict[str, Any]) -> list[Tensor]:
    return [parameter for parameter in group["params"] if parameter.grad is not None]


def orthogonal(matrices: list[Tensor], cores: int = 1) -> list[Tensor]:
    """Each matrix with its directions made equal, and scaled to its shape."""
    places: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        places.setdefault(tuple(sorted(matrix.shape)), []).append(place)
    if not all(type(m) is Tensor and m.is_cpu and m.numel() <= SMALL for m in matrices):
        cores = 1  # all work on one product after the other; or there is no product, but a plan
    jobs = [same[start::cores] for same in places.values() for start in range(cores)]
    jobs = [job for job in jobs if job]

    def done(job: list[int]) -> Tensor:
        return newton_schulz(torch.stack([wide(matrices[place]) for place in job]))

    updates = list(matrices)
    batches = map(done, jobs) if cores == 1 else one_for_each(cores).map(done, jobs)
    for job, batch in zip(jobs, batches, strict=True):
        for place, update in zip(job, batch, strict=True):
            rows, columns = matrices[place].shape
            scale = (rows / columns) ** 0.5
            updates[place] = update.mT * scale if rows > columns else update
    return updates


@cache
def one_for_each(cores: int) -> ThreadPoolExecutor:
    """Threads, each with a core to itself."""
    return threads_with_cores(cores, each=1, name="muon")


def wide(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def newton_schulz(x: Tensor) -> Tensor:
    """(B, m, n) → the nearest matrices with orthogonal rows, nearly.

    A step is x ← (a + b g + c g²) x with g = x xᵀ, which takes singular values towards one.
    """
    a, b, c = COEFFICIENTS
    x = x.float()
    size = x.flatten(1).norm(dim=1)[:, None, None] + TINY
    if x.shape[2] >= 2 * x.shape[1]:
        return newton_schulz_map(x @ x.mT / size**2) / size @ x
    x = x / size
    for _ in range(STEPS):
        g = x @ x.mT  # (B, m, m)
        x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=b, alpha=c), x, beta=a)
    return x


def newton_schulz_map(g: Tensor) -> Tensor:
    """g = x xᵀ → the (B, m, m) matrices by which the steps multiply x.

    The steps need only g, and (a + b g + c g²) commutes with it: all products are of small
    matrices, which for the matrices of an MLP is half the work.
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
