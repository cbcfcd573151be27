"""`vitrail plan`: FLOPs, memory and time of a training run, before it starts."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli.console import paragraph, print_json, table
from vitrail.cli.options import Command, Json
from vitrail.formatting import byte_size, number
from vitrail.planning.request import PlanRequest

if TYPE_CHECKING:
    from vitrail.planning.plan import Plan as TrainingPlan

MIN_DAYS = 0.1  # of an accelerator; the table is left out below
PARTS = {
    "weights": "",
    "gradients": "at the peak",
    "optimizer": "",
    "average": "of the weights",
    "activations": "and temporary tensors",
    "copies": "gradients of the other shards of a batch",
    "buckets": "gradient buckets for all-reduce",
    "gathered": "unsharded parameters, at most",
}


@dataclass(frozen=True, kw_only=True)
class Plan(PlanRequest, Command):
    """Estimate FLOPs, memory and time of a training run, here and on accelerators."""

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A name from `vitrail models`, a bundle, or another model reference."""
    utilization: float = 0.35
    """Fraction of the published peak FLOP/s that accelerators are assumed to reach."""
    probe: bool = True
    """Run a few training steps to measure time and memory on this machine."""
    json: Json = False

    def run(self) -> None:
        from vitrail.planning.plan import make_plan

        options: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(PlanRequest)}
        request = PlanRequest(**options)
        plan = make_plan(request, measure=self.probe, utilization=self.utilization)
        if self.json:
            print_json(plan.to_dict())
        else:
            print(*report(plan), sep="\n")


def report(plan: "TrainingPlan") -> Iterator[str]:
    facts = plan.to_dict()
    yield f"{facts['model']} at {facts['image_size']} pixels, {facts['classes']:,} classes"
    yield ""
    rows = [("parameters", f"{facts['parameters']:,}", "")]
    if facts["tokens"] is not None:
        rows.append(("tokens", f"{facts['tokens']:,}", ""))
    rows.append(("forward pass", amount(facts["flops"]["forward"]), "per image"))
    rows.append(("training step", amount(facts["flops"]["training"]), "per image"))
    if plan.exaflops is not None:
        rows.append(("whole run", f"{plan.exaflops:,.4g} exaFLOPs", ""))
    yield from columns(rows)
    yield ""
    request, memory, time = plan.request, plan.memory, plan.time()
    batch = f"batch of {request.batch_size:,}"
    if request.devices > 1:
        batch += f" over {request.devices} devices ({request.strategy})"
    if plan.accumulate > 1:
        batch += f" in {plan.accumulate} micro-batches of {plan.micro_batch}"
    extras = [request.optimizer, plan.precision, *(["checkpointing"] * request.checkpointing)]
    extras += [] if request.lora is None else [f"LoRA of rank {request.lora}"]
    where = " per device" if request.devices > 1 else ""
    yield from paragraph(f"Memory{where}: {batch}, {', '.join(extras)}")
    rows = [
        (part, byte_size(needed), PARTS[part]) for part, needed in memory.parts.items() if needed
    ]
    if request.devices > 1:
        rows.append(("total", byte_size(memory.tensors), "peak"))
    else:
        origin = "measured" if memory.measured else "estimated"
        rows.append(("process", byte_size(memory.process), origin))
        rows.append(("heap fragmentation", byte_size(memory.fragmentation), origin))
        rows.append(("total", byte_size(memory.peak), "peak"))
        if memory.evaluation > memory.tensors + memory.fragmentation:
            rows.append(("evaluation needs more", byte_size(memory.evaluation), "plus the process"))
        rows.append(("free memory", byte_size(plan.free), ""))
        rows.append(("largest batch", f"{plan.largest_batch:,}", "images per forward pass"))
    yield from columns(rows)
    yield ""
    if time is not None:
        yield "Time on this machine, measured"
        rows = [
            ("step", duration(time["step"]), ""),
            ("throughput", f"{time['images_per_second']:,.1f} images/s", ""),
        ]
        if time["epoch"] is not None:
            rows.append(("epoch", duration(time["epoch"]), f"{request.images:,.0f} images"))
        if time["run"] is not None:
            rows.append(("run", duration(time["run"]), f"{request.epochs:g} epochs"))
        yield from columns(rows)
        yield ""
    if any(one["device_days"] >= MIN_DAYS for one in plan.days()):
        yield from accelerator_report(plan)
    for note in plan.notes:
        yield from paragraph(f"note: {note}")
    yield from paragraph(
        "FLOPs as in table 6 of the paper: a multiply-add is two operations, the backward pass "
        "counts as two forward passes, elementwise operations are not counted."
    )


def accelerator_report(plan: "TrainingPlan") -> Iterator[str]:
    request = plan.request
    run = f"{request.epochs:g} epochs of {request.images:,.0f} images"
    yield f"{run}: {plan.exaflops:,.4g} exaFLOPs"
    several = request.devices > 1
    head = ["", "peak TFLOP/s", "device-days", *([f"days on {request.devices}"] * several), ""]
    rows = []
    for one in plan.days():
        cells = [f"{one['peak'] / 1e12:,.4g}", number(one["device_days"])]
        cells += [number(one["days"])] * several
        rows.append([one["name"], *cells, "" if one["fits"] else "out of memory"])
    yield from table(rows, "l" + "r" * (2 + several) + "l", head, indent=2)
    reached = [f"{r['model']} {r['reached']:.0%}" for r in plan.to_dict()["published"]]
    yield from paragraph(
        f"Peaks as published; {plan.utilization:.0%} utilization is assumed (--utilization). "
        f"The paper's TPUv3-core-days correspond to {' and '.join(reached)}."
    )
    yield ""


def columns(rows: list[tuple[str, str, str]]) -> list[str]:
    """Name, value and remark, aligned across the sections."""
    return [f"  {name:22}{value:>18}  {remark}".rstrip() for name, value, remark in rows]


def amount(value: float) -> str:
    """`35.1 GFLOPs`"""
    for power, letter in ((15, "P"), (12, "T"), (9, "G"), (6, "M")):
        if value >= 10**power:
            return f"{value / 10**power:,.3g} {letter}FLOPs"
    return f"{value:,.0f} FLOPs"


def duration(seconds: float) -> str:
    """`0.0123 s`, `4.5 hours`, `3.2 days`"""
    for length, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.3g} s"
