"""metrics.jsonl: whole lines, and none of steps that are taken again."""

import json

from vitrail.training.records import METRICS, Records, read_rows


def records(folder, after_step=0) -> Records:
    return Records(folder, after_step=after_step, tensorboard=False)


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
