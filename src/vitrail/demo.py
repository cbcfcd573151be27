"""The figure of `vitrail demo`: images with their patches, attention and predictions."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import Sample
from vitrail.data.decode import open_image
from vitrail.formatting import percent
from vitrail.inspection.drawing import overlay
from vitrail.inspection.findings import Box
from vitrail.inspection.layers import lag
from vitrail.inspection.pictures import as_seen
from vitrail.inspection.rollout import rollout
from vitrail.models.vit import VisionTransformer

SIDE = 150  # pixels per image
GAP = 12


@torch.inference_mode()
def draw_predictions(model: VisionTransformer, samples: Sequence[Sample]) -> Image.Image:
    """Draw one column per sample: its patches, the attention rollout, the top 2 classes."""
    font, small = ImageFont.load_default(17), ImageFont.load_default(13)
    size = (len(samples) * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + 40 + 56)
    figure = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(figure)
    pen.text((GAP, 10), "patches, attention rollout, prediction", "black", font)
    for column, sample in enumerate(samples):
        assert isinstance(sample.data, bytes)
        pixels = open_image(sample.data).pixels(channels=3)
        image = Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
        batch = as_seen(model, sample.data)[None]
        probabilities = model(batch)[0].softmax(dim=0)
        attention = rollout(model, batch)[0].numpy()  # (h, w)
        whole = Box(0, 0, SIDE, SIDE)
        heat_map = overlay(np.asarray(image), attention, whole, lag=lag(model)).resize(image.size)
        x, y = GAP + column * (SIDE + GAP), 40
        figure.paste(draw_grid(image, model.config.grid), (x, y))
        figure.paste(heat_map, (x, y + SIDE + GAP))
        for line, (value, index) in enumerate(zip(*probabilities.topk(2), strict=True)):
            text = f"{percent(value.item())}  {get_metadata(model).class_names[int(index)]}"
            color, typeface = ("black", font) if line == 0 else ("gray", small)
            pen.text((x, y + 2 * (SIDE + GAP) + 22 * line), text, color, typeface)
    return figure


def draw_grid(image: Image.Image, grid: tuple[int, int]) -> Image.Image:
    """Draw the patch borders on an image."""
    image = image.copy()
    pen = ImageDraw.Draw(image)
    for row in range(1, grid[0]):
        pen.line([(0, row * SIDE // grid[0]), (SIDE, row * SIDE // grid[0])], "white")
    for column in range(1, grid[1]):
        pen.line([(column * SIDE // grid[1], 0), (column * SIDE // grid[1], SIDE)], "white")
    return image
