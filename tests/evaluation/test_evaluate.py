import copy
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import vitrail
from processes import in_two_processes
from tiny_runs import CLASSES, equal, tiny_run, write_colors, write_folder
from vitrail import ConfigError, DataError
from vitrail.checkpoints.load import with_head, with_temperature
from vitrail.checkpoints.metadata import Metadata
from vitrail.cli import main
from vitrail.data.datasets import Sample
from vitrail.data.preprocessing import preset
from vitrail.evaluation.evaluate import Runner, average_views, enlarge_for_crops, quick_evaluate
from vitrail.evaluation.robustness import evaluate_corruptions, mean_over_corruptions

pytestmark = pytest.mark.slow

PREPROCESSING = preset("google", (4, 4))
IMAGES = torch.arange(2 * 1 * 6 * 6, dtype=torch.float32).reshape(2, 1, 6, 6)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A dataset of colors, and a model trained on it."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_colors(folder / "colors.npz", test=41)
    tiny_run(data, folder / "run", steps=30)
    return folder / "run", data


def test_result_is_independent_of_the_batch_size(trained):
    model, data = trained
    whole = vitrail.evaluate(model, data, batch_size=64)
    assert whole.samples == 41
    in_training = vitrail.load(model).metadata.provenance["test accuracy"]
    assert whole.accuracy == in_training
    for batch_size in (1, 40):
        other = vitrail.evaluate(model, data, batch_size=batch_size)
        assert other.accuracy == whole.accuracy
        for name, estimate in whole.estimates.items():
            assert other.estimates[name] == pytest.approx(estimate, abs=1e-6), name


def test_two_processes_return_exactly_the_result_of_one(trained, tmp_path, capsys):
    words = ["evaluate", *map(str, trained), "--json", "--batch-size", "4"]
    first, second = in_two_processes(tmp_path, main, words)
    assert main(words) == 0
    assert json.loads(first) == json.loads(capsys.readouterr().out)
    assert second == ""


def test_split_and_views(trained):
    model, data = trained
    plain, train = vitrail.evaluate(model, data), vitrail.evaluate(model, data, "train")
    assert plain.notes == ("split: test",)
    assert train.samples == 30
    assert "trained on exactly these images" in train.notes[-1]
    for views in ({"flip": True}, {"crops": 5}):
        averaged = vitrail.evaluate(model, data, **views)
        assert averaged.samples == 41
        assert averaged.loss != plain.loss


def test_restrict_limits_the_classes(trained, tmp_path):
    data = write_colors(tmp_path / "two.npz", classes=2, test=40)
    all_compete, two = (vitrail.evaluate(trained[0], data, restrict=r) for r in (False, True))
    assert all_compete.predictions.logits.shape == (40, 3)
    assert two.predictions.logits.shape == (40, 2)
    assert two.accuracy >= all_compete.accuracy


def test_multi_label_data_has_average_precision(tmp_path):
    folder = write_folder(tmp_path / "pictures", 4)
    lines = ["path,labels"]
    lines += [f"{n}/{k}.png,{n}" for n in ("red", "green") for k in range(4)]
    lines += [f"blue/{k}.png,blue|green" for k in range(4)]
    (folder / "labels.csv").write_text("\n".join(lines))
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    result = vitrail.evaluate(model, folder, "all")
    assert {"mean_average_precision", "f1_micro", "f1_macro"} <= result.estimates.keys()
    assert result.calibration is None


