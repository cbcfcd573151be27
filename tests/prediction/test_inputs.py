"""Where pictures are found: files, folders, patterns, and what comes in."""

import io
from pathlib import Path

import pytest

from vitrail.data.transforms import NamedImage
from vitrail.errors import DataError
from vitrail.prediction.inputs import find

PNG = b"\x89PNG\r\n\x1a\n rest"


@pytest.fixture
def folder(tmp_path):
    for name in ("b.jpg", "a.png", "notes.txt", "more/c.jpg", "more/.hidden.jpg"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    return tmp_path


def found(*places, coming=b""):
    stream = io.BufferedReader(io.BytesIO(coming))
    return list(find(map(str, places), lambda: stream))


def test_a_folder_means_its_pictures_and_those_of_its_folders_in_order(folder):
    assert found(folder) == [folder / "a.png", folder / "b.jpg", folder / "more/c.jpg"]


def test_a_file_is_taken_as_it_is_whatever_its_name(folder):
    assert found(folder / "notes.txt", folder / "gone.jpg") == [
        folder / "notes.txt",
        folder / "gone.jpg",
    ]


def test_a_pattern_means_what_matches_it(folder):
    assert found(folder / "*.jpg") == [folder / "b.jpg"]
    assert found(folder / "**/*.jpg") == [folder / "b.jpg", folder / "more/c.jpg"]
    assert found(folder / "m*") == [folder / "more/c.jpg"]


def test_a_file_whose_name_looks_like_a_pattern_is_a_file(folder):
    odd = folder / "a[1].jpg"
    odd.write_bytes(b"x")
    assert found(odd) == [odd]


@pytest.mark.parametrize("name", ["*.gif", "empty"])
def test_nothing_found_is_an_error_that_names_the_place(folder, name):
    (folder / "empty").mkdir()
    with pytest.raises(DataError, match=str(folder / name).replace("*", r"\*")):
        found(folder / name)


@pytest.mark.parametrize("between", [b"\n", b"\r\n", b"\0"])
def test_a_list_may_come_in(between):
    assert found("-", coming=between.join([b"a.jpg", b"with space.jpg", b""])) == [
        Path("a.jpg"),
        Path("with space.jpg"),
    ]


def test_a_picture_may_come_in():
    assert found("-", coming=PNG) == [NamedImage("standard input", PNG)]


def test_a_list_is_read_line_by_line_as_it_comes():
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            line = b"x.jpg\n" * (len(buffer) // 6 or 1)
            buffer[: len(line)] = line[: len(buffer)]
            return min(len(line), len(buffer))

    pictures = find(["-"], lambda: io.BufferedReader(Endless()))
    assert [next(pictures) for _ in range(3)] == [Path("x.jpg")] * 3


def test_nothing_may_come_in():
    assert found("-") == []
