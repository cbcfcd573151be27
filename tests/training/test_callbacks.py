"""metrics.jsonl and TensorBoard events."""

from types import SimpleNamespace

import pytest

from vitrail.training.callbacks import MetricsLog, read_rows
from vitrail.training.config import Settings
from vitrail.training.recipes import METRICS


def metrics_log(folder, after_step=0) -> MetricsLog:
    return MetricsLog(folder, after_step=after_step, tensorboard=False)


def test_rows_round_trip_and_repeated_or_truncated_ones_are_dropped(tmp_path):
    log = metrics_log(tmp_path)
    rows = [{"step": 1, "loss": 2.5}, {"step": 2, "val/accuracy": 0.5}, {"step": 3}]
    for row in rows:
        log.add(row)
    assert read_rows(tmp_path / METRICS) == rows == log.rows
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 2, "lo')
    metrics_log(tmp_path, after_step=2).add({"step": 3, "loss": 1.0})
    assert read_rows(tmp_path / METRICS) == [*rows[:2], {"step": 3, "loss": 1.0}]


def test_rewind_drops_losses_and_restarts_the_clock(tmp_path):
    log = MetricsLog(tmp_path, steps=800, tensorboard=False)  # every second step is logged
    schedule = SimpleNamespace(steps=800, settings=Settings(), image_size=lambda step: 8)
    optimizers = [SimpleNamespace(param_groups=[{"lr": 0.1}])]

    def end_step(step, loss):
        state = SimpleNamespace(step=step, schedule=schedule, optimizers=optimizers)
        result = SimpleNamespace(loss=loss, grad_norm=1.0)
        return log.end_step(state, result, elapsed=0.0, epoch=0.0)

    for step in (1, 2, 3):
        end_step(step, 9.0)
    log.step_started -= 1000  # the step that diverged
    log.rewind(1)
    assert end_step(2, 1.0)["seconds_left"] < 798 * 1000
    assert log.step_seconds < 1000
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path / METRICS)] == [(2, 1.0)]


def events(folder) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard shows, by name."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    curves = reader.EventAccumulator(str(folder / "tensorboard"))
    curves.Reload()
    names = curves.Tags()["scalars"]
    return {name: [(point.step, point.value) for point in curves.Scalars(name)] for name in names}


def test_tensorboard_scalars(tmp_path):
    log = MetricsLog(tmp_path, after_step=0)
    log.add({"step": 1, "loss": 2.5, "stage": "first"})
    log.add({"step": 2, "loss": 1.5})
    log.add({"step": 2, "val/accuracy": 0.5})
    log.close()
    assert events(tmp_path) == {"loss": [(1, 2.5), (2, 1.5)], "val/accuracy": [(2, 0.5)]}


def test_tensorboard_hides_repeated_steps(tmp_path, monkeypatch):
    # Files of one second are ordered by a counter of the process, as text: 10 before 9.
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(writer, "_global_uid", writer.AtomicCounter(0))
    for after_step, steps in ((0, (1, 2, 3)), (1, (2, 3, 4))):
        log = MetricsLog(tmp_path, after_step=after_step)
        for step in steps:
            log.add({"step": step, "loss": float(after_step)})
        log.close()
    assert events(tmp_path) == {"loss": [(1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0)]}
