import os
import pickle
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_sets import make_folder, pixels, png

from vitrail.data import datasets
from vitrail.data.check import check_dataset
from vitrail.data.datasets import Splits, assign_splits, open_dataset, open_splits, split_counts
from vitrail.data.provenance import fingerprint
from vitrail.data.tar_shards import pack
from vitrail.errors import ConfigError, DataError, VitrailError
from vitrail.training import data_module
from vitrail.training.config import Settings

pytestmark = pytest.mark.slow


def test_class_folders(tmp_path):
    make_folder(tmp_path, {"cat": 2, "ape": 1})
    source = open_dataset(tmp_path, "all")
    assert source.classes == ("ape", "cat")
    assert [sample.name for sample in source] == ["ape/000.png", "cat/000.png", "cat/001.png"]
    assert source[0].data == (tmp_path / "ape/000.png").read_bytes()
    assert source.labels().tolist() == [0, 1, 1] == [sample.label for sample in source]
    assert source[-1] == source[2]
    with pytest.raises(IndexError):
        source[3]
    for some in (source, source.subset(np.arange(3))):
        parts = [some.subset(part) for part in ([2, 0], [-1, 0], np.array([False, True, True]))]
        names = [[sample.name[:5] for sample in part] for part in parts]
        assert names == [["cat/0", "ape/0"], ["cat/0", "ape/0"], ["cat/0", "cat/0"]]
    with pytest.raises(IndexError):
        source.subset(np.array([3]))


def test_split_folder_aliases(tmp_path):
    make_folder(tmp_path, {"training/cat": 3, "training/dog": 2, "Valid/cat": 1, "testing/dog": 1})
    assert split_counts(tmp_path) == {"train": 5, "val": 1, "test": 1}
    assert open_dataset(tmp_path, "validation").name(0) == "Valid/cat/000.png"
    assert open_dataset(tmp_path, "val").classes == ("cat", "dog")  # although it has no dog
    assert open_dataset(tmp_path, "test").labels().tolist() == [1]
    assert len(open_dataset(tmp_path, "all")) == 7
    vehicles = make_folder(tmp_path / "b", {"train": 4, "bus": 4, "car": 4, "train/steam": 1})
    source = open_dataset(vehicles, "all")
    assert (source.classes, len(source)) == (("bus", "car", "train"), 13)


@pytest.mark.parametrize(
    "open_all",
    [open_splits, lambda path: data_module.open_splits(str(path), Settings()), check_dataset],
    ids=["open_splits", "training", "check"],
)
def test_unsplit_folder_is_scanned_once(tmp_path, monkeypatch, open_all):
    make_folder(tmp_path, {"cat": 20, "cat/deep/down": 3, "dog": 20, "cow": 20})
    scans, scandir = Counter(), os.scandir

    def counted(path="."):
        scans[os.path.normpath(path)] += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    open_all(tmp_path)
    folders = ("", "cat", "cat/deep", "cat/deep/down", "cow", "dog")
    assert scans == {os.path.normpath(tmp_path / folder): 1 for folder in folders}


@pytest.mark.parametrize("counts", [{"cat": 9, "dog": 9}, {"train/cat": 5, "test/cat": 2}])
@pytest.mark.parametrize("splits", [None, Splits(val=0.3, test=0.2)])
def test_open_splits_equals_open_dataset(tmp_path, counts, splits):
    folder = make_folder(tmp_path / "folder", counts)
    list(pack(str(folder), tmp_path / "shards"))
    for reference in (folder, tmp_path / "shards", "builtin:sign-digits"):
        opened = open_splits(reference, splits=splits)
        assert {name: len(part) for name, part in opened.items()} == split_counts(
            reference, splits=splits
        )
        for name, part in opened.items():
            expected = open_dataset(reference, name, splits=splits)
            assert fingerprint(part) == fingerprint(expected)
            assert part.splits == expected.splits


def test_other_files_are_skipped_and_counted(tmp_path):
    make_folder(tmp_path, {"cat/deep/down": 2, "Cat": 1, ".hidden": 3})
    (tmp_path / "cat" / "notes.txt").write_text("")
    (tmp_path / "cat" / ".000.png").write_text("")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "top.png").write_bytes(png(1))
    source = open_dataset(tmp_path, "all")
    assert source.classes == ("Cat", "cat")
    assert len(source) == 3
    assert source.notes == (
        "images outside class folders skipped: 1",
        "files that are not images skipped: 1 (.txt 1)",
        "classes 'Cat' and 'cat' differ only in case and are two classes",
        "folders without images: nothing",
    )


