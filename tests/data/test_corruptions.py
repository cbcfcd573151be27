import json

import numpy as np
import pytest

import vitrail
from processes import in_two_processes
from tiny_models import awake
from tiny_runs import CLASSES, write_colors
from vitrail.cli import main
from vitrail.data import corruptions
from vitrail.data.corruptions import CORRUPTIONS, corrupt
from vitrail.errors import ConfigError, DataError
from vitrail.evaluation import robustness


@pytest.fixture(scope="module")
def image():
    """Smooth colors with an edge."""
    rows, columns = np.mgrid[:48, :64] / 64
    pixels = np.dstack([rows, columns, (rows + columns) / 2])
    pixels[12:30, 20:40] = [0.9, 0.6, 0.1]
    return (255 * pixels).astype(np.uint8)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_are_deterministic_and_grow_with_severity(name, image):
    changed = [corrupt(image, name, severity) for severity in (1, 3, 5)]
    assert all(x.shape == image.shape and x.dtype == np.uint8 for x in changed)
    np.testing.assert_array_equal(changed[1], corrupt(image, name, 3))
    distance = [np.abs(x.astype(float) - image).mean() for x in changed]
    assert distance[0] > 0
    if name != "elastic_transform":  # its published parameters change kind at severity 3
        assert distance[0] < distance[2]


def test_deterministic_corruptions_follow_the_published_definitions(image):
    x = image / 255.0
    means = x.mean(axis=(0, 1))
    expected = ((x - means) * 0.2 + means).clip(0, 1) * 255
    np.testing.assert_array_equal(corrupt(image, "contrast", 3), expected.astype(np.uint8))
    bright = corrupt(image, "brightness", 2).astype(float)
    value = np.minimum(image.max(axis=2) / 255 + 0.2, 1) * 255
    np.testing.assert_allclose(bright.max(axis=2), value, atol=1)
    # disk of radius 3 around a single white pixel: 29 pixels, hardly smoothed
    point = np.zeros((25, 25, 3), np.uint8)
    point[12, 12] = 255
    spot = corrupt(point, "defocus_blur", 1)[:, :, 0]
    assert (spot > 0).sum() == 29
    assert spot.max() == 255 // 29
    # half a Gaussian along the rows
    line = corruptions.blur_along(point / 255.0, 10, 3, 0.0)[12, :, 0]
    weights = np.exp(-0.5 * (np.arange(21) / 3) ** 2)
    np.testing.assert_allclose(line[12 - np.arange(13)], weights[:13] / weights.sum(), rtol=1e-6)


def test_noise_has_the_published_strength(image):
    gray = np.full((64, 64, 3), 128, np.uint8)
    for severity, scale in ((1, 0.08), (3, 0.18)):
        noisy = corrupt(gray, "gaussian_noise", severity) / 255
        assert noisy.std() == pytest.approx(scale, rel=0.05)
    shot = corrupt(gray, "shot_noise", 2) / 255
    assert shot.std() == pytest.approx((0.502 / 25) ** 0.5, rel=0.05)
    impulse = corrupt(gray, "impulse_noise", 4)
    assert np.isin(impulse, (0, 255)).mean() == pytest.approx(0.17, abs=0.01)
    with pytest.raises(ConfigError, match="fog"):
        corrupt(image, "fogg", 1)
    with pytest.raises(ConfigError, match="1 to 5"):
        corrupt(image, "fog", 6)


@pytest.mark.parametrize(
    "option", ["--flip", "--crops 5", "--restrict", "--by-order", "--real labels.json"]
)
def test_options_that_corruptions_ignore_are_an_error(option, capsys):
    assert main(["evaluate", "no-model", "no-data", "--corruptions", *option.split()]) == 2
    assert "--corruptions cannot be combined with" in capsys.readouterr().err


def test_corruptions_are_evaluated_with_the_loading_options(tiny, tmp_path, monkeypatch):
    data = write_colors(tmp_path / "colors.npz", test=6)
    vitrail.save(awake(tiny), tmp_path / "model", class_names=CLASSES)
    calls = []

    def collect(*args, **options):
        calls.append(options)
        raise DataError("stop")

    monkeypatch.setattr(robustness, "collect_outputs", collect)
    loading = {"batch_size": 3, "workers": 0, "backend": "pillow", "strict": True}
    words = ["--batch-size", "3", "--workers", "0", "--backend", "pillow", "--strict"]
    command = ["evaluate", str(tmp_path / "model"), str(data), "--corruptions"]
    assert main([*command, *words]) == 2
    assert calls[0].items() >= loading.items()


@pytest.mark.slow
def test_evaluate_reports_every_corruption(tiny, tmp_path, capsys):
    data = write_colors(tmp_path / "colors.npz", test=30)
    config = tiny.change(depth=1, patch_size=8, image_size=32)
    vitrail.save(awake(config), tmp_path / "model", class_names=CLASSES)
    model, _, _ = vitrail.calibrate(tmp_path / "model", data, error_rate=0.3)
    vitrail.save(model, tmp_path / "calibrated")
    command = ["evaluate", str(tmp_path / "calibrated"), str(data), "--corruptions", "--json"]
    options = ["--corruption-images", "4", "--out", str(tmp_path / "out")]
    assert main([*command, *options]) == 0
    values = json.loads(capsys.readouterr().out)
    rows = values["corruptions"]
    assert len(rows) == 76
    assert {row["corruption"] for row in rows} == {"clean", *CORRUPTIONS}
    assert all(0 <= row["coverage"] <= 1 and row["set_size"] >= 1 for row in rows)
    page = (tmp_path / "out" / "corruptions.html").read_text(encoding="utf-8")
    assert "jpeg compression 5: accuracy" in page


@pytest.mark.slow
def test_corruptions_of_two_processes_and_sigmoid_losses_are_those_of_evaluate(
    tiny, tmp_path, capsys
):
    data = write_colors(tmp_path / "colors.npz", test=6)
    config = tiny.change(depth=1, patch_size=8, image_size=32)
    vitrail.save(awake(config), tmp_path / "model", class_names=CLASSES)
    words = ["evaluate", str(tmp_path / "model"), str(data), "--corruptions", "--json"]
    words += ["--loss", "sigmoid", "--batch-size", "2"]
    first, _ = in_two_processes(tmp_path, main, words)
    assert main(words) == 0
    values = json.loads(capsys.readouterr().out)
    assert json.loads(first) == values
    assert values["corruptions"][0]["ece"] == pytest.approx(values["calibration"]["ece"])


def test_number_of_corrupted_images_is_checked(capsys):
    words = ["evaluate", "no-model", "no-data", "--corruptions", "--corruption-images", "-1"]
    assert main(words) == 2
    assert "--corruption-images -1: must be 1 or more" in capsys.readouterr().err
