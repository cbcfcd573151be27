"""Read an image header, and reject files that cost too much, before a pixel is decoded.

Decoders get only what defines pixels. Color profiles, previews, comments, text and later frames are
removed: that is where decoders warn, allocate memory and fail. The limits were set against measured
attacks; Pillow checks none of them before it allocates or loops.

AVIF: boxes are those of ISO 14496-12, OBUs (open bitstream units) those of the AV1 specification,
whose sections are cited.
"""

import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from vitrail.errors import DataError

READABLE_FORMATS = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
SIGNATURES = {
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF.{4}WEBPVP8[ LX]",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "AVIF": rb".{4}ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4}){0,8}?avi[fs])",
}
UNSUPPORTED_SIGNATURES = {  # for error messages
    "an HTML page": rb"(?i)\s*(?:<!doctype html|<html)",
    "an SVG image": rb"[^\0]{0,1000}<svg",
    "a PostScript file": rb"%!PS|\xc5\xd0\xd3\xc6",
    "a PDF document": rb"%PDF",
    "a Photoshop document": rb"8BPS",
    "a HEIC image": rb".{4}ftyp(?:hei|hev|m[is]f1)",
    "a JPEG 2000 image": rb"\0\0\0\x0cjP|\xff\x4f\xff\x51",
    "a JPEG XL image": rb"\xff\x0a|\0\0\0\x0cJXL",
    "an icon": rb"\0\0[\x01\x02]\0",
    "a PNM image": rb"P[1-7]\s",
    "an archive": rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf",
}
MAX_SCANS = 100  # of a JPEG; ten are usual, and each costs time for all pixels
MAX_TAG_VALUES = 300_000  # of a TIFF tag
MAX_SAMPLES = 6  # per pixel of a TIFF: more than any kind that Pillow reads
MAX_RLE = 2**18  # pixels and bytes of a run-length encoded BMP, which Pillow decodes in Python
MAX_AVIF_PARTS = 10_000  # boxes, extents or OBUs of an AVIF, each a step in Python
ORIENTATION = 274  # the same tag in EXIF and in TIFF
TIFF_TYPE_BYTES = {1: 1, 3: 2, 4: 4, 5: 8, 7: 1, 16: 8}
TIFF_TYPE_CODES = {3: "H", 4: "L", 16: "Q"}  # `struct` codes of integers
TIFF_SINGLE = {256, 257, 259, 262, 266, 277, 278, 284, 292, 293, 317, 322, 323, 512, 513, 514, 531}
TIFF_SEVERAL = {258, 273, 279, 320, 324, 325, 338, 339, 347, 519, 520, 521, 529, 530, 532}
AVIF_CONTAINERS = {  # (box, box inside of it) on the way to the AV1 streams
    (b"", b"meta"),
    (b"", b"moov"),
    (b"moov", b"trak"),
    (b"trak", b"mdia"),
    (b"mdia", b"minf"),
    (b"minf", b"stbl"),
}
SEQUENCE_HEADER, FRAME_HEADER, FRAME = 1, 3, 6  # OBU types
KEY_FRAME, SWITCH_FRAME = 0, 3
SELECT = 2  # set per frame


class Header(NamedTuple):
    """Header of an image file. The size is as stored, before rotation."""

    format: str
    data: bytes  # the file, reduced to what defines pixels
    size: tuple[int, int] | None = None  # height and width; None if only the decoder knows
    orientation: int = 1  # EXIF: 1 is upright
    components: int | None = None  # JPEG: 1 gray, 3 color, 4 CMYK
    height_offset: int | None = None  # JPEG with a single scan: where in `data` the height is
    coded_pixels: int = 0  # held at once by the decoder, if more than `size`: tiles, AV1 frames
    total_pixels: int = 0  # computed by the decoder, if more than that: all scans or frames


def detect_format(data: bytes) -> str | None:
    """Return the format by the first bytes; None if it is not supported."""
    return next((f for f, start in SIGNATURES.items() if re.match(start, data, re.DOTALL)), None)


def read_header(data: bytes) -> Header:
    """Read the header of an image file; raise a one-line `DataError` for anything else."""
    format = detect_format(data)
    if format is not None:
        try:
            return READERS[format](data)
        except (struct.error, IndexError, OverflowError, ValueError):
            raise truncated(format) from None
    if not data:
        raise DataError(f"empty file; supported: {READABLE_FORMATS}")
    for name, start in UNSUPPORTED_SIGNATURES.items():
        if re.match(start, data[:2000], re.S):
            raise DataError(f"{name}, which is not supported; convert it to PNG or JPEG")
    text = data[:500].decode("utf-8", "ignore")
    is_text = len(text.encode()) > len(data[:500]) - 4
    is_text = is_text and not re.search(r"[\0-\x08\x0e-\x1f]", text)
    kind = "a text file" if is_text else "an unknown format"
    raise DataError(f"{kind}, not an image; supported: {READABLE_FORMATS}")


