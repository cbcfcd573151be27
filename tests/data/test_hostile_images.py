"""Small files must not cost much time or memory, whatever they claim."""

import time
from pathlib import Path

import hostile_images
import numpy as np
import pytest
from hostile_images import bmp, jpegs, tiff
from odd_images import GRAY, RGB, odd_images, saved
from PIL import Image

from vitrail.data.decode import MAX_PIXELS, LimitedFile, decode, open_image
from vitrail.data.image_headers import avif_pixels
from vitrail.errors import DataError

pytestmark = pytest.mark.slow

HOSTILE = hostile_images.hostile_images()
CPU_SECONDS = 3.0  # for any of them; the slowest takes 0.7 s
ROOM = 64 * 2**20  # bytes for all of them, one after another
LARGE = 20_000_000  # bytes: what a server may accept


def outcome(data, **options):
    try:
        return decode(data, **options)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("backend", ["auto", "pillow"])
@pytest.mark.parametrize("name", HOSTILE)
def test_cpu_time_is_bounded(name, backend):
    assert len(HOSTILE[name]) < 1_100_000
    started = time.process_time()
    outcome(HOSTILE[name], backend=backend)
    assert time.process_time() - started < CPU_SECONDS


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded():
    costs = hostile_images.memory_of(HOSTILE, 1_000_000)
    assert {name: used for name, (used, _) in costs.items() if used > ROOM} == {}


REFUSED = {
    "JPEG of 30,000 frame headers": "two frame headers",
    "JPEG of two sizes": "two frame headers",
    "JPEG of 250,000 tables": "segments; save it again",
    "JPEG of 100 scans, 8192 x 8192, 3 components": "6,710,886,400 pixels in all scans",
    "JPEG of 99 baseline scans without data": "pixels in all scans",
    "BMP run-length 8-bit, empty rows": "run-length encoded BMP of 8192 x 8192",
    "BMP run-length 4-bit, runs": "run-length encoded BMP",
    "GIF with 330,000 extensions": "segments; save it again",
    "WebP of 125,000 empty chunks": "segments; save it again",
    "TIFF of one tile of 8192 x 8192": "tile or frame of 67,108,864 pixels",
    "TIFF big, of one tile of 8192 x 8192": "tile or frame of 67,108,864 pixels",
    "TIFF of 100,000 overlapping strips": "strips or tiles, above the limit",
    "TIFF of 32,768 strips of the same empty blocks": "overlapping strips",
    "TIFF of 32,768 strips of the same LZW codes": "overlapping strips",
    "TIFF of a JPEG of 100 scans": "pixels in all scans, tiles or frames",
    "AVIF that says 16 x 16 and codes 4096 x 4096": "tile or frame of 16,777,216 pixels",
    "AVIF animated, that says 16 x 16 and codes 2048 x 2048": "tile or frame of 4,194,304",
    "AVIF of a frame larger than its sequence": "tile or frame of",
    "AVIF of 1,500 frames in one image": "pixels in all scans, tiles or frames",
}


@pytest.mark.parametrize("name", REFUSED)
def test_costly_files_are_rejected_by_their_header(name):
    limit = 2**24 if "1,500 frames" in name else 1_000_000
    if "scans" in name or "JPEG" in name:
        limit = MAX_PIXELS
    with pytest.raises(DataError, match=REFUSED[name]) as caught:
        open_image(HOSTILE[name], max_pixels=limit)
    reason = str(caught.value)
    assert len(reason) < 160
    assert ";" in reason


