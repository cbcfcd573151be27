"""Tables, claims and figure of the race, from its results."""

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from timing import claim

Run = dict[str, Any]  # what a runner prints


@dataclass(frozen=True)
class Entry:
    """A contender with its settings, and its runs, one for each seed."""

    name: str
    settings: str
    runs: Sequence[Run]

    @property
    def accuracy(self) -> float:
        return statistics.mean(run["accuracy"] for run in self.runs)

    @property
    def lowest(self) -> float:
        return min(run["accuracy"] for run in self.runs)

    @property
    def seconds(self) -> float:
        return statistics.mean(run["seconds"] for run in self.runs)

    def curve(self) -> list[tuple[float, float]]:
        """Return seconds and accuracy at each evaluation, mean over seeds."""
        points = zip(*(run["curve"] for run in self.runs), strict=True)
        return [tuple(map(statistics.mean, zip(*point, strict=True))) for point in points]


@dataclass(frozen=True)
class Best:
    """The best accuracy of any peer at any time, mean over seeds."""

    name: str
    seconds: float
    accuracy: float


def best_of(peers: Sequence[Entry]) -> Best:
    points = [Best(peer.name, *point) for peer in peers for point in peer.curve()]
    return max(points, key=lambda point: point.accuracy)


def quickest(ours: Sequence[Entry], best: Best) -> Entry | None:
    """Return our shortest run that matches the peers' best with every seed; None if none does."""
    good = [entry for entry in ours if entry.lowest >= best.accuracy]
    return min(good, key=lambda entry: entry.seconds, default=None)


def times_quicker(ours: Sequence[Entry], best: Best) -> float | None:
    """Return the peer's time to its best accuracy divided by ours."""
    entry = quickest(ours, best)
    return None if entry is None else best.seconds / entry.seconds


def conclusion(title: str, ours: Sequence[Entry], peers: Sequence[Entry]) -> list[str]:
    """Return the claim on the speedup and the numbers behind it."""
    best, times = best_of(peers), times_quicker(ours, best_of(peers))
    found = "not reached" if times is None else f"{times:.1f} times as fast as {best.name}"
    runs = [
        f"{entry.accuracy:.1%} after {entry.seconds:.0f} s"
        for entry in sorted(ours, key=lambda entry: entry.seconds)
    ]
    return [
        claim(f"To the peers' best accuracy, {title}", found),
        "",
        f"The best of the peers is {best.name}: {best.accuracy:.1%} after {best.seconds:.0f} s. "
        f"vitrail's runs end at {', '.join(runs)}.",
    ]


def table(entries: Sequence[Entry]) -> list[str]:
    """Return a row for each library and time budget."""
    lines = [
        "| | settings | parameters | GFLOPs | trained, s | steps | accuracy | from, to |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        run = entry.runs[0]
        found = [run["accuracy"] for run in entry.runs]
        steps = round(statistics.mean(run["steps"] for run in entry.runs))
        lines.append(
            f"| {entry.name} | {entry.settings} | {run['parameters']:,} | {run['gflops']:.4f} "
            f"| {entry.seconds:.1f} | {steps:,} | {entry.accuracy:.1%} "
            f"| {min(found):.1%}, {max(found):.1%} |"
        )
    return lines


def budgets(ours: Sequence[Entry], peers: Sequence[Entry]) -> str:
    """Return how much the models differ in FLOPs: `1.7 % fewer to 2.3 % more`."""
    own = ours[0].runs[0]["gflops"]
    apart = [peer.runs[0]["gflops"] / own - 1 for peer in peers]
    low, high = (f"{abs(x):.1%} {'more' if x >= 0 else 'fewer'}" for x in (min(apart), max(apart)))
    return f"A forward pass costs the peers {low if low == high else f'{low} to {high}'} FLOPs."


COLORS = {"vitrail": "C0", "timm": "C1", "transformers": "C2", "vit-pytorch": "C3"}


def figure(panels: dict[str, tuple[Sequence[Entry], Sequence[Entry]]]) -> str:
    """Return accuracy over seconds of training as SVG, a panel for each dataset."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.fonttype": "none", "svg.hashsalt": "vitrail", "font.size": 9, "axes.grid": True}
    with matplotlib.rc_context(style):
        drawing = Figure(figsize=(4.4 * len(panels), 3.8), layout="constrained")
        axes = drawing.subplots(1, len(panels), squeeze=False)[0]
        for axis, (title, (ours, peers)) in zip(axes, panels.items(), strict=True):
            points = sorted((entry.seconds, entry.accuracy) for entry in ours)
            longest = sorted(peers, key=lambda peer: peer.seconds)  # the last of each is drawn
            curves = {"vitrail": points} | {peer.name: peer.curve() for peer in longest}
            for name, curve in curves.items():
                seconds, accuracy = zip(*curve, strict=True)
                percent, color = [100 * x for x in accuracy], COLORS.get(name)
                axis.plot(seconds, percent, marker="o", label=name, color=color)
            axis.set(title=title, xlabel="seconds of training", ylabel="accuracy (%)")
            axis.legend(title="each point of vitrail is a run")
        buffer = io.StringIO()
        drawing.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
