"""Cells and the workshop: each run once, resumed, shared, and told of."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiny_runs import SETTINGS, Recorder, write_colors
from vitrail.errors import ConfigError, DataError
from vitrail.reproduction.cells import (
    RESULT,
    Cell,
    digest,
    open_part,
    part,
    read_result,
    run_cell,
    without,
)
from vitrail.reproduction.workshop import Pace, Workshop, spoken, with_starts
from vitrail.training import checkpoint
from vitrail.training.config import ModelSettings


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return str(write_colors(tmp_path_factory.mktemp("colors") / "colors.npz", train=60, test=24))


@pytest.fixture
def cell(colors):
    return Cell(data=colors, settings=SETTINGS)


def changed(cell, **changes):
    return replace(cell, settings=replace(cell.settings, **changes))


@pytest.fixture(scope="module")
def made(colors, tmp_path_factory):
    """A workshop that has made three cells, one of which begins with another."""
    first = Cell(data=colors, settings=SETTINGS)
    fine = replace(first.settings, model=ModelSettings(), seed=1)
    cells = {
        ("first", 0): first,
        ("same", 0): replace(first),
        ("fine", 1): Cell(data=colors, settings=fine, start=first, pictures=30),
    }
    told, left = [], []
    shop = Workshop(
        tmp_path_factory.mktemp("shop"),
        2,
        lambda cell: 1e9,
        lambda name, cell, result: told.append(name),
        lambda *how: left.append(how),
    )
    return shop, cells, shop.results(cells), told, left


def test_equal_cells_are_run_once_and_starts_before_what_begins_with_them(made):
    shop, _, results, told, left = made
    assert told == ["first, seed 0", "fine, seed 1"]
    assert results["first", 0] == results["same", 0]
    assert len(list((shop.folder / "cells").iterdir())) == 2
    assert left[0][:2] == (0, 2)
    assert left[0][2] > 0


def test_results_tell_accuracy_few_shots_and_pictures_seen(made):
    result = made[2]["fine", 1]
    assert 0 <= result.accuracy <= 1
    assert 0 <= result.fewshot <= 1
    assert result.images == SETTINGS.steps * SETTINGS.batch_size
    assert (result.folder / "model.safetensors").exists()


def test_what_is_done_is_not_done_again(made):
    shop, cells, results, told, _ = made
    before = list(told)
    assert shop.results(cells) == results
    assert told == before


def test_a_cell_is_another_if_anything_it_depends_on_is(cell, colors, tmp_path):
    more = str(write_colors(tmp_path / "more.npz", train=63, test=24))
    judged_by = str(write_colors(tmp_path / "judged.npz", train=60, test=27))
    others = [
        replace(cell, data=judged_by),
        changed(cell, seed=1),
        changed(cell, steps=9),
        replace(cell, pictures=30),
        replace(cell, judged=6),
        replace(cell, data=more),
        replace(cell, start=cell),
        replace(cell, start=changed(cell, seed=1)),
    ]
    assert len({digest(one) for one in [cell, *others]}) == len(others) + 1
    assert digest(cell) == digest(replace(cell))


def test_fewer_pictures_are_among_more_and_another_seed_draws_others(cell):
    def names(count, seed=0):
        train = open_part(changed(replace(cell, pictures=count), seed=seed)).train
        return {train.name(index) for index in range(len(train))}

    assert len(names(12)) == 12
    assert names(12) < names(30)
    assert names(30) != names(30, seed=1)
    assert len(names(None)) == 60


def test_a_set_that_cannot_serve_is_refused(cell, tmp_path):
    with pytest.raises(ConfigError, match="2 pictures are fewer than 3 classes"):
        open_part(replace(cell, pictures=2))
    alone = write_colors(tmp_path / "alone.npz")
    with np.load(alone) as arrays:
        np.savez(alone, **{key: arrays[key] for key in ("x_train", "y_train", "class_names")})
    with pytest.raises(DataError, match="no pictures to be judged by; it needs a test split"):
        open_part(replace(cell, data=str(alone)))


def test_a_cell_killed_between_training_and_judging_is_only_judged(cell, tmp_path):
    assert run_cell(cell, tmp_path / "run")
    first = read_result(tmp_path / "run")
    (tmp_path / "run" / RESULT).unlink()
    weights = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    assert read_result(tmp_path / "run") is None
    assert run_cell(cell, tmp_path / "run")
    assert read_result(tmp_path / "run") == first
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == weights


def test_half_of_the_classes_is_a_set_of_its_own(tmp_path):
    rng = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", 24), ("test", 12)):
        labels = np.arange(count) % 4
        pixels = rng.integers(0, 250, (count, 8, 8, 3)).astype(np.uint8)
        pixels[:, 0, 0, 0] = labels
        parts |= {f"x_{split}": pixels, f"y_{split}": labels}
    np.savez(tmp_path / "four.npz", **parts, class_names=np.array(list("abcd")))
    whole = Cell(data=str(tmp_path / "four.npz"), settings=SETTINGS)
    for half, classes, first in (("even", ("a", "c"), 0), ("odd", ("b", "d"), 1)):
        material = open_part(replace(whole, half=half))
        for samples, count in ((material.train, 12), (material.judged["test"], 6)):
            assert samples.classes == classes
            assert len(samples) == count
            for sample in samples:
                assert sample.data[0, 0, 0] == 2 * sample.label + first
    assert digest(replace(whole, half="odd")) != digest(replace(whole, half="even"))


def test_the_probe_is_shown_test_pictures_that_do_not_judge_it(cell):
    test = open_part(cell).judged["test"]
    shown = part(test, 8, 1)
    assert len(shown) == 8
    names = {shown.name(index) for index in range(8)}
    others = without(test, shown)
    assert len(others) == len(test) - 8
    assert not names & {others.name(index) for index in range(len(others))}


LONG = """
import signal
import sys
from pathlib import Path
from vitrail.reproduction.cells import Cell
from vitrail.reproduction.workshop import Workshop
sys.path.insert(0, {tests!r})
from tiny_runs import SETTINGS
from dataclasses import replace

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests were started by
    settings = replace(SETTINGS, steps={steps}, save_minutes=0.002)
    two = [replace(settings, seed=seed) for seed in range(2)]
    cells = {{("long", one.seed): Cell(data={data!r}, settings=one) for one in two}}
    shop = Workshop(Path({out!r}), 2, lambda cell: 1e9, lambda *_: None, lambda *_: None)
    print(sorted(round(r.fewshot, 6) for r in shop.results(cells).values()), flush=True)
