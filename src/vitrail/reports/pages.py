"""The pages of a training run, and of `vitrail evaluate`, `compare` and `check` with --out.

run_page             report.html: results, curves, mistakes, settings
write_evaluation     evaluation.html: metrics, confusion matrix, calibration, mistakes;
                     evaluation.json, the same numbers; predictions.csv, one line per image
write_robustness     corruptions.html: accuracy, ECE and coverage under common corruptions
write_comparison     comparison.html: verdict, classes, changed predictions
write_dataset_check  index.html: recommendations, counts, problems; a contact sheet per class

The folder of an evaluation may be that of a run, whose own page is report.html.
"""

import csv
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.check import DatasetReport, SampleInfo
from vitrail.data.corruptions import SEVERITIES
from vitrail.data.datasets import Dataset, ImageDataset, LabelSets, open_splits
from vitrail.data.decode import thumbnail, to_jpeg, to_png
from vitrail.data.storage import atomic_path, write_atomic
from vitrail.errors import ConfigError
from vitrail.evaluation.compare import Comparison
from vitrail.evaluation.dataset import OPTIMISTIC
from vitrail.evaluation.metrics import Estimate, most_confused, wilson_interval
from vitrail.evaluation.results import (
    MAX_MISTAKES,
    Calibration,
    ClassMetrics,
    EvaluationResult,
    Mistake,
)
from vitrail.evaluation.robustness import mean_over_corruptions
from vitrail.formatting import ABSENT, byte_size, duration, percent
from vitrail.inspection.attention import token_offset
from vitrail.inspection.images import evenly_spaced, load_samples
from vitrail.inspection.relevance import rollout
from vitrail.reports import figures
from vitrail.reports.figures import Points, inline_svg, line_chart
from vitrail.reports.html import NBSP, compact_number, interval, render
from vitrail.reports.images import data_url, overlay, thumbnail_url

EMPTY: Mapping[str, Any] = MappingProxyType({})
TILES = {  # estimate → name and explanation on the page
    "accuracy": ("top-1 accuracy", ""),
    "real_accuracy": ("ReaL accuracy", "top-1, ImageNet-ReaL labels"),
    "top5": ("top-5 accuracy", ""),
    "balanced_accuracy": ("balanced accuracy", "mean recall over classes"),
    "ece": ("ECE", "expected calibration error"),
    "accuracy_at_80": ("selective accuracy", "at 80 % coverage"),
}
MULTI_LABEL_TILES = {
    "mean_average_precision": ("mAP", "mean average precision"),
    "f1_micro": ("F1 (micro)", "over all labels"),
    "f1_macro": ("F1 (macro)", "mean over classes"),
}
CORRUPTION_METRICS = {"accuracy": "accuracy", "ece": "ECE", "coverage": "coverage of the sets"}
MIN_SUPPORT = 10  # images a class needs to be called weak
MIN_COVERED = 20  # images from which selective accuracy is drawn
CALIBRATED = 0.01  # an ECE that needs no correction
SELECTIVE_GAIN = 0.005  # of accuracy at 80 % coverage over all
MAX_RECALL_BARS = 30
CONFUSED_PAIRS = 5
COMPACT = 14  # classes up to which the matrix fills half the page's width
THUMBNAIL = 144  # pixels of a mistake's longer side
MAX_FLIPS = 12  # images that one of two models classifies correctly, of each kind
FLIP_SIDE = 160  # pixels
HEADLINES = ("time", "parameters")  # facts shown as large as the accuracy
LOG_RATIO = 30  # ratio of the largest loss to the smallest from which the axis is logarithmic
SHEET_SIDE = 96  # pixels of a thumbnail on a contact sheet
SHEET_GAP = 4
SHEET_COLUMNS = 8
IMAGES_PER_CLASS = 24
MAX_SHEETS = 60  # on the page; those of other classes are files only
MAX_SUSPECTS = 60  # possible label errors on the page; labels.csv has all
MAX_SHOWN = 30  # of each problem; the rest is counted


