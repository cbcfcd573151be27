"""Random versions of a training picture: pure functions of (picture, random generator).

Nothing here reads or changes any randomness but the generator that is passed in. Boxes are drawn
before a pixel is touched, so that the decoder need not decode what will be cut away. Pictures are
Pillow images of mode RGB or L at their final size; whether to mirror one is for the caller.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrail.data.operations import COLORS, OPERATIONS, Canvas
from vitrail.data.policies import AUGMIX, RAND_AUGMENT, TRIVIAL, Policy
from vitrail.data.variation import Flavor
from vitrail.errors import ConfigError, unknown

Rng = np.random.Generator
Range = tuple[float, float]

TRIES = 10  # a box that does not fit is drawn again this often


class Box(NamedTuple):
    """A part of a picture, in pixels; the padded crop's may begin outside of it."""

    top: int
    left: int
    height: int
    width: int


def inception_crop(
    height: int, width: int, rng: Rng, area: Range = (0.05, 1.0), aspect: Range = (3 / 4, 4 / 3)
) -> Box:
    """A part of random area and shape (Szegedy et al. 2015), as torchvision draws it.

    The share of the area is uniform and the ratio width / height log-uniform. When no box fits,
    the largest part in the middle whose shape is allowed. TensorFlow's operation of this purpose
    draws the ratio and the height uniformly instead, which makes small parts more frequent.
    """
    box = fitting_box(height, width, rng, area, aspect, (height, width))
    if box is not None:
        return box
    ratio = min(max(width / height, aspect[0]), aspect[1])
    return center_box(height, width, (round(width / ratio), round(height * ratio)))


def padded_crop(
    height: int, width: int, rng: Rng, *, padding: int, size: tuple[int, int] | None = None
) -> Box:
    """A part of the picture after a border of `padding` pixels was put around it.

    `size` is the part's (height, width), or else the picture's own. `cut` does the padding.
    """
    rows, columns = size or (height, width)
    if rows > height + 2 * padding or columns > width + 2 * padding:
        raise ConfigError(
            f"{rows} x {columns} pixels do not fit into {height} x {width} with padding={padding}"
        )
    top = int(rng.integers(height + 2 * padding - rows + 1)) - padding
    left = int(rng.integers(width + 2 * padding - columns + 1)) - padding
    return Box(top, left, rows, columns)


def center_box(height: int, width: int, size: tuple[int, int]) -> Box:
    """The middle of a picture, of `size` (height, width) or as much of it as there is."""
    rows, columns = min(size[0], height), min(size[1], width)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def fitting_box(
    height: int, width: int, rng: Rng, area: Range, aspect: Range, limit: tuple[int, int]
) -> Box | None:
    """A box of random area, shape and place, at most `limit` (height, width); or nothing."""
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(TRIES):
        share, shape, down, across = rng.random(4).tolist()  # one draw is as dear as four
        pixels = height * width * (area[0] + share * (area[1] - area[0]))
        ratio = math.exp(low + shape * (high - low))
        rows, columns = round(math.sqrt(pixels / ratio)), round(math.sqrt(pixels * ratio))
        if 0 < rows <= limit[0] and 0 < columns <= limit[1]:
            top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
            return Box(top, left, rows, columns)
    return None


def rand_augment(
    image: Image.Image,
    rng: Rng,
    count: int = 2,
    magnitude: float = 10,
    *,
    flavor: Flavor = "torchvision",
    spread: float = 0.0,
) -> Image.Image:
    """`count` random operations of one strength (Cubuk et al. 2020, arXiv:1909.13719).

    torchvision        magnitudes 0 to 30; neighbors are not interpolated, outside is black
    timm               0 to 10, each operation done with chance 0.5: `rand-m9-n2`
    timm-increasing    the same, and stronger with magnitude throughout: DeiT's `rand-m9-inc1`
    big_vision         0 to 30, stronger than the others from 10 on: AugReg's `randaug(2, 10)`

    `spread` is the standard deviation of the magnitude (timm's `mstd`).
    """
    if flavor not in RAND_AUGMENT:
        raise unknown("flavor of RandAugment", flavor, RAND_AUGMENT)
    policy = RAND_AUGMENT[flavor]
    if not 0 <= magnitude <= policy.most:
        raise ConfigError(f"magnitude={magnitude} must be 0 to {policy.most} for {flavor!r}")
    for _ in range(count):
        if policy.chance < 1 and rng.random() >= policy.chance:
            continue
        strength = magnitude
        if spread:
            strength = min(max(rng.normal(magnitude, spread), 0), policy.most)
        image = random_operation(image, rng, policy, strength)
    return image


