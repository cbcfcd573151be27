"""A compiled step is taken only where it was measured to be faster."""

import pytest
from torch import nn

from tiny_runs import SETTINGS, Recorder, tiny_run, write_colors
from vitrail.training import budget
from vitrail.training.checkpoint import StopSignal
from vitrail.training.recipes import read_run

MACHINE = type(SETTINGS.machine)(compile=True)


@pytest.fixture
def steps_that_take(monkeypatch):
    """Trials with given seconds, and a compiler that notes what it was given."""

    def install(fast, plain):
        seconds = iter((fast, plain))
        monkeypatch.setattr(budget, "time_step", lambda trainer, size: next(seconds))
        monkeypatch.setattr(budget, "compile_module", mark)
        return made

    def mark(module):
        made.append(Marked(module))
        return made[-1]

    made = []
    return install


class Marked(nn.Module):
    """What a compiler made; counts its steps."""

    def __init__(self, module):
        super().__init__()
        self.module, self.steps = module, 0

    def forward(self, *batch):
        self.steps += 1
        return self.module(*batch)


@pytest.mark.parametrize(("fast", "kept", "word"), [(0.5, True, "50%"), (1.2, False, "120%")])
def test_the_faster_step_is_taken_and_told(tmp_path, steps_that_take, fast, kept, word):
    made = steps_that_take(fast, 1.0)
    book = Recorder()
    tiny_run(write_colors(tmp_path / "c.npz"), tmp_path / "run", callback=book, machine=MACHINE)
    said = [line for line in book.lines if "torch.compile" in line]
    assert len(said) == 1
    assert word in said[0]
    settings, _, _ = read_run(tmp_path / "run")
    assert settings.machine.compile is kept
    assert made[0].steps == (SETTINGS.steps if kept else 0)


@pytest.mark.parametrize("fast", [0.5, 1.2])
def test_a_resumed_run_goes_on_as_it_began_and_measures_nothing(
    tmp_path, steps_that_take, fast, monkeypatch
):
    data = write_colors(tmp_path / "c.npz")
    made = steps_that_take(fast, 1.0)

    class StopAtOnce(StopSignal):
        def __bool__(self):
            return True

    with monkeypatch.context() as patched:
        patched.setattr("vitrail.training.checkpoint.StopSignal", StopAtOnce)
        tiny_run(data, tmp_path / "run", machine=MACHINE)
    tiny_run(data, tmp_path / "run", resume=True, machine=MACHINE)  # as the command line says
    assert [marked.steps for marked in made] == ([1, SETTINGS.steps - 1] if fast < 1 else [0, 0])
