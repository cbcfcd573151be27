"""A compiled step is taken only where it was measured to be faster."""

import pytest

from tiny_runs import SETTINGS, Notebook, tiny_run, write_colors
from vitrail.training import compiling
from vitrail.training.folder import read_run

MACHINE = type(SETTINGS.machine)(compile=True)


@pytest.fixture
def steps_that_take(monkeypatch):
    """Trials with given seconds, and a compiler that only marks what it was given."""

    def install(plain, fast):
        seconds = iter((plain, fast))
        monkeypatch.setattr(compiling, "trial", lambda setup, size: next(seconds))
        monkeypatch.setattr(compiling, "compiled", mark)

    def mark(module):
        module.was_compiled = True
        marked.append(module)
        return module

    marked = []
    return install


@pytest.mark.parametrize(("fast", "kept", "word"), [(0.5, True, "50%"), (1.2, False, "120%")])
def test_the_faster_step_is_taken_and_told(tmp_path, steps_that_take, fast, kept, word):
    steps_that_take(1.0, fast)
    book = Notebook()
    tiny_run(write_colors(tmp_path / "c.npz"), tmp_path / "run", watch=book, machine=MACHINE)
    said = [line for line in book.lines if "compiled" in line]
    assert len(said) == 1
    assert word in said[0]
    settings, _, _ = read_run(tmp_path / "run")
    assert settings.machine.compile is kept


def test_both_steps_learn_the_same(tmp_path, steps_that_take):
    books = {}
    for name, fast in (("plain", 1.2), ("compiled", 0.5)):
        steps_that_take(1.0, fast)
        books[name] = Notebook()
        data = write_colors(tmp_path / "c.npz")
        tiny_run(data, tmp_path / name, watch=books[name], machine=MACHINE)
    losses = [[row["loss"] for row in book.rows] for book in books.values()]
    assert losses[0] == losses[1]
