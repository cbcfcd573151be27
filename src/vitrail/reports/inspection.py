"""The report of `vitrail inspect`: a page, figures, images and arrays.

report.html       everything, with an interactive attention browser
arrays.npz        the arrays, by name
attention.csv     one line per layer and head: distance in pixels, entropy
*.svg, *.png      filters, positions, attention distance, the dataset in two dimensions
pictures/*.png    each image under each map

Layers, heads, rows and columns are counted from 0, as in the arrays.
"""

import base64
import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrail.data.decode import to_png
from vitrail.data.storage import atomic_path, write_atomic
from vitrail.formatting import percent
from vitrail.inspection.attention import AttentionStats
from vitrail.inspection.faithfulness import BASELINES, Faithfulness
from vitrail.inspection.inspect import ImageInspection, Inspection
from vitrail.reports import figures
from vitrail.reports.figures import inline_svg, save_figure
from vitrail.reports.html import compact_number, render
from vitrail.reports.images import (
    color_image,
    filter_plot,
    image_grid,
    image_url,
    mixing_plot,
    overlay,
    patch_image,
    position_plot,
    smallest_data_url,
)

MAX_ATTENTION_BYTES = 9 * 2**20  # in one page; base64 makes them a third more
MAP_SIDE = 260  # pixels of the longer side of an image under a map
NEIGHBOR_SIDE = 120
SIMILAR, PARTLY_SIMILAR = 0.7, 0.4  # rank correlations with the maps of random weights
SECTIONS = {
    "images": "Predictions and attention maps",
    "browser": "Attention browser",
    "distance": "Attention distance",
    "heads": "Entropy and similarity of heads",
    "norms": "Token norms",
    "filters": "First-layer filters",
    "positions": "Position embeddings",
    "mixing": "Token mixing",
    "tokens": "Patch tokens",
    "neighbors": "Nearest neighbors",
    "scatter": "Dataset in feature space",
    "faithfulness": "Faithfulness of the maps",
    "notes": "Notes",
}


def write_inspection(folder: Path, inspection: Inspection) -> list[Path]:
    """Write each file atomically; return their paths, the page last."""
    shared = plots = draw_plots(inspection)
    if inspection.attention is not None:
        label = "mean attention distance (pixels)"
        distance = figures.head_plot(inspection.attention.distance, label, width=540)
        plots = {**shared, "distance": distance}
    written = [path for name, plot in plots.items() for path in save_figure(plot, folder / name)]
    for number, image in enumerate(inspection.images):
        for name, values in named_maps(image):
            drawn = overlay(image.pixels, values, image.box, offset=image.token_offset)
            path = folder / "pictures" / f"{number}-{slug(image.name)}-{slug(name)}.png"
            write_atomic(path, to_png(drawn))
            written.append(path)
    with atomic_path(folder / "arrays.npz") as temporary, temporary.open("wb") as file:
        arrays: Any = dict(named_arrays(inspection))
        np.savez_compressed(file, **arrays)
    written.append(folder / "arrays.npz")
    if (stats := inspection.attention) is not None:
        table = [*stats.distance.values(), stats.entropy]
        with (
            atomic_path(folder / "attention.csv") as temporary,
            temporary.open("w", encoding="utf-8", newline="") as file,
        ):
            writer = csv.writer(file)
            names = (f"distance, {variant}" for variant in stats.distance)
            writer.writerow(["layer", "head", *names, "entropy"])
            for layer, head in np.ndindex(stats.entropy.shape):
                writer.writerow([layer, head, *(f"{values[layer, head]:.6g}" for values in table)])
        written.append(folder / "attention.csv")
    write_atomic(folder / "report.html", inspection_page(inspection, shared))
    return [*written, folder / "report.html"]


