"""What a picture file tells before any pixel is decoded: its kind, its size, which way is up.

Only what makes pixels is handed on to the decoders. Color profiles, previews, comments, text and
later frames are left out: they are where decoders warn, reserve memory and fail, and no pixel
depends on them. This file knows the containers; `decoding.py` knows the pixels.
"""

import math
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from vitrail.data.av1 import avif_cost
from vitrail.errors import DataError

READABLE = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
SIGNATURES = {  # of the formats that can be read
    "JPEG": rb"\xff\xd8\xff",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "WebP": rb"RIFF.{4}WEBPVP8[ LX]",
    "GIF": rb"GIF8[79]a",
    "BMP": rb"BM.{12}[\x0c\x28\x34\x38\x40\x6c\x7c]\0\0\0",
    "TIFF": rb"II[*+]\0|MM\0[*+]",
    "AVIF": rb".{4}ftyp(?:avi[fs]|m[is]f1.{4}(?:.{4}){0,8}?avi[fs])",
}
OTHERS = {  # what else people try
    "an HTML page": rb"(?i)\s*(?:<!doctype html|<html)",
    "an SVG drawing": rb"[^\0]{0,1000}<svg",
    "a PostScript drawing": rb"%!PS|\xc5\xd0\xd3\xc6",
    "a PDF document": rb"%PDF",
    "a Photoshop document": rb"8BPS",
    "a HEIC photograph": rb".{4}ftyp(?:hei|hev|m[is]f1)",
    "a JPEG 2000 picture": rb"\0\0\0\x0cjP|\xff\x4f\xff\x51",
    "a JPEG XL picture": rb"\xff\x0a|\0\0\0\x0cJXL",
    "an icon": rb"\0\0[\x01\x02]\0",
    "a PNM picture": rb"P[1-7]\s",
    "an archive": rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf",
}
MAX_SCANS = 100  # of a JPEG; ten are usual, and each costs time for all pixels
MAX_VALUES = 300_000  # of a tag of a TIFF
MAX_RLE = 2**18  # pixels and bytes of a run-length encoded BMP, which Pillow decodes in Python
EXIF_ORIENTATION = 274  # the same number in EXIF and in TIFF
TIFF_TYPES = {1: 1, 3: 2, 4: 4, 5: 8, 7: 1, 16: 8}  # bytes of a value
TIFF_SINGLE = {256, 257, 259, 262, 266, 277, 278, 284, 292, 293, 317, 322, 323, 512, 513, 514, 531}
TIFF_SEVERAL = {258, 273, 279, 320, 324, 325, 338, 339, 347, 519, 520, 521, 529, 530, 532}
TIFF_CODES = {3: "H", 4: "L", 16: "Q"}  # of whole numbers, as `struct` calls them
MAX_SAMPLES = 6  # per pixel of a TIFF: more than any kind that Pillow reads

