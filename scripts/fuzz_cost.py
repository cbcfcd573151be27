"""Fuzz for cost: grow images, archives and HTTP requests, and look at CPU time and memory.

    python scripts/fuzz_cost.py --minutes 5
    python scripts/fuzz_cost.py --minutes 30 --targets image tar --seed 1 --json report.json
    python scripts/fuzz_cost.py --replay /tmp/findings/image-jpeg-scans-1f2e3d4c.bin --targets image

Every input runs in a worker process (`fuzz_targets.py`). It is a finding if it costs more CPU time
or memory than its size allows, if twice the input costs three times as much, or if it ends in
anything but a result or a `VitrailError`. CPU time is counted in reference units, the time that
this machine takes to decode a JPEG of one megapixel, and a finding is measured again before it is
one.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fuzz_inputs import Family, named, random_family, seeds
from fuzz_targets import FRAME, MAX_PIXELS, NOTEWORTHY, TARGETS

MB = 2**20
WORKER = Path(__file__).with_name("fuzz_targets.py")
MAX_BYTES = MB
STEEP = 1.6  # exponent of cost over bytes; 1 is linear, 2 quadratic, 1.5 a dictionary out of cache
KILL = 2  # times the bound at which the worker gives up
WALL_SECONDS = 240.0  # for one input, asleep or waiting for a busy machine
CLEAR = "\r\033[K" if sys.stderr.isatty() else ""
ROUNDS = 3  # a finding is the smallest of this many measurements


@dataclass(frozen=True)
class Bound:
    """What an input may cost: CPU in reference units, memory in bytes, both with its size."""

    cpu: float = 30.0
    cpu_per_mb: float = 120.0
    memory: int = 64 * MB
    memory_per_byte: float = 40.0
    memory_per_pixel: float = 0.0

    def cpu_for(self, size: int) -> float:
        return self.cpu + self.cpu_per_mb * size / MB

    def memory_for(self, size: int, pixels: int | None) -> float:
        pixels = MAX_PIXELS if pixels is None else pixels  # refused, perhaps after decoding
        return self.memory + self.memory_per_byte * size + self.memory_per_pixel * pixels


BOUNDS = {
    "image": Bound(cpu=16.0, memory=16 * MB, memory_per_byte=20.0, memory_per_pixel=30.0),
    "npz": Bound(cpu=120.0, memory=320 * MB),  # a small archive may unpack to 256 MB
    "idx": Bound(cpu=120.0, memory=320 * MB),
    "http": Bound(memory=8 * MB, memory_per_byte=4.0),
    "http-drip": Bound(cpu_per_mb=240.0, memory=8 * MB, memory_per_byte=4.0),  # 16,384 reads a MB
    "server": Bound(memory=16 * MB, memory_per_byte=8.0),
}


@dataclass(frozen=True)
class Cost:
    """What one input took."""

    cpu: float  # seconds
    memory: int  # bytes above what the worker had before
    reference: float  # seconds of the reference computation
    outcome: str  # accepted, refused, or what went wrong
    size: int
    pixels: int | None = None  # of an image that was accepted

    @property
    def units(self) -> float:
        return self.cpu / self.reference


@dataclass(frozen=True)
class Finding:
    """An input that costs too much."""

    target: str
    family: str
    n: int
    kind: str  # cpu, memory, growth, crash or killed
    text: str
    cost: Cost
    data: bytes = field(repr=False)


@dataclass
class Tally:
    """What a target has shown so far."""

    inputs: int = 0
    accepted: int = 0
    findings: int = 0
    cpu_per_mb: float = 0.0  # worst seconds, over inputs above the noise
    memory_per_mb: float = 0.0  # worst MB


class Worker:
    """The process that runs inputs; started anew when one has ended it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.process, self.warm, self.unit = folder, None, set[str](), 0.02

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        limits = {
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "1048576",
            "MALLOC_ARENA_MAX": "1",
        }
        command = [sys.executable, str(WORKER), str(self.folder)]
        self.process = subprocess.Popen(
            command, stdin=-1, stdout=-1, stderr=subprocess.DEVNULL, env=os.environ | limits
        )
        self.warm = set()

    def run(self, target: str, data: bytes) -> Cost:
        if self.process is None:
            self.start()
        if target not in self.warm:
            self.ask(target, seeds(target)[0])
            self.warm.add(target)
        return self.ask(target, data)

    def ask(self, target: str, data: bytes) -> Cost:
        limit = KILL * bound_of(target).cpu_for(len(data)) * self.unit
        assert self.process is not None
        try:
            self.process.stdin.write(FRAME.pack(target.encode(), limit, len(data)) + data)
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # reported below
        ready, *_ = select.select([self.process.stdout], [], [], WALL_SECONDS)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            return Cost(limit, 0, self.unit, f"killed: {self.death(bool(ready), limit)}", len(data))
        cost = Cost(**json.loads(line), size=len(data))
        self.unit = cost.reference
        return cost

    def death(self, ended: bool, limit: float) -> str:
        """Why there is no answer."""
        code = self.process.wait() if ended else None
        self.stop()
        if code is None:
            return f"no answer within {WALL_SECONDS:.0f} s"
        return f"more than {limit:.1f} CPU s" if code == -signal.SIGXCPU else f"exit code {code}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def bound_of(target: str) -> Bound:
    return BOUNDS.get(target, Bound())


