"""`vitrail predict`: what it prints for people and for programs, and how it ends."""

import csv
import io
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from vitrail.cli import main

CLASSES = ("ape", "bee", "cat")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    torch.manual_seed(0)
    model = vitrail.create(
        "ViT-Mu/4", image_size=8, patch_size=4, width=16, mlp_width=32, heads=2, depth=2,
        num_classes=3,
    )  # fmt: skip
    torch.nn.init.normal_(model.head.weight)
    folder = tmp_path_factory.mktemp("model") / "bundle"
    vitrail.save(model, folder, class_names=CLASSES)
    return folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(rng.integers(0, 255, (9, 12, 3), np.uint8)).save(folder / f"{number}.png")
    return folder


@pytest.fixture
def predict(bundle, capsys):
    def run(*options):
        status = main(["predict", str(bundle), *map(str, options)])
        told = capsys.readouterr()
        return status, told.out, told.err

    return run


def test_a_few_pictures_have_bars(predict, bundle, pictures):
    status, out, _ = predict(pictures / "0.png", "--top", "2")
    lines = out.splitlines()
    assert status == 0
    assert lines[0] == str(pictures / "0.png")
    assert len(lines) == 3
    guess = vitrail.Predictor(bundle)(pictures / "0.png").guesses[0]
    assert f"{100 * guess.probability:.1f} %" in lines[1]
    assert lines[1].split()[0] == guess.label
    assert "█" in lines[1]


def test_many_pictures_have_a_line_each_in_80_columns(predict, pictures):
    status, out, _ = predict(pictures)
    lines = out.splitlines()
    assert status == 0
    assert [line.split()[0][-5:] for line in lines[1:6]] == [f"{n}.png" for n in range(5)]
    assert max(map(len, lines)) <= 80
    assert "5 images" in lines[-1]


def test_json_is_a_line_for_each_picture(predict, bundle, pictures):
    _, out, err = predict(pictures, "--json", "--top", "3")
    rows = [json.loads(line) for line in out.splitlines()]
    answers = vitrail.Predictor(bundle)(sorted(pictures.iterdir()))
    assert [row["picture"] for row in rows] == [answer.name for answer in answers]
    assert [row["labels"] for row in rows] == [[answer.label] for answer in answers]
    for row, answer in zip(rows, answers, strict=True):
        for guess, expected in zip(row["guesses"], answer.guesses, strict=True):
            assert guess["label"] == expected.label
            assert guess["probability"] == pytest.approx(expected.probability, abs=1e-6)
    assert "5 images" in err


def test_csv_can_be_read_by_others(predict, pictures):
    _, out, _ = predict(pictures, "--csv", "--top", "2")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 5
    assert all(row["answer"] == row["class_1"] for row in rows)
    assert all(float(row["probability_1"]) >= float(row["probability_2"]) for row in rows)


@pytest.mark.parametrize("options", [[], ["--json"], ["--csv"]])
def test_a_picture_that_cannot_be_read_is_named_and_the_status_is_1(
    predict, pictures, tmp_path, options
):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not a picture")
    status, out, err = predict(bad, pictures, tmp_path / "gone.png", *options)
    assert status == 1
    told = err if options else out
    assert "2 of 7 images are unreadable" in told
    assert "bad.jpg" in told
    assert "gone.png" in told
    assert str(pictures / "4.png")[-20:] in out


def test_below_the_threshold_it_is_not_sure(predict, pictures):
    status, out, _ = predict(pictures, "--threshold", "1")
    assert status == 0
    assert "(abstained)" in out
    assert "5 abstentions" in out


def test_features_are_written_whole(predict, bundle, pictures, tmp_path):
    status, _, _ = predict(pictures, "--features", tmp_path / "vectors.npz")
    assert status == 0
    with np.load(tmp_path / "vectors.npz") as found:
        names, vectors = found["names"].tolist(), found["features"]
    assert names == [str(path) for path in sorted(pictures.iterdir())]
    assert np.allclose(vectors, vitrail.Predictor(bundle).features(sorted(pictures.iterdir())))


def test_a_checkpoint_without_preprocessing_warns_on_standard_error(pictures, tmp_path, capsys):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, width=64, heads=1)
    path = tmp_path / "model.pth"
    vitrail.save(model, path, "timm", allow_loss=True)
    words = ["predict", str(path), str(pictures), "--json"]
    assert main(words) == 0
    told = capsys.readouterr()
    assert f"warning: {path} does not state its preprocessing" in told.err
    assert [json.loads(line)["error"] for line in told.out.splitlines()] == [None] * 5
    assert main([*words, "--preprocessing", "deit"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_a_list_may_come_through_standard_input(bundle, pictures, monkeypatch, capsys):
    listed = "\n".join(str(path) for path in sorted(pictures.iterdir())[:2]).encode()
    coming = io.TextIOWrapper(io.BufferedReader(io.BytesIO(listed)))
    monkeypatch.setattr("sys.stdin", coming)
    assert main(["predict", str(bundle), "-", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["picture"][-5:] for row in rows] == ["0.png", "1.png"]


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
    ],
)
def test_bad_input_is_one_line_and_status_2(predict, options, reason):
    status, _, err = predict(*options)
    assert status == 2
    assert reason in err
    assert len(err.splitlines()) == 1


def test_the_same_bad_file_counts_as_often_as_it_was_named(predict, tmp_path):
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"")
    status, out, _ = predict(bad, bad)
    assert status == 1
    assert "2 of 2 images are unreadable" in out


def test_features_of_nothing_are_not_written_and_the_status_is_1(predict, tmp_path):
    status, out, _ = predict(tmp_path / "gone.png", "--features", tmp_path / "none.npz")
    assert status == 1
    assert "1 of 1 images are unreadable" in out
    assert not (tmp_path / "none.npz").exists()


@pytest.mark.parametrize("name", ["~backup.png", "x" * 300 + ".png"])
def test_odd_names_are_files_that_are_not_there(predict, name):
    status, out, _ = predict(name)
    assert status == 1
    assert "1 of 1 images are unreadable" in out


def test_names_that_are_no_text_are_printed_as_they_are(bundle, pictures, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff.png"
    with open(odd, "wb") as file:
        file.write((pictures / "0.png").read_bytes())
    words = [sys.executable, "-m", "vitrail", "predict", str(bundle), odd, "--csv"]
    done = subprocess.run(words, capture_output=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    assert b"\xff.png" in done.stdout
