"""`vitrail check`: what is wrong with a data set, and what to do about it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.arguments import DataOptions, DataReference
from vitrail.cli.progress import Progress
from vitrail.cli.status import UnmetError
from vitrail.cli.text import WIDTH, paragraph, printable
from vitrail.formatting import truncate

if TYPE_CHECKING:
    from vitrail.data.check import DatasetReport, DuplicateGroup, SampleInfo

MOST_ROWS = 40  # of the table of classes
EXAMPLES = 5  # of each problem


@dataclass(frozen=True, kw_only=True)
class Check(DataOptions):
    """Look for unreadable files, duplicates, leaks between splits and odd labels."""

    data: DataReference
    """A folder of class folders, a list, .tar or .npz files, builtin:sign-digits or another."""
    out: Path | None = None
    """A folder to write a page with pictures into: index.html, and a sheet for each class."""
    limit: int | None = None
    """Look at this many pictures only, evenly spaced."""
    strict: bool = False
    """End with status 1 if a file cannot be read or a picture is in two splits."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.data.check import check_dataset
        from vitrail.errors import ConfigError

        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit} leaves no picture to look at; give 1 or more")
        with Progress() as progress:
            health = check_dataset(self.data, limit=self.limit, progress=progress)
        page = None
        if self.out is not None:
            from vitrail.reports.dataset_check import write_dataset_check

            page = write_dataset_check(health, self.out)
        if self.json:
            print(json.dumps(health.to_dict() | {"page": page and str(page)}, indent=1))
        else:
            for line in report(health):
                print(printable(line))
            if page is not None:
                print(f"\ndone: {page}")
        if self.strict and (health.unreadable or health.leaks):
            raise UnmetError(
                f"{self.data} has {len(health.unreadable):,} unreadable files and "
                f"{len(health.leaks):,} leaks between splits; mend them, or leave out --strict"
            )


def report(health: "DatasetReport") -> Iterator[str]:
    """The findings for people: what it is, how many, what to do, examples."""
    splits = ", ".join(f"{count:,} {split}" for split, count in health.splits.items())
    total = f"{health.images:,} pictures of {len(health.classes):,} classes"
    yield from paragraph(f"{health.reference}: {total} ({splits})")
    if health.height and health.width:
        height, width = health.height, health.width
        yield f"  width   {width.least} to {width.most} pixels, median {width.median}"
        yield f"  height  {height.least} to {height.most} pixels, median {height.median}"
    kinds = ", ".join(f"{kind} ({count:,})" for kind, count in health.kinds.items())
    yield from paragraph(f"  kinds   {kinds}", 10)
    for note in health.notes:
        yield from paragraph(f"  note    {note}", 10)
    yield ""
    yield from table(health)
    yield ""
    yield "Verdict"
    for sentence in health.recommendations:
        yield from paragraph(f"- {sentence}", 2)
    yield from examples("In more than one split", [about(twins) for twins in health.leaks])
    unreadable = [f"{found.name}: {found.reason}" for found in health.unreadable]
    yield from examples("Cannot be read", unreadable)
    conflicts = [about(twins) for twins in health.conflicts if not twins.leak]
    yield from examples("Under more than one label", conflicts)
    rest = [t for t in health.duplicates + health.near_duplicates if not (t.leak or t.conflict)]
    yield from examples("More than once in a split", [about(twins) for twins in rest])
    yield from examples("Of a single color", names(health.blank))
    yield from examples("Much smaller than the rest", names(health.small))
    yield from examples("Gray among pictures in color", names(health.gray))


def table(health: "DatasetReport") -> Iterator[str]:
    """Pictures of each class and split."""
    splits = list(health.splits)
    room = WIDTH - 11 * (len(splits) + 1)
    widest = max(len("class"), min(room, max(map(len, health.classes), default=0)))
    yield f"{'class':{widest}}" + "".join(f"{name[:10]:>11}" for name in [*splits, "all"])
    for name, counts in list(health.counts.items())[:MOST_ROWS]:
        numbers = [*(counts[split] for split in splits), sum(counts.values())]
        yield f"{truncate(name, widest):{widest}}" + "".join(f"{number:>11,}" for number in numbers)
    if len(health.classes) > MOST_ROWS:
        yield f"and {len(health.classes) - MOST_ROWS:,} more classes; --json or --out lists all"


def examples(title: str, lines: Sequence[str]) -> Iterator[str]:
    if not lines:
        return
    yield ""
    yield f"{title} ({len(lines):,})"
    for line in lines[:EXAMPLES]:
        yield from paragraph(f"  {line}", 4)
    if len(lines) > EXAMPLES:
        yield f"  and {len(lines) - EXAMPLES:,} more; --json lists all"


def about(twins: "DuplicateGroup") -> str:
    """`a.jpg = b.jpg`, or `a.jpg ~ b.jpg` if only nearly."""
    return (" = " if twins.exact else " ~ ").join(names(twins.members))


def names(members: Sequence["SampleInfo"]) -> list[str]:
    return [member.name for member in members]