def test_cost_is_linear_in_the_file():
    jpeg, png = saved(RGB, "JPEG"), saved(RGB, "PNG")
    gif = saved(Image.fromarray(RGB).quantize(4), "GIF")
    frame = gif.index(b",\0\0\0\0")
    clear = hostile_images.chunk(b"tRNS", b"\1\2" * (LARGE // 2))
    files = {
        "padding": jpeg[:2] + b"\xff" * LARGE + jpeg[2:],
        "stray bytes": gif[:frame] + b"\1" * LARGE + gif[frame:],
        "transparent colors": png[:33] + clear + png[33:],
        "sizes": saved(RGB, "AVIF") + b"ispe\0\0\0\0\0\0\0\1\0\0\0\1" * (LARGE // 16),
        "run lengths": bmp(1, b"\xff\1" * (LARGE // 2), bits=8, sides=(9, 9)),
    }
    for name, data in files.items():
        for backend in ("auto", "pillow"):
            started = time.process_time()
            outcome(data, backend=backend)
            assert time.process_time() - started < 1, name


def test_padding_changes_no_pixel():
    jpeg = saved(RGB, "JPEG")
    for mark in (b"\xff\xdb", b"\xff\xc0", b"\xff\xda"):
        padded = jpeg.replace(mark, b"\xff" * 9 + mark, 1)
        for backend in ("auto", "pillow"):
            assert np.array_equal(decode(padded, backend=backend), decode(jpeg, backend=backend))
        upper = open_image(padded).pixels(max_rows=8, backend="fast")
        assert np.array_equal(upper, decode(jpeg, backend="fast")[: len(upper)])


def test_ordinary_progressive_jpegs_are_within_any_limit():
    noise = np.random.default_rng(0).integers(0, 256, (1100, 1000, 3), dtype=np.uint8)
    data = saved(noise, "JPEG", progressive=True)  # ten scans
    assert decode(data, max_pixels=1_100_000).shape == noise.shape


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("compression", [1, 8])
def test_tiles_may_be_larger_than_the_image(big, compression):
    tile = np.zeros((256, 256), np.uint8)
    tile[:16, :16] = GRAY[:16, :16]
    content = tile.tobytes() if compression == 1 else hostile_images.zlib.compress(tile.tobytes())
    tags = {256: 16, 257: 16, 258: 8, 259: compression, 262: 1, 277: 1}
    tags |= {322: 256, 323: 256, 324: 16, 325: len(content)}
    pixels = decode(tiff(tags, content, big=big), max_pixels=1000, channels=1)
    assert np.array_equal(pixels[:, :, 0], GRAY[:16, :16])


def test_run_length_encoded_bmp_up_to_the_limit():
    rows = b"".join(b"\xc8\1" * 2 + b"\0\0" for _ in range(600))
    assert decode(bmp(1, rows, bits=8, sides=(600, 400))).shape == (600, 400, 3)
    with pytest.raises(DataError, match="above the limit of 262,144"):
        decode(bmp(1, rows, bits=8, sides=(600, 500)))


def test_avif_pixels_are_those_of_the_stream():
    odd = odd_images()
    costs = {name: avif_pixels(odd[name].data) for name in odd if name.startswith("avif")}
    assert {name: largest for name, (largest, _) in costs.items()} == dict.fromkeys(costs, 64 * 32)
    assert costs["avif"][1] == 64 * 32
    assert costs["avif with alpha"][1] == 2 * 64 * 32
    wide = avif_pixels(saved(Image.new("RGB", (333, 77)), "AVIF"))
    assert wide == (333 * 77, 333 * 77)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "BMP"])
def test_decoding_stops_after_the_cpu_limit(format, monkeypatch):
    data = saved(np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8), format)
    monkeypatch.setattr("vitrail.data.decode.CPU_SECONDS", (-1.0, 0.0))
    with pytest.raises(DataError, match="CPU seconds"):
        decode(data, backend="pillow")
    file = LimitedFile(bytes(1000))
    file.limit(-1.0)
    with pytest.raises(DataError, match="CPU seconds"):
        [file.read(1) for _ in range(1000)]


def test_hostile_images_are_deterministic():
    assert dict(jpegs()) == {name: HOSTILE[name] for name in HOSTILE if name.startswith("JPEG")}
