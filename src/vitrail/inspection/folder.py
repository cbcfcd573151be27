"""An inspection as files.

report.html       all of it, to walk through
arrays.npz        what was computed, by name
attention.csv     one line for each layer and head: distance in pixels, entropy
*.png             filters, positions, distance, a data set as a map
pictures/*.png    each picture under each map
"""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.decode import to_png
from vitrail.data.storage import atomic_path, write_atomic
from vitrail.inspection import drawing
from vitrail.inspection.findings import Inspection, Look
from vitrail.inspection.page import write_inspection


def write_folder(folder: Path, found: Inspection) -> Iterator[Path]:
    """Write each file whole or not at all; their paths, the page last."""
    for name, image in drawn(found):
        write_atomic(folder / name, to_png(image))
        yield folder / name
    with atomic_path(folder / "arrays.npz") as temporary, temporary.open("wb") as file:
        named: Any = dict(arrays(found))
        np.savez_compressed(file, **named)
    yield folder / "arrays.npz"
    if found.study is not None:
        with (
            atomic_path(folder / "attention.csv") as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            csv.writer(file).writerows(lines(found))
        yield folder / "attention.csv"
    write_inspection(folder / "report.html", found)
    yield folder / "report.html"


def drawn(found: Inspection) -> Iterator[tuple[str, Any]]:
    """Every picture and its file's name."""
    if found.filters is not None:
        yield "filters.png", drawing.filter_sheet(found.filters)
    for number, tiles in enumerate(found.positions):
        name = "positions.png" if len(found.positions) == 1 else f"positions-{number}.png"
        yield name, drawing.position_sheet(tiles)
    if found.mixing is not None:
        yield "mixing.png", drawing.mixing_sheet(found.mixing)
    if found.study is not None:
        yield "distance.png", drawing.distance_plot(found.study)
    if found.scatter is not None:
        yield "map.png", drawing.scatter_plot(found.scatter)
    for number, look in enumerate(found.looks):
        for what, values in maps(look):
            image = drawing.overlay(look.pixels, values, look.box, lag=look.lag)
            yield f"pictures/{number}-{slug(look.name)}-{slug(what)}.png", image


def maps(look: Look) -> Iterator[tuple[str, np.ndarray]]:
    yield from look.maps.items()
    for method, classes in look.class_maps.items():
        for number, (name, values) in enumerate(classes.items()):
            yield f"{method} {number} {name}", values


def arrays(found: Inspection) -> Iterator[tuple[str, np.ndarray]]:
    """What was computed, by name."""
    if found.filters is not None:
        yield "filters", found.filters.components
        yield "filters_explained", found.filters.explained
    for number, tiles in enumerate(found.positions):
        yield f"positions_{number}", tiles.similarity
    if found.mixing is not None:
        yield "mixing", found.mixing
    if found.study is not None:
        for variant, values in found.study.distance.items():
            yield f"distance_{slug(variant)}", values
        for name in ("entropy", "redundancy", "norms", "prefix_norms", "outliers"):
            yield name, getattr(found.study, name)
    for number, look in enumerate(found.looks):
        for what, values in maps(look):
            yield f"picture_{number}_{slug(what)}", values
        if look.colors is not None:
            yield f"picture_{number}_colors", look.colors
        for layer, values in look.layers.items():
            yield f"picture_{number}_layer_{layer}", values
    if found.trust is not None:
        for method, curves in found.trust.curves.items():
            yield f"shares_{slug(method)}", curves.shares
            yield f"insertion_{slug(method)}", curves.insertion
            yield f"deletion_{slug(method)}", curves.deletion
    if found.scatter is not None:
        yield "map_points", found.scatter.points
        yield "map_labels", found.scatter.labels


def lines(found: Inspection) -> Iterator[list[str | int | float]]:
    """A head and lines of numbers."""
    assert found.study is not None
    study = found.study
    yield ["layer", "head", *(f"distance, {variant}" for variant in study.distance), "entropy"]
    layers, heads = study.entropy.shape
    for layer in range(layers):
        for head in range(heads):
            numbers = [values[layer, head] for values in (*study.distance.values(), study.entropy)]
            yield [layer, head, *(f"{number:.6g}" for number in numbers)]


def slug(text: str) -> str:
    """Letters that any file system takes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:60]
