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


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A small run, and its data."""
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    colors = write_colors(tmp_path / "colors.npz")
    tiny_run(colors, tmp_path / "run", steps=2)
    return tmp_path / "run", colors


@pytest.mark.slow
def test_renamed_attributes_of_results(trained):
    run, colors = trained
    dataset = vitrail.open_dataset(colors, "test")
    with pytest.warns(DeprecationWarning, match=".numbers is now .class_ids"):
        np.testing.assert_array_equal(dataset.numbers(), dataset.class_ids())
    with pytest.warns(DeprecationWarning, match=".take is now .subset"):
        assert len(dataset.take(np.array([1, 3]))) == 2
    result = vitrail.evaluate(run, colors)
    with pytest.warns(DeprecationWarning, match=".outcome.loss is now .loss"):
        assert result.outcome.loss == result.loss
    with pytest.warns(DeprecationWarning, match="images= is now num_images="):
        image = vitrail.inspect_model(run, data=colors, images=2).images[0]
    for value, old, new in (
        (result.classes[0], "pictures", "support"),
        (result.mistakes[0], "chance", "label_probability"),
        (image, "classes", "predictions"),
        (image, "colors", "token_colors"),
        (image, "lag", "token_offset"),
    ):
        with pytest.warns(DeprecationWarning, match=f".{old} is now .{new}"):
            assert getattr(value, old) is getattr(value, new)
    assert result.classes[0].support == 4


def test_renamed_keywords_and_attributes(trained):
    lines = []
    with pytest.warns(DeprecationWarning, match="tell= is now log="):
        model = vitrail.load(trained[0], num_classes=7, tell=lines.append)
    assert lines
    assert model.config.num_classes == 7
    with pytest.warns(DeprecationWarning, match="tell= is now log="):
        predictor = vitrail.Predictor(trained[0], tell=lines.append)
    assert predictor(np.zeros((8, 8, 3), np.uint8)).label
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        assert predictor.facts is predictor.metadata
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        model.facts = "metadata"
    assert model.metadata == "metadata"
    with pytest.warns(DeprecationWarning, match=".facts is now .metadata"):
        assert model.facts == "metadata"


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


def test_a_watch_of_0_1_receives_the_events_of_a_run(tmp_path):
    events = []
    with pytest.warns(DeprecationWarning, match="vitrail.Watch is now vitrail.Callback"):
        base = vitrail.Watch

    class Recorder(base):
        def say(self, line):
            events.append("say")

        def step(self, row):
            events.append(f"step {row['step']}")

        def end(self):
            events.append("end")

    data = write_colors(tmp_path / "colors.npz")
    with pytest.warns(DeprecationWarning, match="watch= is now callback="):
        vitrail.train(data, tmp_path / "run", steps=2, batch_size=4, watch=Recorder())
    assert events[0] == "say"
    assert [event for event in events if event.startswith("step")] == ["step 1", "step 2"]
    assert events[-1] in ("end", "say")
