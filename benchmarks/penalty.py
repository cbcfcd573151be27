"""Regret of the few-shot probe's l2: fixed at 1024, by squared error, by `Path.best`, the oracle.

    DATA=folder python benchmarks/penalty.py [model]

prints the table of docs/fewshot.md. Half of the images of each set are for training, the others for
testing. None of these sets had a part in the choice of the rule.
"""

import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from race_sets import data_folder
from vitrail import load
from vitrail.data.datasets import ImageDataset, open_dataset
from vitrail.models.vit import Model
from vitrail.probing.features import features_of
from vitrail.probing.fewshot import Shots, draw
from vitrail.probing.ridge import DEFAULT_L2, fit_path

MODEL = "hf:facebook/deit-tiny-patch16-224"
SIZE = 128  # pixels: positions are interpolated
DATASETS = {
    "flowers5": ("flowers5_160.tar", ""),
    "sign-digits": ("sign_digits_100.tar", ""),
    "CIFAR-10": ("cifar10_10k.npz", ""),
    **{
        name: ("photos_60k.tar", f"{name}/")
        for name in ("natural_images", "monkey10", "clothing", "plantvillage", "plantdoc")
    },
    **{name: ("photos_60k.tar", f"{name}/") for name in ("grocery", "dogs")},
}
MOST_CLASSES, MOST_IMAGES = 20, 600  # of a set
SHOTS: tuple[Shots, ...] = (1, 2, 5, 10, 25, "all")
SEEDS = 5
COLUMNS = ("fixed 1024", "least squared error", "`Path.best`", "oracle")


def report(model: Model) -> str:
    """The table: mean test accuracy over sets and seeds, in percent."""
    accuracies_by_shots: dict[Shots, list[np.ndarray]] = {shots: [] for shots in SHOTS}
    for name, (file, prefix) in DATASETS.items():
        features = features_of(model, some_of(open_dataset(data_folder() / file, "all"), prefix))
        labels = np.unique(features.labels, return_inverse=True)[1]
        for task, rows in (("all classes", labels >= 0), ("two classes", labels < 2)):
            for shots, accuracies in regret(features.values[rows], labels[rows]):
                accuracies_by_shots[shots].append(accuracies.mean(0))
            print(f"{name}, {task}", file=sys.stderr, flush=True)
    lines = [f"| shots | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    rows = [(str(shots), np.mean(tasks, 0)) for shots, tasks in accuracies_by_shots.items()]
    rows.append(("mean", np.mean(list(chain.from_iterable(accuracies_by_shots.values())), 0)))
    return "\n".join([*lines, *(f"| {name} | {percent(mean)} |" for name, mean in rows)])


def percent(values: np.ndarray) -> str:
    return " | ".join(f"{100 * value:.1f}" for value in values)


def some_of(source: ImageDataset, prefix: str) -> ImageDataset:
    """Images of the first classes with a prefix, evenly."""
    labels = source.class_ids()
    chosen = [c for c, name in enumerate(source.classes) if name.startswith(prefix)][:MOST_CLASSES]
    rng = np.random.default_rng(0)
    rows = [rng.permutation(np.flatnonzero(labels == c)) for c in chosen]
    most = MOST_IMAGES // len(chosen)
    return source.subset(np.sort(np.concatenate([part[:most] for part in rows])))


def regret(values: np.ndarray, labels: np.ndarray) -> Iterator[tuple[Shots, np.ndarray]]:
    """For each number of shots, test accuracies (seeds, columns)."""
    classes = int(labels.max()) + 1
    for shots in SHOTS:
        if shots != "all" and shots > np.bincount(labels).min() // 2:
            continue
        rows_by_seed = []
        for seed in range(SEEDS):
            order = draw(labels, classes, "all", seed)
            train = np.zeros(len(labels), bool)
            for c in range(classes):
                own = order[labels[order] == c]
                train[own[: len(own) // 2]] = True
            rows = np.flatnonzero(train)
            rows = rows[draw(labels[rows], classes, shots, seed)]
            path = fit_path(values[rows], labels[rows], classes)
            accuracies = [
                float((probe.predict(values[~train]).numpy() == labels[~train]).mean())
                for probe in path.probes
            ]
            fixed = [probe.l2 for probe in path.probes].index(DEFAULT_L2)
            chosen = (fixed, int(np.argmin(path.errors)), path.best, int(np.argmax(accuracies)))
            rows_by_seed.append([accuracies[i] for i in chosen])
        yield shots, np.array(rows_by_seed)


if __name__ == "__main__":
    absent = [file for file, _ in DATASETS.values() if not (data_folder() / file).exists()]
    if absent:
        sys.exit(f"Not measured: {data_folder() / absent[0]} is not there; set DATA to its folder")
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else MODEL
    reference = str(Path(name).resolve()) if Path(name).exists() else name
    print(report(load(reference, image_size=SIZE)))
