import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import augment
from vitrail.data.augment import COLOR_OPS, GEOMETRY_OPS, RAND_AUGMENT, Geometry
from vitrail.errors import ConfigError

CHANGES = {  # everything that makes a random version of an image
    **{
        f"rand_augment {flavor}": lambda image, rng, flavor=flavor: augment.rand_augment(
            image, rng, 4, 9, flavor=flavor, spread=0.5
        )
        for flavor in RAND_AUGMENT
    },
    "trivial_augment": lambda image, rng: augment.random_operation(
        image, rng, augment.TRIVIAL_AUGMENT, int(rng.integers(31))
    ),
    "aug_mix": augment.aug_mix,
    "color_jitter": lambda image, rng: augment.color_jitter(image, rng, 0.4),
}
SIZES = [(1, 1), (2, 3), (1, 40), (40, 1), (24, 32)]
OPERATIONS = GEOMETRY_OPS | {
    name: lambda image, amount, _, op=op: op(image, amount) for name, op in COLOR_OPS.items()
}


def random_image(size=(24, 32), mode="RGB"):
    shape = size if mode == "L" else (*size, 3)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def seeded(seed=0):
    return np.random.default_rng(seed)


def global_states():
    numpy, pytorch = np.random.get_state()[1].tobytes(), torch.get_rng_state().tolist()
    return random.getstate(), numpy, pytorch


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_policies_depend_only_on_the_generator(change):
    original, states = random_image(), global_states()
    first, second = (
        [change(original, seeded(seed)).tobytes() for seed in range(20)] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) > 5
    assert original.tobytes() == random_image().tobytes()
    assert global_states() == states
    for size, mode in itertools.product(SIZES, ("RGB", "L")):
        for seed in range(20):
            changed = change(random_image(size, mode), seeded(seed))
            assert (changed.mode, changed.size) == (mode, size[::-1])


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_preserve_size_and_mode(name, mode):
    for size, resample in itertools.product(SIZES, (0, 2, 3)):
        image = random_image(size, mode)
        geometry = Geometry(20, Image.Resampling(resample))
        for amount in (-0.5, 0.0, 0.5, 2.0, 300.0):
            changed = OPERATIONS[name](image, amount, geometry)
            assert (changed.mode, changed.size) == (mode, size[::-1])
        assert image.tobytes() == random_image(size, mode).tobytes()
        if name in GEOMETRY_OPS:
            assert OPERATIONS[name](image, 0.0, geometry).tobytes() == image.tobytes()
        if name in ("brightness", "contrast", "color", "sharpness", "contrast_by_size"):
            assert OPERATIONS[name](image, 1.0, geometry).tobytes() == image.tobytes()


def test_fill_and_cutout():
    geometry, move = Geometry(76), GEOMETRY_OPS["translate_x"]
    assert move(random_image((4, 4)), 4, geometry).getcolors() == [(16, (76, 76, 76))]
    assert move(random_image((4, 4), "L"), 4, geometry).getcolors() == [(16, 76)]
    whole = GEOMETRY_OPS["rotate"](random_image((4, 4)), 45, Geometry(7))
    assert whole.getpixel((0, 0)) == (7, 7, 7)
    image, cutout = Image.new("L", (20, 10), 200), GEOMETRY_OPS["cutout"]
    assert (np.asarray(cutout(image, 2, Geometry(0))) == 0).sum() == 16
    corner = np.asarray(cutout(image, 2, Geometry(0, center=(0.0, 0.0))))
    assert (corner[:2, :2] == 0).all()
    assert (corner == 0).sum() == 4
    flat = Image.new("RGB", (8, 8), (10, 100, 200))
    for name in ("autocontrast", "equalize", "sharpness"):
        assert COLOR_OPS[name](flat, 1.5).tobytes() == flat.tobytes(), name


# Level functions of big_vision's pp/autoaugment.py at magnitudes 10, 15 and 20 (AugReg's).
BIG_VISION = {
    "rotate": (30, 45, 60),
    "posterize": (4, 6, 8),
    "solarize": (256, 384, 512),
    "solarize_add": (110, 165, 220),
    **dict.fromkeys(("brightness", "color", "contrast_by_size", "sharpness"), (1.9, 2.8, 3.7)),
    **dict.fromkeys(("shear_x", "shear_y"), (0.3, 0.45, 0.6)),
    **dict.fromkeys(("translate_x", "translate_y"), (100, 150, 200)),
    "cutout": (40, 60, 80),
}