def test_links_are_followed_but_not_in_circles(tmp_path):
    make_folder(tmp_path, {"elsewhere/x": 2, "set/cat": 1})
    root = tmp_path / "set"
    (root / "dog").symlink_to(tmp_path / "elsewhere" / "x")
    (root / "cat" / "again").symlink_to(root / "cat")
    (root / "cat" / "nowhere.png").symlink_to(tmp_path / "missing")
    source = open_dataset(root, "all")
    assert source.labels().tolist().count(1) == 2
    assert "cat/nowhere.png" in [source.name(i) for i in range(len(source))]
    make_folder(tmp_path, {f"store/{number}": 0 for number in range(30)})
    for number in range(29):  # two links in each of 30 folders are 2**30 ways to walk
        for name in "ab":
            (tmp_path / f"store/{number}/{name}").symlink_to(tmp_path / f"store/{number + 1}")
    (root / "cat/more").symlink_to(tmp_path / "store/0")
    with pytest.raises(DataError, match="more than 100 times"):
        open_dataset(root)


def test_missing_image_raises_when_read(tmp_path):
    source = open_dataset(make_folder(tmp_path, {"cat": 2}), "all")
    (tmp_path / "cat" / "001.png").unlink()
    os.mkfifo(tmp_path / "cat" / "002.png")
    source[0]
    with pytest.raises(DataError, match=r"file not found: .*cat/001\.png"):
        source[1]
    with pytest.raises(DataError, match="not a regular file"):  # and reading does not block
        open_dataset(tmp_path, "all")[1]


def test_split_assignment_is_stratified_and_depends_on_names_and_seed(tmp_path):
    animals = make_folder(tmp_path / "c", {"cat": 20, "dog": 10, "eel": 3, "fox": 1})
    parts = [open_dataset(animals, split) for split in ("train", "val", "test")]
    counts = [np.bincount(part.labels(), minlength=4).tolist() for part in parts]
    assert counts == [[16, 8, 1, 1], [2, 1, 1, 0], [2, 1, 1, 0]]
    assert split_counts(animals) == {"train": 26, "val": 4, "test": 4}
    assert len({sample.name for part in parts for sample in part}) == 34
    assert "80% train, 10% val, 10% test (seed 0)" in parts[0].notes[0]
    with pytest.raises(DataError, match="has no split 'dev2'; available: train, val, test"):
        open_dataset(animals, "dev2")
    with pytest.raises(ConfigError, match="sum is below 1"):
        Splits(val=0.5, test=0.5)
    make_folder(tmp_path / "a", {"cat": 30, "dog": 30})  # names and seed decide
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    vals = []
    for folder, seed in (("a", 0), ("b", 0), ("a", 1)):
        part = open_dataset(tmp_path / folder, "val", splits=Splits(val=0.2, test=0, seed=seed))
        vals.append([part.name(i) for i in range(len(part))])
    assert vals[0] == vals[1] != vals[2]
    assert len(vals[0]) == 12


@settings(deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=200),
    val=st.floats(0, 0.45),
    test=st.floats(0, 0.45),
    seed=st.integers(0, 2**32),
)
def test_splits_are_stratified_and_stable(labels, val, test, seed):
    labels = np.array([*labels, 0], np.int32)
    names, splits = [f"{i}.jpg" for i in range(len(labels))], Splits(val=val, test=test, seed=seed)
    places = assign_splits(names, labels, splits)
    for label in np.unique(labels):
        train, held, test_count = np.bincount(places[labels == label], minlength=3)
        count = train + held + test_count
        assert train >= 1
        assert abs(held - count * val) <= 1
        assert abs(test_count - count * test) <= 1
        assert count < 3 or held >= (val > 0)
    moved = assign_splits(names[:-1], labels[:-1], splits) != places[:-1]  # by adding the last one
    assert moved.sum() <= 3
    assert set(labels[:-1][moved].tolist()) <= {0}


def test_multi_label_images_are_split_by_their_rarest_class():
    ends = np.concatenate([np.arange(2, 61, 2), np.arange(61, 131)])
    labels = datasets.LabelSets(np.array([0, 1] * 30 + [0] * 70, np.int32), ends)
    places = assign_splits([str(i) for i in range(100)], labels, Splits())
    assert np.bincount(places[:30]).tolist() == [24, 3, 3]
    assert [labels.take(np.array([29, 30]))[i] for i in (0, 1, -1)] == [(0, 1), (0,), (0,)]