def excess(target: str, cost: Cost) -> tuple[str, str] | None:
    """Which bound an input breaks, and the numbers."""
    bound = bound_of(target)
    if cost.outcome.startswith("killed"):
        return "killed", cost.outcome.removeprefix("killed: ")
    if cost.outcome.startswith("crash"):
        return "crash", cost.outcome
    if cost.units > (most := bound.cpu_for(cost.size)):
        return "cpu", f"{cost.cpu:.2f} s = {cost.units:.0f} units, allowed {most:.0f}"
    if cost.memory > (most := bound.memory_for(cost.size, cost.pixels)):
        return "memory", f"{cost.memory / MB:.0f} MB, allowed {most / MB:.0f}"
    return None


def largest(family: Family, max_bytes: int) -> int:
    """The largest n whose input fits, found without making much larger ones."""
    n, size = 1, len(family.make(1))
    while n < family.most:
        step = min(8 * n, family.most)
        grown = len(family.make(step))
        slope = (grown - size) / (step - n)
        fits = int(n + (max_bytes - size) / slope) if slope > 0 else family.most
        if fits <= 8 * step:
            return max(1, min(fits, family.most))
        n, size = step, grown
    return family.most


def examine(family: Family, worker: Worker, n: int, tally: Tally | None = None) -> Finding | None:
    """Measure one size of a family, and smaller ones if it costs something."""
    data = family.make(n)
    cost = worker.run(family.target, data)
    if tally is not None:
        note(tally, cost)
    broken = excess(family.target, cost)
    for _ in range(ROUNDS - 1):
        if broken is None or broken[0] == "crash":
            break
        if broken[0] == "memory":
            worker.stop()  # memory that was kept for others would not count
        again = worker.run(family.target, data)
        if again.outcome.startswith("killed"):
            break
        cost = min(cost, again, key=lambda cost: cost.units)
        broken = excess(family.target, cost)
    if broken is None and cost.units > NOTEWORTHY:
        broken = steepness(family, worker, n, cost)
    if broken is None:
        return None
    return Finding(family.target, family.name, n, *broken, cost, data)


