"""What was found over many pictures, as SVG in the manner of `reports.svg`.

by_layer     a dot for each head: attention distance (figure 7, right), entropy, redundancy
lengths      how long tokens are, layer by layer
fading       how a probability moves as patches come or go
map_of_set   a data set as points

Layers and heads are counted from 0, as in the arrays.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

import numpy as np

from vitrail.formatting import percent
from vitrail.inspection.findings import Scatter
from vitrail.reports.svg import (
    BOLD,
    BOTTOM,
    COLORS,
    HEIGHT,
    LETTER,
    WIDTH,
    Frame,
    log_ticks,
    spread,
    strokes,
    svg,
    ticks,
    tidy,
)

STYLE = """
:root { --tone: 40%; } @media (prefers-color-scheme: dark) { :root { --tone: 68%; } }
.chart .head { fill: var(--s1); opacity: .6; }
.chart .mean { stroke: var(--s1); opacity: .45; }
.chart .most { fill: var(--s1); opacity: .1; }
.chart .half { fill: var(--s1); opacity: .28; }
.chart .plain { stroke: var(--soft); stroke-dasharray: 1 5; }
.chart .plain.center { stroke-dasharray: 7 5; }
.chart .points { fill: none; stroke-width: 5; stroke-linecap: round; opacity: .75; }
.chart .class { font-size: 10.5px; font-weight: 650; text-anchor: middle; paint-order: stroke;
  fill: var(--ink); stroke: var(--paper); stroke-width: 3.5px; stroke-linejoin: round; }
"""
LOG_FROM = 30  # ratio of the longest token to the shortest from which on the scale is logarithmic
MOST_MARKS = 12  # layers that are numbered
ANSWERS = 20  # places of a curve that answer hovering
NAMED = 24  # classes up to which each has its name on the map
MAP_HEIGHT = 270


def by_layer(
    values: np.ndarray,
    *,
    label: str,
    shown: Callable[[float], str] = tidy,
    marks: Sequence[float] | None = None,
) -> str:
    """A dot for each head (L, H) above its layer, and a line through the mean of each layer."""
    layers, heads = values.shape
    known = values[np.isfinite(values)]
    if not known.size:
        return ""
    marks = marks or ticks(min(0.0, float(known.min())), float(known.max()))
    frame = layered(layers, marks, [shown(mark) for mark in marks])
    means = [(layer + 0.5, float(row.mean())) for layer, row in enumerate(values)]
    parts = [levels(frame, shown), layer_numbers(frame, layers)]
    if heads > 1:
        parts.append(f'<path class="line mean" d="{strokes(means, frame)}"/>')
    for layer, head in np.ndindex(layers, heads):
        value = float(values[layer, head])
        if math.isfinite(value):
            parts.append(
                f'<circle class="head" cx="{frame.x(layer + 0.5):.1f}" cy="{frame.y(value):.1f}" '
                f'r="4"><title>layer {layer}, head {head}: {shown(value)}</title></circle>'
            )
    told = f"{label} by layer, a dot for each of {heads} heads: from {shown(known.min())} to "
    return svg(WIDTH, HEIGHT + 14, told + shown(known.max()), parts)


def lengths(norms: np.ndarray, others: Mapping[str, np.ndarray]) -> str:
    """Quantiles (L, 5) of the patch tokens' norms as bands about the median; others as lines."""
    layers = len(norms)
    values = np.concatenate([norms.ravel(), *others.values()])
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high / low >= LOG_FROM
    marks = log_ticks(low, high) if log else ticks(0.0, high)
    lines = {"patches": norms[:, 2], **others}
    longest = max(map(len, lines))
    frame = layered(layers, marks, [tidy(mark) for mark in marks], 14 + BOLD * longest, log=log)
    parts = [levels(frame, tidy), layer_numbers(frame, layers)]
    parts += [band(frame, norms[:, 0], norms[:, 4], "most")]
    parts += [band(frame, norms[:, 1], norms[:, 3], "half")]
    ends = spread([frame.y(float(line[-1])) for line in lines.values()], 14, HEIGHT - BOTTOM)
    for number, ((name, line), end) in enumerate(zip(lines.items(), ends, strict=True)):
        color = f"var(--s{(number + 1) % COLORS})"
        points = [(layer + 0.5, float(value)) for layer, value in enumerate(line)]
        parts.append(
            f'<path class="line" stroke="{color}" d="{strokes(points, frame)}"/>'
            f'<text class="end" style="fill:{color}" x="{frame.x(layers - 0.5) + 8:.1f}" '
            f'y="{end + 4:.1f}">{escape(name)}</text>'
        )
    for layer, row in enumerate(norms):
        told = f"layer {layer}: half of the patches from {tidy(row[1])} to {tidy(row[3])}, all from"
        told += f" {tidy(row[0])} to {tidy(row[4])}, median {tidy(row[2])}"
        told += "".join(f"; {name} {tidy(line[layer])}" for name, line in others.items())
        parts.append(
            f'<rect class="hit" x="{frame.x(layer):.1f}" y="0" width="{frame.x(1) - frame.x(0):.1f}'
            f'" height="{HEIGHT - BOTTOM}"><title>{escape(told)}</title></rect>'
        )
    told = f"norms of the patch tokens by layer: the longest is {tidy(float(norms.max()))}"
    return svg(WIDTH, HEIGHT + 14, told, parts)


