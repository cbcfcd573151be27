"""Augmentation depends on the generator only, and stays within the image."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import augment
from vitrail.data.augment import (
    AUG_MIX,
    COLOR_OPS,
    GEOMETRY_OPS,
    RAND_AUGMENT,
    TRIVIAL_AUGMENT,
    Box,
    Geometry,
)
from vitrail.errors import ConfigError

# Everything that makes a random version of an image.
CHANGES = {
    **{
        f"rand_augment {flavor}": lambda image, rng, flavor=flavor: augment.rand_augment(
            image, rng, 4, 9, flavor=flavor, spread=0.5
        )
        for flavor in RAND_AUGMENT
    },
    "trivial_augment": augment.trivial_augment,
    "aug_mix": augment.aug_mix,
    "color_jitter": lambda image, rng: augment.color_jitter(
        image, rng, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1
    ),
}
SIZES = [(1, 1), (2, 3), (1, 40), (40, 1), (24, 32)]


def random_image(size=(24, 32), mode="RGB", seed=0):
    """Random pixels, of (height, width)."""
    shape = size if mode == "L" else (*size, 3)
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


def apply_operation(name, image, amount, geometry):
    if name in COLOR_OPS:
        return COLOR_OPS[name](image, amount)
    return GEOMETRY_OPS[name](image, amount, geometry)


def seeded(seed=0):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_policies_preserve_size_and_mode(change, size, mode):
    for seed in range(20):
        changed = change(random_image(size, mode), seeded(seed))
        assert (changed.mode, changed.size) == (mode, size[::-1])


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_result_depends_only_on_the_generator(change):
    original = random_image()
    first = [change(original, seeded(seed)).tobytes() for seed in range(20)]
    python, numpy, pytorch = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    second = [change(original, seeded(seed)).tobytes() for seed in range(20)]
    assert first == second
    assert len(set(first)) > 5
    assert original.tobytes() == random_image().tobytes()
    assert random.getstate() == python
    assert np.array_equal(np.random.get_state()[1], numpy)
    assert torch.equal(torch.get_rng_state(), pytorch)


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", COLOR_OPS | GEOMETRY_OPS)
def test_operations_preserve_size_and_mode(name, mode):
    for size, resample in itertools.product(SIZES, (0, 2, 3)):
        image = random_image(size, mode)
        geometry = Geometry((10, 20, 30), Image.Resampling(resample))
        for amount in (-0.5, 0.0, 0.5, 2.0, 300.0):
            changed = apply_operation(name, image, amount, geometry)
            assert (changed.mode, changed.size) == (mode, size[::-1])
        assert image.tobytes() == random_image(size, mode).tobytes()


@pytest.mark.parametrize("resample", [0, 2, 3])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_zero_amount_is_the_identity(mode, resample):
    image = random_image(mode=mode)
    geometry = Geometry(128, Image.Resampling(resample))
    for name in ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "cutout"):
        assert apply_operation(name, image, 0.0, geometry).tobytes() == image.tobytes(), name
    for name in ("brightness", "contrast", "color", "sharpness", "contrast_by_size"):
        assert COLOR_OPS[name](image, 1.0).tobytes() == image.tobytes(), name


def test_fill_is_converted_to_the_mode():
    geometry = Geometry((255, 0, 0))
    color = apply_operation("translate_x", random_image((4, 4)), 4, geometry)
    assert color.getcolors() == [(16, (255, 0, 0))]
    gray = apply_operation("translate_x", random_image((4, 4), "L"), 4, geometry)
    assert gray.getcolors() == [(16, 76)]
    whole = apply_operation("rotate", random_image((4, 4)), 45, Geometry(7))
    assert whole.getpixel((0, 0)) == (7, 7, 7)


def test_bilinear_shift_interpolates_between_neighbors():
    image = Image.fromarray(np.arange(0, 200, 10, dtype=np.uint8)[None].repeat(5, 0))
    geometry = Geometry(0, Image.Resampling.BILINEAR)
    moved = np.asarray(apply_operation("translate_x", image, 2.25, geometry)).astype(int)
    expected = np.arange(20) * 10 - 22.5
    assert np.abs(moved[:, 3:] - expected[3:]).max() <= 1


def test_cutout_is_clipped_to_the_image():
    image = Image.new("L", (20, 10), 200)
    middle = np.asarray(apply_operation("cutout", image, 2, Geometry(0)))
    assert (middle == 0).sum() == 16
    corner = np.asarray(apply_operation("cutout", image, 2, Geometry(0, center=(0.0, 0.0))))
    assert (corner[:2, :2] == 0).all()
    assert (corner == 0).sum() == 4


def test_constant_image_survives_color_operations():
    flat = Image.new("RGB", (8, 8), (10, 100, 200))
    for name in ("autocontrast", "equalize", "sharpness"):
        assert COLOR_OPS[name](flat, 1.5).tobytes() == flat.tobytes(), name


@pytest.mark.parametrize(
    "policy",
    [*RAND_AUGMENT.values(), TRIVIAL_AUGMENT, AUG_MIX],
    ids=[*RAND_AUGMENT, "trivial", "augmix"],
)
def test_policies_at_every_magnitude(policy):
    assert policy.strengths.keys() <= (COLOR_OPS | GEOMETRY_OPS).keys()
    for strength in policy.strengths.values():
        for magnitude in range(int(policy.max_magnitude) + 1):
            for sign in (-1, 1):
                assert math.isfinite(strength(magnitude / policy.full_magnitude, sign, (32, 24)))


def test_torchvision_magnitude_zero_is_the_identity():
    image = random_image()
    quiet = {"identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate"}
    quiet |= {"brightness", "color", "contrast", "sharpness", "posterize"}
    for name in quiet:
        amount = RAND_AUGMENT["torchvision"].strengths[name](0.0, -1, image.size)
        assert apply_operation(name, image, amount, Geometry()).tobytes() == image.tobytes(), name


# Level functions of big_vision's pp/autoaugment.py at magnitudes 10, 15 and 20 (AugReg's).
BIG_VISION = {
    "rotate": (30, 45, 60),
    "posterize": (4, 6, 8),
    "solarize": (256, 384, 512),
    "solarize_add": (110, 165, 220),
    "brightness": (1.9, 2.8, 3.7),
    "color": (1.9, 2.8, 3.7),
    "contrast_by_size": (1.9, 2.8, 3.7),
    "sharpness": (1.9, 2.8, 3.7),
    "shear_x": (0.3, 0.45, 0.6),
    "shear_y": (0.3, 0.45, 0.6),
    "translate_x": (100, 150, 200),
    "translate_y": (100, 150, 200),
    "cutout": (40, 60, 80),
}


def test_big_vision_operations_and_strengths():
    policy = RAND_AUGMENT["big_vision"]
    assert policy.strengths.keys() == BIG_VISION.keys() | {"autocontrast", "equalize", "invert"}
    for name, amounts in BIG_VISION.items():
        levels = [magnitude / policy.full_magnitude for magnitude in (10, 15, 20)]
        ours = [policy.strengths[name](level, 1, (224, 224)) for level in levels]
        assert ours == pytest.approx(amounts), name


def test_big_vision_contrast_depends_on_the_number_of_pixels():
    flat = Image.new("RGB", (224, 224), (196, 100, 250))
    assert COLOR_OPS["contrast_by_size"](flat, 1.9).getpixel((0, 0)) == (196, 13, 255)
    white = Image.new("L", (300, 300), 100)
    assert COLOR_OPS["contrast_by_size"](white, 0.1).getpixel((0, 0)) == 239


# Boxes


def inside(box, height, width):
    bottom, right = box.top + box.height, box.left + box.width
    return 0 <= box.top < bottom <= height and 0 <= box.left < right <= width


@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (3, 2), (375, 500)], ids=str)
def test_inception_crop_is_inside_the_image(size):
    rng = seeded()
    for _ in range(300):
        assert inside(augment.inception_crop(*size, rng), *size)


def test_inception_crop_area_and_aspect_ratio():
    rng = seeded()
    boxes = [augment.inception_crop(400, 500, rng, area=(0.2, 0.5)) for _ in range(3000)]
    areas = np.array([box.height * box.width / 200_000 for box in boxes])
    shapes = np.array([box.width / box.height for box in boxes])
    assert 0.198 < areas.min() < 0.21
    assert 0.49 < areas.max() < 0.502
    assert abs(areas.mean() - 0.35) < 0.01  # uniform
    assert 0.74 < shapes.min() < 0.76
    assert 1.32 < shapes.max() < 1.35
    assert abs(np.log(shapes).mean()) < 0.015  # log-uniform: as often wide as tall
    middles = np.array([(box.top + box.height / 2, box.left + box.width / 2) for box in boxes])
    assert np.abs(middles.mean(0) - (200, 250)).max() < 5


def test_inception_crop_falls_back_to_the_center():
    assert augment.inception_crop(10, 1000, seeded(), area=(0.9, 1.0)) == (0, 493, 10, 13)
    assert augment.inception_crop(1000, 10, seeded(), area=(0.9, 1.0)) == (493, 0, 13, 10)
    assert augment.inception_crop(1, 1, seeded()) == Box(0, 0, 1, 1)


# Erasing and repeating


def test_random_erasing_erases_one_rectangle_of_a_copy():
    pixels = torch.full((3, 40, 30), 7, dtype=torch.uint8)
    erased = augment.random_erasing(pixels, seeded(), fill=0)
    gone = (erased == 0).all(0)
    rows, columns = gone.any(1), gone.any(0)
    assert (pixels == 7).all()
    assert gone.sum() == rows.sum() * columns.sum()  # a rectangle
    assert 0.015 < gone.float().mean() < 0.35
    assert (erased[:, ~gone] == 7).all()


def test_random_erasing_noise_is_uniform():
    wide = {"area": (0.5, 0.9), "aspect": (0.9, 1.1)}
    one, other = (
        augment.random_erasing(torch.zeros(3, 99, 99).byte(), seeded(), **wide) for _ in range(2)
    )
    assert abs(one[one > 0].float().mean() - 128) < 3
    assert torch.equal(one, other)


def test_tiny_images_are_not_erased():
    pixels = torch.ones(3, 1, 1)
    assert torch.equal(augment.random_erasing(pixels, seeded()), pixels)


def test_invalid_settings_are_rejected():
    image, rng = random_image(), seeded()
    with pytest.raises(ConfigError, match="did you mean 'torchvision'"):
        augment.rand_augment(image, rng, flavor="torchvison")
    with pytest.raises(ConfigError, match="magnitude=11 must be 0 to 10 for 'timm'"):
        augment.rand_augment(image, rng, 2, 11, flavor="timm")
    with pytest.raises(ConfigError, match="hue"):
        augment.color_jitter(image, rng, hue=0.6)
