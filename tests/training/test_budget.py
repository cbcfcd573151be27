"""Time budgets with a simulated clock, and torch.compile."""

import time

import pytest
import torch
from torch import nn

from tiny_runs import SETTINGS as TINY_SETTINGS
from tiny_runs import Recorder, tiny_run
from vitrail.training import budget
from vitrail.training.budget import END_SECONDS, TimeBudget
from vitrail.training.config import OptimSettings, Settings
from vitrail.training.recipes import read_run
from vitrail.training.schedules import Schedule

SETTINGS = Settings(optim=OptimSettings(learning_rate=1.0, warmup_steps=0))


class Machine:
    """A simulated clock: each step takes `cost` seconds."""

    def __init__(self, cost):
        self.now, self.cost = 1000.0, cost

    def clock(self):
        return self.now

    def run(self, budget: TimeBudget, plan: Schedule, evaluation: float) -> float:
        """Take all steps; return the seconds to the end of the final evaluation."""
        step, started = 0, self.now
        while step < plan.steps:
            size = plan.image_size(step)
            seconds = self.cost(size, self.now - started)
            self.now += seconds
            step += 1
            budget.observe(size, seconds)
            if budget.due():
                budget.correct(plan, step)
            if step < plan.steps and plan.evaluate_every and step % plan.evaluate_every == 0:
                self.now += evaluation
        self.now += evaluation + END_SECONDS
        return self.now - started


