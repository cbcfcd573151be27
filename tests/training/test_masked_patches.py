"""Masked patch prediction: corruption, targets, and learning."""

import pytest
import torch

from vitrail import ConfigError, Metadata, Preprocessing, VisionTransformer, create
from vitrail.data.transforms import normalize
from vitrail.training import objectives
from vitrail.training.config import MaskedSettings
from vitrail.training.objectives import MaskedPatches, cell_means, gather, random_patches

pytestmark = pytest.mark.slow

KINDS = ("mean-color", "colors-4x4", "pixels")


@pytest.fixture
def headless(tiny):
    """A model with sixteen patches and no head."""
    return tiny.change(image_size=16, num_classes=0)


def objective(config, predict="mean-color", share=0.5, seed=0):
    torch.manual_seed(seed)
    return MaskedPatches(VisionTransformer(config), MaskedSettings(share=share, predict=predict))


def awake(config, predict="mean-color", share=0.5):
    made = objective(config, predict, share)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize(
    ("share", "count", "expected"), [(0.5, 16, 8), (0.15, 16, 2), (0.01, 16, 1), (1.0, 9, 9)]
)
def test_each_image_has_the_configured_fraction_corrupted(share, count, expected):
    torch.manual_seed(0)
    indices = random_patches(torch.zeros(5_000, count, 3), share)
    assert indices.shape == (5_000, expected)
    assert all(len(row.unique()) == expected for row in indices[:50])
    counts = indices.flatten().bincount(minlength=count) / 5_000  # uniformly
    torch.testing.assert_close(counts, torch.full((count,), expected / count), atol=0.03, rtol=0)


