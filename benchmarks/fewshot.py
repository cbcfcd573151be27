"""The few-shot probe's whole path of penalties, beside scikit-learn's, and the memory it takes."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from timing import claim, interleave, spread
from vitrail.probing.ridge import BIAS, L2_GRID, fit_path

ROWS, WIDTH, CLASSES = 50_000, 768, 100
FOLDS = 5
ROUNDS = 3
OURS = "vitrail, `fit_path`"
SKLEARN_CV = "scikit-learn, RidgeClassifierCV"
SKLEARN_LOOP = "scikit-learn, RidgeClassifier for each l2 and fold"


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    from threadpoolctl import threadpool_limits

    features, labels = make_features()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            table = rows(features, labels)
    finally:
        torch.set_num_threads(threads)
    return "\n".join(
        [
            "## The few-shot probe",
            "",
            f"The closed-form probe of {len(features):,} x {WIDTH} float32 features and {CLASSES}",
            f"classes for {len(L2_GRID)} values of l2, with the accuracy of each on",
            "held-out rows: one process, one thread. vitrail and RidgeClassifierCV whiten them and",
            f"leave out every row in closed form; the loop fits each l2 to each of {FOLDS} folds,",
            "whitened beforehand, and scores the rest: one such fit was timed, and multiplied by",
            f"{len(L2_GRID) * FOLDS}. Interleaved, {ROUNDS} rounds. *Ratio* is the median over",
            "rounds of the other's time divided by vitrail's.",
            "",
            *table,
            "",
            *memory(features, labels),
            "",
        ]
    )


def make_features() -> tuple[np.ndarray, np.ndarray]:
    """Correlated features of different scales, around a center for each class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS)
    mixing = rng.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
    mixing *= np.linspace(0.05, 2, WIDTH, dtype=np.float32)
    centers = 0.15 * rng.standard_normal((CLASSES, WIDTH), np.float32)
    features = rng.standard_normal((ROWS, WIDTH), np.float32)
    features += centers[labels]
    return features @ mixing, labels


def rows(features: np.ndarray, labels: np.ndarray) -> list[str]:
    calls = {OURS: ours(features, labels), SKLEARN_CV: theirs(features, labels)}
    seconds = interleave(calls | {SKLEARN_LOOP: one_fit(features, labels)}, rounds=ROUNDS)
    seconds[SKLEARN_LOOP] = [len(L2_GRID) * FOLDS * second for second in seconds[SKLEARN_LOOP]]
    lines = ["| path of l2 | best, ms | median, ms | ratio |", "|---|---|---|---|"]
    ratios = {}
    for name, times in seconds.items():
        pairs = zip(times, seconds[OURS], strict=True)
        ratios[name] = statistics.median(t / own for t, own in pairs)
        lines.append(f"| {name} | {spread(times)} | {ratios[name]:.2f} |")
    ratio = min(ratios[SKLEARN_CV], ratios[SKLEARN_LOOP])
    speedup = f"scikit-learn takes {ratio:.2f} times vitrail's time"
    return [claim("The few-shot probe's path of penalties", speedup), "", *lines]


def ours(features: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    return lambda: fit_path(features, labels, CLASSES)


def theirs(features: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    from sklearn.linear_model import RidgeClassifierCV

    model = RidgeClassifierCV(np.array(L2_GRID), fit_intercept=False, scoring="accuracy")
    return lambda: model.fit(whitened(features), labels)


def one_fit(features: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    """One l2 and one fold."""
    from sklearn.linear_model import RidgeClassifier

    x, cut = whitened(features), len(features) // FOLDS
    model = RidgeClassifier(alpha=1024.0, fit_intercept=False)
    return lambda: model.fit(x[cut:], labels[cut:]).score(x[:cut], labels[:cut])


def whitened(features: np.ndarray) -> np.ndarray:
    """Return whitened features with a constant appended, the input of scikit-learn."""
    x = np.full((len(features), WIDTH + 1), BIAS)
    x[:, :-1] = features
    x[:, :-1] -= x[:, :-1].mean(0)
    x[:, :-1] /= x[:, :-1].std(0) + 1e-5
    return x


FITS = {"vitrail": ours, "RidgeClassifierCV": theirs}
PEAK = Path("/proc/self/clear_refs")  # writing 5 makes the peak what is held now


def memory(features: np.ndarray, labels: np.ndarray) -> list[str]:
    """Measure how much memory a fit takes in a fresh process of each library."""
    if not PEAK.exists():
        return ["Memory is not measured on this system."]
    with tempfile.TemporaryDirectory() as folder:
        np.save(f"{folder}/features.npy", features)
        np.save(f"{folder}/labels.npy", labels)
        grown = {
            name: subprocess.run(
                [sys.executable, __file__, name, folder], check=True, capture_output=True, text=True
            ).stdout.strip()
            for name in FITS
        }
    return [
        "Peak memory of the fit above that before it: "
        + ", ".join(f"{name} {mebibytes} MiB" for name, mebibytes in grown.items())
        + f"; the features are {features.nbytes / 2**20:.0f} MiB.",
    ]


def growth(name: str, folder: str) -> float:
    """Return the MiB that a fit takes, after a small one that loads the libraries."""
    features, labels = np.load(f"{folder}/features.npy"), np.load(f"{folder}/labels.npy")
    FITS[name](features[: 2 * WIDTH], labels[: 2 * WIDTH])()
    PEAK.write_text("5")
    before = held("VmRSS")
    FITS[name](features, labels)()
    return held("VmHWM") - before


def held(what: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 2**10 for line in lines if line.startswith(what))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{growth(*sys.argv[1:]):.0f}")