def test_temperature_is_not_saved_for_a_perfect_model_or_over_another(trained, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["evaluate", *map(str, trained), "--save-temperature", str(out)]
    assert main(words) == 2
    output = capsys.readouterr()
    assert "all 41 images are classified correctly" in output.err
    assert "top-1 accuracy" in output.out  # the metrics are printed first
    assert not out.exists()
    vitrail.save(vitrail.load(trained[0]), out)
    assert main(words) == 2
    assert "already contains a model" in capsys.readouterr().err


def test_saved_temperature_calibrates_and_keeps_predictions(tmp_path, capsys):
    data = write_colors(tmp_path / "colors.npz", test=60)
    arrays = dict(np.load(data))
    arrays["y_test"][:9] = (arrays["y_test"][:9] + 1) % 3  # wrong labels
    np.savez(data, **arrays)
    model = tiny_run(data, tmp_path / "run", steps=30).folder
    words = [str(model), str(data), "--save-temperature", str(tmp_path / "calibrated")]
    report = tmp_path / "report"
    assert main(["evaluate", *words, "--json", "--out", str(report)]) == 0
    before = json.loads(capsys.readouterr().out)
    assert json.loads((report / "evaluation.json").read_text())["accuracy"] == before["accuracy"]
    after = vitrail.evaluate(tmp_path / "calibrated", data)
    assert after.accuracy == before["accuracy"]
    assert after.calibration.temperature == pytest.approx(1, abs=1e-3)
    assert after.loss <= before["loss"]
    scaled = vitrail.load(tmp_path / "calibrated")
    stated = scaled.metadata.provenance["temperature"]
    assert stated == pytest.approx(before["calibration"]["temperature"], abs=1e-5)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(scaled.eval()(images) * stated, vitrail.load(model).eval()(images))
    twice = with_temperature(scaled, 3.0)
    assert twice.metadata.provenance["temperature"] == pytest.approx(3 * stated)
    torch.testing.assert_close(twice.head.weight * 3, scaled.head.weight)


@pytest.mark.parametrize("changes", [{}, {"distillation": True}, {"representation": 5}])
def test_new_head_leaves_the_model_unchanged(changes):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, **changes).eval()
    before = copy.deepcopy(model.state_dict())
    weight, bias = torch.randn(4, model.config.num_features), torch.randn(4)
    headed, images = with_head(model, weight, bias, "abcd"), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(headed(images), model.features(images) @ weight.T + bias)
    assert headed.metadata.class_names == ("a", "b", "c", "d")
    assert equal(model.state_dict(), before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch-size", "0"], "batch_size=0 must be at least 1"),
        (["--workers", "-1"], "workers=-1 at least 0"),
        (["--flip", "--save-temperature", "x"], "cannot be combined with"),
        (["--split", "dev"], "has no split 'val'; available: train, test"),
        (["--real", "nothing.json"], "nothing.json cannot be read"),
    ],
)
def test_invalid_arguments_are_one_line(trained, capsys, options, message):
    assert main(["evaluate", *map(str, trained), *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_unreadable_images_are_skipped_or_strict(trained, tmp_path):
    folder = write_folder(tmp_path / "folder", 4)
    (folder / "red" / "0.png").write_bytes(b"no picture")
    result = vitrail.evaluate(trained[0], folder)
    assert result.samples == 11
    assert list(result.skipped) == ["red/0.png"]
    with pytest.raises(DataError, match=r"red/0\.png"):
        vitrail.evaluate(trained[0], folder, strict=True)
    (folder / "red").rename(folder / "purple")
    with pytest.raises(ConfigError, match="classes unknown to the model: 'purple'"):
        vitrail.evaluate(trained[0], folder)


class Grays:
    """Uniform images whose gray level is the class: 0, 1, 2, 0, …; some are unreadable."""

    in_memory = True
    multi_label = False
    classes = ("dark", "middle", "light")

    def __init__(self, length, broken=()):
        self.length, self.broken = length, broken

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.broken:
            raise DataError("it is broken")
        pixels = np.full((6, 5, 3), 100 * (index % 3), np.uint8)
        return Sample(pixels, index % 3, self.name(index))

    def name(self, index):
        return f"image {index}"

    def labels(self):
        return np.arange(self.length) % 3


def evaluate_grays(source, predict, batch_size=4, **more):
    options = {"channels": 3, "batch_size": batch_size} | more
    return quick_evaluate(predict, source, PREPROCESSING, **options)


def test_outputs_that_do_not_fit_the_classes_are_an_error():
    with pytest.raises(ConfigError, match=r"shape \(7,\) per image .* has 3 classes"):
        evaluate_grays(Grays(3), lambda images: torch.zeros(len(images), 7))


def test_inference_reports_progress_and_has_no_gradients():
    weight, outputs, calls = torch.ones(3, requires_grad=True), [], []

    def predict(images):
        outputs.append(weight.expand(len(images), 3) * 2)
        return outputs[-1]

    evaluate_grays(Grays(11, (2,)), predict, progress=lambda *numbers: calls.append(numbers))
    assert calls == [(4, 11), (8, 11), (11, 11)]
    assert not outputs[0].requires_grad


def evaluate_sharded():
    """What one of two processes that share a model prints."""
    dist.init_process_group("gloo")
    dist.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    fully_shard(model[1])
    fully_shard(model)
    got = evaluate_grays(Grays(9, (1, 3)), model, 2)  # the second skips its whole first pair
    model(torch.ones(2, 3, 4, 4)).sum().backward()  # gathered parameters can be trained
    with pytest.raises(DataError) as stopped:
        evaluate_grays(Grays(9, (4,)), model, 2, strict=True)
    values = (got.samples, got.accuracy, got.confusion.tolist())
    mistakes = [m.index for m in got.mistakes]
    print(values, mistakes, sorted(got.skipped), stopped.value, got.loss, flush=True)
    dist.destroy_process_group()


def test_two_fsdp_processes_return_the_result_of_one(tmp_path):
    outputs = in_two_processes(tmp_path, evaluate_sharded)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 3))
    alone = evaluate_grays(Grays(9, (1, 3)), model, 9)
    values = (alone.samples, alone.accuracy, alone.confusion.tolist())
    mistakes = [m.index for m in alone.mistakes]
    line = f"{values} {mistakes} {sorted(alone.skipped)} image 4: it is broken"
    for output in outputs:
        values, _, loss = output.rpartition(" ")
        assert values == line
        assert float(loss) == pytest.approx(alone.loss, abs=1e-6)


