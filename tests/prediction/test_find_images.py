import io
import re
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


def test_files_folders_and_patterns(folder):
    (folder / "a[1].jpg").write_bytes(b"x")
    for arguments, paths in {
        ("",): ["a.png", "a[1].jpg", "b.jpg", "more/c.jpg"],  # the folder, recursively
        ("notes.txt", "gone.jpg"): ["notes.txt", "gone.jpg"],  # named, so whatever they are
        ("b*",): ["b.jpg"],
        ("**/*b.jpg", "m*"): ["b.jpg", "more/c.jpg"],
        ("a[1].jpg",): ["a[1].jpg"],  # exists, so no pattern
    }.items():
        assert find(*(folder / x for x in arguments)) == [folder / path for path in paths]
    (folder / "empty").mkdir()
    for name in ("*.gif", "empty"):
        with pytest.raises(DataError, match=re.escape(str(folder / name))):
            find(folder / name)


def test_standard_input_is_an_image_paths_or_empty():
    assert find("-") == []
    assert find("-", stdin=PNG) == [NamedImage("standard input", PNG)]
    for between in (b"\n", b"\r\n", b"\0"):
        paths = find("-", stdin=between.join([b"a.jpg", b"with space.jpg", b""]))
        assert paths == [Path("a.jpg"), Path("with space.jpg")]


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
