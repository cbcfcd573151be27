"""Reports → docs/reproduction.md, words for a terminal, and a folder that can be read back.

docs/reproduction.md          markdown(reports): all experiments, with a summary
docs/reproduction/*.svg       their figures (write_pictures)
FOLDER/report.md, report.json and figures: one experiment (write, read)
"""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import Any

from vitrail.checkpoints.files import read_json, write_json
from vitrail.data.storage import write_atomic
from vitrail.errors import CheckpointError
from vitrail.reproduction.report import Picture, Report, Table, Verdict

DATA = "--data fashion_mnist.npz"
DASHES = {"", "-", "\u2013", "\u2014"}  # of a cell that has no number
LONGEST_NUMBER = 30  # letters, with interval and unit
VERDICTS: Mapping[Verdict, str] = {
    "holds": "what came out here says what the paper says",
    "holds in part": "some of the claim is seen here, some is not",
    "does not hold": "at this scale the numbers say otherwise",
    "cannot be told": "what is claimed is smaller here than the noise between runs",
    "checked": "nothing was trained: published numbers beside what can be computed here",
}
INTRODUCTION = f"""\
# The paper on a laptop

Dosovitskiy et al. 2021, *An Image is Worth 16x16 Words* (arXiv:2010.11929v2), claim by claim: what
the paper says, what was done here, what came out, and whether it holds. Every table and figure is
made by one command that takes minutes on two cores; all of them, and this page, by

```console
$ vitrail reproduce all {DATA} --docs docs
```

Numbers that are called *published* are the paper's, from models and data that are far larger; all
others were computed or measured here. They stand side by side so that what follows from them can be
compared, not their size. After ± stands how far a mean over seeds may be off, 19 times of 20; the
deviation between seeds is pooled over all runs of an experiment.

A verdict is computed from the numbers. Where models were trained, each section lists the parts of
its claim: one is seen if all of its interval lies above zero, and refuted if all of it lies below.
The claim holds if all parts are seen, and in part if some are; it does not hold if none is and one
is refuted; else it cannot be told. Sections with another rule state it. All of it is about this
scale: a claim that does not hold here may well hold where the paper makes it."""


def markdown(reports: Sequence[Report], pictures: str = "reproduction") -> str:
    """The page of all experiments; `pictures` is the folder of figures as seen from it."""
    meanings = "\n".join(f"- **{verdict}**: {why}" for verdict, why in VERDICTS.items())
    counts = Counter(report.verdict for report in reports)
    tally = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
    links = [f"[{report.name}](#{anchor(heading(report))})" for report in reports]
    summary = [
        (link, report.title, report.verdict) for link, report in zip(links, reports, strict=True)
    ]
    blocks = [
        INTRODUCTION,
        f"## Summary\n\nVerdicts: {tally}.",
        in_markdown(("experiment", "claim", "verdict"), summary),
        meanings,
        *(block for report in reports for block in section(report, pictures)),
    ]
    return "\n\n".join(blocks) + "\n"


def heading(report: Report) -> str:
    return f"{report.name}: {report.title}"


def anchor(words: str) -> str:
    """How GitHub calls the place of a heading."""
    return re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")


def section(report: Report, pictures: str = "", level: str = "##") -> Iterator[str]:
    """One experiment as blocks of Markdown."""
    yield f"{level} {heading(report)}"
    yield f"**The paper.** {report.claim}"
    yield f"**Here.** {report.did}"
    for table in report.tables:
        yield f"*{table.caption}*"
        yield in_markdown(table.head, table.rows)
    for picture in report.pictures:
        name = f"{pictures}/{picture.file}" if pictures else picture.file
        caption = re.sub(r"([\[\]])", r"\\\1", " ".join(picture.caption.split()))
        yield f"![{caption}]({name})"
        yield f"*{' '.join(picture.caption.split())}*"
    yield f"**What came out.** {report.found}"
    yield f"**Verdict: {report.verdict}.**"
    if report.command:
        yield f"```console\n$ {report.command}\n```"


def in_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; columns of numbers are set to the right."""
    marks = ["---:" if right else "---" for right in numeric(rows, len(head))]
    lines = [[cell(words) for words in row] for row in (head, *rows)]
    lines.insert(1, marks)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(words: str) -> str:
    """Text that cannot end its cell."""
    return " ".join(words.split()).replace("|", "\\|")


def numeric(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Which columns hold numbers; the first names the rows."""
    return [
        column > 0
        and any(is_number(row[column]) for row in rows)
        and all(is_number(row[column]) or row[column] in DASHES for row in rows)
        for column in range(columns)
    ]


