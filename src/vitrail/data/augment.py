"""Augmentation of training images and batches: pure functions of (image, random generator).

Boxes are drawn before a pixel is decoded, so that the decoder can skip what is cropped away. Images
are Pillow images of mode RGB or L at their final size, and are never written to. Operations have
the semantics of Pillow and torchvision (a factor of 1 changes nothing). The results differ by at
most:

    0 gray levels   color operations, and geometry with NEAREST or BICUBIC
    2 gray levels   shear and translate with BILINEAR, where also the border between image and fill
                    is antialiased

Brightness and contrast use a table of 256 entries; Pillow's enhancers would build whole images to
blend with.
"""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageChops, ImageEnhance, ImageOps
from PIL.Image import Resampling, Transform
from torch import Tensor

from vitrail.data.preprocessing import Flavor
from vitrail.errors import ConfigError, unknown

Rng = np.random.Generator
Range = tuple[float, float]
MixupStyle = Literal["timm", "torchvision", "big_vision"]

MAX_TRIES = 10  # for a random box that fits
LEVELS = np.arange(256)  # all values of a byte
FIXED_POINT = 2**15
AUG_MIX_SEVERITY = 3


class Box(NamedTuple):
    """Crop in pixels; a padded crop may begin outside of the image."""

    top: int
    left: int
    height: int
    width: int


def inception_crop(
    height: int, width: int, rng: Rng, area: Range = (0.05, 1.0), aspect: Range = (3 / 4, 4 / 3)
) -> Box:
    """Random resized crop (Szegedy et al. 2015) as in torchvision.

    The area is uniform and the aspect ratio log-uniform; if no box fits, the largest center crop
    with an allowed aspect ratio. TensorFlow's op draws aspect ratio and height uniformly instead,
    which makes small crops more frequent.
    """
    box = random_box(height, width, rng, area, aspect, (height, width))
    if box is not None:
        return box
    ratio = min(max(width / height, aspect[0]), aspect[1])
    rows, columns = min(round(width / ratio), height), min(round(height * ratio), width)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def random_box(
    height: int, width: int, rng: Rng, area: Range, aspect: Range, limit: tuple[int, int]
) -> Box | None:
    """Return a box of random area, aspect ratio and position, at most `limit` (height, width)."""
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for _ in range(MAX_TRIES):
        share, shape, down, across = rng.random(4).tolist()  # one draw costs as much as four
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
    """RandAugment: `count` random operations of one magnitude (Cubuk et al., arXiv:1909.13719).

    torchvision        magnitudes 0 to 30; nearest neighbor, black fill
    timm               0 to 10, each operation with probability 0.5: `rand-m9-n2`
    timm-increasing    the same, with strength increasing in magnitude: DeiT's `rand-m9-inc1`
    big_vision         0 to 30, stronger than the others from 10 on: AugReg's `randaug(2, 10)`

    `spread` is the standard deviation of the magnitude (timm's `mstd`).
    """
    if flavor not in RAND_AUGMENT:
        raise unknown("flavor of RandAugment", flavor, RAND_AUGMENT)
    policy = RAND_AUGMENT[flavor]
    if not 0 <= magnitude <= policy.max_magnitude:
        raise ConfigError(
            f"magnitude={magnitude} must be 0 to {policy.max_magnitude} for {flavor!r}"
        )
    for _ in range(count):
        if policy.prob < 1 and rng.random() >= policy.prob:
            continue
        value = magnitude
        if spread:
            value = min(max(rng.normal(magnitude, spread), 0), policy.max_magnitude)
        image = random_operation(image, rng, policy, value)
    return image


def aug_mix(
    image: Image.Image, rng: Rng, *, width: int = 3, depth: int | None = None
) -> Image.Image:
    """AugMix: the image mixed with `width` chains of operations (arXiv:1912.02781).

    A chain has `depth` operations, or 1 to 3; magnitudes are below `AUG_MIX_SEVERITY` of 10.
    """
    share = rng.beta(1.0, 1.0)  # of all chains together
    total = np.float32(1 - share) * np.asarray(image, np.float32)
    for weight in rng.dirichlet([1.0] * width):
        augmented = image
        for _ in range(depth or int(rng.integers(1, 4))):
            magnitude = int(rng.integers(AUG_MIX_SEVERITY))
            augmented = random_operation(augmented, rng, AUG_MIX, magnitude)
        total += np.float32(share * weight) * np.asarray(augmented, np.float32)
    return Image.fromarray(np.rint(total).clip(0, 255).astype(np.uint8))


