"""Arrays → Pillow images. Every image is RGB.

Sheets are tiles side by side; overlays lie on a picture's own pixels; plots have axes, or none
where axes would mean nothing.

Shapes: h x w patches, n tiles, C channels.
"""

import colorsys
import math
from collections.abc import Sequence
from functools import cache
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitrail.inspection.findings import Box, Filters, PositionTiles, Scatter, Study

Style = Literal["light", "heat"]
Color = tuple[int, int, int]

PAPER, INK, SOFT, LINE = (255, 255, 255), (29, 29, 31), (107, 107, 112), (221, 221, 221)
EDGE = (160, 160, 160)  # around what a model sees
LARGEST, SMALLEST = 480, 240  # pixels of a picture's longer side
AROUND, LETTERS = 12, 18  # pixels around a picture of a strip, and of a line below it
GAP = 3  # pixels between tiles
COLUMNS = 7  # of a sheet, as in figure 7
FILTER, UNIT = 64, 84  # about how many pixels of a tile
TILES = 720  # about how many pixels all tiles of positions take
LABEL = 120  # about how many pixels the name of an axis takes
MOST_TILES = 16  # of positions, along a side
DARK, UNSEEN = 0.3, 0.15  # how bright a picture is where a map is 0, and where there is none
HIDDEN = 0.75  # how much of a picture heat hides where a map is 1
FINE = 2  # plots are drawn this much larger and shrunk, so that dots are round
WIDTH, HEIGHT = 720, 440  # of a plot
LEGEND = 24  # classes that a legend names

# Nine colors of viridis and of inferno (van der Walt & Smith 2015), which get lighter evenly, and a
# map for numbers of both signs, white at zero. Between them colors are mixed.
VIRIDIS = ((68, 1, 84), (71, 44, 122), (59, 81, 139), (44, 113, 142), (33, 144, 141))
VIRIDIS += ((39, 173, 129), (92, 200, 99), (170, 220, 50), (253, 231, 37))
INFERNO = ((0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85))
INFERNO += ((227, 89, 51), (249, 140, 10), (249, 201, 50), (252, 255, 164))
SIGNS = ((5, 72, 130), (67, 147, 195), (247, 247, 247), (214, 96, 77), (140, 10, 37))
VARIANTS = ((15, 118, 110), (194, 65, 12), (79, 70, 229), (161, 98, 7))
CLASSES = (
    *((31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189)),
    *((140, 86, 75), (227, 119, 194), (23, 190, 207), (188, 189, 34), (90, 90, 96)),
)


def colored(values: np.ndarray, anchors: Sequence[Color]) -> np.ndarray:
    """Values from 0 to 1, of any shape, as colors between the anchors: uint8 (..., 3)."""
    places = np.linspace(0, 1, len(anchors))
    channels = [np.interp(values, places, channel) for channel in zip(*anchors, strict=True)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def stretched(values: np.ndarray) -> np.ndarray:
    """Values moved and scaled so that they run from 0 to 1; 0.5 where all are the same."""
    low, high = values.min(), values.max()
    return (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)


def bytes_of(values: np.ndarray) -> np.ndarray:
    return (values.clip(0, 1) * 255).round().astype(np.uint8)


# --- Sheets ---


def filter_sheet(filters: Filters) -> Image.Image:
    """Figure 7, left: each filter on its own scale, its smallest number black, its largest white.

    Filters of three channels are in color, all others the mean of their channels in gray.
    """
    tiles = [stretched(component) for component in filters.components]  # (P, P, C)
    if filters.components.shape[-1] != 3:
        means = filters.components.mean(axis=-1, keepdims=True)
        tiles = [np.repeat(stretched(mean), 3, axis=-1) for mean in means]
    return sheet([bytes_of(tile) for tile in tiles], FILTER)


def mixing_sheet(units: np.ndarray) -> Image.Image:
    """Token-mixing weights (n, h, w), each on its own scale: blue below zero, red above."""
    largest = np.abs(units).max(axis=(1, 2), keepdims=True)
    scaled = units / np.where(largest > 0, largest, 1)
    return sheet([colored(0.5 + 0.5 * unit, SIGNS) for unit in scaled], UNIT)


def sheet(tiles: Sequence[np.ndarray], side: int) -> Image.Image:
    """Tiles, uint8 (h, w, 3), in rows of seven, each cell enlarged to a square of pixels."""
    cell = max(1, round(side / max(tiles[0].shape[:2])))
    high, wide = tiles[0].shape[0] * cell + GAP, tiles[0].shape[1] * cell + GAP
    columns, rows = min(COLUMNS, len(tiles)), math.ceil(len(tiles) / COLUMNS)
    page = Image.new("RGB", (columns * wide + GAP, rows * high + GAP), PAPER)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, COLUMNS)
        page.paste(enlarged(tile, cell), (GAP + column * wide, GAP + row * high))
    return page


