"""Experiments that inspect trained models: figures 6, 7, 10 and 11.

The paper shows images without numbers, so every claim gets a measure and a rule, which are in
experiments.toml.

Shapes: B images, h x w patches, N = h * w, M pairs of patches, L layers, H heads.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reproduction.jobs import Datasets, test_split
from reproduction.report import TEXT, Report, Verdict
from reproduction.results import Results, bootstrap_mean, rules_verdict
from vitrail.checkpoints.load import load
from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.datasets import open_dataset
from vitrail.evaluation.metrics import Estimate
from vitrail.inspection import attention, faithfulness
from vitrail.inspection.faithfulness import correlation, ranks
from vitrail.inspection.images import InputImage, evenly_spaced, load_samples
from vitrail.inspection.relevance import METHODS
from vitrail.inspection.representations import filter_components, position_similarity
from vitrail.models.vit import VisionTransformer
from vitrail.reports.figures import head_plot, png_bytes
from vitrail.reports.images import filter_plot, fit_image, image_grid, overlay, position_plot

VIT, HYBRID = "ViT, patch 4", "hybrid"
SHORT = f"{VIT}, short"
DISTANCE_IMAGES, INSERTION_IMAGES, ROLLOUT_IMAGES = 128, 64, 8  # of the test split
SHUFFLES, SIGNIFICANCE = 199, 0.05  # of the Mantel test
VARIANCE = 0.9  # that components explain
EVERYWHERE, LOCAL, SPREAD, GROWTH = 90, 50, 10, 5  # percent of the distance of a uniform head
DISTANCE = "mean attention distance (pixels)"
PATTERN_MARGIN = 0.1  # of a rank correlation: less is no difference


def load_model(results: Results, name: str) -> VisionTransformer:
    folder = next(result.folder for key, result in results.jobs.items() if key[0] == name)
    return attention.require_attention(load(folder).eval(), "figures")


def sample_test_images(
    model: VisionTransformer, datasets: Datasets, count: int
) -> tuple[list[InputImage], Tensor]:
    """Return evenly spaced test images as they are, and preprocessed (B, C, H, W)."""
    source = open_dataset(datasets.pretrain, test_split(datasets.pretrain))
    pictures = list(load_samples(model, source, evenly_spaced(len(source), count), {}))
    return pictures, torch.stack([picture.tensor for picture in pictures])


def claim_parts(
    name: str, holds: Mapping[str, bool], values: Mapping[str, Any]
) -> tuple[Verdict, dict[str, Any], list[tuple[str, ...]]]:
    """Return verdict, values and table of a claim whose parts hold or not."""
    rows = []
    for part, text in TEXT[name]["parts"].items():
        filled = (text["paper"], text["here"].format_map(values), text["rule"])
        rows.append((*filled, "yes" if holds[part] else "no"))
    listed = "; ".join(f"{value} ({answer})" for _, value, _, answer in rows)
    texts = {"parts": listed, "held": f"{sum(holds.values())} of {len(holds)}"}
    return rules_verdict(list(holds.values())), {**values, **texts}, rows


def figure6(results: Results) -> Report:
    model = load_model(results, VIT)
    pictures, images = sample_test_images(model, results.datasets, INSERTION_IMAGES)
    classes = faithfulness.predict_classes(model, images)
    maps = {name: METHODS[name](model, images, classes) for name in ("rollout", "center", "random")}
    scores = {}
    for name, values in maps.items():
        each = zip(images.split(1), values.split(1), classes.split(1), strict=True)
        curves = (faithfulness.insertion_deletion(model, *one) for one in each)
        scores[name] = np.array([curve.insertion_area for curve in curves])
    areas = {name: bootstrap_mean(values) for name, values in scores.items()}
    gaps = (scores["rollout"] - scores[name] for name in ("random", "center"))
    random, center = map(bootstrap_mean, gaps)
    labels = [picture.label for picture in pictures]
    shown = [labels.index(label) for label in dict.fromkeys(labels)][:ROLLOUT_IMAGES]
    names = get_metadata(model).names(model.config.num_classes)
    tiles, captions = [], []
    for row in (shown[start : start + 4] for start in range(0, len(shown), 4)):
        tiles += [fit_image(pictures[n].pixels) for n in row]
        captions += [labels[n] for n in row]
        for n in row:
            one, values = pictures[n], maps["rollout"][n].numpy()
            offset = attention.token_offset(model)
            tiles.append(overlay(one.pixels, values, one.box, "heat", offset=offset))
        captions += [f"predicted: {names[int(classes[n])]}" for n in row]
    other = METHODS["rollout"](faithfulness.randomize(model), images, classes)
    sanity = faithfulness.rank_correlation(maps["rollout"], other)
    texts = {"over_random": interval(random, "+"), "over_center": interval(center, "+")}
    rows = [(name, interval(area)) for name, area in areas.items()]
    rows += [(f"rollout minus {name[5:]}", text) for name, text in texts.items()]
    return results.report(
        verdict_of_areas(random, center),
        texts
        | {"images": len(pictures), "areas": areas, "leads": (random, center), "sanity": sanity},
        rows,
        figures={"figure6.png": png_bytes(image_grid(tiles, captions, columns=4))},
    )


def verdict_of_areas(over_random: Estimate, over_center: Estimate) -> Verdict:
    if over_random.low > 0:
        return "holds" if over_center.low > 0 else "holds in part"
    return "does not hold" if over_random.high < 0 else "inconclusive"


def interval(estimate: Estimate, sign: str = "") -> str:
    value, low, high = (format(number, f"{sign}.3f") for number in estimate)
    return f"{value} ({low} to {high})"


def distance_study(model: VisionTransformer, images: Tensor) -> tuple[Any, np.ndarray, float]:
    """Return attention distances between patches (L, H) in pixels and in percent of a uniform
    head's, and the distance of that."""
    distance = attention.attention_stats(model, images.split(32)).distance
    pixels = distance.get("patches, renormalized", distance["patches"])
    axes = zip(model.config.grid, model.config.stride, strict=True)
    where = torch.cartesian_prod(*(size * torch.arange(n).double() for n, size in axes))  # (N, 2)
    uniform = float(torch.cdist(where, where).mean())
    return pixels, 100 * pixels / uniform, uniform


