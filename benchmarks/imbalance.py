"""Long-tailed CIFAR-10: balanced accuracy with and without adjusting for class frequencies.

    DATA=folder python benchmarks/imbalance.py [--epochs 10]

DATA holds cifar10_10k.npz. Of the largest class 1,000 training images are kept, of the smallest 10,
the rest in between in geometric steps; all test images are used, so that accuracy is balanced
accuracy. Other settings are the automatic ones. Finished runs are cached in `.bench/`.
"""

import argparse
import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import result_cache
import vitrail

RATIO = 100
SEEDS = (0, 1, 2)
SETTINGS: dict[str, dict[str, Any]] = {
    "no adjustment": {"loss": {"logit_adjustment": 0.0}},
    "class-balanced sampling": {"balance": 1.0},
    "logit adjustment (default)": {},
}


def write_long_tail(source: Path, path: Path) -> None:
    """Write the training images of a long-tailed copy, and all test images."""
    with np.load(source) as arrays:
        values = {name: arrays[name] for name in arrays.files}
    labels, rows = values["y_train"], []
    classes = len(np.unique(labels))
    for label in range(classes):
        of_class = np.flatnonzero(labels == label)
        rows.append(of_class[: round(len(of_class) * RATIO ** (-label / (classes - 1)))])
    keep = np.concatenate(rows)
    np.savez(path, **values | {"x_train": values["x_train"][keep], "y_train": labels[keep]})


def run_once(name: str, seed: int, epochs: float, source: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "long_tail.npz"
        write_long_tail(source, data)
        out = Path(folder) / "run"
        options = {"epochs": epochs, "seed": seed, "evaluate_every": epochs}
        vitrail.train(data, out, **options, **SETTINGS[name])
        result = vitrail.evaluate(out, data, "test")
    assert result.confusion is not None
    recalls = (np.diag(result.confusion) / result.confusion.sum(axis=1)).tolist()
    return {"balanced_accuracy": result.balanced_accuracy, "recalls": recalls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=float, default=10)
    epochs = parser.parse_args().epochs
    source = Path(os.environ.get("DATA", "")) / "cifar10_10k.npz"
    if not source.exists():
        raise SystemExit("set DATA to a folder with cifar10_10k.npz")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in SETTINGS}
    for seed in SEEDS:
        for name, found in results.items():
            run = partial(run_once, name, seed, epochs, source)
            found.append(
                result_cache.cached(f"imbalance {name} {epochs:g} epochs seed {seed}", run)
            )
    print("| | balanced accuracy | recall of the 3 smallest classes |\n|---|---|---|")
    for name, found in results.items():
        each = [100 * result["balanced_accuracy"] for result in found]
        tail = mean(100 * mean(result["recalls"][-3:]) for result in found)
        print(f"| {name} | {mean(each):.1f} % ({min(each):.1f}-{max(each):.1f}) | {tail:.1f} % |")


if __name__ == "__main__":
    main()
