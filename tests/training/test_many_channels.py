"""Images of six channels, from training to serving."""

import io

import numpy as np
import pytest
from PIL import Image

import vitrail
from tiny_runs import Recorder, tiny_run
from vitrail import ConfigError, DataError
from vitrail.cli import main
from vitrail.data.check import check_dataset
from vitrail.data.tar_shards import pack
from vitrail.reports.pages import write_dataset_check
from vitrail.serving.server import load_model
from vitrail.training.config import ModelSettings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Noisy images in which one channel is strongest."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("six") / "bands.npz"
    parts = {}
    for split, count in (("train", 24), ("test", 12)):
        labels = np.arange(count) % 3
        pixels = rng.integers(0, 120, (count, 8, 8, 6))
        pixels[np.arange(count), :, :, 3 + labels] += 100
        parts |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **parts)
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    watch = Recorder()
    folder = tmp_path_factory.mktemp("runs") / "six"
    tiny_run(data, folder, steps=2, callback=watch)
    assert any("6 channels: as in the arrays" in line for line in watch.lines)
    return folder


def test_predictor_uses_all_six_channels(run, data):
    assert vitrail.load(run).config.channels == 6
    assert (run / "report.html").exists()
    pixels = np.load(data)["x_test"]
    predictor = vitrail.Predictor(run)
    assert predictor(pixels[0]).label in "012"
    assert vitrail.load(run).metadata.prepare(list(pixels)).shape == (12, 6, 8, 8)
    before = predictor.features(list(pixels))
    assert before.shape[0] == 12
    for channel in range(6):
        other = pixels[0].copy()
        other[:, :, channel] = 255 - other[:, :, channel]
        assert not np.allclose(predictor.features(other), before[0])


def test_wrong_channels_raise(run):
    predictor = vitrail.Predictor(run)
    with pytest.raises(DataError, match="have 3 channels; expected 1 or 6"):
        predictor(np.zeros((8, 8, 3), np.uint8))
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    with pytest.raises(ConfigError, match=r"image files are gray \(1\) or RGB \(3\)"):
        predictor(file.getvalue())


def test_evaluate_inspect_and_export(run, data, tmp_path):
    assert main(["evaluate", str(run), str(data), "--out", str(tmp_path / "measured")]) == 0
    inspect = ["inspect", str(run), "--data", str(data), "--out", str(tmp_path / "seen")]
    assert main([*inspect, "--images", "4"]) == 0
    assert vitrail.export_model(run, tmp_path / "six.onnx").difference < 1e-4


def test_finetuning_changes_the_channels(data, tmp_path):
    vitrail.save(vitrail.create("ViT-Mu/4", image_size=8, num_classes=3), tmp_path / "three")
    start = str(tmp_path / "three")
    options = {"steps": 2, "start": start}
    with pytest.raises(ConfigError, match=r"fine-tune it with --model.channels 6"):
        tiny_run(data, tmp_path / "message", model=ModelSettings(), **options)
    tiny_run(data, tmp_path / "run", model=ModelSettings(channels=6), **options)
    assert vitrail.load(tmp_path / "run").config.channels == 6


def test_data_check_reports_channels_and_packing_raises(data, tmp_path):
    health = check_dataset(data)
    assert health.kinds == {"array of 6 channels": 36}
    assert write_dataset_check(health, tmp_path / "report").exists()
    with pytest.raises(DataError, match="images of 6 channels cannot be packed"):
        list(pack(str(data), tmp_path / "shards"))


def test_serving_raises(run):
    class State:
        config = None

    with pytest.raises(ConfigError, match="takes images of 6 channels"):
        load_model(State(), "six", str(run), vitrail.Predictor, print, several=False)
