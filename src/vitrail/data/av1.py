"""What an AVIF file costs to decode, read from the AV1 streams inside of it.

An AVIF states a size in its container, but a decoder reserves memory for the size in the stream,
and decodes every frame that is in it. `avif_cost` finds both without decoding. Of a file that
cannot be followed it raises ValueError or struct.error.

Boxes are those of ISO 14496-12; OBUs (open bitstream units) those of the AV1 specification, whose
sections are given.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAX_PARTS = 10_000  # boxes, extents or OBUs of a file, each a step in Python
CONTAINERS = {  # (box, box inside of it) that lead to where the streams are
    (b"", b"meta"),
    (b"", b"moov"),
    (b"moov", b"trak"),
    (b"trak", b"mdia"),
    (b"mdia", b"minf"),
    (b"minf", b"stbl"),
}
SEQUENCE_HEADER, FRAME_HEADER, FRAME = 1, 3, 6  # OBU types
KEY_FRAME, SWITCH_FRAME = 0, 3
SELECT = 2  # each frame has its own setting


class Bits:
    """Numbers of any count of bits, or of whole bytes, one after another."""

    def __init__(self, content: bytes) -> None:
        self.value, self.left = int.from_bytes(content), 8 * len(content)

    def take(self, count: int = 1) -> int:
        self.left -= count
        if self.left < 0:
            raise ValueError("out of bits")
        return self.value >> self.left & (1 << count) - 1


class Sequence(NamedTuple):
    """What a sequence header says of the size of its frames, and what `is_resized` needs."""

    pixels: int
    resized_pixels: int  # of the largest frame that may state its own size
    time_bits: int = 0
    id_bits: int = 0
    screen_content: int = SELECT
    integer_motion: int = SELECT


def avif_cost(data: bytes) -> tuple[int, int]:
    """Pixels of the largest frame, and of all frames decoded to get the first image."""
    largest, total, sequence, count = 0, 0, None, 0
    for payload in payloads(data):
        for kind, content in obus(payload):
            if (count := count + 1) > MAX_PARTS:
                raise ValueError("too many OBUs")
            if kind == SEQUENCE_HEADER:
                sequence = read_sequence(content)
                largest = max(largest, sequence.pixels)
            elif kind in (FRAME_HEADER, FRAME) and sequence is not None:
                if sequence.resized_pixels > largest and is_resized(content, sequence):
                    largest = sequence.resized_pixels
                total += largest
    return largest, total


def payloads(data: bytes) -> Iterator[bytes]:
    """The streams: all items, and the first sample of each track."""
    found = []
    for box in boxes(data, 0, len(data)):
        found.append(box)
        if len(found) > MAX_PARTS:
            raise ValueError("too many boxes")
    items, offsets, size, idat = [], [], 0, 0
    for kind, start, end in sorted(found):  # "idat" comes before "iloc"
        match kind:
            case b"idat":
                idat = start
            case b"iloc":
                items += extents(data[start:end], idat)
            case b"stco" | b"co64":
                code = ">L" if kind == b"stco" else ">Q"
                offsets += struct.unpack_from(code, data, start + 8)
            case b"stsz":
                (each,) = struct.unpack_from(">L", data, start + 4)
                size = max(size, each or struct.unpack_from(">L", data, start + 12)[0])
            case _:
                pass
    items += [[(at, size)] for at in offsets]
    parts = [[slice(at, at + n if n else None) for at, n in item] for item in items]
    lengths = (len(range(*part.indices(len(data)))) for item in parts for part in item)
    if sum(lengths) > 3 * len(data):  # color and alpha of an item may be samples too
        raise ValueError("overlapping items")
    for item in parts:
        yield b"".join(data[part] for part in item)


def boxes(data: bytes, at: int, end: int, parent: bytes = b"") -> Iterator[tuple[bytes, int, int]]:
    """Kind, start and end of the content of each box, and of those in `CONTAINERS`."""
    while at + 8 <= end:
        size, kind = struct.unpack_from(">L4s", data, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        at = min(at + max(size, 8), end) if size else end
        yield kind, start, at
        if (parent, kind) in CONTAINERS:
            yield from boxes(data, start + 4 * (kind == b"meta"), at, kind)


def extents(iloc: bytes, idat: int) -> list[list[tuple[int, int]]]:
    """Where the parts of each item are, and their lengths; 0 is up to the end of the file."""
    at, count, items = 0, 0, []

    def take(size: int) -> int:
        nonlocal at
        at += size
        if at > len(iloc):
            raise ValueError("a box that is too short")
        return int.from_bytes(iloc[at - size : at])

    version, _, sizes = take(1), take(3), take(2)
    offset, length, base, index = (sizes >> shift & 15 for shift in (12, 8, 4, 0))
    for _ in range(take(4 if version == 2 else 2)):
        take(4 if version == 2 else 2)
        in_idat = version > 0 and take(2) & 15 == 1
        take(2)
        start = take(base) + idat * in_idat
        item = []
        for _ in range(take(2)):
            if (count := count + 1) > MAX_PARTS:
                raise ValueError("too many extents")
            take(index if version > 0 else 0)
            item.append((start + take(offset), take(length)))
        items.append(item)
    return items


def obus(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """The type of each OBU, and the first bytes of its content (5.3)."""
    at = 0
    while at < len(payload) and not payload[at] & 0x80:
        head, size = payload[at], len(payload)
        at += 2 if head & 4 else 1
        if head & 2:
            size = 0
            for shift in range(0, 56, 7):  # base 128, the lowest digit first
                digit = payload[at]
                at, size = at + 1, size | (digit & 127) << shift
                if digit < 128:
                    break
        yield head >> 3 & 15, payload[at : at + min(size, 512)]
        at += size


def read_sequence(content: bytes) -> Sequence:
    """The sequence header (5.5), as far as it matters for the size of frames."""
    take = Bits(content).take
    take(4)  # profile, still image or not
    is_reduced = take()
    time_bits = model = delay_bits = 0
    if is_reduced:
        take(5)
    else:
        if take():  # timing
            take(64)
            if equal := take():
                zeros = 0
                while not take():
                    zeros += 1
                take(zeros if zeros < 32 else 0)
            if model := take():
                delay_bits = take(5) + 1
                take(37)
                time_bits = 0 * take(5) if equal else take(5) + 1
        has_delay = take()
        for _ in range(take(5) + 1):  # operating points
            take(12)
            if take(5) > 7:
                take()
            if model and take():
                take(2 * delay_bits + 1)
            if has_delay and take():
                take(4)
    width_bits, height_bits = take(4) + 1, take(4) + 1
    pixels = (take(width_bits) + 1) * (take(height_bits) + 1)
    if is_reduced:
        return Sequence(pixels, 0)
    id_bits = take(4) + take(3) + 3 if take() else 0
    take(7)  # coding tools
    orders = take()
    take(2 * orders)
    screen_content = SELECT if take() else take()
    integer_motion = SELECT if not screen_content or take() else take()
    return Sequence(
        pixels, 1 << width_bits + height_bits, time_bits, id_bits, screen_content, integer_motion
    )


def is_resized(content: bytes, sequence: Sequence) -> bool:
    """Whether a frame header (5.9.2) states a size of its own."""
    take = Bits(content[:64]).take
    if not sequence.resized_pixels or take():  # no such frames, or one that is decoded already
        return False
    kind, is_shown = take(2), take()
    take(sequence.time_bits if is_shown else 1)
    if kind != SWITCH_FRAME and not (kind == KEY_FRAME and is_shown):
        take()
    take()
    screen_content = take() if sequence.screen_content == SELECT else sequence.screen_content
    if screen_content and sequence.integer_motion == SELECT:
        take()
    take(sequence.id_bits)
    return kind == SWITCH_FRAME or take() == 1
