"""Where in a .tar file the pictures are, found once by reading headers only.

The index of `NAME.tar` is kept beside it as `.NAME.tar.index.npz` where that can be written, and
believed as long as size and time of the tar are the same. POSIX.1-1988 (ustar), GNU and pax
headers are understood. A file that is cut off is told apart from a whole one.
"""

import json
import os
import re
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrail.data.array_files import BROKEN, npz_arrays
from vitrail.data.files import Disk, Storage, whole_or_absent
from vitrail.data.lists import LABEL, LISTS, labels_of
from vitrail.data.samples import Texts, is_picture
from vitrail.errors import DataError

VERSION = 1  # of the index; another is built anew
BLOCK = 512
ZEROS = bytes(BLOCK)
REGULAR = (b"0", b"\0", b"7")
WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")  # links, devices, folders, pipes
MOST_TEXT = 2**28  # bytes of a text inside a tar; a list of a million pictures has 2**26
MOST_LABEL = 2**24  # bytes of what stands beside one picture, and of a header's values
MOST_NAME = 2**16  # bytes of a member's name; systems commonly allow 4096
TEXTS = {"classes.txt", "classes.json", *(f"labels{ending}" for ending in LISTS)}
PAX_LENGTH = re.compile(rb"([0-9]{1,9}) ")
SEVERAL = "\x1f"  # stands before each of several labels


class TarMember(NamedTuple):
    """A file inside a tar: where its bytes begin, and how many there are."""

    name: str
    offset: int
    size: int


@dataclass
class TarIndex:
    """The pictures of one tar, and what is written there about them."""

    names: Texts = field(default_factory=Texts)
    offsets: array = field(default_factory=lambda: array("q"))
    sizes: array = field(default_factory=lambda: array("q"))
    labels: Texts = field(default_factory=Texts)  # from .cls or .json; empty where there is none
    first: bytearray = field(default_factory=bytearray)  # 1: the first picture of its key
    texts: dict[str, str] = field(default_factory=dict)  # labels.csv, classes.txt, classes.json
    others: int = 0  # members that are neither pictures nor about them
    damage: str = ""  # what is wrong with the file, if something is


def tar_index(path: str, storage: Storage, *, keep: bool = True) -> TarIndex:
    """The index of a tar: read from beside it, or built and, with `keep`, left there."""
    if not keep or not isinstance(storage, Disk):
        return build_index(path, storage)
    place = Path(path).with_name(f".{Path(path).name}.index.npz")
    try:
        about = os.stat(path)
    except OSError:
        return build_index(path, storage)  # which says what is wrong
    stamp = [VERSION, about.st_size, about.st_mtime_ns]
    index = read_index(place, stamp)
    if index is None:
        index = build_index(path, storage)
        if may_write(place.parent):
            with suppress(DataError):  # a full disk, for one: build it again next time
                write_index(place, index, stamp)
    return index


def may_write(folder: Path) -> bool:
    """Whether a folder is meant to be written; root could also write into the others."""
    return bool(folder.stat().st_mode & 0o222) and os.access(folder, os.W_OK)


def build_index(path: str, storage: Storage) -> TarIndex:
    """Go from header to header; nothing of the pictures is read."""
    window = Window(path, storage)
    index, group = TarIndex(), Group()
    last = ""
    try:
        for member in members(window):
            key, _, ending = split_key(member.name)
            if key != group.key:
                group.close(index)
                group = Group(key)
            last = member.name
            add_member(index, group, member, ending, window)
    except EOFError as error:
        whole = f"whole up to {last}, {len(index.names):,} pictures" if last else "none is whole"
        index.damage = f"{path} {error}: {whole}; get it again"
    group.close(index)
    return index


def add_member(
    index: TarIndex, group: "Group", member: TarMember, ending: str, window: "Window"
) -> None:
    base = member.name.rpartition("/")[2]
    if "/." in f"/{member.name}" or member.name.startswith("__MACOSX/"):
        return  # hidden
    if is_picture(base):
        index.names.append(member.name)
        index.offsets.append(member.offset)
        index.sizes.append(member.size)
        group.pictures += 1
    elif base in TEXTS:
        index.texts.setdefault(base, text_of(member, window).removeprefix("\ufeff"))
    elif ending == "cls":
        group.label = text_of(member, window, MOST_LABEL).strip()
    elif ending == "json":
        group.label = group.label or label_in_json(text_of(member, window, MOST_LABEL))
    else:
        index.others += 1


