"""Numbers about the server, as Prometheus reads them (text format 0.0.4)."""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock

Labels = tuple[str, ...]
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
STATM = Path("/proc/self/statm")


class Counter:
    """A number that only grows, for each set of labels."""

    kind = "counter"

    def __init__(self, name: str, about: str, labels: Labels = ()) -> None:
        self.name, self.about, self.labels = name, about, labels
        self.values: dict[Labels, float] = {} if labels else {(): 0}
        self.lock = Lock()

    def add(self, *labels: str, amount: float = 1) -> None:
        with self.lock:
            self.values[labels] = self.values.get(labels, 0) + amount

    def lines(self) -> Iterator[str]:
        for labels, value in sorted(self.values.copy().items()):
            yield f"{self.name}{braces(self.labels, labels)} {value:.15g}"


class Gauge:
    """What is true now."""

    kind = "gauge"

    def __init__(self, name: str, about: str, read: Callable[[], float]) -> None:
        self.name, self.about, self.read = name, about, read

    def lines(self) -> Iterator[str]:
        yield f"{self.name} {self.read():.12g}"


class Histogram:
    """How many of the values were at most each bound, for each set of labels."""

    kind = "histogram"

    def __init__(self, name: str, about: str, bounds: Sequence[float], labels: Labels = ()) -> None:
        self.name, self.about, self.bounds, self.labels = name, about, tuple(bounds), labels
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}
        self.lock = Lock()

    def see(self, value: float, *labels: str) -> None:
        with self.lock:
            counts = self.counts.setdefault(labels, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1
            self.sums[labels] = self.sums.get(labels, 0.0) + value

    def lines(self) -> Iterator[str]:
        for labels, counts in sorted(self.counts.copy().items()):
            total = 0
            for bound, count in zip((*self.bounds, "+Inf"), counts, strict=True):
                total += count
                names, values = (*self.labels, "le"), (*labels, f"{bound}")
                yield f"{self.name}_bucket{braces(names, values)} {total}"
            yield f"{self.name}_sum{braces(self.labels, labels)} {self.sums[labels]:.15g}"
            yield f"{self.name}_count{braces(self.labels, labels)} {total}"


class Meters:
    """Everything that is counted."""

    def __init__(
        self,
        *,
        queue: Callable[[], float],
        in_flight: Callable[[], float],
        stuck: Callable[[], float],
    ) -> None:
        self.requests = Counter("vitrail_requests_total", "Requests.", ("route", "status"))
        self.rejected = Counter("vitrail_rejected_total", "Requests refused.", ("reason",))
        self.pictures = Counter("vitrail_pictures_total", "Pictures that were looked at.")
        self.unreadable = Counter("vitrail_unreadable_total", "Pictures that were none.")
        self.seconds = Histogram(
            "vitrail_request_seconds", "From first to last byte.", SECONDS, ("route",)
        )
        self.stages = Histogram(
            "vitrail_stage_seconds", "Waiting, preparing, running.", SECONDS, ("stage",)
        )
        self.batches = Histogram("vitrail_batch_pictures", "Pictures at once.", SIZES)
        self.queue = Gauge("vitrail_queue_pictures", "Pictures let in, not yet answered.", queue)
        self.in_flight = Gauge("vitrail_requests_in_flight", "Requests under way.", in_flight)
        self.stuck = Gauge("vitrail_stuck_threads", "Threads beyond the watchdog's limit.", stuck)
        self.memory = Gauge("process_resident_memory_bytes", "Memory in use.", resident)

    def text(self) -> str:
        """All of it."""
        lines = []
        for meter in vars(self).values():
            lines += [f"# HELP {meter.name} {meter.about}", f"# TYPE {meter.name} {meter.kind}"]
            lines += meter.lines()
        return "\n".join(lines) + "\n"


def braces(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{n}="{escaped(v)}"' for n, v in zip(names, values, strict=True)) + "}"


def escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def resident() -> int:
    """Bytes of memory that this process has; 0 where nobody tells."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0