def random_operation(
    image: Image.Image, rng: Rng, policy: "AugmentPolicy", magnitude: float
) -> Image.Image:
    """Apply one operation of a policy, chosen uniformly."""
    names = list(policy.strengths)
    name = names[rng.integers(len(names))]
    sign = 1 if rng.random() < 0.5 else -1
    geometry = Geometry(policy.fill, policy.resample, (rng.random(), rng.random()))
    amount = policy.strengths[name](magnitude / policy.full_magnitude, sign, image.size)
    if name in COLOR_OPS:
        return COLOR_OPS[name](image, amount)
    return GEOMETRY_OPS[name](image, amount, geometry)


def color_jitter(image: Image.Image, rng: Rng, strength: float) -> Image.Image:
    """Scale brightness, contrast and saturation, in random order, by 1 - strength to 1 + strength.

    Factors are at least 0.
    """
    if strength < 0:
        raise ConfigError("color jitter must not be negative")
    for name in rng.permutation(["brightness", "contrast", "color"]):
        image = COLOR_OPS[name](image, rng.uniform(max(0.0, 1 - strength), 1 + strength))
    return image


def random_erasing(
    pixels: Tensor,
    rng: Rng,
    *,
    area: Range = (0.02, 1 / 3),
    aspect: Range = (0.3, 1 / 0.3),
    fill: int | None = None,
) -> Tensor:
    """Return a copy with one rectangle erased (Zhong et al. 2020, arXiv:1708.04896).

    `pixels` is uint8 (C, H, W). Without `fill` the rectangle is uniform noise.
    """
    channels, height, width = pixels.shape
    box = random_box(height, width, rng, area, aspect, (height - 1, width - 1))
    erased = pixels.clone()
    if box is not None:
        region = erased[:, box.top : box.top + box.height, box.left : box.left + box.width]
        if fill is not None:
            region.fill_(fill)
        else:
            noise = rng.integers(0, 256, (channels, box.height, box.width), dtype=np.uint8)
            region.copy_(torch.from_numpy(noise))
    return erased


# Color operations.


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Blend with the image smoothed by (1 1 1, 1 5 1, 1 1 1) / 13; border pixels stay."""
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


def blend_with_gray(gray: int, image: Image.Image, factor: float) -> Image.Image:
    """Return gray + factor * (value - gray), in the single precision of Pillow's blending."""
    return lookup(image, gray + np.float32(factor) * (LEVELS - gray).astype(np.float32))


def autocontrast(image: Image.Image) -> Image.Image:
    """Stretch each channel to 0 to 255: the result of ImageOps, without its loops in Python."""
    low, high = np.reshape(image.getextrema(), (-1, 2)).T[:, :, None]  # (C, 1)
    scale = 255 / np.maximum(high - low, 1)
    return lookup(image, np.where(low < high, LEVELS * scale - low * scale, LEVELS))


