"""The learning rate follows the authors' formulas, written here a second time."""

import math
from typing import get_args

import pytest

from vitrail.errors import ConfigError
from vitrail.training.config import OptimSettings, ScheduleKind
from vitrail.training.schedules import lr_factor, warmup_steps

STEPS, WARMUP, RATE = 200, 20, 0.5
POINTS = (0, 1, 10, 18, 19, 20, 70, 120, 180, 199)


def rates(**settings):
    """The learning rates (not their factors) at the points, which count from 0."""
    optim = OptimSettings(learning_rate=RATE, warmup_steps=WARMUP, **settings)
    return [RATE * lr_factor(optim, point, STEPS) for point in POINTS]


def authors(decayed):
    """`decayed` of the step counted from 1, times the warm-up."""
    return [decayed(s) * min(1, s / WARMUP) for s in (point + 1 for point in POINTS)]


def share(s):
    return min(max((s - WARMUP) / (STEPS - WARMUP), 0), 1)


def test_linear_falls_to_its_end():
    expected = authors(lambda s: 1e-2 + (RATE - 1e-2) * (1 - share(s)))
    assert rates(schedule="linear", end=1e-2) == pytest.approx(expected)
    assert expected[-1] == pytest.approx(1e-2)


def test_cosine_falls_to_zero():
    expected = authors(lambda s: RATE * 0.5 * (1 + math.cos(math.pi * share(s))))
    assert rates(schedule="cosine") == pytest.approx(expected)
    assert expected[-1] == 0


def test_rsqrt_is_that_of_big_vision():
    def decayed(s):
        rate = RATE / math.sqrt(1 + (s - WARMUP) / 50) if s >= WARMUP else RATE
        return rate * min(1, (STEPS - s) / 60)

    assert rates(schedule="rsqrt", timescale=50, cooldown=0.3) == pytest.approx(authors(decayed))


def test_timescale_is_where_rsqrt_has_fallen_to_one_over_root_two():
    optim = OptimSettings(
        learning_rate=1.0, schedule="rsqrt", timescale=50, warmup_steps=10, cooldown=0
    )
    assert lr_factor(optim, 9 + 50, 1000) == pytest.approx(2**-0.5)


def test_constant_linear_stays_and_then_falls_to_zero():
    expected = authors(lambda s: RATE if s <= 150 else RATE * (200 - s) / 50)
    assert rates(schedule="constant-linear", cooldown=0.25) == pytest.approx(expected)


def test_staircase_is_that_of_bit():
    expected = authors(lambda s: RATE / 10 ** sum(stair < s for stair in (60, 120, 180)))
    assert rates(schedule="staircase") == pytest.approx(expected)


def test_a_stair_begins_after_its_share_of_the_steps():
    optim = OptimSettings(learning_rate=1.0, schedule="staircase", stairs=(0.29,), warmup_steps=0)
    assert [lr_factor(optim, step, 100) for step in (28, 29)] == [1, 0.1]


def test_constant_stays():
    assert rates(schedule="constant") == pytest.approx(authors(lambda s: RATE))


@pytest.mark.parametrize("schedule", get_args(ScheduleKind))
def test_the_rate_never_leaves_zero_to_its_peak(schedule):
    optim = OptimSettings(learning_rate=RATE, schedule=schedule, end=0.1)
    for steps in (1, 2, 3, 100):
        for half in range(2 * steps + 2):  # also between steps, and a little beyond
            assert 0 <= lr_factor(optim, half / 2, steps) <= 1


@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_a_warmup_given_as_a_share_always_leaves_something(steps):
    assert warmup_steps(OptimSettings(warmup=0.99), steps) < steps
    assert warmup_steps(OptimSettings(warmup=0.05), 1000) == 50


def test_a_warmup_longer_than_the_run_is_refused():
    optim = OptimSettings(learning_rate=1e-3, warmup_steps=999999)
    with pytest.raises(ConfigError) as error:
        lr_factor(optim, 0, 112602)
    assert str(error.value) == (
        "optim.warmup_steps=999999 is not less than steps=112602; "
        "use a shorter warmup, or train for longer"
    )


def test_without_warmup_the_first_step_has_the_whole_rate():
    optim = OptimSettings(learning_rate=1.0, warmup_steps=0, schedule="constant")
    assert lr_factor(optim, 0, 1) == 1
