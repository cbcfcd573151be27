"""Adafactor as big_vision has it: Adam's second moments kept as a row and a column of averages.

Shazeer & Stern 2018 (arXiv:1804.04235), changed by Zhai et al. 2022 (arXiv:2106.04560): the
learning rate is given from outside, the memory of the second moments grows no longer than a cap,
and there is momentum, in half precision. Two bytes for each weight, where Adam needs eight.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vitrail.distributed import distribute_like, full_tensor

SMALLEST_FACTORED = 32  # smaller sides are not worth it
DECAY_EXPONENT = 0.8  # step t remembers with 1 - t^-0.8, at most the second beta
EPS = 1e-30  # added to squared gradients
MOMENTUM_DTYPE = torch.bfloat16


class Adafactor(torch.optim.Optimizer):
    """Gradients over the root of their averaged squares, no longer than `clip` in their rms."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        clip: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "clip": clip, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for kept in self.state.values():  # torch loads all states in the type of the weights
            if "momentum" in kept:
                kept["momentum"] = kept["momentum"].to(MOMENTUM_DTYPE)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.step_one(parameter, parameter.grad, group)

    def step_one(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, cap) = self.state[parameter], group["betas"]
        if not state:
            state.update(first_state(parameter))
        state["step"] += 1
        keep = min(cap, 1 - state["step"].item() ** -DECAY_EXPONENT)
        update = gradient * scale(gradient, state, keep)
        if group["clip"]:
            rms = (full_tensor(update.square().sum()) / update.numel()).sqrt()
            update /= (rms / group["clip"]).clamp(min=1.0)
        momentum = torch.lerp(state["momentum"].to(update.dtype), update, 1 - beta1)
        state["momentum"].copy_(momentum)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum, alpha=-group["lr"])


def first_state(parameter: Tensor) -> dict[str, Tensor]:
    """Zeros: a row and a column for matrices, and squares for all else."""
    state = {
        "step": torch.zeros((), dtype=torch.float32),  # on the CPU, so that nobody waits for it
        "momentum": torch.zeros_like(parameter, dtype=MOMENTUM_DTYPE),
    }
    sides = factored_sides(parameter.shape)
    if sides is None:
        return state | {"squares": torch.zeros_like(parameter)}
    for name, side in zip(("rows", "columns"), sides, strict=True):
        shape = [1 if i == side else n for i, n in enumerate(parameter.shape)]
        state[name] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    return state


def factored_sides(shape: torch.Size) -> tuple[int, int] | None:
    """The two longest dimensions, if both are long enough; kernels have two more."""
    if len(shape) < 2:
        return None
    *_, second, first = sorted(range(len(shape)), key=lambda side: shape[side])
    return (first, second) if shape[second] >= SMALLEST_FACTORED else None


def scale(gradient: Tensor, state: dict[str, Tensor], keep: float) -> Tensor:
    """One over the root of the averaged squares, which `state` takes in."""
    squares = gradient.square() + EPS
    if "squares" in state:
        return state["squares"].lerp_(squares, 1 - keep).rsqrt()
    sides = factored_sides(gradient.shape)
    assert sides is not None
    for name, side in zip(("rows", "columns"), sides, strict=True):
        mean = full_tensor(squares.sum(dim=side, keepdim=True)) / gradient.shape[side]
        state[name].lerp_(mean, 1 - keep)
    rows, columns = state["rows"], state["columns"]
    rows = rows / rows.mean(dim=sides[1], keepdim=True)
    return distribute_like(rows.rsqrt() * columns.rsqrt(), gradient)
