"""The learning rate and the image size of every step.

The formulas are those of the authors' code: steps are counted from 1, the decay runs from the end
of the warmup to the last step, and the warmup multiplies the decayed value.

    linear            linear decay to `end`
    cosine            half a cosine to zero
    rsqrt             1 / sqrt(1 + t / timescale), then linear to zero
    constant-linear   constant, then linear to zero
    staircase         divided by ten after given fractions of the run (BiT)
    constant          constant

This file does not import torch.
"""

import math
from dataclasses import dataclass
from typing import Any

from vitrail.errors import ConfigError
from vitrail.training.config import OptimSettings, Settings

DEFAULT_COOLDOWN = 0.2

Stages = tuple[tuple[float, int], ...]


def lr_factor(optim: OptimSettings, step: float, steps: int) -> float:
    """Return the learning rate of `step` (from 0) of `steps`, as a fraction of its peak."""
    count = step + 1  # the authors count from 1
    warmup = warmup_steps(optim, steps)
    rise = min(1.0, count / warmup) if warmup else 1.0
    progress = min(1.0, max(0.0, (count - warmup) / max(1, steps - warmup)))
    fraction = DEFAULT_COOLDOWN if optim.cooldown is None else optim.cooldown
    cooldown = min(1.0, max(0.0, (steps - count) / (fraction * steps))) if fraction else 1.0
    match optim.schedule or "cosine":
        case "linear":
            assert optim.learning_rate is not None, "set by auto_config"
            end = optim.end / optim.learning_rate
            decay = end + (1 - end) * (1 - progress)
        case "cosine":
            decay = 0.5 * (1 + math.cos(math.pi * progress))
        case "rsqrt":
            decay = cooldown / math.sqrt(1 + max(0.0, count - warmup) / optim.timescale)
        case "constant-linear":
            decay = cooldown
        case "staircase":
            decay = 0.1 ** sum(count > round(share * steps) for share in optim.stairs)
        case "constant":
            decay = 1.0
    return rise * decay


def warmup_steps(optim: OptimSettings, steps: int) -> int:
    if optim.warmup_steps is None:
        return max(0, min(round(optim.warmup * steps), steps - 1))
    if optim.warmup_steps and optim.warmup_steps >= steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} is not less than steps={steps}; "
            "use a shorter warmup, or train for longer"
        )
    return optim.warmup_steps


@dataclass
class Schedule:
    """Steps of a run, and the position of each on the learning rate schedule.

    A run with a time budget may turn out faster or slower than planned: `stretch_to` then spreads
    the rest of the schedule over the steps that still fit, so that it ends on time.
    """

    settings: Settings
    length: int  # steps of the schedule
    accumulate: int = 1  # micro-batches per step
    processes: int = 1
    stages: Stages = ()  # (fraction of the schedule, image size from there on)
    evaluate_every: int = 0  # steps; 0: only at the end
    steps: int = 0  # the last step; differs from `length` after `stretch_to`
    anchor: tuple[int, float] = (0, 0.0)  # a step, and its position on the schedule

    def __post_init__(self) -> None:
        self.steps = self.steps or self.length

    def position(self, step: int) -> float:
        """Return the position on the schedule: the step itself, unless it was stretched."""
        start, position = self.anchor
        if step <= start:
            return position
        return position + (step - start) * ((self.length - position) / (self.steps - start))

    def progress(self, step: int) -> float:
        """Return the fraction of the schedule before a step."""
        return min(1.0, self.position(step) / self.length)

    def lr_factor(self, step: int) -> float:
        """Return the factor on all peak learning rates."""
        return lr_factor(self.settings.optim, self.position(step), self.length)

    def image_size(self, step: int) -> int:
        progress = self.progress(step)
        return [size for start, size in self.stages if start <= progress][-1]

    def stretch_to(self, step: int, steps: int) -> None:
        """Let the run end after `steps`, of which `step` are done."""
        self.anchor = (step, self.position(step))
        self.steps = max(step + 1, steps)

    def state_dict(self) -> dict[str, Any]:
        names = ("length", "steps", "anchor", "accumulate", "processes", "evaluate_every")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, values: dict[str, Any]) -> None:
        """Continue the schedule of `state_dict`.

        The micro-batch stays as it was, since the random numbers drawn for it depend on its size,
        unless it is set explicitly or the number of processes has changed. The samples of a step
        are the same in either case.
        """
        step, position = values["anchor"]
        self.length, self.steps, self.anchor = values["length"], values["steps"], (step, position)
        self.evaluate_every = values["evaluate_every"]
        same = values.get("processes", self.processes) == self.processes  # 0.1 did not save it
        if same and self.settings.machine.micro_batch is None:
            self.accumulate = values["accumulate"]
