"""What tests of the ladder begin with."""

from pathlib import Path

import pytest
from tiny_ladders import Runs

from tiny_runs import tiny_run, write_colors
from vitrail.training import rungs


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> str:
    """A model that has learned a little."""
    folder = tmp_path_factory.mktemp("start")
    tiny_run(write_colors(folder / "colors.npz"), folder / "run")
    return str(folder / "run")


@pytest.fixture
def colors(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return write_colors(tmp_path / "colors.npz")


@pytest.fixture
def quick(monkeypatch):
    """Trials that take no time, with accuracies that are given."""

    def install(accuracies=None, *, probes=None, **how):
        runs = Runs(accuracies, **how)
        monkeypatch.setattr(rungs, "run", runs)
        if probes is not None:
            monkeypatch.setattr(rungs, "right", lambda probe, dev: probes)
        return runs

    return install
