"""Reports: claim, method, result and verdict of an experiment, as Markdown and JSON.

reproduction/README.md       markdown(reports): all experiments with a summary
reproduction/figures/        their figures (write_figures)
OUT/NAME/report.md, .json    one experiment with its figures (write, read)
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitrail.checkpoints.files import read_json, write_json
from vitrail.data.storage import write_atomic
from vitrail.errors import CheckpointError

Verdict = Literal["holds", "holds in part", "does not hold", "inconclusive", "checked"]
# Titles, claims, methods and results of all experiments; the braces are filled in by Python.
TEXT: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("experiments.toml").read_text(encoding="utf-8")
)
MAX_NUMBER = 30  # characters of a number with its interval and unit


@dataclass(frozen=True)
class Table:
    """Rows of text; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """An SVG or PNG file."""

    file: str  # "figure5.svg": unique among all experiments
    caption: str
    content: bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """One experiment, as in reproduction/README.md."""

    name: str  # as in `vitrail reproduce NAME`
    title: str
    claim: str  # of the paper, with its published numbers
    method: str
    result: str
    verdict: Verdict
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    command: str = ""  # that reproduces it
    published: bool = False  # no model is trained; the tables list published numbers
    data: Mapping[str, Any] = field(default_factory=dict)  # the numbers, machine-readable


def markdown(reports: Sequence[Report], folder: str = "figures") -> str:
    """Return the page of all experiments; `folder` holds its figures."""
    counts = Counter(report.verdict for report in reports)
    summary = [
        (f"[{report.name}](#{anchor(heading(report))})", report.title, report.verdict)
        for report in reports
    ]
    blocks = [
        TEXT["introduction"].strip(),
        "## Summary",
        f"Verdicts: {', '.join(f'{v} {counts[v]}' for v in get_args(Verdict) if counts[v])}.",
        markdown_table(("experiment", "claim", "verdict"), summary),
        "\n".join(f"- **{verdict}**: {why}" for verdict, why in TEXT["verdicts"].items()),
        *(block for report in reports for block in section(report, f"{folder}/")),
    ]
    return "\n\n".join(blocks) + "\n"


def heading(report: Report) -> str:
    return f"{report.name}: {report.title}"


def anchor(text: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def section(report: Report, folder: str = "", level: str = "##") -> Iterator[str]:
    """Yield one experiment as blocks of Markdown.

    The page of all experiments leaves out tables of published numbers, which the command prints.
    """
    yield f"{level} {heading(report)}"
    yield f"**Paper.** {report.claim}"
    yield f"**Method.** {report.method}"
    for table in report.tables if level == "#" or not report.published else ():
        yield f"*{table.caption}*"
        yield markdown_table(table.head, table.rows)
    for figure in report.figures:
        caption = re.sub(r"([\[\]])", r"\\\1", " ".join(figure.caption.split()))
        yield f"![{caption}]({folder}{figure.file})"
    yield f"**Result.** {report.result}"
    yield f"**Verdict: {report.verdict}.**"
    if report.command:
        yield f"```console\n$ {report.command}\n```"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; numeric columns are right-aligned."""
    lines = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines.insert(1, ["---:" if right else "---" for right in numeric_columns(rows, len(head))])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def numeric_columns(rows: Sequence[Sequence[str]], columns: int) -> list[bool]:
    """Which columns hold numbers or dashes only; the first column names the rows."""

    def is_number(cell: str) -> bool:  # `64.2 ± 0.3 %` is one, `5-shot accuracy` is not
        begins = re.match(r"[-+\u2212<>]?\s?\.?\d", cell) and not re.match(r"\d+-[A-Za-z]", cell)
        return bool(begins) and len(cell) <= MAX_NUMBER

    return [
        column > 0
        and any(is_number(row[column]) for row in rows)
        and all(is_number(row[column]) or row[column] in ("", "-", "\u2014") for row in rows)
        for column in range(columns)
    ]


def write(report: Report, folder: Path) -> None:
    """Write the report and its figures; report.json last."""
    write_figures(report, folder)
    write_atomic(folder / "report.md", "\n\n".join(section(report, level="#")) + "\n")
    write_json(folder / "report.json", to_dict(report))


def write_figures(report: Report, folder: Path) -> None:
    for figure in report.figures:
        write_atomic(folder / figure.file, figure.content)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; figures without their content."""
    figures = [{"file": figure.file, "caption": figure.caption} for figure in report.figures]
    return json_value(vars(report) | {"figures": figures})


def json_value(value: Any) -> Any:
    """Convert dataclasses, NumPy and torch values; tuple keys are joined, NaN is null."""
    if is_dataclass(value):
        return json_value(vars(value))
    if isinstance(value, Mapping):
        keys = (", ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in value)
        return dict(zip(keys, map(json_value, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(folder: Path) -> Report | None:
    """Read a report; None if it or one of its figures is missing."""
    path = folder / "report.json"
    if not path.exists():
        return None
    values = read_json(path)
    try:
        files = [folder / figure["file"] for figure in values["figures"]]
        if not all(file.exists() for file in files):
            return None
        figures = [
            Figure(**figure, content=file.read_bytes())
            for figure, file in zip(values["figures"], files, strict=True)
        ]
        tables = [Table(**table) for table in values["tables"]]
        return Report(**values | {"tables": tables, "figures": figures})
    except (KeyError, TypeError):
        raise CheckpointError(
            f"{path} was written by another version; delete {folder} and run the experiment again "
            "(finished training runs are reused)"
        ) from None