def begin(machine: Machine, stages, guess: dict[int, float], evaluation=2.0, seconds=300.0):
    cost = {"evaluation": evaluation, "final": evaluation, "step": guess}
    budget = TimeBudget(seconds=seconds, used=0.0, **cost, clock=machine.clock)
    count = budget.evaluations()
    steps = budget.steps_that_fit(stages, 0.0, count)
    every = -(-steps // (count + 1))
    return budget, Schedule(settings=SETTINGS, length=steps, stages=stages, evaluate_every=every)


ONE_SIZE, GROWING = {64: 0.1}, {32: 0.05, 64: 0.2}
COSTS = {
    "as measured": (ONE_SIZE, lambda size, now: 0.1),
    "twice as slow": (ONE_SIZE, lambda size, now: 0.2),
    "twice as fast": (ONE_SIZE, lambda size, now: 0.05),
    "slower from the middle on": (ONE_SIZE, lambda size, now: 0.1 if now < 150 else 0.25),
    "stuttering": (ONE_SIZE, lambda size, now: 0.05 if int(now) % 7 else 0.4),
    "larger images at the end": (GROWING, lambda size, now: {32: 0.05, 64: 0.2}[size]),
    "wrong estimate of them": (GROWING, lambda size, now: {32: 0.05, 64: 0.3}[size]),
}


@pytest.mark.parametrize("case", COSTS)
def test_run_ends_within_five_percent_of_its_budget(case):
    guess, cost = COSTS[case]
    machine = Machine(cost)
    stages = ((0.0, 64),) if guess is ONE_SIZE else ((0.0, 32), (0.5, 64))
    budget, plan = begin(machine, stages, dict(guess))
    assert machine.run(budget, plan, 2.0) == pytest.approx(300, rel=0.05)


def test_budgets_that_are_too_short():
    machine = Machine(lambda size, now: 0.1)
    budget, plan = begin(machine, ((0.0, 64),), {64: 0.1}, evaluation=40.0)
    assert budget.evaluations() == 0
    assert plan.evaluate_every == plan.length  # expensive evaluations are at the end only
    budget, _ = begin(machine, ((0.0, 64),), {64: 0.1}, seconds=1.0)
    assert budget.steps_that_fit(((0.0, 64),), 0.0, 0) == 1
    machine = Machine(lambda size, now: 5.0)
    budget, plan = begin(machine, ((0.0, 64),), {64: 0.01}, evaluation=0.1, seconds=4.0)
    assert machine.run(budget, plan, 0.1) < 15


COMPILED = type(TINY_SETTINGS.machine)(compile=True)


class CountingModule(nn.Module):
    """Stands for a compiled module; counts its steps."""

    def __init__(self, module):
        super().__init__()
        self.module, self.steps = module, 0

    def forward(self, *batch):
        self.steps += 1
        return self.module(*batch)


@pytest.fixture
def fake_times(monkeypatch):
    """Fake the times of compiled and eager steps, and the compiler."""
    modules = []

    def compile_module(module):
        modules.append(CountingModule(module))
        return modules[-1]

    def install(fast, plain):
        seconds = iter((fast, plain))
        monkeypatch.setattr(budget, "time_step", lambda trainer, size: next(seconds))
        monkeypatch.setattr(budget, "check_compiler", lambda *args: None)
        monkeypatch.setattr(budget.torch, "compile", compile_module)
        return modules

    return install


@pytest.mark.parametrize(("fast", "enabled", "ratio"), [(0.5, True, "50%"), (1.2, False, "120%")])
def test_compile_is_kept_only_if_faster(colors, tmp_path, fake_times, fast, enabled, ratio):
    modules, recorder = fake_times(fast, 1.0), Recorder()
    tiny_run(colors, tmp_path / "run", callback=recorder, machine=COMPILED)
    lines = [line for line in recorder.lines if "torch.compile" in line]
    assert len(lines) == 1
    assert ratio in lines[0]
    settings, _, _ = read_run(tmp_path / "run")
    assert settings.machine.compile is enabled
    assert modules[0].steps == (TINY_SETTINGS.steps if enabled else 0)


@pytest.mark.parametrize("fast", [0.5, 1.2])
def test_resumed_run_keeps_the_compile_decision(colors, tmp_path, fake_times, fast, stop_after):
    modules = fake_times(fast, 1.0)
    with stop_after(1):
        tiny_run(colors, tmp_path / "run", machine=COMPILED)
    tiny_run(colors, tmp_path / "run", resume=True, machine=COMPILED)  # as the command line says
    expected = [1, TINY_SETTINGS.steps - 1] if fast < 1 else [0, 0]
    assert [module.steps for module in modules] == expected


def test_a_run_ends_with_the_step_that_uses_up_its_time():
    machine = Machine(lambda size, elapsed: 1.0)
    budget, plan = begin(machine, ((0.0, 32),), {32: 1.0})
    machine.now += 280.0
    budget.correct(plan, 1)  # corrections are 7.5 seconds apart
    machine.now += 5.0
    assert not budget.due()
    budget.final = 20.0
    assert budget.due()
    budget.correct(plan, 3)
    assert plan.steps == 3


def test_measurements_before_the_run_count(colors, tmp_path, monkeypatch):
    planned = []

    def slow_trial(trainer, size):
        time.sleep(0.5)
        return 0.01

    def record(**values):
        planned.append(values["used"])
        return TimeBudget(**values)

    monkeypatch.setattr(budget, "time_step", slow_trial)
    monkeypatch.setattr(budget, "TimeBudget", record)
    tiny_run(colors, tmp_path / "run", steps=None, minutes=0.01, optim=OptimSettings(kind="adamw"))
    assert planned[0] >= 0.5


def test_trial_steps_include_muon_and_change_nothing(colors, tmp_path, monkeypatch):
    def slow_orthogonalize(matrices, cores):
        assert matrices, "gradients of a trial step"
        time.sleep(0.2)
        return matrices

    def trial(trainer, size):
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
        with monkeypatch.context() as patch:
            patch.setattr(budget, "orthogonalize", slow_orthogonalize)
            seconds.append(measure(trainer, size))
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, before[name]), name
        assert not any(optimizer.state for optimizer in trainer.state.optimizers)
        return 0.01

    measure, seconds = budget.time_step, []
    monkeypatch.setattr(budget, "time_step", trial)
    tiny_run(colors, tmp_path / "run", steps=None, minutes=0.01, optim=OptimSettings(kind="muon"))
    assert min(seconds) >= 0.2
