"""Time to accuracy from scratch: vitrail against its peers (fine-tuning: `transfer.py`).

    python benchmarks/race.py                         from scratch: a section of `make bench`
    python benchmarks/race.py try cifar --seconds 30  every variant of every peer, once

Every run has a process of its own and the machine to itself, and is kept when it is done. The data
sets are read from the folder DATA.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kept
from race_clock import LOOKS
from race_report import Entry, budgets, conclusion, figure, table
from race_sets import COURSES, Course, missing
from race_variants import BEST, VARIANTS

SEEDS = (0, 1, 2)
TRIED = 100  # the seed that variants are tried with
SHARES = (1, 2, 3, 4, 6)  # vitrail is run with all of the time, and with less of it
THREADS = 2
FIGURE = Path(__file__).parents[1] / "benchmarks" / "figures" / "race.svg"
Key = tuple[str, str, float]  # set, contender, seconds


def report() -> str:
    """The section on training from scratch; runs that are kept are not run again."""
    head = ["## Time to accuracy", ""]
    if told := missing(list(COURSES)):
        return "\n".join([*head, told, ""])
    runs: dict[Key, list[dict[str, Any]]] = {}
    for seed in SEEDS:
        for name, course in COURSES.items():
            race(runs, name, course, seed)
    lines = [*head, *RULES.format(seeds=len(SEEDS), looks=LOOKS).splitlines(), ""]
    lines += ["![Accuracy over seconds of training](figures/race.svg)", ""]
    panels = {}
    for name, course in COURSES.items():
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
    course: Course,
    seed: int,
) -> None:
    """All contenders with one seed, in turns; adds what came out to `runs`."""
    for contender, variant in BEST[name].items():
        result = measured(name, contender, variant, course.seconds, seed)
        runs.setdefault((name, contender, course.seconds), []).append(result)
    for share in SHARES:
        seconds = course.seconds / share
        result = measured(name, "vitrail", "", seconds, seed)
        runs.setdefault((name, "vitrail", seconds), []).append(result)


def entries(
    runs: dict[Key, list[dict[str, Any]]], name: str, course: Course
) -> tuple[list[Entry], list[Entry]]:
    """What came out for a set: ours, and the peers."""
    ours = [
        Entry("vitrail", "nothing given", runs[name, "vitrail", course.seconds / share])
        for share in SHARES
    ]
    peers = [
        Entry(contender, variant, runs[name, contender, course.seconds])
        for contender, variant in BEST[name].items()
    ]
    return ours, peers


def measured(name: str, contender: str, variant: str, seconds: float, seed: int) -> dict[str, Any]:
    """A run in a process of its own, or what was kept of it."""
    words = ["race", name, contender, variant, f"{seconds:g} s", f"seed {seed}"]
    key = " ".join(filter(None, [*words, version(contender)]))
    options = ["--variant", variant, "--seconds", str(seconds), "--seed", str(seed)]
    return kept.kept(key, lambda: alone(key, [contender, name, *options]))


def version(contender: str) -> str:
    """What a result depends on, as a few letters: our code, or how the peers are run."""
    here = Path(__file__).parent
    ours = sorted((here.parent / "src" / "vitrail").rglob("*.py"))
    theirs = sorted(here.glob("race_*.py"))
    digest = hashlib.sha256()
    for path in ours if contender == "vitrail" else theirs:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def alone(what: str, options: list[str]) -> dict[str, Any]:
    """What `runners.py` prints."""
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
    """Every variant of every peer once, and vitrail with all and a third of the time: a table."""
    peers = [
        Entry(contender, variant, [measured(name, contender, variant, seconds, TRIED)])
        for contender, variants in VARIANTS.items()
        for variant in variants
    ]
    ours = [
        Entry("vitrail", "nothing given", [measured(name, "vitrail", "", time, TRIED)])
        for time in (seconds, seconds / 3)
    ]
    best = {peer.name: peer.settings for peer in sorted(peers, key=lambda peer: peer.accuracy)}
    return "\n".join([*table([*peers, *ours]), "", f"best: {best}"])


RULES = """\
Everybody trains from scratch on the same pictures and the same two cores for the same time. The
peers have ViTs of the depth, width, heads, patch and image size of the model that vitrail chooses
by itself, with patches and class token as their libraries have them and MLPs so much wider that a
picture costs the same; vitrail's has a convolutional stem and no class token. What counts is the
time of training: the clock stands still while a model is judged, by all test pictures, {looks}
times in a run. The peers get their pictures decoded, and learning rates that fall with the clock
(vit-pytorch's is constant, as in its readme); each is run with the best of the settings that were
tried for it on this set (`benchmarks/race_variants.py`). vitrail is given the data and the time:
all of it, a half, a third, a quarter and a sixth, each a run of its own; its time includes looking
at the data, planning and decoding. Its defaults come from trials, many of them on these sets
([notebook.md](../docs/notebook.md)). GFLOPs are those of a forward pass of one
picture at full size. {seeds} seeds, taken in turns.

*Times quicker* compares the time at which the best peer was best, in the mean over the seeds, with
the shortest of vitrail's runs whose worst seed ends at least as good."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["race", "try"], default="race")
    parser.add_argument("course", nargs="?", choices=list(COURSES), default="fashion")
    parser.add_argument("--seconds", type=float, help="of each trial; without it, as in the race")
    options = parser.parse_args()
    if options.what == "race":
        print(report())
        return
    course = COURSES[options.course]
    print(try_all(options.course, options.seconds or course.seconds))


if __name__ == "__main__":
    main()
