"""`vitrail plan`: what a training run will take, before it begins."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.arguments import ModelReference
from vitrail.cli.text import paragraph
from vitrail.formatting import byte_size, number
from vitrail.planning.wish import Wish

if TYPE_CHECKING:
    from vitrail.planning.planner import Outlook

USUAL_BATCH, PAPERS_BATCH = 32, 4096
LEAST_DAYS = 0.1  # below which nobody asks for an accelerator's days
PARTS = {
    "weights": "",
    "gradients": "at that moment",
    "optimizer": "",
    "average": "of the weights",
    "activations": "and all that comes and goes",
    "copies": "gradients of the other parts of a batch",
    "buckets": "copies in which gradients are summed",
    "gathered": "whole while they are needed, at most",
}


@dataclass(frozen=True, kw_only=True)
class Plan(Wish):
    """Tell what training a model will take: operations, memory, time here, days elsewhere."""

    model: ModelReference
    """A name from `vitrail models`, a bundle, or any other model reference."""
    batch_size: int | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Pictures per step, over all devices: 32 if not given, or the paper's 4096 for a page."""
    utilization: float = 0.35
    """Share of their published peak that accelerators are assumed to reach."""
    probe: bool = True
    """Take a few real steps, for time and memory on this machine."""
    page: Path | None = None
    """Write how such a training would run on a cluster to this Markdown file instead."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        """The wish is looked at once it is whole, in `run`: a page has another usual batch."""

    def run(self) -> None:
        given: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Wish)}
        if self.batch_size is None:
            given["batch_size"] = USUAL_BATCH if self.page is None else PAPERS_BATCH
        wish = Wish(**given)
        if self.page is not None:
            from vitrail.planning.page import write_page

            write_page(wish, self.page, utilization=self.utilization)
            print(f"written: {self.page}")
            return
        from vitrail.planning.planner import plan

        outlook = plan(wish, probing=self.probe, utilization=self.utilization)
        if self.json:
            print(json.dumps(outlook.to_dict(), indent=1))
            return
        for line in words(outlook):
            print(line)


def words(outlook: "Outlook") -> Iterator[str]:
    """All of it for people, in 80 columns."""
    facts = outlook.to_dict()
    yield f"{facts['model']} at {facts['image_size']} pixels, {facts['classes']:,} classes"
    yield ""
    yield row("parameters", f"{facts['parameters']:,}")
    if facts["tokens"] is not None:
        yield row("tokens", f"{facts['tokens']:,}")
    yield row("a picture, forward", f"{amount(facts['flops']['forward'])}FLOPs")
    yield row("a picture, training", f"{amount(facts['flops']['training'])}FLOPs")
    if outlook.exaflops is not None:
        yield row("all of the training", f"{outlook.exaflops:,.4g} exaFLOPs")
    yield ""
    yield from memory_words(outlook)
    yield from time_words(outlook)
    if any(one["device_days"] >= LEAST_DAYS for one in outlook.days()):
        yield from days_words(outlook)
    for note in outlook.notes:
        yield from paragraph(f"note: {note}")
    yield from paragraph(
        "A multiply-add is two operations, the backward pass two forward passes, as in table 6 of "
        "the paper; element-wise work is not counted."
    )


def memory_words(outlook: "Outlook") -> Iterator[str]:
    wish, memory = outlook.wish, outlook.memory
    batch = f"a batch of {wish.batch_size:,}"
    if wish.devices > 1:
        batch += f" over {wish.devices} devices ({wish.strategy})"
    if outlook.accumulate > 1:
        batch += f" in {outlook.accumulate} parts of {outlook.micro_batch}"
    extras = [wish.optimizer, outlook.precision, *(["checkpointing"] * wish.checkpointing)]
    where = " of each device" if wish.devices > 1 else ""
    yield from paragraph(f"Memory{where}: {batch}; {', '.join(extras)}")
    for part, needed in memory.parts.items():
        if needed:
            yield row(f"  {part}", byte_size(needed), PARTS[part])
    if wish.devices > 1:
        yield row("  together", byte_size(memory.tensors), "when a step needs most")
        yield ""
        return
    how = "measured" if memory.measured else "estimated"
    yield row("  the process itself", byte_size(memory.process), how)
    yield row("  holes in its heap", byte_size(memory.lost), how)
    yield row("  together", byte_size(memory.peak), "when a step needs most")
    if memory.evaluation > memory.tensors + memory.lost:
        yield row("  evaluating needs more", byte_size(memory.evaluation), "and the process")
    yield row("free here", byte_size(outlook.free))
    yield row("fits here", f"{outlook.largest_batch:,}", "pictures at once, at most")
    yield ""


def time_words(outlook: "Outlook") -> Iterator[str]:
    time = outlook.time()
    if time is None:
        return
    yield "Time on this machine, from a probe"
    yield row("  a step", duration(time["step"]))
    yield row("  pictures a second", f"{time['images_per_second']:,.1f}")
    if time["epoch"] is not None:
        yield row("  an epoch", duration(time["epoch"]), f"{outlook.wish.images:,.0f} pictures")
    if time["run"] is not None:
        yield row("  the training", duration(time["run"]), f"{outlook.wish.epochs:g} epochs")
    yield ""


def days_words(outlook: "Outlook") -> Iterator[str]:
    wish = outlook.wish
    yield f"{wish.epochs:g} epochs of {wish.images:,.0f} pictures: {outlook.exaflops:,.4g} exaFLOPs"
    several = wish.devices > 1
    heads = ["peak, TFLOP/s", "device-days", f"days of {wish.devices}"]
    yield f"  {'':12}" + "".join(f"{head:>16}" for head in heads[: 2 + several])
    for one in outlook.days():
        cells = [f"{one['peak'] / 1e12:,.4g}", number(one["device_days"]), number(one["days"])]
        full = "" if one["fits"] else "  too small for it"
        yield f"  {one['name']:12}" + "".join(f"{c:>16}" for c in cells[: 2 + several]) + full
    reached = [f"{r['model']} {r['reached']:.0%}" for r in outlook.to_dict()["published"]]
    yield from paragraph(
        f"Peaks as published, of which {outlook.utilization:.0%} is assumed to be reached "
        f"(--utilization). The paper's TPUv3-core-days come to {' and '.join(reached)}."
    )
    yield ""


def row(name: str, value: str, remark: str = "") -> str:
    return f"{name:22}{value:>18}  {remark}".rstrip()


def amount(value: float) -> str:
    """35.1 G, for operations."""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:,.3g} {letter}"
    return f"{value:,.0f} "


def duration(seconds: float) -> str:
    """In the unit that a person would choose."""
    for length, unit in ((2 * 86_400, "days"), (7_200, "hours"), (120, "minutes")):
        if seconds >= length:
            return f"{seconds / {'days': 86_400, 'hours': 3_600, 'minutes': 60}[unit]:,.1f} {unit}"
    return f"{seconds:.3g} seconds"
