"""Inputs that grow: valid files whose parts are repeated, padded, spliced and misdeclared.

A `Family` makes inputs of one shape: `make(n)` has about n times as much of one thing. The named
families in `named()` are attacks known from other decoders and parsers; `random_family` takes a
valid seed apart and grows whatever it finds there.
"""

import functools
import gzip
import io
import json
import math
import random
import re
import struct
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "tests" / "data"))

import hostile_images
from odd_images import RGB, chunk, odd_images, saved

LARGE = 4096  # pixels a side: above the limit that the image target sets
INTERESTING = (0, 1, 2, 16, 255, 256, 1024, 2048, 8192, 32_767, 65_535, 2**20, 2**31 - 1, 2**32 - 1)
TOKENS = (
    b"\0", b"\xff", b"a", b" ", b"\r\n", b"\n", b",", b";", b"[", b'{"a":', b'"', b"\\", b"%20",
    b"&a=", b"a=b;", b"\xff\xd8", b"\xff\xc0\0\x0b\x08\0\x20\0\x40\1\1\x11\0", b"\0\2\xff\xff",
    b"\0\0", b"\xff\0", b"!\xfe\1a\0", b"0\r\n", b"1\r\na\r\n", b"a: b\r\n",
    b"GET / HTTP/1.1\r\n\r\n", b"--b\r\n", b"\0" * 512,
)  # fmt: skip


Make = Callable[[int], bytes]


class Family(NamedTuple):
    """Inputs of one shape for one target; `make(n)` grows with n, up to `most`."""

    target: str
    name: str
    make: Make
    most: int = 2**20


# Files taken apart and put together


def split_chunks(
    data: bytes, at: int, length: slice, extra: int, order: Literal["big", "little"] = "big"
) -> list[bytes]:
    """Parts that state their length, after a head of `at` bytes."""
    parts = [data[:at]]
    while at + 8 <= len(data):
        size = int.from_bytes(data[at:][length], order) + extra
        parts.append(data[at : at + max(8, size)])
        at += max(8, size + size % 2 * (order == "little"))
    return parts


def split_jpeg(data: bytes) -> list[bytes]:
    """Segments and scans."""
    at = data.index(b"\xff\xda")
    head = split_chunks(data[:at], 2, slice(2, 4), 2)
    scans = data[at:-2].replace(b"\xff\xda", b"\0SPLIT\xff\xda").split(b"\0SPLIT")
    return [*head, *filter(None, scans), data[-2:]]


def join_jpeg(parts: Sequence[bytes]) -> bytes:
    """Segments that grew get their length, as far as 16 bits go."""
    fixed = []
    for part in parts:
        if part[:1] == b"\xff" and len(part) > 4 and part[1] not in (0xD8, 0xDA):
            part = part[:2] + min(len(part) - 2, 65_535).to_bytes(2) + part[4:65_537]
        fixed.append(part)
    return b"".join(fixed)


def join_png(parts: Sequence[bytes]) -> bytes:
    return parts[0] + b"".join(chunk(part[4:8], part[8:-4]) for part in parts[1:])


def join_riff(parts: Sequence[bytes]) -> bytes:
    chunks = [p[:4] + struct.pack("<L", len(p) - 8) + p[8:] + bytes(len(p) % 2) for p in parts[1:]]
    return hostile_images.riff(b"".join(chunks))


def split_gif(data: bytes) -> list[bytes]:
    at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 128 else 0)
    parts = [data[:at]]
    while at < len(data) and data[at] in b"!,":
        start = at
        if data[at] == 0x21:
            at += 2
        else:
            at += 11 + (3 << (data[at + 9] & 7) + 1 if data[at + 9] & 128 else 0)
        while data[at]:
            at += data[at] + 1
        at += 1
        parts.append(data[start:at])
    return [*parts, data[at:]]