def enlarged(colors: np.ndarray, cell: int) -> Image.Image:
    """Each cell of (h, w, 3) as a square of pixels."""
    return Image.fromarray(colors.repeat(cell, axis=0).repeat(cell, axis=1))


def position_sheet(tiles: PositionTiles) -> Image.Image:
    """Figure 7, center: for each patch a tile, at its place, that shows how like it all others are.

    Colors run from the smallest similarity to 1. Of a grid of more than 16 rows or columns, every
    second, third, … is shown. Rows and columns are counted from 0.
    """
    high, wide = tiles.similarity.shape[:2]
    rows = range(0, high, math.ceil(high / MOST_TILES))
    columns = range(0, wide, math.ceil(wide / MOST_TILES))
    cell = min(LABEL, max(1, TILES // max(len(rows) * high, len(columns) * wide)))
    down, across = high * cell + GAP, wide * cell + GAP  # from one tile to the next
    left, top, right, bottom = 52, 52, 52 + len(columns) * across, 52 + len(rows) * down
    beside, below = max(right, left + LABEL) + 10, max(bottom, top + LABEL)
    page = Image.new("RGB", (max(beside + 60, left + 290), below + 40), PAPER)
    pen = ImageDraw.Draw(page)
    low = min(float(tiles.similarity.min()), 0.9)  # a scale of some length, if all are alike
    scaled = ((tiles.similarity - low) / (1 - low)).clip(0, 1)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            tile = enlarged(colored(scaled[row, column], VIRIDIS), cell)
            page.paste(tile, (left + x * across, top + y * down))
    pen.text((left, 10), tiles.title, INK, font(15))
    pen.text((left, 31), "cosine similarity, a tile for each patch", SOFT, font(12))
    sparse_x, sparse_y = math.ceil(22 / across), math.ceil(16 / down)  # so that none collide
    for x in range(0, len(columns), sparse_x):
        middle = left + x * across + wide * cell / 2
        pen.text((middle, bottom + 2), str(columns[x]), SOFT, font(12), "ma")
    for y in range(0, len(rows), sparse_y):
        middle = top + y * down + high * cell / 2
        pen.text((left - 6, middle), str(rows[y]), SOFT, font(12), "rm")
    middle = max(left + LABEL // 2, (left + right) // 2)
    pen.text((middle, bottom + 20), "column of the patch", SOFT, font(12), "ma")
    side_label(page, "row of the patch", (8, max(top + LABEL // 2, (top + bottom) // 2)))
    bar(page, (beside, top, below - GAP - top), low)
    return page


def bar(page: Image.Image, place: tuple[int, int, int], low: float) -> None:
    """A color bar from `low` to 1 at (x, y), of some height."""
    x, y, height = place
    colors = colored(np.linspace(1, 0, height), VIRIDIS)[:, None]
    page.paste(Image.fromarray(colors.repeat(14, axis=1)), (x, y))
    pen = ImageDraw.Draw(page)
    for share in (0, 0.5, 1):
        value = low + share * (1 - low)
        middle = y + (1 - share) * (height - 1)
        pen.text((x + 20, middle), f"{value:.2f}", SOFT, font(12), "lm")


# --- On pictures ---


def heat(values: np.ndarray) -> Image.Image:
    """A map (h, w), 0 to 1, as colors that hide more the larger it is: RGBA, a pixel each."""
    values = values.clip(0, 1)
    return Image.fromarray(np.dstack([colored(values, INFERNO), bytes_of(HIDDEN * values)]))


def overlay(
    pixels: np.ndarray, values: np.ndarray, box: Box, style: Style = "light", *, lag: float = 0.0
) -> Image.Image:
    """A picture, and on the part of it that the model sees a map (h, w).

    "light" is bright where the map is large and dark elsewhere, as in figure 6; "heat" lays colors
    over the picture, which is gray then. The map is stretched to run from 0 to 1, its square root
    is shown, so that what is little is seen too, and it is enlarged smoothly, moved up and left by
    `lag` patches. What the model does not see is gray and very dark. The longer side has 240 to 480
    pixels.
    """
    picture = fitted(pixels)
    down, across = picture.height / pixels.shape[0], picture.width / pixels.shape[1]
    left, right = round(box.left * across), round(box.right * across)
    top, bottom = round(box.top * down), round(box.bottom * down)
    size = (max(1, right - left), max(1, bottom - top))
    more = np.pad(np.sqrt(stretched(values)), (0, 1), mode="edge").astype(np.float32)
    window = (lag, lag, values.shape[1] + lag, values.shape[0] + lag)
    small = Image.fromarray(more).resize(size, Image.Resampling.BICUBIC, window)
    smooth = np.asarray(small).clip(0, 1)
    part = picture.crop((left, top, left + size[0], top + size[1]))
    if style == "light":
        shade = DARK + (1 - DARK) * smooth[:, :, None]
        seen = Image.fromarray((np.asarray(part) * shade).round().astype(np.uint8))
    else:
        over, gray = heat(smooth), part.convert("L").convert("RGB")
        seen = Image.composite(over.convert("RGB"), gray, over.getchannel("A"))
    page = picture.convert("L").point(lambda value: value * UNSEEN).convert("RGB")
    page.paste(seen, (left, top))
    if size != picture.size:
        edge = (left, top, left + size[0] - 1, top + size[1] - 1)
        ImageDraw.Draw(page).rectangle(edge, outline=EDGE)
    return page


def fitted(pixels: np.ndarray) -> Image.Image:
    """The picture with a longer side of 240 to 480 pixels."""
    picture = Image.fromarray(pixels)
    longer = max(picture.size)
    scale = min(max(longer, SMALLEST), LARGEST) / longer
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    return picture if scale == 1 else picture.resize(size, Image.Resampling.BICUBIC)


def color_picture(colors: np.ndarray, size: tuple[int, int]) -> Image.Image:
    """Colors (h, w, 3), 0 to 1, as a picture of some width and height, each patch an even area."""
    return Image.fromarray(bytes_of(colors)).resize(size, Image.Resampling.NEAREST)


def strip(images: Sequence[Image.Image], captions: Sequence[str], width: int = 1200) -> Image.Image:
    """Pictures side by side, a caption under each, in as many rows as the width asks for.

    A caption may have several lines; what is too long for its picture ends with "…".
    """
    text = LETTERS * max(caption.count("\n") + 1 for caption in captions) + AROUND
    places, x, y, high = [], AROUND, AROUND, 0
    for image in images:
        if x > AROUND and x + image.width + AROUND > width:  # the next row, below the highest
            x, y, high = AROUND, y + high + text, 0
        places.append((x, y))
        x, high = x + image.width + AROUND, max(high, image.height)
    right = max(x + image.width for (x, _), image in zip(places, images, strict=True))
    page = Image.new("RGB", (right + AROUND, y + high + text), PAPER)
    pen = ImageDraw.Draw(page)
    for image, caption, (x, y) in zip(images, captions, places, strict=True):
        page.paste(image, (x, y))
        for line, told in enumerate(caption.split("\n")):
            below = y + image.height + 5 + LETTERS * line
            pen.text((x, below), shortened(told, image.width, font(13)), INK, font(13))
    return page


# --- Plots ---


def distance_plot(study: Study) -> Image.Image:
    """Figure 7, right, and figure 11: a dot for each head, by layer; a color for each variant."""
    layers = len(study.entropy)
    largest = max(float(values.max()) for values in study.distance.values())
    step = nice(largest / 4)
    top = step * max(1, math.ceil(largest / step))
    page, pen = canvas(WIDTH, HEIGHT)
    left, right, above, below = 64, WIDTH - 16, 40, HEIGHT - 52

    def x(layer: float) -> float:
        return left + (layer + 0.5) / layers * (right - left)

    def y(distance: float) -> float:
        return below - distance / top * (below - above)

    for mark in np.arange(0, top + step / 2, step):
        rule(pen, (left, y(mark)), (right, y(mark)))
        words(pen, (left - 8, y(mark)), f"{mark:g}", SOFT, 12, "rm")
    for layer in range(0, layers, math.ceil(layers / 16)):
        words(pen, (x(layer), below + 8), str(layer), SOFT, 12, "ma")
    words(pen, ((left + right) / 2, below + 28), "layer", SOFT, 13, "ma")
    variants = len(study.distance)
    beside = min(0.22, 12 * layers / (right - left))  # of a layer, between two variants
    spot = left
    for number, (name, values) in enumerate(study.distance.items()):
        color = VARIANTS[number % len(VARIANTS)]
        for layer, heads in enumerate(values):
            for distance in heads:
                place = x(layer + beside * (number - (variants - 1) / 2)), y(float(distance))
                dot(pen, place, 4, color)
        dot(pen, (spot + 5, 20), 5, color)
        words(pen, (spot + 16, 20), name, INK, 13, "lm")
        spot += 36 + font(13).getlength(name)
    image = page.reduce(FINE)
    side_label(image, "mean attention distance (pixels)", (10, (above + below) // 2))
    return image


def scatter_plot(scatter: Scatter) -> Image.Image:
    """A data set as dots, a color for each class.

    There are no axes: only nearness means something.
    """
    names = scatter.classes[:LEGEND]
    left_out = len(scatter.classes) - len(names)
    lines = [shortened(name, 170, font(13)) for name in names]
    lines += [f"and {left_out} more"] if left_out else []
    side = max(520, 24 + 20 * len(lines))
    wide = side + 24 + max((math.ceil(font(13).getlength(line)) for line in lines), default=0) + 24
    page, pen = canvas(wide, side + 24)
    points = scatter.points - scatter.points.min(axis=0) if len(scatter.points) else scatter.points
    extent = max(float(points.max()), 1e-12) if len(points) else 1.0
    points = points / extent + (1 - points.max(axis=0, initial=0) / extent) / 2  # in the middle
    size = 3.5 if len(points) <= 800 else 2.5
    for (x, y), label in zip(points.tolist(), scatter.labels.tolist(), strict=True):
        place = 14 + x * (side - 28), 14 + (1 - y) * (side - 28)
        dot(pen, place, size, class_color(label, len(scatter.classes)))
    for line, name in enumerate(lines):
        middle = 24 + 20 * line
        if line < len(names):
            dot(pen, (side + 8, middle), 5, class_color(line, len(scatter.classes)))
        words(pen, (side + 20, middle), name, INK if line < len(names) else SOFT, 13, "lm")
    words(pen, (14, side + 12), scatter.method, SOFT, 12, "lm")
    return page.reduce(FINE)


def class_color(label: int, classes: int) -> Color:
    """Ten colors that are easily told apart, or as many hues as there are classes."""
    if not 0 <= label < classes:
        return LINE
    if classes <= len(CLASSES):
        return CLASSES[label]
    light = (0.85, 0.6, 0.72)[label % 3]
    red, green, blue = colorsys.hsv_to_rgb(label / classes, 0.85, light)
    return round(255 * red), round(255 * green), round(255 * blue)


def canvas(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    page = Image.new("RGB", (width * FINE, height * FINE), PAPER)
    return page, ImageDraw.Draw(page)


def dot(pen: ImageDraw.ImageDraw, middle: tuple[float, float], radius: float, fill: Color) -> None:
    x, y, r = (FINE * number for number in (*middle, radius))
    pen.ellipse((x - r, y - r, x + r, y + r), fill, PAPER)


def rule(pen: ImageDraw.ImageDraw, start: tuple[float, float], end: tuple[float, float]) -> None:
    pen.line([tuple(FINE * number for number in place) for place in (start, end)], LINE, FINE)


def words(
    pen: ImageDraw.ImageDraw,
    place: tuple[float, float],
    text: str,
    fill: Color,
    size: int,
    anchor: str,
) -> None:
    pen.text((FINE * place[0], FINE * place[1]), text, fill, font(FINE * size), anchor)


def side_label(page: Image.Image, text: str, place: tuple[int, int]) -> None:
    """A label that is read from below, its middle at `place`."""
    width = math.ceil(font(13).getlength(text)) + 2
    label = Image.new("RGB", (width, 18), PAPER)
    ImageDraw.Draw(label).text((1, 1), text, SOFT, font(13))
    page.paste(label.rotate(90, expand=True), (place[0], place[1] - width // 2))


def shortened(text: str, width: float, how: ImageFont.FreeTypeFont) -> str:
    """The text, or as much of its beginning as fits."""
    if how.getlength(text) <= width:
        return text
    while text and how.getlength(f"{text}…") > width:
        text = text[:-1]
    return f"{text}…"


def nice(step: float) -> float:
    """1, 2 or 5 times a power of ten, no less than the step."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-6)))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


@cache
def font(size: int) -> ImageFont.FreeTypeFont:
    made = ImageFont.load_default(size)
    assert isinstance(made, ImageFont.FreeTypeFont)
    return made
