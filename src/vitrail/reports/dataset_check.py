"""The page of `vitrail check --out`: recommendations, counts, problems, example images.

write_dataset_check(report, "report/")       report/index.html and report/sheets/*.png
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitrail.data.check import DatasetReport, SampleInfo
from vitrail.data.datasets import ImageDataset, LabelSets, open_splits
from vitrail.data.decode import thumbnail, to_png
from vitrail.data.storage import write_atomic
from vitrail.reports.html import render
from vitrail.reports.images import data_url

SIDE = 96  # pixels of a thumbnail
GAP = 4
COLUMNS = 8
IMAGES_PER_CLASS = 24
MAX_SHEETS = 60  # on the page; those of other classes are files only
MAX_SHOWN = 30  # of each problem; the rest is counted


def write_dataset_check(report: DatasetReport, folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` and a contact sheet for each class; return the path of the page."""
    folder = Path(folder)
    datasets = open_splits(report.reference)
    sheets = []
    for number, name in enumerate(report.classes):
        png = contact_sheet(class_thumbnails(datasets, name))
        slug = re.sub(r"[^\w-]+", "-", name)[:60]
        write_atomic(folder / "sheets" / f"{number:04}-{slug}.png", png)
        if number < MAX_SHEETS:
            total = sum(report.counts[name].values())
            sheets.append({"name": name, "total": total, "image": data_url(png)})
    write_atomic(folder / "index.html", dataset_page(report, datasets, sheets))
    return folder / "index.html"


def dataset_page(
    report: DatasetReport,
    datasets: Mapping[str, ImageDataset],
    sheets: Sequence[Mapping[str, Any]],
) -> str:
    def shown(samples: Sequence[SampleInfo]) -> list[dict[str, Any]]:
        figures = []
        for sample in samples[:MAX_SHOWN]:
            image = thumbnail(datasets[sample.split], sample.index, SIDE)
            url = None if image is None else data_url(to_png(image))
            figures.append({"sample": sample, "image": url})
        return figures

    groups = report.duplicates + report.near_duplicates
    duplicates = {
        "In more than one split": report.leaks,
        "With more than one label": [g for g in groups if g.conflict and not g.leak],
        "More than once in a split": [g for g in groups if not (g.leak or g.conflict)],
    }
    odd = {
        "Blank images": report.blank,
        "Much smaller than the others": report.small,
        "Gray among color images": report.gray,
    }
    facts = {"images": f"{report.images:,}", "classes": f"{len(report.classes):,}"}
    for name, sides in (("width", report.width), ("height", report.height)):
        if sides is not None:
            facts[name] = f"{sides.least} to {sides.most} (median {sides.median})"
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
        max_shown=MAX_SHOWN,
    )


def contact_sheet(images: Sequence[Image.Image]) -> bytes:
    """Return a PNG with thumbnails in rows, transparent between them."""
    step = SIDE + GAP
    columns = min(COLUMNS, max(len(images), 1))
    rows = max(-(-len(images) // COLUMNS), 1)
    sheet = Image.new("RGBA", (columns * step - GAP, rows * step - GAP))
    for number, image in enumerate(images):
        left = number % COLUMNS * step + (SIDE - image.width) // 2
        top = number // COLUMNS * step + (SIDE - image.height) // 2
        sheet.paste(image, (left, top))
    return to_png(sheet)


def class_thumbnails(datasets: Mapping[str, ImageDataset], name: str) -> list[Image.Image]:
    """Return thumbnails of a class, evenly spaced over all splits; unreadable ones are skipped."""
    locations = []
    for dataset in datasets.values():
        if name in dataset.classes:
            number, labels = dataset.classes.index(name), dataset.labels()
            if isinstance(labels, LabelSets):
                indices = [row for row, classes in enumerate(labels) if number in classes]
            else:
                indices = np.flatnonzero(labels == number).tolist()
            locations += [(dataset, index) for index in indices]
    if not locations:
        return []
    chosen = np.unique(np.linspace(0, len(locations) - 1, IMAGES_PER_CLASS).astype(int))
    picked = [locations[position] for position in chosen]
    images = [thumbnail(dataset, index, SIDE) for dataset, index in picked]
    return [image for image in images if image is not None]
