"""Kill a run at random moments, resume it each time, and compare with one that was not interrupted.

    python tests/training/kill_and_resume.py --kills 20

A run saves its state every few steps, so that some of the kills come while it is being written.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import vitrail
from processes import fork
from tiny_runs import write_colors
from vitrail.cli import main

STEPS = 120


def arguments(
    data: Path, out: Path, *, resume: bool, steps: int = STEPS, base: str = ""
) -> list[str]:
    """Return the arguments of a command that trains, or that fine-tunes `base` with LoRA."""
    args = ["finetune" if base else "train", str(data), "--out", str(out)]
    if resume and (out / "settings.toml").exists():
        return [*args, "--resume"]
    args += ["--steps", str(steps), "--batch-size", "6", "--machine.precision", "float32"]
    args += ["--optim.learning-rate", "1e-3", "--average", "0.9", "--save-minutes", "0.002"]
    if base:
        return [*args, "--from", base, "--lora", "2", "--optim.kind", "adamw"]
    args += ["--optim.kind", "muon"]
    args += ["--model.name", "ViT-Mu/4", "--model.image-size", "8", "--model.dropout", "0.1"]
    args += ["--image-sizes", "0", "4", "0.5", "8"]
    return [*args, "--mix.mixup", "0.2", "--evaluate-every", "20"]


def count_rows(out: Path) -> int:
    metrics = out / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def wait_for_rows(out: Path, rows: int, is_running: Callable[[], bool]) -> bool:
    """Wait for so many lines of metrics; return whether the process is still running then."""
    deadline = time.monotonic() + 280
    while is_running() and time.monotonic() < deadline:
        if count_rows(out) >= rows:
            return True
        time.sleep(0.01)
    return False


def where(out: Path) -> str:
    """Return the states of a killed run, complete and partial."""
    state = out / "state"
    return ", ".join(sorted(p.name for p in state.iterdir())) if state.exists() else "no state"


def kill_and_resume(folder: Path, kills: int, seed: int, **options: Any) -> tuple[int, list[str]]:
    """Return how many kills hit a running process, and which weights differ.

    `options` are those of `arguments`. Only runs that are killed need a process of their own.
    """
    data, steps = write_colors(folder / "colors.npz"), options.get("steps", STEPS)
    assert main(arguments(data, folder / "alone", resume=False, **options)) == 0
    draw, hits, out = random.Random(seed), 0, folder / "killed-0"
    for number in range(kills):
        args, log = arguments(data, out, resume=True, **options), folder / "log"
        process = fork(main, args, output=log)
        rows = draw.randint(min(count_rows(out) + 1, steps), steps)
        if wait_for_rows(out, rows, process.is_alive):
            time.sleep(draw.uniform(0, 0.1))  # between two steps, or while a state is written
            process.kill()
            hits += 1
        process.join()
        print(f"{out.name} ended with {process.exitcode}: {where(out)}", flush=True)
        assert process.exitcode in (0, -signal.SIGKILL), log.with_suffix(".errors").read_text()
        if (out / "config.json").exists() and not (out / "state").exists():
            out = folder / f"killed-{number + 1}"  # it was finished: begin another
    assert main(arguments(data, out, resume=True, **options)) == 0
    expected, different = vitrail.load(folder / "alone").state_dict(), []
    for killed in sorted(folder.glob("killed-*")):
        if not (killed / "config.json").exists():
            continue
        weights = vitrail.load(killed).state_dict()
        changed = [name for name in expected if not torch.equal(expected[name], weights[name])]
        different += [f"{killed.name}: {name}" for name in changed]
    return hits, different


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        hits, different = kill_and_resume(Path(temporary), options.kills, options.seed)
    summary = "different: " + ", ".join(different) if different else "all weights are identical"
    print(f"{hits} of {options.kills} kills hit a running process; {summary}")
