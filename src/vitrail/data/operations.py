"""The small changes that RandAugment and its relatives are made of, one function each.

An operation takes a picture, an amount, and where it moves pixels a canvas; it is deterministic.
A picture is a Pillow image of mode RGB or L, and is never written to. Amounts mean what they mean
in Pillow and torchvision (factors are 1 for "no change"), and so do the results, within:

    0 gray levels   every operation on colors, and all that moves pixels with NEAREST or BICUBIC
    2 gray levels   shear and translate with BILINEAR, and there the seam between picture and fill
                    is soft where Pillow's is jagged

What can be done by a table of 256 bytes is: Pillow's enhancers build whole pictures to blend with.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageChops, ImageStat
from PIL.Image import Resampling, Transform

Fill = int | tuple[int, int, int]

LEVELS = np.arange(256)  # every value that a byte of a picture can have
FIXED_POINT = 2**15


class Canvas(NamedTuple):
    """What an operation that moves or covers pixels needs to know."""

    fill: Fill = 128  # color of what lies outside the picture
    resample: Resampling = Resampling.NEAREST
    spot: tuple[float, float] = (0.5, 0.5)  # where cutout cuts, as shares of width and height

    def paint(self, image: Image.Image) -> int | tuple[int, int, int]:
        """The fill as a color of this picture's mode."""
        red, green, blue = (self.fill,) * 3 if isinstance(self.fill, int) else self.fill
        if image.mode == "L":
            return round(0.299 * red + 0.587 * green + 0.114 * blue)
        return red, green, blue


# Colors: each pixel stays where it is.


def identity(image: Image.Image, _amount: float) -> Image.Image:
    return image


def invert(image: Image.Image, _amount: float) -> Image.Image:
    return ImageChops.invert(image)


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """0 is black."""
    return away_from(0, image, factor)


def contrast(image: Image.Image, factor: float) -> Image.Image:
    """0 is the gray of the picture's mean."""
    mean = ImageStat.Stat(image.convert("L")).mean[0]
    return away_from(int(mean + 0.5), image, factor)


