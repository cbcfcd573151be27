"""Image files of every supported variant, each with the pixels it must decode to.

The image is always the same: four colors, one in each quarter, wider than high, so that every
rotation, mirror image and swap of channels shows. Its quarters are multiples of 16 pixels, so
that lossy formats keep them.
"""

import io
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from PIL import Image

COLORS = ((200, 30, 40), (30, 180, 60), (40, 60, 210), (230, 210, 60))
GRAYS = (20, 100, 160, 240)
SIDES = (32, 64)
WHITE = (255, 255, 255)
LOSSY = 4  # gray levels by which a lossy format may be wrong


@dataclass(frozen=True)
class Odd:
    """A file, its pixels as RGB, and by how much they may differ."""

    data: bytes
    pixels: np.ndarray
    tolerance: int = 0

    def difference(self, pixels):
        """The largest; where colors meet, lossy formats may blend them and are not asked."""
        down, across = (np.arange(side) for side in SIDES)
        far = [abs(place - len(place) / 2 + 0.5) > 4 for place in (down, across)]
        part = np.ix_(*far) if self.tolerance > 1 else ...
        return np.abs(pixels.astype(int) - self.pixels)[part].max()


def quarters(values):
    """Return an image (32, 64, channels) or (32, 64) with one value in each quarter."""
    corners = np.array(values).reshape(2, 2, -1)
    image = corners.repeat(SIDES[0] // 2, axis=0).repeat(SIDES[1] // 2, axis=1)
    return image.squeeze(-1) if image.shape[-1] == 1 else image


def three(gray):
    return gray[:, :, None].repeat(3, axis=2)


RGB = quarters(COLORS).astype(np.uint8)
GRAY = quarters(GRAYS).astype(np.uint8)
GRAY_RGB = three(GRAY)
BLACK_WHITE = quarters((0, 255, 255, 0)).astype(np.uint8)
ALPHA = quarters((255, 128, 0, 255)).astype(np.uint8)


def frames():
    """A second frame or page; Pillow changes it when it is saved."""
    return {"save_all": True, "append_images": [Image.fromarray(255 - RGB)]}


def on_white(rgb, alpha):
    """What an opaque page shows through a transparent image."""
    share = alpha[:, :, None] / 255
    return np.rint(rgb * share + 255 * (1 - share)).astype(np.uint8)


def stored(pixels, orientation):
    """How a camera stores an upright image so that this EXIF orientation brings it back."""
    flips = {1: 0, 2: 1, 3: 3, 4: 2, 5: 0, 6: 2, 7: 3, 8: 1}[orientation]
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    if flips & 1:
        pixels = pixels[:, ::-1]
    if flips & 2:
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def exif(orientation):
    tags = Image.Exif()
    tags[274] = orientation
    return tags


def saved(pixels, format, mode=None, **options):
    """Pixels, or a Pillow image, as a file."""
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image = image if mode is None else image.convert(mode)
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


# JPEG


def jpegs():
    best = {"quality": 95, "subsampling": 0}
    cmyk = Image.fromarray(RGB).convert("CMYK")
    yield "jpeg", Odd(saved(RGB, "JPEG", **best), RGB, LOSSY)
    yield "jpeg 4:2:0", Odd(saved(RGB, "JPEG", quality=95, subsampling=2), RGB, LOSSY)
    yield "jpeg progressive", Odd(saved(RGB, "JPEG", progressive=True, **best), RGB, LOSSY)
    yield "jpeg gray", Odd(saved(GRAY, "JPEG", quality=95), GRAY_RGB, LOSSY)
    yield "jpeg stored as RGB", Odd(saved(RGB, "JPEG", keep_rgb=True, **best), RGB, LOSSY)
    yield "jpeg CMYK", Odd(saved(cmyk, "JPEG", **best), RGB, LOSSY)
    yield "jpeg YCCK", Odd(ycck(), RGB, LOSSY)
    for turn in range(1, 9):
        data = saved(stored(RGB, turn), "JPEG", exif=exif(turn), **best)
        yield f"jpeg orientation {turn}", Odd(data, RGB, LOSSY)
    turned = saved(stored(GRAY, 6), "JPEG", exif=exif(6), quality=95)
    yield "jpeg gray orientation 6", Odd(turned, GRAY_RGB, LOSSY)
    yield "jpeg of two images (MPO)", Odd(saved(RGB, "MPO", **frames(), **best), RGB, LOSSY)
    plain = saved(RGB, "JPEG", **best)
    yield "jpeg with bytes after its end", Odd(plain + b"\0" * 100, RGB, LOSSY)
    notes = b"".join(
        struct.pack(">BBH", 0xFF, marker, 2 + 60_000) + b"ICC_PROFILE\0\1\1".ljust(60_000, b"x")
        for marker in (0xE2, 0xE1, 0xED, 0xFE)
    )
    yield "jpeg with absurd notes", Odd(plain[:2] + notes + plain[2:], RGB, LOSSY)
    broken_exif = struct.pack(">BBH", 0xFF, 0xE1, 2 + 26)
    broken_exif += b"Exif\0\0II*\0\x08\0\0\0\xff\xff".ljust(26, b"\xff")
    yield "jpeg with broken EXIF", Odd(plain[:2] + broken_exif + plain[2:], RGB, LOSSY)


def ycck():
    """Adobe's other four inks: the first three as luma and chroma. Pillow cannot write it."""
    inks = np.asarray(Image.fromarray(RGB).convert("CMYK"))
    luma = np.asarray(Image.fromarray(inks[:, :, :3].copy()).convert("YCbCr"))
    layers = np.dstack([luma, 255 - inks[:, :, 3]])
    data = saved(Image.fromarray(255 - layers, "CMYK"), "JPEG", quality=95, subsampling=0)
    place = data.index(b"Adobe") + 11
    return data[:place] + b"\2" + data[place + 1 :]


# PNG


def chunk(kind, content):
    check = zlib.crc32(kind + content)
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", check)


def png(rows, *, depth, color, sides=SIDES, before=b"", interlaced=False):
    """A PNG of rows of bytes that are already packed, or of pixels of 16 bits."""
    if isinstance(rows, np.ndarray):
        rows = rows.astype(">u2" if depth == 16 else np.uint8).view(np.uint8).reshape(len(rows), -1)
    header = struct.pack(">LLBBBBB", sides[1], sides[0], depth, color, 0, 0, interlaced)
    pixels = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))
    parts = [chunk(b"IHDR", header), before, chunk(b"IDAT", pixels), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def clear(*numbers):
    return chunk(b"tRNS", struct.pack(f">{len(numbers)}H", *numbers))


def packed(values, depth):
    """Rows of small numbers as bytes, the first in the highest bits."""
    bits = np.unpackbits(values.astype(np.uint8)[:, :, None], axis=2)[:, :, 8 - depth :]
    return np.packbits(bits.reshape(len(values), -1), axis=1)


def adam7(pixels):
    passes = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2))
    for top, left, down, across in (*passes, (1, 0, 2, 1)):
        yield from (row.tobytes() for row in pixels[top::down, left::across])


