"""Time to accuracy from scratch: vitrail against its peers (fine-tuning: `transfer.py`).

    python benchmarks/race.py                         from scratch: a section of `make bench`
    python benchmarks/race.py try cifar --seconds 30  every variant of every peer, once

Every run has its own process, and its result is cached. Datasets are read from the folder DATA.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import result_cache
from race_clock import EVALUATIONS
from race_report import Entry, budgets, conclusion, figure, table
from race_sets import DATASETS, RaceDataset, missing
from race_variants import BEST, VARIANTS

SEEDS = (0, 1, 2)
TRIED = 100  # seed of the trials of variants
SHARES = (1, 2, 3, 4, 6)  # vitrail runs with these fractions of the time
THREADS = 2
FIGURE = Path(__file__).parents[1] / "benchmarks" / "figures" / "race.svg"
Key = tuple[str, str, float]  # set, contender, seconds


def report() -> str:
    """Return the section on training from scratch; cached runs are not repeated."""
    head = ["## Time to accuracy", ""]
    if reason := missing(list(DATASETS)):
        return "\n".join([*head, reason, ""])
    runs: dict[Key, list[dict[str, Any]]] = {}
    for seed in SEEDS:
        for name, course in DATASETS.items():
            race(runs, name, course, seed)
    lines = [*head, *RULES.format(seeds=len(SEEDS), looks=EVALUATIONS).splitlines(), ""]
    lines += ["![Accuracy over seconds of training](figures/race.svg)", ""]
    panels = {}
    for name, course in DATASETS.items():
        ours, peers = entries(runs, name, course)
        panels[course.title] = ours, peers
        lines += [f"### {course.title}, {course.seconds:g} seconds", ""]
        lines += [*table([*peers, *ours]), "", *conclusion(course.title, ours, peers)]
        lines += [budgets(ours, peers), ""]
    FIGURE.parent.mkdir(parents=True, exist_ok=True)
    FIGURE.write_text(figure(panels), encoding="utf-8")
    return "\n".join(lines)


def race(
    runs: dict[Key, list[dict[str, Any]]],
    name: str,
    course: RaceDataset,
    seed: int,
) -> None:
    """Run all libraries with one seed and add the results to `runs`."""
    for contender, variant in BEST[name].items():
        result = measured(name, contender, variant, course.seconds, seed)
        runs.setdefault((name, contender, course.seconds), []).append(result)
    for share in SHARES:
        seconds = course.seconds / share
        result = measured(name, "vitrail", "", seconds, seed)
        runs.setdefault((name, "vitrail", seconds), []).append(result)


def entries(
    runs: dict[Key, list[dict[str, Any]]], name: str, course: RaceDataset
) -> tuple[list[Entry], list[Entry]]:
    """Return the results on a dataset: ours, and the peers'."""
    ours = [
        Entry("vitrail", "defaults", runs[name, "vitrail", course.seconds / share])
        for share in SHARES
    ]
    peers = [
        Entry(contender, variant, runs[name, contender, course.seconds])
        for contender, variant in BEST[name].items()
    ]
    return ours, peers


def measured(name: str, contender: str, variant: str, seconds: float, seed: int) -> dict[str, Any]:
    """Return the result of a run in its own process, or its cached result."""
    words = ["race", name, contender, variant, f"{seconds:g} s", f"seed {seed}"]
    key = " ".join(filter(None, [*words, result_cache.version(contender, "race_*.py")]))
    options = ["--variant", variant, "--seconds", str(seconds), "--seed", str(seed)]
    return result_cache.cached(key, lambda: run_process(key, [contender, name, *options]))


def run_process(what: str, options: list[str]) -> dict[str, Any]:
    """Run `runners.py` and return the JSON that it prints."""
    print(f"  {what}", flush=True)
    command = [sys.executable, str(Path(__file__).with_name("runners.py")), *options]
    threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | threads
    )
    if done.returncode:
        raise SystemExit(f"{what} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def try_all(name: str, seconds: float) -> str:
    """Return a table of all variants of all peers, and vitrail with all and a third of the time."""
    peers = [
        Entry(contender, variant, [measured(name, contender, variant, seconds, TRIED)])
        for contender, variants in VARIANTS.items()
        for variant in variants
    ]
    ours = [
        Entry("vitrail", "defaults", [measured(name, "vitrail", "", time, TRIED)])
        for time in (seconds, seconds / 3)
    ]
    best = {peer.name: peer.settings for peer in sorted(peers, key=lambda peer: peer.accuracy)}
    return "\n".join([*table([*peers, *ours]), "", f"best: {best}"])


RULES = """\
All libraries train from scratch on the same images and the same two cores for the same time. The
peers' ViTs have the depth, width, heads, patch and image size of the model that vitrail chooses,
with plain patches and a class token, and wider MLPs so that a forward pass costs the same;
vitrail's model has a convolutional stem and no class token. Only training time counts: the clock
stops during the {looks} evaluations of a run, on all test images. The peers get decoded images and
learning rate schedules that fit the time (vit-pytorch's rate is constant, as in its readme);
each runs with the best of the settings tried for it on the dataset (`benchmarks/race_variants.py`).
vitrail runs with a time budget only: the whole time, a half, a third, a quarter, a sixth, each a
separate run, including inspecting the data, planning and decoding. Its defaults come from trials,
many of them on these datasets ([notebook.md](../docs/notebook.md)). GFLOPs are those of a forward
pass of one image at full size. {seeds} seeds, interleaved.

The speedup compares the time at which the best peer reaches its best mean accuracy with the
shortest of vitrail's runs whose worst seed is at least as good.

Published, on the 50,000 training images of the full CIFAR-10 and other machines (Compact
Transformers, [arXiv:2104.05704](https://arxiv.org/abs/2104.05704), and its repository): CCT-2/3x2,
0.28 million weights, has 89.2% after 200 epochs; a CCT reaches 80% in under 30 minutes on a
desktop CPU. Neither was run here: the dataset below has a fifth of these training images."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["race", "try"], default="race")
    parser.add_argument("course", nargs="?", choices=list(DATASETS), default="fashion")
    parser.add_argument("--seconds", type=float, help="of each trial; without it, as in the race")
    options = parser.parse_args()
    if options.what == "race":
        print(report())
        return
    course = DATASETS[options.course]
    print(try_all(options.course, options.seconds or course.seconds))


if __name__ == "__main__":
    main()