def contrast_by_size(image: Image.Image, factor: float) -> Image.Image:
    """The contrast of TensorFlow's RandAugment, which models of Google were trained with.

    Its "mean" sums the counts of a histogram where it should weigh them, and so is the number of
    pixels / 256, whatever they show: 196 for 224 x 224, white from 256 x 256 on.
    """
    return away_from(min(255, image.width * image.height // 256), image, factor)


def color(image: Image.Image, factor: float) -> Image.Image:
    """0 is without color, above 1 more of it."""
    if image.mode == "L":
        return image
    gray = image.convert("L")
    return Image.blend(Image.merge("RGB", (gray, gray, gray)), image, factor)


def hue(image: Image.Image, turn: float) -> Image.Image:
    """Turn the color wheel by a share of the circle, -0.5 to 0.5."""
    if image.mode == "L":
        return image
    turned = (LEVELS + int(turn * 255)) % 256
    hsv = lookup(image.convert("HSV"), np.stack([turned, LEVELS, LEVELS]))
    return hsv.convert("RGB")


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """0 is smoothed by (1 1 1, 1 5 1, 1 1 1) / 13, above 1 sharpened; the outermost pixels stay."""
    if min(image.size) < 3:
        return image
    pixels = np.asarray(image).astype(np.uint16)
    total = pixels[:-2] + pixels[1:-1] + pixels[2:]
    total = total[:, :-2] + total[:, 1:-1] + total[:, 2:]
    total += 4 * pixels[1:-1, 1:-1]
    total += 6  # 13 / 2: rounds the division
    total //= 13
    smooth = image.copy()
    smooth.paste(Image.fromarray(total.astype(np.uint8)), (1, 1))
    return Image.blend(smooth, image, factor)


def posterize(image: Image.Image, bits: float) -> Image.Image:
    """Keep the highest bits of each value: 8 change nothing, 0 leave black."""
    bits = min(8, max(0, int(bits)))
    return image if bits == 8 else lookup(image, LEVELS & (256 - 2 ** (8 - bits)))


def solarize(image: Image.Image, threshold: float) -> Image.Image:
    """Invert the values from the threshold on."""
    return lookup(image, np.where(threshold > LEVELS, LEVELS, 255 - LEVELS))


def solarize_add(image: Image.Image, addition: float) -> Image.Image:
    """Brighten the values below 128."""
    return lookup(image, np.where(LEVELS < 128, LEVELS + int(addition), LEVELS))


def autocontrast(image: Image.Image, _amount: float) -> Image.Image:
    """Stretch each channel so that it reaches from 0 to 255."""
    tables = []
    for counts in histograms(image):
        low, high = counts.nonzero()[0][[0, -1]]
        scale = 255 / max(1, high - low)
        tables.append(LEVELS * scale - low * scale if low < high else LEVELS)
    return lookup(image, np.stack(tables))


def equalize(image: Image.Image, _amount: float) -> Image.Image:
    """Spread each channel so that all values become about equally frequent."""
    tables = []
    for counts in histograms(image):
        step = int(counts.sum() - counts[counts.nonzero()[0][-1]]) // 255
        below = np.cumsum(counts) - counts
        tables.append((below + step // 2) // step if step else LEVELS)
    return lookup(image, np.stack(tables))


def away_from(gray: int, image: Image.Image, factor: float) -> Image.Image:
    """gray + factor * (value - gray), in the single precision of Pillow's blending."""
    return lookup(image, gray + np.float32(factor) * (LEVELS - gray).astype(np.float32))


def lookup(image: Image.Image, table: np.ndarray) -> Image.Image:
    """Every value replaced by its entry; (256,) for all channels or (channels, 256)."""
    entries = np.clip(table, 0, 255).astype(np.uint8).tobytes()
    return image.point(entries * (len(image.getbands()) * 256 // len(entries)))


def histograms(image: Image.Image) -> np.ndarray:
    return np.array(image.histogram()).reshape(-1, 256)


# Places: pixels move, and what comes from outside the picture is filled.


def shear_x(image: Image.Image, amount: float, canvas: Canvas) -> Image.Image:
    """Every row moves left by `amount` of its distance from the top."""
    return slide_rows(image, amount, 0.0, canvas)


def shear_y(image: Image.Image, amount: float, canvas: Canvas) -> Image.Image:
    """Every column moves up by `amount` of its distance from the left."""
    return slide_columns(image, amount, 0.0, canvas)


def translate_x(image: Image.Image, pixels: float, canvas: Canvas) -> Image.Image:
    """To the right."""
    return slide_rows(image, 0.0, -pixels, canvas)


def translate_y(image: Image.Image, pixels: float, canvas: Canvas) -> Image.Image:
    """Down."""
    return slide_columns(image, 0.0, -pixels, canvas)


def rotate(image: Image.Image, degrees: float, canvas: Canvas) -> Image.Image:
    """Counterclockwise, about the middle."""
    return image.rotate(degrees, canvas.resample, fillcolor=canvas.paint(image))


def cutout(image: Image.Image, half: float, canvas: Canvas) -> Image.Image:
    """Paint over a square of twice `half` pixels, less what of it lies outside."""
    half = int(half)
    x, y = int(canvas.spot[0] * image.width), int(canvas.spot[1] * image.height)
    right, bottom = min(image.width, x + half), min(image.height, y + half)
    covered = image.copy()
    covered.paste(canvas.paint(image), (max(0, x - half), max(0, y - half), right, bottom))
    return covered


def slide_rows(image: Image.Image, slope: float, offset: float, canvas: Canvas) -> Image.Image:
    """The pixel at (x, y) is taken from x + slope * y + offset."""
    if canvas.resample != Resampling.BILINEAR:
        return affine(image, (1, slope, offset, 0, 1, 0), canvas.resample, canvas)
    slope, offset = to_fixed_point(slope), to_fixed_point(offset)
    first = affine(image, (1, slope, offset - 0.5, 0, 1, 0), Resampling.NEAREST, canvas)
    second = affine(image, (1, slope, offset + 0.5, 0, 1, 0), Resampling.NEAREST, canvas)
    share = (slope * (np.arange(image.height) + 0.5) + offset) % 1  # how near to the second
    return mix(first, second, share[:, None] if slope else share[0])


def slide_columns(image: Image.Image, slope: float, offset: float, canvas: Canvas) -> Image.Image:
    """The pixel at (x, y) is taken from y + slope * x + offset."""
    if canvas.resample != Resampling.BILINEAR:
        return affine(image, (1, 0, 0, slope, 1, offset), canvas.resample, canvas)
    slope, offset = to_fixed_point(slope), to_fixed_point(offset)
    first = affine(image, (1, 0, 0, slope, 1, offset - 0.5), Resampling.NEAREST, canvas)
    second = affine(image, (1, 0, 0, slope, 1, offset + 0.5), Resampling.NEAREST, canvas)
    share = (slope * (np.arange(image.width) + 0.5) + offset) % 1
    return mix(first, second, share if slope else share[0])


def affine(
    image: Image.Image, matrix: tuple[float, ...], resample: Resampling, canvas: Canvas
) -> Image.Image:
    return image.transform(
        image.size, Transform.AFFINE, matrix, resample, fillcolor=canvas.paint(image)
    )


def mix(first: Image.Image, second: Image.Image, share: np.ndarray) -> Image.Image:
    """Interpolate between two pictures; one share for all pixels, or one per row or column.

    Two nearest neighbors and a mask: a third of what Pillow's bilinear filter takes.
    """
    if share.ndim == 0:
        return Image.blend(first, second, float(share))
    weights = np.rint(255 * share).astype(np.uint8)
    first.paste(second, mask=Image.fromarray(np.broadcast_to(weights, first.size[::-1])))
    return first


def to_fixed_point(number: float) -> float:
    """Nearest number on which Pillow's 16-bit fractions and floats agree to the pixel."""
    return round(number * FIXED_POINT) / FIXED_POINT


Operation = Callable[[Image.Image, float, Canvas], Image.Image]

COLORS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": identity,
    "invert": invert,
    "brightness": brightness,
    "contrast": contrast,
    "contrast_by_size": contrast_by_size,
    "color": color,
    "hue": hue,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "autocontrast": autocontrast,
    "equalize": equalize,
}
PLACES: dict[str, Operation] = {
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
    "rotate": rotate,
    "cutout": cutout,
}


def without_canvas(change: Callable[[Image.Image, float], Image.Image]) -> Operation:
    return lambda image, amount, _canvas: change(image, amount)


OPERATIONS: dict[str, Operation] = PLACES | {
    name: without_canvas(change) for name, change in COLORS.items()
}
