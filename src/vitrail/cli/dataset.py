"""`vitrail check`: find problems in a dataset. `vitrail pack`: write it as .tar shards."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.console import Progress, log, paragraph, print_json, print_lines, printable, table
from vitrail.cli.options import (
    DataOptions,
    DataReference,
    FolderToWrite,
    Json,
    UnmetError,
    default_model,
)
from vitrail.errors import ConfigError
from vitrail.formatting import MIB, byte_size, comma_list, percent, shell_command

if TYPE_CHECKING:
    from vitrail.data.check import DatasetReport, DuplicateGroup
    from vitrail.probing.label_errors import LabelCheck

MAX_CLASSES = 40  # rows of the table
MAX_EXAMPLES = 5  # of each problem
MAX_SUSPECTS = 15  # possible label errors
MIN_PROBE_ACCURACY = 0.6  # below which suggestions are mostly wrong
WEAK = ": too low for reliable suggestions; pass a pre-trained --model"
MAX_BYTES = 256 * MIB  # as in data/tar_shards.py, which imports more than options should
MAX_NAMES = 20  # of skipped files; the others are counted


@dataclass(frozen=True, kw_only=True)
class Check(DataOptions):
    """Find unreadable files, duplicates, leaks between splits and suspicious labels."""

    data: DataReference
    out: Path | None = None
    """Folder for an HTML report: index.html, and a contact sheet per class."""
    limit: int | None = None
    """Check only this many images, evenly spaced."""
    labels: bool = False
    """Also find possible label errors and outliers; --out then has a page and labels.csv."""
    model: str | None = None
    """Model whose features --labels uses (default: builtin:vit-photos), or pixels, which suffices
    for simple images."""
    apply: Path | None = None
    """Reviewed labels.csv: write the dataset with its fixes as .tar shards into --out."""
    strict: bool = False
    """Exit with status 1 if a file is unreadable or an image is in two splits."""
    json: Json = False

    def run(self) -> None:
        from vitrail.data.check import check_dataset

        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit {self.limit}: must be 1 or more")
        if self.apply is not None:
            from vitrail.probing.label_errors import apply_review

            if self.out is None:
                raise ConfigError("--apply needs --out, the folder for the fixed dataset")
            counts = apply_review(self.data, self.apply, self.out)
            if self.json:
                print_json({"out": str(self.out)} | counts)
            else:
                changed = f"{counts['fix']:,} labels fixed, {counts['drop']:,} images dropped"
                if counts["missing"]:
                    log(f"skipped: {counts['missing']:,} images of the review are no longer there")
                print(f"done: {self.out} ({changed}); use the folder wherever DATA is expected")
            return
        if self.model is not None and not self.labels:
            raise ConfigError("--model is used by --labels; add --labels, or leave it out")
        if self.labels and self.out is not None:
            from vitrail.probing.label_errors import check_unreviewed

            check_unreviewed(self.out / "labels.csv")
        labels = None
        with Progress() as progress:
            result = check_dataset(self.data, limit=self.limit, progress=progress)
            if self.labels:
                from vitrail.probing.label_errors import check_labels

                labels = check_labels(
                    self.data, self.model or default_model("--model {}"), progress
                )
        page = None
        if self.out is not None:
            from vitrail.reports.pages import write_dataset_check

            page = write_dataset_check(result, self.out, labels and vars(labels))
            if labels is not None:
                from vitrail.probing.label_errors import write_review

                write_review(labels.errors, self.out / "labels.csv")
        if self.json:
            extra = {"page": page and str(page)} | ({"labels": vars(labels)} if labels else {})
            print_json(result.to_dict() | extra)
        else:
            print_lines(report(result))
            if labels is not None:
                print_lines(label_report(labels))
            if self.out is not None:
                print(f"\ndone: {page}")
                if labels is not None and labels.errors:
                    review = self.out / "labels.csv"
                    log(f"Next: write fix, drop or keep into the column action of {review}, then")
                    words = ("check", self.data, "--apply", review, "--out", "fixed")
                    log(f"  {shell_command(*words)}")
        if self.strict and (result.unreadable or result.leaks):
            raise UnmetError(
                f"{self.data} has {len(result.unreadable):,} unreadable files and "
                f"{len(result.leaks):,} leaks between splits; fix them, or run without --strict"
            )


def label_report(labels: "LabelCheck") -> Iterator[str]:
    yield ""
    share = percent(len(labels.errors) / labels.images)
    yield f"Possible label errors ({len(labels.errors):,} of {labels.images:,} images, {share})"
    yield from paragraph(
        f"  probe on {labels.features}: leave-one-out accuracy {percent(labels.accuracy)}"
        f"{WEAK if labels.accuracy < MIN_PROBE_ACCURACY else ''}",
        2,
    )
    rows = [
        [f"  {row['name']}", row["label"], row["suggested"], f"{row['margin']:.2f}"]
        for row in labels.errors[:MAX_SUSPECTS]
    ]
    if rows:
        yield from table(rows, "lllr", ["  image", "label", "looks like", "margin"])
    if len(labels.errors) > MAX_SUSPECTS:
        yield f"  and {len(labels.errors) - MAX_SUSPECTS:,} more; --json or --out lists all"
    if labels.outliers:
        names = comma_list([row["name"] for row in labels.outliers])
        yield from paragraph(f"Most unusual images ({len(labels.outliers):,}): {names}")


def report(result: "DatasetReport") -> Iterator[str]:
    splits = ", ".join(f"{count:,} {split}" for split, count in result.splits.items())
    classes = len(result.classes)
    total = f"{result.images:,} images, {classes:,} class{'es' * (classes != 1)}"
    yield from paragraph(f"{result.reference}: {total} ({splits})")
    facts = [
        (name, f"{size.least} to {size.most} pixels, median {size.median}")
        for name, size in (("width", result.width), ("height", result.height))
        if size
    ]
    formats = ", ".join(f"{kind} ({count:,})" for kind, count in result.kinds.items())
    facts += [("format", formats), *(("note", note) for note in result.notes)]
    yield from table(facts, "lw", indent=2)
    yield ""
    names = list(result.splits)
    rows = [
        [name, *(f"{counts[split]:,}" for split in names), f"{sum(counts.values()):,}"]
        for name, counts in list(result.counts.items())[:MAX_CLASSES]
    ]
    yield from table(rows, "l" + "r" * (len(names) + 1), ["class", *names, "all"])
    if len(result.classes) > MAX_CLASSES:
        yield f"and {len(result.classes) - MAX_CLASSES:,} more classes; --json or --out lists all"
    yield ""
    yield "Recommendations"
    for sentence in result.recommendations:
        yield from paragraph(f"- {sentence}", 2)
    problems = {
        "Leaks: in more than one split": map(group_text, result.leaks),
        "Unreadable": (f"{file.name}: {file.reason}" for file in result.unreadable),
        "Duplicates with different labels": map(group_text, result.conflicts),
        "Duplicates within a split": map(group_text, result.repeated),
        "Uniform color": (image.name for image in result.blank),
        "Much smaller than the others": (image.name for image in result.small),
        "Grayscale among color images": (image.name for image in result.gray),
    }
    for title, texts in problems.items():
        if not (texts := list(texts)):
            continue
        yield ""
        yield f"{title} ({len(texts):,})"
        for text in texts[:MAX_EXAMPLES]:
            yield from paragraph(f"  {text}", 4)
        if len(texts) > MAX_EXAMPLES:
            yield f"  and {len(texts) - MAX_EXAMPLES:,} more; --json lists all"


def group_text(group: "DuplicateGroup") -> str:
    """`a.jpg = b.jpg`, or `a.jpg ~ b.jpg` for a near duplicate."""
    return (" = " if group.exact else " ~ ").join(image.name for image in group.members)


@dataclass(frozen=True, kw_only=True)
class Pack(DataOptions):
    """Write a dataset as .tar shards (WebDataset layout); image files are unchanged.

    Files that are not images are skipped and listed."""

    source: DataReference
    destination: FolderToWrite
    """Folder for the shards."""
    split: str | None = None
    """Split to pack (default: each); "all" merges all splits."""
    max_bytes: int = MAX_BYTES
    """Shard size in bytes; a new shard starts when it is reached."""
    json: Json = False

    def run(self) -> None:
        from vitrail.data.tar_shards import pack

        splits: dict[str, dict[str, int]] = {}
        skipped: list[str] = []
        for shard in pack(
            self.source, self.destination, split=self.split, max_bytes=self.max_bytes
        ):
            counts = splits.setdefault(shard.split, {"shards": 0, "samples": 0, "bytes": 0})
            counts["shards"] += 1
            counts["samples"] += shard.samples
            counts["bytes"] += shard.bytes
            skipped += shard.skipped
            if not self.json:
                log(f"{shard.path}  {shard.samples:,} images  {byte_size(shard.bytes)}")
        if self.json:
            done = {"destination": str(self.destination), "splits": splits}
            print_json(done | {"left_out": skipped})
            return
        for name in skipped[:MAX_NAMES]:
            print(printable(f"skipped, not an image: {name}"))
        if len(skipped) > MAX_NAMES:
            print(f"skipped, not images: {len(skipped) - MAX_NAMES:,} more; --json lists all")
        counted = ", ".join(f"{counts['samples']:,} {split}" for split, counts in splits.items())
        print(f"done: {self.destination} ({counted}); use the folder wherever DATA is expected")
