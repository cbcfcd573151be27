import json

import numpy as np
import pytest

import vitrail
from tiny_runs import tiny_run, write_colors
from vitrail import ConfigError, DataError
from vitrail.cli import main
from vitrail.probing.features import Features
from vitrail.probing.fewshot import Trial, draw, try_shots


def blobs(count, seed, classes=3, distance=3.0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    values = rng.normal(size=(count, 8)) + distance * np.eye(8)[labels]
    return Features(values=values.astype(np.float32), labels=labels, classes=tuple("abc"[:classes]))


def test_shots_are_drawn_as_big_vision_draws_them():
    labels = np.array([0, 1, 0, 1, 2, 0, 2, 1, 0])
    rng = np.random.default_rng(7)
    wanted = [rng.permutation(np.where(labels == c)[0])[:2] for c in range(3)]
    assert draw(labels, 3, 2, seed=7).tolist() == np.concatenate(wanted).tolist()
    assert sorted(draw(labels, 3, "all", seed=7)) == list(range(9))


def test_more_shots_of_separable_classes_are_better():
    trials = list(try_shots(blobs(300, 0), blobs(300, 1), shots=(1, 20)))
    assert [row[0].shots for row in trials] == [1, 20]
    assert trials[1][1].mean > trials[0][1].mean
    assert trials[1][1].mean > 0.9


def test_every_probe_is_tried_on_every_seed():
    (row,) = try_shots(
        blobs(60, 0), blobs(60, 1), shots=(5,), seeds=4, probes=("ridge", "neighbors", "logistic")
    )
    names = ["ridge, 1024", "ridge, best", "neighbors", "logistic"]
    assert [trial.probe for trial in row] == names
    assert all(len(trial.accuracies) == 4 for trial in row)
    assert row[0].l2 == (1024.0,) * 4


def test_all_pictures_are_drawn_once_only():
    (row,) = try_shots(blobs(60, 0), blobs(60, 1), shots=("all",), seeds=5)
    assert len(row[0].accuracies) == 1
    assert row[0].interval is None


def test_an_interval_is_students():
    trial = Trial(probe="", shots=1, accuracies=(0.4, 0.5, 0.6))
    assert trial.mean == pytest.approx(0.5)
    assert trial.interval == pytest.approx((0.5 - 0.2484, 0.5 + 0.2484), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shots": (0,)}, "shots=0 must be 1 or more"),
        ({"shots": ()}, "at least one number of shots"),
        ({"probes": ("rigde",)}, "did you mean 'ridge'"),
    ],
)
def test_impossible_protocols_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        list(try_shots(blobs(9, 0), blobs(9, 1), **{"shots": (1,)} | changes))


def test_a_class_without_pictures_is_named():
    train = blobs(9, 0)
    part = train.labels != 1
    poor = Features(values=train.values[part], labels=train.labels[part], classes=train.classes)
    with pytest.raises(DataError, match="no training images of 'b'"):
        list(try_shots(poor, blobs(9, 1), shots=(1,)))


@pytest.fixture
def trained(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    data = write_colors(tmp_path / "colors.npz", train=60, test=30)
    tiny_run(data, tmp_path / "run", steps=20)
    return tmp_path / "run", data


def test_the_command_saves_an_ordinary_bundle(trained, tmp_path, capsys):
    model, data = map(str, trained)
    words = ["fewshot", model, data, "--shots", "2", "10", "--out", str(tmp_path / "out")]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(t["probe"], t["shots"]) for t in told["trials"]] == [
        ("ridge, 1024", 2),
        ("ridge, best", 2),
        ("ridge, 1024", 10),
        ("ridge, best", 10),
    ]
    found = vitrail.evaluate(tmp_path / "out", data)
    assert found.accuracy == told["trials"][3]["accuracies"][0]  # the first draw of ten
    assert vitrail.load(tmp_path / "out").metadata.class_names == ("red", "green", "blue")


def test_the_table_fits_a_terminal(trained, capsys):
    model, data = map(str, trained)
    words = ["fewshot", model, data, "--probes", "ridge", "neighbors", "logistic", "--pixels"]
    assert main([*words, "--shots", "1", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("shots"))
    assert lines[start].split("  ")[-1].strip() == "raw pixels"
    assert max(map(len, lines[start:])) <= 80
    assert lines[start + 2].split()[0] == "all"


def test_a_bundle_prepares_pictures_as_its_head_was_fitted(trained, tmp_path, capsys):
    model, data = map(str, trained)
    words = ["fewshot", model, data, "--shots", "10", "--preprocessing", "fewshot", "--json"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert vitrail.load(tmp_path / "out").metadata.preprocessing.resize_to == (9, 9)
    assert vitrail.evaluate(tmp_path / "out", data).accuracy == told["trials"][1]["accuracies"][0]


def test_what_cannot_be_tried_is_refused_before_anything_is_computed(capsys):
    assert main(["fewshot", "no-model", "no-data", "--l2", "-1"]) == 2
    assert "l2=-1.0 must be" in capsys.readouterr().err


def test_a_model_is_not_replaced_unasked(trained, tmp_path, capsys):
    model, data = map(str, trained)
    words = ["fewshot", model, data, "--shots", "2", "--out", model]
    assert main(words) == 2
    assert "already contains a model" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0


def test_a_class_with_too_few_pictures_is_named(trained, capsys):
    assert main(["fewshot", *map(str, trained), "--shots", "25"]) == 0
    assert "'red' has only 20 training images; all of them are used" in capsys.readouterr().out


def test_what_was_learned_from_is_not_judged_by(trained, tmp_path):
    """A set without splits is divided; the bundle knows the part that it has learned from."""
    from test_teaching import paint

    for name in ("red", "green"):
        paint(tmp_path / "set" / name, name, 20)
    folder = str(tmp_path / "set")
    out = str(tmp_path / "out")
    assert main(["fewshot", str(trained[0]), folder, "--shots", "5", "--out", out]) == 0
    assert vitrail.evaluate(out, folder).notes[0] == "split: test"
