"""Public names of 0.1 still work, with a warning, and the changelog lists them."""

import re
from pathlib import Path

import numpy as np
import pytest

import vitrail
from tiny_runs import tiny_run, write_colors
from vitrail.cli import OLD_OPTIONS
from vitrail.training.callbacks import OLD_NAMES


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(("Answer", "Prediction"), ("Facts", "Metadata"), ("Guard", "AccuracyGuard")),
        ("open_source", "open_dataset"),
    ],
)
def test_renamed_names_warn_and_are_the_new_ones(old, new):
    with pytest.warns(DeprecationWarning, match=f"vitrail.{old} is now vitrail.{new}"):
        assert getattr(vitrail, old) is getattr(vitrail, new)
    assert old not in vitrail.__all__


@pytest.mark.slow
def test_renamed_attributes_of_results(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    colors = write_colors(tmp_path / "colors.npz")
    tiny_run(colors, tmp_path / "run", steps=2)
    dataset = vitrail.open_dataset(colors, "test")
    with pytest.warns(DeprecationWarning, match=".numbers is now .class_ids"):
        np.testing.assert_array_equal(dataset.numbers(), dataset.class_ids())
    with pytest.warns(DeprecationWarning, match=".take is now .subset"):
        assert len(dataset.take(np.array([1, 3]))) == 2
    result = vitrail.evaluate(tmp_path / "run", colors)
    with pytest.warns(DeprecationWarning, match=".outcome.loss is now .loss"):
        assert result.outcome.loss == result.loss
    with pytest.warns(DeprecationWarning, match=".pictures is now .support"):
        assert result.classes[0].pictures == 4
    assert result.mistakes
    with pytest.warns(DeprecationWarning, match=".chance is now .label_probability"):
        assert result.mistakes[0].chance == result.mistakes[0].label_probability
    image = vitrail.inspect_model(tmp_path / "run", data=colors, images=2).images[0]
    pairs = {"classes": "predictions", "colors": "token_colors", "lag": "token_offset"}
    for old, new in pairs.items():
        with pytest.warns(DeprecationWarning, match=f".{old} is now .{new}"):
            assert getattr(image, old) is getattr(image, new)


def test_changelog_lists_every_renamed_name():
    root = Path(__file__).parents[1]
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    section = changelog.partition("### Migrating from 0.1")[2].partition("\n### ")[0]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `")]
    pairs = [*OLD_OPTIONS.items(), *OLD_NAMES.items()]
    pairs += [(old, new) for old, (new, _, _) in vitrail.RENAMED.items()]
    for path in (root / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        pairs += re.findall(r'renamed_(?:attribute|keyword)\("(\w+)", "(\w+)"\)', text)
    assert len(pairs) > 25
    for old, new in pairs:
        assert any(has_word(old, left) and has_word(new, right) for left, right in rows), old


def has_word(name: str, text: str) -> bool:
    return re.search(rf"(?<![\w-]){name}(?![\w-])", text) is not None


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