def draw_plots(inspection: Inspection) -> dict[str, Any]:
    """Return the figures that are both files and on the page, by file name."""
    plots = {}
    if inspection.filters is not None:
        plots["filters"] = filter_plot(inspection.filters)
    for number, (name, table) in enumerate(inspection.positions.items()):
        file = "positions" if len(inspection.positions) == 1 else f"positions-{number}"
        plots[file] = position_plot({name: table})
    if inspection.mixing is not None:
        plots["mixing"] = mixing_plot(inspection.mixing)
    if inspection.scatter is not None:
        plots["map"] = figures.scatter_plot(inspection.scatter)
    return plots


def named_maps(image: ImageInspection) -> Iterator[tuple[str, np.ndarray]]:
    yield from image.maps.items()
    for method, classes in image.class_maps.items():
        for number, (name, values) in enumerate(classes.items()):
            yield f"{method} {number} {name}", values


def named_arrays(inspection: Inspection) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the contents of arrays.npz."""
    for name in ("filters", "filters_explained", "mixing"):
        if (array := getattr(inspection, name)) is not None:
            yield name, array
    for number, table in enumerate(inspection.positions.values()):
        yield f"positions_{number}", table
    if (stats := inspection.attention) is not None:
        for variant, values in stats.distance.items():
            yield f"distance_{slug(variant)}", values
        for name in ("entropy", "redundancy", "norms", "prefix_norms", "outliers"):
            yield name, getattr(stats, name)
    for number, image in enumerate(inspection.images):
        for name, values in named_maps(image):
            yield f"picture_{number}_{slug(name)}", values
        if image.token_colors is not None:
            yield f"picture_{number}_colors", image.token_colors
        for layer, values in image.layers.items():
            yield f"picture_{number}_layer_{layer}", values
    if inspection.faithfulness is not None:
        for method, curves in inspection.faithfulness.curves.items():
            for name in ("shares", "insertion", "deletion"):
                yield f"{name}_{slug(method)}", getattr(curves, name)
    if inspection.scatter is not None:
        yield "map_points", inspection.scatter.points
        yield "map_labels", inspection.scatter.labels


def slug(text: str) -> str:
    """Replace what file systems may not take."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:60]


def rollout_figure(images: Sequence[ImageInspection], grid: tuple[int, int]) -> Any:
    """Draw images with their patches, their attention rollout, and the top two predictions."""
    patches = [patch_image(image.pixels, image.box, grid) for image in images]
    maps = [
        overlay(image.pixels, image.maps["rollout"], image.box, offset=image.token_offset)
        for image in images
    ]
    captions = [
        "\n".join(f"{percent(value)}  {name}" for name, value in image.predictions[:2])
        for image in images
    ]
    return image_grid([*patches, *maps], [""] * len(images) + captions, columns=len(images))


def inspection_page(inspection: Inspection, plots: Mapping[str, Any] | None = None) -> str:
    """Return the page; `plots` are those of `draw_plots`, if they are drawn already."""
    plots = draw_plots(inspection) if plots is None else plots
    drawn = {name: inline_svg(plot) for name, plot in plots.items()}
    images, stats, scores = inspection.images, inspection.attention, inspection.faithfulness
    values: dict[str, Any] = dict.fromkeys(SECTIONS) | {
        "images": [image_values(image) for image in images],
        "browser": browser_values(images, inspection.prefix),
        "filters": drawn.get("filters"),
        "positions": [svg for name, svg in drawn.items() if name.startswith("positions")],
        "mixing": drawn.get("mixing"),
        "tokens": [
            (image, smallest_data_url(color_image(image.token_colors, image.box, MAP_SIDE)))
            for image in images
            if image.token_colors is not None
        ],
        "neighbors": [image for image in images if image.neighbors],
        "scatter": drawn.get("map"),
        "faithfulness": faithfulness_values(scores) if scores and scores.curves else None,
        "notes": inspection.notes,
    }
    if stats is not None:
        values |= attention_values(stats, inspection.prefix)
    methods = dict.fromkeys(name for one in images for name in (*one.maps, *one.class_maps))
    return render(
        "inspection.html",
        inspection.title,
        inspection.facts,
        script="attention_browser.js" if values["browser"] else "",
        titles={name: title for name, title in SECTIONS.items() if values[name]},
        inspection=inspection,
        methods=methods,
        image_url=image_url,
        map_side=MAP_SIDE,
        neighbor_side=NEIGHBOR_SIDE,
        **values,
    )