def steepness(family: Family, worker: Worker, n: int, full: Cost) -> tuple[str, str] | None:
    """Whether cost grows faster than size, over two doublings."""
    if n < 8 or full.size < 1.8 * len(family.make(n // 2)):
        return None  # something else than size grows
    points = []
    for part in (n // 4, n // 2, n):
        costs = [worker.run(family.target, family.make(part)) for _ in range(ROUNDS)]
        points.append(min(costs, key=lambda cost: cost.units))
    exponents = [
        math.log(max(b.cpu, 1e-6) / max(a.cpu, 1e-6)) / math.log(b.size / a.size)
        for a, b in itertools.pairwise(points)
    ]
    if min(exponents) < STEEP or points[-1].units < NOTEWORTHY:
        return None
    times = " → ".join(f"{cost.cpu:.3f} s at {cost.size / 1024:.0f} kB" for cost in points)
    return "growth", f"{times} (exponent {min(exponents):.1f})"


def note(tally: Tally, cost: Cost) -> None:
    tally.inputs += 1
    tally.accepted += cost.outcome == "accepted"
    size = max(cost.size, 1024) / MB
    if cost.units > NOTEWORTHY:
        tally.cpu_per_mb = max(tally.cpu_per_mb, cost.cpu / size)
    if cost.memory > 4 * MB:
        tally.memory_per_mb = max(tally.memory_per_mb, cost.memory / MB / size)


def cases(targets: Sequence[str], seed: int, max_bytes: int) -> Iterator[tuple[Family, int]]:
    """Yield every named family once at its largest size, mixed with endless random ones."""
    families = [family for family in named().values() if family.target in targets]
    random.Random(seed).shuffle(families)
    waiting = list(families)
    for number in itertools.count():
        rng = random.Random(f"{seed} {number}")
        if waiting and number % 4 == 0:
            family = waiting.pop()
            yield family, largest(family, max_bytes)
            continue
        family = random_family(rng.choice(targets), rng)
        if families and rng.random() < 0.1:
            family = rng.choice(families)  # at another size
        top = largest(family, max_bytes)
        smaller = int(math.exp(rng.uniform(0, math.log(top + 1))))
        yield family, top if rng.random() < 0.5 else smaller


def save(finding: Finding, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(finding.data).hexdigest()[:8]
    name = re.sub(r"[^\w]+", "-", f"{finding.target}-{finding.family}")
    path = folder / f"{name}-{finding.kind}-{digest}.bin"
    path.write_bytes(finding.data)
    return path


def fuzz(arguments: argparse.Namespace, worker: Worker) -> tuple[dict[str, Tally], list[dict]]:
    """Run cases until the time is over; tallies by target, and findings."""
    tallies = {target: Tally() for target in arguments.targets}
    findings, seen = [], set()
    started, until = time.monotonic(), time.monotonic() + 60 * arguments.minutes
    for family, n in cases(arguments.targets, arguments.seed, arguments.max_bytes):
        if time.monotonic() > until:
            break
        tally = tallies[family.target]
        finding = examine(family, worker, n, tally)
        if finding is not None and (finding.family, finding.kind) not in seen:
            seen.add((finding.family, finding.kind))
            tally.findings += 1
            path = save(finding, arguments.out)
            about = {k: v for k, v in asdict(finding).items() if k != "data"}
            findings.append(about | {"file": str(path), "size": len(finding.data)})
            what = f"{finding.kind:7} {finding.family} (n={n}, {len(finding.data):,} bytes)"
            print(f"{CLEAR}{what}: {finding.text}\n        {path}", flush=True)
        if sys.stderr.isatty():
            total = sum(tally.inputs for tally in tallies.values())
            seconds = time.monotonic() - started
            line = f"{seconds:.0f} s, {total:,} inputs, {len(findings)} findings: {family.name}"
            print(f"{CLEAR}{line[:99]}", end="", file=sys.stderr, flush=True)
    return tallies, findings


def report(tallies: dict[str, Tally], findings: list[dict]) -> None:
    print(
        f"\n{'target':<13}{'inputs':>8}{'accepted':>10}{'findings':>10}"
        f"{'CPU s/MB':>10}{'MB/MB':>10}"
    )
    for target, tally in tallies.items():
        print(f"{target:<13}{tally.inputs:>8,}{tally.accepted:>10,}{tally.findings:>10}"
              f"{tally.cpu_per_mb:>10.2f}{tally.memory_per_mb:>10.1f}")  # fmt: skip
    print(f"{len(findings)} findings")


def replay(path: Path, target: str, worker: Worker) -> None:
    cost = worker.run(target, path.read_bytes())
    broken = excess(target, cost)
    print(
        f"{cost.outcome}: {cost.cpu:.3f} CPU s ({cost.units:.1f} units), {cost.memory / MB:.1f} MB"
    )
    print(": ".join(broken) if broken else "within bounds")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir(), "findings"))
    parser.add_argument("--json", type=Path, help="write the report here")
    parser.add_argument("--replay", type=Path, help="measure one saved input, of the first target")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        worker = Worker(Path(folder) / "work")
        try:
            if arguments.replay:
                replay(arguments.replay, arguments.targets[0], worker)
                return 0
            tallies, findings = fuzz(arguments, worker)
        finally:
            worker.stop()
    report(tallies, findings)
    if arguments.json:
        targets = {name: asdict(tally) for name, tally in tallies.items()}
        arguments.json.write_text(json.dumps({"targets": targets, "findings": findings}, indent=2))
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
