"""Fixtures: a tiny dataset, a briefly trained model, runs that are stopped, fake trial runs."""

from contextlib import contextmanager
from pathlib import Path

import pytest
from tiny_searches import FakeRuns

from tiny_runs import tiny_run, write_colors
from vitrail.reports import pages
from vitrail.training import adapt
from vitrail.training.checkpoint import StopSignal

CHARTS = {"curves": pages.curves, "confusion_section": pages.confusion_section}


@pytest.fixture(autouse=True, scope="module")
def without_charts():
    """Leave charts out of the reports of runs: drawing takes most of the time of a tiny run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "curves", lambda rows: [])
        patch.setattr(pages, "confusion_section", lambda confusion, names: None)
        yield


@pytest.fixture
def charts(monkeypatch):
    """Draw the charts of a run."""
    for name, function in CHARTS.items():
        monkeypatch.setattr(pages, name, function)


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A briefly trained model."""
    folder = tmp_path_factory.mktemp("start")
    tiny_run(write_colors(folder / "colors.npz"), folder / "run")
    return str(folder / "run")


@pytest.fixture
def colors(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return write_colors(tmp_path / "colors.npz")


@pytest.fixture
def stop_after(monkeypatch):
    """Stop runs after so many steps, as Ctrl-C does."""

    @contextmanager
    def stopping(steps):
        class StopAfter(StopSignal):
            asked = 0

            def __bool__(self):
                self.asked += 1
                return self.asked >= steps

        with monkeypatch.context() as patched:
            patched.setattr("vitrail.training.checkpoint.StopSignal", StopAfter)
            yield

    return stopping


@pytest.fixture
def quick(monkeypatch):
    """Replace trial runs by given accuracies."""

    def install(accuracies=None, *, probes=None, **options):
        runs = FakeRuns(accuracies, **options)
        monkeypatch.setattr(adapt, "run", runs)
        if probes is not None:
            monkeypatch.setattr(adapt, "accuracy_of", lambda probe, dev: probes)
        return runs

    return install
