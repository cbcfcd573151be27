"""Accuracy, calibration and coverage under common corruptions: `vitrail evaluate --corruptions`.

Images are corrupted after resizing and cropping, as in ImageNet-C; they are read once.

Shapes: N images, B images of a batch, K classes.
"""

from itertools import product
from os import PathLike
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from vitrail.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from vitrail.data.datasets import Dataset
from vitrail.errors import DataError
from vitrail.evaluation.calibration import (
    expected_calibration_error,
    probabilities,
    reliability_bins,
)
from vitrail.evaluation.conformal import Conformal
from vitrail.evaluation.dataset import RelabeledSource, match_classes, open_evaluation_split
from vitrail.evaluation.evaluate import Runner, collect_outputs, labels_at
from vitrail.evaluation.metrics import LossKind
from vitrail.evaluation.results import to_json

CLEAN = ("clean", 0)


def evaluate_corruptions(
    runner: Runner,
    data: Dataset | str | PathLike[str],
    split: str | None = None,
    *,
    images: int = 500,
    conformal: Conformal | None = None,
    loss: LossKind = "softmax",
    batch_size: int = 16,
    **options: Any,
) -> list[dict[str, Any]]:
    """Return one row for the clean images and for each corruption and severity.

    `images` of the split are used, evenly spaced; `loss` is that of `evaluate`, `options` are those
    of `run_inference`. The keys are corruption, severity, accuracy, ece and, of a calibrated model,
    coverage (share of prediction sets with the true class), set_size, accepted and accepted_error.
    Undefined values, such as the error of no accepted prediction, are None.
    """
    metadata = runner.metadata
    source, _ = open_evaluation_split(data, split, metadata)
    match = match_classes(metadata.class_names, runner.num_classes, source)
    if match.source.multi_label or runner.channels != 3:
        raise DataError("corruptions need RGB images with one label each")
    source, classes = match.source, match.source.classes
    rows = np.unique(np.linspace(0, len(source) - 1, min(images, len(source))).astype(int))
    source = RelabeledSource(source, classes, range(len(classes)), rows)
    variants = [CLEAN, *product(CORRUPTIONS, SEVERITIES)]
    shape = (1, 3, 1, 1)
    mean = torch.tensor(metadata.preprocessing.mean, device=runner.device).reshape(shape)
    std = torch.tensor(metadata.preprocessing.std, device=runner.device).reshape(shape)

    def predict(batch: Tensor) -> Tensor:
        """Return the logits of all variants. (B, variants x K)"""
        pixels = ((batch * std + mean) * 255).round().clamp(0, 255).byte()
        arrays = pixels.permute(0, 2, 3, 1).cpu().numpy()
        seeds = [crc32(image.tobytes()) for image in arrays]  # for any number of processes
        logits = [runner.run(batch)]
        for name, severity in variants[1:]:
            changed = np.stack(
                [corrupt(x, name, severity, seed) for x, seed in zip(arrays, seeds, strict=True)]
            )
            tensor = torch.from_numpy(changed).permute(0, 3, 1, 2).to(runner.device).float() / 255
            logits.append(runner.run((tensor - mean) / std))
        return torch.cat([part.float().cpu() for part in logits], dim=1)

    values, indices, _ = collect_outputs(
        predict,
        source,
        metadata.preprocessing,
        channels=runner.channels,
        device=runner.device,
        batch_size=batch_size,
        **options,
    )
    labels = labels_at(source, indices)
    if match.columns is not None:  # the dataset's order of classes
        labels = np.asarray(match.columns)[labels]
    loss = "sigmoid" if metadata.multi_label else loss
    table = []
    for number, (name, severity) in enumerate(variants):
        logits = values.reshape(len(indices), len(variants), -1)[:, number]
        correct = (logits.argmax(axis=1) == labels) & ~np.isnan(logits).any(axis=1)
        known = (logits < np.inf).all(axis=1)  # others have no confidence, as in `evaluate`
        confidence = probabilities(logits[known], loss).max(axis=1)
        row = {
            "corruption": name,
            "severity": severity,
            "accuracy": float(correct.mean()),
            "ece": expected_calibration_error(*reliability_bins(confidence, correct[known])),
        }
        if conformal is not None:
            p = probabilities(logits, "softmax")
            inside, accepted = conformal.sets(p), conformal.accepts(p)
            row |= {
                "coverage": float(inside[np.arange(len(labels)), labels].mean()),
                "set_size": float(inside.sum(axis=1).mean()),
                "accepted": float(accepted.mean()),
                "accepted_error": float((~correct)[accepted].mean()) if accepted.any() else None,
            }
        table.append(row)
    return to_json(table)


def mean_over_corruptions(rows: list[dict[str, Any]], key: str) -> dict[int, float]:
    """Return the mean of a metric over corruptions, by severity; 0 is clean."""
    return {
        severity: float(np.array([x[key] for x in rows if x["severity"] == severity], float).mean())
        for severity in (0, *SEVERITIES)
    }
