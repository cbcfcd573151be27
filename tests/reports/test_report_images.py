"""Images of reports: maps drawn where they belong."""

import io

import numpy as np
import pytest
from PIL import Image

from vitrail.inspection.images import Box
from vitrail.reports.figures import png_bytes
from vitrail.reports.images import image_grid, overlay

RANDOM = np.random.default_rng(0)
CORNERS = {"top left": (0, 0), "top right": (0, 1), "bottom left": (1, 0), "bottom right": (1, 1)}


@pytest.mark.parametrize("corner", CORNERS.values(), ids=CORNERS)
@pytest.mark.parametrize("style", ["brightness", "heat"])
@pytest.mark.parametrize("shape", [(60, 90), (1200, 800)])
def test_overlay_is_drawn_at_its_patch_and_inside_the_box(corner, style, shape):
    high, wide = shape
    side = min(shape) * 0.8
    top, left = (high - side) / 2, (wide - side) / 2
    values = np.zeros((4, 4))
    values[corner[0] * 3, corner[1] * 3] = 1
    pixels = np.full((high, wide, 3), 200, np.uint8)
    image = overlay(pixels, values, Box(top, left, top + side, left + side), style)
    drawn, scale = np.asarray(image).astype(float), image.width / wide
    top, left, side = (round(number * scale) for number in (top, left, side))

    def at(row, column):
        return drawn[top + (2 * row + 1) * side // 8, left + (2 * column + 1) * side // 8]

    there, opposite = at(corner[0] * 3, corner[1] * 3), at(3 - corner[0] * 3, 3 - corner[1] * 3)
    if style == "brightness":
        assert there.min() > 190
        assert opposite.max() < 70
    else:
        assert there[0] - there[2] > 40  # yellow
        assert np.ptp(opposite) < 5  # the image, in gray
    drawn[top - 1 : top + side + 1, left - 1 : left + side + 1] = 0
    assert 0 < drawn.max() < 40  # outside


def test_overlay_is_moved_by_the_token_offset_and_has_no_border():
    values = np.zeros((4, 4))
    values[2, 1] = 1
    pixels, box = np.full((240, 240, 3), 200, np.uint8), Box(0, 0, 240, 240)
    image = overlay(pixels, values, box, offset=0.5)
    bright = np.argwhere(np.asarray(image)[:, :, 0] > 190).mean(axis=0)
    np.testing.assert_allclose(bright, (120, 60), atol=1)  # the corner of the patch
    assert len(np.unique(np.asarray(overlay(pixels, np.ones((2, 2)), box)))) == 1


@pytest.mark.parametrize("style", ["brightness", "heat"])
@pytest.mark.parametrize("values", [np.ones((1, 1)), np.zeros((3, 5)), np.array([[0.0, 1.0]])])
def test_overlay_of_constant_and_tiny_maps(values, style):
    pixels = RANDOM.integers(0, 256, (300, 300, 3), np.uint8)
    assert np.asarray(overlay(pixels, values, Box(0, 0, 300, 300), style)).std() > 5


def test_image_grid_shows_every_image():
    inks = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    images = [Image.new("RGB", (40, 30), ink) for ink in inks]
    figure = image_grid(images, ["short", "a caption that is far too long for it", "two\nlines"], 2)
    drawn = np.asarray(Image.open(io.BytesIO(png_bytes(figure))).convert("RGB"))
    for ink in inks:
        assert (drawn == ink).all(axis=-1).sum() > 10_000
