"""Metrics, confusion, calibration bins and intervals as version 0.1 computed them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from vitrail.evaluation.evaluate import compute_metrics
from vitrail.evaluation.results import Predictions

CASES = json.loads((Path(__file__).parent / "golden_results.json").read_text(encoding="utf-8"))


class Source:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def name(self, index):
        return f"image {index}"


def assert_same(got, expected, path):
    """Equal structure and strings; numbers to 1e-6."""
    if isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), path
        for number, value in enumerate(expected):
            assert_same(got[number], value, f"{path}[{number}]")
    elif isinstance(expected, float):
        assert math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-6), (path, got, expected)
    else:
        assert got == expected, path


@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_the_previous_version(name):
    case = CASES[name]
    labels = np.array(case["labels"])
    predictions = Predictions(
        classes=tuple(case["classes"]),
        logits=np.array(case["logits"], np.float32),
        labels=labels.astype(bool) if labels.ndim == 2 else labels,
        indices=np.arange(len(labels)),
        loss=case["loss"],
    )
    result = compute_metrics(predictions, Source(len(labels))).to_dict()  # type: ignore
    assert_same(result, case["expected"], name)
