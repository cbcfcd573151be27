"""The files that the pages speak of, as small as they can be, under the names they have there.

pictures/            flowers, a folder for each class; every fourth is in the wrong one
photos/              new pictures; thumbs/ and fists/ in it are for teaching
runs/pictures        a model that was trained on pictures/ for a moment, and its copies
runs/lora            a run with LoRA from ViT-B_16.npz
runs/stopped         a run that was interrupted
taught/              a model that remembers what it was taught
builtin/             what builtin:vit-photos stands for: a model without a head
hub/                 what hf:… stands for: a folder as transformers writes it
ViT-B_16.npz         Google's format; ViT-L_16.npz is the same
model.safetensors    timm's; deit-ti16/ is the same as a folder
fashion_mnist.npz    arrays
flowers5_160.tar     pictures/ in a tar, with train and val
birds.toml, …        what the pages themselves show
"""

import io
import os
import shutil
import signal
import tarfile
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
from doc_pages import ROOT, blocks
from PIL import Image

import vitrail
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


def build(folder: Path) -> None:
    """Fill an empty folder."""
    with chdir(folder):
        write_pictures()
        write_archive(Path("flowers5_160.tar"))
        write_arrays(Path("fashion_mnist.npz"))
        write_texts()
        write_weights()
        train_models()
        for name in ("docs", "imagenet"):
            Path(name).mkdir()


def write_pictures() -> None:
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
    contents = {"labels.csv": "\n".join(["file,split,class", *rows]).encode()}
    contents |= {name: file.read_bytes() for name, file in files.items()}
    with tarfile.open(path, "w") as tar:
        for name, data in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def write_arrays(path: Path) -> None:
    """Gray pictures of 28 pixels, and classes."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in {"train": 30, "test": 10}.items():
        labels = np.arange(count) % 5
        pixels = rng.integers(0, 100, (count, 28, 28)) + 30 * labels[:, None, None]
        arrays |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **arrays)


def write_texts() -> None:
    """The files whose text stands in a page; hands are replaced by the few flowers here."""
    for name, page in SHOWN.items():
        (block,) = blocks(ROOT / page, "toml")
        Path(name).write_text(block.text.replace(BUILTIN, "pictures/"), encoding="utf-8")


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
    settings: dict[str, Any] = {
        "model": {"name": "ViT-Mu/4", "image_size": 32, "patch_size": 8},
        "optim": {"kind": "adamw", "learning_rate": 3e-3, "warmup_steps": 1},
        "batch_size": 8,
    }
    vitrail.train("pictures/", "runs/pictures", steps=30, **settings)
    for name in COPIES:
        shutil.copytree("runs/pictures", name)
    vitrail.train("pictures/", "runs/stopped", steps=4, callback=Interruption(), **settings)
    tuned = {"batch_size": 8, "optim": settings["optim"]}
    vitrail.train("pictures/", "runs/lora", start="ViT-B_16.npz", steps=2, lora=2, **tuned)
    places = {name: f"pictures/{name}" for name in COLORS}
    vitrail.teach("hub", places, "taught", only=True)
    shutil.copy("taught/probe.safetensors", ".")  # as a page writes it


class Interruption(Callback):
    """Ctrl-C after the first step."""

    def on_step(self, row: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
