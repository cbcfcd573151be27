"""Imbalanced classes: detected, stated, and adjusted for."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail
from tiny_models import awake
from tiny_runs import Recorder, tiny_run
from vitrail.models.config import VitConfig
from vitrail.training.config import LossSettings, ModelSettings, OptimSettings
from vitrail.training.model_init import fit_probe_head
from vitrail.training.objectives import Classification, log_prior

pytestmark = pytest.mark.slow

COUNTS = np.array([100, 10, 5])


def write_long_tail(path, counts, noise=90):
    """Overlapping colors: without adjustment, rare classes are predicted as frequent ones."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, each in (("train", counts), ("test", [40] * len(counts))):
        labels = np.repeat(np.arange(len(counts)), each)
        pixels = rng.integers(0, 256 - noise, (len(labels), 8, 8, 3))
        strength = rng.integers(-30, noise, len(labels))[:, None, None]
        pixels[np.arange(len(labels)), :, :, labels] += strength
        arrays |= {f"x_{split}": pixels.clip(0, 255).astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **arrays)
    return path


def test_loss_adds_the_log_frequencies():
    sizes = {"image_size": 8, "patch_size": 4, "width": 16, "mlp_width": 16, "heads": 2}
    model, images = awake(VitConfig(depth=1, num_classes=3, **sizes)), torch.randn(4, 3, 8, 8)
    labels = torch.tensor([0, 1, 2, 1])
    loss = LossSettings(kind="softmax", logit_adjustment=0.5)
    objective = Classification(model, loss, log_prior(COUNTS, loss))
    expected = F.cross_entropy(model(images) + 0.5 * torch.tensor(COUNTS / 115).log(), labels)
    torch.testing.assert_close(objective(images, labels), expected.float())
    assert torch.equal(objective.logits(images), model(images))
    assert "prior" not in objective.state_dict()
    assert log_prior(COUNTS, replace(loss, logit_adjustment=0.0)) is None
    tiny = log_prior(np.array([100, 10, 0]), loss)  # as if it had five images
    torch.testing.assert_close(tiny, log_prior(COUNTS, loss))


def test_adjustment_raises_balanced_accuracy(tmp_path):
    data = write_long_tail(tmp_path / "tail.npz", [200, 20, 10])
    optim = OptimSettings(kind="adamw", learning_rate=3e-3)
    options = {"steps": 80, "batch_size": 32, "optim": optim}
    balanced = {}
    for adjustment in (None, 0.0):
        recorder, out = Recorder(), tmp_path / f"{adjustment}"
        loss = LossSettings(logit_adjustment=adjustment)
        result = tiny_run(data, out, loss=loss, callback=recorder, **options)
        balanced[adjustment] = result.outcomes["test"].balanced_accuracy
        stated = "logit adjustment for balanced accuracy: classes have 10 to 200 images"
        assert any(stated in line for line in recorder.lines) == (adjustment is None)
        reported = any(line.startswith("balanced accuracy: test") for line in recorder.lines)
        assert reported == (adjustment is None)
    assert balanced[None] > balanced[0.0] + 0.05


@pytest.mark.parametrize(
    ("counts", "balance"), [([30, 20, 10], None), ([100, 10, 5], 1.0)], ids=["even", "sampled"]
)
def test_balanced_classes_or_sampling_exclude_the_adjustment(tmp_path, counts, balance):
    data, recorder = write_long_tail(tmp_path / "data.npz", counts), Recorder()
    tiny_run(data, tmp_path / "run", balance=balance, callback=recorder)
    assert not any("logit adjustment" in line for line in recorder.lines)
    reported = any(line.startswith("balanced accuracy: test") for line in recorder.lines)
    assert reported == (balance is not None)


def test_probe_of_imbalanced_classes_is_adjusted(tmp_path):
    """The initial head subtracts the log frequencies that the loss adds."""
    data = write_long_tail(tmp_path / "tail.npz", [100, 20, 10])
    tiny_run(data, tmp_path / "start", steps=4)
    vitrail.save(vitrail.load(tmp_path / "start", num_classes=0), tmp_path / "backbone")
    options = {"start": str(tmp_path / "backbone"), "callback": (recorder := Recorder())}
    tiny_run(data, tmp_path / "tuned", optim=OptimSettings(), model=ModelSettings(), **options)
    probe = [line for line in recorder.lines if line.startswith("linear probe of the frozen")]
    assert len(probe) == 1
    assert "balanced accuracy" in probe[0]
    assert any("balanced accuracy (n=" in line and "keeping" in line for line in recorder.lines)


def test_class_of_one_image_neither_adjusts_the_loss_nor_takes_images(tmp_path):
    data, recorder = write_long_tail(tmp_path / "stray.npz", [40, 40, 1]), Recorder()
    tiny_run(data, tmp_path / "run", callback=recorder)
    assert not any("logit adjustment" in line for line in recorder.lines)
    model = vitrail.load(tmp_path / "run", num_classes=0)
    train, dev = (vitrail.open_dataset(str(data), split) for split in ("train", "test"))
    options = {"dev_from_train": False, "preprocessing": model.metadata.preprocessing}
    prior = log_prior(train.class_counts(), LossSettings(kind="softmax", logit_adjustment=1.0))
    stray = train.subset(np.asarray(train.labels()) < 2)  # the probe has no image of the class
    probe = fit_probe_head(model, stray, dev.subset(range(80)), "dev", prior=10 * prior, **options)
    plain = fit_probe_head(model, stray, dev.subset(range(80)), "dev", **options)
    assert probe.accuracy >= plain.accuracy > 0.5
