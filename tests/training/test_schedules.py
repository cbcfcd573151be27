"""Learning rate schedules match the authors' formulas; stretching and restoring."""

import math
from dataclasses import replace
from typing import get_args

import pytest

from vitrail.errors import ConfigError
from vitrail.training.config import MachineSettings, OptimSettings, ScheduleKind, Settings
from vitrail.training.schedules import Schedule, lr_factor, warmup_steps

STEPS, WARMUP, RATE = 200, 20, 0.5
POINTS = (0, 1, 10, 18, 19, 20, 70, 120, 180, 199)


def rates(**settings):
    """Return the learning rates at steps counted from 0."""
    optim = OptimSettings(learning_rate=RATE, warmup_steps=WARMUP, **settings)
    return [RATE * lr_factor(optim, point, STEPS) for point in POINTS]


def authors(decayed):
    """Return `decayed` of the step counted from 1, times the warmup."""
    return [decayed(s) * min(1, s / WARMUP) for s in (point + 1 for point in POINTS)]


def share(s):
    return min(max((s - WARMUP) / (STEPS - WARMUP), 0), 1)


def rsqrt(s):
    """big_vision's."""
    rate = RATE / math.sqrt(1 + (s - WARMUP) / 50) if s >= WARMUP else RATE
    return rate * min(1, (STEPS - s) / 60)


FORMULAS = {
    "linear": ({"end": 1e-2}, lambda s: 1e-2 + (RATE - 1e-2) * (1 - share(s))),
    "cosine": ({}, lambda s: RATE * 0.5 * (1 + math.cos(math.pi * share(s)))),
    "rsqrt": ({"timescale": 50, "cooldown": 0.3}, rsqrt),
    "constant-linear": ({"cooldown": 0.25}, lambda s: RATE if s <= 150 else RATE * (200 - s) / 50),
    "staircase": ({}, lambda s: RATE / 10 ** sum(stair < s for stair in (60, 120, 180))),  # BiT's
    "constant": ({}, lambda s: RATE),
}


@pytest.mark.parametrize("kind", get_args(ScheduleKind))
def test_schedule_matches_the_formula(kind):
    options, formula = FORMULAS[kind]
    assert rates(schedule=kind, **options) == pytest.approx(authors(formula))


@pytest.mark.parametrize("schedule", get_args(ScheduleKind))
def test_factor_is_between_zero_and_one(schedule):
    optim = OptimSettings(learning_rate=RATE, schedule=schedule, end=0.1)
    for steps in (1, 2, 3, 100):
        for half in range(2 * steps + 2):  # also between steps, and a little beyond
            assert 0 <= lr_factor(optim, half / 2, steps) <= 1


def test_warmup_is_shorter_than_the_run():
    for steps in (1, 2, 10, 1000):
        assert warmup_steps(OptimSettings(warmup=0.99), steps) < steps
    assert warmup_steps(OptimSettings(warmup=0.05), 1000) == 50
    optim = OptimSettings(learning_rate=1e-3, warmup_steps=999999)
    with pytest.raises(ConfigError, match="warmup_steps=999999 is not less than steps=112602; use"):
        lr_factor(optim, 0, 112602)


LINEAR_SETTINGS = Settings(
    optim=OptimSettings(learning_rate=1.0, schedule="linear", warmup_steps=0)
)


def schedule(**fields) -> Schedule:
    return Schedule(
        settings=LINEAR_SETTINGS, **{"length": 100, "stages": ((0.0, 32), (0.5, 64)), **fields}
    )


def test_stretched_schedules_and_their_image_sizes():
    shorter, longer, late = schedule(), schedule(), schedule()
    assert [shorter.position(step) for step in range(101)] == list(range(101))
    shorter.stretch_to(20, 60)
    assert [shorter.position(step) for step in (20, 40, 60)] == pytest.approx([20, 60, 100])
    assert shorter.lr_factor(59) == pytest.approx(1 - 99 / 100)  # the end of the schedule
    longer.stretch_to(50, 300)
    assert longer.lr_factor(50) == schedule().lr_factor(50)  # without a jump
    late.stretch_to(50, 20)
    assert late.steps == 51
    restored = schedule(length=7)
    restored.load_state_dict(shorter.state_dict())
    assert [restored.position(s) for s in range(60)] == [shorter.position(s) for s in range(60)]
    growing = schedule()
    assert [growing.image_size(step) for step in (0, 49, 50, 99)] == [32, 32, 64, 64]
    growing.stretch_to(0, 200)
    assert [growing.image_size(step) for step in (98, 100, 199)] == [32, 64, 64]


@pytest.mark.parametrize(
    ("micro_batch", "processes", "accumulate"),
    [(None, 2, 4), (4, 2, 3), (None, 1, 3)],
    ids=["nothing changed", "a micro-batch is given", "another number of processes"],
)
def test_restored_accumulation(micro_batch, processes, accumulate):
    machine = MachineSettings(micro_batch=micro_batch)
    restored = schedule(accumulate=3, processes=processes)
    restored.settings = replace(LINEAR_SETTINGS, machine=machine)
    state = schedule(accumulate=4, processes=2, evaluate_every=7).state_dict()
    restored.load_state_dict(state)
    assert restored.accumulate == accumulate
    assert restored.evaluate_every == 7
    restored = schedule()
    restored.load_state_dict({key: state[key] for key in state if key != "processes"})  # of 0.1
    assert restored.accumulate == 4