def write_evaluation(
    folder: Path, result: EvaluationResult, source: Dataset, *, title: str, facts: Mapping[str, str]
) -> Iterator[Path]:
    """Write each file atomically; yields their paths."""
    predictions = result.predictions
    assert predictions is not None
    page, values, table = (
        folder / name for name in ("evaluation.html", "evaluation.json", "predictions.csv")
    )
    write_atomic(page, evaluation_page(result, source, title=title, facts=facts))
    yield page
    write_atomic(values, json.dumps(dict(facts) | result.to_dict(), indent=1))
    yield values
    classes, scores = predictions.classes, predictions.scores
    with (
        atomic_path(table) as temporary,
        temporary.open("w", encoding="utf-8", errors="replace", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["picture", "label", "predicted", "confidence", "right"])
        for index, label, predicted, confidence, rank in zip(
            predictions.indices.tolist(),
            predictions.labels,
            scores.predicted.tolist(),
            scores.confidence.tolist(),
            scores.rank.tolist(),
            strict=True,
        ):
            labels = label.nonzero()[0].tolist() if predictions.multi_label else [int(label)]
            names = "|".join(classes[number] for number in labels)
            correct = int(rank == 0)
            writer.writerow(
                [source.name(index), names, classes[predicted], f"{confidence:.6f}", correct]
            )
    yield table


def evaluation_page(
    result: EvaluationResult, source: Dataset, *, title: str, facts: Mapping[str, str]
) -> str:
    names = [c.name for c in result.classes]
    selective = coverages = None
    if result.selective is not None and result.accuracy < 1:
        selective = figures.selective_accuracy_curve(
            result.selective, result.accuracy_at_80, min(MIN_COVERED / result.samples, 0.5)
        )
        coverages = [(share, result.selective.at(share / 100)) for share in (50, 80, 90, 100)]
        coverages[1] = (80, result.accuracy_at_80)
    about = {
        "images": f"{result.samples:,}",
        "classes": f"{len(result.classes):,}",
        loss_name(result): compact_number(result.loss) if math.isfinite(result.loss) else ABSENT,
    }
    return render(
        "evaluation.html",
        title,
        {**facts, **about},
        result=result,
        tiles=list(tiles(result)),
        summary=list(summary(result)),
        confusion=confusion_section(result.confusion, names) if names else None,
        classes=sorted(
            result.classes,
            key=lambda c: (c.support < MIN_SUPPORT, not c.support, math.isnan(c.f1), c.f1),
        ),
        min_support=MIN_SUPPORT,
        reliability=result.calibration
        and inline_svg(figures.reliability_diagram(result.calibration)),
        min_bin_count=figures.MIN_BIN_COUNT,
        selective=selective and inline_svg(selective),
        coverages=coverages,
        mistakes=mistake_figures(result.mistakes, source, names),
    )


def loss_name(result: EvaluationResult) -> str:
    sigmoid = result.multi_label or (result.predictions and result.predictions.loss == "sigmoid")
    return "BCE loss" if sigmoid else "NLL"


def tiles(result: EvaluationResult) -> Iterator[dict[str, Any]]:
    """Headline metrics with their intervals."""
    names = MULTI_LABEL_TILES if result.multi_label else TILES
    known = {key: result.estimates[key] for key in names if key in result.estimates}
    if names is TILES and "accuracy" not in known:
        known = {"accuracy": Estimate(result.accuracy, math.nan, math.nan)} | known
    for number, (key, (value, low, high)) in enumerate(known.items()):
        name, explanation = names[key]
        lines = [f"95 % CI {interval(low, high)}"] if math.isfinite(low + high) else []
        if key == "accuracy":
            correct = round(result.accuracy * result.samples)
            explanation = f"{correct:,} of {result.samples:,} correct"
        lines += [explanation] if explanation else []
        yield tile(name, percent(value), lines, first=not number)


def tile(name: str, value: str, lines: Sequence[str] = (), *, first: bool = False) -> Any:
    lines = [line.replace(" %", f"{NBSP}%") for line in lines]
    return {"name": name, "value": value.replace(" ", NBSP), "lines": lines, "first": first}


def confusion_section(confusion: np.ndarray | None, names: Sequence[str]) -> dict[str, Any] | None:
    """The confusion matrix, the recall of each class, and the most confused pairs."""
    if confusion is None:
        return None
    classes, note = len(confusion), ""
    if classes > figures.MAX_DRAWN:
        note = f"The {figures.MAX_NAMED} most confused of {classes:,} classes."
    elif classes > figures.MAX_NAMED:
        note = "Hover over a cell for its classes."
    support, hits = confusion.sum(axis=1).tolist(), confusion.diagonal().tolist()
    order = sorted((n for n in range(classes) if support[n]), key=lambda n: hits[n] / support[n])
    title = "Recall by class"
    if len(order) > MAX_RECALL_BARS:
        order = [n for n in order if support[n] >= MIN_SUPPORT]
        shown = min(MAX_RECALL_BARS, len(order))
        title += f", lowest {shown} of {len(order):,} with at least {MIN_SUPPORT} images"
    return {
        "figure": inline_svg(figures.confusion_matrix(confusion, names)),
        "note": note,
        "compact": classes <= COMPACT,
        "recall_title": title,
        "recalls": [
            {
                "name": names[n],
                "share": hits[n] / support[n],
                "text": f"{hits[n]:,} of {support[n]:,}",
                "low": 2 * hits[n] < support[n],
            }
            for n in order[:MAX_RECALL_BARS]
        ],
        "pairs": [
            {
                "label": names[pair.label],
                "predicted": names[pair.predicted],
                "count": f"{pair.images:,}",
                "support": f"{support[pair.label]:,}",
                "share": pair.share,
            }
            for pair in most_confused(confusion, CONFUSED_PAIRS)
        ],
    }


def mistake_figures(
    mistakes: Sequence[Mistake], source: Dataset, names: Sequence[str]
) -> list[dict[str, Any]]:
    """Mistakes with their images; an image that can no longer be read is left out."""
    shown = []
    for mistake in mistakes:
        labels = mistake.label if isinstance(mistake.label, tuple) else (mistake.label,)
        known = not math.isnan(mistake.confidence)
        values = {
            "name": mistake.name,
            "label": ", ".join(names[number] for number in labels) or "none",
            "predicted": names[mistake.predicted],
            "confidence": f" ({100 * mistake.confidence:.0f}{NBSP}%)" if known else "",
            "image": thumbnail_url(source, mistake.index, THUMBNAIL),
        }
        shown.append(values)
    return shown


def weakest_classes(result: EvaluationResult) -> list[ClassMetrics]:
    """Classes with at least `MIN_SUPPORT` images, lowest F1 first."""
    enough = [c for c in result.classes if c.support >= MIN_SUPPORT]
    return sorted(enough, key=lambda c: 0.0 if math.isnan(c.f1) else c.f1)


def summary(result: EvaluationResult) -> Iterator[str]:
    """The result in sentences of plain text, with commands between backticks."""
    for note in result.notes:
        if note.startswith("the model was trained on"):
            yield f"{note.capitalize()}: {OPTIMISTIC}."
    what = "Top-1 class is among the labels" if result.multi_label else "Top-1 accuracy"
    estimate, n = result.estimates.get("accuracy"), f"n={result.samples:,}"
    if estimate is not None and math.isfinite(estimate.low + estimate.high):
        n = f"95 % CI {interval(estimate.low, estimate.high)}, {n}"
    yield f"{what}: {percent(result.accuracy)} ({n})."
    if result.calibration is not None and result.calibration.counts.any():
        yield calibration_summary(result.calibration)
    selective = result.accuracy_at_80
    if math.isfinite(selective) and result.accuracy < 1:
        line = f"Selective accuracy at 80 % coverage: {percent(selective)}"
        if selective - result.accuracy < SELECTIVE_GAIN and selective < 1:
            line += (
                ", about the same as at full coverage: low confidence does not indicate mistakes"
            )
        yield f"{line}."
    missed = [c for c in result.classes if c.support >= MIN_SUPPORT and c.recall < 1]
    if missed:
        least = min(missed, key=lambda c: (c.recall, -c.support))
        hits = f"{round(least.recall * least.support):,} of {least.support:,}"
        yield f"Lowest recall: “{least.name}”, {percent(least.recall)} ({hits})."
    for pair in [] if result.confusion is None else most_confused(result.confusion, 1):
        label, predicted = (result.classes[n].name for n in (pair.label, pair.predicted))
        yield (
            f"Most confused: “{label}” predicted as “{predicted}”, {pair.images:,} of "
            f"{result.classes[pair.label].support:,} ({100 * pair.share:.0f} %)."
        )


def calibration_summary(calibration: Calibration) -> str:
    """Calibrated, over- or underconfident, and what temperature scaling would do."""
    bins = np.flatnonzero(calibration.counts)
    counts, mean = calibration.counts[bins], calibration.confidence[bins]
    gaps = mean - calibration.accuracy[bins]
    ece = percent(calibration.ece)
    # The 95th percentile for a perfectly calibrated model: the accuracy of a bin with n predictions
    # at confidence c has variance c(1-c)/n; the ECE is a weighted sum of half-normal deviations.
    deviations = np.sqrt(mean * (1 - mean) / counts)
    spread = deviations * counts / counts.sum()
    noise_ece = math.sqrt(2 / math.pi) * spread.sum()
    noise_ece += 1.645 * math.sqrt((1 - 2 / math.pi) * (spread**2).sum())
    if not calibration.ece > max(CALIBRATED, noise_ece):
        small = calibration.ece <= CALIBRATED
        verdict = "Well calibrated" if small else "No miscalibration detected"
        noise = "" if small else ", within sampling noise"
        return f"{verdict}: ECE {ece}{noise}."
    overall = float((counts * gaps).sum() / counts.sum())
    sign = 1 if overall > 0 else -1
    kind = "Overconfident" if sign > 0 else "Underconfident"
    opposite = -sign * gaps > 2 * deviations  # beyond sampling noise
    if abs(overall) < calibration.ece / 2 and opposite.any():
        kind = "Over- and underconfident"
    worst = int(np.argmax(counts * gaps * sign))
    accuracy = percent(float(calibration.accuracy[bins][worst]))
    line = (
        f"{kind}: ECE {ece}; for example, accuracy {accuracy} at a mean confidence of "
        f"{percent(float(mean[worst]))}."
    )
    if calibration.ece_scaled < 0.9 * calibration.ece and math.isfinite(calibration.temperature):
        line += (
            f" Temperature scaling (T={calibration.temperature:.2g}) reduces the ECE to "
            f"{percent(calibration.ece_scaled)}: `vitrail evaluate … --save-temperature`."
        )
    return line


def run_page(
    *,
    title: str,
    facts: Mapping[str, str],  # model, parameters, data, time, …
    rows: Sequence[Mapping[str, Any]],  # lines of metrics.jsonl
    probe_note: str = "",  # if the linear probe that fine-tuning started from is the result
    choices: Sequence[str] = (),  # automatic settings, "what: reason"
    outcomes: Mapping[str, EvaluationResult] = EMPTY,  # by split
    sources: Mapping[str, Dataset] = EMPTY,  # for the images of mistakes
    class_names: Sequence[str] = (),
    settings: str = "",  # TOML
    timings: Mapping[str, float] = EMPTY,  # seconds by phase
    skipped: Mapping[str, str] = EMPTY,  # unreadable files, and why
    next_steps: Sequence[str] = (),  # commands, or sentences with `commands`
) -> str:
    headlines = [name for name in HEADLINES if name in facts]
    shown_mistakes = max(MAX_MISTAKES // max(1, len(outcomes)), 6)
    skipped, tiles, splits = dict(skipped), [], []
    for name, result in outcomes.items():
        correct = round(result.accuracy * result.samples)
        lines = [f"95 % CI {interval(*wilson_interval(correct, result.samples))}"]
        lines += [f"{correct:,} of {result.samples:,} correct"]
        lines += [] if result.top5 is None else [f"top-5: {percent(result.top5)}"]
        tiles.append(tile(f"{name} accuracy", percent(result.accuracy), lines, first=True))
        mistakes = []
        if name in sources:
            shown = result.mistakes[:shown_mistakes]
            mistakes = mistake_figures(shown, sources[name], class_names)
        confusion = confusion_section(result.confusion, class_names)
        splits.append({"name": name, "confusion": confusion, "mistakes": mistakes})
        skipped |= result.skipped
    total = sum(timings.values())
    return render(
        "run.html",
        title,
        facts,
        probe_note=probe_note,
        tiles=[*tiles, *({**tile(name, ""), "value": facts[name]} for name in headlines)],
        other_facts={k: v for k, v in facts.items() if k not in headlines},
        curves=dict(curves(rows)),
        splits=splits,
        choices=[choice.partition(": ")[::2] for choice in choices],
        skipped=skipped,
        timings=[
            {"name": name, "share": seconds / total, "text": duration(seconds), "low": False}
            for name, seconds in timings.items()
            if total > 0
        ],
        next_steps=next_steps,
        settings=settings.strip(),
    )


def curves(rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Charts of loss, accuracy, learning rate and throughput by step."""

    def by_split(metric: str) -> dict[str, Points]:
        names = dict.fromkeys(key for row in rows for key in row if key.endswith(f"/{metric}"))
        return {name.rpartition("/")[0]: points(rows, name) for name in names}

    loss = {"train": points(rows, "loss"), **by_split("loss")}
    values = [y for line in loss.values() for _, y in line if math.isfinite(y)] or [0.0]
    log = min(values) > 0 and max(values) > LOG_RATIO * min(values)
    accuracy = {"train": [], **by_split("accuracy")}  # colors as in the loss
    rate = {"learning rate": points(rows, "learning_rate")}
    speed = {"images per second": points(rows, "images_per_second")}
    charts = {
        "Loss": line_chart(loss, label="loss", noisy=["train"], log=log),
        "Accuracy": line_chart(accuracy, label="accuracy", percentages=True),
        "Learning rate": line_chart(rate, label="learning rate"),
        "Images per second": line_chart(speed, label="images per second", noisy=speed),
    }
    for name, figure in charts.items():
        if figure is not None:
            yield name, inline_svg(figure)


def points(rows: Sequence[Mapping[str, Any]], key: str) -> Points:
    """Values by step; a step that was repeated, as after a rollback, counts once."""
    series: list[tuple[float, float]] = []
    for row in rows:
        if key in row:
            while series and series[-1][0] >= row["step"]:
                series.pop()
            value = row[key]
            series.append((row["step"], math.nan if value is None else float(value)))
    return series


def write_robustness(
    folder: Path, rows: list[dict[str, Any]], facts: Mapping[str, str]
) -> list[Path]:
    """Write corruptions.html and corruptions.json."""
    known = {key: name for key, name in CORRUPTION_METRICS.items() if key in rows[0]}
    means = {key: mean_over_corruptions(rows, key) for key in known}
    tiles = []
    for key, name in known.items():
        corrupted, clean = fmean(means[key][s] for s in SEVERITIES), means[key][0]
        lines = [f"{percent(clean)} clean"]
        tiles.append(tile(f"{name}, corrupted", percent(corrupted), lines, first=key == "accuracy"))
    html = render(
        "robustness.html",
        "Common corruptions",
        facts,
        tiles=tiles,
        chart=inline_svg(figures.corruption_chart(rows, known)),
        means=[(name, list(means[key].values())) for key, name in known.items()],
        severities=["clean", *SEVERITIES],
    )
    page, values = folder / "corruptions.html", folder / "corruptions.json"
    write_atomic(page, html)
    write_atomic(values, json.dumps(dict(facts) | {"corruptions": rows}, indent=1))
    return [page, values]


def write_comparison(
    folder: Path,
    result: Comparison,
    source: Dataset,
    models: Sequence[Any],
    about: Mapping[str, Any],
) -> list[Path]:
    """Write comparison.html and comparison.json; `models` are None for exported ones."""
    value, low, high = (100 * number for number in result.difference)
    costs = [
        f"{cost['milliseconds']:.2f} ms per image, {byte_size(cost['bytes'])}"
        for cost in about["costs"]
    ]
    facts = {
        "data": about["data"],
        "same top-1 class": percent(result.agreement),
        "ECE of A and B": " / ".join(map(percent, result.ece)),
        "cost of A": costs[0],
        "cost of B": costs[1],
    }
    interval = [f"95 % CI {low:+.1f} to {high:+.1f}"]
    flips = {"Correct by A, wrong by B": result.lost, "Correct by B, wrong by A": result.gained}
    flips = [  # evenly spaced examples
        (title, len(rows), rows[:: -(-len(rows) // MAX_FLIPS) or 1].tolist())
        for title, rows in flips.items()
    ]
    html = render(
        "comparison.html",
        "Model comparison",
        facts,
        tiles=[
            tile("A: accuracy", percent(result.accuracy[0]), [about["a"]]),
            tile("B: accuracy", percent(result.accuracy[1]), [about["b"]]),
            tile("difference in points", f"{value:+.1f}", interval, first=True),
            tile("McNemar p", f"{result.p_value:.2g}", [f"n={result.samples:,}"]),
        ],
        summary=[result.verdict[:1].upper() + result.verdict[1:] + ".", *about["notes"]],
        classes=[c for c in result.classes if c.gained or c.lost],
        flips=[
            (title, count, [flip(index, result, source, models) for index in shown])
            for title, count, shown in flips
        ],
    )
    page, values = folder / "comparison.html", folder / "comparison.json"
    write_atomic(page, html)
    write_atomic(values, json.dumps(dict(about) | result.to_dict(), indent=1))
    return [page, values]


def flip(index: int, result: Comparison, source: Dataset, models: Sequence[Any]) -> dict[str, Any]:
    """Return an image with both predictions and, of Vision Transformers, both attention maps."""
    images = [thumbnail_url(source, index, FLIP_SIDE)]
    for model in filter(None, models):
        with suppress(ConfigError):  # a model without attention
            for image in load_samples(model, source, [index], {}):
                heat = rollout(model, image.tensor[None])[0].cpu().numpy()
                drawn = overlay(image.pixels, heat, image.box, offset=token_offset(model))
                drawn.thumbnail((FLIP_SIDE, FLIP_SIDE))
                images.append(data_url(to_jpeg(drawn), "jpeg"))
    return {"name": source.name(index), "images": images, **result.at(index)}


def write_dataset_check(
    report: DatasetReport, folder: str | os.PathLike[str], labels: Mapping[str, Any] | None = None
) -> Path:
    """Write `index.html` and a contact sheet for each class; return the path of the page.

    `labels` are the fields of `LabelCheck` of probing/label_errors.py.
    """
    folder = Path(folder)
    datasets = open_splits(report.reference)
    sheets = []
    for number, name in enumerate(report.classes):
        png = contact_sheet(datasets, name)
        slug = re.sub(r"[^\w-]+", "-", name)[:60]
        write_atomic(folder / "sheets" / f"{number:04}-{slug}.png", png)
        if number < MAX_SHEETS:
            total = sum(report.counts[name].values())
            sheets.append({"name": name, "total": total, "image": data_url(png)})
    write_atomic(folder / "index.html", dataset_page(report, datasets, sheets, labels))
    return folder / "index.html"


def dataset_page(
    report: DatasetReport,
    datasets: Mapping[str, ImageDataset],
    sheets: Sequence[Mapping[str, Any]],
    labels: Mapping[str, Any] | None = None,
) -> str:
    def shown(samples: Sequence[SampleInfo]) -> list[dict[str, Any]]:
        images = [thumbnail(datasets[x.split], x.index, SHEET_SIDE) for x in samples[:MAX_SHOWN]]
        return [
            {"sample": sample, "image": None if image is None else data_url(to_png(image))}
            for sample, image in zip(samples, images, strict=False)
        ]

    def suspects(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            dict(row) | {"image": thumbnail_url(datasets[row["split"]], row["index"], THUMBNAIL)}
            for row in rows[:MAX_SUSPECTS]
        ]

    duplicates = {
        "In more than one split": report.leaks,
        "With more than one label": report.conflicts,
        "More than once in a split": report.repeated,
    }
    odd = {
        "Blank images": report.blank,
        "Much smaller than the others": report.small,
        "Gray among color images": report.gray,
    }
    facts = {"images": f"{report.images:,}", "classes": f"{len(report.classes):,}"}
    for name, sides in (("width", report.width), ("height", report.height)):
        if sides is not None:
            more = f" to {sides.most} (median {sides.median})" if sides.most > sides.least else ""
            facts[name] = f"{sides.least}{more}"
    if report.kinds:
        facts["kinds"] = ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items())
    return render(
        "dataset_check.html",
        f"Dataset check: {Path(report.reference).name or report.reference}",
        facts,
        report=report,
        duplicates=[
            (title, len(groups), [(group, shown(group.members)) for group in groups[:MAX_SHOWN]])
            for title, groups in duplicates.items()
        ],
        odd=[(title, len(samples), shown(samples)) for title, samples in odd.items()],
        sheets=sheets,
        labels=labels and {**labels, "shown": suspects(labels["errors"])},
        outliers=suspects(labels["outliers"]) if labels else [],
        max_shown=MAX_SHOWN,
    )


def contact_sheet(datasets: Mapping[str, ImageDataset], name: str) -> bytes:
    """Return a PNG with thumbnails of a class in rows, evenly spaced over all splits."""
    locations = []
    for dataset in datasets.values():
        if name in dataset.classes:
            number, labels = dataset.classes.index(name), dataset.labels()
            if isinstance(labels, LabelSets):
                indices = [row for row in range(len(labels)) if number in labels[row]]
            else:
                indices = np.flatnonzero(labels == number).tolist()
            locations += [(dataset, index) for index in indices]
    picked = [locations[n] for n in evenly_spaced(len(locations), IMAGES_PER_CLASS)]
    thumbnails = [thumbnail(dataset, index, SHEET_SIDE) for dataset, index in picked]
    images = [image for image in thumbnails if image is not None]  # readable
    step = SHEET_SIDE + SHEET_GAP
    columns = min(SHEET_COLUMNS, max(len(images), 1))
    rows = max(-(-len(images) // SHEET_COLUMNS), 1)
    sheet = Image.new("RGBA", (columns * step - SHEET_GAP, rows * step - SHEET_GAP))
    for number, image in enumerate(images):
        left = number % SHEET_COLUMNS * step + (SHEET_SIDE - image.width) // 2
        top = number // SHEET_COLUMNS * step + (SHEET_SIDE - image.height) // 2
        sheet.paste(image, (left, top))
    return to_png(sheet)