Tag = tuple[int, int, bytes]  # type, count, and the values or where they are


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What is known of a picture before it is decoded. Sides are as stored, before rotation."""

    format: str
    data: bytes = field(repr=False)  # the file, without what makes no pixels
    size: tuple[int, int] | None = None  # height and width; None if only the decoder can tell
    orientation: int = 1  # EXIF: 1 is upright
    layers: int | None = None  # JPEG: 1 gray, 3 color, 4 CMYK
    height_at: int | None = None  # JPEG in one scan, top to bottom: where `data` has its height
    coded: int = 0  # pixels a decoder holds at once, if more than `size`: tiles, AV1 frames
    work: int = 0  # pixels a decoder computes, if more than that: each scan or frame counts


def format_of(data: bytes) -> str | None:
    """The format that a file begins like, if it is one that can be read."""
    return next((f for f, mark in SIGNATURES.items() if re.match(mark, data, re.DOTALL)), None)


def read_header(data: bytes) -> Header:
    """The header of a picture file; a `DataError` of one line for anything else."""
    format = format_of(data)
    if format is None:
        raise DataError(stranger(data))
    try:
        return READERS[format](data)
    except (struct.error, IndexError, OverflowError, ValueError):
        raise too_short(format) from None


def too_short(format: str) -> DataError:
    return DataError(f"{a(format)} that ends before its pixels do; copy or download it again")


def damaged(format: str, what: str) -> DataError:
    return DataError(f"{a(format)} with {what}; copy or download it again")


def max_segments(data: bytes) -> int:
    """Segments, chunks or blocks that a file may have: each is a step in Python, in Pillow too.

    Encoders write pixels in pieces of 8 kB or more.
    """
    return 1000 + len(data) // 2048


def too_many(format: str, data: bytes) -> DataError:
    return DataError(f"{a(format)} of more than {max_segments(data):,} segments; save it again")


def a(format: str) -> str:
    return f"an {format}" if format == "AVIF" else f"a {format}"


def stranger(data: bytes) -> str:
    """What a file is that is no picture, and what would be."""
    if not data:
        return f"an empty file, not a picture; give {READABLE}"
    for name, mark in OTHERS.items():
        if re.match(mark, data[:2000], re.S):
            return f"{name}, which has no decoder here; save it as PNG or JPEG"
    start = data[:500].decode("utf-8", "ignore")
    is_text = len(start.encode()) > len(data[:500]) - 4 and not re.search(
        r"[\0-\x08\x0e-\x1f]", start
    )
    return f"{'text' if is_text else 'an unknown format'}, not a picture; give {READABLE}"


def read_jpeg(data: bytes) -> Header:
    """Markers up to the first scan. JFIF and Adobe stay: they say what the colors mean."""
    kept, exif, frame, progressive, dropped, at = [b"\xff\xd8"], b"", None, False, False, 2
    size = 2  # of what is kept
    height_at = 0, 0  # in what is kept, and in the file
    for _ in range(max_segments(data)):
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
            raise damaged("JPEG", "damaged markers")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            if frame is not None:
                raise damaged("JPEG", "two frame headers")
            frame, progressive = struct.unpack_from(">BHHB", content), marker in (0xC2, 0xCA)
            height_at = size + 5, at + 5
        if marker == 0xE1 and content.startswith(b"Exif\0\0"):
            exif = exif or content
        is_note = 0xE0 <= marker <= 0xEF or marker == 0xFE
        if not is_note or (marker, content[:5]) in ((0xE0, b"JFIF\0"), (0xEE, b"Adobe")):
            kept.append(data[at : at + 2 + length])
            size += 2 + length
        else:
            dropped = True
        at += 2 + length
    else:
        raise too_many("JPEG", data)
    if frame is None or 0 in frame:
        raise damaged("JPEG", "no size in its header")
    if data.rfind(b"\xff\xd9", at) < 0:  # no end of the image: decoders would fill up with gray
        raise too_short("JPEG")
    bits, height, width, layers = frame
    has_scans = progressive or data[at + 4] < layers
    scans = data.count(b"\xff\xda", at) if has_scans else 1
    if scans > MAX_SCANS:
        raise DataError(f"a JPEG of more than {MAX_SCANS} scans; save it again, not progressive")
    if bits != 8 or layers not in (1, 3, 4):
        raise DataError(f"a JPEG of {layers} layers of {bits} bits; save it as 8-bit RGB")
    return Header(
        format="JPEG",
        data=b"".join([*kept, data[at:]]) if dropped else data,
        size=(height, width),
        orientation=orientation(exif),
        layers=layers,
        height_at=None if has_scans else height_at[not dropped],
        work=scans * height * width,
    )


def read_png(data: bytes) -> Header:
    """Chunks up to the end: header, palette, transparent color and pixels."""
    kept, exif, at = [data[:8]], b"", 8
    first, width, height, depth, color = struct.unpack_from(">4sLLBB", data, 12)
    if first != b"IHDR":
        raise damaged("PNG", "a damaged header")
    for _ in range(max_segments(data)):
        length, kind = struct.unpack_from(">L4s", data, at)
        chunk = data[at : at + 12 + length]
        if len(chunk) < 12 + length:
            raise too_short("PNG")
        if kind == b"eXIf":
            exif = chunk[8:-4]
        if kind == b"tRNS" and color in (0, 2):
            chunk = scaled_transparency(chunk, depth, color)
        if kind in (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            kept.append(chunk)
        if kind == b"IEND":
            break
        at += 12 + length
    else:
        raise too_many("PNG", data)
    return Header(
        format="PNG",
        data=b"".join(kept),
        size=(height, width),
        orientation=orientation(exif),
    )


def scaled_transparency(chunk: bytes, depth: int, color: int) -> bytes:
    """The transparent color in the range of the decoded pixels, which Pillow leaves to us."""
    if zlib.crc32(chunk[4:-4]) != int.from_bytes(chunk[-4:]):
        raise damaged("PNG", "a wrong checksum")
    values = struct.unpack(f">{min(len(chunk) - 12, 6) // 2}H", chunk[8:-4][:6])
    if depth == 16 and color == 2:
        values = [value >> 8 for value in values]  # Pillow decodes RGB to the high bytes
    elif depth in (2, 4):
        values = [value * 255 // (2**depth - 1) & 0xFFFF for value in values]
    content = b"tRNS" + struct.pack(f">{len(values)}H", *values)
    return (len(content) - 4).to_bytes(4) + content + zlib.crc32(content).to_bytes(4)


def read_gif(data: bytes) -> Header:
    """The first frame. Of its control block only the transparent color stays."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    at = 13 + (3 << (flags & 7) + 1 if flags & 128 else 0)
    palette, control = data[10:at], b""
    for _ in range(max_segments(data)):
        found = re.compile(rb"[,;!]").search(data, at)  # anything else is a stray byte
        if found is None:
            raise too_short("GIF")
        at = found.start()
        if data[at] == 0x2C:  # an image
            break
        if data[at] == 0x3B:
            raise damaged("GIF", "no picture in it")
        if data[at + 1 : at + 3] == b"\xf9\x04":
            control = b"!\xf9\x04" + bytes([data[at + 3] & 1]) + data[at + 4 : at + 7] + b"\0"
        at += 2
        while data[at]:
            at += data[at] + 1
        at += 1
    else:
        raise too_many("GIF", data)
    left, top, across, down = struct.unpack_from("<4H", data, at + 1)
    width, height = max(width, left + across), max(height, top + down)
    screen = data[:6] + struct.pack("<HH", width, height) if max(width, height) < 2**16 else b""
    return Header(
        format="GIF", data=b"".join([screen, palette, control, data[at:]]), size=(height, width)
    )


