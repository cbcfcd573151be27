"""How time and memory grow with each size of a ViT and of its data, and how they should.

    python benchmarks/growth.py        the section of benchmarks/README.md, and its figure

A training step of a small model is measured at several sizes of one kind, the rest left as it is.
On doubly logarithmic axes a power is a straight line, and its slope the exponent; it is fitted to
the larger half of the sizes, where fixed costs count least.
"""

import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path

import torch

from curves import Curve, drawing, exponent
from fewshot import PEAK, held
from growth_data import data_curves
from models import step_call
from peers import Shape, vitrail
from timing import claim, interleave

FIGURE = Path(__file__).parents[1] / "benchmarks" / "figures" / "growth.svg"
ROUNDS = 7
BASE, BATCH = Shape(64, 8, 128, 4, 4, 512, 10), 16
TINY = Shape(16, 8, 32, 1, 1, 64, 10)
FINE = 128  # pixels of the images that are cut into more and more tokens


@dataclass(frozen=True)
class Sweep:
    """Sizes of one kind, the model and batch that belong to each, and what is expected of it."""

    what: str
    sizes: tuple[int, ...]
    case: Callable[[int], tuple[Shape, int]]
    limits: tuple[str, str]  # the exponents of time and memory
    why: str


def wide(width: int) -> tuple[Shape, int]:
    return replace(BASE, width=width, heads=width // 32, mlp_width=4 * width), BATCH


def cut(patches: int) -> tuple[Shape, int]:
    return replace(BASE, image_size=FINE, patch_size=FINE // math.isqrt(patches)), BATCH


SWEEPS = (
    Sweep(
        "image side, pixels",
        (32, 64, 96, 128, 192, 256),
        lambda side: (replace(BASE, image_size=side), BATCH),
        ("2, then 4", "2"),
        "tokens grow with the area, attention with its square; the map is never materialized",
    ),
    Sweep(
        "patches of an image",
        (4, 16, 64, 256, 1024),
        cut,
        ("1, then 2", "1"),
        "all but attention is linear in tokens; the attention map is never materialized",
    ),
    Sweep(
        "images in a batch",
        (2, 4, 8, 16, 32, 64),
        lambda batch: (BASE, batch),
        ("1", "1"),
        "images are independent; weights count once",
    ),
    Sweep(
        "classes",
        (10, 100, 1_000, 10_000, 100_000),
        lambda classes: (replace(BASE, classes=classes), BATCH),
        ("0, then 1", "0, then 1"),
        "the head is negligible until its weights are many",
    ),
    Sweep(
        "depth",
        (2, 4, 8, 16, 32),
        lambda depth: (replace(BASE, depth=depth), BATCH),
        ("1", "1"),
        "blocks are identical",
    ),
    Sweep(
        "width",
        (64, 128, 256, 512, 1024),
        wide,
        ("1, then 2", "1, then 2"),
        "activations grow with the width, weights and products with its square",
    ),
)


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    if not PEAK.exists():
        return "## Scaling\n\nNot measured: this system does not report peak memory.\n"
    peaks = memory()
    panels = {}
    for sweep, mebibytes in zip(SWEEPS, peaks, strict=True):
        print(f"  {sweep.what}", flush=True)
        panels[sweep.what] = (times(sweep), Curve("memory", sweep.sizes, [mebibytes], "MiB"))
    print("  images of a dataset", flush=True)
    data = data_curves()
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(drawing(panels | {"images of a dataset": data}), encoding="utf-8")
    return "\n".join(["## Scaling", "", *claims(panels, data), "", *page(panels, data)])


def claims(panels: dict[str, tuple[Curve, ...]], data: Sequence[Curve]) -> list[str]:
    tokens = panels[SWEEPS[1].what]
    return [
        claim(
            "Cost of a training step against tokens, exponent",
            f"time {tokens[0].exponent:.2f}, memory {tokens[1].exponent:.2f}",
        ),
        claim(
            "Cost of a dataset against its images, exponent",
            f"opening {data[0].exponent:.2f}, memory {data[1].exponent:.2f}, "
            f"first batch {data[2].exponent:.2f}",
        ),
    ]


def page(panels: dict[str, tuple[Curve, ...]], data: Sequence[Curve]) -> list[str]:
    sizes = f"{BASE.image_size} pixels, patch {BASE.patch_size}, width {BASE.width}"
    rows = [
        row(sweep.what, curve, counted(sweep) if n == 0 else "", limit, sweep.why if n == 0 else "")
        for sweep in SWEEPS
        for n, (curve, limit) in enumerate(zip(panels[sweep.what], sweep.limits, strict=True))
    ]
    return [
        f"A training step (forward, backward, fused AdamW) of a ViT of {sizes},",
        f"depth {BASE.depth}, batch {BATCH}, {BASE.classes} classes, where one size is changed and",
        f"the others are not; patches are those of an image of {FINE} pixels. Time is the median",
        f"of {ROUNDS} interleaved rounds; memory is the peak above that of the process before it",
        "built the model. An exponent is the slope on log-log axes over the larger half of the",
        "sizes, with its range over rounds. *Counted* is the same slope of the FLOPs of all matrix",
        "products, *in the limit* the asymptotic one.",
        "",
        "| against | cost | smallest and largest | exponent | counted | in the limit | why |",
        "|---|---|---|---|---|---|---|",
        *rows,
        *starmap(row, zip(["images of a dataset"] * 3, data, *DATA_WORDS, strict=True)),
        "",
        "Datasets are .tar files of tiny PNGs, each opened in a separate process, interleaved:",
        "headers are read when a file is first opened, as here, and then cached. The first batch",
        "of 8 images is the first of a new epoch.",
        "",
        "![Growth of cost with each size](figures/growth.svg)",
        "",
    ]


DATA_WORDS = (
    ("", "", ""),
    ("1", "1", "0, then 1"),
    (
        "headers are read sequentially",
        "names, offsets and labels; no pixels",
        "an epoch starts with a permutation, 8 bytes per image",
    ),
)


def row(what: str, curve: Curve, count: str, limit: str, why: str) -> str:
    found = f"{curve.exponent:.2f}"
    if len(curve.rounds) > 1:
        each = [exponent(curve.sizes, once) for once in curve.rounds]
        found += f" ({min(each):.2f} to {max(each):.2f})"
    ends = " → ".join(f"{curve.medians[at]:,.3g}" for at in (0, -1))
    sizes = f"{curve.sizes[0]:,} → {curve.sizes[-1]:,}"
    return (
        f"| {what} | {curve.what} | {sizes}: {ends} {curve.unit} | {found} | {count} "
        f"| {limit} | {why} |"
    )


def counted(sweep: Sweep) -> str:
    cases = [sweep.case(size) for size in sweep.sizes]
    return f"{exponent(sweep.sizes, [batch * shape.forward_flops() for shape, batch in cases]):.2f}"


def times(sweep: Sweep) -> Curve:
    """Milliseconds of a training step."""
    calls = {str(size): step(*sweep.case(size)) for size in sweep.sizes}
    seconds = interleave(calls, rounds=ROUNDS)
    rounds = [[1e3 * second for second in once] for once in zip(*seconds.values(), strict=True)]
    return Curve("time", sweep.sizes, rounds, "ms")


def step(shape: Shape, batch: int) -> Callable[[], object]:
    images = torch.randn(batch, 3, shape.image_size, shape.image_size)
    return step_call(vitrail(shape), images, torch.randint(shape.classes, (batch,)))


def memory() -> list[list[float]]:
    """MiB of a training step, a list over sizes for each sweep."""
    words = [sys.executable, __file__, "memory"]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
    values = iter([float(line) for line in done.stdout.splitlines()])
    return [[next(values) for _ in sweep.sizes] for sweep in SWEEPS]


def print_memory() -> None:
    """A line for each size of each sweep: a copy of this process, which has computed nothing."""
    for sweep in SWEEPS:
        for size in sweep.sizes:
            if not (child := os.fork()):
                print(f"{peak(*sweep.case(size)):.2f}", flush=True)
                os._exit(0)
            _, status = os.waitpid(child, 0)
            assert status == 0, f"{sweep.what} {size} ended with {status}"


def peak(shape: Shape, batch: int) -> float:
    """Return MiB, after a tiny model that loads the libraries."""
    tiny = step(TINY, 1)
    tiny()
    PEAK.write_text("5")
    before = held("VmRSS")
    call = step(shape, batch)
    call()
    call()  # the optimizer has its state now
    return held("VmHWM") - before


if __name__ == "__main__":
    if sys.argv[1:] == ["memory"]:
        print_memory()
    else:
        print(report())
