"""Image arguments: files, folders, patterns, and standard input."""

import io
from pathlib import Path

import pytest

from vitrail.data.transforms import NamedImage
from vitrail.errors import DataError
from vitrail.prediction.predictor import find_images

PNG = b"\x89PNG\r\n\x1a\n rest"


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jpg", "a.png", "notes.txt", "more/c.jpg", "more/.hidden.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def find(*places, stdin=b""):
    stream = io.BufferedReader(io.BytesIO(stdin))
    return list(find_images(map(str, places), lambda: stream))


def test_folder_is_searched_recursively_in_order(folder):
    assert find(folder) == [folder / "a.png", folder / "b.jpg", folder / "more/c.jpg"]


def test_named_file_is_yielded_whatever_its_name(folder):
    assert find(folder / "notes.txt", folder / "gone.jpg") == [
        folder / "notes.txt",
        folder / "gone.jpg",
    ]


def test_pattern_yields_matches(folder):
    assert find(folder / "*.jpg") == [folder / "b.jpg"]
    assert find(folder / "**/*.jpg") == [folder / "b.jpg", folder / "more/c.jpg"]
    assert find(folder / "m*") == [folder / "more/c.jpg"]


def test_existing_file_is_not_treated_as_a_pattern(folder):
    odd = folder / "a[1].jpg"
    odd.write_bytes(b"x")
    assert find(odd) == [odd]


@pytest.mark.parametrize("name", ["*.gif", "empty"])
def test_no_match_is_an_error_with_the_path(folder, name):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=str(folder / name).replace("*", r"\*")):
        find(folder / name)


@pytest.mark.parametrize("between", [b"\n", b"\r\n", b"\0"])
def test_paths_from_standard_input(between):
    assert find("-", stdin=between.join([b"a.jpg", b"with space.jpg", b""])) == [
        Path("a.jpg"),
        Path("with space.jpg"),
    ]


def test_image_from_standard_input():
    assert find("-", stdin=PNG) == [NamedImage("standard input", PNG)]


def test_standard_input_is_read_lazily():
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            line = b"x.jpg\n" * (len(buffer) // 6 or 1)
            buffer[: len(line)] = line[: len(buffer)]
            return min(len(line), len(buffer))

    images = find_images(["-"], lambda: io.BufferedReader(Endless()))
    assert [next(images) for _ in range(3)] == [Path("x.jpg")] * 3


def test_standard_input_may_be_empty():
    assert find("-") == []
