"""The live view of a run, and the progress line of a pass over images."""

import io
import sys

import pytest
from rich.console import Console

from vitrail.cli.live import CURVE, MOST, Live, clock, curve, plain, shortened, verdict
from vitrail.cli.progress import Progress

ROW = {
    "step": 120,
    "steps": 1000,
    "loss": 1.234,
    "learning_rate": 3e-4,
    "images_per_second": 256.0,
    "image_size": 64,
    "seconds": 10.0,
    "seconds_left": 65.0,
}


def test_a_plain_line_fits_a_terminal_and_has_the_numbers():
    line = plain(ROW)
    assert len(line) < 80
    assert all(word in line for word in ("120", "1,000", "1.234", "3.0e-04", "256", "1:05"))


def test_time_is_written_as_clocks_do():
    assert [clock(s) for s in (5, 65, 3600 + 62)] == ["0:05", "1:05", "1:01:02"]


def test_a_curve_rises_where_values_do_and_is_never_longer_than_its_room():
    assert curve([1, 2, 3, 4]) == "▁▃▆█"
    assert len(curve(list(range(1000)))) == CURVE
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([]) == ""


def test_many_losses_are_remembered_by_their_means():
    assert shortened([1.0, 3.0]) == [1.0, 3.0]
    assert shortened([1.0, 3.0] * (MOST // 2)) == [2.0] * (MOST // 2)


def test_a_verdict_names_the_split_and_its_numbers():
    row = {"step": 3, "epoch": 2.0, "val/accuracy": 0.912, "val/loss": 0.3, "seconds": 9}
    assert verdict(row) == "val accuracy 91.2 %, loss 0.300, epoch 2.0"
    assert verdict({"epoch": 1.0, "val/loss": 2.5}) == "val loss 2.500, epoch 1.0"


def test_what_is_drawn_fits_eighty_columns():
    live = Live()
    live.on_step(ROW)
    live.on_evaluate({"epoch": 1.0, "val/accuracy": 0.5, "val/loss": 1.0})
    page = io.StringIO()
    Console(file=page, width=80, force_terminal=False).print(live.draw())
    assert max(map(len, page.getvalue().splitlines())) <= 80
    assert "256 pictures/s" in page.getvalue()
    assert "val accuracy 50.0 %" in page.getvalue()


def test_what_goes_on_below_a_line_stands_further_in():
    live = Live()
    live.terminal, live.console = True, Console(width=20)
    assert live.hanging("  two words, and a reason") == "  two words, and a\n    reason"
    assert live.hanging("short") == "short"
    live.terminal = False
    assert live.hanging("  a long line for a file, in one") == "  a long line for a file, in one"


def test_lines_are_plain_where_there_is_no_terminal(capsys):
    with Live() as live:
        live.log("a fact [not markup]")
        live.on_train_begin(0, 10)
        live.on_step(ROW | {"step": 1})
    printed = capsys.readouterr().out
    assert "a fact [not markup]" in printed
    assert "step      1 of 1,000" in printed
    assert "\x1b" not in printed


class Terminal(io.StringIO):
    """Standard error that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def clock_at(monkeypatch):
    """Set the time that progress goes by."""
    now = [0.0]
    monkeypatch.setattr("vitrail.cli.progress.time.monotonic", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_progress_shows_speed_and_time_left_on_a_terminal(monkeypatch, clock_at, capsys):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
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


def test_the_line_goes_away_when_a_pass_fails(monkeypatch, clock_at):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = Progress()

    def broken_pass():
        with progress:
            clock_at(1)
            progress(1, 10)
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        broken_pass()
    assert progress.view is None
    assert terminal.getvalue().endswith("\x1b[2K")


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_progress_is_a_line_every_half_minute_without_a_terminal(
    monkeypatch, clock_at, capsys, term
):
    if term == "dumb":
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", term)
    progress = Progress("test images")
    for second in range(0, 100, 5):
        clock_at(second)
        progress(2 * second, 1000)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.splitlines() == [
        "60 of 1,000 test images, 2.0 images/s, 7:50 left",
        "120 of 1,000 test images, 2.0 images/s, 7:20 left",
        "180 of 1,000 test images, 2.0 images/s, 6:50 left",
    ]


def test_speed_is_that_of_the_last_seconds_and_of_one_pass(clock_at):
    progress = Progress()
    for second, done in enumerate([1, *range(100, 3000, 100)]):  # slow to begin with
        clock_at(second)
        progress(done, 5000)
    assert progress.words(2900, 5000, 29.0) == "2,900 of 5,000 images, 100 images/s, 0:21 left"
    progress(8, 16)  # the next pass
    assert progress.words(8, 16, 30.0) == "8 of 16 images"
    assert progress.words(16, None, 31.0) == "16 images, 4.0 images/s"
