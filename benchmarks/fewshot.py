"""The few-shot probe's whole path of penalties, beside scikit-learn's, and the memory it takes."""

import resource
import statistics
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import torch

from timing import in_turns, spread
from vitrail.probing.ridge import BIAS, PATH, fit_path

ROWS, WIDTH, CLASSES = 50_000, 768, 100
FOLDS = 5
ROUNDS = 3


def report() -> str:
    """The section of docs/benchmarks.md, measured now."""
    features, labels = material()
    x = whitened(features)
    calls = {
        "vitrail": lambda: fit_path(features, labels, CLASSES),
        "all at once": ridge_classifier_cv(x, labels),
        "one fold": ridge_classifier(x, labels),
    }
    seconds = in_turns(calls, rounds=ROUNDS)
    seconds["loop"] = [len(PATH) * FOLDS * second for second in seconds.pop("one fold")]
    ours = seconds["vitrail"]
    ratios = {
        name: statistics.median(t / own for t, own in zip(times, ours, strict=True))
        for name, times in seconds.items()
    }
    size = features.nbytes / 2**20
    return "\n".join(
        [
            "## The few-shot probe",
            "",
            f"The closed-form probe of {ROWS:,} x {WIDTH} float32 features and {CLASSES} classes,",
            f"for {len(PATH)} values of l2, with an accuracy for each on rows it has not seen.",
            "vitrail leaves out every row, by the closed form, and starts from the features;",
            "scikit-learn gets them whitened, in float64, for nothing. RidgeClassifierCV leaves",
            "out every row too, and gives errors; the loop fits RidgeClassifier for each l2 to",
            f"each of {FOLDS} folds and scores the rest: one such fit was timed, and multiplied by",
            f"{len(PATH) * FOLDS}. Interleaved, {ROUNDS} rounds. *Ratio* is the median over rounds",
            "of the other's time divided by vitrail's.",
            "",
            "| path of l2 | best, ms | median, ms | ratio |",
            "|---|---|---|---|",
            f"| vitrail, `fit_path` | {spread(ours)} | 1.00 |",
            f"| scikit-learn, RidgeClassifierCV | {spread(seconds['all at once'])} "
            f"| {ratios['all at once']:.1f} |",
            f"| scikit-learn, loop over l2 and folds | {spread(seconds['loop'])} "
            f"| {ratios['loop']:.1f} |",
            "",
            f"Largest growth of the process meanwhile: vitrail {growth('vitrail'):.0f} MiB,",
            f"RidgeClassifierCV {growth('scikit-learn'):.0f} MiB; the features themselves are "
            f"{size:.0f} MiB.",
            "",
        ]
    )


def material() -> tuple[np.ndarray, np.ndarray]:
    """Features of uneven scales that depend on each other, around a center for each class."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, CLASSES, ROWS)
    mixing = rng.standard_normal((WIDTH, WIDTH), np.float32) / WIDTH**0.5
    mixing *= np.linspace(0.05, 2, WIDTH, dtype=np.float32)
    centers = 0.15 * rng.standard_normal((CLASSES, WIDTH), np.float32)
    features = rng.standard_normal((ROWS, WIDTH), np.float32)
    features += centers[labels]
    return features @ mixing, labels


def whitened(features: np.ndarray) -> np.ndarray:
    """What scikit-learn has to be given for the same protocol."""
    x = np.full((len(features), WIDTH + 1), BIAS)
    x[:, :-1] = (features - features.mean(0)) / (features.std(0) + 1e-5)
    return x


def ridge_classifier_cv(x: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    from sklearn.linear_model import RidgeClassifierCV

    return lambda: RidgeClassifierCV(np.array(PATH), fit_intercept=False).fit(x, labels)


def ridge_classifier(x: np.ndarray, labels: np.ndarray) -> Callable[[], object]:
    """One l2 and one fold."""
    from sklearn.linear_model import RidgeClassifier

    cut = len(x) // FOLDS
    model = RidgeClassifier(alpha=1024.0, fit_intercept=False)
    return lambda: model.fit(x[cut:], labels[cut:]).score(x[:cut], labels[:cut])


def growth(whose: str) -> float:
    """MiB that a fresh process grows by beyond what it holds before the fit."""
    command = [sys.executable, __file__, whose, str(ROWS), str(torch.get_num_threads())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def measure_growth(whose: str) -> float:
    features, labels = material()
    x = whitened(features) if whose == "scikit-learn" else features
    few = slice(0, 2 * WIDTH)  # so that libraries have loaded what they load
    fits: dict[str, Callable[[slice], object]] = {
        "vitrail": lambda part: fit_path(x[part], labels[part], CLASSES),
        "scikit-learn": lambda part: ridge_classifier_cv(x[part], labels[part])(),
    }
    fits[whose](few)
    before = peak()
    fits[whose](slice(None))
    return peak() - before


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


if __name__ == "__main__":
    whose, rows, threads = sys.argv[1:]
    ROWS = int(rows)
    torch.set_num_threads(int(threads))
    print(measure_growth(whose))
