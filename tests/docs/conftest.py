"""The files that the pages mention, as small as possible: datasets, checkpoints and runs."""

import os
import shutil
import signal
import tarfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from doc_pages import ROOT, blocks
from PIL import Image

import vitrail
from vitrail.checkpoints import builtin, hub
from vitrail.training.callbacks import Callback

COLORS = {"daisy": (230, 230, 200), "roses": (200, 30, 40), "tulips": (70, 40, 190)}
EACH = 12  # pictures of a class
SIDES = (40, 48)
SMALL: dict[str, Any] = {"depth": 1, "width": 32, "mlp_width": 64, "heads": 2}
TASK: dict[str, Any] = {"image_size": 32, "num_classes": 3}
BUILTIN = "builtin:sign-digits"
COPIES = ("runs/masked", "runs/flowers5", "runs/calibrated", "fashion", "signs")
TRAINED = "builtin/vit-photos"
SHOWN = {"birds.toml": "docs/recipes.md", "tasks.toml": "docs/vtab.md"}  # file: page with its text


@pytest.fixture(scope="session")
def furnished(tmp_path_factory) -> Path:
    """The files; not to be changed."""
    folder = tmp_path_factory.mktemp("furnished")
    with chdir(folder):
        write_pictures()
        write_archive(Path("flowers5_160.tar"))
        write_arrays(Path("fashion_mnist.npz"))
        for name, page in SHOWN.items():  # with the few flowers here
            (block,) = blocks(ROOT / page, "toml")
            Path(name).write_text(block.text.replace(BUILTIN, "pictures/"), encoding="utf-8")
        write_weights()
        train_models()
        for name in ("docs", "imagenet"):
            Path(name).mkdir()
    return folder


@pytest.fixture
def here(furnished, tmp_path, monkeypatch) -> Path:
    """A copy of them that is the current folder; hub and built-in model are folders of it."""
    folder = tmp_path / "here"
    shutil.copytree(furnished, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(builtin, "FOLDER", furnished / "builtin")
    monkeypatch.setattr(hub, "fetch", lambda address: furnished / "hub")
    monkeypatch.setattr(hub, "push", lambda folder, name, private=False: f"hf:{name}")
    return folder


def write_pictures() -> None:
    """Flowers, every fourth in the folder of another class; photos; images to teach."""
    rng = np.random.default_rng(0)
    names = list(COLORS)
    for place, name in enumerate(names):
        for number in range(EACH):
            shown = names[(place + (number % 4 == 3)) % len(names)]
            picture(Path(f"pictures/{name}/{number:02}.jpg"), shown, rng)
    for number in range(3):
        picture(Path(f"photos/{number}.jpg"), names[number], rng)
        picture(Path(f"photos/thumbs/{number}.jpg"), "roses", rng)
        picture(Path(f"photos/fists/{number}.jpg"), "tulips", rng)
    for name, shown in {"tulip": "tulips", "rose": "roses", "cat": "daisy"}.items():
        picture(Path(f"{name}.jpg"), shown, rng)


def picture(path: Path, shown: str, rng: np.random.Generator) -> None:
    """A JPEG of noise around the color of a class."""
    pixels = np.clip(rng.normal(COLORS[shown], 25, (*SIDES, 3)), 0, 255).astype(np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=90)


def write_archive(path: Path) -> None:
    """The pictures as flowers5_160.tar has them: a list first, then the files."""
    files = {
        f"{'val' if place % EACH < 3 else 'train'}/{file.parent.name}/{file.name}": file
        for place, file in enumerate(sorted(Path("pictures").glob("*/*.jpg")))
    }
    rows = [f"{name},{name.split('/')[0]},{name.split('/')[1]}" for name in files]
    Path("labels.csv").write_text("\n".join(["file,split,class", *rows]))
    with tarfile.open(path, "w") as tar:
        for name, file in {"labels.csv": Path("labels.csv"), **files}.items():
            tar.add(file, name)
    Path("labels.csv").unlink()


def write_arrays(path: Path) -> None:
    """Gray pictures of 28 pixels, and classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in {"train": 30, "test": 10}.items():
        labels = np.arange(count) % 5
        pixels = rng.integers(0, 100, (count, 28, 28)) + 30 * labels[:, None, None]
        arrays |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **arrays)


def write_weights() -> None:
    """Everybody's files, of models with random weights."""
    model = vitrail.create("ViT-B/16", **SMALL, **TASK)
    vitrail.save(model, "ViT-B_16.npz", "google")
    vitrail.save(model, "ViT-L_16.npz", "google")
    model = vitrail.create("ViT-B/16", **SMALL, **TASK, numerics="timm")
    vitrail.save(model, "model.safetensors", "timm")
    vitrail.save(model, "deit-ti16", "timm")
    model = vitrail.create("ViT-B/16", **SMALL, **TASK, numerics="transformers")
    vitrail.save(model, "hub", "huggingface", class_names=["ant", "bee", "cat"])
    vitrail.save(vitrail.create("ViT-B/16", **SMALL | {"num_classes": 0}, image_size=32), TRAINED)


def train_models() -> None:
    """A run that came to its end, one that did not, and a model with a memory."""
    optim = {"kind": "adamw", "learning_rate": 3e-3, "warmup_steps": 1}
    tuned: dict[str, Any] = {"optim": optim, "batch_size": 8}
    settings = tuned | {"model": {"name": "ViT-Mu/4", "image_size": 32, "patch_size": 8}}
    vitrail.train("pictures/", "runs/pictures", steps=30, **settings)
    for name in COPIES:
        shutil.copytree("runs/pictures", name)
    vitrail.train("pictures/", "runs/stopped", steps=4, callback=Interruption(), **settings)
    vitrail.train("pictures/", "runs/lora", start="ViT-B_16.npz", steps=2, lora=2, **tuned)
    places = {name: f"pictures/{name}" for name in COLORS}
    vitrail.teach("hub", places, "taught", only=True)
    shutil.copy("taught/probe.safetensors", ".")  # as a page writes it
    vitrail.teach(TRAINED, places, "downloads")  # the same of the built-in model


class Interruption(Callback):
    def on_step(self, row: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