def pngs():
    gray16, rgb16 = GRAY.astype(int) * 256 + 255, RGB.astype(int) * 256 + 7
    rgba, gray_alpha = np.dstack([RGB, ALPHA]), np.dstack([GRAY, ALPHA])
    shown, shown_gray = (  # where one color is transparent
        quarters((WHITE, *COLORS[1:])).astype(np.uint8),
        three(quarters((GRAYS[0], 255, *GRAYS[2:])).astype(np.uint8)),
    )
    clear16 = clear(*(value * 256 + 7 for value in COLORS[0]))
    bomb = zlib.compress(b"x" * 20_000_000)
    notes = chunk(b"zTXt", b"note\0\0" + bomb) + chunk(b"iCCP", b"profile\0\0" + bomb)
    nonsense = chunk(b"acTL", bytes(8)) + chunk(b"acTL", bytes(3))
    for name, data, pixels, tolerance in (
        ("png", saved(RGB, "PNG"), RGB, 0),
        ("png gray", saved(GRAY, "PNG"), GRAY_RGB, 0),
        ("png 16-bit gray", png(gray16, depth=16, color=0), GRAY_RGB, 0),
        ("png 16-bit gray, one transparent",
         png(gray16, depth=16, color=0, before=clear(GRAYS[1] * 256 + 255)), shown_gray, 0),
        ("png 16-bit RGB", png(rgb16, depth=16, color=2), RGB, 0),
        ("png 16-bit RGB, one transparent",
         png(rgb16, depth=16, color=2, before=clear16), shown, 0),
        ("png RGB, one transparent", png(RGB, depth=8, color=2, before=clear(*COLORS[0])), shown,
         0),
        ("png RGBA", saved(rgba, "PNG"), on_white(RGB, ALPHA), 1),
        ("png 16-bit RGBA", png(rgba.astype(int) * 257, depth=16, color=6), on_white(RGB, ALPHA),
         1),
        ("png gray and alpha", png(gray_alpha, depth=8, color=4), on_white(GRAY_RGB, ALPHA), 1),
        ("png 16-bit gray and alpha", png(gray_alpha.astype(int) * 257, depth=16, color=4),
         on_white(GRAY_RGB, ALPHA), 1),
        ("png interlaced", png(adam7(RGB), depth=8, color=2, interlaced=True), RGB, 0),
        ("png orientation 8", saved(stored(RGB, 8), "PNG", exif=exif(8)), RGB, 0),
        ("apng", saved(RGB, "PNG", duration=50, **frames()), RGB, 0),
        ("png with absurd notes", png(RGB, depth=8, color=2, before=notes * 5), RGB, 0),
        ("png with a broken animation", png(RGB, depth=8, color=2, before=nonsense), RGB, 0),
    ):  # fmt: skip
        yield name, Odd(data, pixels, tolerance)
    index = quarters((0, 1, 2, 3))
    palette = chunk(b"PLTE", bytes(np.array(COLORS, np.uint8)))
    for depth in (8, 4, 2):
        data = png(packed(index, depth), depth=depth, color=3, before=palette)
        yield f"png {depth}-bit palette", Odd(data, RGB)
    before = palette + chunk(b"tRNS", bytes([255, 128, 0]))
    data = png(index, depth=8, color=3, before=before)
    yield "png palette with alpha", Odd(data, on_white(RGB, ALPHA), 1)
    data = png(packed(index, 2), depth=2, color=3, before=palette + chunk(b"tRNS", b"\0"))
    yield "png palette, one transparent", Odd(data, shown)
    data = png(packed(BLACK_WHITE // 255, 1), depth=1, color=0)
    yield "png 1-bit", Odd(data, three(BLACK_WHITE))
    for depth, levels in ((2, (0, 1, 2, 3)), (4, (0, 5, 9, 15))):
        grays = [level * 255 // (2**depth - 1) for level in levels]
        rows = packed(quarters(levels), depth)
        data = png(rows, depth=depth, color=0)
        yield f"png {depth}-bit gray", Odd(data, three(quarters(grays).astype(np.uint8)))
        shown = three(quarters((grays[0], 255, *grays[2:])).astype(np.uint8))
        data = png(rows, depth=depth, color=0, before=clear(levels[1]))
        yield f"png {depth}-bit gray, one transparent", Odd(data, shown)


# WebP, GIF, AVIF


def webps():
    rgba = np.dstack([RGB, ALPHA])
    turned = saved(stored(RGB, 5), "WebP", lossless=True, exif=exif(5))
    yield "webp", Odd(saved(RGB, "WebP", quality=95), RGB, 8)
    yield "webp lossless", Odd(saved(RGB, "WebP", lossless=True), RGB)
    yield "webp with alpha", Odd(saved(rgba, "WebP", lossless=True), on_white(RGB, ALPHA), 1)
    yield "webp animated", Odd(saved(RGB, "WebP", lossless=True, **frames()), RGB)
    yield "webp orientation 5", Odd(turned, RGB)


def gifs():
    first, second = (Image.fromarray(a).quantize(4) for a in (RGB, 255 - RGB))
    several = {"save_all": True, "append_images": [second], "disposal": 2, "comment": b"x" * 900}
    one_clear = saved(first, "GIF", transparency=first.getpixel((0, 0)))
    yield "gif", Odd(saved(first, "GIF"), RGB)
    yield "gif gray", Odd(saved(GRAY, "GIF"), GRAY_RGB)
    yield "gif animated", Odd(saved(first, "GIF", **several), RGB)
    yield "gif, one transparent", Odd(one_clear, quarters((WHITE, *COLORS[1:])).astype(np.uint8))
    yield "gif interlaced", Odd(saved(first, "GIF", interlace=1), RGB)


def avifs():
    best = {"quality": 95, "subsampling": "4:4:4"}
    rgba = np.dstack([RGB, ALPHA])
    yield "avif", Odd(saved(RGB, "AVIF", **best), RGB, LOSSY)
    yield "avif with alpha", Odd(saved(rgba, "AVIF", **best), on_white(RGB, ALPHA), 2 * LOSSY)
    yield "avif animated", Odd(saved(RGB, "AVIF", **frames(), **best), RGB, LOSSY)
    for turn in (3, 6):
        data = saved(stored(RGB, turn), "AVIF", exif=exif(turn), **best)
        yield f"avif orientation {turn}", Odd(data, RGB, LOSSY)


# BMP


def bmp(rows, *, bits, compression=0, masks=b"", palette=b"", down=False):
    """A BMP of rows that are already padded; `down` stores the top row first."""
    rows = [bytes(row) for row in rows]
    pixels = b"".join(rows if down else rows[::-1])
    start = 54 + len(masks) + len(palette)
    height = -SIDES[0] if down else SIDES[0]
    colors = len(palette) // 4
    numbers = (40, SIDES[1], height, 1, bits, compression, len(pixels), 0, 0, colors, 0)
    info = struct.pack("<LllHHLLLLLL", *numbers)
    head = b"BM" + struct.pack("<LLL", start + len(pixels), 0, start)
    return head + info + masks + palette + pixels


def bmps():
    bgr = RGB[:, :, ::-1]
    yield "bmp", Odd(saved(RGB, "BMP"), RGB)
    yield "bmp gray", Odd(saved(GRAY, "BMP"), GRAY_RGB)
    yield "bmp 1-bit", Odd(saved(BLACK_WHITE, "BMP", mode="1"), three(BLACK_WHITE))
    yield "bmp top-down", Odd(bmp(bgr.reshape(SIDES[0], -1), bits=24, down=True), RGB)
    rows = np.dstack([bgr, np.zeros_like(ALPHA)]).reshape(SIDES[0], -1)
    yield "bmp 32-bit", Odd(bmp(rows, bits=32), RGB)
    five, six = (RGB >> 3).astype("<u2"), (RGB >> 2).astype("<u2")
    rows = (five[:, :, 0] << 11 | six[:, :, 1] << 5 | five[:, :, 2]).view(np.uint8)
    masks = struct.pack("<LLL", 0xF800, 0x7E0, 0x1F)
    yield "bmp 16-bit", Odd(bmp(rows, bits=16, compression=3, masks=masks), RGB, 8)
    palette = b"".join(bytes([b, g, r, 0]) for r, g, b in COLORS)
    half = SIDES[1] // 2
    runs = [[half, 2 * row, half, 2 * row + 1, 0, 0] for row in [0] * 16 + [1] * 16]
    yield "bmp run-length", Odd(bmp(runs, bits=8, compression=1, palette=palette), RGB)


# TIFF


def tiff(pixels, *, order="<", photometric=2, depth=8, format=1, samples=3, **tags):
    """An uncompressed TIFF of one strip."""
    content = pixels.tobytes()
    values = {
        256: SIDES[1], 257: SIDES[0], 258: depth, 259: 1, 262: photometric, 273: 8,
        277: samples, 278: SIDES[0], 279: len(content), 339: format,
    } | {int(name[1:]): value for name, value in tags.items()}  # fmt: skip
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = b"".join(
        struct.pack(order + "HHLL", tag, 4, 1, value) for tag, value in sorted(values.items())
    )
    count = struct.pack(order + "H", len(values))
    return mark + struct.pack(order + "L", 8 + len(content)) + content + count + entries + bytes(4)


def tiffs():
    image = Image.fromarray(RGB)
    gray16 = GRAY.astype(np.uint16) * 256 + 255
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "packbits"):
        yield f"tiff {compression}", Odd(saved(RGB, "TIFF", compression=compression), RGB)
    yield "tiff jpeg", Odd(saved(RGB, "TIFF", compression="jpeg", quality=95), RGB, 2 * LOSSY)
    data = saved(BLACK_WHITE, "TIFF", mode="1", compression="group4")
    yield "tiff fax", Odd(data, three(BLACK_WHITE))
    yield "tiff big", Odd(saved(RGB, "TIFF", big_tiff=True), RGB)
    yield "tiff palette", Odd(saved(image.quantize(4), "TIFF"), RGB)
    yield "tiff CMYK", Odd(saved(image.convert("CMYK"), "TIFF"), RGB)
    data = saved(np.dstack([RGB, ALPHA]), "TIFF")
    yield "tiff RGBA", Odd(data, on_white(RGB, ALPHA), 1)
    data = saved(Image.fromarray(np.dstack([GRAY, ALPHA])), "TIFF")
    yield "tiff gray and alpha", Odd(data, on_white(GRAY_RGB, ALPHA), 1)
    yield "tiff of two pages", Odd(saved(RGB, "TIFF", **frames()), RGB)
    for order in "<>":
        one = {"order": order, "photometric": 1, "samples": 1}
        word = order + "u2"
        data = tiff((RGB.astype(np.uint16) * 257).astype(word), depth=16, order=order)
        yield f"tiff 16-bit RGB {order}", Odd(data, RGB)
        yield f"tiff 16-bit gray {order}", Odd(tiff(gray16.astype(word), depth=16, **one), GRAY_RGB)
        small = (GRAY / 255).astype(order + "f4")
        data = tiff(small, depth=32, format=3, **one)
        yield f"tiff float 0 to 1 {order}", Odd(data, GRAY_RGB)
        data = tiff(GRAY.astype(order + "f4"), depth=32, format=3, **one)
        yield f"tiff float 0 to 255 {order}", Odd(data, GRAY_RGB)
        data = tiff(gray16.astype(order + "i4"), depth=32, format=2, **one)
        yield f"tiff 32-bit {order}", Odd(data, GRAY_RGB, 1)
    white_is_zero = {"photometric": 0, "samples": 1}
    data = tiff(65535 - gray16, depth=16, **white_is_zero)
    yield "tiff 16-bit, white is zero", Odd(data, GRAY_RGB)
    yield "tiff 8-bit, white is zero", Odd(tiff(255 - GRAY, **white_is_zero), GRAY_RGB)
    for turn in (2, 6):
        pixels = stored(RGB, turn)
        height, width = pixels.shape[:2]
        data = tiff(pixels, t256=width, t257=height, t278=height, t274=turn)
        yield f"tiff orientation {turn}", Odd(data, RGB)
    data = tiff(RGB, t700=9, t34665=99_999_999, t34675=5)
    yield "tiff with broken notes", Odd(data, RGB)
    lab = quarters([(lightness, 0, 0) for lightness in GRAYS]).astype(np.uint8)
    # lightness as gray, by the definition of CIE L*a*b* and the curve of sRGB
    lightness = np.array(GRAYS) * 100 / 255
    linear = np.where(lightness > 8, ((lightness + 16) / 116) ** 3, lightness / 903.3)
    curve = np.where(linear > 0.0031308, 1.055 * linear ** (1 / 2.4) - 0.055, 12.92 * linear)
    grays = three(quarters(np.rint(255 * curve)).astype(np.uint8))
    yield "tiff Lab", Odd(saved(Image.fromarray(lab, "LAB"), "TIFF"), grays, 3)


def odd_images():
    kinds = (jpegs, pngs, webps, gifs, avifs, bmps, tiffs)
    return {name: odd for kind in kinds for name, odd in kind()}


def bombs():
    """Small files that claim 60000 x 60000 pixels, or as much as the format can say."""
    side = 60_000
    yield "PNG", png([bytes(10)], sides=(side, side), depth=8, color=2)
    gif = saved(Image.fromarray(GRAY), "GIF")
    yield "GIF", gif[:6] + struct.pack("<HH", side, side) + gif[10:]
    place = gif.index(b",\0\0\0\0")
    frame = struct.pack("<HHHH", 0, 0, side, side)
    control = b"!\xf9\x04\x08\0\0\0\0"  # with a disposal, for which Pillow reserves a frame
    yield "GIF frame", gif[:place] + control + b"," + frame + gif[place + 9 :]
    big = {"t256": side, "t257": side, "t278": side}
    yield "TIFF", tiff(RGB, **big)
    yield "TIFF lzw", tiff(RGB, t259=5, **big)
    webp = bytearray(saved(RGB, "WebP", lossless=True))
    webp[21:25] = struct.pack("<L", 0x3FFF | 0x3FFF << 14)
    yield "WebP lossless", bytes(webp)
    webp = bytearray(saved(RGB, "WebP"))
    webp[26:30] = struct.pack("<HH", 0x3FFF, 0x3FFF)
    yield "WebP", bytes(webp)
    webp = bytearray(saved(RGB, "WebP", **frames()))
    webp[24:30] = (side - 1).to_bytes(3, "little") * 2
    yield "WebP animated", bytes(webp)
    plain = saved(RGB, "BMP")
    yield "BMP", plain[:18] + struct.pack("<LL", side, side) + plain[26:]
    jpeg = saved(RGB, "JPEG")
    place = jpeg.index(b"\xff\xc0") + 5
    yield "JPEG", jpeg[:place] + struct.pack(">HH", side, side) + jpeg[place + 4 :]
    avif = saved(RGB, "AVIF")
    place = avif.index(b"ispe") + 8
    yield "AVIF", avif[:place] + struct.pack(">LL", side, side) + avif[place + 8 :]
