"""What `make demo` shows beside the training: a few pictures, and where the model looks."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.checkpoints.facts import facts_of
from vitrail.data.datasets import Sample
from vitrail.data.decode import open_image
from vitrail.inspection.drawing import overlay
from vitrail.inspection.findings import Box
from vitrail.inspection.layers import lag
from vitrail.inspection.pictures import as_seen
from vitrail.inspection.rollout import rollout
from vitrail.models.vit import VisionTransformer
from vitrail.words import percent

SIDE = 150  # pixels of each picture on the page
GAP = 12


@torch.inference_mode()
def picture(model: VisionTransformer, samples: Sequence[Sample]) -> Image.Image:
    """Each sample from top to bottom: its patches, where the model looks, what it says."""
    font, small = ImageFont.load_default(17), ImageFont.load_default(13)
    page = Image.new(
        "RGB", (len(samples) * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + 40 + 56), "white"
    )
    pen = ImageDraw.Draw(page)
    pen.text((GAP, 10), "patches, where the model looks, and what it says", "black", font)
    for column, sample in enumerate(samples):
        image = photograph(sample)
        batch = as_seen(model, sample.data)[None]
        chances = model(batch)[0].softmax(dim=0)
        x, y = GAP + column * (SIDE + GAP), 40
        page.paste(cut_up(image, model.config.grid), (x, y))
        page.paste(where_it_looks(image, model, batch), (x, y + SIDE + GAP))
        best = chances.topk(2)
        for line, (chance, index) in enumerate(zip(*best, strict=True)):
            text = f"{percent(chance.item())}  {facts_of(model).class_names[int(index)]}"
            place = (x, y + 2 * (SIDE + GAP) + 22 * line)
            pen.text(place, text, "black" if line == 0 else "gray", font if line == 0 else small)
    return page


def photograph(sample: Sample) -> Image.Image:
    assert isinstance(sample.data, bytes)
    pixels = open_image(sample.data).pixels(channels=3)
    return Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def cut_up(image: Image.Image, grid: tuple[int, int]) -> Image.Image:
    """The picture, cut where the model cuts it."""
    cut = image.copy()
    pen = ImageDraw.Draw(cut)
    for row in range(1, grid[0]):
        pen.line([(0, row * SIDE // grid[0]), (SIDE, row * SIDE // grid[0])], "white")
    for column in range(1, grid[1]):
        pen.line([(column * SIDE // grid[1], 0), (column * SIDE // grid[1], SIDE)], "white")
    return cut


def where_it_looks(image: Image.Image, model: VisionTransformer, batch: Tensor) -> Image.Image:
    """The picture, bright where the model looks: attention rollout, as in figure 6."""
    values = rollout(model, batch)[0].numpy()  # (h, w)
    whole = Box(0, 0, image.height, image.width)
    return overlay(np.asarray(image), values, whole, lag=lag(model)).resize(image.size)
