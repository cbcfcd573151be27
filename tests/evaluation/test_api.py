"""`vitrail.evaluate`: whole evaluations of a small model that was really trained."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import tiny_run, write_colors, write_folder
from vitrail import ConfigError, DataError
from vitrail.checkpoints.adapt import with_head, with_temperature
from vitrail.cli import main


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data set of colors, and a model that has learned a little of it."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_colors(folder / "colors.npz", test=41)
    tiny_run(data, folder / "run", steps=30)
    return folder / "run", data


def test_all_pictures_count_whatever_the_batch_size(trained):
    model, data = trained
    whole = vitrail.evaluate(model, data, batch_size=64)
    assert whole.samples == 41
    provenance = vitrail.load(model).metadata.provenance
    assert whole.accuracy == provenance["test accuracy"]  # as in training
    for batch_size in (1, 7, 40):
        other = vitrail.evaluate(model, data, batch_size=batch_size)
        assert other.accuracy == whole.accuracy
        for name, found in whole.estimates.items():
            assert other.estimates[name] == pytest.approx(found, abs=1e-6), name


def run(*words, processes=1):
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    launch = [*several, "-m", "vitrail"] if processes > 1 else ["-m", "vitrail"]
    done = subprocess.run(
        [sys.executable, *launch, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_processes_find_exactly_what_one_finds(trained):
    words = ("evaluate", *trained, "--json", "--batch-size", "4")
    assert run(*words, processes=2) == run(*words)


def test_the_test_split_is_judged_by_unless_another_is_asked_for(trained):
    model, data = trained
    assert vitrail.evaluate(model, data).notes == ("split test",)
    train = vitrail.evaluate(model, data, "train")
    assert train.samples == 30
    assert "the very pictures that the model has learned from" in train.notes[-1]


def test_flips_and_crops_look_more_often(trained):
    model, data = trained
    plain = vitrail.evaluate(model, data)
    looks = [vitrail.evaluate(model, data, flip=True), vitrail.evaluate(model, data, crops=5)]
    for look in looks:
        assert look.samples == 41
        assert look.outcome.loss != plain.outcome.loss


def test_restricting_the_choice_to_the_classes_of_the_data_helps(trained, tmp_path):
    model, _ = trained
    data = write_colors(tmp_path / "two.npz", classes=2, test=40)
    all_compete = vitrail.evaluate(model, data)
    assert all_compete.predictions is not None
    assert all_compete.predictions.logits.shape == (40, 3)
    two = vitrail.evaluate(model, data, restrict=True)
    assert two.predictions is not None
    assert two.predictions.logits.shape == (40, 2)
    assert two.accuracy >= all_compete.accuracy


def test_several_labels_give_average_precision(tmp_path):
    folder = write_folder(tmp_path / "pictures", 4)
    lines = ["path,labels"]
    lines += [f"{n}/{k}.png,{n}" for n in ("red", "green") for k in range(4)]
    lines += [f"blue/{k}.png,blue|green" for k in range(4)]
    (folder / "labels.csv").write_text("\n".join(lines))
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3)
    found = vitrail.evaluate(model, folder, "all")
    assert {"mean_average_precision", "f1_micro", "f1_macro"} <= found.estimates.keys()
    assert found.calibration is None


def test_a_model_that_is_always_right_has_no_temperature_to_save(trained, tmp_path, capsys):
    model, data = map(str, trained)
    assert main(["evaluate", model, data, "--save-temperature", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert "all 41 pictures are named rightly, which cannot tell" in told.err
    assert "accuracy" in told.out  # what was measured is not lost
    assert not (tmp_path / "out").exists()


def test_a_saved_temperature_calibrates_and_changes_no_answer(tmp_path, capsys):
    data = write_colors(tmp_path / "colors.npz", test=60)
    arrays = dict(np.load(data))
    arrays["y_test"][:9] = (arrays["y_test"][:9] + 1) % 3  # nobody could get these right
    np.savez(data, **arrays)
    model = tiny_run(data, tmp_path / "run", steps=30).folder
    words = [str(model), str(data), "--save-temperature", str(tmp_path / "calibrated")]
    assert main(["evaluate", *words, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    after = vitrail.evaluate(tmp_path / "calibrated", data)
    assert after.accuracy == before["accuracy"]
    assert after.calibration is not None
    assert after.calibration.temperature == pytest.approx(1, abs=1e-3)
    assert after.outcome.loss <= before["loss"]
    scaled = vitrail.load(tmp_path / "calibrated")
    stated = scaled.metadata.provenance["temperature"]
    assert stated == pytest.approx(before["calibration"]["temperature"], abs=1e-5)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(scaled.eval()(images) * stated, vitrail.load(model).eval()(images))


def test_a_calibrated_model_does_not_replace_another(trained, tmp_path, capsys):
    vitrail.save(vitrail.load(trained[0]), tmp_path / "other")
    words = [*map(str, trained), "--save-temperature", str(tmp_path / "other")]
    assert main(["evaluate", *words]) == 2
    assert "already contains a model" in capsys.readouterr().err


def test_temperatures_multiply(trained):
    model = vitrail.load(trained[0])
    twice = with_temperature(with_temperature(model, 2.0), 3.0)
    assert twice.metadata.provenance["temperature"] == 6.0
    torch.testing.assert_close(twice.head.weight * 6, model.head.weight)


@pytest.mark.parametrize("changes", [{}, {"distillation": True}, {"representation": 5}])
def test_a_new_head_gives_its_logits_and_leaves_the_model_alone(changes):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=3, **changes).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = torch.randn(4, model.config.num_features)
    bias = torch.randn(4)
    headed = with_head(model, weight, bias, ["a", "b", "c", "d"])
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(headed(images), model.features(images) @ weight.T + bias)
    assert headed.metadata.class_names == ("a", "b", "c", "d")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_the_command_writes_a_page_the_numbers_and_every_prediction(trained, tmp_path, capsys):
    model, data = trained
    assert main(["evaluate", str(model), str(data), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr().out
    assert "accuracy" in told
    assert max(map(len, told.splitlines()[2:])) <= 200
    lines = (tmp_path / "out" / "predictions.csv").read_text().splitlines()
    assert lines[0] == "picture,label,predicted,confidence,right"
    assert len(lines) == 42
    right = sum(line.endswith(",1") for line in lines)
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert right / 41 == written["accuracy"]
    assert "<html" in (tmp_path / "out" / "evaluation.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-size", "0"], "batch_size=0 must be 1 or more"),
        (["--workers", "-1"], "workers=-1 0 or more"),
        (["--flip", "--save-temperature", "x"], "--engine and --merge out"),
        (["--split", "dev"], "has no split 'val'; it has: train, test"),
        (["--real", "nothing.json"], "nothing.json cannot be read"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(trained, capsys, words, said):
    assert main(["evaluate", *map(str, trained), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_unreadable_pictures_are_told_and_strict_stops(trained, tmp_path):
    folder = write_folder(tmp_path / "folder", 4)
    (folder / "red" / "0.png").write_bytes(b"no picture")
    found = vitrail.evaluate(trained[0], folder)
    assert found.samples == 11
    assert list(found.outcome.skipped) == ["red/0.png"]
    with pytest.raises(DataError, match=r"red/0\.png"):
        vitrail.evaluate(trained[0], folder, strict=True)
    (folder / "red").rename(folder / "purple")
    with pytest.raises(ConfigError, match="does not know 'purple'"):
        vitrail.evaluate(trained[0], folder)
