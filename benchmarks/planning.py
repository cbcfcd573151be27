"""Predictions of `vitrail plan` against measured training runs, each in its own process.

    python benchmarks/planning.py            a Markdown table, as in docs/planning.md
    python benchmarks/planning.py --json     the same as numbers
    python benchmarks/planning.py --only 3   one setting

Memory is predicted twice: by counting alone, and with the probe of a few steps. The run is that of
`vitrail train` with the same settings: its memory is the most that its process has held, its time
the median between two steps as metrics.jsonl has them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from timing import machine
from vitrail.models.registry import configuration
from vitrail.planning.plan import FRAGMENTATION, PROCESS, make_plan
from vitrail.planning.request import PlanRequest, resident_bytes
from vitrail.training.config import RunConfig
from vitrail.training.trainer import run

STEPS, FIRST = 8, 2  # of the run, and those whose time does not count
TRAIN_IMAGES, TEST_IMAGES, CLASSES = 64, 16, 10
NEVER = 1e6  # epochs: an evaluation between two steps would count as one
MIB = 2**20
SETTINGS = (
    PlanRequest(model="ViT-Nano/4", batch_size=64),
    PlanRequest(model="ViT-Pico/4", batch_size=32, optimizer="muon", average=0.99),
    PlanRequest(model="ViT-Ti/16", batch_size=16),
    PlanRequest(model="ViT-Ti/16", batch_size=32, checkpointing=True),
    PlanRequest(model="ViT-Ti/16", batch_size=32, micro_batch=8),
    PlanRequest(model="ViT-S/16", batch_size=8),
    PlanRequest(model="ViT-S/16", batch_size=8, optimizer="muon", checkpointing=True),
    PlanRequest(model="BiT-R50x1", batch_size=8),
    PlanRequest(model="Mixer-S/16", batch_size=16),
    PlanRequest(model="R26+ViT-S/32", batch_size=16, optimizer="sgd"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", type=int, action="append", help="settings by number, from 1")
    parser.add_argument("--run", help=argparse.SUPPRESS)  # in the process of the run
    options = parser.parse_args()
    if options.run:
        print(json.dumps(take_run(PlanRequest(**json.loads(options.run)))))
        return
    chosen = [SETTINGS[number - 1] for number in options.only or range(1, len(SETTINGS) + 1)]
    rows = []
    for request in chosen:
        rows.append(compare(request))
        print(line(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if options.json else table(rows))


def compare(request: PlanRequest) -> dict[str, object]:
    """One setting: counted, probed, run."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_noise(Path(folder) / "noise.npz", request)
        request = replace(request, data=str(data))
        probed = make_plan(request)
        done = subprocess.run(
            [sys.executable, __file__, "--run", json.dumps(asdict(request))],
            capture_output=True,
            text=True,
            check=True,
        )
    counted = replace(
        probed.memory, process=PROCESS, fragmentation_share=FRAGMENTATION
    )  # without the probe
    measured = json.loads(done.stdout.splitlines()[-1])
    time = probed.time()
    assert time is not None, probed.notes
    return {
        "setting": describe(request),
        "counted": counted.peak,
        "tensors": counted.tensors,
        "memory": probed.memory.peak,
        "measured_memory": measured["peak"],
        "step": time["step"],
        "measured_step": measured["step"],
    }


def write_noise(path: Path, request: PlanRequest) -> Path:
    """Write images of noise of the model's size."""
    size = configuration(request.model).image_size
    rng = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        parts[f"x_{split}"] = rng.integers(0, 256, (count, size, size, 3), np.uint8)
        parts[f"y_{split}"] = np.arange(count) % CLASSES
    np.savez(path, **parts)
    return path


def take_run(request: PlanRequest) -> dict[str, float]:
    """A short training, as the command would do it."""
    settings = request.settings()
    model = replace(settings.model, name=request.model)
    settings = replace(settings, steps=STEPS, evaluate_every=NEVER, model=model)
    with tempfile.TemporaryDirectory() as folder:
        run(RunConfig(data=request.data, out=Path(folder), settings=settings))
        lines = (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    ends = [row["seconds"] for row in rows]
    assert len(ends) == STEPS
    times = [after - before for before, after in pairwise(ends)]
    return {"peak": resident_bytes("VmHWM"), "step": statistics.median(times[FIRST - 1 :])}


def describe(request: PlanRequest) -> str:
    parts = [f"{request.model}, batch {request.batch_size}", request.optimizer]
    parts += [f"parts of {request.micro_batch}"] * (request.micro_batch is not None)
    parts += ["average"] * bool(request.average) + ["checkpointing"] * request.checkpointing
    return ", ".join(parts)


def table(rows: list[dict[str, object]]) -> str:
    return "\n".join(
        [
            f"On {machine()}.",
            "",
            "| setting | tensors, MiB | counted, MiB | probed, MiB | run, MiB | deviation "
            "| predicted, s | run, s | deviation |",
            "|---|---|---|---|---|---|---|---|---|",
            *map(line, rows),
        ]
    )


def line(row: dict[str, object]) -> str:
    sizes = [row[name] / MIB for name in ("tensors", "counted", "memory", "measured_memory")]
    step, measured = row["step"], row["measured_step"]
    return (
        f"| {row['setting']} | "
        + " | ".join(f"{size:,.0f}" for size in sizes)
        + f" | {sizes[2] / sizes[3] - 1:+.0%} | {step:.2f} | {measured:.2f} "
        f"| {step / measured - 1:+.0%} |"
    )


if __name__ == "__main__":
    main()