def band(frame: Frame, low: np.ndarray, high: np.ndarray, kind: str) -> str:
    up = [f"{frame.x(n + 0.5):.1f} {frame.y(float(y)):.1f}" for n, y in enumerate(high)]
    down = [f"{frame.x(n + 0.5):.1f} {frame.y(float(y)):.1f}" for n, y in enumerate(low)]
    return f'<path class="{kind}" d="M{"L".join(up + down[::-1])}z"/>'


def fading(
    shares: np.ndarray, lines: Mapping[str, np.ndarray], colors: Mapping[str, str], *, label: str
) -> str:
    """Probabilities over the share of pixels that came or went, a line for each method."""
    known = np.concatenate(list(lines.values()))
    marks = ticks(0.0, float(np.nanmax(known)))
    marks = marks if marks[-1] <= 1 else [0.0, 0.25, 0.5, 0.75, 1.0]
    texts = [f"{100 * mark:.4g} %" for mark in marks]
    left = 10 + LETTER * max(map(len, texts))
    frame = Frame(steps=1, marks=marks, left=left, right=26, log=False)
    parts = [levels(frame, lambda mark: f"{100 * mark:.4g} %")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(
            f'<text x="{frame.x(share):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{100 * share:.0f}{'&#160;%' if share == 1 else ''}</text>"
        )
    parts.append(below("share of the pixels"))
    every = max(1, len(shares) // ANSWERS)
    for name, line in lines.items():
        points = list(zip(shares.tolist(), line.tolist(), strict=True))
        kind = "line" if colors[name] else f"line plain {escape(name)}"
        stroke = f' stroke="{colors[name]}"' if colors[name] else ""
        parts.append(f'<path class="{kind}"{stroke} d="{strokes(points, frame)}"/>')
        parts += [
            f'<circle class="hit" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="6">'
            f"<title>{escape(name)}, {100 * x:.0f} % of the pixels: {percent(y)}</title></circle>"
            for x, y in points[::every]
            if math.isfinite(y)
        ]
    return svg(WIDTH, HEIGHT + 14, f"{label}: {', '.join(lines)}", parts)


def map_of_set(scatter: Scatter) -> str:
    """Each sample a point in the color of its class; names where classes have their middle."""
    points = scatter.points.astype(np.float64)
    low, high = points.min(axis=0), points.max(axis=0)
    room = np.array([WIDTH - 40, MAP_HEIGHT - 40])
    places = 20 + (points - low) / np.maximum(high - low, 1e-12) * room  # (n, 2)
    parts, names = [], []
    count = len(scatter.classes)
    for number, name in enumerate(scatter.classes):
        own = places[scatter.labels == number]
        if not len(own):
            continue
        hue = 360 * number / count
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in own.tolist())
        parts.append(
            f'<path class="points" style="stroke:hsl({hue:.0f} 65% var(--tone))" d="{path}">'
            f"<title>{escape(name)}: {len(own):,}</title></path>"
        )
        if count <= NAMED:
            x, y = np.median(own, axis=0).tolist()
            x = min(max(x, 3.4 * len(name)), WIDTH - 3.4 * len(name))
            names.append(f'<text class="class" x="{x:.1f}" y="{y + 4:.1f}">{escape(name)}</text>')
    label = f"{len(points):,} pictures of {count:,} classes as points"
    return svg(WIDTH, MAP_HEIGHT, label, parts + names)


def layered(
    layers: int,
    marks: Sequence[float],
    texts: Iterable[str],
    right: float = 8,
    *,
    log: bool = False,
) -> Frame:
    """Layers side by side, each as wide as a step."""
    left = 10 + LETTER * max(map(len, texts))
    return Frame(steps=layers, marks=marks, left=left, right=right, log=log)


def levels(frame: Frame, shown: Callable[[float], str]) -> str:
    """Level lines with their values."""
    return "".join(
        f'<path class="grid" d="M{frame.left:.1f} {frame.y(mark):.1f}H{frame.x(frame.steps):.1f}"/>'
        f'<text x="{frame.left - 6:.1f}" y="{frame.y(mark) + 4:.1f}" text-anchor="end">'
        f"{shown(mark)}</text>"
        for mark in frame.marks
    )


def layer_numbers(frame: Frame, layers: int) -> str:
    every = -(-layers // MOST_MARKS)
    return "".join(
        f'<text x="{frame.x(layer + 0.5):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{layer}</text>'
        for layer in range(0, layers, every)
    ) + below("layer")


def below(text: str) -> str:
    return f'<text x="{WIDTH / 2}" y="{HEIGHT + 8}" text-anchor="middle">{text}</text>'