def lower_half(percent: np.ndarray) -> np.ndarray:
    return percent[: math.ceil(len(percent) / 2)]


def growth(percent: np.ndarray) -> float:
    """Return the mean of the upper half of the layers minus that of the lower."""
    upper = percent[len(lower_half(percent)) :]
    return float(upper.mean() - lower_half(percent).mean()) if len(upper) else 0.0


def distance_parts(percent: np.ndarray) -> dict[str, bool]:
    """Return which claims on attention distance hold."""
    first = percent[0]
    return {
        "global": bool(first.max() >= EVERYWHERE and np.ptp(first) >= SPREAD),
        "local": bool(lower_half(percent).min() <= LOCAL),
        "growth": growth(percent) >= GROWTH,
    }


def span(values: np.ndarray) -> str:
    return f"{values.min():.0f} to {values.max():.0f}"


def figure7(results: Results) -> Report:
    model = load_model(results, VIT)
    ((title, similarity),) = position_similarity(model).items()
    _, images = sample_test_images(model, results.datasets, DISTANCE_IMAGES)
    both = model, attention.require_attention(faithfulness.randomize(model), "figures")
    explained = [filter_components(one, 10**6)[1] for one in both]
    few, many = (int(np.searchsorted(np.cumsum(x), VARIANCE - 1e-12)) + 1 for x in explained)
    (pixels, percent, uniform), (old_pixels, old, _) = (distance_study(one, images) for one in both)
    grid = grid_structure(similarity)
    distances = {"trained": pixels, "at initialization": old_pixels}
    distances["uniform head"] = np.full((len(pixels), 1), uniform)
    values = {
        "images": len(images),
        **{"few": few, "many": many, "count": len(explained[0])},
        **{name: value for name, (value, _) in grid.items()},
        **{"first": span(percent[0]), "first_before": span(old[0])},
        **{"shortest": lower_half(percent).min(), "shortest_before": lower_half(old).min()},
        **{"grows": growth(percent), "grows_before": growth(old), "distances": distances},
    }
    plots = {
        "filters": filter_plot(filter_components(model)[0]),
        "positions": position_plot({title: similarity}),
        "distance": head_plot(distances, DISTANCE, width=540),
    }
    holds = {"filters": few < many, **{name: p < SIGNIFICANCE for name, (_, p) in grid.items()}}
    holds |= distance_parts(percent)
    return results.report(
        *claim_parts("figure7", holds, values),
        figures={f"figure7-{name}.png": png_bytes(plot) for name, plot in plots.items()},
    )


def figure11(results: Results) -> Report:
    distances, percent = {}, {}
    for name in (VIT, HYBRID):
        model = load_model(results, name)
        _, images = sample_test_images(model, results.datasets, DISTANCE_IMAGES)
        distances[name], percent[name], _ = distance_study(model, images)
    rows = [
        (str(layer), *(f"{heads.mean():.0f} % ({span(heads)})" for heads in layers))
        for layer, layers in enumerate(zip(*percent.values(), strict=True))
    ]
    lowest = [float(lower_half(one).min()) for one in percent.values()]
    means = [float(lower_half(one).mean()) for one in percent.values()]
    seen = f"{next(iter(results.jobs.values())).images:,}"
    values = {"images": len(images), "seen": seen, "lowest": lowest, "means": means}
    values["percent"] = percent
    figures = {"figure11.png": png_bytes(head_plot(distances, DISTANCE, width=540))}
    verdict = verdict_of_locality(*lowest)
    return results.report(verdict, values, rows, head=("layer", *percent), figures=figures)