def test_big_vision_operations_and_strengths():
    policy = RAND_AUGMENT["big_vision"]
    assert policy.strengths.keys() == BIG_VISION.keys() | {"autocontrast", "equalize", "invert"}
    for name, amounts in BIG_VISION.items():
        levels = [magnitude / policy.full_magnitude for magnitude in (10, 15, 20)]
        ours = [policy.strengths[name](level, 1, (224, 224)) for level in levels]
        assert ours == pytest.approx(amounts), name
    contrast = COLOR_OPS["contrast_by_size"]  # depends on the number of pixels
    flat = Image.new("RGB", (224, 224), (196, 100, 250))
    assert contrast(flat, 1.9).getpixel((0, 0)) == (196, 13, 255)
    assert contrast(Image.new("L", (300, 300), 100), 0.1).getpixel((0, 0)) == 239


# Boxes


def test_inception_crop_is_inside_the_image_and_has_its_area():
    rng = seeded()
    for size in ((1, 1), (1, 2000), (2000, 1), (3, 2), (375, 500)):
        for box in (augment.inception_crop(*size, rng) for _ in range(300)):
            assert 0 <= box.top < box.top + box.height <= size[0]
            assert 0 <= box.left < box.left + box.width <= size[1]
    boxes = [augment.inception_crop(400, 500, rng, area=(0.2, 0.5)) for _ in range(3000)]
    areas = np.array([box.height * box.width / 200_000 for box in boxes])
    assert 0.198 < areas.min() < 0.21
    assert 0.49 < areas.max() < 0.502
    assert augment.inception_crop(10, 1000, seeded(), area=(0.9, 1.0)) == (0, 493, 10, 13)
    assert augment.inception_crop(1000, 10, seeded(), area=(0.9, 1.0)) == (493, 0, 13, 10)
    assert augment.inception_crop(1, 1, seeded()) == (0, 0, 1, 1)


def test_random_erasing_erases_one_rectangle_of_a_copy():
    pixels = torch.full((3, 40, 30), 7, dtype=torch.uint8)
    erased = augment.random_erasing(pixels, seeded(), fill=0)
    gone = (erased == 0).all(0)
    assert (pixels == 7).all()
    assert gone.sum() == gone.any(1).sum() * gone.any(0).sum()  # a rectangle
    assert 0.015 < gone.float().mean() < 0.35
    assert (erased[:, ~gone] == 7).all()
    wide = {"area": (0.5, 0.9), "aspect": (0.9, 1.1)}
    zeros = torch.zeros(3, 99, 99, dtype=torch.uint8)
    one, other = (augment.random_erasing(zeros, seeded(), **wide) for _ in range(2))
    assert abs(one[one > 0].float().mean() - 128) < 3  # uniform noise
    assert torch.equal(one, other)
    tiny = torch.ones(3, 1, 1, dtype=torch.uint8)
    assert torch.equal(augment.random_erasing(tiny, seeded()), tiny)


# Mixing

METHODS = {
    "mixup": lambda *batch, **how: augment.mixup(*batch, alpha=0.8, **how),
    "rolled": lambda *batch, **how: augment.mixup(*batch, alpha=0.8, style="torchvision", **how),
    "big_vision": lambda *batch, **how: augment.mixup(*batch, alpha=0.2, style="big_vision", **how),
    "cutmix": lambda *batch, **how: augment.cutmix(*batch, alpha=1.0, **how),
    "either": lambda *batch, **how: augment.mixup_or_cutmix(
        *batch, mixup_alpha=0.8, cutmix_alpha=1.0, prob=0.9, **how
    ),
}