CONTAINERS = {b"meta": 4, b"iprp": 0, b"ipco": 0, b"iinf": 6, b"moov": 0, b"trak": 0, b"iref": 4}


def walk_boxes(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An AVIF with every box changed, the inner ones first, with sizes put right."""
    out = []
    for part in split_chunks(data, 0, slice(0, 4), 0)[1:]:
        kind = part[4:8]
        if kind in CONTAINERS:
            room = 8 + CONTAINERS[kind]
            part = box(kind, part[8:room] + walk_boxes(part[room:], change))
        out.append(change(part))
    return b"".join(out)


def box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L", 8 + len(content)) + kind + content


def grow_box(data: bytes, rng: random.Random, change: Callable[[bytes, int], bytes]) -> Make:
    """An AVIF with one box replaced, and the offset of its pixels put right."""
    kinds: list[bytes] = []
    walk_boxes(data, lambda part: kinds.append(part[4:8]) or part)
    wanted = rng.randrange(len(kinds))

    def make(n: int) -> bytes:
        number = iter(range(len(kinds)))
        grown = walk_boxes(data, lambda part: change(part, n) if next(number) == wanted else part)
        was, now = data.find(b"mdat") + 4, grown.rfind(b"mdat") + 4
        return grown.replace(struct.pack(">L", was), struct.pack(">L", now), 1)

    return make


def split_tar(data: bytes) -> list[bytes]:
    parts, at = [], 0
    while at + 512 <= len(data) and data[at]:
        size = int(data[at + 124 : at + 135].strip(b" \0") or b"0", 8)
        end = at + 512 + -(-size // 512) * 512
        parts.append(data[at:end])
        at = end
    return [*parts, data[at:]]


def split_text(data: bytes) -> list[bytes]:
    return [part for part in re.split(rb"(\r\n|[,\n;|&=: {}\[\]\"/?])", data) if part]


def split_bytes(data: bytes) -> list[bytes]:
    """Pieces of growing size: headers are where structure is."""
    cuts, at = [0], 0
    while at < len(data):
        at += max(4, at // 4)
        cuts.append(min(at, len(data)))
    return [data[a:b] for a, b in pairwise(cuts)]


Split, Join = Callable[[bytes], list[bytes]], Callable[[Sequence[bytes]], bytes]
CODECS: dict[bytes, tuple[Split, Join]] = {
    b"\xff\xd8\xff": (split_jpeg, join_jpeg),
    b"\x89PNG": (lambda data: split_chunks(data, 8, slice(0, 4), 12), join_png),
    b"RIFF": (lambda data: split_chunks(data, 12, slice(4, 8), 8, "little"), join_riff),
    b"GIF8": (split_gif, b"".join),
}


def codec(target: str, data: bytes) -> tuple[Split, Join]:
    if target in ("csv", "jsonl", "config", "http", "http-drip", "form", "server"):
        return split_text, b"".join
    if target == "tar":
        return split_tar, b"".join
    found = (pair for mark, pair in CODECS.items() if data.startswith(mark))
    return next(found, (split_bytes, b"".join))


# Seeds


@functools.cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Valid inputs of a target; the first is the smallest that passes."""
    return tuple(SEEDS[target]())


def image_seeds() -> list[bytes]:
    found = [odd.data for odd in odd_images().values() if len(odd.data) < 20_000]
    flat = Image.new("RGB", (LARGE, LARGE))
    found += [saved(flat, format) for format in ("JPEG", "PNG", "GIF")]
    found.append(saved(flat, "AVIF", speed=10))
    found.append(saved(flat, "WebP", lossless=True, method=0))
    found.append(saved(flat, "TIFF", compression="tiff_lzw"))
    medium = Image.new("RGB", (1024, 1024))
    found.append(saved(medium, "JPEG", progressive=True))
    return found


def tar_of(*members: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def tar_seeds() -> list[bytes]:
    jpeg = saved(RGB, "JPEG")
    return [
        tar_of(
            ("0.jpg", jpeg), ("0.cls", b"1"), ("1.jpg", jpeg), ("1.json", b'{"label": ["a", "b"]}')
        ),
        tar_of(("labels.csv", b"file,class\na/1.jpg,a\n"), ("a/1.jpg", jpeg)),
        tar_of(("train/a/1.jpg", jpeg), ("val/b/2.jpg", jpeg), ("classes.txt", b"a\nb\n")),
        tar_of((f"a/{'x' * 200}é.jpg", jpeg), ("b/1.jpg", jpeg)),
    ]


def npz_of(*, compressed: bool = False, **arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, **arrays)
    return out.getvalue()


def array_seeds() -> list[bytes]:
    arrays = {"x_train": np.zeros((2, 4, 4), np.uint8), "y_train": np.arange(2)}
    names = {"class_names": np.array(["a", "b"])}
    return [npz_of(**arrays), npz_of(compressed=True, **arrays, **names)]


def npy_of(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def weights(name: str) -> list[bytes]:
    """A tiny ViT as a file."""
    import vitrail

    own = name == "config.json"
    shape = {} if own or name.endswith(".npz") else {"width": 64, "heads": 1, "numerics": "timm"}
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, **shape)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("bundle" if own else name)
        vitrail.save(model, path, "timm" if shape else "bundle" if own else "google")
        return [(path / name if own else path).read_bytes()]


def request(path: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def part(name: str = "pictures") -> bytes:
    line = f'Content-Disposition: form-data; name="{name}"; filename="a.jpg"'
    return (
        b"--b\r\n" + line.encode() + b"\r\nContent-Type: image/jpeg\r\n\r\n" + b"x" * 40 + b"\r\n"
    )


FORM = "multipart/form-data; boundary=b"
CHUNKED = (
    b"POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4\r\nabcd\r\n0\r\nTrailer: b\r\n\r\n"
)
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def http_seeds() -> list[bytes]:
    jpeg, body = saved(RGB, "JPEG"), part() + b"--b--\r\n"
    return [
        GET,
        GET + b"GET /model?model=tiny HTTP/1.1\r\nHost: localhost\r\nCookie: a=b; c=d\r\n\r\n",
        request("/predict?top=2&threshold=0.5", jpeg, "Content-Type: image/jpeg"),
        request("/features", body, f"Content-Type: {FORM}", "Expect: 100-continue"),
        CHUNKED,
    ]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "image": image_seeds,
    "tar": tar_seeds,
    "csv": lambda: [
        b"file,class,split\na.jpg,a,train\nb.jpg,b,val\n",
        b"image;labels\na.jpg;a|b\n",
    ],
    "jsonl": lambda: [
        b'{"file": "a.jpg", "labels": ["a", "b"]}\n{"file": "b.jpg", "labels": []}\n'
    ],
    "npz": array_seeds,
    "npy": lambda: [npy_of(np.zeros((2, 4, 4), np.uint8))],
    "idx": lambda: [gzip.compress(struct.pack(">LLLL", 0x803, 2, 4, 4) + bytes(32))],
    "form": lambda: [FORM.encode() + b"\n" + part() + part("other") + b"--b--\r\n"],
    "http": http_seeds,
    "http-drip": http_seeds,
    "server": http_seeds,
    "weights-npz": lambda: weights("model.npz"),
    "safetensors": lambda: weights("model.safetensors"),
    "torch": lambda: weights("model.pth"),
    "config": lambda: weights("config.json"),
}


# Growth of whatever a seed holds


def random_family(target: str, rng: random.Random) -> Family:
    """One way to grow one seed."""
    number = rng.randrange(len(seeds(target)))
    data = seeds(target)[number]
    steps = []
    if rng.random() < 0.4:
        data = with_numbers(data, rng)
        steps.append("numbers")
    operators = [repeat_part, pad_part, insert_token, splice_part]
    if data[4:8] == b"ftyp":
        operators = [repeat_box, repeat_box, pad_box, insert_token]
    if data[:4] in (b"II*\0", b"MM\0*"):
        operators = [repeat_entry, change_entries, change_entries, insert_token]
    if target in ("jsonl", "config"):
        operators.append(nest)
    operator = rng.choice(operators)
    try:
        make = operator(target, data, rng)
        make(2)
    except (ValueError, IndexError, OverflowError, struct.error):  # too damaged to be taken apart
        operator = insert_token
        make = operator(target, data, rng)
    name = "+".join([*steps, operator.__name__])
    return Family(target, f"{target} seed {number} {name}", make)


def with_numbers(data: bytes, rng: random.Random) -> bytes:
    """Overwrite fields near the front; sides that the file states are favorites."""
    buffer = bytearray(data)
    sides = [side for side in (32, 64, 1024, LARGE) if rng.random() < 0.7]
    for _ in range(rng.randint(1, 3)):
        code = rng.choice(["<H", ">H", "<L", ">L", "B"])
        size, top = struct.calcsize(code), 2 ** (8 * struct.calcsize(code))
        number = struct.pack(code, rng.choice(INTERESTING) % top)
        side = struct.pack(code, rng.choice(sides or [1]) % top)
        offsets = [m.start() for m in re.finditer(re.escape(side), bytes(buffer[:2000]))]
        offset = (
            rng.choice(offsets) if offsets and size > 1 else rng.randrange(min(len(buffer), 500))
        )
        buffer[offset : offset + size] = number
    return bytes(buffer)


def repeat_part(target: str, data: bytes, rng: random.Random) -> Make:
    split, join = codec(target, data)
    parts = split(data)
    start = rng.randrange(len(parts))
    end = start + rng.choice([1, 1, 2, 4, 12])
    return lambda n: join([*parts[:start], *parts[start:end] * n, *parts[end:]])


def pad_part(target: str, data: bytes, rng: random.Random) -> Make:
    split, join = codec(target, data)
    parts, token = split(data), rng.choice(TOKENS)
    place = rng.randrange(len(parts))
    return lambda n: join([*parts[:place], parts[place] + token * n, *parts[place + 1 :]])


def insert_token(target: str, data: bytes, rng: random.Random) -> Make:
    token, place = rng.choice(TOKENS), rng.randrange(len(data) + 1)
    return lambda n: data[:place] + token * n + data[place:]


def splice_part(target: str, data: bytes, rng: random.Random) -> Make:
    """Parts of another seed of the same kind."""
    split, join = codec(target, data)
    others = [seed for seed in seeds(target) if seed[:3] == data[:3]] or [data]
    parts, foreign = split(data), rng.choice(split(rng.choice(others)))
    place = rng.randrange(1, len(parts) + 1)
    return lambda n: join([*parts[:place], *[foreign] * n, *parts[place:]])


def repeat_box(target: str, data: bytes, rng: random.Random) -> Make:
    return grow_box(data, rng, lambda part, n: part * n)


def pad_box(target: str, data: bytes, rng: random.Random) -> Make:
    token = rng.choice(TOKENS)
    return grow_box(data, rng, lambda part, n: box(part[4:8], part[8:] + token * n))


def entries_of(data: bytes) -> tuple[str, list[tuple[int, int, int, int]]]:
    order = "<" if data[:2] == b"II" else ">"
    (start,) = struct.unpack_from(order + "L", data, 4)
    (count,) = struct.unpack_from(order + "H", data, start)
    code = order + "HHLL"
    return order, [struct.unpack_from(code, data, start + 2 + 12 * i) for i in range(count)]


def with_entries(data: bytes, order: str, entries: Sequence[Sequence[int]]) -> bytes:
    """The TIFF with another directory, at its end."""
    entries = sorted(entries)[:65_535]
    table = b"".join(struct.pack(order + "HHLL", *entry) for entry in entries)
    start = data[:4] + struct.pack(order + "L", len(data))
    return start + data[8:] + struct.pack(order + "H", len(entries)) + table + bytes(4)


def repeat_entry(target: str, data: bytes, rng: random.Random) -> Make:
    order, entries = entries_of(data)
    chosen = rng.choice(entries)
    return lambda n: with_entries(data, order, [*entries, *[chosen] * n])


def change_entries(target: str, data: bytes, rng: random.Random) -> Make:
    """Other values, counts and types, and tags that the file did not have."""
    order, entries = entries_of(data)
    found = {entry[0]: list(entry) for entry in entries}
    for _ in range(rng.randint(1, 3)):
        tag = rng.choice([*found, 258, 259, 277, 278, 317, 320, 322, 323, 324, 325, 347])
        was = found.setdefault(tag, [tag, 4, 1, 0])
        was[rng.choice([2, 3, 3, 3])] = rng.choice(INTERESTING)
    if 322 in found or 323 in found:  # tiles need their places
        for old, new in ((273, 324), (279, 325)):
            found.setdefault(new, [new, *found.get(old, [0, 4, 1, 8])[1:]])
    return lambda n: with_entries(data + b"\0" * n, order, list(found.values()))


def nest(target: str, data: bytes, rng: random.Random) -> Make:
    """One value wrapped in many lists or objects."""
    values = [m.span() for m in re.finditer(rb'"[^"]*"|\d+', data)]
    start, end = rng.choice(values)
    left, right = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return lambda n: data[:start] + left * n + data[start:end] + right * n + data[end:]


# Named attacks


def named() -> dict[str, Family]:
    """Structured attacks by name."""
    found = [*archive_families(), *text_families(), *http_families()]
    images = hostile_images.families()
    found += [Family("image", name, make, n) for name, (make, n) in images.items()]
    return {family.name: family for family in found}


def tar_member(name: bytes, kind: bytes, content: bytes) -> bytes:
    header = bytearray(512)
    header[: len(name)] = name
    header[100:108], header[124:136] = b"0000644\0", b"%011o\0" % len(content)
    header[156:157], header[257:265] = kind, b"ustar\x0000"
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header) + content + bytes(-len(content) % 512)


def zipped(members: Sequence[tuple[str, bytes]], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members:
            archive.writestr(name, content)
    return out.getvalue()


def npy_header(header: bytes) -> bytes:
    return b"\x93NUMPY\2\0" + struct.pack("<L", len(header)) + header


def zeros(start: bytes, megabytes: int, bits: int) -> tuple[bytes, int]:
    """`start` and so many megabytes of zeros, deflated, with their CRC; `bits` as in zlib."""
    packer, million = zlib.compressobj(9, zlib.DEFLATED, bits), bytes(2**20)
    packed = packer.compress(start) + packer.flush(zlib.Z_FULL_FLUSH)
    block = packer.compress(million) + packer.flush(zlib.Z_FULL_FLUSH)
    check = functools.reduce(
        lambda crc, _: zlib.crc32(million, crc), range(megabytes), zlib.crc32(start)
    )
    return packed + block * megabytes + packer.flush(), check


def bomb(n: int) -> bytes:
    """An .npz of n megabytes of zeros, written by hand: zipfile would take seconds."""
    labels = npz_of(y_train=np.zeros(n, np.int64))
    header = npy_of(np.zeros((n, 0, 1024), np.uint8)).replace(b"(%d, 0," % n, b"(%d, 1024," % n)
    header = header.replace(b"   \n", b"\n")  # as long as before
    packed, check = zeros(header, n, -15)
    sizes, name = (check, len(packed), len(header) + n * 2**20), b"x_train.npy"
    local = struct.pack("<4s5H3L2H", b"PK\3\4", 20, 0, 8, 0, 33, *sizes, len(name), 0)
    local += name + packed
    entry = struct.pack("<4s6H3L", b"PK\1\2", 20, 20, 0, 8, 0, 33, *sizes)
    entry += struct.pack("<5H2L", len(name), 0, 0, 0, 0, 0, 0) + name
    start = labels.index(b"PK\1\2")
    end = bytearray(labels[labels.rindex(b"PK\5\6") :])
    moved = bytearray(labels[start : -len(end)])  # the entry of a member that has moved
    struct.pack_into("<L", moved, 42, struct.unpack_from("<L", moved, 42)[0] + len(local))
    struct.pack_into("<HHLL", end, 8, 2, 2, len(entry + moved), len(local) + start)
    return local + labels[:start] + entry + bytes(moved + end)


def label_bomb(n: int) -> bytes:
    images, labels = np.zeros((2**17 * n, 1, 1), np.uint8), np.zeros(2**17 * n, np.int64)
    return npz_of(compressed=True, x_train=images, y_train=labels)


def overlapping(n: int) -> bytes:
    """A zip whose directory names the same member n times."""
    data = zipped([("a.npy", npy_of(np.zeros(2**16)))])
    start, end = data.index(b"PK\1\2"), data.rindex(b"PK\5\6")
    entry, last = data[start:end], bytearray(data[end:])
    struct.pack_into("<HHLL", last, 8, min(n, 65_535), min(n, 65_535), len(entry) * n, start)
    return data[:start] + b"".join(
        entry.replace(b"a.npy", b"%05d" % (i % 100_000)) for i in range(n)
    ) + bytes(last)  # fmt: skip


def idx_bomb(n: int) -> bytes:
    header = struct.pack(">LLLL", 0x803, 2, 1024 * n, 512)
    packed, check = zeros(header, n, -15)
    return gzip.compress(b"")[:10] + packed + struct.pack("<LL", check, len(header) + n * 2**20)


def archive_families() -> list[Family]:
    jpeg = saved(RGB, "JPEG")
    record = b"12 path=a/b\n"
    tail = tar_member(b"a/1.jpg", b"0", jpeg) + bytes(1024)
    arrays = array_seeds()[0]
    deep = "[" * 50 + "]" * 50

    return [
        Family("tar", "pax records", lambda n: tar_member(b"x", b"x", record * n) + tail),
        Family("tar", "pax headers", lambda n: tar_member(b"x", b"x", record) * n + tail),
        Family("tar", "pax long value",
               lambda n: tar_member(b"x", b"x", b"%d path=%s\n" % (n + 14, b"a" * n)) + tail),
        Family("tar", "long names", lambda n: tar_member(b"x", b"L", b"a/" * 50) * n + tail),
        Family("tar", "members of one key", lambda n: tar_member(b"a/1.jpg", b"0", b"") * n + tail),
        Family("tar", "classes", lambda n: b"".join(
            tar_member(b"c%d/1.jpg" % i, b"0", b"") for i in range(n)) + tail),
        Family("tar", "list inside", lambda n: tar_member(
            b"labels.csv", b"0", b"file,class\n" + b"a/1.jpg,a\n" * n) + tail),
        Family("tar", "json labels", lambda n: tar_member(
            b"a/1.json", b"0", json.dumps({"label": [str(i) for i in range(n)]}).encode()) + tail),
        Family("tar", "large class number", lambda n: tar_of(
            ("1.jpg", jpeg), ("1.cls", b"%d" % min(n, 999_999))), 999_999),
        Family("npz", "npz bomb", bomb, 512),
        Family("npz", "npz label bomb", label_bomb, 64),
        Family("npz", "npz members", lambda n: zipped(
            [(f"{i}.npy", npy_of(np.zeros(0))) for i in range(n)], zipfile.ZIP_STORED)),
        Family("npz", "npz overlapping members", overlapping),
        Family("npz", "npz class names", lambda n: npz_of(
            compressed=True, x_train=np.zeros((1, 1, 1), np.uint8), y_train=np.zeros(1, np.int64),
            class_names=np.zeros(2**16 * n, "U4")), 64),
        Family("npz", "npz garbage before", lambda n: bytes(n) + arrays),
        Family("npy", "npy header", lambda n:
            npy_header(b"{'descr': '|u1', 'a': '" + b"a" * n + b"'}")),
        Family("npy", "npy nested header", lambda n: npy_header(b"[" * n + b"]" * n)),
        Family("npy", "npy long shape", lambda n: npy_header(
            b"{'descr': '|u1', 'fortran_order': False, 'shape': (" + b"1," * n + b")}")),
        Family("npy", "npy zero-size items", lambda n: npy_header(
            b"{'descr': '|V0', 'fortran_order': False, 'shape': (2, %d, 4)}" % 10**6) + bytes(n)),
        Family("idx", "idx bomb", idx_bomb, 512),
        Family("idx", "idx members", lambda n: gzip.compress(b"") * n + idx_bomb(1)),
        Family("weights-npz", "weights bomb", lambda n: npz_of(
            compressed=True, **{"cls": np.zeros(2**18 * n, np.float32)}), 64),
        Family("weights-npz", "weights members", lambda n: zipped(
            [(f"{i}.npy", npy_of(np.zeros(0))) for i in range(n)], zipfile.ZIP_STORED)),
        Family("weights-npz", "weights blocks", lambda n: zipped(
            [(f"Transformer/encoderblock_{i}/LayerNorm_0/bias.npy", npy_of(np.zeros(1, "f4")))
             for i in range(n)], zipfile.ZIP_STORED)),
        Family("safetensors", "safetensors tensors", lambda n: safetensors(
            {f"blocks.{i}.norm1.weight": ("F32", [0]) for i in range(n)})),
        Family("safetensors", "safetensors long shape", lambda n: safetensors(
            {"a": ("F32", [0] + [1] * n)})),
        Family("safetensors", "safetensors metadata", lambda n: safetensors(
            {"a": ("F32", [0])}, {str(i): deep for i in range(n)})),
        Family("config", "config integers", lambda n: re.sub(
            rb'("(?:depth|width|mlp_width|heads)": )\d+', rb"\g<1>%d" % (8 * n),
            seeds("config")[0]), 2**14),
        Family("config", "config classes", lambda n: json.dumps(json.loads(seeds("config")[0]) | {
            "class_names": [str(i) for i in range(n)]}).encode()),
    ]  # fmt: skip


def safetensors(tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str] | None = None):
    header: dict = {
        name: {"dtype": kind, "shape": shape, "data_offsets": [0, 0]}
        for name, (kind, shape) in tensors.items()
    }
    text = json.dumps(header | ({"__metadata__": metadata} if metadata else {})).encode()
    return struct.pack("<Q", len(text)) + text


def text_families() -> list[Family]:
    return [
        Family("csv", "csv rows", lambda n: b"file,class\n" + b"a.jpg,a\n" * n),
        Family("csv", "csv columns", lambda n: b"file,class" + b",x" * n + b"\na.jpg,a\n"),
        Family("csv", "csv short rows", lambda n: b"file,class" + b",x" * n + b"\na.jpg,a" * n),
        Family("csv", "csv labels", lambda n: b"file,class\na.jpg," + b";".join(
            b"%d" % i for i in range(n)) + b"\n"),
        Family("csv", "csv classes", lambda n: b"file,class\n" + b"".join(
            b"a.jpg,%d\n" % i for i in range(n))),
        Family("csv", "csv splits", lambda n: b"file,class,split\n" + b"".join(
            b"a.jpg,a,%d\n" % (i % 255) for i in range(n))),
        Family("csv", "csv open quote", lambda n: b'file,class\na.jpg,"' + b"a\n" * n),
        Family("csv", "csv case", lambda n: b"file,class\n" + b"".join(
            b"a.jpg,%s\n" % bytes(b"aA"[i >> k & 1] for k in range(16)) for i in range(n)), 2**16),
        Family("csv", "csv json labels", lambda n:
               b"file;labels\na.jpg;" + b"[" * n + b"]" * n + b"\n"),
        Family("jsonl", "jsonl nested", lambda n:
               b'{"file": "a", "label": ' + b"[" * n + b"]" * n + b"}"),
        Family("jsonl", "jsonl integer", lambda n: b'{"file": "a", "label": ' + b"9" * n + b"}"),
        Family("jsonl", "jsonl keys", lambda n: b'{"file": "a", "label": "a"' + b"".join(
            b', "%d": 0' % i for i in range(n)) + b"}"),
        Family("jsonl", "jsonl wide rows", lambda n: (b'{"file": "a", "labels": [' + b",".join(
            b'"%d"' % i for i in range(math.isqrt(n) + 1)) + b"]}\n") * (math.isqrt(n) + 1)),
    ]  # fmt: skip


def http_families() -> list[Family]:
    body = CHUNKED.index(b"4\r\n")
    found = []
    for target in ("http", "http-drip", "server"):
        name = target + " "
        found += [
            Family(target, name + "pipelined", lambda n: b"GET / HTTP/1.1\r\n\r\n" * n),
            Family(target, name + "trailer value",
                   lambda n: CHUNKED.replace(b"Trailer: b", b"Trailer: " + b"b" * n)),
            Family(target, name + "trailer name",
                   lambda n: CHUNKED.replace(b"Trailer: b", b"T" * n + b": b")),
            Family(target, name + "trailers",
                   lambda n: CHUNKED.replace(b"Trailer: b", b"\r\n".join([b"a: b"] * n))),
            Family(target, name + "header value",
                   lambda n: GET.replace(b"localhost", b"localhost\r\nA: " + b"a" * n)),
            Family(target, name + "headers",
                   lambda n: GET.replace(b"localhost", b"localhost" + b"\r\na:b" * n)),
            Family(target, name + "path", lambda n: GET.replace(b"health", b"a" * n)),
            Family(target, name + "query", lambda n: request(
                "/predict?top=1" + "&a=b" * n, b"x", "Content-Type: image/jpeg")),
            Family(target, name + "chunks",
                   lambda n: CHUNKED[:body] + b"1\r\na\r\n" * n + CHUNKED[body:]),
            Family(target, name + "chunk extension",
                   lambda n: CHUNKED.replace(b"4\r\n", b"4;" + b"a" * n + b"\r\n")),
            Family(target, name + "empty lines", lambda n: b"\r\n" * n + GET),
            Family(target, name + "body", lambda n: request("/predict", b"x" * n)),
            Family(target, name + "form parts", lambda n: request(
                "/predict", part() * n + b"--b--\r\n", f"Content-Type: {FORM}")),
        ]  # fmt: skip

    def form(kind: bytes, body: bytes) -> bytes:
        return kind + b"\n" + body + b"--b--\r\n"

    kind = FORM.encode()
    options = b'Content-Disposition: form-data; name="pictures"'
    return [
        *found,
        Family("form", "form many parts", lambda n: form(kind, part() * n)),
        Family("form", "form other parts", lambda n: form(kind, part("x") * n)),
        Family("form", "form content type", lambda n: form(kind + b"; a=b" * n, part())),
        Family("form", "form quotes", lambda n: form(kind + b'; a="' + b'\\"' * n, part())),
        Family("form", "form spaces", lambda n: form(kind + b" " * n + b"; a", part())),
        Family("form", "form part options", lambda n: form(
            kind, b"--b\r\n" + options + b"; a=b" * n + b"\r\n\r\nx\r\n"), 700),
        Family("form", "form near boundaries", lambda n: form(
            kind, part()[:-2] + b"\r\n--" * n + b"\r\n")),
    ]  # fmt: skip
