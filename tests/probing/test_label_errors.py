import csv
import json
import shlex

import numpy as np
import pytest

import vitrail
from tiny_runs import write_colors, write_folder
from vitrail.cli import main
from vitrail.data.datasets import open_splits
from vitrail.errors import DataError
from vitrail.probing import label_errors
from vitrail.probing.label_errors import apply_review, confident_learning


def clusters(rng, samples=400, classes=4, width=16):
    """Features of overlapping classes, and their labels."""
    labels = np.arange(samples) % classes
    centers = 2 * rng.normal(size=(classes, width))
    return (centers[labels] + rng.normal(size=(samples, width))).astype(np.float32), labels


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_flipped_labels_are_found(share):
    rng = np.random.default_rng(0)
    values, labels = clusters(rng)
    flipped = rng.permutation(400)[: int(400 * share)]
    noisy = labels.copy()
    noisy[flipped] = (labels[flipped] + rng.integers(1, 4, len(flipped))) % 4
    p = label_errors.out_of_fold(values, noisy, 4)
    suspects, suggested, margins = confident_learning(p, noisy)
    hits = np.isin(suspects, flipped)
    assert hits.mean() > 0.9
    assert hits.sum() > 0.9 * len(flipped)
    assert (suggested[flipped] == labels[flipped]).mean() > 0.9
    assert (np.diff(margins[suspects]) >= 0).all()


def test_confident_learning_follows_its_definition():
    p = np.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.7, 0.3], [0.45, 0.55], [0.55, 0.45]])
    labels = np.array([0, 0, 1, 1, 0, 1])
    # Mean self-confidence: 0.65 for class 0, 0.52 for class 1. Images 0 and 3 count for class 0,
    # images 2 and 4 for class 1: half of each label is wrong, 1.5 + 1.5 images.
    suspects, suggested, margins = confident_learning(p, labels)
    assert suspects.tolist() == [3, 4, 5]
    assert suggested[suspects].tolist() == [0, 1, 0]
    np.testing.assert_allclose(margins[suspects], np.log([3 / 7, 45 / 55, 45 / 55]))
    assert not len(confident_learning(p, p.argmax(axis=1))[0])


def test_outliers_are_far_from_their_class_even_if_several_are_alike():
    rng = np.random.default_rng(0)
    values, labels = clusters(rng)
    values[:7] = 3 * rng.normal(size=16) + 0.1 * rng.normal(size=(7, 16))
    assert set(np.argsort(label_errors.class_distances(values, labels))[-7:]) == set(range(7))


@pytest.fixture
def wrong(tmp_path):
    """A dataset with six wrong labels."""
    path = write_colors(tmp_path / "colors.npz", train=150, test=30)
    arrays = dict(np.load(path))
    arrays["y_train"][[3, 30, 60, 90, 120, 147]] = [1, 2, 1, 2, 1, 2]
    np.savez(path, **arrays)
    return path


def test_check_reports_reviews_and_applies(wrong, tmp_path, capsys):
    out, fixed = tmp_path / "my report", tmp_path / "fixed"
    review = out / "labels.csv"
    words = ["check", str(wrong), "--labels", "--model", "pixels", "--out", str(out)]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "Possible label errors" in text
    assert shlex.split(text.splitlines()[-1])[1:] == (
        ["check", str(wrong), "--apply", str(review), "--out", "fixed"]
    )
    assert main([*words, "--json"]) == 0
    labels = json.loads(capsys.readouterr().out)["labels"]
    assert labels["features"] == "32 x 32 pixels"
    found = {row["index"] for row in labels["errors"]}
    assert found <= {3, 30, 60, 90, 120, 147}
    assert len(found) >= 4
    assert {row["suggested"] for row in labels["errors"]} == {"red"}
    assert "looks like <i>red</i>" in (out / "index.html").read_text(encoding="utf-8")
    with review.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows):
        row["action"] = "fix" if number < len(rows) - 1 else "drop"
    with review.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    assert main(words) != 0
    assert f"{review} contains actions" in capsys.readouterr().err
    assert main(["check", str(wrong), "--apply", str(review), "--out", str(fixed)]) == 0
    assert f"{len(rows) - 1} labels fixed, 1 images dropped" in capsys.readouterr().out
    assert len(vitrail.open_dataset(fixed, "train")) == 149
    found = {row["name"] for row in label_errors.check_labels(str(fixed)).errors}
    assert not found & {row["name"] for row in rows}
    assert len(vitrail.open_dataset(fixed, "test")) == 30


