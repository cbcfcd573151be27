"""Where each step is on the schedule, also when the run turns out longer or shorter."""

from dataclasses import replace

import pytest

from vitrail.training.config import MachineSettings, OptimSettings, Settings
from vitrail.training.schedules import Schedule

SETTINGS = Settings(optim=OptimSettings(learning_rate=1.0, schedule="linear", warmup_steps=0))


def plan(**fields) -> Schedule:
    return Schedule(
        settings=SETTINGS, **{"length": 100, "stages": ((0.0, 32), (0.5, 64)), **fields}
    )


def test_a_plan_that_is_never_changed_places_every_step_on_itself():
    unchanged = plan()
    assert [unchanged.position(step) for step in range(101)] == list(range(101))


def test_a_shortened_run_still_reaches_the_end_of_its_schedule():
    shorter = plan()
    shorter.stretch_to(20, 60)
    assert shorter.position(20) == 20
    assert shorter.position(40) == pytest.approx(60)
    assert shorter.position(60) == pytest.approx(100)
    assert shorter.lr_factor(59) == pytest.approx(1 - 99 / 100)


def test_the_learning_rate_does_not_jump_when_the_plan_changes():
    before, after = plan(), plan()
    after.stretch_to(50, 300)
    assert after.lr_factor(50) == before.lr_factor(50)


def test_a_run_that_is_out_of_time_takes_one_more_step():
    late = plan()
    late.stretch_to(50, 20)
    assert late.steps == 51


def test_image_sizes_change_at_their_share_of_the_schedule():
    growing = plan()
    assert [growing.image_size(step) for step in (0, 49, 50, 99)] == [32, 32, 64, 64]
    growing.stretch_to(0, 200)
    assert [growing.image_size(step) for step in (98, 100, 199)] == [32, 64, 64]


def test_a_restored_plan_is_the_plan_that_was_written():
    changed, restored = plan(), plan(length=7)
    changed.stretch_to(30, 77)
    restored.load_state_dict(changed.state_dict())
    assert [restored.position(s) for s in range(77)] == [changed.position(s) for s in range(77)]


@pytest.mark.parametrize(
    ("micro_batch", "processes", "accumulate"),
    [(None, 2, 4), (4, 2, 3), (None, 1, 3)],
    ids=["nothing changed", "a micro-batch is given", "another number of processes"],
)
def test_a_restored_plan_cuts_a_batch_as_before_unless_that_is_to_change(
    micro_batch, processes, accumulate
):
    machine = MachineSettings(micro_batch=micro_batch)
    restored = plan(accumulate=3, processes=processes)
    restored.settings = replace(SETTINGS, machine=machine)
    restored.load_state_dict(plan(accumulate=4, processes=2, evaluate_every=7).state_dict())
    assert restored.accumulate == accumulate
    assert restored.evaluate_every == 7
