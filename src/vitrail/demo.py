"""The demonstration: five shapes, a small ViT, and a picture of what it looks at.

It draws its own pictures, so it needs no data, and takes plain steps with AdamW.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from vitrail.models.build import create
from vitrail.models.vit import VisionTransformer

SHAPES = ("disc", "square", "triangle", "cross", "ring")
SIDE = 32  # pixels
BATCH = 64
ZOOM = 6  # of a pixel in the picture that is saved
TEST_PICTURES = 500


def learn_shapes(
    *, steps: int, seed: int, tell: Callable[[str], None]
) -> tuple[VisionTransformer, float]:
    """A model trained for `steps` steps, and the share of new pictures it names rightly."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = create("ViT-Femto/4", num_classes=len(SHAPES))
    assert isinstance(model, VisionTransformer)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    started = time.monotonic()
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:  # rise for 50 steps, then fall to zero
            group["lr"] = 2e-3 * min(step / 50, (steps - step + 1) / steps)
        images, labels = draw_batch(BATCH, rng)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0:
            seconds = time.monotonic() - started
            tell(f"  step {step:4d} of {steps}   loss {loss.item():.3f}   {seconds:3.0f} s")
    images, labels = draw_batch(TEST_PICTURES, rng)
    with torch.inference_mode():
        right = model.eval()(images).argmax(dim=1) == labels
    return model, right.double().mean().item()


def draw_batch(count: int, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Pictures (count, 3, SIDE, SIDE) in [-1, 1] and the number of the shape on each."""
    labels = rng.integers(len(SHAPES), size=count)
    pixels = np.stack([np.asarray(draw(SHAPES[label], rng)) for label in labels])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    return images, torch.from_numpy(labels)


def draw(shape: str, rng: np.random.Generator) -> Image.Image:
    """One shape, somewhere, in some size and color, on a noisy ground."""
    ground = rng.integers(0, 120, size=3) + rng.integers(0, 60, size=(SIDE, SIDE, 3))
    image = Image.fromarray(ground.astype(np.uint8))
    pen = ImageDraw.Draw(image)
    size = int(rng.integers(10, 20))
    x, y = (int(value) for value in rng.integers(0, SIDE - size, size=2))
    color = tuple(int(value) for value in rng.integers(120, 256, size=3))
    box, middle, thick = (x, y, x + size, y + size), size // 2, max(3, size // 4)
    match shape:
        case "disc":
            pen.ellipse(box, fill=color)
        case "square":
            pen.rectangle(box, fill=color)
        case "triangle":
            pen.polygon([(x, y + size), (x + size, y + size), (x + middle, y)], fill=color)
        case "cross":
            pen.line([(x, y + middle), (x + size, y + middle)], fill=color, width=thick)
            pen.line([(x + middle, y), (x + middle, y + size)], fill=color, width=thick)
        case "ring":
            pen.ellipse(box, outline=color, width=thick)
    return image


@torch.inference_mode()
def picture(model: VisionTransformer, seed: int) -> Image.Image:
    """Each shape from top to bottom: as patches, as the class token sees it, and its name."""
    rng = np.random.default_rng(seed + 1)
    side, gap, head = SIDE * ZOOM, 12, 40
    font, small = ImageFont.load_default(18), ImageFont.load_default(14)
    page = Image.new(
        "RGB", (len(SHAPES) * (side + gap) + gap, head + 2 * (side + gap) + 70), "white"
    )
    pen = ImageDraw.Draw(page)
    pen.text((gap, 10), "patches, where the class token looks, and what it says", "black", font)
    for column, shape in enumerate(SHAPES):
        image = draw(shape, rng)
        batch = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
        chances = model(batch)[0].softmax(dim=0)
        x, y = gap + column * (side + gap), head
        page.paste(patches(image), (x, y))
        page.paste(overlay(image, class_attention(model, batch)), (x, y + side + gap))
        best = chances.topk(2)
        for line, (chance, index) in enumerate(zip(*best, strict=True)):
            text = f"{chance.item():.1%}  {SHAPES[int(index)]}"
            place = (x, y + 2 * (side + gap) + 24 * line)
            pen.text(place, text, "black" if line == 0 else "gray", font if line == 0 else small)
    return page


def class_attention(model: VisionTransformer, batch: Tensor) -> Tensor:
    """How much the class token looks at each patch: the mean over the last layer's heads."""
    last = model.config.depth - 1
    (maps,) = model.attention_maps(batch, layers=[last])  # (1, H, N, N)
    return maps[0].mean(dim=0)[0, 1:].unflatten(0, model.config.grid)  # (h, w)


def patches(image: Image.Image) -> Image.Image:
    """The picture, cut where the model cuts it."""
    large = image.resize((SIDE * ZOOM, SIDE * ZOOM), Image.Resampling.NEAREST)
    pen = ImageDraw.Draw(large)
    for cut in range(0, SIDE * ZOOM, 4 * ZOOM):
        pen.line([(cut, 0), (cut, SIDE * ZOOM)], "white")
        pen.line([(0, cut), (SIDE * ZOOM, cut)], "white")
    return large


def overlay(image: Image.Image, weights: Tensor) -> Image.Image:
    """The picture, bright where the weights are large."""
    light = (weights / weights.max()).mul(255).byte().numpy()
    mask = Image.fromarray(light).resize((SIDE * ZOOM, SIDE * ZOOM), Image.Resampling.BICUBIC)
    large = image.resize(mask.size, Image.Resampling.NEAREST)
    return Image.composite(large, Image.blend(large, Image.new("RGB", mask.size), 0.8), mask)
