"""Image files of at most 1 MB that try to cost a decoder far more time or memory than their size.

    families()          name -> (make, n): `make(n)` has about n times as much of one thing
    hostile_images()    name -> bytes, the same at every call

None of them is a valid image that anybody needs, so every one may be refused. What none may do is
occupy a core for seconds, or reserve memory that its pixels do not need. `scripts/fuzz_inputs.py`
grows the same families.
"""

import pickle
import re
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

from odd_images import GRAY, RGB, chunk, png, saved
from PIL import Image

SIDE = 8192  # 8192 x 8192 is the default pixel limit
MEGABYTE = 1_000_000
GRAY_TABLES = (  # one DC code, for no difference; one AC code, for an end-of-band run of 2**14
    b"\xff\xdb\0\x43\0" + b"\x01" * 64
    + b"\xff\xc4\0\x14\0\x01" + bytes(15) + b"\0"
    + b"\xff\xc4\0\x14\x10\x01" + bytes(15) + b"\xe0"
)  # fmt: skip


def frame_header(kind, height, width, layers=1):
    """SOF0 (baseline) or SOF2 (progressive), of gray or not subsampled color."""
    parts = b"".join(bytes([i, 0x11, 0]) for i in range(1, layers + 1))
    content = struct.pack(">BHHB", 8, height, width, layers) + parts
    return bytes([0xFF, 0xC0 + kind]) + struct.pack(">H", 2 + len(content)) + content


def bits_of(text, rest="0"):
    """Bits as bytes, filled up with `rest`."""
    size = -(-len(text) // 8)
    return int("0" + text.ljust(8 * size, rest), 2).to_bytes(size)


def scan(component, band, bits):
    """One scan of one component; `bits` is text."""
    head = b"\xff\xda\0\x08\x01" + bytes([component, 0, *band])
    return head + bits_of(bits, "1").replace(b"\xff", b"\xff\0")


def many_scans(side, layers, count):
    """A progressive JPEG whose scans contain nothing but end-of-band runs."""
    blocks = (side // 8) ** 2
    ends = ("0" + "1" * 14) * -(-blocks // (2**15 - 1))
    parts = [scan(i + 1, (0, 0, 0), "0" * blocks) for i in range(layers)]
    parts += [scan(i % layers + 1, (1, 63, 0x10), ends) for i in range(count - layers)]
    head = b"\xff\xd8" + GRAY_TABLES + frame_header(2, side, side, layers)
    return head + b"".join(parts) + b"\xff\xd9"


def jpegs():
    small = saved(RGB, "JPEG")
    start, rest = small[:2], small[2:]
    frame = b"\xff\xc0\0\x08\x08\0\x10\0\x10\x01"
    yield "JPEG frame headers", lambda n: start + frame * n + rest, 30_000
    yield "JPEG of two sizes", lambda n: start + frame_header(0, 16, 16) * n + rest, 1
    yield "JPEG padding", lambda n: start + b"\xff" * n + rest, MEGABYTE
    yield ("JPEG padding before its scan",
           lambda n: small.replace(b"\xff\xda", b"\xff" * n + b"\xda", 1), MEGABYTE)  # fmt: skip
    for name, mark in {"comments": 0xFE, "tables": 0xC4, "APP1 segments": 0xE1}.items():
        segment = bytes([0xFF, mark, 0, 2])
        yield f"JPEG {name}", lambda n, segment=segment: start + segment * n + rest, 250_000
    yield "JPEG restart markers", lambda n: start + b"\xff\xd0" * n + rest, MEGABYTE // 2
    yield "JPEG scans, gray", lambda n: many_scans(SIDE, 1, n), 100
    yield "JPEG scans, color", lambda n: many_scans(SIDE, 3, n), 100
    head = b"\xff\xd8" + GRAY_TABLES + frame_header(0, SIDE, SIDE, 3)
    empty = [scan(i + 1, (0, 63, 0), "") for i in range(3)]
    yield "JPEG empty scans", lambda n: head + b"".join(empty) * n + b"\xff\xd9", 33


def bmp(compression, content, *, bits, sides=(SIDE, SIDE)):
    """A BMP of two colors, of pixel data that is compressed already."""
    palette = bytes([9, 9, 9, 0, 200, 100, 50, 0])
    numbers = (40, sides[1], sides[0], 1, bits, compression, len(content), 0, 0, 2, 0)
    head = b"BM" + struct.pack("<LLL", 62 + len(content), 0, 62)
    return head + struct.pack("<LllHHLLLLLL", *numbers) + palette + content


def bmps():
    ends = b"\x01\0\0\0"  # one pixel and an end of line: the rest of the row is padding
    runs, half = b"\xff\x01", MEGABYTE // 2
    yield "BMP empty rows", lambda n: bmp(1, ends * n, bits=8), SIDE
    yield "BMP empty rows, 4 bits", lambda n: bmp(2, ends * n, bits=4), SIDE
    yield "BMP runs, 4 bits", lambda n: bmp(2, runs * n, bits=4), half
    yield "BMP runs past the end of a row", lambda n: bmp(1, runs * n, bits=8, sides=(9, 9)), half
    yield "BMP jumps", lambda n: bmp(1, b"\0\x02\xff\x01" * n, bits=8), 4000


def gifs():
    gif = saved(Image.fromarray(RGB).quantize(4), "GIF")
    place = gif.index(b",\0\0\0\0")
    head, frame, end = gif[:place], gif[place:-1], gif[-1:]
    yield "GIF stray bytes", lambda n: head + b"\x01" * n + frame + end, MEGABYTE
    yield "GIF extensions", lambda n: head + b"!\x01\0" * n + frame + end, MEGABYTE // 3
    comment = (b"!\xfe", b"\x01x", b"\0")
    yield (
        "GIF comment blocks",
        lambda n: head + comment[0] + comment[1] * n + comment[2] + frame + end,
        MEGABYTE // 2,
    )
    yield "GIF frames", lambda n: head + frame * n + end, MEGABYTE // len(frame)


def pngs():
    whole = saved(RGB, "PNG")
    start, pixels = 33, whole.index(b"IDAT") - 4
    for kind in ("tEXt", "IDAT", "PLTE", "tRNS"):
        empty = chunk(kind.encode(), b"")
        yield (
            f"PNG empty {kind} chunks",
            lambda n, empty=empty: whole[:pixels] + empty * n + whole[pixels:],
            MEGABYTE // 12,
        )
    colors = bytes(range(1, 251))
    yield (
        "PNG transparent colors",
        lambda n: whole[:start] + chunk(b"tRNS", colors * n) + whole[start:],
        MEGABYTE // 250,
    )
    block = b"\0\0\0\xff\xff"  # a stored block of no bytes
    yield (
        "PNG empty deflate blocks",
        lambda n: whole[:pixels] + chunk(b"IDAT", b"\x78\x01" + block * n) + whole[-12:],
        MEGABYTE // 5,
    )
    note = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20)))
    row = RGB.reshape(RGB.shape[0], -1)
    yield (
        "PNG compressed notes",
        lambda n: png(row, sides=RGB.shape[:2], depth=8, color=2, before=note * n),
        MEGABYTE // len(note),
    )


