"""Lion: steps of one size, only the sign of the momentum counts (Chen et al. 2023).

arXiv:2302.06675, algorithm 2. It wants a learning rate 3 to 10 times smaller than AdamW's, and a
weight decay as much larger. One state for each weight, where Adam has two.
"""

# pyright: reportPrivateImportUsage=false
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Lion(torch.optim.Optimizer):
    """weight -= lr * (sign(b1 * momentum + (1 - b1) * gradient) + weight_decay * weight)."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            found = [p for p in group["params"] if p.grad is not None]
            if found:
                self.step_group(found, group)

    def step_group(self, found: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = group["lr"], group["betas"]
        gradients = [p.grad for p in found if p.grad is not None]
        for parameter in found:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[p]["momentum"] for p in found]
        updates = list(torch._foreach_mul(momenta, beta1))
        torch._foreach_add_(updates, gradients, alpha=1 - beta1)
        for update in updates:
            update.sign_()  # one by one: lists of shared tensors have no sign
        if group["weight_decay"]:
            torch._foreach_mul_(found, 1 - lr * group["weight_decay"])
        torch._foreach_add_(found, updates, alpha=-lr)
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)
