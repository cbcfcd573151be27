"""How a large training would run on a cluster, as a Markdown page: computed, nothing measured here.

Assumptions have names below and are stated on the page; everything else follows from them, from
the model (`cost.py`, `trace.py`) and from what makers publish (`accelerators.py`).
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from vitrail.data.storage import write_atomic
from vitrail.data.tar_shards import MAX_SHARD_BYTES
from vitrail.errors import ConfigError
from vitrail.formatting import GIB, MIB, number
from vitrail.models.config import Config
from vitrail.models.registry import name_of
from vitrail.planning.accelerators import (
    ACCELERATORS,
    REPORTED,
    TPU_V3_CORE,
    UTILIZATION,
    device_days,
    reached,
)
from vitrail.planning.cost import EXA, Cost, cost_of
from vitrail.planning.memory import step_parts
from vitrail.planning.planner import USABLE, completed, config_of
from vitrail.planning.trace import Trace, trace_step
from vitrail.planning.wish import Wish

PICTURE = 110e3  # bytes of a JPEG of about 500 x 375 pixels, as in ImageNet
DECODED = 920  # pictures that one core reads and cuts to 224 pixels in a second, and ...
DECODED_LARGE = 171  # ... photographs of 2000 x 1500 pixels (both measured: docs/benchmarks.md)
INDEX = 57  # bytes for each picture in each process: the index of the shards, an epoch's order
SHARD = 2**30  # bytes; four times what `vitrail pack` makes if it is not told otherwise
FLEETS = (8, 64, 512)  # devices
PER_HOST = 8  # devices
MOST_AT_ONCE = 32  # pictures on one device
WRITTEN = 1e9  # bytes of state per second, all processes together
# 419 failures in 54 days of 16,384 GPUs: Grattafiori et al. 2024 (arXiv:2407.21783), section 3.3.4
BETWEEN_FAILURES = 16_384 * 54 * 24 / 419  # hours of one device
RESTART = 600.0  # seconds until all processes are back and have read their state
EXAMPLE = next(one for one in ACCELERATORS if one.name == "A100")


def write_page(wish: Wish, path: Path, *, utilization: float) -> None:
    write_atomic(path, page(wish, utilization))


def page(wish: Wish, utilization: float) -> str:
    """The whole page."""
    images, epochs = wish.images, wish.epochs
    if images is None or epochs is None:
        raise ConfigError("a page about a whole training needs --images and --epochs")
    for devices in FLEETS:
        replace(wish, devices=devices)  # refuses a batch that does not split
    config = config_of(wish, None)
    wish = replace(completed(wish, config, None), precision="bfloat16", strategy="fsdp")
    cost = cost_of(config)
    trace = trace_step(config, wish.settings(), accumulate=1, precision=torch.bfloat16)
    whole = cost.training * images * epochs
    sections = [
        head(wish, config, cost, utilization),
        work(cost, whole, images * epochs / wish.batch_size, utilization),
        shards(images),
        reading(cost, utilization),
        layout(wish, config, trace),
        saving(trace, whole, utilization),
        failures(images),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def head(wish: Wish, config: Config, cost: Cost, utilization: float) -> list[str]:
    assert wish.images is not None
    seen = f"{wish.images:,.0f} pictures, {wish.epochs:g} epochs"
    share = "" if utilization == UTILIZATION else f" --utilization {utilization:g}"
    return [
        f"# {name_of(config)} on {wish.images / 1e6:,.0f} million pictures",
        "",
        f"How a training of {seen} would run. Computed by",
        "",
        "```console",
        f"$ vitrail plan {wish.model} --images {wish.images:.10g} --epochs {wish.epochs:g}{share} "
        "--page docs/scale.md",
        "```",
        "",
        "and nothing here was run: assumptions are named, the rest is counted or published.",
        "",
        f"{cost.parameters:,} parameters, {cost.tokens or 0:,} tokens a picture, batches of "
        f"{wish.batch_size:,}, AdamW, products in bfloat16, weights split by FSDP.",
    ]


def work(cost: Cost, whole: float, steps: float, utilization: float) -> list[str]:
    rows = [
        f"| {one.name} | {one.peak / 1e12:,.4g} | {one.memory / GIB:.0f} "
        f"| {number(device_days(whole, one, utilization))} | "
        + " | ".join(number(device_days(whole, one, utilization) / n) for n in FLEETS)
        + " |"
        for one in ACCELERATORS
    ]
    checks = [
        f"{r.model} in {r.core_days:,.0f} TPUv3-core-days ({r.exaflops:,.0f} exaFLOPs) is "
        f"{reached(r):.0%} of the peak"
        for r in REPORTED
    ]
    return [
        "## Work and days",
        "",
        f"A picture is {cost.forward / 1e9:,.1f} GFLOPs forward and {cost.training / 1e12:.2f} "
        f"TFLOPs in training; the whole is **{whole / EXA:,.0f} exaFLOPs** in {steps:,.0f} steps.",
        f"Days, if {utilization:.0%} of the published peak is reached:",
        "",
        "| accelerator | peak, TFLOP/s | GiB | device-days | "
        + " | ".join(f"days of {n}" for n in FLEETS)
        + " |",
        "|---" * (4 + len(FLEETS)) + "|",
        *rows,
        "",
        f"The assumption, checked against what the authors tell: {'; '.join(checks)} "
        f"({TPU_V3_CORE.peak / 1e12:g} TFLOP/s a core).",
    ]


def shards(images: float) -> list[str]:
    size = images * PICTURE
    index = images * INDEX
    return [
        "## Shards",
        "",
        f"At {PICTURE / 1e3:.0f} kB a JPEG of about 500 x 375 pixels (assumed; ImageNet's mean) "
        f"the pictures are {size / 1e12:,.1f} TB.",
        "",
        "| `vitrail pack --max-bytes` | shards | pictures in each |",
        "|---|---|---|",
        *(
            f"| {limit:,} ({limit / MIB:,.0f} MiB) | {math.ceil(size / limit):,} "
            f"| {limit / PICTURE:,.0f} |"
            for limit in (MAX_SHARD_BYTES, SHARD)
        ),
        "",
        f"Every process knows where each picture lies and the order of the epoch: {INDEX} bytes "
        f"a picture, {index / GIB:,.1f} GiB a process, {PER_HOST * index / GIB:,.0f} GiB on a host "
        f"of {PER_HOST} devices. The order is a permutation of all pictures, so they are read at "
        "random, and the shards must lie where that is quick: on local disks or a parallel file "
        "system, not in an object store.",
    ]


def reading(cost: Cost, utilization: float) -> list[str]:
    rows = []
    for one in ACCELERATORS:
        rate = PER_HOST * one.peak * utilization / cost.training
        rows.append(
            f"| {one.name} | {rate:,.0f} | {rate * PICTURE / 1e6:,.0f} "
            f"| {math.ceil(rate / DECODED)} | {math.ceil(rate / DECODED_LARGE)} |"
        )
    return [
        "## Input",
        "",
        f"What a host of {PER_HOST} devices must be given. A core reads, cuts and resizes "
        f"{DECODED} such pictures a second, and {DECODED_LARGE} photographs of 2000 x 1500 "
        "([measured](benchmarks.md) on one core of a small server).",
        "",
        "| accelerator | pictures / s | MB / s | cores | cores, large photographs |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Large photographs are better packed at 500 pixels once than shrunk in every epoch.",
    ]


def layout(wish: Wish, config: Config, trace: Trace) -> list[str]:
    columns = [fleet_parts(wish, config, trace, devices) for devices in FLEETS]
    names = list(columns[0])
    heads = []
    for devices in FLEETS:
        share = wish.batch_size // devices
        at_once = min(share, MOST_AT_ONCE)
        heads.append(f"{devices} devices, {share // at_once} x {at_once} pictures")
    total = [sum(column.values()) for column in columns]
    small = [[one.name for one in ACCELERATORS if size > USABLE * one.memory] for size in total]
    too_small = [
        f"on {n} devices: {', '.join(names_)}"
        for n, names_ in zip(FLEETS, small, strict=True)
        if names_
    ]
    return [
        "## Layout",
        "",
        "`--machine.strategy fsdp` gives each device a part of every weight, of its gradient and "
        "of AdamW's two moments. GiB on each device when a step needs most:",
        "",
        "| part | " + " | ".join(heads) + " |",
        "|---" * (1 + len(FLEETS)) + "|",
        *(f"| {name} | " + " | ".join(gib(c[name]) for c in columns) + " |" for name in names),
        "| together | " + " | ".join(gib(size) for size in total) + " |",
        "",
        "*Gathered* are the weights of the block at work and of the next, a block's gradients, and "
        "what is outside of blocks: whole for a moment, at most so much. While a batch is "
        "accumulated in parts, gradients stay whole until the last part.",
        f"Too small ({USABLE:.0%} of the memory counts): {'; '.join(too_small)}. "
        "There `--machine.checkpointing` or a smaller `--machine.micro-batch` helps."
        if too_small
        else "It fits on every accelerator above.",
    ]


def fleet_parts(wish: Wish, config: Config, trace: Trace, devices: int) -> dict[str, int]:
    """Bytes by part on each of so many devices."""
    spread = replace(wish, devices=devices)
    at_once = min(spread.share, MOST_AT_ONCE)
    parts = step_parts(trace, spread, config, at_once)
    if at_once < spread.share:  # the trace is of one part; in the next, all gradients are there
        parts["gradients"] = trace.part("gradients")
    return {name: size for name, size in parts.items() if name != "average" or size}


def saving(trace: Trace, whole: float, utilization: float) -> list[str]:
    state = sum(trace.part(part) for part in ("weights", "optimizer", "average"))
    write = state / WRITTEN
    rows = []
    for devices in FLEETS:
        between = BETWEEN_FAILURES * 3600 / devices
        interval = math.sqrt(2 * write * between)
        lost = write / interval + (interval / 2 + RESTART) / between
        rows.append(f"| {devices} | {between / 3600:,.0f} | {interval / 60:,.0f} | {lost:.2%} |")
    hours = 24 * device_days(whole, EXAMPLE, utilization)
    return [
        "## Saving",
        "",
        f"The state (weights, two moments) is {state / 1e9:,.1f} GB, written by all processes "
        f"together in {write:.0f} s at {WRITTEN / 1e9:g} GB/s (assumed); while it is written, the "
        f"one before stays. The bundle of the result is {trace.part('weights') / 1e9:,.1f} GB.",
        "",
        f"If a device fails once in {BETWEEN_FAILURES:,.0f} hours (419 failures in 54 days of "
        "16,384 GPUs, Grattafiori et al. 2024) and coming back takes "
        f"{RESTART / 60:.0f} minutes (assumed), the least is lost by saving every "
        "sqrt(2 x seconds of a save x seconds between failures) (Young 1974; Daly 2006):",
        "",
        "| devices | hours between failures | `--save-minutes` | lost time |",
        "|---|---|---|---|",
        *rows,
        "",
        f"All of it on {EXAMPLE.name}s is {hours:,.0f} device-hours, in which "
        f"{hours / BETWEEN_FAILURES:.1f} failures are to be expected.",
    ]


def failures(images: float) -> list[str]:
    index = PER_HOST * images * INDEX / GIB
    rows = [
        (
            "the memory of a host",
            f"the index of all pictures in each of {PER_HOST} processes is {index:,.0f} GiB",
            "nothing yet: hosts need that much, and it is to be expected first",
        ),
        (
            "the memory of a device",
            "a batch is too large",
            "it is cut into parts beforehand; if it still ends, the message names a smaller one",
        ),
        (
            "the input",
            "pictures come more slowly than they are learned from",
            "the live view shows pictures per second; `--machine.workers`, smaller pictures",
        ),
        (
            "a picture",
            "it cannot be read",
            "another of the same epoch takes its place; the report names it",
        ),
        (
            "a process or a node",
            "it dies, or hangs until the others give up",
            "`torchrun --max-restarts 10 …` starts all again, and they go on from the last state",
        ),
        (
            "the number of nodes",
            "one does not come back",
            "start again with those that are left: a state is read by any number of processes "
            "that divides the batch",
        ),
        (
            "the loss",
            "it explodes or is no number",
            "`--retries 3`: back to the last state, at half the learning rate, each time",
        ),
        (
            "the disk",
            "it is full, or the power fails while a state is written",
            "a state is whole or absent, the one before stays, and digests find damage",
        ),
    ]
    return [
        "## What fails first, and how it is survived",
        "",
        "| what | how | what vitrail does |",
        "|---|---|---|",
        *(f"| {what} | {how} | {does} |" for what, how, does in rows),
    ]


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"