def webps():
    content = saved(RGB, "WebP", lossless=True)[12:]
    canvas = b"VP8X" + struct.pack("<LL", 10, 0) + b"\x3f\0\0\x1f\0\0"
    large = saved(Image.new("L", (4096, 4096)), "WebP", lossless=True, method=0)[12:]
    frame = bytes(6) + b"\x3f\0\0\x1f\0\0" + bytes(4)  # says 64 x 32, holds 4096 x 4096
    moving = canvas[:8] + b"\x02" + canvas[9:] + b"ANIM" + struct.pack("<LLH", 6, 0, 0)
    frame = b"ANMF" + struct.pack("<L", len(frame + large)) + frame + large
    yield "WebP chunks", lambda n: riff(canvas + content + b"JUNK\0\0\0\0" * n), MEGABYTE // 8
    yield "WebP of a frame larger than its canvas", lambda n: riff(canvas + large * n), 1
    yield "WebP frames larger than their canvas", lambda n: riff(moving + frame * n), 1


def riff(content):
    return b"RIFF" + struct.pack("<L", 4 + len(content)) + b"WEBP" + content


def tiff(tags, content, *, big=False):
    """A TIFF of `content` at byte 16; a tag's values are a number or a list of numbers."""
    code = "Q" if big else "L"
    at = 16 + len(content)
    entries, values = bytearray(), bytearray()
    for tag, value in sorted(tags.items()):
        several = value if isinstance(value, list) else [value]
        packed = struct.pack(f"<{len(several)}{code}", *several)
        if len(several) > 1:
            place = struct.pack("<" + code, at + len(values))
            values, packed = values + packed, place
        entries += struct.pack("<HH" + code, tag, 16 if big else 4, len(several)) + packed
    head = b"II+\0\x08\0\0\0" if big else b"II*\0"
    head += struct.pack("<" + code, at + len(values))
    count = struct.pack("<Q" if big else "<H", len(tags))
    return head.ljust(16, b"\0") + content + values + count + entries + bytes(8)


