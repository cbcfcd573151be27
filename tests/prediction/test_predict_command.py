import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import vitrail
from vitrail.cli import main
from vitrail.cli.predict import bar_lines, table_lines
from vitrail.prediction.predictor import Guess, Prediction

pytestmark = pytest.mark.slow


@pytest.fixture
def predict(bundle, capsys):
    def run(*options):
        status = main(["predict", str(bundle), *map(str, options)])
        output = capsys.readouterr()
        return status, output.out, output.err

    return run


def test_few_images_have_bars(predict, bundle, folder):
    status, out, _ = predict(folder / "0.png", "--top", "2")
    name, first, second = out.splitlines()
    assert (status, name) == (0, str(folder / "0.png"))
    guesses = vitrail.Predictor(bundle)(folder / "0.png").guesses
    for guess, line in zip(guesses, (first, second), strict=False):
        assert line.split()[0] == guess.label
        assert f"{100 * guess.probability:.1f} %" in line
    assert "█" in first


def test_many_images_have_one_line_each(predict, folder):
    status, out, _ = predict(folder)
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0][-5:] for line in lines[1:8]] == [f"{n}.png" for n in range(7)]
    assert max(map(len, lines)) <= 80
    assert "7 images" in lines[-1]
    status, out, _ = predict(folder, "--threshold", "1")
    assert status == 0
    assert "(abstained)" in out
    assert "7 abstentions" in out


def test_prediction_sets_are_printed_in_full():
    names = ("roses", "dandelion", "tulips", "sunflowers", "daisy", "black-eyed susan")
    guesses = tuple(Guess(name, 1 / len(names)) for name in names)
    one = Prediction(name="x" * 40, labels=(), guesses=guesses, prediction_set=names)
    for lines in (list(table_lines([one, one], sets=True)), list(bar_lines([one, one]))):
        text = " ".join("\n".join(lines).split())
        assert max(map(len, lines)) <= 80
        for name in names:
            assert text.count(name) >= 2
    first, *more = list(table_lines([one], sets=True))[1:]
    assert first.endswith("roses, dandelion,")
    assert " ".join(" ".join(more).split()) == "tulips, sunflowers, daisy, black-eyed susan"


def test_json_and_csv_have_the_top_classes_of_each_image(predict, bundle, folder):
    _, out, err = predict(folder, "--json", "--top", "3")
    rows = [json.loads(line) for line in out.splitlines()]
    predictions = vitrail.Predictor(bundle)(sorted(folder.iterdir()))
    assert [row["picture"] for row in rows] == [each.name for each in predictions]
    assert [row["labels"] for row in rows] == [[each.label] for each in predictions]
    assert [row["label"] for row in rows] == [each.label for each in predictions]
    for row, prediction in zip(rows, predictions, strict=True):
        for guess, expected in zip(row["guesses"], prediction.guesses, strict=True):
            assert guess["label"] == expected.label
            assert guess["probability"] == pytest.approx(expected.probability, abs=1e-6)
    assert "7 images" in err
    _, out, _ = predict(folder, "--csv", "--top", "2")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 7
    assert all(row["answer"] == row["class_1"] for row in rows)
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows)


@pytest.mark.parametrize("options", [[], ["--json"], ["--csv"]])
def test_unreadable_images_are_reported_and_the_status_is_1(
    predict, folder, tmp_path, options, monkeypatch
):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not an image")
    listed = f"{tmp_path}/gone.png\n~backup.png\n{'x' * 300}.png".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(listed))))
    status, out, err = predict(bad, bad, folder, "-", *options)
    assert status == 1
    report = err if options else out
    assert "5 of 12 images are unreadable" in report  # a file named twice counts twice
    assert "bad.jpg" in report
    assert "gone.png" in report
    assert str(folder / "4.png")[-20:] in out


def test_other_files_of_a_folder_are_counted(predict, folder, tmp_path):
    (tmp_path / "a.png").write_bytes((folder / "0.png").read_bytes())
    for name in ("p.heic", "notes.txt", "q.heic", ".hidden.txt"):
        (tmp_path / name).touch()
    status, out, err = predict(tmp_path, "--json", "--threshold", "1")
    assert status == 0
    assert json.loads(out)["label"] is None  # the model abstains
    assert err == "note: 3 files skipped (2 .heic, 1 .txt): not images that vitrail reads\n"


def test_features_are_written(predict, bundle, folder, tmp_path):
    status, _, _ = predict(folder, "--features", tmp_path / "vectors.npz")
    assert status == 0
    with np.load(tmp_path / "vectors.npz") as found:
        names, vectors = found["names"].tolist(), found["features"]
    assert names == [str(path) for path in sorted(folder.iterdir())]
    assert np.allclose(vectors, vitrail.Predictor(bundle).features(sorted(folder.iterdir())))
    (tmp_path / "bad.png").write_bytes(b"not an image")
    status, out, _ = predict(tmp_path / "bad.png", "--features", tmp_path / "none.npz")
    assert status == 1
    assert "1 of 1 image is unreadable" in out
    assert not (tmp_path / "none.npz").exists()


def test_checkpoint_without_preprocessing_warns_on_standard_error(folder, tmp_path, capsys):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, width=64, heads=1)
    path = tmp_path / "model.pth"
    vitrail.save(model, path, "timm", allow_loss=True)
    words = ["predict", str(path), str(folder), "--json"]
    assert main(words) == 0
    output = capsys.readouterr()
    assert f"warning: {path} does not state its preprocessing" in output.err
    assert [json.loads(line)["error"] for line in output.out.splitlines()] == [None] * 7
    assert main([*words, "--preprocessing", "deit"]) == 0
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "no images given"),
        (["x", "--csv", "--json"], "pass one of them"),
        (["x", "--features", "x.csv"], "must end in .npz"),
        (["x", "--top", "0"], "top=0"),
        (["x", "--threshold", "2"], "threshold=2"),
        (["x", "--batch-size", "0"], "batch_size=0"),
        (["x", "--max-drop", "2"], "max_drop=2"),
        (["*.nothing"], "no file matches this pattern"),
        (["x", "--merge", "1", "--engine", "onnx"], "merge=1 needs engine=torch"),
        (["x", "1.pngg", "--csv"], "file not found: 1.pngg; did you mean '1.png'?"),
    ],
)
def test_invalid_options_are_one_line_errors_with_status_2(
    predict, folder, options, reason, monkeypatch
):
    monkeypatch.chdir(folder)
    status, out, err = predict(*("0.png" if word == "x" else word for word in options))
    assert (status, out) == (2, "")
    assert reason in err
    assert len(err.splitlines()) == 1


def test_names_that_are_not_utf8_are_printed_unchanged(bundle, folder, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.png"
    with open(name, "wb") as file:
        file.write((folder / "0.png").read_bytes())
    words = [sys.executable, "-m", "vitrail", "predict", str(bundle), name, "--csv"]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert b"\xff.png" in done.stdout