def lookup(image: Image.Image, table: np.ndarray) -> Image.Image:
    """Map every value; (256,) for all channels or (C, 256)."""
    entries = np.clip(table, 0, 255).astype(np.uint8).tobytes()
    return image.point(entries * (256 * len(image.getbands()) // len(entries)))


# Geometric operations.


class Geometry(NamedTuple):
    """Options of the operations that move or cover pixels."""

    fill: int = 128  # gray level outside of the image
    resample: Resampling = Resampling.NEAREST
    center: tuple[float, float] = (0.5, 0.5)  # of cutout, as fractions of width and height

    def fill_color(self, image: Image.Image) -> int | tuple[int, int, int]:
        return self.fill if image.mode == "L" else (self.fill, self.fill, self.fill)


def cutout(image: Image.Image, half: float, geometry: Geometry) -> Image.Image:
    """Cover a square of twice `half` pixels, clipped to the image."""
    half = int(half)
    x, y = int(geometry.center[0] * image.width), int(geometry.center[1] * image.height)
    right, bottom = min(image.width, x + half), min(image.height, y + half)
    covered = image.copy()
    covered.paste(geometry.fill_color(image), (max(0, x - half), max(0, y - half), right, bottom))
    return covered


def shift(
    image: Image.Image, slope: float, offset: float, geometry: Geometry, *, axis: int
) -> Image.Image:
    """Sample x at x + slope * y + offset (axis 0), or y at y + slope * x + offset (axis 1).

    Bilinear at a third of the cost of Pillow's filter: two nearest neighbors, blended by a mask.
    """

    def affine(offset: float, resample: Resampling) -> Image.Image:
        row = (1, slope, offset) if axis == 0 else (slope, 1, offset)
        matrix = (*row, 0, 1, 0) if axis == 0 else (1, 0, 0, *row)
        fill = geometry.fill_color(image)
        return image.transform(image.size, Transform.AFFINE, matrix, resample, fillcolor=fill)

    if geometry.resample != Resampling.BILINEAR:
        return affine(offset, geometry.resample)
    # on these numbers Pillow's 16-bit fractions and floats agree to the pixel
    slope, offset = (round(number * FIXED_POINT) / FIXED_POINT for number in (slope, offset))
    first = affine(offset - 0.5, Resampling.NEAREST)
    second = affine(offset + 0.5, Resampling.NEAREST)
    share = (slope * (np.arange(image.size[1 - axis]) + 0.5) + offset) % 1  # of the second
    if not slope:
        return Image.blend(first, second, float(share[0]))
    weights = np.rint(255 * share).astype(np.uint8)
    weights = weights[:, None] if axis == 0 else weights
    first.paste(second, mask=Image.fromarray(np.broadcast_to(weights, first.size[::-1])))
    return first


COLOR_OPS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, _: image,
    "invert": lambda image, _: ImageChops.invert(image),
    "brightness": lambda image, factor: blend_with_gray(0, image, factor),
    "contrast": lambda image, factor: blend_with_gray(
        int(np.asarray(image.convert("L")).mean() + 0.5), image, factor
    ),
    # Contrast of TensorFlow's RandAugment, which Google's models were trained with. Its "mean" sums
    # the counts of a histogram instead of weighting them, and so is the number of pixels / 256,
    # whatever they show: 196 for 224 x 224, white from 256 x 256 on.
    "contrast_by_size": lambda image, factor: blend_with_gray(
        min(255, image.width * image.height // 256), image, factor
    ),
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "sharpness": sharpness,
    # keeps the highest bits: 8 change nothing, 0 gives black
    "posterize": lambda image, bits: lookup(
        image, LEVELS & (256 - 2 ** (8 - min(8, max(0, int(bits)))))
    ),
    # inverts the values from the threshold on
    "solarize": lambda image, threshold: lookup(
        image, np.where(threshold > LEVELS, LEVELS, 255 - LEVELS)
    ),
    # brightens the values below 128
    "solarize_add": lambda image, addition: lookup(
        image, np.where(LEVELS < 128, LEVELS + int(addition), LEVELS)
    ),
    "autocontrast": lambda image, _: autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
}
GEOMETRY_OPS: dict[str, Callable[[Image.Image, float, Geometry], Image.Image]] = {
    "shear_x": lambda image, amount, geometry: shift(image, amount, 0.0, geometry, axis=0),
    "shear_y": lambda image, amount, geometry: shift(image, amount, 0.0, geometry, axis=1),
    "translate_x": lambda image, pixels, geometry: shift(image, 0.0, -pixels, geometry, axis=0),
    "translate_y": lambda image, pixels, geometry: shift(image, 0.0, -pixels, geometry, axis=1),
    "rotate": lambda image, degrees, geometry: image.rotate(
        degrees, geometry.resample, fillcolor=geometry.fill_color(image)
    ),
    "cutout": cutout,
}


# Policies: the strength of each operation as a function (level, sign, (width, height)) → amount.
# Level 0 is the weakest and 1 the strongest that the policy was designed for; the sign is random.
# A policy draws operations by position: their order is part of it.

Strength = Callable[[float, int, tuple[int, int]], float]
ENHANCERS = ("brightness", "color", "contrast", "sharpness")
SHEARS, TRANSLATIONS = ("shear_x", "shear_y"), ("translate_x", "translate_y")


class AugmentPolicy(NamedTuple):
    """Operations, their strengths, and how they are drawn."""

    strengths: dict[str, Strength]
    full_magnitude: float = 30  # the magnitude of level 1
    max_magnitude: float = 30
    prob: float = 1.0  # that an operation is applied
    fill: int = 0
    resample: Resampling = Resampling.NEAREST


# Cubuk et al. 2020 (arXiv:1909.13719) with the ranges of torchvision, which has no inversion.
TORCHVISION: dict[str, Strength] = {
    "identity": lambda level, sign, size: 0.0,
    **dict.fromkeys(SHEARS, lambda level, sign, size: sign * 0.3 * level),
    "translate_x": lambda level, sign, size: int(sign * (150 / 331) * size[0] * level),
    "translate_y": lambda level, sign, size: int(sign * (150 / 331) * size[1] * level),
    "rotate": lambda level, sign, size: sign * 30 * level,
    **dict.fromkeys(ENHANCERS, lambda level, sign, size: max(0.0, 1 + sign * 0.9 * level)),
    "posterize": lambda level, sign, size: 8 - round(4 * level),
    "solarize": lambda level, sign, size: 255 - 255 * level,
    "autocontrast": lambda level, sign, size: 0.0,
    "equalize": lambda level, sign, size: 0.0,
}
# TensorFlow's first table, where several operations become weaker as the level increases.
TENSORFLOW: dict[str, Strength] = {
    "autocontrast": lambda level, sign, size: 0.0,
    "equalize": lambda level, sign, size: 0.0,
    "invert": lambda level, sign, size: 0.0,
    "rotate": lambda level, sign, size: sign * 30 * level,
    "posterize": lambda level, sign, size: int(4 * level),
    "solarize": lambda level, sign, size: int(256 * level),
    "solarize_add": lambda level, sign, size: int(110 * level),
    **dict.fromkeys(ENHANCERS, lambda level, sign, size: 0.1 + (1.9 - 0.1) * level),
    **dict.fromkeys(SHEARS, lambda level, sign, size: sign * 0.3 * level),
}
TIMM = TENSORFLOW | {
    "translate_x": lambda level, sign, size: sign * 0.45 * size[0] * level,
    "translate_y": lambda level, sign, size: sign * 0.45 * size[1] * level,
}
TIMM_INCREASING = TIMM | {
    "posterize": lambda level, sign, size: 4 - int(4 * level),
    "solarize": lambda level, sign, size: 256 - int(256 * level),
    **dict.fromkeys(ENHANCERS, lambda level, sign, size: max(0.1, 1 + sign * 0.9 * level)),
}
# AugReg (Steiner et al. 2022) and the later ViTs of Google: translations in pixels, for 224.
BIG_VISION = {name: strength for name, strength in TENSORFLOW.items() if name != "contrast"} | {
    "contrast_by_size": TENSORFLOW["contrast"],
    "posterize": lambda level, sign, size: max(1, int(4 * level)),  # a shift by 8 bits is one by 7
    **dict.fromkeys(TRANSLATIONS, lambda level, sign, size: sign * 100 * level),
    "cutout": lambda level, sign, size: int(40 * level),
}
TIMM_POLICY = AugmentPolicy(
    TIMM, full_magnitude=10, max_magnitude=10, prob=0.5, fill=128, resample=Resampling.BILINEAR
)
RAND_AUGMENT = {
    "torchvision": AugmentPolicy(TORCHVISION),
    "timm": TIMM_POLICY,
    "timm-increasing": TIMM_POLICY._replace(strengths=TIMM_INCREASING),
    "big_vision": AugmentPolicy(BIG_VISION, full_magnitude=10, fill=128),
}
# Müller and Hutter 2021 (arXiv:2103.10158), table "wide".
TRIVIAL_AUGMENT = AugmentPolicy(
    TORCHVISION
    | {
        **dict.fromkeys(SHEARS, lambda level, sign, size: sign * 0.99 * level),
        **dict.fromkeys(TRANSLATIONS, lambda level, sign, size: int(sign * 32 * level)),
        "rotate": lambda level, sign, size: sign * 135 * level,
        **dict.fromkeys(ENHANCERS, lambda level, sign, size: max(0.0, 1 + sign * 0.99 * level)),
        "posterize": lambda level, sign, size: 8 - round(6 * level),
    }
)
# Hendrycks et al. 2020 (arXiv:1912.02781), with the color operations that torchvision adds.
AUG_MIX = AugmentPolicy(
    {name: strength for name, strength in TORCHVISION.items() if name != "identity"}
    | {
        "translate_x": lambda level, sign, size: int(sign * (1 / 3) * size[0] * level),
        "translate_y": lambda level, sign, size: int(sign * (1 / 3) * size[1] * level),
        "posterize": lambda level, sign, size: 4 - round(4 * level),
    },
    full_magnitude=9,
    max_magnitude=9,
    resample=Resampling.BILINEAR,
)


# Mixing, after normalization and on the device of the batch. Targets become soft.
# Shapes: B images (B, C, H, W) of floats; labels (B,), or (B, K) if multi-label; K classes.


def mixup(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    alpha: float,
    rng: Rng,
    style: MixupStyle = "timm",
) -> tuple[Tensor, Tensor]:
    """Zhang et al. 2018 (arXiv:1710.09412): x and y become lam * own + (1 - lam) * partner's.

    The partner of the first image is the last, of the second the last but one; in torchvision's and
    big_vision's style, that of each image is the one before it. In big_vision's (AugReg), an image
    always keeps the larger share.
    """
    if not images.is_floating_point():
        raise ConfigError(f"cannot mix {images.dtype} images; normalize them first")
    targets, lam = one_hot(labels, classes), sample_lam(alpha, rng)
    lam = max(lam, 1 - lam) if style == "big_vision" else lam
    mixed = []
    for own in (images, targets):
        partner = own.flip(0) if style == "timm" else own.roll(1, 0)
        mixed.append(own.lerp(partner, 1 - lam))
    return mixed[0], mixed[1]


def cutmix(
    images: Tensor, labels: Tensor, *, classes: int, alpha: float, rng: Rng
) -> tuple[Tensor, Tensor]:
    """Yun et al. 2019 (arXiv:1905.04899): a box of every image is replaced by its partner's.

    Targets are mixed in proportion to the pixels, after clipping the box to the image.
    """
    height, width = images.shape[-2:]
    side, spans = math.sqrt(1 - sample_lam(alpha, rng)), []  # a share of both sides of the image
    for size in (height, width):
        length, middle = int(size * side), int(rng.integers(size))
        spans.append(slice(max(0, middle - length // 2), min(size, middle + (length + 1) // 2)))
    region, targets = (..., *spans), one_hot(labels, classes)
    pasted = images.clone()
    pasted[region] = images[region].flip(0)
    pixels = math.prod(span.stop - span.start for span in spans)
    return pasted, targets.lerp(targets.flip(0), pixels / (height * width))


def mixup_or_cutmix(
    images: Tensor,
    labels: Tensor,
    *,
    classes: int,
    mixup_alpha: float,
    cutmix_alpha: float,
    rng: Rng,
    prob: float = 1.0,
    switch_prob: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Mix a batch with probability `prob`, by CutMix with probability `switch_prob`.

    An alpha of 0 disables the method.
    """
    if rng.random() >= prob or not (mixup_alpha or cutmix_alpha):
        return images, one_hot(labels, classes)
    if not mixup_alpha or (cutmix_alpha and rng.random() < switch_prob):
        return cutmix(images, labels, classes=classes, alpha=cutmix_alpha, rng=rng)
    return mixup(images, labels, classes=classes, alpha=mixup_alpha, rng=rng)


def sample_lam(alpha: float, rng: Rng) -> float:
    """Sample from Beta(alpha, alpha); 1 if alpha is 0."""
    if alpha < 0:
        raise ConfigError(f"alpha={alpha} must not be negative; 0 disables mixing")
    return float(rng.beta(alpha, alpha)) if alpha else 1.0


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """Return labels (B,) as float (B, K); labels (B, K) stay."""
    if labels.ndim == 1:
        return F.one_hot(labels.long(), classes).to(torch.float32)
    if labels.ndim != 2 or labels.shape[1] != classes:
        raise ConfigError(f"labels of shape {tuple(labels.shape)} do not fit {classes} classes")
    return labels.to(torch.float32)
