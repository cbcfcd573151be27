"""Image files of at most 1 MB that try to cost a decoder far more time or memory than their size.

    hostile_images()    name -> bytes, the same at every call

None of them is a valid image that anybody needs, so every one may be refused. What none may do is
occupy a core for seconds, or reserve memory that its pixels do not need.
"""

import pickle
import re
import struct
import subprocess
import sys
import zlib
from functools import cache
from pathlib import Path

from odd_images import GRAY, RGB, chunk, saved
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


def scan(component, band, bits):
    """One scan of one component; `bits` is text."""
    size = -(-len(bits) // 8)
    content = int("0" + bits.ljust(8 * size, "1"), 2).to_bytes(size)
    return (
        b"\xff\xda\0\x08\x01" + bytes([component, 0, *band]) + content.replace(b"\xff", b"\xff\0")
    )


def many_scans(side, layers, count=100):
    """A progressive JPEG whose scans contain nothing but end-of-band runs."""
    blocks = (side // 8) ** 2
    ends = ("0" + "1" * 14) * -(-blocks // (2**15 - 1))
    parts = [scan(i + 1, (0, 0, 0), "0" * blocks) for i in range(layers)]
    parts += [scan(i % layers + 1, (1, 63, 0x10), ends) for i in range(count - layers)]
    head = b"\xff\xd8" + GRAY_TABLES + frame_header(2, side, side, layers)
    return head + b"".join(parts) + b"\xff\xd9"


def jpegs():
    small = saved(RGB, "JPEG")
    tables, rest = small[:2], small[2:]
    frame = b"\xff\xc0\0\x08\x08\0\x10\0\x10\x01"
    yield "JPEG of 30,000 frame headers", tables + frame * 30_000 + rest
    yield "JPEG of two sizes", tables + frame_header(0, 16, 16) + rest
    yield "JPEG after 1 MB of padding", tables + b"\xff" * MEGABYTE + rest
    yield (
        "JPEG with 1 MB of padding before its scan",
        small.replace(b"\xff\xda", b"\xff" * MEGABYTE + b"\xda", 1),
    )
    for name, mark in {"comments": 0xFE, "tables": 0xC4, "APP1 segments": 0xE1}.items():
        segments = bytes([0xFF, mark, 0, 2]) * (MEGABYTE // 4)
        yield f"JPEG of 250,000 {name}", tables + segments + rest
    yield "JPEG of 500,000 restart markers", tables + b"\xff\xd0" * (MEGABYTE // 2) + rest
    for layers in (1, 3):
        name = f"JPEG of 100 scans, 8192 x 8192, {layers} components"
        yield name, many_scans(SIDE, layers)
    head = b"\xff\xd8" + GRAY_TABLES + frame_header(0, SIDE, SIDE, 3)
    empty = b"".join(scan(i % 3 + 1, (0, 63, 0), "") for i in range(99))
    yield "JPEG of 99 baseline scans without data", head + empty + b"\xff\xd9"


def bmp(compression, content, *, bits, sides=(SIDE, SIDE)):
    """A BMP of two colors, of pixel data that is compressed already."""
    palette = bytes([9, 9, 9, 0, 200, 100, 50, 0])
    numbers = (40, sides[1], sides[0], 1, bits, compression, len(content), 0, 0, 2, 0)
    head = b"BM" + struct.pack("<LLL", 62 + len(content), 0, 62)
    return head + struct.pack("<LllHHLLLLLL", *numbers) + palette + content


def bmps():
    ends = b"\x01\0\0\0" * SIDE  # one pixel and an end of line: the rest of the row is padding
    yield "BMP run-length 8-bit, empty rows", bmp(1, ends, bits=8)
    yield "BMP run-length 4-bit, empty rows", bmp(2, ends, bits=4)
    runs = b"\xff\x01" * (MEGABYTE // 2)
    yield "BMP run-length 4-bit, runs", bmp(2, runs, bits=4)
    yield "BMP run-length 8-bit, runs past the end of a row", bmp(1, runs, bits=8, sides=(9, 9))
    yield "BMP run-length 8-bit, jumps", bmp(1, b"\0\x02\xff\x01" * 4000, bits=8)


def gifs():
    gif = saved(Image.fromarray(RGB).quantize(4), "GIF")
    place = gif.index(b",\0\0\0\0")
    for name, stray in {
        "1 MB of stray bytes": b"\x01" * MEGABYTE,
        "330,000 extensions": b"!\x01\0" * (MEGABYTE // 3),
        "500,000 comment blocks": b"!\xfe" + b"\x01x" * (MEGABYTE // 2) + b"\0",
    }.items():
        yield f"GIF with {name}", gif[:place] + stray + gif[place:]


def pngs():
    png = saved(RGB, "PNG")
    start, pixels = 33, png.index(b"IDAT") - 4
    for kind in (b"tEXt", b"IDAT", b"PLTE", b"tRNS"):
        many = chunk(kind, b"") * (MEGABYTE // 12)
        yield f"PNG of 83,000 empty {kind.decode()} chunks", png[:pixels] + many + png[pixels:]
    clear = chunk(b"tRNS", bytes(range(1, 251)) * (MEGABYTE // 250))
    yield "PNG with 1 MB of transparent colors", png[:start] + clear + png[start:]
    empty = b"\x78\x01" + b"\0\0\0\xff\xff" * (MEGABYTE // 5)  # stored blocks of no bytes
    yield "PNG of empty deflate blocks", png[:pixels] + chunk(b"IDAT", empty) + png[-12:]


def webps():
    webp = saved(RGB, "WebP", lossless=True)
    content = webp[12:]
    canvas = b"VP8X" + struct.pack("<LL", 10, 0) + b"\x3f\0\0\x1f\0\0"
    many = b"JUNK\0\0\0\0" * (MEGABYTE // 8)
    yield "WebP of 125,000 empty chunks", riff(canvas + content + many)
    large = saved(Image.new("L", (4096, 4096)), "WebP", lossless=True, method=0)[12:]
    yield "WebP of a frame larger than its canvas", riff(canvas + large)
    frame = bytes(6) + b"\x3f\0\0\x1f\0\0" + bytes(4)  # says 64 x 32, holds 4096 x 4096
    moving = canvas[:8] + b"\x02" + canvas[9:] + b"ANIM" + struct.pack("<LLH", 6, 0, 0)
    frame = b"ANMF" + struct.pack("<L", len(frame + large)) + frame + large
    yield "WebP animated, of a frame larger than its canvas", riff(moving + frame)


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
    tile = zlib.compress(bytes(SIDE * SIDE), 9)
    tiled = tags | {322: SIDE, 323: SIDE, 324: 16, 325: len(tile)}
    yield "TIFF of one tile of 8192 x 8192", tiff(tiled, tile)
    yield "TIFF big, of one tile of 8192 x 8192", tiff(tiled, tile, big=True)
    wide = tags | {322: 2**20, 323: 2**10, 324: 16, 325: 100}
    yield "TIFF of one tile of 2**30 pixels", tiff(wide, tile[:100])
    tall = tags | {273: 16, 278: 2**31, 279: len(tile)}
    yield "TIFF of one strip of 2**31 rows", tiff(tall, tile)
    count = 100_000
    half = {256: 512, 257: 512, 258: 8, 259: 1, 262: 1, 277: 1, 278: 256}
    overlapping = half | {273: [16] * count, 279: [2**17] * count}
    yield "TIFF of 100,000 overlapping strips", tiff(overlapping, bytes(2**17))
    rows = 2**15
    row = b"\x01\x10\0\xef\xff" + bytes(16) + zlib.adler32(bytes(16)).to_bytes(4)
    empty = b"\x78\x01" + b"\0\0\0\xff\xff" * 140_000 + row  # deflate blocks of no bytes
    long = {256: 16, 257: rows, 278: 1, 273: [16] * rows, 279: [len(empty)] * rows}
    yield "TIFF of 32,768 strips of the same empty blocks", tiff(tags | long, empty)
    clear = bytes.fromhex("804020100804020100") * 77_000  # LZW codes that clear the table
    clear += bytes(18)
    yield (
        "TIFF of 32,768 strips of the same LZW codes",
        tiff(tags | long | {259: 5, 279: [len(clear)] * rows}, clear),
    )
    jpeg = many_scans(SIDE, 1)
    whole = {256: SIDE, 257: SIDE, 278: SIDE, 259: 7, 273: 16, 279: len(jpeg)}
    yield "TIFF of a JPEG of 100 scans", tiff(tags | whole, jpeg)
    endless = b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**62)
    yield "TIFF big, of 2**62 tags", endless + bytes(range(1, 251)) * 4000
    many = dict.fromkeys(range(300, 65000), 1)
    yield "TIFF of 65,000 tags", tiff(many | tags, b"")
    small = {256: 300, 257: 300, 258: 8, 259: 1, 262: 1, 277: 1, 322: 1, 323: 1}
    yield (
        "TIFF of 90,000 tiles of one pixel",
        tiff(small | {324: [16] * 90_000, 325: [1] * 90_000}, bytes(16)),
    )


def avifs():
    fast = {"speed": 10, "quality": 30}
    large = saved(Image.new("L", (4096, 4096), 90), "AVIF", **fast)
    yield "AVIF that says 16 x 16 and codes 4096 x 4096", resized(large, 16, 16)
    start = large.index(b"mdat") + 4
    size = 4 + large[start + 3]  # of what comes before the only frame
    frame = large[start + size :]
    repeated = large[start : start + size] + frame * (500_000 // len(frame))
    yield "AVIF of 1,500 frames in one image", with_stream(large, repeated)
    first, second = (Image.new("L", (2048, 2048), gray) for gray in (90, 30))
    moving = saved(first, "AVIF", save_all=True, append_images=[second], **fast)
    yield "AVIF animated, that says 16 x 16 and codes 2048 x 2048", resized(moving, 16, 16)
    small = saved(GRAY, "AVIF")
    yield "AVIF of a frame larger than its sequence", with_stream(small, oversized_frame())
    yield "AVIF with 62,500 sizes", small + b"ispe\0\0\0\0\0\0\0\1\0\0\0\1" * (MEGABYTE // 16)
    yield "AVIF of 60,000 extents of one item", many_extents(small, 60_000)
    deep = b"".join(struct.pack(">L4s", MEGABYTE, b"moov") for _ in range(MEGABYTE // 8))
    yield "AVIF of 125,000 nested boxes", small + deep


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
    width = header[place : place + 8]
    assert width == "01010100", width  # 6 bits for 64, and 5 bits for 32
    wide = f"{63:016b}{31:016b}"
    header = header[:place] + "1111" * 2 + wide + header[place + 8 + 11 :]
    rest = place + 8 + 32 + 1 + 7  # no frame numbers; coding tools
    hints = int(header[rest + 3 + (2 if header[rest + 3] == "1" else 3) :][:3], 2) + 1
    frame = "0001001" + frame[7 : 7 + hints] + f"{side - 1:016b}" * 2 + frame[7 + hints :]
    units = [(0x12, ""), (0x0A, header), (0x32, frame)]
    return b"".join(obu(head, bits) for head, bits in units)


def obu(head, bits):
    content = int("0" + bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8))
    assert len(content) < 128
    return bytes([head, len(content)]) + content


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


@cache
def hostile_images():
    """Every file by its name."""
    kinds = (jpegs, bmps, gifs, pngs, webps, tiffs, avifs)
    return {name: data for kind in kinds for name, data in kind()}


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
