"""The numbers of docs/reliability.md: coverage, risk control, label errors, outliers, comparisons.

    python benchmarks/reliability.py coverage labels outliers compare --data DATA --weights deit

DATA has flowers5_160.tar, sign_digits_100.tar and fashion_mnist.npz. Features are computed once, by
the given model (Fashion-MNIST: pixels), and kept in --cache. With cleanlab installed, `labels` also
prints its precision and recall on the same features.
"""

import argparse
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from torch import nn

from vitrail.checkpoints.load import load
from vitrail.data.datasets import open_splits
from vitrail.evaluation.calibration import probabilities
from vitrail.evaluation.compare import LEVEL, mcnemar
from vitrail.evaluation.conformal import (
    METHODS,
    abstention_threshold,
    class_scores,
    conformal_quantile,
)
from vitrail.probing import ridge
from vitrail.probing.features import features_of
from vitrail.probing.label_errors import (
    OUTLIERS,
    class_distances,
    confident_learning,
    out_of_fold,
)

FILES = {"flowers5": "flowers5_160.tar", "digits": "sign_digits_100.tar"}
RESPLITS = 1000
SHARES = (0.05, 0.1, 0.2, 0.3)


def features(name: str, options: argparse.Namespace) -> tuple[np.ndarray, ...]:
    """Return features and labels of the train split and of the other one."""
    path = options.cache / f"{name}.npz"
    if name == "fashion":
        arrays = np.load(options.data / "fashion_mnist.npz")
        train, test = slice(0, 3000), slice(0, 3000)
        x, new = (arrays[key].reshape(-1, 784) / np.float32(255) for key in ("x_train", "x_test"))
        return (
            x[train],
            arrays["y_train"][train].astype(int),
            new[test],
            arrays["y_test"][test].astype(int),
        )
    if not path.exists():
        model = load(options.weights)
        parts = open_splits(options.data / FILES[name]).values()
        found = [features_of(model, part) for part in parts]
        values = [x for f in found for x in (f.values, f.labels)]
        np.savez(path, **dict(zip(("train_x", "train_y", "test_x", "test_y"), values, strict=True)))
    table = np.load(path)
    return tuple(table[key] for key in ("train_x", "train_y", "test_x", "test_y"))


def probe_logits(
    x: np.ndarray, y: np.ndarray, new: np.ndarray, classes: int | None = None
) -> np.ndarray:
    path = ridge.fit_path(x, y, classes)
    return path.scale * path.probes[path.best].scores(new).numpy()


def coverage(options: argparse.Namespace) -> None:
    """Coverage over random halves of the held-out images; risk over draws with replacement."""
    for name in (*FILES, "fashion"):
        x, y, new, labels = features(name, options)
        p = probabilities(probe_logits(x, y, new), "softmax")
        rng, rows = np.random.default_rng(0), np.arange(len(labels))
        half = len(labels) // 2
        print(f"{name}: {len(labels)} images, accuracy {(p.argmax(1) == labels).mean():.3f}")
        for method in METHODS:
            scores = class_scores(p, method)
            own = scores[rows, labels]
            k = math.ceil(round((half + 1) * 0.95, 9))
            expected = k / (half + 1)
            drawn = rng.binomial(len(labels) - half, rng.beta(k, half + 1 - k, 200_000))
            low, high = np.quantile(drawn / (len(labels) - half), [0.025, 0.975])
            covered, sizes = [], []
            for _ in range(RESPLITS):
                order = rng.permutation(len(labels))
                threshold = conformal_quantile(own[order[:half]], 0.05)
                covered.append((own[order[half:]] <= threshold).mean())
                sizes.append((scores[order[half:]] <= threshold).sum(1).mean())
            inside = np.mean([low <= value <= high for value in covered])
            print(
                f"  {method:4}  coverage {np.mean(covered):.4f} (expected {expected:.4f}), "
                f"{100 * inside:.1f} % of re-splits in the 95 % interval {low:.3f}-{high:.3f}, "
                f"set size {np.mean(sizes):.2f}"
            )
        confidence, correct = p.max(1), p.argmax(1) == labels
        for rate in (0.05, 0.1):
            violated, accepted, none = 0, [], 0
            for _ in range(RESPLITS):
                drawn = rng.integers(len(labels), size=len(labels))
                threshold = abstention_threshold(confidence[drawn], correct[drawn], rate)
                none += threshold is None
                answered = confidence >= (2 if threshold is None else threshold)
                violated += bool(answered.any() and (~correct[answered]).mean() > rate)
                accepted.append(answered.mean())
            print(
                f"  abstention at {rate}: kept in {100 - 100 * violated / RESPLITS:.1f} %, "
                f"accepts {np.mean(accepted):.3f}, none {none / RESPLITS:.3f}"
            )


