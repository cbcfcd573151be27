import pickle
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hostile_images import memory_of
from odd_images import RGB, bombs, chunk, exif, odd_images, png, saved, stored, tiff
from PIL import Image
from tiny_sets import photograph

from fuzzing import run
from vitrail.data.decode import MAX_PIXELS, decode, open_image
from vitrail.errors import ConfigError, DataError

pytestmark = pytest.mark.slow

ODD = odd_images()
BOMBS = dict(bombs())
MUTATIONS = 5000
PLAIN = ("jpeg", "png", "webp", "gif", "bmp", "tiff raw", "avif")
CLEAR = chunk(b"tRNS", struct.pack(">HHH", 1, 2, 3))
ROOM = 8 * 2**20  # bytes a refused file may cost: its own size, and the plugins


def outcome(data, **options):
    """Pixels, or the reason why there are none."""
    try:
        return decode(data, **options).tobytes()
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["auto", "pillow"])
@pytest.mark.parametrize("name", ODD)
def test_every_variant_decodes_to_the_right_pixels(name, backend):
    odd = ODD[name]
    image = open_image(odd.data, max_pixels=32 * 64)
    pixels, gray = (image.pixels(channels=channels, backend=backend) for channels in (3, 1))
    assert pixels.shape == (image.height, image.width, 3) == odd.pixels.shape
    assert odd.difference(pixels) <= odd.tolerance
    luma = np.asarray(Image.fromarray(pixels).convert("L")).astype(int)
    assert gray.shape == (*luma.shape, 1)
    assert np.abs(gray[:, :, 0] - luma).max() <= (name != "png gray")
    for array in (pixels, gray):
        assert array.dtype == np.uint8
        assert array.flags.c_contiguous
        assert array.flags.writeable
    again = pickle.loads(pickle.dumps(image)).pixels(backend=backend)
    assert np.array_equal(again, pixels)
    assert len(repr(image)) < 200


