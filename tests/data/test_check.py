import json
import re
from itertools import combinations

import numpy as np
import pytest
from odd_images import saved
from PIL import Image
from tiny_sets import photograph

from page_reader import read_page
from vitrail.cli import main
from vitrail.cli.dataset import Check
from vitrail.cli.dataset import report as report_lines
from vitrail.data.check import NO_PROBLEMS, check_dataset, near_pairs
from vitrail.errors import DataError
from vitrail.reports.pages import write_dataset_check

pytestmark = pytest.mark.slow


def scene(seed: int, size: tuple[int, int] = (150, 120)) -> Image.Image:
    return Image.fromarray(photograph(*size[::-1], seed))


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    return saved(image, "JPEG", quality=quality)


BROKEN = {
    "train/ant/empty.jpg": (b"", "empty"),
    "train/bee/zeros.png": (bytes(500), "not"),
    "val/ant/text.jpg": (b"this is no image, it is a sentence\n" * 9, "not"),
    "train/cow/short.jpg": (encoded(scene(900))[:1500], ""),
    "val/bee/short.png": (saved(scene(901), "PNG")[:4000], ""),
    "train/cow/page.png": (b"<!doctype html><html><body>404</body></html>", "HTML"),
}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """131 files; 5 % cannot be read, some are the same, and one has two labels."""
    root = tmp_path_factory.mktemp("planted")

    def put(name: str, data: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)

    seed = 0
    for folder, count in (("train", 24), ("val", 10)):
        for label in ("ant", "bee", "cow", "dog"):
            if (folder, label) == ("val", "dog"):
                continue  # a class that val does not have
            for number in range(count if label != "dog" else 18):
                put(f"{folder}/{label}/{number:02}.jpg", encoded(scene(seed)))
                seed += 1
    for name, (data, _) in BROKEN.items():
        put(name, data)
    first = (root / "train/ant/00.jpg").read_bytes()
    put("val/ant/copy.jpg", first)  # a leak
    put("train/bee/copy.jpg", (root / "train/bee/03.jpg").read_bytes())
    put("train/cow/other.jpg", (root / "train/dog/05.jpg").read_bytes())  # two labels
    with Image.open(root / "train/bee/07.jpg") as again:
        put("val/bee/again.jpg", encoded(again, quality=50))  # a leak, nearly
    with Image.open(root / "train/cow/09.jpg") as whole:
        resized = whole.resize((141, 113), Image.Resampling.BICUBIC)
    put("train/cow/resized.jpg", encoded(resized, quality=80))
    return root


@pytest.fixture(scope="module")
def report(planted):
    return check_dataset(planted)


def names(groups):
    return {frozenset(member.name for member in found.members) for found in groups}


def test_planted_problems_are_found(report):
    assert {found.name for found in report.unreadable} == BROKEN.keys()
    for found in report.unreadable:
        assert found.split == found.name.split("/")[0]
        assert BROKEN[found.name][1] in found.reason
        assert "\n" not in found.reason
    leak = frozenset(("train/ant/00.jpg", "val/ant/copy.jpg"))
    near_leak = frozenset(("train/bee/07.jpg", "val/bee/again.jpg"))
    inside = frozenset(("train/bee/03.jpg", "train/bee/copy.jpg"))
    two_labels = frozenset(("train/dog/05.jpg", "train/cow/other.jpg"))
    resized = frozenset(("train/cow/09.jpg", "train/cow/resized.jpg"))
    assert names(report.duplicates) == {leak, inside, two_labels}
    assert names(report.near_duplicates) == {near_leak, resized}
    assert names(report.leaks) == {leak, near_leak}
    assert names(report.conflicts) == {two_labels}
    assert report.leaks[0].exact
    assert report.small + report.gray + report.blank == ()
    assert report.splits == {"train": 97, "val": 34}
    assert report.counts["dog"] == {"train": 18, "val": 0}
    assert report.counts["bee"] == {"train": 26, "val": 12}
    assert report.width == (141, 150, 150)
    assert report.kinds == {"JPEG RGB": 125}
    expected = ("more than one split", "unreadable", "more than one label", "more than once")
    expected += ("Class 'dog' without images in val",)  # the most urgent first
    assert len(report.recommendations) == len(expected)
    for phrase, sentence in zip(expected, report.recommendations, strict=True):
        assert phrase in sentence


