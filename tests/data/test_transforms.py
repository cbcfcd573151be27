import numpy as np
import pytest
import torch
from PIL import Image
from tiny_sets import jpeg, photograph

from vitrail import ConfigError, DataError
from vitrail.data.decode import decode
from vitrail.data.preprocessing import Augmentation, Preprocessing, preset
from vitrail.data.transforms import PILLOW_FILTERS, EvalTransform, TrainTransform, resize


@pytest.mark.parametrize(
    ("how", "levels", "backend"),
    [
        ("bicubic", 2, "torch"),
        ("bilinear", 1, "torch"),
        *((f, 0, "pillow") for f in PILLOW_FILTERS),
    ],
)
@pytest.mark.parametrize("size", [(64, 64), (224, 224), (300, 120)])
def test_resize_agrees_with_pillow(how, levels, backend, size):
    pixels = photograph(170, 230)
    ours = resize(pixels, size, how, backend=backend).permute(1, 2, 0).numpy().astype(int)
    theirs = np.asarray(Image.fromarray(pixels).resize(size[::-1], PILLOW_FILTERS[how])).astype(int)
    assert np.abs(ours - theirs).max() <= levels


def by_hand(pixels, size):
    """tf.image.resize of the authors: bilinear between pixel centers, nothing smoothed before."""

    def places(count, into):
        at = np.clip((np.arange(into) + 0.5) * count / into - 0.5, 0, count - 1)
        low = np.floor(at).astype(int)
        return low, np.minimum(low + 1, count - 1), at - low

    pixels = pixels.astype(float)
    low, high, share = places(pixels.shape[0], size[0])
    rows = pixels[low] * (1 - share)[:, None, None] + pixels[high] * share[:, None, None]
    low, high, share = places(pixels.shape[1], size[1])
    return rows[:, low] * (1 - share)[:, None] + rows[:, high] * share[:, None]


@pytest.mark.parametrize("backend", ["torch", "pillow"])
def test_google_preset_decodes_at_full_size_without_antialiasing(backend):
    pixels = np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)
    data = jpeg(pixels)
    exact = by_hand(decode(data, backend="pillow"), (48, 56))
    how = preset("google", (48, 56))
    whole = Augmentation(crop="whole", flip=False)
    train = TrainTransform(preprocessing=how, augmentation=whole, backend="pillow")
    for transform in (EvalTransform(preprocessing=how, backend=backend), train):
        ours = transform(data, np.random.default_rng(0)).permute(1, 2, 0).numpy()
        assert np.abs(ours - exact).max() <= 0.51  # rounded to whole levels
    smooth = EvalTransform(preprocessing=preset("transformers", (48, 56)), backend=backend)
    assert np.abs(smooth(data).permute(1, 2, 0).numpy() - exact).mean() > 20


@pytest.mark.parametrize("size", [(32, 64), (64, 32), (48, 48)])
@pytest.mark.parametrize("shape", [(60, 80), (80, 60), (300, 100)])
def test_center_crops_cover_models_of_any_aspect_ratio(size, shape):
    white = np.full((*shape, 3), 255, np.uint8)
    for name in ("timm", "clip"):  # with and without a margin
        assert (EvalTransform(preprocessing=preset(name, size))(white) == 255).all()


def test_covered_size_is_limited():
    config = Preprocessing(size=(1, 2**24), resize="short-side")
    with pytest.raises(DataError, match="aspect ratio of 50 x 50 pixels"):
        EvalTransform(preprocessing=config)(np.zeros((50, 50, 3), np.uint8))


def test_scaled_decoding_only_with_antialiasing(monkeypatch):
    pixels, transform = photograph(800, 1200), EvalTransform(preprocessing=preset("dino", (96, 96)))
    assert (transform(jpeg(pixels)).int() - transform(pixels).int()).abs().float().mean() < 2
    asked = []

    def pixels(self, *, channels, min_size, max_rows, backend):
        asked.append(min_size)
        return np.zeros((self.height, self.width, channels), np.uint8)

    monkeypatch.setattr("vitrail.data.decode.EncodedImage.pixels", pixels)
    for name in ("google", "transformers"):
        how = preset(name, (8, 8))
        whole = Augmentation(crop="whole")
        transform = TrainTransform(preprocessing=how, augmentation=whole)
        transform(jpeg(photograph(64, 64)), np.random.default_rng(0))
    assert asked == [None, (8, 8)]


AUGMENTATIONS = {
    "plain": Augmentation(),
    "padded": Augmentation(crop="padded", padding=40),
    "whole": Augmentation(crop="whole", flip=False),
    "randaugment": Augmentation(policy="randaugment"),
    "trivial": Augmentation(policy="trivial", color_jitter=0.3),
    "augmix": Augmentation(policy="augmix", erasing=1.0),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_train_transform_depends_only_on_the_generator(name, channels):
    how = preset("google", (32, 24), channels)
    options = {"augmentation": AUGMENTATIONS[name], "channels": channels}
    transform = TrainTransform(preprocessing=how, **options)
    data = jpeg(photograph(90, 120))
    outs = [transform(data, np.random.default_rng(seed)) for seed in (1, 1, 2, 3, 4)]
    assert all(out.shape == (channels, 32, 24) and out.dtype == torch.uint8 for out in outs)
    assert torch.equal(outs[0], outs[1])
    assert name == "whole" or any(not torch.equal(outs[0], out) for out in outs[2:])


@pytest.mark.parametrize("backend", ["torch", "pillow"])
@pytest.mark.parametrize("how", ["nearest", "bilinear", "bicubic", "area"])
def test_six_channels_are_resized_like_gray_images(how, backend):
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 6), np.uint8)
    found = resize(pixels, (16, 16), how, backend=backend)
    layers = np.dsplit(pixels, 6)
    alone = torch.cat([resize(layer, (16, 16), how, backend=backend) for layer in layers])
    assert (found.int() - alone.int()).abs().max() <= 1  # torch has another kernel for many


def test_train_transform_preserves_six_channels():
    pixels = np.random.default_rng(0).integers(0, 256, (30, 40, 6), np.uint8)
    how = {"preprocessing": preset("google", (16, 16), 6), "channels": 6}
    for crop in ("inception", "padded", "whole"):
        transform = TrainTransform(augmentation=Augmentation(crop=crop, erasing=1.0), **how)
        assert transform(pixels, np.random.default_rng(1)).shape == (6, 16, 16)
    for color in ({"policy": "randaugment"}, {"color_jitter": 0.4}):
        with pytest.raises(ConfigError, match="not 6 channels; leave them out"):
            TrainTransform(augmentation=Augmentation(**color), **how)


def test_padding_and_errors():
    with pytest.raises(ConfigError, match="crop_area"):
        Augmentation(crop_area=(0.0, 1.0))
    with pytest.raises(ConfigError, match="images of 2 channels do not fit a model of 3"):
        EvalTransform(preprocessing=preset("google", (8, 8)))(np.zeros((9, 9, 2), np.uint8))
    pixels = np.arange(36, dtype=np.uint8).reshape(6, 6)
    whole = np.pad(pixels, 4, mode="reflect")
    padded = Augmentation(crop="padded", padding=4, flip=False)
    transform = TrainTransform(
        preprocessing=preset("google", (6, 6), 1), augmentation=padded, channels=1
    )
    for seed in range(20):
        rng = np.random.default_rng(seed)
        top, left = int(rng.integers(9)), int(rng.integers(9))
        crop = transform(pixels, np.random.default_rng(seed))[0]
        assert crop.tolist() == whole[top : top + 6, left : left + 6].tolist()