def tiffs():
    tags = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1}  # 16 x 16, gray, deflate
    plain = tags | {259: 1}

    def tiled(side, *, big=False):
        tile = zlib.compress(bytes(side * side), 9)
        return tiff(tags | {322: side, 323: side, 324: 16, 325: len(tile)}, tile, big=big)

    yield "TIFF tile", tiled, SIDE
    yield "TIFF big, tile", lambda n: tiled(n, big=True), SIDE
    wide = tags | {322: 2**20, 324: 16, 325: 100}
    yield "TIFF tile without data", lambda n: tiff(wide | {323: n}, bytes(100)), 2**10
    strip = zlib.compress(bytes(2**16))
    tall = tags | {273: 16, 279: len(strip)}
    yield "TIFF rows of a strip", lambda n: tiff(tall | {278: n}, strip), 2**31
    half = plain | {256: 512, 257: 512, 278: 256}
    yield (
        "TIFF overlapping strips",
        lambda n: tiff(half | {273: [16] * n, 279: [2**17] * n}, bytes(2**17)),
        100_000,
    )
    rows = 2**15
    row = b"\x01\x10\0\xef\xff" + bytes(16) + zlib.adler32(bytes(16)).to_bytes(4)
    empty = b"\x78\x01" + b"\0\0\0\xff\xff" * 140_000 + row  # deflate blocks of no bytes
    clear = bytes.fromhex("804020100804020100") * 77_000  # LZW codes that clear the table
    for name, compression, data in (("empty", 8, empty), ("LZW", 5, clear + bytes(18))):
        long = tags | {256: 16, 257: rows, 278: 1, 259: compression}
        yield (
            f"TIFF strips of the same {name} blocks",
            lambda n, long=long, data=data: tiff(
                long | {273: [16] * n, 279: [len(data)] * n}, data
            ),
            rows,
        )

    def scans(n):
        jpeg = many_scans(SIDE, 1, n)
        whole = {256: SIDE, 257: SIDE, 278: SIDE, 259: 7, 273: 16, 279: len(jpeg)}
        return tiff(tags | whole, jpeg)

    yield "TIFF of a JPEG of many scans", scans, 100
    endless = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**62)
    yield "TIFF big, endless tags", lambda n: endless + bytes(range(1, 251)) * n, 4000
    yield "TIFF tags", lambda n: tiff(dict.fromkeys(range(300, 300 + n), 1) | tags, b""), 64_700
    small = plain | {256: 300, 257: 300, 322: 1, 323: 1}
    yield ("TIFF tiles of one pixel",
           lambda n: tiff(small | {324: [16] * n, 325: [1] * n}, bytes(16)), 90_000)  # fmt: skip


