"""Memory: large models within a fixed limit, each case in a fresh process.

    python benchmarks/memory.py        the section of benchmarks/README.md

The cases are ordinary commands on noise images and random weights. RLIMIT_DATA enforces the limit;
the report has the peak resident memory (VmHWM) of the process, including loading, steps, evaluation
and saving.
"""

import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import result_cache
from timing import claim
from vitrail.cli import SPIN, main
from vitrail.errors import VitrailError
from vitrail.planning.request import resident_bytes
from vitrail.training.recipes import METRICS

GIB = 2**30
CLASSES, TRAIN_IMAGES, TEST_IMAGES = 5, 16, 5
FULL, BLOCKS = 64, 2  # batch size of a probe; number of blocks that suffice to reach its peak
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # glibc gives each larger block back to the system


@dataclass(frozen=True)
class Case:
    """One command; MODEL, DATA and OUT in it stand for files and folders of this benchmark."""

    name: str
    command: str
    mapped: bool = False


@dataclass(frozen=True)
class Group:
    """Cases of one model under a memory limit in GiB; `claims` is the claim that they test."""

    model: str
    limit: int
    cases: tuple[Case, ...]
    heading: tuple[str, str]  # over names and over seconds
    claims: str = ""
    note: str = ""


TUNE = "finetune DATA --from MODEL --out OUT --evaluate-every 1000000"  # epochs: never
FINETUNE = f"{TUNE} --steps 2"
LOW_MEMORY = "--optim.kind adafactor --machine.checkpointing --machine.micro-batch 1"
FULL_BATCH = f"{TUNE} --steps 4 --machine.parts 1"
CHECKED = f"{FULL_BATCH} --machine.checkpointing"
PROBE = "fewshot MODEL DATA --shots 3 --seeds 2 --probes ridge logistic --no-cache"
GROUPS = (
    Group(
        "ViT-L/16",
        12,
        (
            Case("defaults: batches of 16, AdamW", FINETUNE),
            Case(
                "384 pixels; Adafactor, checkpointing, one image at a time",
                f"{FINETUNE} --model.image-size 384 --batch-size 2 {LOW_MEMORY}",
            ),
        ),
        ("fine-tuned", "s per image"),
        claims="Fine-tuning ViT-L/16 in 12 GiB",
    ),
    Group(
        "ViT-H/14",
        4,
        (
            Case("few-shot probe and linear probe", PROBE),
            Case(f"loaded, and {FULL} images at once", "look MODEL"),
        ),
        ("632 million weights", "s"),
        claims="Loading and probing ViT-H/14 in 4 GiB",
        note=(
            f"The probes are fitted to 3 images of {CLASSES} classes. *At once*: the largest batch"
            f" of the probes, through {BLOCKS} of 32 blocks, each of which needs the same memory."
        ),
    ),
    Group(
        "ViT-S/16",
        4,
        (
            Case("whole batches", FULL_BATCH),
            Case("checkpointing", CHECKED),
            Case("checkpointing, one memory mapping per tensor", CHECKED, mapped=True),
        ),
        ("fine-tuned in batches of 16", "s per image"),
        note="Mapping (`MALLOC_MMAP_THRESHOLD_=65536`) avoids fragmentation.",
    ),
)


def report() -> str:
    """The section of benchmarks/README.md, measured now or cached."""
    if not resident_bytes("VmHWM"):
        return "## Memory\n\nNot measured: this system does not report the memory of a process\n"
    result_cache.FOLDER.mkdir(parents=True, exist_ok=True)
    parts = []
    for group in GROUPS:
        with TemporaryDirectory(dir=result_cache.FOLDER) as folder:  # gigabytes: not in tmpfs
            parts += [*table(group, [found(group, case, Path(folder)) for case in group.cases]), ""]
    return "\n".join(
        [
            "## Memory",
            "",
            "Each case is one command in a fresh process with an enforced memory limit; *peak* is",
            "its peak memory. Training times are the median over steps, without the first.",
            "[memory.md](../docs/memory.md) lists ways to reduce memory.",
            "",
            *parts,
        ]
    )


