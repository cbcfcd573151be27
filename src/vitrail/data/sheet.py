"""The health of a data set as one page: verdict, counts, problems, and pictures of each class.

    write_page(health, "report/")       report/index.html and report/sheets/*.png

The page asks nothing of the network: pictures and style are inside it.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from PIL import Image

from vitrail.data.files import write_whole
from vitrail.data.health import Health, Member, Twins
from vitrail.data.samples import LabelSets, Samples
from vitrail.data.sources import open_source
from vitrail.data.thumbnails import THUMBNAIL, inline, thumbnail, to_png

GAP = 4
COLUMNS = 8
PER_CLASS = 24
SHEETS = 60  # classes with pictures on the page; the others have theirs as files only
SHOWN = 30  # of each kind of problem; the rest is counted

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


def policy_hash(text: str) -> str:
    """How a policy names a script or a style that is inside the page."""
    found = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(found).decode('ascii')}'"


def write_page(health: Health, folder: str | os.PathLike[str]) -> Path:
    """Write `index.html` and a PNG for each class into a folder; the path of the page."""
    folder = Path(folder)
    parts = {split: open_source(health.reference, split) for split in health.splits}
    sheets = []
    for number, name in enumerate(health.classes):
        png = contact_sheet(spaced(parts, name, PER_CLASS))
        slug = re.sub(r"[^\w-]+", "-", name)[:60]
        write_whole(folder / "sheets" / f"{number:04}-{slug}.png", png)
        if number < SHEETS:
            sheets.append((name, png))
    write_whole(folder / "index.html", page(health, parts, sheets))
    return folder / "index.html"


def page(health: Health, parts: dict[str, Samples], sheets: Sequence[tuple[str, bytes]]) -> str:
    """The page as text; nothing in it points outside."""
    verdict = "".join(f"<li>{escape(sentence)}" for sentence in health.verdict)
    body = [f'<ul class="verdict">{verdict}</ul>', counts_table(health)]
    others = [
        ("In more than one split", health.leaks),
        ("Under more than one label", [t for t in health.conflicts if not t.leak]),
        ("More than once in a split", [t for t in inside(health) if not t.conflict]),
    ]
    body += twin_sections(others, parts)
    if health.unreadable:
        body.append(f"<h2>Files that cannot be read ({len(health.unreadable):,})</h2><dl>")
        for found in health.unreadable:
            body.append(f"<dt>{escape(found.name)}<dd>{escape(found.reason)}")
        body.append("</dl>")
    for title, members in (
        ("Of a single color", health.blank),
        ("Much smaller than the rest", health.small),
        ("Gray among pictures in color", health.gray),
    ):
        if members:
            body.append(f"<h2>{title} ({len(members):,})</h2>{figures(members, parts)}")
    body.append("<h2>Pictures of each class</h2>")
    for name, png in sheets:
        total = sum(health.counts[name].values())
        body.append(f'<h3>{escape(name)} <span class="soft">{total:,}</span></h3>')
        body.append(f'<img class="sheet" alt="pictures of {escape(name)}" src="{inline(png)}">')
    if len(sheets) < len(health.classes):
        left = len(health.classes) - len(sheets)
        body.append(f'<p class="soft">{left:,} more classes have theirs in the folder sheets.</p>')
    title = escape(f"Health of {Path(health.reference).name or health.reference}")
    text = "\n".join(body)
    return PAGE.substitute(
        title=title, facts=escape(facts(health)), body=text, more_style="", more_policy=""
    )


def facts(health: Health) -> str:
    """One line: how many, how large, of what kind."""
    line = f"{health.pictures:,} pictures, {len(health.classes):,} classes"
    if health.height and health.width:
        (w, h) = health.width, health.height
        line += f" · {w.least} to {w.most} wide (median {w.median})"
        line += f", {h.least} to {h.most} high (median {h.median})"
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in health.kinds.items())
    return f"{line} · {kinds}" if kinds else line


def inside(health: Health) -> list[Twins]:
    return [twins for twins in health.duplicates + health.near_duplicates if not twins.leak]


def counts_table(health: Health) -> str:
    splits = list(health.splits)
    head = "".join(f"<th>{escape(name)}" for name in ["class", *splits, "all"])
    rows = []
    for name, counts in health.counts.items():
        numbers = [*(counts[split] for split in splits), sum(counts.values())]
        cells = "".join(f"<td>{n:,}" if n else '<td class="zero">0' for n in numbers)
        rows.append(f"<tr><td>{escape(name)}{cells}")
    table = "\n".join([f"<table><tr>{head}", *rows, "</table>"])
    return f'<h2>How many</h2><div class="wide">{table}</div>'


def twin_sections(
    sections: Iterable[tuple[str, Sequence[Twins]]], parts: dict[str, Samples]
) -> Iterator[str]:
    """A heading for each kind of duplicates, and their pictures side by side."""
    for title, twins in sections:
        if not twins:
            continue
        yield f"<h2>{title} ({len(twins):,})</h2>"
        for pair in twins[:SHOWN]:
            yield f'<div class="soft">{"the same file" if pair.exact else "looks the same"}</div>'
            yield figures(pair.members, parts)
        if len(twins) > SHOWN:
            yield f'<p class="soft">and {len(twins) - SHOWN:,} more</p>'


def figures(members: Sequence[Member], parts: dict[str, Samples]) -> str:
    """Some pictures in a row, and what they are called."""
    shown = []
    for member in members[:SHOWN]:
        small = thumbnail(parts[member.split], member.index)
        image = "" if small is None else f'<img alt="" src="{inline(to_png(small))}">'
        about = f"<b>{escape(member.split)} · {escape(', '.join(member.labels))}</b><br>"
        shown.append(
            f"<figure>{image}<figcaption>{about}{escape(member.name)}</figcaption></figure>"
        )
    if len(members) > SHOWN:
        shown.append(f'<p class="soft">and {len(members) - SHOWN:,} more</p>')
    return f'<div class="twins">{"".join(shown)}</div>'


def contact_sheet(thumbnails: Iterable[Image.Image]) -> bytes:
    """A PNG of small pictures in rows, clear between them."""
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


def spaced(parts: dict[str, Samples], name: str, count: int) -> Iterator[Image.Image]:
    """Thumbnails of a class, evenly spaced over all splits; what cannot be read is left out."""
    places = [(part, row) for part in parts.values() for row in rows_of(part, name)]
    for chosen in np.unique(np.linspace(0, len(places) - 1, count).astype(int)) if places else ():
        small = thumbnail(*places[chosen])
        if small is not None:
            yield small


def rows_of(part: Samples, name: str) -> list[int]:
    if name not in part.classes:
        return []
    number, labels = part.classes.index(name), part.labels()
    if isinstance(labels, LabelSets):
        return [row for row, found in enumerate(labels) if number in found]
    return np.flatnonzero(labels == number).tolist()
