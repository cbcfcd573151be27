"""The words and the curve of the live view."""

import io

from rich.console import Console

from vitrail.cli.live import CURVE, MOST, Live, clock, curve, plain, shortened, verdict

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
    assert verdict(row) == "val 91.2 % right, loss 0.300, after epoch 2.0"
    assert verdict({"epoch": 1.0, "val/loss": 2.5}) == "val loss 2.500, after epoch 1.0"


def test_what_is_drawn_fits_eighty_columns():
    live = Live()
    live.step(ROW)
    live.evaluated({"epoch": 1.0, "val/accuracy": 0.5, "val/loss": 1.0})
    page = io.StringIO()
    Console(file=page, width=80, force_terminal=False).print(live.draw())
    assert max(map(len, page.getvalue().splitlines())) <= 80
    assert "256 pictures/s" in page.getvalue()
    assert "val 50.0 % right" in page.getvalue()


def test_what_goes_on_below_a_line_stands_further_in():
    live = Live()
    live.terminal, live.console = True, Console(width=20)
    assert live.hanging("  two words, and a reason") == "  two words, and a\n    reason"
    assert live.hanging("short") == "short"
    live.terminal = False
    assert live.hanging("  a long line for a file, in one") == "  a long line for a file, in one"


def test_lines_are_plain_where_there_is_no_terminal(capsys):
    with Live() as live:
        live.say("a fact [not markup]")
        live.begin(0, 10)
        live.step(ROW | {"step": 1})
    printed = capsys.readouterr().out
    assert "a fact [not markup]" in printed
    assert "step      1 of 1,000" in printed
    assert "\x1b" not in printed