@pytest.mark.parametrize("sampling", [0, 1, 2])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("sides", [(375, 500), (17, 33), (16, 1000), (401, 202), (3, 5)])
def test_backends_give_the_same_pixels(sides, progressive, sampling):
    pytest.importorskip("simplejpeg")
    color = Image.fromarray(photograph(*sides))
    for image in (color, color.convert("L")):
        options = {"progressive": progressive, "subsampling": sampling, "quality": 88}
        data = saved(image, "JPEG", exif=exif(6), **options)
        for share in (1, 2, 3, 4, 8, 11):
            for channels in (1, 3):
                least = (max(1, sides[1] // share), max(1, sides[0] // share))
                asked = {"channels": channels, "min_size": least}
                fast = decode(data, **asked)
                assert np.array_equal(fast, decode(data, backend="pillow", **asked))


def test_backends_reject_the_same_files(monkeypatch):
    pytest.importorskip("simplejpeg")
    whole = saved(photograph(48, 64), "JPEG", quality=80)
    rng = np.random.default_rng(0)
    broken = [whole[:length] for length in range(2, len(whole), 7)]
    for _ in range(200):
        data = bytearray(whole)
        data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
        broken.append(bytes(data))
    for data in broken:
        assert outcome(data) == outcome(data, backend="pillow")
    first = decode(whole)
    monkeypatch.setattr("vitrail.data.decode.load_simplejpeg", lambda: None)
    assert np.array_equal(decode(whole), first)  # although it is not installed


@pytest.mark.parametrize("backend", ["auto", "pillow"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_scaled_jpeg_is_at_least_min_size(turn, backend):
    upright = photograph(304, 1000)
    image = open_image(saved(stored(upright, turn), "JPEG", exif=exif(turn), quality=95))
    assert (image.height, image.width) == (304, 1000)
    full = Image.fromarray(image.pixels(backend=backend))
    for least, scale in {
        (304, 1000): 1, (153, 500): 1, (152, 501): 1, (152, 500): 2, (76, 250): 4, (100, 100): 2,
        (38, 125): 8, (1, 1): 8, (305, 10): 1, (10, 2000): 1,
    }.items():  # fmt: skip
        pixels = image.pixels(min_size=least, backend=backend)
        assert pixels.shape == (304 // scale, 1000 // scale, 3)
        small = full.resize(pixels.shape[1::-1], Image.Resampling.BOX)
        assert np.abs(pixels.astype(int) - np.asarray(small)).mean() < 2
    image = open_image(saved(photograph(301, 999), "JPEG"))  # sides are rounded up
    assert image.pixels(min_size=(38, 125), backend=backend).shape == (38, 125, 3)
    assert image.pixels(min_size=(39, 125), backend=backend).shape == (76, 250, 3)
    assert decode(saved(photograph(300, 400), "PNG"), min_size=(10, 10)).shape == (300, 400, 3)


@pytest.mark.parametrize("extra", [{}, {"restart_marker_rows": 2}, {"progressive": True}])
@pytest.mark.parametrize("sampling", [0, 1, 2])
def test_top_rows_equal_those_of_the_full_image(sampling, extra):
    color = Image.fromarray(photograph(203, 150))
    for image in (color, color.convert("L")):
        data = saved(image, "JPEG", subsampling=sampling, quality=88, **extra)
        for least in (None, (100, 70), (26, 19)):
            whole = decode(data, min_size=least, backend="fast")
            for rows in (1, 8, 9, 100, 131, 196, 203):
                upper = open_image(data).pixels(min_size=least, max_rows=rows, backend="fast")
                assert len(upper) >= -(-rows * len(whole) // 203)
                assert np.array_equal(upper, whole[: len(upper)])


def test_jpeg_decoding_stops_after_max_rows():
    pytest.importorskip("simplejpeg")
    tall = photograph(400, 40)
    files = [saved(stored(tall, turn), "JPEG", exif=exif(turn)) for turn in range(1, 9)]
    sizes = [len(open_image(data).pixels(max_rows=100, backend="fast")) for data in files]
    assert sizes == [104] * 2 + [400] * 6  # from their tops down
    exact = open_image(saved(tall, "JPEG")).pixels(max_rows=100)
    assert len(exact) == 400  # rows beside a cut would be smoothed without their neighbors


def test_corruption_is_detected_when_decoding_top_rows():
    simplejpeg = pytest.importorskip("simplejpeg")
    whole = saved(photograph(160, 64), "JPEG", quality=80)
    for data in (whole[:-400], whole[:-2]):
        with pytest.raises(DataError, match="truncated"):
            open_image(data).pixels(max_rows=16, backend="fast")
    start = whole.index(b"\xff\xda") + 20
    for place in range(start, start + 200):
        data = bytearray(whole)
        data[place] ^= 0x55
        upper = open_image(bytes(data)).top_rows(80, 3, 1)
        every = simplejpeg.decode_jpeg(data, fastdct=True, fastupsample=True, strict=False)
        assert upper is None or np.array_equal(upper, every[:80])
        data[place : place + 2] = b"\xff\xd3"  # no such marker may stand here
        assert open_image(bytes(data)).top_rows(80, 3, 1) is None


def test_decoding_is_thread_safe():
    files = [odd.data for odd in ODD.values()]
    alone = [decode(data) for data in files]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for one, other in zip(pool.map(decode, files), alone, strict=True):
                assert np.array_equal(one, other)


ENDLESS = ODD["jpeg progressive"].data[:-2] + b"\xff\xda\0\x08\1\1\0\1\x3f\0" * 150 + b"\xff\xd9"
FLOATS = {"photometric": 1, "depth": 32, "format": 3, "samples": 1}
REFUSED = {
    "nothing": (b"", "empty"),
    "words": (b"label,file\n0,a.jpg\n", "text"),
    "words in Greek": ("ένα αρχείο κειμένου\n".encode() * 40, "text"),
    "a web page": (b"<!DOCTYPE html><html><body>404</body></html>", "HTML"),
    "SVG": (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
    "EPS": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "PostScript"),
    "PDF": (b"%PDF-1.7\n", "PDF"),
    "HEIC": (b"\0\0\0\x18ftypheic\0\0\0\0heicmif1", "HEIC"),
    "JPEG 2000": (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    "an archive": (b"PK\3\4".ljust(90, b"\0"), "archive"),
    "noise": (bytes(range(1, 256)) * 4, "unknown"),
    "zeros": (bytes(1000), "unknown"),
    "12-bit JPEG": (ODD["jpeg"].data.replace(b"\0\x11\x08", b"\0\x11\x0c"), "12 bits"),
    "endless JPEG": (ENDLESS, "scans"),
    "PNG without pixels": (png([], depth=8, color=2), "truncated"),
    "PNG of no size": (png([], sides=(0, 64), depth=8, color=2), "no size"),
    "PNG with a wrong checksum": (png(RGB, depth=8, color=2, before=CLEAR[:-1] + b"?"), "checksum"),
    "PNG of a strange kind": (png([b"x"], depth=3, color=5), "unsupported header"),
    "GIF without images": (b"GIF89a\1\0\1\0\0\0\0;", "no frame"),
    "TIFF of many samples": (tiff(RGB, samples=9), "9 samples"),
    "TIFF of heights": (tiff(np.full((32, 64), -900, "<f4"), **FLOATS), "from -900 to -900"),
    "TIFF of no numbers": (tiff(np.full((32, 64), np.nan, "<f4"), **FLOATS), "nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_files_are_rejected_in_one_line(name, capfd):
    data, word = REFUSED[name]
    for backend in ("auto", "pillow"):
        with pytest.raises(DataError, match=word) as caught:
            decode(data, backend=backend)
        reason = str(caught.value)
        assert len(reason.splitlines()) == 1
        assert len(reason) < 160
        assert reason.isascii()
        assert ";" in reason  # what would work
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("backend", ["auto", "pillow"])
@pytest.mark.parametrize("name", PLAIN)
def test_half_a_file_is_rejected(name, backend, capfd):
    data = ODD[name].data
    for share in (0.3, 0.5, 0.9):
        with pytest.raises(DataError, match=r"truncated|corrupt|no size"):
            decode(data[: int(len(data) * share)], backend=backend)
    with pytest.raises(DataError, match="truncated"):
        open_image(ODD["jpeg"].data[:-1])  # seen without decoding anything
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_decompression_bomb_is_rejected_by_its_header_and_uses_no_memory():
    for data in BOMBS.values():
        with pytest.raises(DataError, match="above the limit"):
            open_image(data)
    assert max(map(max, memory_of(BOMBS, MAX_PIXELS).values())) < ROOM


def test_pixel_limit_is_exact():
    data = ODD["png"].data
    assert decode(data, max_pixels=32 * 64).shape == (32, 64, 3)
    with pytest.raises(DataError, match="64 x 32 pixels, above the limit of 2,047"):
        decode(data, max_pixels=32 * 64 - 1)
    wide = saved(Image.new("1", (10_000, 9_500)), "PNG")  # above where Pillow begins to warn
    with pytest.raises(DataError, match="above the limit"):
        open_image(wide)
    image = open_image(wide, max_pixels=10**8)
    assert (image.height, image.width, image.mode) == (9_500, 10_000, "1")
    with pytest.raises(ConfigError, match="channels=4"):
        decode(ODD["png"].data, channels=4)
    with pytest.raises(ConfigError, match="did you mean 'pillow'"):
        decode(ODD["png"].data, backend="pilow")


def test_mutated_images_give_one_line_errors():
    outcome = run(Path(__file__).parent / "image_mutations.py", MUTATIONS)
    assert outcome["stderr"] == ""  # decoders in C are silent too
    assert outcome["accepted"] > MUTATIONS / 5  # not all are rejected by their header
    assert outcome["peak_mib"] < 1024
