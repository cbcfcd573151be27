"""Report of `vitrail check` as an HTML page: recommendations, counts, problems, example images.

    write_page(report, "report/")       report/index.html and report/sheets/*.png

The page is self-contained. `PAGE` is also the skeleton of other reports.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from PIL import Image

from vitrail.data.check import DatasetReport, SampleInfo
from vitrail.data.datasets import ImageDataset, LabelSets, open_splits
from vitrail.data.storage import write_atomic
from vitrail.data.thumbnails import THUMBNAIL, data_url, thumbnail, to_png

GAP = 4
COLUMNS = 8
IMAGES_PER_CLASS = 24
MAX_SHEETS = 60  # on the page; those of other classes are files only
MAX_SHOWN = 30  # of each problem; the rest is counted

PAGE = Template("""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'$more_policy">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1d1d1f; --paper: #fff; --soft: #6b6b70; --line: #ddd;
  --card: #f5f5f4; --accent: #9a3412; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8e8ea; --paper: #161618; --soft: #a0a0a6; --line: #38383c; --card: #212124;
    --accent: #fdba74; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 56rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
.soft { color: var(--soft); font-size: .9rem; }
.verdict { background: var(--card); border-left: 4px solid var(--accent); border-radius: 4px;
  padding: .75rem 1rem .75rem 2.2rem; margin: 1.25rem 0; }
.verdict li { margin: .35rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .9rem .3rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; overflow-wrap: normal; }
.zero { color: var(--accent); font-weight: 600; }
.twins { display: flex; flex-wrap: wrap; gap: .75rem; padding: .4rem 0 .75rem;
  margin-bottom: .75rem;
  border-bottom: 1px solid var(--line); }