def batch(count=4, size=(6, 8)):
    """Return constant images whose value is their position, which is also their label."""
    values = torch.arange(float(count))
    return values[:, None, None, None].expand(-1, 3, *size).clone(), torch.arange(count)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_targets_are_mixed_in_proportion_to_pixels(method, count):
    images, labels = batch(count)
    states, results = global_states(), []
    for seed in [*range(30), *range(30)]:
        mixed, targets = method(images, labels, classes=count, rng=seeded(seed))
        results.append(torch.cat([mixed.flatten(), targets.flatten()]))
        assert mixed.shape == images.shape
        assert torch.allclose(targets.sum(1), torch.ones(count))
        assert targets.min() >= 0
        expected = targets @ torch.arange(float(count))  # an image's value is its label
        torch.testing.assert_close(mixed.mean((1, 2, 3)), expected)
    assert torch.equal(images, batch(count)[0])
    assert all(map(torch.equal, results[:30], results[30:]))
    assert count == 1 or len({tuple(result.tolist()) for result in results}) > 3
    assert global_states() == states


def is_mixup(images):
    """Return whether values between those of the images occur; CutMix makes none."""
    return not torch.equal(images, images.round())


def test_alpha_of_zero_disables_a_method():
    images, labels = batch()
    for method in (augment.mixup, augment.cutmix):
        mixed, targets = method(images, labels, classes=4, alpha=0.0, rng=seeded())
        assert torch.equal(mixed, images)
        assert torch.equal(targets, torch.eye(4))

    def either(seed, mixup, cutmix):
        how = {"classes": 4, "mixup_alpha": mixup, "cutmix_alpha": cutmix, "rng": seeded(seed)}
        return augment.mixup_or_cutmix(images, labels, **how)[0]

    for seed in range(9):
        assert not is_mixup(either(seed, 0, 1))
        assert is_mixup(either(seed, 1, 0))
        assert torch.equal(either(seed, 0, 0), images)


def test_prob_and_switch_prob():
    images, labels = batch()
    how = {"mixup_alpha": 5.0, "cutmix_alpha": 5.0, "prob": 0.6, "switch_prob": 0.25}
    how |= {"classes": 4, "rng": seeded()}
    mixed = [augment.mixup_or_cutmix(images, labels, **how)[0] for _ in range(2000)]
    unchanged, mixups = sum(torch.equal(x, images) for x in mixed), sum(map(is_mixup, mixed))
    assert abs(unchanged - 800) < 80
    assert abs(mixups - 900) < 80
    assert abs(2000 - unchanged - mixups - 300) < 60  # by CutMix


def test_targets_of_big_vision_and_of_multiple_labels():
    images, labels = batch()
    how = {"classes": 4, "alpha": 0.5, "rng": seeded(), "style": "big_vision"}
    for _ in range(50):
        _, targets = augment.mixup(images, labels, **how)
        assert targets.diag().min() >= 0.5  # the larger share is its own
        assert targets[1, :2].sum() == pytest.approx(1)
    several = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 1.0]])
    quarter = SimpleNamespace(beta=lambda *_: 0.75)
    _, targets = augment.mixup(images[:2], several, classes=3, alpha=1.0, rng=quarter)
    torch.testing.assert_close(targets, torch.tensor([[0.75, 1.0, 0.25], [0.25, 1.0, 0.75]]))


def test_mixing_preserves_the_dtype():
    images, labels = batch()
    for method in (augment.mixup, augment.cutmix):
        mixed, targets = method(images.bfloat16(), labels, classes=4, alpha=1.0, rng=seeded())
        assert (mixed.dtype, targets.dtype) == (torch.bfloat16, torch.float32)


IMAGE, (IMAGES, LABELS), HOW = random_image(), batch(), {"classes": 4, "rng": seeded()}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: augment.rand_augment(IMAGE, seeded(), flavor="torchvison"), "mean 'torchvision'"),
        (lambda: augment.rand_augment(IMAGE, seeded(), 2, 11, flavor="timm"), "0 to 10 for 'timm'"),
        (lambda: augment.color_jitter(IMAGE, seeded(), -0.1), "color jitter must not be negative"),
        (lambda: augment.mixup(IMAGES.byte(), LABELS, alpha=1.0, **HOW), "normalize them first"),
        (lambda: augment.mixup(IMAGES, torch.zeros(4, 3), alpha=1.0, **HOW),
         r"labels of shape \(4, 3\) do not fit 4 classes"),
        (lambda: augment.cutmix(IMAGES, LABELS, alpha=-1, **HOW), "alpha=-1"),
    ],
)  # fmt: skip
def test_invalid_settings_and_batches_are_rejected(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
