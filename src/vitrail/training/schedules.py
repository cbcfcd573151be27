"""The learning rate over time, as a share of its peak.

The formulas are those of the authors' code: steps are counted from 1, the decay runs from the end
of the warm-up to the last step, and the warm-up multiplies the decayed value.

    linear            falls in a line to `end`
    cosine            falls along half a cosine to zero
    rsqrt             falls like 1 / sqrt(1 + t / timescale), then in a line to zero
    constant-linear   stays, then falls in a line to zero
    staircase         a tenth after each of some shares of the run (BiT's rule)
    constant          stays

This file does not import torch.
"""

import math
from collections.abc import Callable

from vitrail.errors import ConfigError
from vitrail.training.settings import Decay, Optim

COOLDOWN = 0.2  # where nothing is said


def factor(optim: Optim, step: float, steps: int) -> float:
    """The share of its peak that the learning rate has in `step` (from 0) of `steps`."""
    count = step + 1  # the authors count from 1
    warmup = warmup_steps_of(optim, steps)
    rise = min(1.0, count / warmup) if warmup else 1.0
    return rise * DECAYS[optim.schedule or "cosine"](optim, count, steps)


def warmup_steps_of(optim: Optim, steps: int) -> int:
    """How many of the steps the learning rate rises."""
    if optim.warmup_steps is None:
        return max(0, min(round(optim.warmup * steps), steps - 1))
    if optim.warmup_steps and optim.warmup_steps >= steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} leaves nothing of steps={steps}; "
            "warm up for less, or train for longer"
        )
    return optim.warmup_steps


def linear(optim: Optim, count: float, steps: int) -> float:
    assert optim.learning_rate is not None, "chosen before training begins"
    end = optim.end / optim.learning_rate
    return end + (1 - end) * (1 - progress(optim, count, steps))


def cosine(optim: Optim, count: float, steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress(optim, count, steps)))


def rsqrt(optim: Optim, count: float, steps: int) -> float:
    since = max(0.0, count - warmup_steps_of(optim, steps))
    return cooled(optim, count, steps) / math.sqrt(1 + since / optim.timescale)


def staircase(optim: Optim, count: float, steps: int) -> float:
    return 0.1 ** sum(count > round(share * steps) for share in optim.stairs)


def constant(optim: Optim, count: float, steps: int) -> float:
    return 1.0


def progress(optim: Optim, count: float, steps: int) -> float:
    """0 while the rate rises, 1 at the last step."""
    warmup = warmup_steps_of(optim, steps)
    return min(1.0, max(0.0, (count - warmup) / max(1, steps - warmup)))


def cooled(optim: Optim, count: float, steps: int) -> float:
    """1, and in a line to 0 over the last share of the run."""
    share = COOLDOWN if optim.cooldown is None else optim.cooldown
    if not share:
        return 1.0
    return min(1.0, max(0.0, (steps - count) / (share * steps)))


DECAYS: dict[Decay, Callable[[Optim, float, int], float]] = {
    "linear": linear,
    "cosine": cosine,
    "rsqrt": rsqrt,
    "constant-linear": cooled,
    "staircase": staircase,
    "constant": constant,
}
