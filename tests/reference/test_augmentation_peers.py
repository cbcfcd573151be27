"""Augmentation matches torchvision and timm: operations, strengths, crops and mixed batches.

Pictures agree to the last bit, with two exceptions that are stated where they are tested: shear
and translate with bilinear filtering (2 gray levels; what lies within half a pixel of the border is
left out, since there ours fades into the fill), and AugMix (1: torchvision cuts off where we
round).
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vitrail.data import augment
from vitrail.data.augment import AUG_MIX, COLOR_OPS, GEOMETRY_OPS, RAND_AUGMENT, Geometry

functional = pytest.importorskip("torchvision.transforms.functional")
transforms = pytest.importorskip("torchvision.transforms")
v2 = pytest.importorskip("torchvision.transforms.v2")
timm_augment = pytest.importorskip("timm.data.auto_augment")
timm_mixup = pytest.importorskip("timm.data.mixup")
pytestmark = pytest.mark.reference

NEAREST, BILINEAR, BICUBIC = (Image.Resampling(code) for code in (0, 2, 3))
FACTORS = (0.0, 0.1, 0.55, 1.0, 1.37, 1.9, 3.7)

# Ours → theirs of (image, amount), and amounts.
TORCHVISION = {
    "brightness": (functional.adjust_brightness, FACTORS),
    "contrast": (functional.adjust_contrast, FACTORS),
    "color": (functional.adjust_saturation, FACTORS),
    "sharpness": (functional.adjust_sharpness, FACTORS),
    "posterize": (functional.posterize, (1, 4, 7, 8)),
    "solarize": (functional.solarize, (0, 85.5, 128, 255, 256)),
    "autocontrast": (lambda image, _: functional.autocontrast(image), (0,)),
    "equalize": (lambda image, _: functional.equalize(image), (0,)),
    "invert": (lambda image, _: functional.invert(image), (0,)),
}
TIMM = {
    "brightness": (timm_augment.brightness, FACTORS),
    "contrast": (timm_augment.contrast, FACTORS),
    "color": (timm_augment.color, FACTORS),
    "sharpness": (timm_augment.sharpness, FACTORS),
    "posterize": (timm_augment.posterize, (1, 4, 7, 8)),
    "solarize": (timm_augment.solarize, (0, 85, 128, 255, 256)),
    "solarize_add": (timm_augment.solarize_add, (0, 50, 110)),
    "autocontrast": (lambda image, _: timm_augment.auto_contrast(image), (0,)),
    "equalize": (lambda image, _: timm_augment.equalize(image), (0,)),
    "invert": (lambda image, _: timm_augment.invert(image), (0,)),
}
PLACED = {  # timm's translations go the other way
    "shear_x": (timm_augment.shear_x, 1, (-0.3, -0.11, 0.27)),
    "shear_y": (timm_augment.shear_y, 1, (-0.3, -0.11, 0.27)),
    "translate_x": (timm_augment.translate_x_abs, -1, (-20, -7.3, 11, 12.6)),
    "translate_y": (timm_augment.translate_y_abs, -1, (-20, -7.3, 11, 12.6)),
    "rotate": (timm_augment.rotate, 1, (-30, -11.5, 27)),
}
ENHANCERS = ("Brightness", "Color", "Contrast", "Sharpness")


def images(mode):
    """Smooth and rough ones, one that does not use all values, and a small one."""
    rng = np.random.default_rng(0)
    for height, width, low, high in ((60, 48, 0, 256), (48, 60, 40, 190), (3, 5, 0, 256)):
        rough = Image.fromarray(rng.integers(low, high, (height, width, 3), dtype=np.uint8))
        smooth = rough.reduce(2).resize((width, height), BICUBIC)
        yield from (rough.convert(mode), smooth.convert(mode))


def difference(ours, theirs):
    assert (ours.mode, ours.size) == (theirs.mode, theirs.size)
    return np.abs(np.asarray(ours).astype(int) - np.asarray(theirs).astype(int))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize(
    ("name", "theirs", "amounts"),
    [(name, *row) for table in (TORCHVISION, TIMM) for name, row in table.items()],
    ids=[
        *(f"{name} of torchvision" for name in TORCHVISION),
        *(f"{name} of timm" for name in TIMM),
    ],
)
def test_color_operations_match(name, theirs, amounts, mode):
    for image in images(mode):
        for amount in amounts:
            ours = COLOR_OPS[name](image, amount)
            assert difference(ours, theirs(image, amount)).max() == 0, amount


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("resample", [NEAREST, BILINEAR, BICUBIC])
@pytest.mark.parametrize("name", PLACED)
def test_geometric_operations_match_timm(name, resample, mode):
    theirs, sign, amounts = PLACED[name]
    fill = (20, 20, 20) if mode == "RGB" else 20
    ours_differs = resample == BILINEAR and name != "rotate"
    for image in images(mode):
        for amount in amounts:
            ours = GEOMETRY_OPS[name](image, amount, Geometry(20, resample))
            other = theirs(image, sign * amount, resample=resample, fillcolor=fill)
            errors = difference(ours, other)
            errors = errors[inner(name, image, amount)] if ours_differs else errors
            assert errors.max(initial=0) <= (2 if ours_differs else 0), amount


def inner(name, image, amount):
    """Where the pixels come from at least half a pixel inside the image."""
    y, x = np.mgrid[: image.height, : image.width] + 0.5
    place, side = {
        "shear_x": (x + amount * y, image.width),
        "shear_y": (y + amount * x, image.height),
        "translate_x": (x - amount, image.width),
        "translate_y": (y - amount, image.height),
    }[name]
    return (place >= 0.5) & (place <= side - 0.5)


@pytest.mark.parametrize("name", PLACED)
def test_geometric_operations_match_torchvision(name):
    affine = {"angle": 0.0, "translate": [0, 0], "scale": 1.0, "shear": [0.0, 0.0], "fill": 0}
    for image in images("RGB"):
        for amount in (-11, 7) if "translate" in name else (-0.3, 0.21):
            degrees = float(np.degrees(np.arctan(amount)))
            match name:
                case "rotate":
                    theirs = functional.rotate(image, 100 * amount, fill=0)
                    amount = 100 * amount
                case "shear_x" | "shear_y":
                    shear = [degrees, 0.0] if name == "shear_x" else [0.0, degrees]
                    theirs = functional.affine(image, **affine | {"shear": shear}, center=[0, 0])
                case _:
                    move = [amount, 0] if name == "translate_x" else [0, amount]
                    theirs = functional.affine(image, **affine | {"translate": move})
            ours = GEOMETRY_OPS[name](image, amount, Geometry(0))
            assert difference(ours, theirs).max() == 0, amount


def our_name(name):
    """ShearX → shear_x, TranslateXRel → translate_x."""
    name = name.removesuffix("Increasing").removesuffix("Rel").replace("AutoC", "Autoc")
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


@pytest.mark.parametrize(
    ("policy", "peer", "bins"),
    [
        (RAND_AUGMENT["torchvision"], v2.RandAugment, 31),
        (augment.TRIVIAL_AUGMENT, v2.TrivialAugmentWide, 31),
        (AUG_MIX, v2.AugMix, 10),
    ],
)
def test_magnitudes_match_torchvision(policy, peer, bins):
    theirs = peer._AUGMENTATION_SPACE
    assert {our_name(name) for name in theirs} == policy.strengths.keys()
    for name, (magnitudes, signed) in theirs.items():
        amounts = magnitudes(bins, 24, 32)
        for magnitude in range(bins) if amounts is not None else ():
            for sign in (-1, 1):
                theirs = float(amounts[magnitude]) * (sign if signed else 1)
                theirs = 1 + theirs if name in ENHANCERS else theirs
                theirs = 255 * theirs if name == "Solarize" else theirs
                if "Translate" in name:  # in whole pixels; their float32 may fall just short of one
                    theirs = int(theirs + 1e-4 * sign)
                strength = policy.strengths[our_name(name)]
                ours = strength(magnitude / policy.full_magnitude, sign, (32, 24))
                assert ours == pytest.approx(theirs, abs=1e-4), (name, magnitude)


@pytest.mark.parametrize(
    ("flavor", "names"),
    [
        ("timm", timm_augment._RAND_TRANSFORMS),
        ("timm-increasing", timm_augment._RAND_INCREASING_TRANSFORMS),
    ],
)
def test_magnitudes_match_timm(flavor, names, monkeypatch):
    policy = RAND_AUGMENT[flavor]
    assert {our_name(name) for name in names} == policy.strengths.keys()
    for name in names:
        level = timm_augment.LEVEL_TO_ARG[name]
        for magnitude in np.linspace(0, 10, 41) if level else ():
            for sign in (-1, 1):
                monkeypatch.setattr(timm_augment, "_randomly_negate", lambda v, s=sign: s * v)
                (theirs,) = level(magnitude, {})
                side = 32 if name == "TranslateXRel" else 24 if name == "TranslateYRel" else 1
                strength = policy.strengths[our_name(name)]
                ours = strength(magnitude / policy.full_magnitude, sign, (32, 24))
                assert ours == pytest.approx(side * theirs), (name, magnitude)


def scripted(draws, share=0.0, weights=()):
    """A generator whose next draws are known."""
    draws = iter(draws)
    known = {"beta": lambda *_: share, "dirichlet": lambda _: weights}
    return SimpleNamespace(integers=lambda _: next(draws), random=lambda: next(draws), **known)


@pytest.mark.parametrize("magnitude", [0, 9, 30])
def test_rand_augment_matches_torchvision(magnitude, monkeypatch):
    names = list(v2.RandAugment._AUGMENTATION_SPACE)
    ours = list(RAND_AUGMENT["torchvision"].strengths)
    image = next(images("RGB"))
    for first in range(len(names)):
        for sign, second in ((0.7, (first + 5) % len(names)), (0.2, (first + 8) % len(names))):
            theirs = iter((first, second))
            monkeypatch.setattr(torch, "randint", lambda *_, draws=theirs: next(draws))
            monkeypatch.setattr(torch, "rand", lambda *_, s=sign: s)  # up to a half: negative
            expected = v2.RandAugment(2, magnitude)(image)
            monkeypatch.undo()
            draws = []
            for number in (first, second):  # ours draws the sign the other way round
                draws += [ours.index(our_name(names[number])), 1 - sign, 0.5, 0.5]
            changed = augment.rand_augment(image, scripted(draws), 2, magnitude)
            assert difference(changed, expected).max() == 0, (names[first], names[second])


def test_aug_mix_matches_torchvision(monkeypatch):
    names = ["Brightness", "Posterize", "Color", "Solarize", "Contrast", "Sharpness"]
    theirs, ours = list(v2.AugMix._AUGMENTATION_SPACE), list(AUG_MIX.strengths)
    share, weights = 0.7, np.array([0.1, 0.3, 0.2, 0.15, 0.05, 0.2])
    peer = v2.AugMix(mixture_width=6, chain_depth=1)
    peer._sample_dirichlet = lambda alphas: torch.tensor(
        [weights.tolist() if alphas.shape[-1] == 6 else [1 - share, share]]
    )
    for image in images("RGB"):
        their_draws, our_draws = [], []
        for number, name in enumerate(names):
            their_draws += [theirs.index(name), number % 3]
            our_draws += [number % 3, ours.index(our_name(name)), 0.3, 0.5, 0.5]
        draws = iter(their_draws)
        monkeypatch.setattr(torch, "randint", lambda *_, draws=draws: next(draws))
        monkeypatch.setattr(torch, "rand", lambda *_: 0.7)
        expected = peer(image)
        monkeypatch.undo()
        rng = scripted(our_draws, share, weights)
        assert difference(augment.aug_mix(image, rng, width=6, depth=1), expected).max() <= 1


def largest_gap(first, second):
    """The Kolmogorov-Smirnov statistic of two samples."""
    places = np.concatenate([first, second])
    below = [np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (first, second)]
    return np.abs(below[0] - below[1]).max()


def measures(boxes):
    top, left, height, width = np.array(boxes, float).T
    return {"area": height * width, "shape": width / height, "top": top, "left": left}


def assert_same_distribution(ours, theirs):
    for name, values in measures(ours).items():
        gap = largest_gap(values, measures(theirs)[name])
        assert gap < 1.95 * (2 / len(ours)) ** 0.5, name  # exceeded by chance once in a thousand


@pytest.mark.slow
@pytest.mark.parametrize("size", [(375, 500), (600, 200), (33, 32)], ids=str)
def test_distribution_of_inception_crops_matches_torchvision(size):
    torch.manual_seed(0)
    rng, count, image = np.random.default_rng(0), 4000, torch.empty(3, *size)
    get_params = transforms.RandomResizedCrop.get_params
    theirs = [get_params(image, [0.05, 1], [3 / 4, 4 / 3]) for _ in range(count)]
    assert_same_distribution([augment.inception_crop(*size, rng) for _ in range(count)], theirs)


@pytest.mark.slow
def test_distribution_of_erased_boxes_matches_torchvision():
    torch.manual_seed(0)
    rng, count, image = np.random.default_rng(0), 3000, torch.ones(1, 64, 48)
    area, aspect = (0.02, 0.33), (0.3, 3.3)
    get_params = transforms.RandomErasing.get_params
    theirs = [get_params(image, area, aspect, [0.0])[:4] for _ in range(count)]
    ranges = {"area": area, "aspect": aspect}
    ours = [box_of(augment.random_erasing(image, rng, **ranges, fill=0)) for _ in range(count)]
    assert_same_distribution(ours, theirs)


def box_of(erased):
    rows, columns = (erased[0] == 0).any(1).nonzero()[:, 0], (erased[0] == 0).any(0).nonzero()[:, 0]
    top, left = int(rows[0]), int(columns[0])
    return top, left, int(rows[-1]) - top + 1, int(columns[-1]) - left + 1


def batch(count=6):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 20, 14, generator=generator), torch.arange(count) % 4


@pytest.mark.parametrize("peer", ["timm", "torchvision"])
@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.9, 1.0])
def test_mixup_matches(share, peer, monkeypatch):
    images, labels = batch()
    monkeypatch.setattr(np.random, "beta", lambda *_: share)
    theirs = timm_mixup.Mixup(mixup_alpha=1.0, label_smoothing=0.0, num_classes=4)
    style = {}
    if peer == "torchvision":
        theirs, style = v2.MixUp(num_classes=4), {"style": "torchvision"}
        theirs._dist = SimpleNamespace(sample=lambda _: torch.tensor(share, dtype=torch.float64))
    expected, expected_targets = theirs(images.clone(), labels)
    rng = scripted((), share)
    mixed, targets = augment.mixup(images, labels, classes=4, alpha=1.0, rng=rng, **style)
    torch.testing.assert_close(mixed, expected)
    torch.testing.assert_close(targets, expected_targets)


@pytest.mark.parametrize("place", [(0, 0), (7, 9), (19, 13)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.13, 0.5, 0.9, 1.0])
def test_cutmix_matches_timm(share, place, monkeypatch):
    images, labels = batch()
    peer = timm_mixup.Mixup(mixup_alpha=0.0, cutmix_alpha=1.0, label_smoothing=0.0, num_classes=4)
    draws = iter(place)
    monkeypatch.setattr(np.random, "beta", lambda *_: share)
    monkeypatch.setattr(np.random, "randint", lambda *_, size: np.int64(next(draws)))
    expected, expected_targets = peer(images.clone(), labels)
    rng = scripted(place, share)
    mixed, targets = augment.cutmix(images, labels, classes=4, alpha=1.0, rng=rng)
    assert torch.equal(mixed, expected)
    torch.testing.assert_close(targets, expected_targets)