def test_fractions_of_masked_swapped_and_kept_patches(monkeypatch):
    torch.manual_seed(0)
    patches = torch.arange(400 * 100.0).reshape(400, 100, 1)  # each is one of a kind
    indices = random_patches(patches, 0.5)
    corrupted = objectives.corrupt(patches, indices, -torch.ones(1))
    before, after = gather(patches, indices), gather(corrupted, indices)
    masked, same = after == -1, after == before
    swapped = ~masked & ~same
    for found, expected in ((masked, 0.8), (same, 0.1), (swapped, 0.1)):
        assert found.float().mean().item() == pytest.approx(expected, abs=0.01)
    from_elsewhere = (after // 100 != before // 100)[swapped]  # any image of the batch
    assert from_elsewhere.float().mean().item() == pytest.approx(399 / 400, abs=0.01)
    untouched = torch.ones(400, 100, dtype=torch.bool).scatter(1, indices, False)
    assert torch.equal(corrupted[untouched], patches[untouched])
    monkeypatch.setattr(objectives, "MASKED", 0.0)
    monkeypatch.setattr(objectives, "SWAPPED", 1.0)
    few, every = patches[:2, :3], torch.arange(3).expand(2, 3)
    draws = torch.stack([objectives.corrupt(few, every, -torch.ones(1)) for _ in range(100)])
    assert (draws != few).all()  # never with itself, and with all others:
    assert draws[:, 0, 0].unique().tolist() == [1, 2, 100, 101, 102]
    one = objectives.corrupt(few[:1, :1], every[:1, :1], -torch.ones(1))
    assert torch.equal(one, few[:1, :1])  # there is no other


def test_corrupted_patches_are_hidden_from_the_encoder_and_have_the_loss(headless):
    made, images = awake(headless), torch.rand(32, 3, 16, 16)
    inputs, outputs = [], []
    made.model.encoder.register_forward_pre_hook(lambda *args: inputs.append(args[1][0]))
    made.model.encoder.register_forward_hook(lambda *args: outputs.append(args[2]))
    torch.manual_seed(5)
    loss = made(images)
    torch.manual_seed(5)
    indices = random_patches(torch.zeros(32, 16, 1), 0.5)
    chosen = torch.zeros(32, 16, dtype=torch.bool).scatter(1, indices, True)
    hidden = (inputs[0] != made.model.tokens(images)).any(dim=-1)
    (gradient,) = torch.autograd.grad(loss, outputs[0])
    scored = gradient.abs().sum(dim=-1) > 0
    assert not (hidden | scored)[:, 0].any()  # the class token
    assert torch.equal(scored[:, 1:], chosen)
    assert not hidden[:, 1:][~chosen].any()
    assert hidden[:, 1:][chosen].float().mean().item() == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("predict", KINDS)
def test_predictions_are_matched_to_their_patches(headless, predict):
    made, images = awake(headless, predict), torch.randn(3, 3, 16, 16)
    predictions = []
    made.head.register_forward_hook(lambda *args: predictions.append(args[2]))
    torch.manual_seed(5)
    loss = made(images)
    torch.manual_seed(5)
    indices = random_patches(torch.zeros(3, 16, 1), 0.5)
    targets = made.targets(images)
    losses = [
        made.loss(predictions[0][b, m][None, None], targets[b, indices[b, m]][None, None])
        for b in range(3)
        for m in range(8)
    ]
    torch.testing.assert_close(loss, torch.stack(losses).mean())


@pytest.mark.parametrize("mean_std", [((0.5,) * 3, (0.5,) * 3), ((0.1, 0.5, 0.9), (0.2, 0.3, 1.0))])
def test_colors_are_recovered_from_normalized_images(headless, mean_std):
    preprocessing = Preprocessing(size=(16, 16), mean=mean_std[0], std=mean_std[1])
    pixels = torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    pixels[0, :, :4, 4:8] = torch.tensor([255, 128, 31])[:, None, None]  # the second patch
    pixels[0, :, 12:, 12:] = torch.tensor([32, 0, 254])[:, None, None]  # the last one
    model = VisionTransformer(headless)
    model.metadata = Metadata(preprocessing=preprocessing)
    made = MaskedPatches(model, MaskedSettings())
    images = normalize(pixels, preprocessing)
    numbers = made.targets(images)
    expected = torch.zeros(1, 16, 1, dtype=torch.long)
    expected[0, 1, 0] = 7 * 64 + 4 * 8 + 0
    expected[0, 15, 0] = 1 * 64 + 0 * 8 + 7
    assert torch.equal(numbers, expected)


@pytest.mark.parametrize("stride", [(8, 8), (4, 8), (14, 14), (2, 2), (6, 1)])
def test_4x4_cells_do_not_cross_patches(stride):
    images = torch.rand(1, 3, 2 * stride[0], 3 * stride[1])
    cells = cell_means(images, stride, 4)
    assert cells.shape == (1, 6, 16, 3)
    fifth = images[:, :, stride[0] :, stride[1] : 2 * stride[1]]
    expected = torch.nn.functional.adaptive_avg_pool2d(fifth, 4)
    torch.testing.assert_close(cells[0, 4], expected[0].flatten(1).mT)
    means = cell_means(images, stride, 1)
    torch.testing.assert_close(means[0, 4, 0], fifth[0].mean(dim=(1, 2)))


def test_pixel_targets(headless):
    images = torch.randn(2, 3, 16, 16)
    targets = objective(headless, "pixels").targets(images)
    assert torch.equal(targets[1, 5], images[1, :, 4:8, 4:8].flatten())


@pytest.mark.parametrize(
    ("predict", "start"), [("mean-color", 6.238), ("colors-4x4", 6.238), ("pixels", None)]
)
def test_initial_predictions_are_uniform(headless, predict, start):
    images = torch.randn(2, 3, 16, 16)
    loss = objective(headless, predict, share=1.0)(images)
    assert loss.item() == pytest.approx(start or images.square().mean().item(), abs=1e-3)


@pytest.mark.parametrize(
    ("predict", "stem", "pool"),
    [("mean-color", "conv", "mean"), ("colors-4x4", "patches", "cls"), ("pixels", "conv", "mean")],
)
def test_overfits_eight_images(headless, predict, stem, pool):
    made = objective(headless.change(width=32, mlp_width=64, stem=stem, pool=pool), predict)
    blocks = torch.rand(8, 3, 2, 2).repeat_interleave(8, 2).repeat_interleave(8, 3)
    images = 2 * blocks - 1
    optimizer = torch.optim.Adam(made.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        loss = made(images, torch.zeros(8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) / 5 < losses[0] / 2


VARIANTS = {
    "cls": {},
    "map": {"pool": "map"},
    "representation": {"representation": 6},
    "registers, distillation": {"registers": 2, "distillation": True},
    "with a head": {"num_classes": 3},
    "relative": {"position": "relative"},
    "every layer": {"position_place": "every-layer"},
    "hybrid": {"stem": "resnet", "patch_size": 1},
    "oblong": {"patch_size": (4, 8)},
    "gray": {"channels": 1},
}


@pytest.mark.parametrize("predict", KINDS)
@pytest.mark.parametrize("name", VARIANTS)
def test_trainable_weights_get_gradients(headless, name, predict):
    config = headless.change(**VARIANTS[name])
    made = awake(config, predict)
    made(torch.rand(4, config.channels, 16, 16)).backward()
    still = {n for n, p in made.named_parameters() if p.grad is None or not p.grad.any()}
    frozen = {n for n, p in made.named_parameters() if not p.requires_grad}
    assert still == frozen
    unread = ("model.pool.", "model.representation.", "model.head.", "model.distillation_head.")
    assert all(name.startswith(unread) for name in frozen)


def test_other_image_sizes_and_autocast(headless):
    assert awake(headless, "colors-4x4")(torch.rand(2, 3, 24, 8)).isfinite()
    for kind in KINDS:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = awake(headless, kind)(torch.rand(2, 3, 16, 16))
        assert loss.dtype == torch.float32
        loss.backward()


def test_number_of_colors_by_channels(headless):
    assert awake(headless.change(channels=1)).head.out_features == 8
    assert awake(headless.change(channels=2), "colors-4x4").head.out_features == 16 * 64
    config = headless.change(channels=4)
    for predict in ("mean-color", "colors-4x4"):
        with pytest.raises(ConfigError, match=r"4 channels have 8\^4 of them; use .*'pixels'"):
            objective(config, predict)
    assert awake(config, "pixels")(torch.rand(2, 4, 16, 16)).isfinite()


def test_unsupported_models_raise(headless):
    mixer = create("Mixer-S/16", depth=1, width=8, image_size=32, num_classes=0)
    with pytest.raises(ConfigError, match=r"needs a Vision Transformer, .* MlpMixer"):
        MaskedPatches(mixer, MaskedSettings())
    with pytest.raises(ConfigError, match=r"patch_dropout=0.5 drops patches"):
        objective(headless.change(patch_dropout=0.5))
