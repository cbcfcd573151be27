"""Long-tailed CIFAR-10: balanced accuracy with and without adjusting for class frequencies.

    DATA=folder python benchmarks/imbalance.py [--seconds 120]

DATA holds cifar10_10k.npz. Of the largest class 1,000 training images are kept, of the smallest 10,
the rest in between in geometric steps; all test images are used, so that accuracy is balanced
accuracy. Finished runs are cached in `.bench/`.
"""

import argparse
import os
import tempfile
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


def run_once(name: str, seed: int, seconds: float, source: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "long_tail.npz"
        write_long_tail(source, data)
        out = Path(folder) / "run"
        vitrail.train(data, out, minutes=seconds / 60, seed=seed, **SETTINGS[name])
        result = vitrail.evaluate(out, data, "test")
    assert result.confusion is not None
    recalls = (np.diag(result.confusion) / result.confusion.sum(axis=1)).tolist()
    return {"balanced_accuracy": result.balanced_accuracy, "recalls": recalls}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    seconds = parser.parse_args().seconds
    source = Path(os.environ.get("DATA", "")) / "cifar10_10k.npz"
    if not source.exists():
        raise SystemExit("set DATA to a folder with cifar10_10k.npz")
    print("| | balanced accuracy | recall of the 3 smallest classes |\n|---|---|---|")
    for name in SETTINGS:
        results = []
        for seed in SEEDS:
            key = f"imbalance {name} {seconds:g} s seed {seed}"
            results.append(
                result_cache.cached(
                    key, lambda seed=seed, name=name: run_once(name, seed, seconds, source)
                )
            )
        each = [100 * r["balanced_accuracy"] for r in results]
        tail = mean(100 * mean(r["recalls"][-3:]) for r in results)
        print(f"| {name} | {mean(each):.1f} % ({min(each):.1f}-{max(each):.1f}) | {tail:.1f} % |")


if __name__ == "__main__":
    main()
