"""The page and JSON of `vitrail compare --out`: verdict, classes, flipped images."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.datasets import Dataset
from vitrail.data.storage import write_atomic
from vitrail.errors import ConfigError
from vitrail.evaluation.compare import Comparison
from vitrail.formatting import byte_size, percent
from vitrail.inspection.images import load_samples
from vitrail.inspection.relevance import rollout
from vitrail.reports.html import NBSP, render
from vitrail.reports.images import data_url, overlay, thumbnail_url, to_jpeg

MAX_FLIPS = 12  # of each kind with images
THUMBNAIL = 160


def write_comparison(
    folder: Path,
    result: Comparison,
    source: Dataset,
    models: Sequence[Any],
    about: Mapping[str, Any],
) -> list[Path]:
    """Write comparison.html and comparison.json; `models` are None for exported ones."""
    page, values = folder / "comparison.html", folder / "comparison.json"
    low, high = (100 * bound for bound in result.difference[1:])
    tiles = [
        ("A: accuracy", percent(result.accuracy[0]), [about["a"]]),
        ("B: accuracy", percent(result.accuracy[1]), [about["b"]]),
        (
            "difference",
            f"{100 * result.difference.value:+.1f} points",
            [f"95 % CI {low:+.1f} to {high:+.1f}"],
        ),
        ("McNemar p", f"{result.p_value:.2g}", [f"n={result.samples:,}"]),
    ]
    costs = [
        f"{cost['milliseconds']:.2f} ms per image"
        + (f", {byte_size(cost['bytes'])}" if cost["bytes"] else "")
        for cost in about["costs"]
    ]
    facts = {
        "data": about["data"],
        "same top-1 class": percent(result.agreement),
        "ECE of A and B": " / ".join(map(percent, result.ece)),
        "cost of A": costs[0],
        "cost of B": costs[1],
    }
    html = render(
        "comparison.html",
        "Model comparison",
        facts,
        tiles=[
            {"name": n, "value": value.replace(" ", NBSP), "lines": lines, "first": n[0] == "d"}
            for n, value, lines in tiles
        ],
        summary=[result.verdict[:1].upper() + result.verdict[1:] + ".", *about["notes"]],
        classes=[c for c in result.classes if c.gained or c.lost],
        flips=[
            (title, len(rows), [flip(int(i), result, source, models) for i in spread(rows)])
            for title, rows in (
                ("Correct by A, wrong by B", result.lost),
                ("Correct by B, wrong by A", result.gained),
            )
        ],
    )
    write_atomic(page, html)
    write_atomic(values, json.dumps(dict(about) | result.to_dict(), indent=1))
    return [page, values]


def spread(rows: np.ndarray) -> np.ndarray:
    """Return at most `MAX_FLIPS` of them, evenly spaced."""
    return rows[:: -(-len(rows) // MAX_FLIPS) or 1]


def flip(index: int, result: Comparison, source: Dataset, models: Sequence[Any]) -> dict[str, Any]:
    """Return an image with both predictions and, of Vision Transformers, both attention maps."""
    images = [thumbnail_url(source, index, THUMBNAIL)]
    for model in filter(None, models):
        with suppress(ConfigError):  # a model without attention
            for image in load_samples(model, source, [index], {}):
                heat = rollout(model, image.tensor[None])[0].cpu().numpy()
                drawn = overlay(image.pixels, heat, image.box)
                drawn.thumbnail((THUMBNAIL, THUMBNAIL))
                images.append(data_url(to_jpeg(drawn), "jpeg"))
    return {"name": source.name(index), "images": images, **result.at(index)}
