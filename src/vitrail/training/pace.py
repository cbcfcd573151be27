"""How fast a run is: the numbers of each step, and the time budget that is planned from trials."""

import math
import time

import torch

from vitrail import distributed
from vitrail.training.budget import Budget
from vitrail.training.device import autocast_for, synchronize
from vitrail.training.feed import at_size
from vitrail.training.loop import Step, TrainState
from vitrail.training.plan import Plan
from vitrail.training.setup import Setup
from vitrail.training.watch import Watch

LOGGED_ROWS = 400  # of metrics.jsonl for the steps of a run
REMEMBERED = 20  # steps over which speed is averaged
TRIALS = 3  # steps at each image size from which a time budget is planned
OVERHEAD = 1.15  # of a real step over a trial: reading pictures, the optimizer


class Window:
    """The steps since the last row of the log."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.every = max(1, plan.length // LOGGED_ROWS)
        self.seconds = 0.0  # of the last step
        self.total = 0.0  # of all steps
        self.losses: list[float] = []
        self.times: list[float] = []
        self.begin()

    def begin(self) -> None:
        """The next step begins."""
        self.last = time.monotonic()

    def add(self, state: TrainState, step: Step, elapsed: float) -> dict[str, float]:
        """A row about the step that was just taken."""
        now = time.monotonic()
        self.seconds, self.last = now - self.last, now
        self.total += self.seconds
        self.losses.append(step.loss)
        self.times = [*self.times[1 - REMEMBERED :], self.seconds]
        pace = sum(self.times) / len(self.times)
        batch = self.plan.settings.batch_size or 1
        return {
            "step": state.step,
            "steps": self.plan.steps,
            "loss": step.loss,
            "grad_norm": round(step.grad_norm, 6),
            "learning_rate": max(g["lr"] for g in state.optimizers[-1].param_groups),
            "images_per_second": round(batch / pace, 2),
            "image_size": self.plan.size(state.step - 1),
            "seconds": round(elapsed, 3),
            "seconds_left": round(pace * (self.plan.steps - state.step), 1),
        }

    def due(self, step: int) -> bool:
        return step % self.every == 0 or step >= self.plan.steps

    def close(self, row: dict[str, float]) -> dict[str, float]:
        """The row with the mean loss since the last one that was kept."""
        row = row | {"loss": sum(self.losses) / len(self.losses)}
        self.losses.clear()
        return row


def make_budget(setup: Setup, watch: Watch, *, elapsed: float) -> Budget:
    """Try a few steps at each image size, and plan as many as fit."""
    plan, judge, minutes = setup.plan, setup.judge, setup.settings.minutes
    assert minutes is not None
    evaluation = judge.trial()
    costs = {size: trial(setup, size) for _, size in plan.stages}
    budget = Budget(
        seconds=60 * minutes,
        used=elapsed,
        evaluation=evaluation,
        final=judge.share_of_all() * evaluation,
        step=costs,
    )
    if setup.state.step:  # resumed: there is a plan, only the time is less
        correct(budget, plan, setup.state.step)
        return budget
    evaluations = distributed.broadcast_object(budget.evaluations())
    steps = distributed.broadcast_object(budget.fitting(plan.stages, 0.0, evaluations))
    plan.length = plan.steps = steps
    plan.evaluate_every = math.ceil(steps / (evaluations + 1)) if evaluations else 0
    plan.rate(0)  # a warm-up that does not fit is refused now
    watch.say(
        f"  {minutes:g} minutes are enough for about {steps:,} steps, "
        f"{setup.epochs(steps):.1f} epochs, with {evaluations} evaluations on the way"
    )
    return budget


def correct(budget: Budget, plan: Plan, step: int) -> None:
    """Let the plan end on time; all processes take the plan of the first."""
    budget.correct(plan, step)
    plan.restore(distributed.broadcast_object(plan.to_dict()))


def trial(setup: Setup, size: int) -> float:
    """Seconds of a step at an image size; nothing is learned from it."""
    train, device = setup.material.train, setup.device
    micro, shape = setup.micro_batch, at_size(setup.learner.preprocessing, size).size
    images = torch.zeros(micro, setup.judge.channels, *shape, device=device)
    targets = torch.zeros(micro, dtype=torch.long, device=device)
    if train.multi_label:
        targets = torch.zeros(micro, len(train.classes), device=device)
    times = []
    for _ in range(TRIALS):
        begun = time.monotonic()
        with autocast_for(setup.precision, device)():
            loss = setup.state.wrapped(images, targets)
        loss.backward()
        synchronize(device)
        times.append(time.monotonic() - begun)
        for optimizer in setup.state.optimizers:
            optimizer.zero_grad(set_to_none=True)
    return OVERHEAD * min(times) * setup.plan.accumulate