def test_missing_splits_are_held_out_from_train(tmp_path):
    make_folder(tmp_path, {"train/cat": 20, "train/dog": 20, "test/cat": 5, "test/dog": 5})
    with pytest.raises(DataError, match=r"has no split 'val'; available: train, test$"):
        open_dataset(tmp_path, "val")
    assert split_counts(tmp_path) == {"train": 40, "test": 10}
    cut = Splits(val=0.25, test=0.5)
    assert split_counts(tmp_path, splits=cut) == {"train": 30, "val": 10, "test": 10}
    parts = [open_dataset(tmp_path, split, splits=cut) for split in ("train", "val", "test")]
    assert len({sample.name for part in parts for sample in part}) == 50
    assert all(sample.name.startswith("test/") for sample in parts[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "nowhere", "Dataset not found: "),
        (lambda p: p, "is empty; expected a folder with one subfolder"),
        (lambda p: make_folder(p, {"a": 0}), "contains no images; expected"),
        (lambda p: make_folder(p, {".": 2}), "contains 2 images but no class folders"),
        (lambda p: make_folder(p, {"a": 1}) / "a" / "000.png", "is a single image"),
        (lambda p: "builtin:sign-digit", "did you mean 'sign-digits'?"),
        (lambda p: p / "*.tar", "no .tar file matches"),
        (lambda p: p / "missing.tar", "file not found: "),
        (lambda p: (p / "x.zip").write_bytes(b"") or p / "x.zip", "unpack it first"),
        (lambda p: (p / "x.doc").write_bytes(b"") or p / "x.doc", "not a supported dataset format"),
        (lambda p: "no-such://x/y.tar", "Protocol not known: no-such"),
        (lambda p: f"{'x' * 5000}", "Dataset not found: "),
        (lambda p: "nul\0", "Dataset not found: "),
    ],
)
def test_invalid_datasets_give_one_line_errors(tmp_path, make, message):
    with pytest.raises(VitrailError) as error:
        open_dataset(make(tmp_path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_fingerprint(tmp_path):
    def digest(name, split="all"):
        return fingerprint(open_dataset(tmp_path / name, split))

    folder = make_folder(tmp_path / "a", {"cat": 3, "dog": 3})
    copy = shutil.copytree(folder, tmp_path / "b")
    os.utime(copy / "cat" / "000.png", (0, 0))
    assert digest("a") == digest("b") != digest("a", "train")
    (copy / "cat" / "000.png").write_bytes(png(0) + b"more")
    assert digest("a") != digest("b")
    (copy / "cat" / "000.png").unlink()
    shutil.copy(folder / "cat" / "000.png", copy / "dog" / "003.png")
    assert digest("a") != digest("b")
    images, labels = pixels(40), np.arange(40) % 4
    np.savez(tmp_path / "c.npz", images=images, labels=labels)
    np.savez_compressed(tmp_path / "d.npz", images=images, labels=labels)
    images[0] += 1
    np.savez(tmp_path / "e.npz", images=images, labels=labels)
    assert digest("c.npz") == digest("d.npz") != digest("e.npz")


def test_builtin_dataset_opens_without_torch_and_pillow():
    assert split_counts("builtin:sign-digits") == {"train": 1653, "test": 409}
    source = open_dataset("builtin:sign-digits", "test")
    assert source.classes == tuple("0123456789")
    assert source[0].data.startswith(b"\xff\xd8")
    assert source.name(0) == "test/0/IMG_1158.JPG"
    assert fingerprint(open_dataset("builtin:sign-digits")) == "ebea408a87bd788aefdf8f450febcb1c"
    code = (
        "import sys; from vitrail.data.datasets import open_dataset\n"
        "open_dataset('builtin:sign-digits')[0]\n"
        "assert 'torch' not in sys.modules and 'PIL' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_datasets_are_picklable_and_thread_safe(tmp_path):
    make_folder(tmp_path, {"cat": 5, "dog": 5})
    np.savez(tmp_path / "a.npz", images=pixels(10), labels=np.arange(10) % 2)
    for reference in (tmp_path, tmp_path / "a.npz", "builtin:sign-digits"):
        source = open_dataset(reference)
        first = source[0]
        again = pickle.loads(pickle.dumps(source))
        assert np.array_equal(again[0].data, first.data)
        with ThreadPoolExecutor(4) as pool:
            many = list(pool.map(again.__getitem__, [0, 1, 2, 3] * 50))
        assert all(np.array_equal(sample.data, first.data) for sample in many[::4])


def test_folders_deeper_than_the_recursion_limit(tmp_path):
    deepest = make_folder(tmp_path, {"cat": 2}) / "cat" / "/".join(["a"] * 500)
    os.makedirs(deepest)
    (deepest / "1.png").write_bytes(png(1))
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(400)
    try:
        assert len(open_dataset(tmp_path, "all")) == 3
    finally:
        sys.setrecursionlimit(usual)