def read_webp(data: bytes) -> Header:
    """Only read: a WebP reserves its whole canvas as soon as a decoder opens it."""
    exif, at = b"", 12
    match data[15:16]:
        case b"X":
            width, height = (int.from_bytes(data[i : i + 3], "little") + 1 for i in (24, 27))
            for _ in range(max_segments(data)):
                if at + 8 > len(data):
                    break
                kind, length = struct.unpack_from("<4sL", data, at)
                exif = data[at + 8 : at + 8 + length] if kind == b"EXIF" else exif
                at += 8 + length + length % 2
            else:
                raise too_many("WebP", data)
        case b"L":
            (bits,) = struct.unpack_from("<L", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case _:
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return Header(format="WebP", data=data, size=(height, width), orientation=orientation(exif))


def read_bmp(data: bytes) -> Header:
    """Only checked: Pillow expands run lengths in Python, at a fraction of the usual speed."""
    if data[14] >= 40:
        width, height, _, compression = struct.unpack_from("<llLL", data, 18)
        pixels = abs(width * height)
        if compression in (1, 2) and max(pixels, len(data)) > MAX_RLE:
            raise DataError(
                f"a run-length encoded BMP of {width} x {abs(height)} pixels and {len(data):,} "
                f"bytes, above the limit of {MAX_RLE:,}; save it as PNG"
            )
    return Header(format="BMP", data=data)


def read_avif(data: bytes) -> Header:
    """EXIF is renamed away: in AVIF the container says which way is up. The largest part counts."""
    renamed = re.sub(rb"(infe.{8}(?:..)?)Exif", rb"\1none", data, flags=re.S)
    parts = (struct.unpack(">LL", part[1]) for part in re.finditer(rb"ispe\0{4}(.{8})", data, re.S))
    width, height = max(parts, key=math.prod, default=(0, 0))
    coded, work = avif_cost(data)
    return Header(format="AVIF", data=renamed, size=(height, width), coded=coded, work=work)


def read_tiff(data: bytes) -> Header:
    """The first page, under a new directory of the tags that make pixels."""
    order, big, tags = directory(data)
    word, room = (order + "Q", 8) if big else (order + "L", 4)
    kept, total = [], 0
    for tag in sorted((TIFF_SINGLE | TIFF_SEVERAL) & tags.keys()):
        type, count, value = tags[tag]
        size = count * TIFF_TYPES.get(type, 0)
        if size > room:
            total += size
            if struct.unpack(word, value)[0] + size > len(data) or total > len(data):
                raise too_short("TIFF")
        if count > 1 and (tag in TIFF_SINGLE or type == 1 or count > MAX_VALUES):
            raise damaged("TIFF", f"a damaged tag {tag}")
        if size:
            kept.append(struct.pack(order + ("HHQ8s" if big else "HHL4s"), tag, type, count, value))
    width, height, samples, turn = (
        number(order, tags.get(tag)) for tag in (256, 257, 277, EXIF_ORIENTATION)
    )
    if samples > MAX_SAMPLES:
        raise DataError(f"a TIFF of {samples} samples per pixel; save it as RGB")
    coded, work = tiff_work(data, order, room, tags)
    start = data[:room] + struct.pack(word, len(data))
    count = struct.pack(order + ("Q" if big else "H"), len(kept))
    return Header(
        format="TIFF",
        data=b"".join([start, data[len(start) :], count, *kept, bytes(room)]),
        size=(height, width),
        orientation=turn if 1 <= turn <= 8 else 1,
        coded=coded,
        work=work,
    )


def tiff_work(data: bytes, order: str, room: int, tags: dict[int, Tag]) -> tuple[int, int]:
    """Pixels of the largest strip or tile, and of all of them."""
    width, height, rows, tile_width, tile_height, samples, planar, compression = (
        number(order, tags.get(tag)) for tag in (256, 257, 278, 322, 323, 277, 284, 259)
    )
    offsets, sizes = (
        [n for tag in pair if tag in tags for n in numbers(data, order, room, tags[tag])]
        for pair in ((273, 324), (279, 325))
    )
    if compression > 1 and sum(min(size, len(data)) for size in sizes) > 2 * len(data):
        raise damaged("TIFF", "overlapping strips")  # decoders would read the same bytes each time
    scans = 0
    if compression == 7 and len(sizes) == len(offsets) and all(sizes):  # JPEG
        strips = zip(offsets, sizes, strict=True)
        scans = sum(data.count(b"\xff\xda", at, at + size) for at, size in strips)
    elif compression in (6, 7):
        scans = data.count(b"\xff\xda")
    planes = max(1, samples) if planar == 2 else 1
    parts = [(width, min(rows or height, height))] if 273 in tags else []
    if {322, 323} & tags.keys():
        parts.append((tile_width or width, tile_height or height))
    coded = work = 0
    for across, down in parts:
        count = planes * -(-width // max(1, across)) * -(-height // max(1, down))
        count = max(count, len(offsets))
        limit = 10 * max_segments(data)  # a strip may be a single row
        if count > limit:
            raise DataError(
                f"a TIFF of {count:,} strips or tiles, above the limit of {limit:,} for its size; "
                "save it with larger ones"
            )
        coded = max(coded, across * down)
        work = max(work, across * down * max(count // planes, scans))
    return coded, work


def orientation(exif: bytes) -> int:
    """Which way is up: 1 to 8, and 1 for whatever cannot be understood."""
    exif = exif.removeprefix(b"Exif\0\0")
    if exif[:2] not in (b"II", b"MM"):
        return 1
    try:
        order, _, tags = directory(exif)
        turn = number(order, tags.get(EXIF_ORIENTATION))
    except (struct.error, OverflowError):
        return 1
    return turn if 1 <= turn <= 8 else 1


def directory(tiff: bytes) -> tuple[str, bool, dict[int, Tag]]:
    """The first directory of a TIFF or EXIF: byte order, BigTIFF or not, and its tags."""
    order = "<" if tiff.startswith(b"II") else ">"
    big = tiff[2:4] in (b"+\0", b"\0+")
    (start,) = struct.unpack_from(order + ("Q" if big else "L"), tiff, 8 if big else 4)
    (count,) = struct.unpack_from(order + ("Q" if big else "H"), tiff, start)
    entry = struct.Struct(order + ("HHQ8s" if big else "HHL4s"))
    tags: dict[int, Tag] = {}
    for i in range(min(count, 2**16)):  # as many as there are numbers for tags
        tag, *value = entry.unpack_from(tiff, start + (8 if big else 2) + i * entry.size)
        tags.setdefault(tag, tuple(value))
    return order, big, tags


def number(order: str, value: Tag | None) -> int:
    """A single whole number in a tag; 0 if it is not one."""
    type, count, content = value or (0, 0, b"")
    code = TIFF_CODES.get(type)
    return struct.unpack_from(order + code, content)[0] if code and count == 1 else 0


def numbers(data: bytes, order: str, room: int, value: Tag) -> tuple[int, ...]:
    """All whole numbers in a tag, which has `room` bytes for them and else says where they are."""
    type, count, content = value
    code, at = TIFF_CODES.get(type), 0
    if code is None:
        return ()
    if count * TIFF_TYPES[type] > room:
        (at,) = struct.unpack(order + ("Q" if room == 8 else "L"), content)
        content = data
    return struct.unpack_from(f"{order}{count}{code}", content, at)


READERS: dict[str, Callable[[bytes], Header]] = {
    "JPEG": read_jpeg,
    "PNG": read_png,
    "WebP": read_webp,
    "GIF": read_gif,
    "BMP": read_bmp,
    "TIFF": read_tiff,
    "AVIF": read_avif,
}
