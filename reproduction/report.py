"""Reports: claim, method, result and verdict of an experiment, as Markdown and JSON.

reproduction/README.md       markdown(sections): all experiments with a summary
reproduction/figures/        their figures (write_figures)
OUT/NAME/report.md, .json    one experiment with its figures (write)
"""

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vitrail.checkpoints.files import write_json
from vitrail.data.storage import write_atomic

Verdict = Literal["holds", "holds in part", "does not hold", "inconclusive", "checked"]
# Titles, claims, methods and results of all experiments; the braces are filled in by Python.
TEXT: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("experiments.toml").read_text(encoding="utf-8")
)
MAX_NUMBER = 30  # characters of a number with its interval and unit


class Table(NamedTuple):
    """Rows of text; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


class Figure(NamedTuple):
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


def markdown(sections: Sequence[str]) -> str:
    """Return the page of all experiments, from what `section` returned of each."""
    heads = [re.findall(r"^## ((\w+): (.*))$|^\*\*Verdict: (.*)\.\*\*$", x, re.M) for x in sections]
    rows = [(f"[{n}](#{anchor(text)})", title, v[3]) for (text, n, title, _), v in heads]
    counts = Counter(verdict for _, _, verdict in rows)
    blocks = [
        TEXT["introduction"].strip(),
        "## Summary",
        f"Verdicts: {', '.join(f'{v} {counts[v]}' for v in get_args(Verdict) if counts[v])}.",
        markdown_table(("experiment", "claim", "verdict"), rows),
        "\n".join(f"- **{verdict}**: {why}" for verdict, why in TEXT["verdicts"].items()),
        *sections,
    ]
    return "\n\n".join(blocks) + "\n"


def write_docs(reports: Sequence[Report], folder: Path) -> Path:
    """Write reports and their figures into README.md, whose other sections are kept."""
    page = folder / "README.md"
    text = page.read_text(encoding="utf-8") if page.exists() else ""
    _, *sections = re.split(r"^## (?=\w+: )", text, flags=re.M)
    named = {part.partition(":")[0]: f"## {part.strip()}" for part in sections}
    for report in reports:
        write_figures(report, folder / "figures")
        named[report.name] = section(report, "figures/")
    write_atomic(page, markdown([named[name] for name in TEXT if name in named]))
    return page


def heading(report: Report) -> str:
    return f"{report.name}: {report.title}"


def anchor(text: str) -> str:
    """Return GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def section(report: Report, folder: str = "", level: str = "##") -> str:
    """Return one experiment as Markdown.

    The page of all experiments leaves out tables of published numbers, which the command prints.
    """
    blocks = [f"{level} {heading(report)}", f"**Paper.** {report.claim}"]
    blocks.append(f"**Method.** {report.method}")
    for table in report.tables if level == "#" or not report.published else ():
        blocks += [f"*{table.caption}*", markdown_table(table.head, table.rows)]
    for figure in report.figures:
        caption = re.sub(r"([\[\]])", r"\\\1", " ".join(figure.caption.split()))
        blocks.append(f"![{caption}]({folder}{figure.file})")
    blocks += [f"**Result.** {report.result}", f"**Verdict: {report.verdict}.**"]
    if report.command:
        blocks.append(f"```console\n$ {report.command}\n```")
    return "\n\n".join(blocks)


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
    write_atomic(folder / "report.md", section(report, level="#") + "\n")
    write_json(folder / "report.json", to_dict(report))


def write_figures(report: Report, folder: Path) -> None:
    for figure in report.figures:
        write_atomic(folder / figure.file, figure.content)


def to_dict(report: Report) -> dict[str, Any]:
    """Return the report as JSON values; figures without their content."""
    figures = [{"file": figure.file, "caption": figure.caption} for figure in report.figures]
    return json_value(vars(report) | {"figures": figures})


def json_value(value: Any) -> Any:
    """Convert dataclasses, named tuples and arrays; tuple keys are joined, NaN is null."""
    if is_dataclass(value) or hasattr(value, "_asdict"):
        return json_value(vars(value) if is_dataclass(value) else value._asdict())
    if isinstance(value, Mapping):
        keys = (", ".join(map(str, k)) if isinstance(k, tuple) else str(k) for k in value)
        return dict(zip(keys, map(json_value, value.values()), strict=True))
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):
        return json_value(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