def avifs():
    fast = {"speed": 10, "quality": 30}
    large = saved(Image.new("L", (4096, 4096), 90), "AVIF", **fast)
    yield "AVIF that says 16 x 16", lambda n: resized(large, 16, 16) + bytes(n), 0
    start = large.index(b"mdat") + 4
    size = 4 + large[start + 3]  # of what comes before the only frame
    first, frame = large[start : start + size], large[start + size :]
    yield ("AVIF frames in one image",
           lambda n: with_stream(large, first + frame * n), 500_000 // len(frame))  # fmt: skip
    images = [Image.new("L", (2048, 2048), gray) for gray in (90, 30)]
    moving = saved(images[0], "AVIF", save_all=True, append_images=images[1:], **fast)
    yield "AVIF animated, that says 16 x 16", lambda n: resized(moving, 16, 16) + bytes(n), 0
    small, oversized = saved(GRAY, "AVIF"), oversized_frame()
    yield "AVIF of a frame larger than its sequence", lambda n: with_stream(small, oversized * n), 1
    yield "AVIF sizes", lambda n: small + b"ispe\0\0\0\0\0\0\0\1\0\0\0\1" * n, MEGABYTE // 16
    yield "AVIF extents of one item", lambda n: many_extents(small, n), 60_000
    box = struct.pack(">L4s", MEGABYTE, b"moov")
    yield "AVIF nested boxes", lambda n: small + box * n, MEGABYTE // 8


def with_stream(avif, stream):
    """An image of another AV1 stream."""
    start = avif.index(b"mdat") + 4
    length = struct.pack(">L", len(avif) - start)
    place = avif.index(length, avif.index(b"iloc"))
    avif = avif[:place] + struct.pack(">L", len(stream)) + avif[place + 4 : start - 8]
    return avif + struct.pack(">L4s", 8 + len(stream), b"mdat") + stream


def oversized_frame(side=4096):
    """The first frame of an animation of 64 x 32, changed to state a size of its own."""
    image = Image.fromarray(GRAY)
    moving = saved(image, "AVIF", save_all=True, append_images=[image.rotate(180)])
    start = moving.index(b"mdat") + 4
    size, length = moving[start + 3], moving[start + 5 + moving[start + 3]]
    assert length < 128  # one byte
    header, frame = (
        "".join(f"{byte:08b}" for byte in moving[at : at + count])
        for at, count in ((start + 4, size), (start + 6 + size, length))
    )
    place = 5 + 1 + 1 + 5 + 12 + 5 + (int(header[24:29], 2) > 7)  # of the bits of a side
    assert header[5:7] == "00"  # neither timing nor delays
    assert header[place : place + 8] == "01010100"  # 6 bits for 64, and 5 bits for 32
    wide = f"{63:016b}{31:016b}"
    header = header[:place] + "1111" * 2 + wide + header[place + 8 + 11 :]
    rest = place + 8 + 32 + 1 + 7  # no frame numbers; coding tools
    hints = int(header[rest + 3 + (2 if header[rest + 3] == "1" else 3) :][:3], 2) + 1
    frame = "0001001" + frame[7 : 7 + hints] + f"{side - 1:016b}" * 2 + frame[7 + hints :]
    units = b""
    for head, content in ((0x12, b""), (0x0A, bits_of(header)), (0x32, bits_of(frame))):
        units += bytes([head, len(content)]) + content
    return units


def resized(avif, height, width):
    """The same pixels in a container that says another size, for images and for tracks."""
    image, track = (struct.pack(">LL", width << shift, height << shift) for shift in (0, 16))
    avif = re.sub(rb"(ispe\0{4}).{8}", rb"\1" + image, avif, flags=re.S)
    return re.sub(rb"(tkhd(?:\0.{75}|\x01.{87})).{8}", rb"\1" + track, avif, flags=re.S)


def many_extents(avif, count):
    """The first item made of the whole file, over and over."""
    place, meta = avif.index(b"iloc") - 4, avif.index(b"meta") - 4
    (length,) = struct.unpack_from(">L", avif, place)
    total = len(avif) - length + 18 + 8 * count
    extents = struct.pack(">LL", 0, total) * count
    iloc = struct.pack(">L4sLHHHHH", 22 + 8 * count, b"iloc", 0, 0x4400, 1, 1, 0, count) + extents
    (size,) = struct.unpack_from(">L", avif, meta)
    avif = avif[:place] + iloc + avif[place + length :]
    grown = struct.pack(">L", size - length + len(iloc))
    return avif[:meta] + grown + avif[meta + 4 :]


def families():
    """Return by name what makes a file that grows with n, and the n of `hostile_images`."""
    kinds = (jpegs, bmps, gifs, pngs, webps, tiffs, avifs)
    return {name: (make, n) for kind in kinds for name, make, n in kind()}


@cache
def hostile_images():
    return {name: make(n) for name, (make, n) in families().items()}


MEASURE = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from odd_images import odd_images
from vitrail.data.decode import decode
from vitrail.errors import DataError

def peaks():
    lines = dict(line.split(":") for line in open("/proc/self/status").read().splitlines())
    return [int(lines[key].split()[0]) * 1024 for key in ("VmHWM", "VmPeak")]

files, max_pixels = pickle.load(sys.stdin.buffer)
for odd in odd_images().values():  # everything that decoding needs is loaded
    decode(odd.data)
before, costs = peaks(), {}
for name, data in files.items():
    try:
        decode(data, max_pixels=max_pixels)
    except DataError:
        pass
    costs[name] = [now - was for now, was in zip(peaks(), before)]
sys.stdout.buffer.write(pickle.dumps(costs))
"""


def memory_of(files, max_pixels):
    """Bytes used and reserved by the time each file is decoded, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(Path(__file__).parent)],
        input=pickle.dumps((files, max_pixels)),
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    return pickle.loads(done.stdout)