def is_number(words: str) -> bool:
    """`64.2 ± 0.3 %` is one; `5-shot accuracy` is not."""
    begins = re.match(r"[-+\u2212<>]?\s?\.?\d", words) and not re.match(r"\d+-[A-Za-z]", words)
    return bool(begins) and len(words) <= LONGEST_NUMBER


def words(report: Report, width: int = 80) -> Iterator[str]:
    """One experiment as lines for a terminal."""
    yield from wrap(heading(report), width)
    yield ""
    yield from paragraph(f"The paper: {report.claim}", width)
    yield from paragraph(f"Here: {report.did}", width)
    for table in report.tables:
        yield ""
        yield from paragraph(table.caption, width)
        yield ""
        yield from aligned(table, width)
    yield ""
    yield from paragraph(f"What came out: {report.found}", width)
    yield from paragraph(f"Verdict: {report.verdict} ({VERDICTS[report.verdict]})", width)


def paragraph(words: str, width: int) -> list[str]:
    return wrap(words, width, subsequent_indent="  ", break_on_hyphens=False)


def aligned(table: Table, width: int) -> Iterator[str]:
    """Rows whose columns stand under each other; a cell too wide for its column is wrapped."""
    rows = [[" ".join(words.split()) for words in row] for row in (table.head, *table.rows)]
    columns = [list(column) for column in zip(*rows, strict=True)]
    if sum(map(longest_word, columns)) + 2 * (len(columns) - 1) > width:
        yield from stacked(rows, width)
        return
    widths = narrowed(columns, width)
    to_right = numeric(table.rows, len(table.head))
    wrapped = [
        [wrap(words, room) or [""] for words, room in zip(row, widths, strict=True)] for row in rows
    ]
    tall = any(len(lines) > 1 for row in wrapped[1:] for lines in row)
    for number, row in enumerate(wrapped):
        if tall and number:
            yield ""
        for line in range(max(map(len, row))):
            cells = [lines[line] if line < len(lines) else "" for lines in row]
            yield "  ".join(
                f"{words:>{room}}" if right else f"{words:{room}}"
                for words, room, right in zip(cells, widths, to_right, strict=True)
            ).rstrip()


def stacked(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A paragraph for each row, where the columns do not fit beside each other."""
    (_, *names), *others = rows
    for first, *values in others:
        told = [f"{name} {value}" for name, value in zip(names, values, strict=True) if value]
        yield from paragraph(f"{first}: {', '.join(told)}", width)


def narrowed(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """How wide each column may be: the widest give way first, down to their longest words."""
    widths = [max(map(len, column)) for column in columns]
    longest = [longest_word(column) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        widest = max(range(len(widths)), key=lambda n: (widths[n] > longest[n], widths[n]))
        widths[widest] -= 1
    return widths


def longest_word(column: Sequence[str]) -> int:
    return max(len(word) for words in column for word in words.split() or [""])


def write(report: Report, folder: Path) -> Path:
    """The report and its pictures as files, report.json last; the path of report.md."""
    write_pictures(report, folder)
    path = folder / "report.md"
    write_atomic(path, "\n\n".join(section(report, level="#")) + "\n")
    pictures = [{"file": it.file, "caption": it.caption} for it in report.pictures]
    values = {name: value for name, value in vars(report).items() if name != "pictures"}
    tables = [asdict(table) for table in report.tables]
    write_json(folder / "report.json", plain(values | {"tables": tables, "pictures": pictures}))
    return path


def write_pictures(report: Report, folder: Path) -> None:
    for picture in report.pictures:
        write_atomic(folder / picture.file, picture.content)


def plain(value: Any) -> Any:
    """The value as JSON has it; a number that is none is null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # NumPy's and torch's
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(folder: Path) -> Report | None:
    """A report that was written before; None if it or one of its pictures is not there."""
    path = folder / "report.json"
    if not path.exists():
        return None
    values = read_json(path)
    try:
        names = [it["file"] for it in values["pictures"]]
        if not all((folder / name).exists() for name in names):
            return None
        pictures = tuple(
            Picture(**it, content=read_picture(folder / it["file"])) for it in values["pictures"]
        )
        tables = tuple(
            Table(
                caption=it["caption"],
                head=tuple(it["head"]),
                rows=tuple(tuple(row) for row in it["rows"]),
            )
            for it in values["tables"]
        )
        return Report(**values | {"tables": tables, "pictures": pictures})
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path} is no report of this version; remove {folder}, and it is made again"
        ) from None


def read_picture(path: Path) -> str | bytes:
    return path.read_text(encoding="utf-8") if path.suffix == ".svg" else path.read_bytes()