def verdict_of_locality(vit: float, hybrid: float) -> Verdict:
    """Compare the most local heads, in percent of the uniform distance."""
    if abs(hybrid - vit) < GROWTH or min(vit, hybrid) > EVERYWHERE:
        return "inconclusive"
    return "holds" if hybrid > vit else "does not hold"


def grid_structure(similarity: np.ndarray) -> dict[str, tuple[float, float]]:
    """Compare similarities (h, w, h, w) with the grid: nearness, rows, columns → value, p-value.

    nearness  Spearman's rank correlation of similarity with nearness over all pairs of patches
    rows      similarity within a row above that of other pairs at equal distance; columns alike

    The p-values are those of a Mantel test: patches are permuted, and everything is measured again.
    """
    height, width = similarity.shape[:2]
    table = similarity.reshape(height * width, -1).astype(np.float64)  # (N, N)
    one, other = np.triu_indices(len(table), 1)  # (M,) each
    down, across = one // width - other // width, one % width - other % width
    apart, diagonal = np.hypot(down, across), (down != 0) & (across != 0)
    nearness, rng = ranks(-apart), np.random.default_rng(0)
    measured = []
    for shuffle in range(1 + SHUFFLES):
        order = rng.permutation(len(table)) if shuffle else np.arange(len(table))
        pairs = table[order[one], order[other]]  # (M,)
        lines = (beyond_distance(pairs, apart, step == 0, diagonal) for step in (down, across))
        measured.append((correlation(ranks(pairs), nearness), *lines))
    p_values = (np.array(measured) >= measured[0]).mean(axis=0).tolist()  # itself among them
    names = ("nearness", "rows", "columns")
    return dict(zip(names, zip(measured[0], p_values, strict=True), strict=True))


def beyond_distance(
    pairs: np.ndarray, apart: np.ndarray, line: np.ndarray, diagonal: np.ndarray
) -> float:
    """Return how much more similar pairs of one line are than diagonal pairs at equal distance.

    The means of diagonal pairs are interpolated over distance. Pairs outside of their range are
    left out; 0 if none remains.
    """
    distances, group = np.unique(apart[diagonal], return_inverse=True)
    if not len(distances):
        return 0.0
    means = np.bincount(group, pairs[diagonal]) / np.bincount(group)
    inside = line & (apart >= distances[0]) & (apart <= distances[-1])
    gaps = pairs[inside] - np.interp(apart[inside], distances, means)
    return float(gaps.mean()) if len(gaps) else 0.0


def pattern_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Return Spearman's rank correlation of two similarity tables (h, w, h, w)."""
    count = one.shape[0] * one.shape[1]
    tables = (table.reshape(count, count)[np.triu_indices(count, 1)] for table in (one, other))
    return correlation(*map(ranks, tables))


def figure10(results: Results) -> Report:
    tiles = {}
    for (name, seed), result in results.jobs.items():
        model = attention.require_attention(load(result.folder), "figures")
        (tiles[name, seed],) = position_similarity(model).values()
    grids = {key: grid_structure(one) for key, one in tiles.items()}
    own, twin = (SHORT, 0), (SHORT, 1)
    patterns = {k: pattern_correlation(tiles[twin], x) for k, x in tiles.items() if k != twin}
    least = min((key for key in patterns if key != own), key=patterns.__getitem__)
    nearness = [grid["nearness"] for grid in grids.values()]
    holds = {"nearness": all(p < SIGNIFICANCE for _, p in nearness)}
    holds["pattern"] = patterns[own] - patterns[least] >= PATTERN_MARGIN
    values = {
        **{"low": min(nearness)[0], "high": max(nearness)[0], "other": least[0]},
        **{"own": patterns[own], "least": patterns[least], "grids": grids, "patterns": patterns},
    }
    rows = []
    for (name, seed), grid in grids.items():
        result, near = results.jobs[name, seed], f"{grid['nearness'][0]:.2f}"
        lines = (f"{grid[key][0]:+.2f}" for key in ("rows", "columns"))
        pattern = f"{patterns[name, seed]:.2f}" if (name, seed) != twin else "—"
        seen = (f"{result.images:,}", f"{100 * (result.accuracy or 0.0):.1f} %")
        rows.append((name, str(seed), *seen, near, *lines, pattern))
    plot = position_plot({f"{n}, seed {seed}": x for (n, seed), x in tiles.items()}, columns=2)
    verdict, values, _ = claim_parts("figure10", holds, values)
    return results.report(verdict, values, rows, figures={"figure10.png": png_bytes(plot)})
