"""Public names of 0.1 still work, with a warning."""

import numpy as np
import pytest

import vitrail
from tiny_runs import tiny_run, write_colors


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Answer", "Prediction"),
        ("Facts", "Metadata"),
        ("Guard", "AccuracyGuard"),
        ("open_source", "open_dataset"),
    ],
)
def test_renamed_names_warn_and_are_the_new_ones(old, new):
    with pytest.warns(DeprecationWarning, match=f"vitrail.{old} is now vitrail.{new}"):
        assert getattr(vitrail, old) is getattr(vitrail, new)
    assert old not in vitrail.__all__


def test_renamed_keywords_and_attributes(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    colors = write_colors(tmp_path / "colors.npz")
    tiny_run(colors, tmp_path / "run", steps=2)
    lines = []
    with pytest.warns(DeprecationWarning, match="tell= is now log="):
        model = vitrail.load(tmp_path / "run", num_classes=7, tell=lines.append)
    assert lines
    with pytest.warns(DeprecationWarning, match="tell= is now log="):
        predictor = vitrail.Predictor(tmp_path / "run", tell=lines.append)
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        assert predictor.facts is predictor.metadata
    assert predictor(np.zeros((8, 8, 3), np.uint8)).label
    assert model.config.num_classes == 7
    model = vitrail.create("ViT-Mu/4", num_classes=2, image_size=8, patch_size=4)
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        model.facts = "metadata"
    assert model.metadata == "metadata"
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        assert model.facts == "metadata"


def test_a_watch_of_0_1_receives_the_events_of_a_run(tmp_path):
    with pytest.warns(DeprecationWarning, match="vitrail.Watch is now vitrail.Callback"):
        base = vitrail.Watch

    class Recorder(base):
        def __init__(self):
            self.events = []

        def say(self, line):
            self.events.append("say")

        def step(self, row):
            self.events.append(f"step {row['step']}")

        def end(self):
            self.events.append("end")

    watch = Recorder()
    data = write_colors(tmp_path / "colors.npz")
    with pytest.warns(DeprecationWarning, match="watch= is now callback="):
        vitrail.train(data, tmp_path / "run", steps=2, batch_size=4, watch=watch)
    assert watch.events[0] == "say"
    assert [event for event in watch.events if event.startswith("step")] == ["step 1", "step 2"]
    assert watch.events[-1] in ("end", "say")
