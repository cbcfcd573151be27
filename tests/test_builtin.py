"""The model that comes with the package: as a reference, and as the default start."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import vitrail
from tiny_runs import Recorder
from vitrail.checkpoints import builtin
from vitrail.cli import main
from vitrail.cli.predict import Serve
from vitrail.errors import CheckpointError
from vitrail.serving import server
from vitrail.training.auto_config import DatasetStats, dataset_stats, suggests_transfer
from vitrail.training.budget import plan_finetuning
from vitrail.training.config import ModelSettings, Settings

COLORS = {"red": (200, 40, 30), "green": (40, 180, 60)}
NOTICE = "starting from builtin:vit-photos"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of built-in models, with a tiny one under the name of the real one."""
    folder = tmp_path_factory.mktemp("builtin")
    model = vitrail.create(
        "ViT-Mu/4", image_size=32, patch_size=8, stem="conv", pool="cls+mean", num_classes=0
    )
    vitrail.save(model, folder / "vit-photos", dtype=torch.float16)
    return folder


@pytest.fixture(autouse=True)
def installed(trained, monkeypatch):
    monkeypatch.setattr(builtin, "FOLDER", trained)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photographs of 80 pixels in one folder per class."""
    folder, rng = tmp_path_factory.mktemp("data") / "photos", np.random.default_rng(0)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for number in range(12):
            pixels = np.clip(rng.normal(color, 30, (80, 90, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")
    return folder


def test_reference_loads_without_a_head_and_adapts():
    model = vitrail.load("builtin:vit-photos")
    assert model.head is None
    assert next(model.parameters()).dtype == torch.float32
    with torch.inference_mode():
        assert model(torch.zeros(1, 3, 32, 32)).shape == (1, model.config.num_features)
    model = vitrail.load("builtin:vit-photos", num_classes=3, image_size=48, log=lambda line: None)
    assert (model.config.num_classes, model.config.image_size) == (3, 48)


def test_unknown_or_missing_model_is_one_line(monkeypatch, tmp_path):
    with pytest.raises(CheckpointError, match=r"^unknown built-in model 'builtin:vit'; available"):
        vitrail.load("builtin:vit")
    monkeypatch.setattr(builtin, "FOLDER", tmp_path)
    assert builtin.references() == []
    with pytest.raises(CheckpointError, match=r"^builtin:vit-photos is missing from this install"):
        vitrail.load("builtin:vit-photos")


def test_models_lists_it(capsys):
    assert main(["models", "--like", "builtin"]) == 0
    assert 'vitrail.load("builtin:vit-photos", num_classes=10)' in capsys.readouterr().out
    assert main(["models", "--like", "builtin", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["image_size"]) == ("builtin:vit-photos", 32)


@pytest.mark.slow
def test_finetune_and_fewshot_start_from_it(photos, tmp_path, capsys):
    tuned = tmp_path / "tuned"
    assert main(["finetune", str(photos), "--steps", "2", "--out", str(tuned)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(NOTICE) == 1
    assert "--from hf:google/vit-base-patch16-224" in out
    assert vitrail.load(tuned).metadata.provenance["from"] == "builtin:vit-photos"
    words = ["fewshot", str(photos), "--shots", "2", "--json"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert NOTICE in printed.err
    usage = "vitrail fewshot hf:google/vit-base-patch16-224 DATA"
    assert usage in " ".join(printed.err.split())
    result = json.loads(printed.out)
    assert (result["model"], result["data"]) == ("builtin:vit-photos", str(photos))
    assert main(["fewshot", str(tuned), *words[1:]]) == 0
    printed = capsys.readouterr()
    assert NOTICE not in printed.err
    assert json.loads(printed.out)["model"] == str(tuned)


def test_train_starts_from_it_in_python(photos, tmp_path):
    log = Recorder()
    options = {"start": "builtin:vit-photos", "steps": 1, "callback": log}
    result = vitrail.train(photos, tmp_path / "run", **options)
    assert result.finished
    assert any("linear probe" in line for line in log.lines)
    assert not any("`vitrail finetune`" in line for line in log.lines)


def test_teach_without_a_model(photos, tmp_path, capsys):
    classes = [f"{name}={photos / name}" for name in COLORS]
    assert main(["teach", *classes, "--out", str(tmp_path / "taught")]) == 0
    assert NOTICE in capsys.readouterr().err
    assert vitrail.load(tmp_path / "taught").metadata.class_names == tuple(COLORS)
    prediction = vitrail.Predictor(tmp_path / "taught")(photos / "green" / "0.jpg")
    assert prediction.labels == ("green",)
    probe = tmp_path / "taught" / "probe.safetensors"  # as a page of --to html writes it
    again = str(tmp_path / "again")
    assert main(["teach", "--using", str(probe), "--out", again]) == 0
    assert vitrail.load(again).metadata.class_names == tuple(COLORS)
    assert main(["teach", *classes]) == 2
    assert "pass a folder for the taught model, such as --out taught" in capsys.readouterr().err


def test_check_labels_uses_its_features(photos, capsys):
    assert main(["check", str(photos), "--labels", "--json"]) == 0
    printed = capsys.readouterr()
    assert "--model hf:google/vit-base-patch16-224" in " ".join(printed.err.split())
    assert json.loads(printed.out)["labels"]["features"] == "builtin:vit-photos"


def test_serve_without_a_model_can_be_taught(monkeypatch, capsys):
    states = []
    ended = SimpleNamespace(run=lambda sockets: 0)
    monkeypatch.setattr(server, "make_server", lambda app, state: states.append(state) or ended)
    Serve(port=0).run()
    out = capsys.readouterr().out
    assert NOTICE in out
    assert "vit-photos: 0 classes, engine torch; add two or more in the page" in out
    assert states[0].registry.get(None).info.teach
    Serve(models=("builtin:vit-photos",), port=0).run()
    assert "0 classes, engine torch; to add some, pass --allow-teach" in capsys.readouterr().out
    assert not states[1].registry.get(None).info.teach


# When training from scratch says that the built-in model would be better

PHOTOS = DatasetStats(
    images=2000, classes=5, side=160, seconds=1e-3, channels=3, multi_label=False, photographs=True
)


def test_train_suggests_it_for_few_photographs_only(photos, tmp_path):
    assert suggests_transfer(Settings(), PHOTOS)
    changes = [{"images": 60_000}, {"side": 32}, {"photographs": False}, {"multi_label": True}]
    for change in [*changes, {"classes": 1}]:
        assert not suggests_transfer(Settings(), DatasetStats(**vars(PHOTOS) | change)), change
    assert not suggests_transfer(Settings(model=ModelSettings(name="ViT-Ti/16")), PHOTOS)
    assert not suggests_transfer(Settings(objective="masked"), PHOTOS)
    log = Recorder()
    vitrail.train(photos, tmp_path / "run", steps=1, callback=log)
    (line,) = (line for line in log.lines if "`vitrail finetune`" in line)
    assert "builtin:vit-photos" in line


def test_photographs_are_jpeg_files_in_color(photos, tmp_path):
    assert dataset_stats(vitrail.open_dataset(photos, "train")).photographs
    for kind, mode in (("png", "RGB"), ("jpg", "L")):
        for path in photos.glob("*/*.jpg"):
            copy = tmp_path / kind / path.relative_to(photos).with_suffix(f".{kind}")
            copy.parent.mkdir(parents=True, exist_ok=True)
            Image.open(path).convert(mode).save(copy)
        assert not dataset_stats(vitrail.open_dataset(tmp_path / kind, "train")).photographs


@pytest.mark.parametrize("seconds", [20, 60, 600])
def test_plan_of_a_small_image_size(seconds):
    """Image sizes of a plan are multiples of the patch, between 4/7 of the model's size and it."""
    config = vitrail.VitConfig(
        depth=6, width=192, mlp_width=768, heads=6, patch_size=16, image_size=128, stem="conv",
        pool="cls+mean", num_classes=5,
    )  # fmt: skip
    plan = plan_finetuning(
        config, seconds=seconds, forward=4e-3, read=1e-3, train=2500, dev=250, test=750
    )
    sizes = [plan.image_size, *(size for _, size in plan.image_sizes)]
    assert all(size % 16 == 0 and 64 <= size <= 128 for size in sizes)
    assert plan.epochs > 0
