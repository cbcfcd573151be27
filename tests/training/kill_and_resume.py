"""Kill a run at random moments, resume it each time, and compare with one that was not interrupted.

    python tests/training/kill_and_resume.py --kills 20

A run saves its state every few steps, so that some of the kills come while it is being written.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS = 120


def command(
    data: Path, out: Path, *, resume: bool, steps: int = STEPS, base: str = ""
) -> list[str]:
    """Return a command that trains, or that fine-tunes `base` with LoRA."""
    name = "finetune" if base else "train"
    args = [sys.executable, "-m", "vitrail", name, str(data), "--out", str(out)]
    if resume and (out / "settings.toml").exists():
        return [*args, "--resume"]
    args += ["--steps", str(steps), "--batch-size", "6"]
    args += ["--optim.learning-rate", "1e-3", "--average", "0.9", "--save-minutes", "0.005"]
    if base:
        return [*args, "--from", base, "--lora", "2", "--optim.kind", "adamw"]
    args += ["--optim.kind", "muon"]
    args += ["--model.name", "ViT-Mu/4", "--model.image-size", "8", "--model.dropout", "0.1"]
    args += ["--image-sizes", "0", "4", "0.5", "8"]
    return [*args, "--mix.mixup", "0.2", "--evaluate-every", "20"]


def start(data: Path, out: Path, **options: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(data, out, **options),
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[bytes]) -> None:
    _, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors.decode()


def where(out: Path) -> str:
    """Return the states of a killed run, complete and partial."""
    state = out / "state"
    return ", ".join(sorted(p.name for p in state.iterdir())) if state.exists() else "no state"


def kill_and_resume(folder: Path, kills: int, seed: int, **options: Any) -> tuple[int, list[str]]:
    """Return how many kills hit a running process, and which weights differ.

    `options` are those of `command`.
    """
    import torch

    import vitrail
    from tiny_runs import write_colors

    data = write_colors(folder / "colors.npz")
    started = time.monotonic()
    finish(start(data, folder / "alone", resume=False, **options))
    whole = time.monotonic() - started
    draw, hits, out = random.Random(seed), 0, folder / "killed-0"
    for number in range(kills):
        process = start(data, out, resume=True, **options)
        try:
            process.wait(timeout=draw.uniform(0.3 * whole, 0.95 * whole))
            if process.returncode != 0:
                raise AssertionError(process.stderr.read().decode() if process.stderr else "")
            out = folder / f"killed-{number + 1}"  # it was faster than the kill: begin another
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            hits += 1
            print(f"killed: {out.name}, {where(out)}", flush=True)
            if (out / "config.json").exists() and not (out / "state").exists():
                out = folder / f"killed-{number + 1}"  # it was finished, but had not exited
        finally:
            if process.stderr:
                process.stderr.close()
    finish(start(data, out, resume=True, **options))
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