def test_broken_logits_of_corrupted_images_are_wrong(tmp_path):
    data = write_colors(tmp_path / "colors.npz", test=4)
    runner = Runner(
        run=lambda images: torch.full((len(images), 3), math.nan),
        metadata=Metadata(preprocessing=preset("google", (32, 32)), class_names=CLASSES),
        num_classes=3,
        channels=3,
        device=torch.device("cpu"),
    )
    rows = evaluate_corruptions(runner, data)
    assert {(row["accuracy"], row["ece"]) for row in rows} == {(0.0, None)}
    assert math.isnan(mean_over_corruptions(rows, "ece")[0])


def test_views_are_corners_center_and_their_flips():
    views = []

    def predict(images):
        views.append(images)
        return images[:, 0, 0]

    assert average_views(predict, (6, 6), "softmax") is predict
    with pytest.raises(ConfigError, match="crops=3 is not supported; use 1 or 5"):
        average_views(predict, (6, 6), "softmax", crops=3)
    average_views(predict, (4, 4), "softmax", flip=True, crops=5)(IMAGES)
    starts = [(0, 0), (0, 2), (2, 0), (2, 2), (1, 1)]
    for view, flipped, (top, left) in zip(views[::2], views[1::2], starts, strict=True):
        assert torch.equal(view, IMAGES[..., top : top + 4, left : left + 4])
        assert torch.equal(flipped, view.flip(-1))


class WithoutFloat64(torch.Tensor):
    """As on Apple's GPUs: no float64 before the tensor is on the CPU."""

    def double(self):
        raise TypeError("no float64 here")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_probabilities_are_averaged(loss):
    def predict(images):
        return torch.stack([images[:, 0, 0, 0], -images[:, 0, 0, 0]], 1) / 10

    def on_device(images):
        return predict(images).as_subclass(WithoutFloat64)

    got = average_views(on_device, (6, 6), loss, flip=True)(IMAGES)
    assert type(got) is torch.Tensor
    probabilities = torch.softmax if loss == "softmax" else lambda x, dim: x.sigmoid()
    mean = (probabilities(predict(IMAGES), 1) + probabilities(predict(IMAGES.flip(-1)), 1)) / 2
    assert torch.allclose(probabilities(got, 1), mean, atol=1e-6)


def test_crops_are_taken_from_a_larger_image():
    timm, google = preset("timm", (224, 224)), preset("google", (224, 112))
    assert enlarge_for_crops(timm) == replace(timm, size=(248, 248), resize_to=(248, 248))
    for resize in ("direct", "short-side"):  # no margin to crop from
        exact = replace(google, resize=resize, resize_to=(224, 112))
        larger = replace(exact, size=(256, 128), resize_to=(256, 128))
        assert enlarge_for_crops(exact) == larger
    assert enlarge_for_crops(google).size == (256, 128)