def trivial_augment(image: Image.Image, rng: Rng) -> Image.Image:
    """One random operation of random strength (Müller and Hutter 2021, arXiv:2103.10158)."""
    return random_operation(image, rng, TRIVIAL, int(rng.integers(31)))


def aug_mix(
    image: Image.Image,
    rng: Rng,
    *,
    severity: int = 3,
    width: int = 3,
    depth: int | None = None,
) -> Image.Image:
    """The picture mixed with `width` chains of operations (Hendrycks et al., arXiv:1912.02781).

    A chain has `depth` operations, or 1 to 3; strengths are below `severity` of 10.
    """
    if not 1 <= severity <= 10:
        raise ConfigError(f"severity={severity} must be 1 to 10")
    share = rng.beta(1.0, 1.0)  # of the chains, all together
    total = np.float32(1 - share) * np.asarray(image, np.float32)
    for weight in rng.dirichlet([1.0] * width):
        changed = image
        for _ in range(depth or int(rng.integers(1, 4))):
            changed = random_operation(changed, rng, AUGMIX, int(rng.integers(severity)))
        total += np.float32(share * weight) * np.asarray(changed, np.float32)
    return Image.fromarray(np.rint(total).clip(0, 255).astype(np.uint8))


def random_operation(image: Image.Image, rng: Rng, policy: Policy, magnitude: float) -> Image.Image:
    """One operation of the policy, each as likely as any other."""
    names = list(policy.strengths)
    name = names[rng.integers(len(names))]
    sign = 1 if rng.random() < 0.5 else -1
    canvas = Canvas(policy.fill, policy.resample, (rng.random(), rng.random()))
    amount = policy.strengths[name](magnitude / policy.full, sign, image.size)
    return OPERATIONS[name](image, amount, canvas)


def color_jitter(
    image: Image.Image,
    rng: Rng,
    *,
    brightness: float = 0.0,
    contrast: float = 0.0,
    saturation: float = 0.0,
    hue: float = 0.0,
) -> Image.Image:
    """Four changes of color in random order, each at most as large as its number says.

    The first three are factors from 1 - x to 1 + x, the hue is a share of the circle (up to 0.5).
    """
    if min(brightness, contrast, saturation, hue) < 0 or hue > 0.5:
        raise ConfigError("color jitter must not be negative, and that of the hue not above 0.5")
    ranges = {
        "brightness": (max(0.0, 1 - brightness), 1 + brightness),
        "contrast": (max(0.0, 1 - contrast), 1 + contrast),
        "color": (max(0.0, 1 - saturation), 1 + saturation),
        "hue": (-hue, hue),
    }
    for name in rng.permutation(list(ranges)):
        low, high = ranges[name]
        if low < high:
            image = COLORS[name](image, rng.uniform(low, high))
    return image


def random_erasing(
    pixels: Tensor,
    rng: Rng,
    *,
    area: Range = (0.02, 1 / 3),
    aspect: Range = (0.3, 1 / 0.3),
    fill: float | None = None,
) -> Tensor:
    """A copy with one rectangle blotted out (Zhong et al. 2020, arXiv:1708.04896).

    `pixels` is (C, H, W). Without a `fill` the rectangle is noise: uniform in a picture of bytes,
    and standard normal in one of floats, which is taken to be normalized.
    """
    channels, height, width = pixels.shape
    box = fitting_box(height, width, rng, area, aspect, (height - 1, width - 1))
    erased = pixels.clone()
    if box is None:
        return erased
    part = erased[:, box.top : box.top + box.height, box.left : box.left + box.width]
    shape = (channels, box.height, box.width)
    if fill is not None:
        part.fill_(fill)
    elif pixels.dtype == torch.uint8:
        part.copy_(torch.from_numpy(rng.integers(0, 256, shape, dtype=np.uint8)))
    else:
        part.copy_(torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)))
    return erased
