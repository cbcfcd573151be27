import time
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hostile_images import bmp, families, hostile_images, memory_of, tiff
from odd_images import GRAY, RGB, odd_images, saved
from PIL import Image

from vitrail.data.decode import MAX_PIXELS, LimitedFile, decode, open_image
from vitrail.data.image_headers import read_header
from vitrail.errors import DataError

pytestmark = pytest.mark.slow

CPU_SECONDS = 3.0  # for any of them; the slowest takes 0.7 s
ROOM = 64 * 2**20  # bytes for all of them, one after another
LARGE = 20_000_000  # bytes: what a server may accept


def cpu_seconds(data, backend):
    started = time.process_time()
    with suppress(DataError):
        decode(data, backend=backend)
    return time.process_time() - started


@pytest.mark.parametrize("backend", ["auto", "pillow"])
@pytest.mark.parametrize("name", families())
def test_cpu_time_is_bounded(name, backend):
    data = hostile_images()[name]
    assert len(data) < 1_100_000
    assert cpu_seconds(data, backend) < CPU_SECONDS


@pytest.mark.parametrize(
    "name",
    ["JPEG padding", "GIF stray bytes", "PNG transparent colors", "AVIF sizes",
     "BMP runs past the end of a row"],
)  # fmt: skip
def test_cost_is_linear_in_the_file(name):
    make, n = families()[name]
    data = make(n * LARGE // len(hostile_images()[name]))
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), dtype=np.uint8)
    photo = saved(noise, "JPEG", quality=90)
    for backend in ("auto", "pillow"):  # the slowest costs as much as 85 of these photos
        unit, cost = (min(cpu_seconds(d, backend) for _ in range(3)) for d in (photo, data))
        assert cost < 250 * unit  # on any CPU; quadratic cost is far above


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded():
    costs = memory_of(hostile_images(), 1_000_000)
    assert {name: used for name, (used, _) in costs.items() if used > ROOM} == {}


REFUSED = {
    "JPEG frame headers": "two frame headers",
    "JPEG of two sizes": "two frame headers",
    "JPEG tables": "segments; save it again",
    "JPEG scans, color": "6,710,886,400 pixels in all scans",
    "JPEG empty scans": "pixels in all scans",
    "BMP empty rows": "run-length encoded BMP of 8192 x 8192",
    "BMP runs, 4 bits": "run-length encoded BMP",
    "GIF extensions": "segments; save it again",
    "WebP chunks": "segments; save it again",
    "TIFF tile": "tile or frame of 67,108,864 pixels",
    "TIFF big, tile": "tile or frame of 67,108,864 pixels",
    "TIFF overlapping strips": "strips or tiles, above the limit",
    "TIFF strips of the same empty blocks": "overlapping strips",
    "TIFF strips of the same LZW blocks": "overlapping strips",
    "TIFF of a JPEG of many scans": "pixels in all scans, tiles or frames",
    "AVIF that says 16 x 16": "tile or frame of 16,777,216 pixels",
    "AVIF animated, that says 16 x 16": "tile or frame of 4,194,304",
    "AVIF of a frame larger than its sequence": "tile or frame of",
    "AVIF frames in one image": "pixels in all scans, tiles or frames",
}


@pytest.mark.parametrize("name", REFUSED)
def test_costly_files_are_rejected_by_their_header(name):
    limit = 2**24 if name == "AVIF frames in one image" else 1_000_000
    limit = MAX_PIXELS if "scans" in name or "JPEG" in name else limit
    with pytest.raises(DataError, match=REFUSED[name]) as caught:
        open_image(hostile_images()[name], max_pixels=limit)
    reason = str(caught.value)
    assert len(reason) < 160
    assert ";" in reason


def test_ordinary_and_padded_images_are_within_the_limits():
    noise = np.random.default_rng(0).integers(0, 256, (1100, 1000, 3), dtype=np.uint8)
    data = saved(noise, "JPEG", progressive=True)  # ten scans
    assert decode(data, max_pixels=1_100_000).shape == noise.shape
    rows = b"".join(b"\xc8\1" * 2 + b"\0\0" for _ in range(600))
    assert decode(bmp(1, rows, bits=8, sides=(600, 400))).shape == (600, 400, 3)
    with pytest.raises(DataError, match="above the limit of 262,144"):
        decode(bmp(1, rows, bits=8, sides=(600, 500)))
    tile = np.zeros((256, 256), np.uint8)  # larger than the image
    tile[:16, :16] = GRAY[:16, :16]
    for compression, content in ((1, tile.tobytes()), (8, zlib.compress(tile.tobytes()))):
        tags = {256: 16, 257: 16, 258: 8, 259: compression, 262: 1, 277: 1}
        tags |= {322: 256, 323: 256, 324: 16, 325: len(content)}
        for big in (False, True):
            pixels = decode(tiff(tags, content, big=big), max_pixels=1000, channels=1)
            assert np.array_equal(pixels[:, :, 0], GRAY[:16, :16])
    jpeg = saved(RGB, "JPEG")
    for mark in (b"\xff\xdb", b"\xff\xc0", b"\xff\xda"):
        padded = jpeg.replace(mark, b"\xff" * 9 + mark, 1)
        for backend in ("auto", "pillow"):
            assert np.array_equal(decode(padded, backend=backend), decode(jpeg, backend=backend))
        upper = open_image(padded).pixels(max_rows=8, backend="fast")
        assert np.array_equal(upper, decode(jpeg, backend="fast")[: len(upper)])


def test_avif_pixels_are_those_of_the_stream():
    def pixels(data):
        header = read_header(data)
        return header.coded_pixels, header.total_pixels

    odd = odd_images()
    costs = {name: pixels(odd[name].data) for name in odd if name.startswith("avif")}
    assert {largest for largest, _ in costs.values()} == {64 * 32}
    assert costs["avif"][1] == 64 * 32
    assert costs["avif with alpha"][1] == 2 * 64 * 32
    assert pixels(saved(Image.new("RGB", (333, 77)), "AVIF")) == (333 * 77, 333 * 77)


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
