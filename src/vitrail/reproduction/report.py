"""What an experiment says in the end: the paper's claim, what was done, what came out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["holds", "holds in part", "does not hold", "cannot be told", "checked"]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text under a head; the first column names the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure: the file's name, what it is called, and the SVG text or PNG bytes."""

    file: str  # such as "figure5.svg", one name over all experiments
    caption: str
    content: str | bytes


@dataclass(frozen=True, kw_only=True)
class Report:
    """One experiment, as it stands in docs/reproduction.md."""

    name: str  # as `vitrail reproduce NAME` has it
    title: str
    claim: str  # what the paper says, in our words, with its published numbers
    did: str  # what was done here
    found: str  # what came out, with numbers
    verdict: Verdict
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    command: str = ""  # that makes it again
    data: Mapping[str, Any] = field(default_factory=dict)  # the numbers, for machines