def test_a_review_of_something_else_is_refused(wrong, tmp_path):
    review = tmp_path / "labels.csv"
    header = "name,split,index,label,suggested,margin,action\n"
    for text, message in (
        ("a,b\n1,2\n", "expected the columns"),
        ("name,split,index,action\ntrain/3,train,3,fix\n", "expected the columns"),
        ("x" * 200_000, "expected the columns"),
        (header + "train/3,train,3,red,red,-1,\n", "no line has an action"),
        (header + "train/3,train,3,red,red,-1,delete\n", "line 2: unknown action 'delete'"),
        (header + "train/900,train,3,red,red,-1,drop\n", "none of its images is in"),
        (header + "train/3,train,3,red,gray,-1,fix\n", "unknown class 'gray'"),
        (
            header + "train/3,train,3,red,red,-1,\ntrain/900,train,900,red,red,-1,drop\n",
            "no image that still exists has an action",
        ),
    ):
        review.write_text(text)
        with pytest.raises(DataError, match=message):
            apply_review(str(wrong), review, tmp_path / "fixed")
    with pytest.raises(DataError, match=r"file not found: .*; did you mean .*labels\.csv'"):
        apply_review(str(wrong), tmp_path / "label.csv", tmp_path / "fixed")
    images = len(vitrail.open_dataset(wrong, "test"))
    rows = "".join(f"test/{i},test,{i},red,red,-1,drop\n" for i in range(images))
    review.write_text(header + rows)
    with pytest.raises(DataError, match="drops every image of split 'test'; keep at least one"):
        apply_review(str(wrong), review, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


def test_file_names_of_a_review_may_be_any_bytes(tmp_path):
    folder = write_folder(tmp_path / "set")
    (folder / "red" / "0.png").rename(folder / "red" / "\udcff.png")
    (row,) = (
        {"name": dataset.name(i), "split": split, "index": i, "label": "red"}
        for split, dataset in open_splits(str(folder)).items()
        for i in range(len(dataset))
        if "\udcff" in dataset.name(i)
    )
    review = tmp_path / "labels.csv"
    label_errors.write_review([row | {"suggested": "blue", "margin": -1.0}], review)
    review.write_bytes(review.read_bytes().replace(b"-1.0000,", b"-1.0000,drop"))
    assert apply_review(str(folder), review, tmp_path / "fixed")["drop"] == 1


def test_a_review_applies_after_files_were_deleted(tmp_path, capsys):
    folder = write_folder(tmp_path / "set")
    samples = [
        {"name": dataset.name(i), "split": split, "index": i, "label": dataset.classes[label]}
        for split, dataset in open_splits(str(folder)).items()
        for i, label in enumerate(dataset.class_ids())
    ]
    missing, *rest = samples
    review = tmp_path / "labels.csv"
    rows = [row | {"suggested": row["label"], "margin": -1.0} for row in (missing, rest[-1])]
    label_errors.write_review(rows, review)
    review.write_bytes(review.read_bytes().replace(b"-1.0000,", b"-1.0000,drop"))
    (folder / missing["name"]).unlink()
    new, dropped = tmp_path / "new", (folder / rest[-1]["name"]).read_bytes()
    assert main(["check", str(folder), "--apply", str(review), "--out", str(new)]) == 0
    assert "1 images of the review are no longer there" in capsys.readouterr().out
    left = [sample.data for part in open_splits(str(new)).values() for sample in part]
    assert len(left) == len(samples) - 2
    assert dropped not in left


def test_a_review_finds_the_line_of_a_file_that_is_listed_twice(tmp_path):
    folder = write_folder(tmp_path / "set")
    lines = [f"red/{n}.png,{label},train\n" for n in range(10) for label in ("red", "blue")]
    data, review = folder / "labels.csv", tmp_path / "review.csv"
    data.write_text("file,label,split\n" + "".join(lines))
    for index, left in ((6, ["blue"]), (7, ["red"])):
        row = f"red/3.png,train,{index},red,blue,-1,drop\n"
        review.write_text("name,split,index,label,suggested,margin,action\n" + row)
        fixed = tmp_path / f"fixed {index}"
        assert apply_review(str(data), review, fixed)["drop"] == 1
        dataset = open_splits(str(fixed))["train"]
        third = (folder / "red" / "3.png").read_bytes()
        assert [dataset.classes[s.label] for s in dataset if s.data == third] == left
