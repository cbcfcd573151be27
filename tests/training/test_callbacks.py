"""metrics.jsonl: whole lines, and none of steps that are taken again. TensorBoard: the same."""

import json

import pytest

from vitrail.training.callbacks import MetricsLog, read_rows
from vitrail.training.recipes import METRICS


def records(folder, after_step=0) -> MetricsLog:
    return MetricsLog(folder, after_step=after_step, tensorboard=False)


def test_rows_come_back_as_they_were_written(tmp_path):
    kept = records(tmp_path)
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "val/accuracy": 0.5}]
    for row in rows:
        kept.add(row)
    assert read_rows(tmp_path / METRICS) == rows == kept.rows


def test_a_resumed_run_drops_the_rows_of_steps_it_takes_again(tmp_path):
    first = records(tmp_path)
    for step in range(1, 6):
        first.add({"step": step})
    again = records(tmp_path, after_step=3)
    again.add({"step": 4, "loss": 1.0})
    assert [row["step"] for row in read_rows(tmp_path / METRICS)] == [1, 2, 3, 4]


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    (tmp_path / METRICS).write_text(json.dumps({"step": 1}) + '\n{"step": 2, "lo')
    assert [row["step"] for row in records(tmp_path, after_step=9).rows] == [1]
    assert (tmp_path / METRICS).read_text() == '{"step": 1}\n'


def events(folder) -> dict[str, list[tuple[int, float]]]:
    """Curves as TensorBoard shows them: the points of each name."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = reader.EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    names = curves.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in curves.Scalars(name)] for name in names}


def test_tensorboard_shows_every_number_at_its_step(tmp_path):
    kept = MetricsLog(tmp_path, after_step=0)
    kept.add({"step": 1, "loss": 2.5, "stage": "first"})
    kept.add({"step": 2, "loss": 1.5})
    kept.add({"step": 2, "val/accuracy": 0.5})
    kept.close()
    assert events(tmp_path) == {"loss": [(1, 2.5), (2, 1.5)], "val/accuracy": [(2, 0.5)]}


def test_tensorboard_shows_steps_that_are_taken_again_once(tmp_path):
    for after_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        kept = MetricsLog(tmp_path, after_step=after_step)
        for step in steps:
            kept.add({"step": step, "loss": float(after_step)})
        kept.close()
    assert events(tmp_path) == {"loss": [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]}