def test_counts_of_conflicts_agree_and_empty_folders_are_noted(tmp_path, capsys):
    for folder in ("train/ant", "train/bee", "train/cow", "val/bee"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("train/ant/0.png", "val/bee/0.png", "train/ant/1.png", "train/bee/1.png"):
        scene(int(name[-5])).save(tmp_path / name)
    assert main(["check", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "2 images with more than one label" in text
    assert "Duplicates with different labels (2)" in text
    assert "folders without images: cow" in text


def test_odd_images_and_class_names(tmp_path):
    for label in ("Cat", "cat ", "dog"):
        (tmp_path / "train" / label).mkdir(parents=True)
    for number in range(100):
        label = "Cat" if number < 84 else "cat " if number < 92 else "dog"
        scene(number).save(tmp_path / "train" / label / f"{number}.png")
    scene(200).convert("L").save(tmp_path / "train/dog/gray.png")
    scene(201, (30, 24)).save(tmp_path / "train/dog/small.png")
    Image.new("RGB", (150, 120), (9, 90, 200)).save(tmp_path / "train/dog/blank.png")
    report = check_dataset(tmp_path)
    assert [member.name for member in report.gray] == ["train/dog/gray.png"]
    assert [member.name for member in report.small] == ["train/dog/small.png"]
    assert [member.name for member in report.blank] == ["train/dog/blank.png"]
    text = " ".join(report.recommendations)
    assert "Classes 'Cat' and 'cat ' differ only in case or spaces" in text
    assert "Class 'cat ' with fewer than 10 images" in text
    assert "10 times as many images" in text
    assert len(report.recommendations) == 6


def test_single_class_cannot_be_classified(tmp_path, capsys):
    (tmp_path / "train" / "ant").mkdir(parents=True)
    for number in range(10):
        scene(number).save(tmp_path / "train" / "ant" / f"{number}.png")
    assert main(["check", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "10 images, 1 class (" in text
    assert "- One class, 'ant': classification needs two or more classes." in text


def test_arrays_with_and_without_problems(tmp_path):
    images = np.stack([np.asarray(scene(number, (40, 30))) for number in range(40)])
    np.savez(tmp_path / "set.npz", x_train=images, y_train=np.arange(40) % 2)
    report = check_dataset(tmp_path / "set.npz")
    assert report.recommendations == (NO_PROBLEMS,)
    assert report.kinds == {"array RGB": 40}
    images[19] = images[0]
    np.savez(tmp_path / "set.npz", x_train=images[:20], y_train=np.arange(20) % 2)
    report = check_dataset(tmp_path / "set.npz")
    assert [len(group.members) for group in report.duplicates] == [2]
    assert report.conflicts == report.duplicates  # 0 and 19: an even and an odd number


def test_near_pairs_equal_brute_force():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 40, np.uint64).repeat(5)
    for bit in range(9):  # up to nine bits away from each other
        flip = rng.integers(0, 2, 200).astype(np.uint64)
        hashes ^= flip << np.uint64(7 * bit)
    thumbnails = np.tile(rng.integers(0, 256, (1, 16, 16), np.uint8), (200, 1, 1))
    found = {pair[:2] for pair in near_pairs(hashes, thumbnails)}
    pairs = combinations(range(200), 2)
    expected = {(a, b) for a, b in pairs if int(hashes[a] ^ hashes[b]).bit_count() <= 7}
    assert found == expected
    assert len(expected) > 100


def test_limit_and_progress(planted):
    seen = []
    report = check_dataset(planted, limit=20, progress=lambda *counts: seen.append(counts))
    assert report.examined == 20
    assert seen[-1] == (20, 20)
    assert "Only 20 of 131 images" in report.recommendations[-1]
    assert report.counts["dog"]["train"] == 18  # counts are of all


def test_json_and_text_output(planted, report, capsys):
    Check(data=str(planted), json=True).run()
    found = json.loads(capsys.readouterr().out)
    assert {entry["name"] for entry in found["unreadable"]} == BROKEN.keys()
    assert all(entry["reason"] for entry in found["unreadable"])
    assert [len(found[name]) for name in ("duplicates", "near_duplicates", "leaks")] == [3, 2, 2]
    assert found["verdict"] == list(report.recommendations)
    assert found["leaks"][0]["members"][0]["name"] == "train/ant/00.jpg"
    with pytest.raises(DataError, match="6 unreadable files and 2 leaks"):
        Check(data=str(planted), strict=True).run()
    text = capsys.readouterr().out
    assert all(len(line) <= 80 for line in report_lines(report))
    assert "train/ant/00.jpg = val/ant/copy.jpg" in text
    assert "train/bee/07.jpg ~ val/bee/again.jpg" in text
    assert re.search(r"^dog +18 +0 +18$", text, re.MULTILINE)


def test_page_is_self_contained(report, tmp_path):
    text = write_dataset_check(report, tmp_path / "out").read_text(encoding="utf-8")
    assert "<script" not in text
    shown = " ".join(read_page(text).said)
    assert all(name in shown for name in BROKEN)
    sheets = sorted((tmp_path / "out/sheets").iterdir())
    assert [sheet.name[5:] for sheet in sheets] == ["ant.png", "bee.png", "cow.png", "dog.png"]