figure { margin: 0; width: 12.5rem; max-width: 100%; }
figure img { display: block; border-radius: 4px; margin-bottom: .3rem; }
figcaption { font-size: .8rem; color: var(--soft); line-height: 1.35; }
figcaption b { color: var(--ink); }
.sheet { max-width: 100%; height: auto; border-radius: 4px; }
dl { margin: 0; } dt { font-weight: 600; } dd { margin: 0 0 .6rem; color: var(--soft); }
$more_style</style>
<h1>$title</h1>
<div class="soft">$facts</div>
$body
</html>
""")


def csp_hash(text: str) -> str:
    """Return the source expression of an inline script or style in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def write_page(report: DatasetReport, folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` and a contact sheet for each class; return the path of the page."""
    folder = Path(folder)
    datasets = open_splits(report.reference)
    sheets = []
    for number, name in enumerate(report.classes):
        png = contact_sheet(class_thumbnails(datasets, name))
        slug = re.sub(r"[^\w-]+", "-", name)[:60]
        write_atomic(folder / "sheets" / f"{number:04}-{slug}.png", png)
        if number < MAX_SHEETS:
            sheets.append((name, png))
    write_atomic(folder / "index.html", render(report, datasets, sheets))
    return folder / "index.html"


def render(
    report: DatasetReport,
    datasets: dict[str, ImageDataset],
    sheets: Sequence[tuple[str, bytes]],
) -> str:
    items = "".join(f"<li>{escape(line)}" for line in report.recommendations)
    body = [f'<ul class="verdict">{items}</ul>', counts_table(report)]
    groups = report.duplicates + report.near_duplicates
    for title, shown in (
        ("In more than one split", report.leaks),
        ("With more than one label", [g for g in groups if g.conflict and not g.leak]),
        ("More than once in a split", [g for g in groups if not (g.leak or g.conflict)]),
    ):
        if shown:
            body.append(f"<h2>{title} ({len(shown):,})</h2>")
        for group in shown[:MAX_SHOWN]:
            kind = "identical file" if group.exact else "near duplicate"
            body += [f'<div class="soft">{kind}</div>', figures(group.members, datasets)]
        if len(shown) > MAX_SHOWN:
            body.append(f'<p class="soft">and {len(shown) - MAX_SHOWN:,} more</p>')
    if report.unreadable:
        body.append(f"<h2>Unreadable files ({len(report.unreadable):,})</h2><dl>")
        body += [f"<dt>{escape(f.name)}<dd>{escape(f.reason)}" for f in report.unreadable]
        body.append("</dl>")
    for title, samples in (
        ("Blank images", report.blank),
        ("Much smaller than the others", report.small),
        ("Gray among color images", report.gray),
    ):
        if samples:
            body.append(f"<h2>{title} ({len(samples):,})</h2>{figures(samples, datasets)}")
    body.append("<h2>Examples of each class</h2>")
    for name, png in sheets:
        total = sum(report.counts[name].values())
        body.append(f'<h3>{escape(name)} <span class="soft">{total:,}</span></h3>')
        body.append(f'<img class="sheet" alt="images of {escape(name)}" src="{data_url(png)}">')
    if len(sheets) < len(report.classes):
        more = len(report.classes) - len(sheets)
        body.append(f'<p class="soft">{more:,} more classes are in the folder sheets.</p>')
    return PAGE.substitute(
        title=escape(f"Dataset check: {Path(report.reference).name or report.reference}"),
        facts=escape(summary(report)),
        body="\n".join(body),
        more_style="",
        more_policy="",
    )


def summary(report: DatasetReport) -> str:
    """Return number, size and kind of the images in one line."""
    line = f"{report.images:,} images, {len(report.classes):,} classes"
    if report.height and report.width:
        w, h = report.width, report.height
        line += f" · width {w.least} to {w.most} (median {w.median})"
        line += f", height {h.least} to {h.most} (median {h.median})"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in report.kinds.items())
    return f"{line} · {kinds}" if kinds else line


def counts_table(report: DatasetReport) -> str:
    splits = list(report.splits)
    head = "".join(f"<th>{escape(name)}" for name in ["class", *splits, "all"])
    rows = []
    for name, counts in report.counts.items():
        numbers = [*(counts[split] for split in splits), sum(counts.values())]
        cells = "".join(f"<td>{n:,}" if n else '<td class="zero">0' for n in numbers)
        rows.append(f"<tr><td>{escape(name)}{cells}")
    table = "\n".join([f"<table><tr>{head}", *rows, "</table>"])
    return f'<h2>Images per class</h2><div class="wide">{table}</div>'


def figures(samples: Sequence[SampleInfo], datasets: dict[str, ImageDataset]) -> str:
    """Return a row of images with their names."""
    shown = []
    for sample in samples[:MAX_SHOWN]:
        small = thumbnail(datasets[sample.split], sample.index)
        image = "" if small is None else f'<img alt="" src="{data_url(to_png(small))}">'
        caption = f"<b>{escape(sample.split)} · {escape(', '.join(sample.labels))}</b><br>"
        shown.append(
            f"<figure>{image}<figcaption>{caption}{escape(sample.name)}</figcaption></figure>"
        )
    if len(samples) > MAX_SHOWN:
        shown.append(f'<p class="soft">and {len(samples) - MAX_SHOWN:,} more</p>')
    return f'<div class="twins">{"".join(shown)}</div>'


def contact_sheet(thumbnails: Iterable[Image.Image]) -> bytes:
    """Return a PNG with thumbnails in rows, transparent between them."""
    images = list(thumbnails)
    step = THUMBNAIL + GAP
    columns = min(COLUMNS, max(len(images), 1))
    rows = max(-(-len(images) // COLUMNS), 1)
    sheet = Image.new("RGBA", (columns * step - GAP, rows * step - GAP))
    for number, image in enumerate(images):
        left = number % COLUMNS * step + (THUMBNAIL - image.width) // 2
        top = number // COLUMNS * step + (THUMBNAIL - image.height) // 2
        sheet.paste(image, (left, top))
    return to_png(sheet)


def class_thumbnails(datasets: dict[str, ImageDataset], name: str) -> list[Image.Image]:
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
    images = (thumbnail(*locations[position]) for position in chosen)
    return [image for image in images if image is not None]