"""


def begun(script, cells):
    """The script under way, with the state of a cell on disk."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    process = subprocess.Popen(
        [sys.executable, script], env=environment, stderr=subprocess.PIPE, start_new_session=True
    )
    deadline = time.monotonic() + 200
    while not any(taken_steps(folder) for folder in folders(cells)):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    return process


def taken_steps(folder):
    return checkpoint.has_state(folder) and (folder / "config.json").exists()  # saved after a step


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_stopped_anywhere_it_goes_on_and_its_processes_end_with_it(how, colors, tmp_path):
    script, out = tmp_path / "long.py", tmp_path / "shop"
    tests = os.path.dirname(os.path.dirname(__file__))
    script.write_text(LONG.format(tests=tests, steps=40, data=colors, out=str(out)))
    process = begun(script, out / "cells")
    process.send_signal(how)  # to the first process alone
    process.communicate(timeout=200)
    deadline = time.monotonic() + 60
    while workers_of(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    cell = Cell(data=colors, settings=long_settings(0))
    if how == signal.SIGINT:  # states are saved then
        assert any(taken_steps(folder) for folder in folders(out / "cells"))
        return
    resumed = [folder for folder in folders(out / "cells") if taken_steps(folder)]
    cells = {digest(replace(cell, settings=long_settings(seed))): seed for seed in range(2)}
    watch = Recorder()
    again = replace(cell, settings=long_settings(cells[resumed[0].name]))
    assert run_cell(again, resumed[0], callback=watch)
    assert any(line.startswith("resumed at step") for line in watch.lines)
    assert read_result(resumed[0]) is not None


def long_settings(seed):
    return replace(SETTINGS, steps=40, save_minutes=0.002, seed=seed)


def workers_of(session):
    """Processes that still live in the session of one that has ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(entry.name)
    return found


def folders(path):
    return list(path.iterdir()) if path.exists() else []


def test_the_pace_is_learned_from_what_is_done():
    pace = Pace()
    first = pace.takes(25e9)
    pace.add(100e9, 8 + 10)
    assert pace.takes(100e9) == pytest.approx(18)
    pace.add(100e9, 5)  # says nothing: it was over before it began
    assert pace.takes(100e9) == pytest.approx(18)
    assert first == pytest.approx(9)


def test_names_are_spoken_with_their_seed(cell):
    assert spoken(("learned", "stem", 2)) == "learned, stem, seed 2"
    named = with_starts({"fine": replace(cell, start=cell)})
    assert [name for name, _ in named.values()] == ["fine", "fine: what it begins with"]