def truncated(format: str) -> DataError:
    return DataError(f"truncated {format}; copy or download it again")


def corrupt(format: str, problem: str) -> DataError:
    return DataError(f"corrupt {format} ({problem}); copy or download it again")


def max_segments(data: bytes) -> int:
    """Limit segments, chunks or blocks: each is a step in Python, also in Pillow.

    Encoders write pixels in pieces of 8 kB or more.
    """
    return 1000 + len(data) // 2048


def count_segments(format: str, data: bytes) -> Iterator[int]:
    """Count up to `max_segments`, then raise."""
    yield from range(max_segments(data))
    raise DataError(f"{format} with more than {max_segments(data):,} segments; save it again")


def read_jpeg(data: bytes) -> Header:
    """Read markers up to the first scan. JFIF and Adobe stay: they define the color space."""
    parts, exif, frame, progressive, dropped, at = [b"\xff\xd8"], b"", None, False, False, 2
    size = 2  # of `parts`
    height_offset = 0, 0  # in `parts`, and in the file
    for _ in count_segments("JPEG", data):
        at = data.index(b"\xff", at)
        if (marker := data[at + 1]) == 0xFF:  # padding, of any length
            padding = re.compile(rb"\xff+").match(data, at)
            at = padding.end() - 1 if padding else at
            marker, dropped = data[at + 1], True
        if marker == 0xDA:
            break
        if marker in (0x00, 0x01) or 0xD0 <= marker <= 0xD8:
            at += 2  # a marker without content
            continue
        (length,) = struct.unpack_from(">H", data, at + 2)
        content = data[at + 4 : at + 2 + length]
        if marker == 0xD9 or length < 2:
            raise corrupt("JPEG", "invalid markers")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None:
                raise corrupt("JPEG", "two frame headers")
            frame, progressive = struct.unpack_from(">BHHB", content), marker in (0xC2, 0xCA)
            height_offset = size + 5, at + 5
        if marker == 0xE1 and content.startswith(b"Exif\0\0"):
            exif = exif or content
        is_metadata = 0xE0 <= marker <= 0xEF or marker == 0xFE
        if not is_metadata or (marker, content[:5]) in ((0xE0, b"JFIF\0"), (0xEE, b"Adobe")):
            parts.append(data[at : at + 2 + length])
            size += 2 + length
        else:
            dropped = True
        at += 2 + length
    if frame is None or 0 in frame:
        raise corrupt("JPEG", "no size in its header")
    if data.rfind(b"\xff\xd9", at) < 0:  # no end of image: decoders would fill up with gray
        raise truncated("JPEG")
    bits, height, width, components = frame
    has_scans = progressive or data[at + 4] < components
    scans = data.count(b"\xff\xda", at) if has_scans else 1
    if scans > MAX_SCANS:
        raise DataError(f"JPEG with more than {MAX_SCANS} scans; save it as baseline JPEG")
    if bits != 8 or components not in (1, 3, 4):
        raise DataError(f"JPEG with {components} components of {bits} bits; save it as 8-bit RGB")
    return Header(
        format="JPEG",
        data=b"".join([*parts, data[at:]]) if dropped else data,
        size=(height, width),
        orientation=read_orientation(exif),
        components=components,
        height_offset=None if has_scans else height_offset[not dropped],
        total_pixels=scans * height * width,
    )


