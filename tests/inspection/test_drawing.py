"""Arrays → images: light where a map is large, tiles where their patch is."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrail.data.decode import to_png
from vitrail.inspection import drawing
from vitrail.inspection.drawing import (
    color_picture,
    colored,
    distance_plot,
    filter_sheet,
    heat,
    mixing_sheet,
    overlay,
    position_sheet,
    scatter_plot,
    strip,
)
from vitrail.inspection.findings import Box, Filters, PositionTiles, Scatter, Study

GAP = drawing.GAP
RANDOM = np.random.default_rng(0)


def filters(count, high, wide, channels):
    values = RANDOM.normal(size=(count, high, wide, channels))
    return Filters(components=values, explained=np.full(count, 1 / count))


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((28, 16, 16, 3), (7 * 67, 4 * 67)),
        ((28, 3, 3, 3), (7 * 66, 4 * 66)),
        ((5, 32, 32, 3), (5 * 67, 67)),
        ((9, 4, 8, 1), (7 * 67, 2 * 35)),
        ((1, 1, 1, 4), (67, 67)),
        ((2, 100, 100, 3), (206, 103)),
    ],
)
def test_a_filter_sheet_has_rows_of_seven(shape, size):
    image = filter_sheet(filters(*shape))
    assert image.mode == "RGB"
    assert image.size == (size[0] + GAP, size[1] + GAP)


def test_each_filter_goes_from_black_to_white_and_cells_are_even():
    found = filters(2, 4, 4, 3)
    image = np.asarray(filter_sheet(found))
    for number, component in enumerate(found.components):
        left = GAP + number * 67
        tile = image[GAP : GAP + 64, left : left + 64].reshape(4, 16, 4, 16, 3)
        cells = tile[:, 0, :, 0]
        assert (tile == cells[:, None, :, None]).all()
        scaled = (component - component.min()) / (component.max() - component.min())
        np.testing.assert_array_equal(cells, (255 * scaled).round())


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_filters_without_colors_are_gray(channels):
    image = np.asarray(filter_sheet(filters(3, 4, 4, channels)))
    assert (image == image[..., :1]).all()
    assert image.std() > 10


def test_a_filter_that_is_the_same_everywhere_is_gray():
    found = Filters(components=np.ones((1, 2, 2, 3)), explained=np.zeros(1))
    image = np.asarray(filter_sheet(found))
    assert (image[GAP:-GAP, GAP:-GAP] == 128).all()


def test_mixing_weights_are_red_above_zero_blue_below_and_white_at_zero():
    units = np.array([[[2.0, 0.0, -1.0]], [[0.0, 0.0, 0.0]]])  # (2, 1, 3)
    image = np.asarray(mixing_sheet(units)).astype(int)
    assert image.shape == (28 + 2 * GAP, 2 * 84 + 3 * GAP, 3)
    above, zero, below = (image[10, GAP + 10 + 28 * cell] for cell in range(3))
    assert above[0] > above[2] + 50
    assert below[2] > below[0] + 50
    assert zero.min() > 240
    assert (image[10, 2 * GAP + 84 + 10] == zero).all()


def tiles(high, wide):
    """Each patch is like itself alone."""
    patches = high * wide
    return PositionTiles(
        title="positions", similarity=np.eye(patches).reshape(high, wide, high, wide)
    )


@pytest.mark.parametrize(("high", "wide"), [(1, 1), (1, 6), (6, 1), (3, 5), (14, 14)])
def test_a_tile_of_positions_is_bright_where_its_patch_is(high, wide):
    image = np.asarray(position_sheet(tiles(high, wide)))
    cell = min(drawing.LABEL, drawing.TILES // max(high, wide) ** 2)
    for row, column in {(0, 0), (high // 2, wide - 1), (high - 1, wide // 2)}:
        top, left = 52 + row * (high * cell + GAP), 52 + column * (wide * cell + GAP)
        tile = image[top : top + high * cell, left : left + wide * cell]
        bright = (tile == drawing.VIRIDIS[-1]).all(axis=-1)
        assert bright.sum() == cell**2
        assert bright[row * cell, column * cell]


@pytest.mark.parametrize(("side", "shown"), [(16, 16), (17, 9), (24, 12), (37, 13)])
def test_large_grids_show_some_of_their_tiles(side, shown):
    image = position_sheet(tiles(side, side))
    cell = max(1, drawing.TILES // (shown * side))
    assert image.width == 52 + shown * (side * cell + GAP) + 10 + 60
    assert image.height == 52 + shown * (side * cell + GAP) + 40


def test_colors_are_those_of_the_anchors_and_between_them_mixed():
    found = colored(np.array([0.0, 0.25, 1.0]), [(0, 0, 0), (100, 50, 0), (200, 200, 200)])
    assert found.tolist() == [[0, 0, 0], [50, 25, 0], [200, 200, 200]]


CORNERS = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
@pytest.mark.parametrize("style", ["light", "heat"])
@pytest.mark.parametrize("shape", [(200, 300), (300, 200), (60, 90), (1200, 800)])
def test_light_falls_where_the_map_is_and_not_outside_the_box(corner, style, shape):
    high, wide = shape
    pixels = np.full((high, wide, 3), 200, np.uint8)
    side = min(shape) * 0.8
    top, left = (high - side) / 2, (wide - side) / 2
    values = np.zeros((4, 4))
    values[corner[0] * 3, corner[1] * 3] = 1
    image = overlay(pixels, values, Box(top, left, top + side, left + side), style)
    assert image.mode == "RGB"
    found = np.asarray(image).astype(float)
    scale = image.width / wide
    top, left, side = (round(number * scale) for number in (top, left, side))
    cell = side // 4

    def at(row, column):
        y, x = top + round((row + 0.5) * cell), left + round((column + 0.5) * cell)
        return found[y, x]

    there, opposite = at(corner[0] * 3, corner[1] * 3), at(3 - corner[0] * 3, 3 - corner[1] * 3)
    if style == "light":
        assert there.min() > 190
        assert opposite.max() < 70
    else:
        assert there[0] - there[2] > 40  # yellow
        assert np.ptp(opposite) < 5  # the picture, in gray
    outside = np.ones(found.shape[:2], bool)
    outside[top - 1 : top + side + 1, left - 1 : left + side + 1] = False
    assert outside.any()
    assert found[outside].max() < 40


def test_a_map_whose_tokens_see_above_and_left_of_their_patches_is_drawn_there():
    pixels = np.full((240, 240, 3), 200, np.uint8)
    values = np.zeros((4, 4))
    values[2, 1] = 1
    image = overlay(pixels, values, Box(0, 0, 240, 240), lag=0.5)
    bright = np.argwhere(np.asarray(image)[:, :, 0] > 190).mean(axis=0)
    np.testing.assert_allclose(bright, (120, 60), atol=1)  # the corner of the patch


def test_a_picture_that_is_seen_whole_has_no_edge():
    pixels = np.full((240, 240, 3), 100, np.uint8)
    image = overlay(pixels, np.ones((2, 2)), Box(0, 0, 240, 240))
    assert len(np.unique(np.asarray(image))) == 1


@pytest.mark.parametrize(
    ("shape", "size"),
    [((1000, 500), (240, 480)), ((300, 400), (400, 300)), ((32, 64), (240, 120)), ((1, 1), None)],
)
def test_overlays_keep_the_aspect_and_have_240_to_480_pixels(shape, size):
    pixels = np.zeros((*shape, 3), np.uint8)
    image = overlay(pixels, np.ones((1, 1)), Box(0, 0, *shape))
    assert image.size == (size or (240, 240))


def test_maps_of_one_patch_or_of_one_value_can_be_laid_over_a_picture():
    pixels = RANDOM.integers(0, 256, (300, 300, 3), np.uint8)
    for values in (np.ones((1, 1)), np.zeros((3, 5)), np.array([[0.0, 1.0]])):
        for style in ("light", "heat"):
            found = np.asarray(overlay(pixels, values, Box(0, 0, 300, 300), style))
            assert found.std() > 5


def test_heat_hides_nothing_where_a_map_is_zero():
    image = heat(np.array([[0.0, 0.5, 1.0]]))
    assert image.size == (3, 1)
    alpha = np.asarray(image)[0, :, 3].tolist()
    assert alpha == sorted(alpha)
    assert alpha[0] == 0


def test_colors_are_even_areas_of_a_picture():
    colors = RANDOM.random((2, 3, 3))
    image = np.asarray(color_picture(colors, (30, 10)))
    assert image.shape == (10, 30, 3)
    np.testing.assert_array_equal(image[2::5, 5::10], (colors * 255).round())
    assert len(np.unique(image.reshape(-1, 3), axis=0)) == 6


def test_a_strip_wraps_and_keeps_every_picture_whole():
    sizes = [(300, 200), (100, 300), (400, 50), (700, 100)]
    inks = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (200, 200, 0)]
    images = [Image.new("RGB", size, ink) for size, ink in zip(sizes, inks, strict=True)]
    page = strip(images, ["short", "a caption that is far too long", "two\nlines", ""], width=600)
    found = np.asarray(page)
    for size, ink in zip(sizes, inks, strict=True):
        assert (found == ink).all(axis=-1).sum() == size[0] * size[1]
    assert page.width == 700 + 24  # the widest alone may be wider
    assert page.height > 300 + 50 + 100
    assert (found[:, -12:] == 255).all()


def study(layers, heads, **distance):
    return Study(
        images=4,
        patch=(16, 16),
        distance=distance,
        entropy=np.zeros((layers, heads)),
        redundancy=np.zeros((layers, heads, heads)),
        norms=np.zeros((layers, 5)),
        prefix_norms=np.zeros((layers, 1)),
        outliers=np.zeros(layers),
    )


def covered(image, color):
    return (np.abs(np.asarray(image).astype(int) - color) < 30).all(axis=-1)


def test_a_distance_plot_has_a_dot_for_each_head_as_high_as_its_distance():
    first, second = drawing.VARIANTS[:2]
    values = np.array([[10.0], [40.0], [80.0]])
    image = distance_plot(study(3, 1, all=values, patches=values * 0.5))
    assert image.size == (drawing.WIDTH, drawing.HEIGHT)
    below = covered(image, first)
    below[:40] = False  # the legend
    columns = np.flatnonzero(below.any(axis=0))
    groups = np.split(columns, np.flatnonzero(np.diff(columns) > 5) + 1)
    assert len(groups) == 3
    heights = [np.flatnonzero(below[:, group].any(axis=1)).mean() for group in groups]
    ratio = (heights[0] - heights[2]) / (heights[0] - heights[1])
    assert ratio == pytest.approx(70 / 30, rel=0.02)
    assert covered(image, second).any()


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (4, 3), (48, 24)])
def test_distances_of_any_depth_are_drawn(layers, heads):
    values = RANDOM.random((layers, heads)) * 100
    assert distance_plot(study(layers, heads, all=values)).size == (drawing.WIDTH, drawing.HEIGHT)
    assert distance_plot(study(layers, heads, all=values * 0)).size == (720, 440)


@pytest.mark.parametrize("classes", [1, 3, 10, 40])
@pytest.mark.parametrize("count", [0, 1, 50, 1000])
def test_a_scatter_plot_shows_every_class(classes, count):
    points = RANDOM.normal(size=(count, 2)).astype(np.float32)
    labels = np.arange(count) % classes
    names = tuple(f"class {number}" for number in range(classes))
    image = scatter_plot(Scatter(points=points, labels=labels, classes=names, method="t-SNE"))
    assert image.mode == "RGB"
    legend = image.crop((520, 0, 540, image.height))
    for number in range(min(classes, drawing.LEGEND)):
        assert covered(legend, drawing.class_color(number, classes)).sum() > 20


def test_points_lie_where_they_are():
    points = np.array([[-1.0, 5.0], [1.0, 7.0]])  # the second is to the right and above
    found = Scatter(points=points, labels=np.array([0, 1]), classes=("a", "b"), method="")
    image = scatter_plot(found)
    middles = []
    for number in (0, 1):
        rows, columns = np.nonzero(covered(image, drawing.CLASSES[number])[:, :520])
        middles.append((rows.mean(), columns.mean()))
    assert middles[1][0] < middles[0][0] - 400
    assert middles[1][1] > middles[0][1] + 400


def test_images_can_be_written():
    image = position_sheet(tiles(2, 3))
    assert Image.open(io.BytesIO(to_png(image))).size == image.size