def labels(options: argparse.Namespace) -> None:
    """Precision and recall of flipped labels, and accuracy of a probe after dropping suspects."""
    for name in FILES:
        x, y, new, truth = features(name, options)
        classes = int(y.max()) + 1
        others = ridge.fit_path(x, y, classes).held_out.numpy().copy()
        others[np.arange(len(y)), y] = -np.inf
        nearest = [np.bincount(others[y == k].argmax(1)).argmax() for k in range(classes)]

        def accuracy(rows: Any, noisy: np.ndarray, x=x, new=new, truth=truth, k=classes) -> float:
            predicted = probe_logits(x[rows], noisy[rows], new, k).argmax(1)
            return float((predicted == truth).mean())

        for kind in ("uniform", "confusable"):
            for share in SHARES:
                rng = np.random.default_rng(0)
                flipped = rng.permutation(len(y))[: int(share * len(y))]
                noisy = y.copy()
                uniform = (y[flipped] + rng.integers(1, classes, len(flipped))) % classes
                noisy[flipped] = uniform if kind == "uniform" else np.array(nearest)[y[flipped]]
                found = confident_learning(out_of_fold(x, noisy, classes), noisy)
                suspects, suggested, margins = found
                kept, fixed, reviewed = np.ones(len(y), bool), noisy.copy(), noisy.copy()
                kept[suspects], fixed[suspects] = False, suggested[suspects]
                reviewed[suspects] = y[suspects]
                every = np.ones(len(y), bool)
                line = f"{name:9}{kind:11}{share:.2f}  {scores(suspects, -margins, flipped)}"
                line += f"  accuracy {accuracy(every, noisy):.3f}"
                line += f" dropped {accuracy(kept, noisy):.3f} fixed {accuracy(every, fixed):.3f}"
                line += f" reviewed {accuracy(every, reviewed):.3f}"
                print(f"{line} clean {accuracy(every, y):.3f}  {peer(x, noisy, flipped)}")


def scores(suspects: np.ndarray, ranking: np.ndarray, flipped: np.ndarray) -> str:
    """Precision and recall of the suspects, average precision of all images."""
    hits = np.isin(suspects, flipped).sum()
    ap = average_precision_score(np.isin(np.arange(len(ranking)), flipped), ranking)
    return f"precision {hits / len(suspects):.3f} recall {hits / len(flipped):.3f} ap {ap:.3f}"


def peer(x: np.ndarray, noisy: np.ndarray, flipped: np.ndarray) -> str:
    """cleanlab with five-fold logistic regression."""
    try:
        from cleanlab import filter, rank  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ""
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    scaled = (x - x.mean(0)) / x.std(0)
    model = LogisticRegression(max_iter=300, C=0.1)
    p = cross_val_predict(model, scaled, noisy, cv=folds, method="predict_proba")
    issues = filter.find_label_issues(
        noisy, p, return_indices_ranked_by="self_confidence", n_jobs=1
    )
    return f"cleanlab: {scores(issues, -rank.get_label_quality_scores(noisy, p), flipped)}"


def outliers(options: argparse.Namespace) -> None:
    """Share of images of another dataset, labeled at random, that are listed as outliers."""
    for name, other in (FILES, reversed(FILES)):
        (x, y, *_), (guests, *_) = features(name, options), features(other, options)
        for count in (1, 5, 20):
            found = []
            for seed in range(20):
                rng = np.random.default_rng(seed)
                values = np.concatenate([x, rng.permutation(guests)[:count]])
                labels = np.concatenate([y, rng.integers(0, y.max() + 1, count)])
                order = np.argsort(-class_distances(values, labels))
                found.append((order[: round(OUTLIERS * len(order))] >= len(x)).sum() / count)
            print(f"{count} images of {other} in {name}: {100 * np.mean(found):.0f} % listed")


def compare(options: argparse.Namespace) -> None:
    """Small networks of 40 seeds, and the same with 2 % of the answers made wrong."""
    arrays = np.load(options.data / "fashion_mnist.npz")
    x, new = (
        torch.tensor(arrays[f"x_{k}"][:10_000] / 255).flatten(1).float() for k in ("train", "test")
    )
    y, truth = (torch.tensor(arrays[f"y_{k}"]).long() for k in ("train", "test"))
    correct = []
    for seed in range(100, 140):  # others were used to choose the level
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(784, 64), nn.GELU(), nn.Linear(64, 10))
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=720)
        for _ in range(720):
            rows = torch.randint(6000, (100,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            correct.append((model(new).argmax(1) == truth).numpy())
    pairs, rng = list(combinations(range(40), 2)), np.random.default_rng(0)
    kinds = ("two seeds", "one seed, 2 points lost", "two seeds, 2 points lost")
    counts = {kind: np.zeros((5, len(pairs))) for kind in kinds}
    for part, images in enumerate(np.split(np.array(correct), 5, axis=1)):
        broken = images.copy()
        for row in broken:
            row[rng.choice(np.flatnonzero(row), 40, replace=False)] = False
        for number, (i, j) in enumerate(pairs):
            compared = ((images[i], images[j]), (images[i], broken[i]), (images[i], broken[j]))
            for kind, (a, b) in zip(kinds, compared, strict=True):
                counts[kind][part, number] = mcnemar(int((b & ~a).sum()), int((a & ~b).sum()))
    disjoint = [number for number, (i, j) in enumerate(pairs) if i % 2 == 0 and j == i + 1]
    for kind, p in counts.items():
        for level in (LEVEL, 0.05):
            parts = " ".join(f"{(row[disjoint] < level).sum()}" for row in p)
            share = 100 * (p < level).mean()
            print(
                f"{kind}: difference in {share:.1f} % at {level} (20 pairs of each part: {parts})"
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=("coverage", "labels", "outliers", "compare"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", default="")
    parser.add_argument("--cache", type=Path, default=Path("."))
    chosen = parser.parse_args()
    for part in chosen.parts:
        globals()[part](chosen)
