"""`vitrail plan`: what a training run will take, before it begins."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vitrail.cli.arguments import ModelReference
from vitrail.cli.text import paragraph
from vitrail.formatting import byte_size, number
from vitrail.planning.request import PlanRequest

if TYPE_CHECKING:
    from vitrail.planning.plan import Plan as TrainingPlan

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
class Plan(PlanRequest):
    """Tell what training a model will take: operations, memory, time here, days elsewhere."""

    model: ModelReference
    """A name from `vitrail models`, a bundle, or any other model reference."""
    utilization: float = 0.35
    """Share of their published peak that accelerators are assumed to reach."""
    probe: bool = True
    """Take a few real steps, for time and memory on this machine."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def run(self) -> None:
        from vitrail.planning.plan import make_plan

        options: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(PlanRequest)}
        request = PlanRequest(**options)
        plan = make_plan(request, measure=self.probe, utilization=self.utilization)
        if self.json:
            print(json.dumps(plan.to_dict(), indent=1))
            return
        for line in words(plan):
            print(line)


def words(plan: "TrainingPlan") -> Iterator[str]:
    """All of it for people, in 80 columns."""
    facts = plan.to_dict()
    yield f"{facts['model']} at {facts['image_size']} pixels, {facts['classes']:,} classes"
    yield ""
    yield row("parameters", f"{facts['parameters']:,}")
    if facts["tokens"] is not None:
        yield row("tokens", f"{facts['tokens']:,}")
    yield row("a picture, forward", f"{amount(facts['flops']['forward'])}FLOPs")
    yield row("a picture, training", f"{amount(facts['flops']['training'])}FLOPs")
    if plan.exaflops is not None:
        yield row("all of the training", f"{plan.exaflops:,.4g} exaFLOPs")
    yield ""
    yield from memory_words(plan)
    yield from time_words(plan)
    if any(one["device_days"] >= LEAST_DAYS for one in plan.days()):
        yield from days_words(plan)
    for note in plan.notes:
        yield from paragraph(f"note: {note}")
    yield from paragraph(
        "A multiply-add is two operations, the backward pass two forward passes, as in table 6 of "
        "the paper; element-wise work is not counted."
    )


def memory_words(plan: "TrainingPlan") -> Iterator[str]:
    request, memory = plan.request, plan.memory
    batch = f"a batch of {request.batch_size:,}"
    if request.devices > 1:
        batch += f" over {request.devices} devices ({request.strategy})"
    if plan.accumulate > 1:
        batch += f" in {plan.accumulate} parts of {plan.micro_batch}"
    extras = [request.optimizer, plan.precision, *(["checkpointing"] * request.checkpointing)]
    where = " of each device" if request.devices > 1 else ""
    yield from paragraph(f"Memory{where}: {batch}; {', '.join(extras)}")
    for part, needed in memory.parts.items():
        if needed:
            yield row(f"  {part}", byte_size(needed), PARTS[part])
    if request.devices > 1:
        yield row("  together", byte_size(memory.tensors), "when a step needs most")
        yield ""
        return
    how = "measured" if memory.measured else "estimated"
    yield row("  the process itself", byte_size(memory.process), how)
    yield row("  holes in its heap", byte_size(memory.fragmentation), how)
    yield row("  together", byte_size(memory.peak), "when a step needs most")
    if memory.evaluation > memory.tensors + memory.fragmentation:
        yield row("  evaluating needs more", byte_size(memory.evaluation), "and the process")
    yield row("free here", byte_size(plan.free))
    yield row("fits here", f"{plan.largest_batch:,}", "pictures at once, at most")
    yield ""


def time_words(plan: "TrainingPlan") -> Iterator[str]:
    time = plan.time()
    if time is None:
        return
    yield "Time on this machine, from a probe"
    yield row("  a step", duration(time["step"]))
    yield row("  pictures a second", f"{time['images_per_second']:,.1f}")
    if time["epoch"] is not None:
        yield row("  an epoch", duration(time["epoch"]), f"{plan.request.images:,.0f} pictures")
    if time["run"] is not None:
        yield row("  the training", duration(time["run"]), f"{plan.request.epochs:g} epochs")
    yield ""


def days_words(plan: "TrainingPlan") -> Iterator[str]:
    request = plan.request
    length = f"{request.epochs:g} epochs of {request.images:,.0f} images"
    yield f"{length}: {plan.exaflops:,.4g} exaFLOPs"
    several = request.devices > 1
    heads = ["peak, TFLOP/s", "device-days", f"days of {request.devices}"]
    yield f"  {'':12}" + "".join(f"{head:>16}" for head in heads[: 2 + several])
    for one in plan.days():
        cells = [f"{one['peak'] / 1e12:,.4g}", number(one["device_days"]), number(one["days"])]
        full = "" if one["fits"] else "  too small for it"
        yield f"  {one['name']:12}" + "".join(f"{c:>16}" for c in cells[: 2 + several]) + full
    reached = [f"{r['model']} {r['reached']:.0%}" for r in plan.to_dict()["published"]]
    yield from paragraph(
        f"Peaks as published, of which {plan.utilization:.0%} is assumed to be reached "
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
