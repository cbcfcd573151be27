"""The few-shot protocol agrees with its authors' code; `vitrail fewshot` saves ordinary bundles."""

import json

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import ConfigError, DataError
from vitrail.cli import main
from vitrail.data.provenance import DataProvenance, fingerprint
from vitrail.probing.features import Features
from vitrail.probing.fewshot import Trial, draw, fewshot, open_pair, try_shots
from vitrail.probing.ridge import L2_GRID, fit_path


@pytest.fixture(params=["wide", "tall"])
def case(golden, request):
    """Results of the authors' code for fewer and for more rows than features."""
    return np.load(golden / f"fewshot-{request.param}.npz")


def rows(case):
    return [case[name] for name in ("x_train", "y_train", "x_test", "y_test")]


def correct(case, l2):
    """Test rows that the authors predict correctly; they store the share in float32."""
    return round(float(case[f"accuracy_{l2:g}"]) * len(case["y_test"]))


def test_weights_and_accuracy_equal_big_vision(case):
    assert len(case["l2"])
    x, y, x_test, y_test = rows(case)
    path = fit_path(x, y, int(case["classes"]), case["l2"].tolist())
    for l2, probe in zip(case["l2"].tolist(), path.probes, strict=True):
        result, theirs = fewshot(*rows(case), l2=l2), case[f"weights_{l2:g}"]
        assert np.abs(result.weights.numpy() - theirs).max() / np.abs(theirs).max() < 1e-10
        np.testing.assert_allclose(result.weights, theirs, rtol=1e-6)
        np.testing.assert_allclose(probe.weights, theirs, rtol=1e-6)
        assert result.l2 == probe.l2 == l2
        assert result.accuracy == correct(case, l2) / len(y_test)
        assert int((probe.predict(x_test).numpy() == y_test).sum()) == correct(case, l2)
    tensors = fewshot(*map(torch.from_numpy, rows(case)))
    np.testing.assert_allclose(tensors.weights, case["weights_1024"], rtol=1e-6)
    path, best = fit_path(x, y), fewshot(*rows(case), l2=L2_GRID)
    assert torch.equal(best.weights, path.probes[path.best].weights)


def test_invalid_test_rows(case):
    x, y, x_test, y_test = rows(case)
    with pytest.raises(DataError, match="no test rows"):
        fewshot(x, y, x_test[:0], y_test[:0])
    with pytest.raises(DataError, match="is out of range"):
        fewshot(x, y, x_test, y_test + 1)
    with pytest.raises(DataError, match="features; the probe"):
        fewshot(x, y, x_test[:, 1:], y_test)
    with pytest.raises(ConfigError, match="l2="):
        fewshot(x, y, x_test, y_test, l2=0)


def blobs(count, seed, classes=3, distance=3.0):
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    values = rng.normal(size=(count, 8)) + distance * np.eye(8)[labels]
    return Features(values=values.astype(np.float32), labels=labels, classes=tuple("abc"[:classes]))


def test_shots_are_drawn_as_in_big_vision():
    labels = np.array([0, 1, 0, 1, 2, 0, 2, 1, 0])
    rng = np.random.default_rng(7)
    expected = [rng.permutation(np.where(labels == c)[0])[:2] for c in range(3)]
    assert draw(labels, 3, 2, seed=7).tolist() == np.concatenate(expected).tolist()
    assert sorted(draw(labels, 3, "all", seed=7)) == list(range(9))


def test_every_probe_is_tried_with_every_seed():
    options = {"shots": (5,), "seeds": 4, "probes": ("ridge", "neighbors", "logistic")}
    (row,) = try_shots(blobs(60, 0), blobs(60, 1), **options)
    names = ["ridge, 1024", "ridge, best", "neighbors", "logistic"]
    assert [trial.probe for trial in row] == names
    assert all(len(trial.accuracies) == 4 for trial in row)
    assert [len(trial.l2) for trial in row] == [4, 4, 0, 0]
    assert row[0].l2 == (1024.0,) * 4
    for count in ("all", 20, 25):  # there are 20 images per class
        (row,) = try_shots(blobs(60, 0), blobs(60, 1), shots=(count,), seeds=5)
        assert len(row[0].accuracies) == 1  # all images need one draw
        assert row[0].interval is None
    assert row[1].mean > 0.9


