"""Images on pages: data URLs, thumbnails, heat maps on images; figures that consist of images.

Shapes: h x w patches, P x P pixels of a filter, C channels, n tiles.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from vitrail.data.datasets import Dataset
from vitrail.data.decode import thumbnail, to_jpeg, to_png
from vitrail.formatting import truncate
from vitrail.reports.figures import MAX_LAYER_TICKS, add_axes, new_figure, plot_style, printable
from vitrail.reports.html import LIGHT

if TYPE_CHECKING:
    from vitrail.inspection.images import Box

MIN_SIDE, MAX_SIDE = 240, 480  # pixels of a displayed image's longer side
BOX_COLOR = (160, 160, 160)  # around the part that the model sees
DARKEST, OUTSIDE = 0.3, 0.15  # brightness where a map is 0, and outside of the box
OPACITY = 0.75  # of the heat map where it is 1
MAX_CAPTION = 22  # letters
MAX_TILES = 16  # of position similarities, along a side
MOSAIC = 720  # about how many pixels a mosaic has along its longer side
MOSAIC_GAP = 3

# Nine colors of inferno (van der Walt & Smith 2015). The server draws heat maps too and does not
# load matplotlib for them.
INFERNO = ((0, 0, 4), (31, 12, 72), (85, 15, 109), (136, 34, 106), (186, 54, 85))
INFERNO += ((227, 89, 51), (249, 140, 10), (249, 201, 50), (252, 255, 164))


def data_url(data: bytes, format: str = "png") -> str:
    return f"data:image/{format};base64,{base64.b64encode(data).decode('ascii')}"


def smallest_data_url(image: Image.Image) -> str:
    """Encode as PNG or JPEG, whichever is smaller."""
    png, jpeg = to_png(image), to_jpeg(image)
    return data_url(png) if len(png) <= len(jpeg) else data_url(jpeg, "jpeg")


def thumbnail_url(dataset: Dataset, index: int, side: int) -> str | None:
    """Return a thumbnail, not enlarged, for the `src` of an <img>; None if it cannot be read."""
    image = thumbnail(dataset, index, side, enlarge=False)
    return None if image is None else smallest_data_url(image)


def image_url(pixels: np.ndarray, side: int = MAX_SIDE) -> str:
    """Encode pixels (height, width, 3) for the `src` of an <img>, at most `side` pixels large."""
    image = fit_image(pixels)
    image.thumbnail((side, side))
    return smallest_data_url(image)


def fit_image(pixels: np.ndarray) -> Image.Image:
    """Resize to a longer side of 240 to 480 pixels."""
    image = Image.fromarray(pixels)
    longer = max(image.size)
    scale = min(max(longer, MIN_SIDE), MAX_SIDE) / longer
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image if scale == 1 else image.resize(size, Image.Resampling.BICUBIC)


def overlay(
    pixels: np.ndarray,
    values: np.ndarray,
    box: "Box",
    style: Literal["brightness", "heat"] = "brightness",
    *,
    offset: float = 0.0,
) -> Image.Image:
    """Draw a map (h, w) on the part of an image that the model sees.

    "brightness" darkens the image where the map is small, as in figure 6; "heat" draws colors over
    the image in gray. The map is scaled to 0 to 1, its square root is drawn so that small values
    are visible too, and it is enlarged smoothly, moved up and left by `offset` patches. What the
    model does not see is gray and very dark. The longer side has 240 to 480 pixels.
    """
    image = fit_image(pixels)
    down, across = image.height / pixels.shape[0], image.width / pixels.shape[1]
    left, right = round(box.left * across), round(box.right * across)
    top, bottom = round(box.top * down), round(box.bottom * down)
    size = (max(1, right - left), max(1, bottom - top))
    low, high = values.min(), values.max()
    scaled = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
    padded = np.pad(np.sqrt(scaled), (0, 1), mode="edge").astype(np.float32)
    window = (offset, offset, values.shape[1] + offset, values.shape[0] + offset)
    large = Image.fromarray(padded).resize(size, Image.Resampling.BICUBIC, window)
    smooth = np.asarray(large).clip(0, 1)[:, :, None]  # (height, width, 1)
    part = image.crop((left, top, left + size[0], top + size[1]))
    if style == "brightness":
        shown = np.asarray(part) * (DARKEST + (1 - DARKEST) * smooth)
    else:
        stops = np.linspace(0, 1, len(INFERNO))
        channels = [np.interp(smooth[:, :, 0], stops, c) for c in zip(*INFERNO, strict=True)]
        gray = np.asarray(part.convert("L"), float)[:, :, None]
        shown = gray + (np.dstack(channels) - gray) * OPACITY * smooth
    canvas = image.convert("L").point(lambda value: value * OUTSIDE).convert("RGB")
    canvas.paste(Image.fromarray(shown.round().astype(np.uint8)), (left, top))
    if size != image.size:
        edge = (left, top, left + size[0] - 1, top + size[1] - 1)
        ImageDraw.Draw(canvas).rectangle(edge, outline=BOX_COLOR)
    return canvas


def color_image(colors: np.ndarray, box: "Box", side: int) -> Image.Image:
    """Draw colors (h, w, 3), 0 to 1, one flat area per patch, in the shape of the box."""
    width = max(1, round(side * (box.right - box.left) / (box.bottom - box.top)))
    pixels = (colors.clip(0, 1) * 255).round().astype(np.uint8)
    return Image.fromarray(pixels).resize((width, side), Image.Resampling.NEAREST)


def patch_image(pixels: np.ndarray, box: "Box", grid: tuple[int, int]) -> Image.Image:
    """Draw the borders of patches on the part of an image that the model sees."""
    left, top, right, bottom = map(round, (box.left, box.top, box.right, box.bottom))
    part = Image.fromarray(pixels).crop((left, top, right, bottom))
    image = fit_image(np.asarray(part))
    pen = ImageDraw.Draw(image)
    for row in range(1, grid[0]):
        y = row * image.height // grid[0]
        pen.line([(0, y), (image.width, y)], "white")
    for column in range(1, grid[1]):
        x = column * image.width // grid[1]
        pen.line([(x, 0), (x, image.height)], "white")
    return image


@plot_style()
def image_grid(images: Sequence[Image.Image], captions: Sequence[str], columns: int) -> Any:
    """Images in rows, a caption of one or two lines below each."""
    side, rows = 150, range(0, len(images), columns)
    lines = [max(len(c.splitlines()) for c in captions[i : i + columns]) for i in rows]
    tops = np.cumsum([12, *(side + 12 + 15 * count for count in lines)])
    figure = new_figure(columns * (side + 12) + 12, tops[-1], "images")
    for number, (image, caption) in enumerate(zip(images, captions, strict=True)):
        row, column = divmod(number, columns)
        axes = add_axes(figure, 12 + column * (side + 12), tops[row], side, side)
        axes.imshow(np.asarray(image))
        axes.set_axis_off()
        shown = [truncate(printable(line), MAX_CAPTION) for line in caption.splitlines()]
        axes.text(0, -0.02, "\n".join(shown), transform=axes.transAxes, va="top")
    return figure


@plot_style()
def position_plot(tables: Mapping[str, np.ndarray], columns: int = 1) -> Any:
    """Figure 7, center: one tile per patch, at its place, with its similarity to all patches.

    `tables` are similarities (h, w, h, w) by title. Colors run from the lowest one to 1. Of more
    than 16 rows or columns every second, third, ... is drawn.
    """
    rows = -(-len(tables) // columns)
    label = f"similarity of positions: {', '.join(map(printable, tables))}"
    figure = new_figure(440 * columns, 420 * rows, label)
    for number, (title, table) in enumerate(tables.items()):
        high, wide = table.shape[:2]
        down, across = math.ceil(high / MAX_TILES), math.ceil(wide / MAX_TILES)
        shown = table[::down, ::across]  # (rows, columns, h, w)
        low = min(float(table.min()), 0.9)  # some range if all are similar
        row, column = divmod(number, columns)
        axes = add_axes(figure, 440 * column + 52, 420 * row + 34, 320, 330)
        tiles = mosaic(shown.reshape(-1, high, wide), shown.shape[1], math.nan)
        image = axes.imshow(
            tiles,
            cmap="viridis",
            vmin=low,
            vmax=1,
            interpolation="none",
            extent=(-0.5, shown.shape[1] - 0.5, shown.shape[0] - 0.5, -0.5),
            aspect=tiles.shape[0] / tiles.shape[1] * shown.shape[1] / shown.shape[0],
        )
        axes.grid(False)
        axes.spines[:].set_visible(False)
        for axis, count, step in zip("xy", shown.shape[1::-1], (across, down), strict=True):
            ticks = range(0, count, -(-count // MAX_LAYER_TICKS))
            getattr(axes, f"set_{axis}ticks")(ticks, [str(step * tick) for tick in ticks])
        axes.set(xlabel="column of the patch", ylabel="row of the patch")
        axes.set_title(printable(title), fontsize=12, loc="left", color=LIGHT["ink"])
        color_axes = add_axes(figure, 440 * column + 382, 420 * row + 34, 14, 330)
        bar = figure.colorbar(image, cax=color_axes)
        bar.outline.set_visible(False)
        bar.ax.grid(False)
    return figure


def mosaic(tiles: np.ndarray, columns: int, fill: float) -> np.ndarray:
    """Arrange tiles (n, h, w, ...) in rows, enlarged by a whole number, `fill` between them."""
    rows = -(-len(tiles) // columns)
    scale = max(1, MOSAIC // max(rows * tiles.shape[1], columns * tiles.shape[2]))
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)
    around = [(0, rows * columns - len(tiles)), (0, MOSAIC_GAP), (0, MOSAIC_GAP)]
    tiles = np.pad(tiles, around + [(0, 0)] * (tiles.ndim - 3), constant_values=fill)
    grid = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    whole = grid.reshape(rows * tiles.shape[1], columns * tiles.shape[2], *tiles.shape[3:])
    return whole[:-MOSAIC_GAP, :-MOSAIC_GAP]


def filter_plot(components: np.ndarray) -> Any:
    """Figure 7, left: filters (n, P, P, C), each scaled to its own range.

    Filters of three channels are in color, others the mean of their channels in gray.
    """
    if components.shape[-1] != 3:
        components = components.mean(axis=-1, keepdims=True).repeat(3, axis=-1)
    low, high = (f(components, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
    scaled = np.where(high > low, (components - low) / np.where(high > low, high - low, 1), 0.5)
    return tile_plot(np.insert(scaled, 3, 1.0, axis=-1), "filters of the first layer")


def mixing_plot(units: np.ndarray) -> Any:
    """Token-mixing weights (n, h, w), each scaled to its largest: blue below zero, red above."""
    import matplotlib

    largest = np.abs(units).max(axis=(1, 2), keepdims=True)
    colors = matplotlib.colormaps["RdBu_r"](0.5 + 0.5 * units / np.where(largest > 0, largest, 1))
    return tile_plot(colors, "token-mixing weights")


@plot_style()
def tile_plot(tiles: np.ndarray, label: str) -> Any:
    """Tiles (n, h, w, 4) of RGBA, 0 to 1, in rows of seven."""
    columns = min(7, len(tiles))
    image, width = mosaic(tiles, columns, 0.0), 480 * columns / 7
    figure = new_figure(width, width * image.shape[0] / image.shape[1], label)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.imshow(image, interpolation="none", aspect="auto")
    axes.set_axis_off()
    return figure
