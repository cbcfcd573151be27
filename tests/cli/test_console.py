import io
import logging
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from vitrail.cli.console import Progress, clock, note_lines, table, verbosity
from vitrail.cli.live import CURVE_WIDTH, MAX_LOSSES, Live, curve, evaluation_line, step_line
from vitrail.cli.train import Train, report
from vitrail.formatting import shell_command

METRICS = ("accuracy", "loss")
ROW = {"step": 120, "steps": 1000, "loss": 1.234, "learning_rate": 3e-4, "image_size": 64}
ROW |= {"images_per_second": 256.0, "seconds": 10.0, "seconds_left": 65.0}


def test_table_aligns_shortens_and_wraps():
    lines = table([("a", "1,000"), ("[b]", "2")], "lr", ["name", "n"], indent=2)
    assert lines == ["  name      n", "  a     1,000", "  [b]       2"]
    (line,) = table([("x" * 100, "12,345")], "lr")
    assert len(line) == 80
    assert line.endswith("…  12,345")
    wrapped = table([("key", "word " * 20)], "lw")
    assert wrapped == ["key  " + "word " * 14 + "word", "     " + "word " * 4 + "word"]
    assert table([("bell\a", "1")], "lr") == ["bell?  1"]


def test_commands_can_be_copied_if_paths_have_spaces(tmp_path):
    outcomes = {"val": SimpleNamespace(accuracy=0.5, samples=4)}
    folder = Path("runs/my photos")
    result = SimpleNamespace(finished=True, outcomes=outcomes, seconds=1.0, folder=folder)
    lines = list(report(cast(Any, result), Train(data="it's/photos"), ""))
    assert shlex.split(lines[-3]) == ["vitrail", "evaluate", "runs/my photos", "it's/photos"]
    assert shlex.split(lines[-2]) == ["vitrail", "inspect", "runs/my photos"]
    result.outcomes = {"dev": outcomes["val"]}  # evaluate would measure on the train split
    lines = list(report(cast(Any, result), Train(data="photos"), ""))
    assert shlex.split(lines[-3]) == ["vitrail", "predict", "runs/my photos", "IMAGES"]
    result.finished = False
    *_, resume = report(cast(Any, result), Train(data="photos"), "stopped")
    assert shlex.split(resume)[-2:] == ["--out", "runs/my photos"]
    assert shell_command("check", "images/") == "vitrail check images/"


def test_number_of_unreadable_images():
    assert list(note_lines([], {"a": "empty"})) == ["  1 unreadable image, a: empty"]
    several = "  2 unreadable images, such as a: empty"
    assert list(note_lines([], {"a": "empty", "b": "x"})) == [several]


def test_lines_of_a_log_have_the_metrics():
    words = "step    120 of 1,000  loss 1.234  lr 3.0e-04  256 images/s  1:05 left"
    assert step_line(ROW) == words
    row = {"step": 3, "epoch": 2.0, "val/accuracy": 0.912, "val/loss": 0.3, "seconds": 9}
    assert evaluation_line(row) == "val accuracy 91.2 %, loss 0.300, epoch 2.0"
    assert evaluation_line({"epoch": 1.0, "val/loss": 2.5}) == "val loss 2.500, epoch 1.0"
    assert [clock(s) for s in (5, 65, 3600 + 62)] == ["0:05", "1:05", "1:01:02"]


def test_long_lines_of_a_log_are_wrapped(capsys):
    line = "  note: " + "word " * 20 + "/" + "x" * 90
    Live().log(line)
    metrics = [f"{split}/{name}" for split in ("dev", "val", "test") for name in METRICS]
    Live().on_evaluate({"epoch": 1.0} | dict.fromkeys(metrics, 0.5))
    with verbosity(quiet=False, verbose=False):
        logging.getLogger("vitrail.inspection").info(line)
        logging.getLogger("vitrail.inspection").warning(line)
    printed = capsys.readouterr()
    wrapped = "  note: " + "word " * 13 + "word\n" + "    " + "word " * 5 + "word\n    /" + "x" * 90
    assert printed.out.startswith(f"{wrapped}\n  dev accuracy 50.0 %, ")
    assert all(len(text) <= 80 or "/x" in text for text in printed.out.splitlines())
    assert printed.err == f"{wrapped}\n{line}\n"  # a warning is one line, as errors are


def test_loss_curve():
    assert curve([1, 2, 3, 4]) == "▁▃▆█"
    assert len(curve(list(range(1000)))) == CURVE_WIDTH
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([]) == ""
    live = Live()
    for loss in [1.0, 3.0] * (MAX_LOSSES // 2):
        live.on_step(ROW | {"loss": loss})
    assert live.losses == [2.0] * (MAX_LOSSES // 2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def clock_at(monkeypatch):
    """Set the time that progress is measured by."""
    now = [0.0]
    monkeypatch.setattr("vitrail.cli.console.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def set_terminal(monkeypatch):
    """Make standard error a terminal; pytest would undo it between a fixture and its test."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return sys.stderr


def test_progress_shows_speed_and_time_left_on_a_terminal(monkeypatch, clock_at, capsys):
    terminal = set_terminal(monkeypatch)
    with Progress() as progress:
        for second in range(4):
            clock_at(second)
            progress(100 * (second + 1), 1000)
        print("a note", file=sys.stderr)
        assert "300 of 1,000 images, 100 images/s, 0:07 left" in terminal.getvalue()
        assert "a note" in terminal.getvalue()
    assert terminal.getvalue().count("\x1b[?25l") == terminal.getvalue().count("\x1b[?25h") == 1
    assert sys.stderr is terminal
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_progress_is_logged_twice_a_minute_without_a_terminal(monkeypatch, clock_at, capsys, term):
    if term == "dumb":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    progress = Progress("test images")
    for second in range(0, 100, 5):
        clock_at(second)
        progress(2 * second, 1000)
    printed = capsys.readouterr()
    lines = ["60 of 1,000 test images, 2.0 images/s, 7:50 left"]
    lines += [lines[0].replace("60", "120").replace("50", "20")]
    lines += [lines[0].replace("60", "180").replace("7:50", "6:50")]
    assert (printed.out, printed.err.splitlines()) == ("", lines)


def test_speed_is_of_the_last_seconds_and_of_one_pass(clock_at):
    progress = Progress()
    for second, done in enumerate([1, *range(100, 3000, 100)]):  # slow to begin with
        clock_at(second)
        progress(done, 5000)
    assert progress.text(2900, 5000, 29.0) == "2,900 of 5,000 images, 100 images/s, 0:21 left"
    progress(8, 16)  # the next pass
    assert progress.text(8, 16, 30.0) == "8 of 16 images"
    assert progress.text(16, None, 31.0) == "16 images, 4.0 images/s"