class Group:
    """Members that follow each other with one key: a picture and its label, in any order."""

    def __init__(self, key: str | None = None) -> None:
        self.key = key
        self.pictures = 0
        self.label = ""

    def close(self, index: TarIndex) -> None:
        for place in range(self.pictures):
            index.labels.append(self.label if place == 0 else "")  # others are not looked at
            index.first.append(place == 0)


def split_key(name: str) -> tuple[str, str, str]:
    """A WebDataset key ends at the first dot of the file's name: ("a/000001", ".", "jpg")."""
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    return (name, "", "") if dot < 0 else (name[:dot], ".", name[dot + 1 :].lower())


def text_of(member: TarMember, window: "Window", most: int = MOST_TEXT) -> str:
    if member.size > most:
        raise DataError(
            f"{window.path}: {member.name} has {member.size:,} bytes, and at most {most:,} are "
            "read; it is damaged, or no data set"
        )
    return window.at(member.offset, member.size).decode("utf-8", "surrogateescape")


def label_in_json(text: str) -> str:
    """The label or labels that a JSON object or value holds, as one text."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if isinstance(value, dict):
        value = next((value[key] for key in ("cls", *LABEL) if key in value), None)
    labels, several = labels_of(value) if isinstance(value, (str, int, list)) else ((), False)
    return "".join(SEVERAL + label for label in labels) or SEVERAL if several else "".join(labels)


class Window:
    """The part of a file around the last read: neighboring headers cost one read together."""

    def __init__(self, path: str, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self.size = storage.size(path)
        self.near, self.far = (2**16, 2**11) if isinstance(storage, Disk) else (2**22, 2**16)
        self.start = 0
        self.data = b""

    def at(self, position: int, size: int) -> bytes:
        """Bytes of the file; fewer where it ends."""
        inside = position - self.start
        if inside < 0 or inside + size > len(self.data):
            jump = inside - len(self.data)  # over a large picture: the next one is large too
            ahead = self.near if -self.near <= jump < self.near // 4 else self.far
            length = max(0, min(max(size, ahead), self.size - position))
            self.data = self.storage.read(self.path, position, length)
            self.start, inside = position, 0
        return self.data[inside : inside + size]


def members(window: Window) -> Iterator[TarMember]:
    """Every ordinary file of a tar that is there to its last byte; EOFError where it breaks off."""
    position, long_name, pax = 0, "", {}
    while True:
        block = window.at(position, BLOCK)
        if not window.size:
            raise DataError(f"{window.path} is empty")
        if len(block) < BLOCK:
            raise EOFError("breaks off without an end mark")
        if block == ZEROS:
            return
        if not checksum_fits(block):
            if position == 0:
                raise DataError(f"{window.path} is no .tar file, or compressed: unpack it first")
            raise EOFError("is damaged")
        kind = block[156:157]
        size = int(pax["size"]) if "size" in pax else number(block[124:136])
        name = pax.get("path") or long_name or header_name(block)
        start = position + BLOCK
        if kind in WITHOUT_DATA:
            size = 0
        if size < 0 or start + size > window.size:
            raise EOFError(f"breaks off within {name}")
        position = start + (size + BLOCK - 1) // BLOCK * BLOCK
        if kind == b"L":
            member = TarMember("a long name", start, size)
            long_name = text_of(member, window, MOST_NAME).rstrip("\0")
        elif kind == b"x":
            pax = pax_values(text_of(TarMember("a pax header", start, size), window, MOST_LABEL))
        else:
            if kind in REGULAR and not name.endswith("/"):
                yield TarMember(name.removeprefix("./"), start, size)
            if kind not in (b"K", b"g"):
                long_name, pax = "", {}


def checksum_fits(block: bytes) -> bool:
    try:
        stated = int(block[148:156].strip(b" \0") or b"0", 8)
    except ValueError:
        return False
    return sum(block) - sum(block[148:156]) + 8 * 32 == stated


def number(digits: bytes) -> int:
    """A size: octal, or from 8 GiB on binary with the first bit set."""
    if digits[0] & 0x80:
        return int.from_bytes(digits[1:], "big")
    try:
        return int(digits.strip(b" \0") or b"0", 8)
    except ValueError:
        return -1


def header_name(block: bytes) -> str:
    name = block[:100].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0" and block[345]:
        name = block[345:500].split(b"\0", 1)[0] + b"/" + name
    return name.decode("utf-8", "surrogateescape")


def pax_values(text: str) -> dict[str, str]:
    """Path and size of `30 path=some/long/name` per line, the length of the line in bytes first."""
    values, data, place = {}, text.encode("utf-8", "surrogateescape"), 0
    while length := PAX_LENGTH.match(data, place):
        end = place + int(length[1])
        if end < length.end():
            break
        key, _, value = data[length.end() : end - 1].partition(b"=")
        if key in (b"path", b"size"):
            values[key.decode()] = value.decode("utf-8", "surrogateescape")
        place = end
    if not re.fullmatch("[0-9]{1,19}", values.get("size", "0")):
        del values["size"]
    return values


def write_index(place: Path, index: TarIndex, stamp: list[int]) -> None:
    about = json.dumps({"texts": index.texts, "others": index.others, "damage": index.damage})
    with whole_or_absent(place) as temporary, temporary.open("wb") as file:
        np.savez(
            file,
            stamp=np.array(stamp, np.int64),
            names=np.frombuffer(index.names.bytes, np.uint8),
            name_ends=np.frombuffer(index.names.ends, np.int64),
            offsets=np.frombuffer(index.offsets, np.int64),
            sizes=np.frombuffer(index.sizes, np.int64),
            labels=np.frombuffer(index.labels.bytes, np.uint8),
            label_ends=np.frombuffer(index.labels.ends, np.int64),
            first=np.frombuffer(index.first, np.uint8),
            about=np.frombuffer(about.encode(), np.uint8),
        )


def read_index(place: Path, stamp: list[int]) -> TarIndex | None:
    """What `write_index` wrote about this very file; None if it is not there, of another, or such
    that it cannot be true: it may have come with the tar, from anybody."""
    try:
        if not place.is_file():
            return None
        kept = {name: found.values for name, found in npz_arrays(place).items()}
        if kept["stamp"].tolist() != stamp:
            return None
        about = json.loads(kept["about"].tobytes())
        index = TarIndex(
            offsets=array("q", kept["offsets"].tobytes()),
            sizes=array("q", kept["sizes"].tobytes()),
            first=bytearray(kept["first"].tobytes()),
            texts={str(name): str(text) for name, text in about["texts"].items()},
            others=int(about["others"]),
            damage=str(about["damage"]),
        )
        index.names.bytes = bytearray(kept["names"].tobytes())
        index.names.ends = array("q", kept["name_ends"].tobytes())
        index.labels.bytes = bytearray(kept["labels"].tobytes())
        index.labels.ends = array("q", kept["label_ends"].tobytes())
    except (*BROKEN, DataError):
        return None
    return index if is_possible(index, size=stamp[1]) else None


def is_possible(index: TarIndex, size: int) -> bool:
    """Whether an index can be of a tar of `size` bytes."""
    offsets, sizes = np.frombuffer(index.offsets, np.int64), np.frombuffer(index.sizes, np.int64)
    columns = (index.sizes, index.first, index.names, index.labels)
    if any(len(column) != len(offsets) for column in columns):
        return False
    for texts in (index.names, index.labels):
        ends = np.frombuffer(texts.ends, np.int64)
        if len(ends) and (ends[0] < 0 or (np.diff(ends) < 0).any() or ends[-1] > len(texts.bytes)):
            return False
    return not len(offsets) or bool(
        offsets.min() >= 0 and sizes.min() >= 0 and (sizes <= size - offsets).all()
    )