def read_png(data: bytes) -> Header:
    """Keep header, palette, transparent color and pixels."""
    parts, exif, at = [data[:8]], b"", 8
    first, width, height, depth, color = struct.unpack_from(">4sLLBB", data, 12)
    if first != b"IHDR":
        raise corrupt("PNG", "invalid header")
    for _ in count_segments("PNG", data):
        length, kind = struct.unpack_from(">L4s", data, at)
        chunk = data[at : at + 12 + length]
        if len(chunk) < 12 + length:
            raise truncated("PNG")
        if kind == b"eXIf":
            exif = chunk[8:-4]
        if kind == b"tRNS" and color in (0, 2):
            # Pillow does not scale the transparent color to the range of the decoded pixels
            if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:]):
                raise corrupt("PNG", "wrong checksum")
            values = struct.unpack(f">{min(length, 6) // 2}H", chunk[8:-4][:6])
            if depth == 16 and color == 2:
                values = [value >> 8 for value in values]  # RGB is decoded to the high bytes
            elif depth in (2, 4):
                values = [value * 255 // (2**depth - 1) & 0xFFFF for value in values]
            content = b"tRNS" + struct.pack(f">{len(values)}H", *values)
            chunk = (len(content) - 4).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            parts.append(chunk)
        if kind == b"IEND":
            break
        at += 12 + length
    return Header(
        format="PNG",
        data=b"".join(parts),
        size=(height, width),
        orientation=read_orientation(exif),
    )


def read_gif(data: bytes) -> Header:
    """Keep the first frame, and of its control block the transparent color."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    palette, control = data[10:at], b""
    for _ in count_segments("GIF", data):
        block = re.compile(rb"[,;!]").search(data, at)  # anything else is a stray byte
        if block is None:
            raise truncated("GIF")
        at = block.start()
        if data[at] == 0x2C:  # an image
            break
        if data[at] == 0x3B:
            raise corrupt("GIF", "no frame")
        if data[at + 1 : at + 3] == b"\xf9\x04":
            control = b"!\xf9\x04" + bytes([data[at + 3] & 1]) + data[at + 4 : at + 7] + b"\0"
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    left, top, across, down = struct.unpack_from("<4H", data, at + 1)
    width, height = max(width, left + across), max(height, top + down)
    screen = data[:6] + struct.pack("<HH", width, height) if max(width, height) < 2**16 else b""
    return Header(
        format="GIF", data=b"".join([screen, palette, control, data[at:]]), size=(height, width)
    )


def read_webp(data: bytes) -> Header:
    """Read the size: a decoder allocates the whole canvas as soon as it opens the file."""
    exif, at = b"", 12
    match data[15:16]:
        case b"X":
            width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
            for _ in count_segments("WebP", data):
                if at + 8 > len(data):
                    break
                kind, length = struct.unpack_from("<4sL", data, at)
                exif = data[at + 8 : at + 8 + length] if kind == b"EXIF" else exif
                at += 8 + length + length % 2
        case b"L":
            (bits,) = struct.unpack_from("<L", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case _:
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    orientation = read_orientation(exif)
    return Header(format="WebP", data=data, size=(height, width), orientation=orientation)


def read_bmp(data: bytes) -> Header:
    """Limit run-length encoded files, which Pillow expands in Python."""
    if data[14] >= 40:
        width, height, _, compression = struct.unpack_from("<llLL", data, 18)
        pixels = abs(width * height)
        if compression in (1, 2) and max(pixels, len(data)) > MAX_RLE:
            raise DataError(
                f"run-length encoded BMP of {width} x {abs(height)} pixels and {len(data):,} "
                f"bytes, above the limit of {MAX_RLE:,}; save it as PNG"
            )
    return Header(format="BMP", data=data)


class TiffTags:
    """Tags of the first directory of a TIFF file or of EXIF data."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.order = order = "<" if data.startswith(b"II") else ">"
        self.big = big = data[2:4] in (b"+\0", b"\0+")
        self.inline = 8 if big else 4  # bytes of values that an entry holds
        self.entry = struct.Struct(order + ("HHQ8s" if big else "HHL4s"))
        self.word = struct.Struct(order + ("Q" if big else "L"))
        (start,) = self.word.unpack_from(data, self.inline)
        (count,) = struct.unpack_from(order + ("Q" if big else "H"), data, start)
        self.tags: dict[int, tuple[int, int, bytes]] = {}  # type, count, values or their offset
        for i in range(min(count, 2**16)):  # as many as there are tag numbers
            at = start + (8 if big else 2) + i * self.entry.size
            tag, *value = self.entry.unpack_from(data, at)
            self.tags.setdefault(tag, tuple(value))

    def value(self, tag: int) -> int:
        """Return the single integer in a tag; 0 if it is something else."""
        type, count, content = self.tags.get(tag, (0, 0, b""))
        code = TIFF_TYPE_CODES.get(type)
        return struct.unpack_from(self.order + code, content)[0] if code and count == 1 else 0

    def values(self, tag: int) -> tuple[int, ...]:
        """Return all integers in a tag; those that its entry cannot hold are elsewhere."""
        type, count, content = self.tags.get(tag, (0, 0, b""))
        code, at = TIFF_TYPE_CODES.get(type), 0
        if code is None:
            return ()
        if count * TIFF_TYPE_BYTES[type] > self.inline:
            (at,) = self.word.unpack(content)
            content = self.data
        return struct.unpack_from(f"{self.order}{count}{code}", content, at)


def read_orientation(exif: bytes) -> int:
    """Return the EXIF orientation, 1 to 8; 1 for anything invalid."""
    exif = exif.removeprefix(b"Exif\0\0")
    try:
        orientation = TiffTags(exif).value(ORIENTATION) if exif[:2] in (b"II", b"MM") else 1
    except (struct.error, OverflowError):
        return 1
    return orientation if 1 <= orientation <= 8 else 1


def read_tiff(data: bytes) -> Header:
    """Keep the first page, under a new directory of the tags that define pixels."""
    tiff = TiffTags(data)
    entries, total = [], 0
    for tag in sorted((TIFF_SINGLE | TIFF_SEVERAL) & tiff.tags.keys()):
        type, count, value = tiff.tags[tag]
        size = count * TIFF_TYPE_BYTES.get(type, 0)
        if size > tiff.inline:
            total += size
            if tiff.word.unpack(value)[0] + size > len(data) or total > len(data):
                raise truncated("TIFF")
        if count > 1 and (tag in TIFF_SINGLE or type == 1 or count > MAX_TAG_VALUES):
            raise corrupt("TIFF", f"invalid tag {tag}")
        if size:
            entries.append(tiff.entry.pack(tag, type, count, value))
    orientation, samples = tiff.value(ORIENTATION), tiff.value(277)
    if samples > MAX_SAMPLES:
        raise DataError(f"TIFF with {samples} samples per pixel; save it as RGB")
    coded, total = tiff_pixels(tiff)
    start = data[: tiff.inline] + tiff.word.pack(len(data))
    count = struct.pack(tiff.order + ("Q" if tiff.big else "H"), len(entries))
    return Header(
        format="TIFF",
        data=b"".join([start, data[len(start) :], count, *entries, bytes(tiff.inline)]),
        size=(tiff.value(257), tiff.value(256)),
        orientation=orientation if 1 <= orientation <= 8 else 1,
        coded_pixels=coded,
        total_pixels=total,
    )


def tiff_pixels(tiff: TiffTags) -> tuple[int, int]:
    """Return the pixels of the largest strip or tile, and of all of them."""
    data = tiff.data
    width, height, rows, tile_width, tile_height, samples, planar, compression = (
        tiff.value(tag) for tag in (256, 257, 278, 322, 323, 277, 284, 259)
    )
    offsets = [*tiff.values(273), *tiff.values(324)]
    sizes = [*tiff.values(279), *tiff.values(325)]
    if compression > 1 and sum(min(size, len(data)) for size in sizes) > 2 * len(data):
        raise corrupt("TIFF", "overlapping strips")  # the same bytes would be decoded each time
    scans = 0
    if compression == 7 and len(sizes) == len(offsets) and all(sizes):  # JPEG
        strips = zip(offsets, sizes, strict=True)
        scans = sum(data.count(b"\xff\xda", at, at + size) for at, size in strips)
    elif compression in (6, 7):
        scans = data.count(b"\xff\xda")
    planes = max(1, samples) if planar == 2 else 1
    parts = [(width, min(rows or height, height))] if 273 in tiff.tags else []
    if {322, 323} & tiff.tags.keys():
        parts.append((tile_width or width, tile_height or height))
    coded = total = 0
    for across, down in parts:
        count = planes * -(-width // max(1, across)) * -(-height // max(1, down))
        count = max(count, len(offsets))
        limit = 10 * max_segments(data)  # a strip may be a single row
        if count > limit:
            raise DataError(
                f"TIFF with {count:,} strips or tiles, above the limit of {limit:,} for its size; "
                "save it with larger ones"
            )
        coded = max(coded, across * down)
        total = max(total, across * down * max(count // planes, scans))
    return coded, total


def read_avif(data: bytes) -> Header:
    """Hide EXIF by renaming it: the container defines the orientation. The largest part counts.

    The container states a size, but a decoder allocates the size in the AV1 stream, and decodes
    every frame in it: `coded_pixels` are those of the largest frame, `total_pixels` those of all
    frames decoded for the first image.
    """
    renamed = re.sub(rb"(infe.{8}(?:..)?)Exif", rb"\1none", data, flags=re.S)
    parts = (struct.unpack(">LL", part[1]) for part in re.finditer(rb"ispe\0{4}(.{8})", data, re.S))
    width, height = max(parts, key=math.prod, default=(0, 0))
    largest, total, sequence, count = 0, 0, None, 0
    for payload in avif_payloads(data):
        for kind, content in read_obus(payload):
            if (count := count + 1) > MAX_AVIF_PARTS:
                raise ValueError("too many OBUs")
            if kind == SEQUENCE_HEADER:
                sequence = Av1Sequence(content)
                largest = max(largest, sequence.pixels)
            elif kind in (FRAME_HEADER, FRAME) and sequence is not None:
                if sequence.resized_pixels > largest and sequence.is_resized(content):
                    largest = sequence.resized_pixels
                total += largest
    return Header("AVIF", renamed, (height, width), coded_pixels=largest, total_pixels=total)


class Bits:
    """Reads unsigned integers of any number of bits."""

    def __init__(self, content: bytes) -> None:
        self.value, self.left = int.from_bytes(content), 8 * len(content)

    def take(self, count: int = 1) -> int:
        self.left -= count
        if self.left < 0:
            raise ValueError("out of bits")
        return self.value >> self.left & (1 << count) - 1


def avif_payloads(data: bytes) -> Iterator[bytes]:
    """Yield the AV1 streams: all items, and the first sample of each track."""
    boxes = []
    for box in read_boxes(data, 0, len(data)):
        boxes.append(box)
        if len(boxes) > MAX_AVIF_PARTS:
            raise ValueError("too many boxes")
    items, offsets, size, idat = [], [], 0, 0
    for kind, start, end in sorted(boxes):  # "idat" comes before "iloc"
        match kind:
            case b"idat":
                idat = start
            case b"iloc":
                items += read_extents(data[start:end], idat)
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


def read_boxes(
    data: bytes, at: int, end: int, parent: bytes = b""
) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of each box, and of those inside `AVIF_CONTAINERS`."""
    while at + 8 <= end:
        size, kind = struct.unpack_from(">L4s", data, at)
        start = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, start)
            start += 8
        at = min(at + max(size, 8), end) if size else end
        yield kind, start, at
        if (parent, kind) in AVIF_CONTAINERS:
            yield from read_boxes(data, start + 4 * (kind == b"meta"), at, kind)


def read_extents(iloc: bytes, idat: int) -> list[list[tuple[int, int]]]:
    """Return offset and length of the parts of each item; length 0 is up to the end of the file."""
    at, count, items = 0, 0, []

    def take(size: int) -> int:
        nonlocal at
        at += size
        if at > len(iloc):
            raise ValueError("truncated box")
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
            if (count := count + 1) > MAX_AVIF_PARTS:
                raise ValueError("too many extents")
            take(index if version > 0 else 0)
            item.append((start + take(offset), take(length)))
        items.append(item)
    return items


def read_obus(payload: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the type of each OBU and the first bytes of its content (5.3)."""
    at = 0
    while at < len(payload) and not payload[at] & 0x80:
        head, size = payload[at], len(payload)
        at += 2 if head & 4 else 1
        if head & 2:
            size = 0
            for shift in range(0, 56, 7):  # LEB128
                digit = payload[at]
                at, size = at + 1, size | (digit & 127) << shift
                if digit < 128:
                    break
        yield head >> 3 & 15, payload[at : at + min(size, 512)]
        at += size


class Av1Sequence:
    """Sequence header (5.5): the size of frames, and what the start of a frame depends on."""

    def __init__(self, content: bytes) -> None:
        take = Bits(content).take
        take(4)  # profile, still image or not
        is_reduced = take()
        self.time_bits = model = delay_bits = 0
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
                    self.time_bits = 0 * take(5) if equal else take(5) + 1
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
        self.pixels = (take(width_bits) + 1) * (take(height_bits) + 1)
        self.resized_pixels = 0  # of the largest frame that may state its own size
        if not is_reduced:
            self.resized_pixels = 1 << width_bits + height_bits
            self.id_bits = take(4) + take(3) + 3 if take() else 0
            take(7)  # coding tools
            take(2 * take())  # order hints
            self.screen_content = SELECT if take() else take()
            self.integer_motion = SELECT if not self.screen_content or take() else take()

    def is_resized(self, frame: bytes) -> bool:
        """Return whether a frame header (5.9.2) states its own size."""
        take = Bits(frame[:64]).take
        if not self.resized_pixels or take():  # no such frames, or one that is decoded already
            return False
        kind, is_shown = take(2), take()
        take(self.time_bits if is_shown else 1)
        if kind != SWITCH_FRAME and not (kind == KEY_FRAME and is_shown):
            take()
        take()
        screen_content = take() if self.screen_content == SELECT else self.screen_content
        if screen_content and self.integer_motion == SELECT:
            take()
        take(self.id_bits)
        return kind == SWITCH_FRAME or take() == 1


READERS: dict[str, Callable[[bytes], Header]] = {
    "JPEG": read_jpeg,
    "PNG": read_png,
    "WebP": read_webp,
    "GIF": read_gif,
    "BMP": read_bmp,
    "TIFF": read_tiff,
    "AVIF": read_avif,
}
