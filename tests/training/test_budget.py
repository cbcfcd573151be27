"""A run ends on time, whatever the machine turns out to do. The clock is a number here."""

import pytest

from vitrail.training.budget import END_SECONDS, TimeBudget
from vitrail.training.config import OptimSettings, Settings
from vitrail.training.schedules import Schedule

SETTINGS = Settings(optim=OptimSettings(learning_rate=1.0, warmup_steps=0))


class Machine:
    """Time passes when steps are taken, and they take what `cost` says."""

    def __init__(self, cost):
        self.now, self.cost = 1000.0, cost

    def clock(self):
        return self.now

    def run(self, budget: TimeBudget, plan: Schedule, evaluation: float) -> float:
        """Take all steps; seconds from the beginning to the end of the final evaluation."""
        step, begun = 0, self.now
        while step < plan.steps:
            size = plan.image_size(step)
            seconds = self.cost(size, self.now - begun)
            self.now += seconds
            step += 1
            budget.observe(size, seconds)
            if budget.due():
                budget.correct(plan, step)
            if step < plan.steps and plan.evaluate_every and step % plan.evaluate_every == 0:
                self.now += evaluation
        self.now += evaluation + END_SECONDS
        return self.now - begun


def begin(machine: Machine, stages, guess: dict[int, float], evaluation=2.0, seconds=300.0):
    budget = TimeBudget(
        seconds=seconds,
        used=0.0,
        evaluation=evaluation,
        final=evaluation,
        step=guess,
        clock=machine.clock,
    )
    count = budget.evaluations()
    steps = budget.steps_that_fit(stages, 0.0, count)
    every = -(-steps // (count + 1))
    return budget, Schedule(settings=SETTINGS, length=steps, stages=stages, evaluate_every=every)


@pytest.mark.parametrize(
    ("what", "cost"),
    [
        ("as measured", lambda size, now: 0.1),
        ("twice as slow", lambda size, now: 0.2),
        ("twice as fast", lambda size, now: 0.05),
        ("slower from the middle on", lambda size, now: 0.1 if now < 150 else 0.25),
        ("stuttering", lambda size, now: 0.05 if int(now) % 7 else 0.4),
    ],
)
def test_a_run_ends_within_five_percent_of_its_time(what, cost):
    machine = Machine(cost)
    budget, plan = begin(machine, ((0.0, 64),), {64: 0.1})
    assert machine.run(budget, plan, 2.0) == pytest.approx(300, rel=0.05)


def test_larger_pictures_at_the_end_are_planned_for():
    machine = Machine(lambda size, now: {32: 0.05, 64: 0.2}[size])
    budget, plan = begin(machine, ((0.0, 32), (0.5, 64)), {32: 0.05, 64: 0.2})
    assert machine.run(budget, plan, 2.0) == pytest.approx(300, rel=0.05)


def test_a_wrong_guess_about_the_larger_pictures_is_made_good():
    machine = Machine(lambda size, now: {32: 0.05, 64: 0.3}[size])
    budget, plan = begin(machine, ((0.0, 32), (0.5, 64)), {32: 0.05, 64: 0.2})
    assert machine.run(budget, plan, 2.0) == pytest.approx(300, rel=0.05)


def test_dear_evaluations_are_left_out_on_the_way():
    machine = Machine(lambda size, now: 0.1)
    budget, plan = begin(machine, ((0.0, 64),), {64: 0.1}, evaluation=40.0)
    assert budget.evaluations() == 0
    assert plan.evaluate_every == plan.length  # at the end only


def test_a_run_that_is_out_of_time_ends():
    machine = Machine(lambda size, now: 5.0)
    budget, plan = begin(machine, ((0.0, 64),), {64: 0.01}, evaluation=0.1, seconds=4.0)
    assert machine.run(budget, plan, 0.1) < 15


def test_a_budget_that_is_used_up_allows_one_step():
    machine = Machine(lambda size, now: 0.1)
    budget, _ = begin(machine, ((0.0, 64),), {64: 0.1}, seconds=1.0)
    assert budget.steps_that_fit(((0.0, 64),), 0.0, 0) == 1