def table(group: Group, rows: Sequence[Mapping[str, float]]) -> list[str]:
    what, seconds = group.heading
    peaks = [row["peak"] / GIB for row in rows]
    lines = [
        f"| {group.model}, {what} | limit, GiB | peak, GiB | {seconds} |",
        "|---|---|---|---|",
    ]
    for case, peak, row in zip(group.cases, peaks, rows, strict=True):
        lines.append(f"| {case.name} | {group.limit} | {peak:.2f} | {row['seconds']:.2f} |")
    if group.claims:
        lines = [claim(group.claims, f"takes {max(peaks):.1f} GiB at most"), "", *lines]
    return [*lines, *(["", group.note] if group.note else [])]


def found(group: Group, case: Case, folder: Path) -> dict[str, float]:
    key = f"memory-{group.model}-{case.name}"
    return result_cache.cached(key, lambda: measured(group, case, folder))


def measured(group: Group, case: Case, folder: Path) -> dict[str, float]:
    """Bytes and seconds of a case; its model is written once into the folder."""
    places = {"DATA": folder / "noise.npz", "MODEL": folder / "model", "OUT": folder / "out"}
    write_noise(places["DATA"])
    if not places["MODEL"].exists():
        in_process("write", group.model, str(places["MODEL"]))
    words = [str(places.get(word, word)) for word in case.command.split()]
    limit = str(group.limit * GIB)
    result = in_process("run", limit, *words, environment=MAPPED if case.mapped else {})
    if places["OUT"].exists():
        result["seconds"] = per_image(places["OUT"])
        shutil.rmtree(places["OUT"])
    return result


def in_process(*words: str, environment: Mapping[str, str] | None = None) -> dict[str, float]:
    """Run this file with these arguments in a fresh process; return the JSON it prints."""
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env=os.environ | {"GOMP_SPINCOUNT": SPIN} | dict(environment or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        reason = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise VitrailError(f"{' '.join(words)} failed: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def per_image(out: Path) -> float:
    """Median seconds per image, from the end of one step to the end of the next."""
    lines = (out / METRICS).read_text(encoding="utf-8").splitlines()
    steps = [row for row in map(json.loads, lines) if "loss" in row]
    return statistics.median(
        (after["seconds"] - before["seconds"]) / (TRAIN_IMAGES * (after["epoch"] - before["epoch"]))
        for before, after in pairwise(steps)
    )


def write_noise(path: Path) -> None:
    """Write small images of noise; every model resizes them."""
    rng = np.random.default_rng(0)
    parts = {}
    for split, count in (("train", TRAIN_IMAGES), ("test", TEST_IMAGES)):
        parts[f"x_{split}"] = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
        parts[f"y_{split}"] = np.arange(count) % CLASSES
    np.savez(path, **parts)


# In the process of a case


def write(name: str, folder: str) -> None:
    import vitrail
    from vitrail.models.vit import create

    vitrail.save(create(name), folder)


def run(words: Sequence[str]) -> None:
    """Run one command, or (`look`) a forward pass through the first blocks of a model."""
    if words[0] == "look":
        forward_first_blocks(words[1])
    elif status := main(words):
        sys.exit(status)


def forward_first_blocks(reference: str) -> None:
    import torch

    import vitrail

    model = vitrail.load(reference).eval()
    all_blocks = model.encoder.blocks  # stay in memory
    model.encoder.blocks = all_blocks[:BLOCKS]
    size = model.config.image_size
    with torch.inference_mode():
        model.features(torch.randn(FULL, 3, size, size))


def work(kind: str, *words: str) -> None:
    start = time.monotonic()
    if kind == "write":
        write(*words)
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (int(words[0]),) * 2)
        run(words[1:])
    result = {"peak": resident_bytes("VmHWM"), "seconds": time.monotonic() - start}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        work(*sys.argv[1:])
    else:
        print(report())
