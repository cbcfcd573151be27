"""A run that ends on time: how many steps fit, measured and corrected as it goes.

Before the first step, a few trial steps at each image size tell what a step costs; later, what the
steps really took. What is left of the schedule is spread over the steps that still fit.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from vitrail.training.plan import Plan, Stages

CORRECTIONS = 40  # in a run, evenly spaced in time
EVALUATIONS = 0.06  # share of the time that evaluations along the way may take
MOST_EVALUATIONS = 10
SMOOTHING = 0.9  # of the measured time of a step
ENDING = 2.0  # seconds for saving and the report, beside evaluating


@dataclass
class Budget:
    """The time a run has, and what its parts cost."""

    seconds: float  # in all, the final evaluation included
    used: float  # by earlier parts of a resumed run, and before this object was made
    evaluation: float  # seconds that an evaluation takes
    final: float = 0.0  # seconds that the evaluations at the end take
    step: dict[int, float] = field(default_factory=dict)  # image size → seconds of a step
    clock: Callable[[], float] = time.monotonic
    begun: float = 0.0
    corrected: float = 0.0

    def __post_init__(self) -> None:
        self.begun = self.corrected = self.clock()

    def elapsed(self) -> float:
        return self.used + self.clock() - self.begun

    def left(self) -> float:
        """Seconds for steps and evaluations along the way."""
        return self.seconds - self.elapsed() - self.final - ENDING

    def observe(self, size: int, seconds: float) -> None:
        """A step took this long; it tells about larger pictures, still to come, as well.

        What a trial did not see, such as reading pictures, adds the same to all sizes; where a
        step is quicker than its trial, the machine was busy then, and all trials were too long.
        """
        before = self.step[size]
        more = (1 - SMOOTHING) * (seconds - before)
        for other, cost in self.step.items():
            if other >= size:
                self.step[other] = cost + more if more > 0 else cost * (before + more) / before

    def average_step(self, stages: Stages, progress: float) -> float:
        """Seconds per step over what is left of the schedule."""
        bounds = [start for start, _ in stages] + [1.0]
        shares = [max(0.0, end - max(start, progress)) for start, end in pairwise(bounds)]
        total = sum(shares)
        if not total:
            return self.step[stages[-1][1]]
        costs = [self.step[size] for _, size in stages]
        return sum(share * cost for share, cost in zip(shares, costs, strict=True)) / total

    def evaluations(self) -> int:
        """How many evaluations along the way are affordable."""
        if not self.evaluation:
            return MOST_EVALUATIONS
        return min(MOST_EVALUATIONS, int(EVALUATIONS * self.seconds / self.evaluation))

    def fitting(self, stages: Stages, progress: float, evaluations: int) -> int:
        """Steps that fit into what is left."""
        free = self.left() - evaluations * self.evaluation
        return max(1, int(free / self.average_step(stages, progress)))

    def due(self) -> bool:
        """Whether it is time to correct the plan."""
        return self.clock() - self.corrected >= self.seconds / CORRECTIONS

    def correct(self, plan: Plan, step: int) -> None:
        """Let the plan end when the time does."""
        self.corrected = self.clock()
        coming = 0
        if plan.evaluate_every:
            coming = max(0, (plan.steps - 1) // plan.evaluate_every - step // plan.evaluate_every)
        if self.left() <= 0:
            plan.steps = step  # it is time to end
            return
        progress = plan.progress(step)
        plan.spread_over(step, step + self.fitting(plan.stages, progress, coming))