def image_values(image: ImageInspection) -> dict[str, Any]:
    """Predictions and maps of an image: those of each method, then those of each class."""

    def draw(maps: Mapping[str, np.ndarray]) -> dict[str, str]:
        urls = {}
        for method, values in maps.items():
            drawn = overlay(image.pixels, values, image.box, "heat", offset=image.token_offset)
            drawn.thumbnail((MAP_SIDE, MAP_SIDE))
            urls[method] = smallest_data_url(drawn)
        return urls

    predictions = []
    for place, (name, probability) in enumerate(image.predictions):
        kind = "wrong" if image.label and not place else "other"
        predictions.append((name, probability, "correct" if name == image.label else kind))
    classes = dict.fromkeys(name for maps in image.class_maps.values() for name in maps)
    by_class = {
        name: {how: maps[name] for how, maps in image.class_maps.items() if name in maps}
        for name in classes
    }
    return {
        "name": image.name,
        "label": image.label,
        "image": image_url(image.pixels),
        "predictions": predictions,
        "maps": draw(image.maps),
        "class_maps": [
            (name, dict(image.predictions).get(name), draw(maps)) for name, maps in by_class.items()
        ],
    }


def browser_values(images: Sequence[ImageInspection], prefix: Sequence[str]) -> dict[str, Any]:
    """Data of the attention browser, for as many images as one page holds.

    Attention is base64 of uint8 (L, H, T, T), patches last, each row scaled to its maximum, with
    those maxima as float32 (L, H, T).
    """
    shown, total, size = [], 0, 0
    for image in images:
        if image.attention is None or image.peaks is None:
            continue
        total += 1
        if size + image.attention.nbytes > MAX_ATTENTION_BYTES:
            continue
        size += image.attention.nbytes
        layers, heads, tokens, _ = image.attention.shape
        rows, columns = image.grid
        height, width = image.pixels.shape[:2]
        top, left, bottom, right = image.box
        box = (top / height, left / width, (bottom - top) / height, (right - left) / width)
        number_prefix = tokens - rows * columns
        data = {
            "name": image.name,
            **{"layers": layers, "heads": heads, "tokens": tokens},
            **{"rows": rows, "columns": columns, "prefix": number_prefix},
            "prefixNames": list(prefix),
            "gap": 1 + columns // 12,  # pixels between the maps of the overview
            "middle": number_prefix + rows // 2 * columns + columns // 2,
            "box": [round(side, 5) for side in box],  # as fractions of the image's sides
        }
        attention, peaks = (
            base64.b64encode(array.tobytes()).decode("ascii")
            for array in (image.attention, image.peaks)
        )
        url = image_url(image.pixels)
        shown.append({"data": data, "image": url, "attention": attention, "peaks": peaks})
    return {"images": shown, "omitted": total - len(shown)} if shown else {}