def test_interval_is_students():
    trial = Trial(probe="", shots=1, accuracies=(0.4, 0.5, 0.6))
    assert trial.mean == pytest.approx(0.5)
    assert trial.interval == pytest.approx((0.5 - 0.2484, 0.5 + 0.2484), abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shots": (0,)}, "shots=0 must be 1 or more"),
        ({"shots": ()}, "at least one number of shots"),
        ({"probes": ("rigde",)}, "did you mean 'ridge'"),
    ],
)
def test_invalid_protocol(changes, message):
    train = blobs(9, 0)
    with pytest.raises(ConfigError, match=message):
        list(try_shots(train, blobs(9, 1), **{"shots": (1,)} | changes))
    part = train.labels != 1
    poor = Features(values=train.values[part], labels=train.labels[part], classes=train.classes)
    with pytest.raises(DataError, match="no training images of 'b'"):
        list(try_shots(poor, blobs(9, 1), shots=(1,)))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    data = write_colors(folder / "colors.npz", train=60, test=30)
    tiny_run(data, folder / "run", steps=20)
    return [str(folder / "run"), str(data)]


@pytest.mark.parametrize("preprocessing", [None, "fewshot"])
def test_command_saves_an_ordinary_bundle(trained, tmp_path, capsys, preprocessing):
    words = ["fewshot", *trained, "--shots", "2", "10", "--out", str(tmp_path / "out"), "--json"]
    assert main([*words, *(["--preprocessing", "fewshot"] if preprocessing else [])]) == 0
    trials = json.loads(capsys.readouterr().out)["trials"]
    names = ("ridge, 1024", "ridge, best")
    expected = [(name, shots) for shots in (2, 10) for name in names]
    assert [(t["probe"], t["shots"]) for t in trials] == expected
    metadata = vitrail.load(tmp_path / "out").metadata
    assert metadata.class_names == ("red", "green", "blue")
    assert (metadata.preprocessing.resize_to == (9, 9)) == (preprocessing is not None)
    result = vitrail.evaluate(tmp_path / "out", trained[1])
    assert result.accuracy == trials[3]["accuracies"][0]  # the first draw of ten


def test_bundle_knows_its_training_images(trained, tmp_path):
    """A dataset without splits is split, and the bundle is evaluated on the held-out part."""
    folder = str(write_folder(tmp_path / "set", 20))
    out = str(tmp_path / "out")
    assert main(["fewshot", trained[0], folder, "--shots", "5", "--out", out]) == 0
    assert vitrail.evaluate(out, folder).notes[0] == "split: test"


def test_split_and_record_of_the_backbone_are_kept(tmp_path):
    folder, other = write_folder(tmp_path / "set", 20), write_folder(tmp_path / "other", 20, seed=1)
    tiny_run(folder, tmp_path / "run", dev=0.3)
    origin = DataProvenance.from_dict(vitrail.load(tmp_path / "run").metadata.provenance)
    train, test = open_pair(str(folder), origin)
    assert (fingerprint(train), len(test)) == (origin.fingerprint, 18)
    assert len(open_pair(str(folder), DataProvenance())[1]) == 6
    assert len(open_pair(str(other), origin)[1]) == 6
    words = ["--shots", "5", "--out", str(tmp_path / "out"), "--overwrite"]
    for data in (other, folder):
        assert main(["fewshot", str(tmp_path / "run"), str(data), *words]) == 0
        probe = DataProvenance.from_dict(vitrail.load(tmp_path / "out").metadata.provenance)
        assert set(origin.samples) <= set(probe.samples)
        notes = vitrail.evaluate(tmp_path / "out", folder, "train").notes
        assert any("the model was trained on" in note for note in notes)
    assert vitrail.evaluate(tmp_path / "out", folder).samples == 18


def test_table_has_a_column_per_probe(trained, capsys):
    words = ["fewshot", *trained, "--probes", "ridge", "neighbors", "logistic", "--pixels"]
    assert main([*words, "--shots", "1", "25", "all"]) == 0
    output = capsys.readouterr().out
    assert "'red' has only 20 training images" in output
    assert all(name in output for name in ("neighbors", "logistic", "raw pixels"))


def test_model_is_overwritten_only_on_request(trained, tmp_path, capsys):
    assert main(["fewshot", "no-model", "no-data", "--l2", "-1"]) == 2  # before anything is read
    assert "l2=-1.0 must be" in capsys.readouterr().err
    vitrail.save(vitrail.load(trained[0]), tmp_path / "other")
    words = ["fewshot", *trained, "--shots", "2", "--out", str(tmp_path / "other")]
    assert main(words) == 2
    assert "already contains a model" in capsys.readouterr().err
    assert main([*words, "--overwrite"]) == 0