def attention_values(stats: AttentionStats, prefix: Sequence[str]) -> dict[str, Any]:
    """Charts of attention distance, entropy, similarity of heads, and token norms."""

    def chart(values: np.ndarray, label: str, **options: Any) -> Any:
        figure = figures.head_plot({label: values}, label, **options)
        return "" if figure is None else inline_svg(figure)

    def span(values: np.ndarray) -> str:
        low, high = compact_number(float(values.min())), compact_number(float(values.max()))
        return low if low == high else f"{low} to {high}"

    largest = max(float(values.max()) for values in stats.distance.values())
    first = next(iter(stats.distance.values()))
    heads = {
        "Entropy": chart(stats.entropy, "entropy", show=lambda v: f"{100 * v:.0f} %", limits=(0, 1))
    }
    count = stats.redundancy.shape[-1]
    if count > 1:
        others = (stats.redundancy.sum(axis=2) - 1) / (count - 1)  # (L, H)
        heads["Similarity to the other heads"] = chart(others, "similarity to the other heads")
    number = stats.prefix_norms.shape[1]
    lines = {"class token": stats.prefix_norms[:, 0]} if number and "class token" in prefix else {}
    if number > len(lines):
        lines["other tokens"] = stats.prefix_norms[:, len(lines) :].mean(axis=1)
    return {
        "distance": {
            "charts": {
                name: chart(
                    values,
                    f"attention distance, {name}",
                    show=lambda v: f"{compact_number(v)} px",
                    limits=(0, largest),
                )
                for name, values in stats.distance.items()
            },
            "first": span(first[0]),
            "last": span(first[-1]),
            "patch": compact_number(stats.patch[1]),
        },
        "heads": heads,
        "norms": {
            "chart": inline_svg(figures.norm_plot(stats.norms, lines)),
            "outliers": [(n, float(v)) for n, v in enumerate(stats.outliers) if v > 0],
            "worst": (int(stats.outliers.argmax()), float(stats.outliers.max())),
        },
    }


def faithfulness_values(result: Faithfulness) -> dict[str, Any]:
    """Curves, a table of their areas, and conclusions."""
    methods = [name for name in result.curves if name not in BASELINES]
    colors = {name: f"s{number % figures.SERIES_COLORS}" for number, name in enumerate(methods)}
    colors = {name: colors.get(name, "soft") for name in result.curves}
    charts = {}
    for kind in ("insertion", "deletion"):
        curves = {name: getattr(one, kind) for name, one in result.curves.items()}
        shares = next(iter(result.curves.values())).shares
        label = f"probability of the class under {kind}"
        charts[kind] = inline_svg(figures.faithfulness_plot(shares, curves, colors, label))
    return {
        "charts": charts,
        "conclusions": list(conclusions(result)),
        "rows": [
            {
                "name": name,
                "color": colors[name],
                "insertion": one.insertion_area,
                "deletion": one.deletion_area,
                "sanity": None if name in BASELINES else result.sanity.get(name),
            }
            for name, one in result.curves.items()
        ],
        "best_insertion": max(one.insertion_area for one in result.curves.values()),
        "best_deletion": min(one.deletion_area for one in result.curves.values()),
    }


def conclusions(result: Faithfulness) -> Iterator[str]:
    """Which methods are faithful, and which are not."""
    methods = {name: one for name, one in result.curves.items() if name not in BASELINES}
    baselines = {name: one for name, one in result.curves.items() if name in BASELINES}
    if methods:
        best = max(methods, key=lambda name: methods[name].insertion_area)
        line = f"Best by insertion: {best}, area {methods[best].insertion_area:.3f}"
        against = [f"{name} {one.insertion_area:.3f}" for name, one in baselines.items()]
        yield f"{line} ({', '.join(against)})." if against else f"{line}."
    for name, one in methods.items():
        worse = [
            other
            for other, base in baselines.items()
            if one.insertion_area <= base.insertion_area and one.deletion_area >= base.deletion_area
        ]
        if worse:
            yield f"{name} is no better than {' or '.join(worse)}: do not rely on its maps."
    sanity = {name: value for name, value in result.sanity.items() if name not in BASELINES}
    for name, value in sanity.items():
        if value >= PARTLY_SIMILAR:
            how = "hardly change" if value >= SIMILAR else "change only in part"
            yield (
                f"The maps of {name} {how} with random weights (rank correlation {value:.2f}): "
                "they depend on the image or the architecture as much as on what was learned."
            )
    passed = [name for name, value in sanity.items() if value < PARTLY_SIMILAR]
    if passed:
        yield f"Sanity check passed (maps change with random weights): {', '.join(passed)}."
