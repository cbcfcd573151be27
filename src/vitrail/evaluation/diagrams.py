"""What confidence is worth, as pictures in the manner of `charts`: calibration and selection.

reliability   how often a model is right, by how sure it is
trade_off     how often it is right, by how many pictures it answers
"""

import math

import numpy as np

from vitrail.evaluation.charts import (
    BOLD,
    BOTTOM,
    HEIGHT,
    LETTER,
    WIDTH,
    Frame,
    Series,
    hits,
    strokes,
    svg,
    thinned,
    ticks,
)
from vitrail.evaluation.findings import Calibration, Selective
from vitrail.evaluation.measures import COVERAGE
from vitrail.formatting import percent

STYLE = """
.chart .diagonal { stroke: var(--ink); stroke-width: 1.3; stroke-dasharray: 1 4;
  stroke-linecap: round; opacity: .75; }
.chart .right { fill: var(--good); opacity: .8; }
.chart .sure { stroke: var(--ink); stroke-width: 2; }
.chart .over { fill: var(--bad); opacity: .45; }
.chart .under { fill: var(--s2); opacity: .5; }
.chart .few { opacity: .35; }
.chart .many { fill: var(--soft); opacity: .55; }
.chart .mark { stroke: var(--soft); stroke-dasharray: 3 3; }
"""
LEFT, TOP = 60, 10
SIDE = 288  # of the square in which confidence meets accuracy
TALL = 52  # the longest bar of the histogram below it
FEW = 10  # answers below which a bar is pale
MARKS = (0.0, 0.25, 0.5, 0.75, 1.0)
ANSWERS = 40  # places of the trade-off that answer hovering


def reliability(calibration: Calibration) -> str:
    """A bar for each bin of confidence, as high as its accuracy, and its gap to the confidence.

    Where the bar ends below the model's own confidence the gap is that of a model too sure; the
    histogram below says how many answers each bar stands for.
    """
    base = TOP + SIDE
    floor = base + 24 + TALL
    parts = []
    for mark in MARKS:
        x, y, text = LEFT + mark * SIDE, base - mark * SIDE, f"{100 * mark:.0f} %"
        anchor = "middle" if mark < 1 else "end"
        parts.append(
            f'<path class="grid" d="M{LEFT} {y:.1f}h{SIDE}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
            f'<text x="{x + 8 * (mark == 1):.1f}" y="{floor + 16}" text-anchor="{anchor}">'
            f"{text}</text>"
        )
    parts += [bin_bars(calibration, number, base, floor) for number in occupied(calibration)]
    parts.append(
        f'<path class="diagonal" d="M{LEFT} {base}L{LEFT + SIDE} {TOP}"/>'
        f'<path class="grid" d="M{LEFT} {floor}h{SIDE}"/>'
        f'<text transform="translate(10 {base - SIDE / 2}) rotate(-90)" text-anchor="middle">'
        "how often it is right</text>"
        f'<text x="{LEFT + SIDE / 2}" y="{floor + 33}" text-anchor="middle">how sure it is</text>'
        f'<text x="{LEFT}" y="{base + 16}">how many answers</text>'
    )
    label = f"reliability diagram: calibration error {percent(calibration.ece)}"
    return svg(WIDTH, floor + 38, label, parts)


def occupied(calibration: Calibration) -> list[int]:
    """The bins that have something to say."""
    known = np.isfinite(calibration.accuracy) & np.isfinite(calibration.confidence)
    return np.flatnonzero((calibration.counts > 0) & known).tolist()


def bin_bars(calibration: Calibration, number: int, base: float, floor: float) -> str:
    """One bin: how often right, the gap, how sure on average, how many; and all of it in words."""
    low, high = calibration.edges[number : number + 2].tolist()
    count = int(calibration.counts[number])
    right, sure = float(calibration.accuracy[number]), float(calibration.confidence[number])
    told = (
        f"{100 * low:.0f} to {100 * high:.0f} % sure, {percent(sure)} on average: "
        f"{count:,} {'answer' if count == 1 else 'answers'}, {percent(right)} right"
    )
    x, width = LEFT + low * SIDE + 0.75, (high - low) * SIDE - 1.5
    pale = "few" if count < FEW else "enough"
    tall = max(1.5, TALL * count / int(calibration.counts.max()))
    return (
        f"<g><title>{told}</title>"
        f'<rect class="hit" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{floor - TOP}"/>'
        f'<g class="{pale}">'
        f"{block('right', x, width, base, 0, min(right, sure))}"
        f"{block('under' if right > sure else 'over', x, width, base, right, sure)}"
        f'<path class="sure" d="M{x:.1f} {base - sure * SIDE:.1f}h{width:.1f}"/></g>'
        f'<rect class="many" x="{x:.1f}" y="{floor - tall:.1f}" width="{width:.1f}" '
        f'height="{tall:.1f}"/></g>'
    )


def block(kind: str, x: float, width: float, base: float, one: float, other: float) -> str:
    """A part of a bar, between two shares."""
    low, high = sorted((one, other))
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{base - high * SIDE:.1f}" width="{width:.1f}" '
        f'height="{(high - low) * SIDE:.1f}"/>'
    )


def trade_off(selective: Selective, surest: float, *, least: float = 0.0) -> str:
    """Accuracy over the share that is answered, from `least` on; "" if there is nothing to show.

    `surest` is the accuracy on the surest 80 %, which is marked.
    """
    pairs = zip(selective.coverage.tolist(), selective.accuracy.tolist(), strict=True)
    line = thinned(Series("accuracy", [point for point in pairs if point[0] >= least]), log=False)
    values = [y for _, y in line.points if math.isfinite(y)]
    if not values:
        return ""
    whole = at_share(selective, 1.0)
    values += [y for y in (surest, whole) if math.isfinite(y)]
    marks = [mark for mark in ticks(min(values), max(values)) if mark < 1.0001]
    texts = [f"{100 * mark:.4g} %" for mark in marks]
    frame = Frame(
        steps=1,
        marks=marks,
        left=10 + LETTER * max(map(len, texts)),
        right=14 + BOLD * len(percent(whole)),
        log=False,
    )
    floor, parts = HEIGHT - BOTTOM, []
    for mark, text in zip(marks, texts, strict=True):
        y = frame.y(mark)
        parts.append(
            f'<path class="grid" d="M{frame.left:.1f} {y:.1f}H{frame.x(1):.1f}"/>'
            f'<text x="{frame.left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
        )
    for share in (0.2, 0.4, 0.6, COVERAGE, 1.0):
        parts.append(
            f'<text x="{frame.x(share):.1f}" y="{floor + 16}" text-anchor="middle">'
            f"{100 * share:.0f} %</text>"
        )
    parts.append(
        f'<text x="{frame.x(0.5):.1f}" y="{floor + 32}" text-anchor="middle">'
        "share of the pictures it answers, surest first</text>"
        f'<path class="line" stroke="var(--s1)" d="{strokes(line.points, frame)}"/>'
    )
    parts += [dot(frame, 1, whole), dot(frame, COVERAGE, surest)]
    parts.append(hits(line, frame, on_surest_part, ANSWERS))
    label = (
        f"accuracy by share answered: {percent(surest)} on the surest 80 %, {percent(whole)} on all"
    )
    return svg(WIDTH, HEIGHT + 16, label, ['<g transform="translate(0 8)">', *parts, "</g>"])


def at_share(selective: Selective, share: float) -> float:
    """What the curve says of the surest pictures, at least `share` of all."""
    place = int(np.searchsorted(selective.coverage, share - 1e-9))
    return float(selective.accuracy[min(place, len(selective.accuracy) - 1)])


def dot(frame: Frame, share: float, accuracy: float) -> str:
    """A marked point, with its value at its upper right: a curve that falls is not there."""
    if not math.isfinite(accuracy):
        return ""
    x, y = frame.x(share), frame.y(accuracy)
    return (
        f'<path class="mark" d="M{x:.1f} {y:.1f}V{HEIGHT - BOTTOM}"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--s1)"/>'
        f'<text class="end" style="fill:var(--s1)" x="{x + 7:.1f}" '
        f'y="{y - 5 if share < 1 else y + 4:.1f}">{percent(accuracy)}</text>'
    )


def on_surest_part(x: float, y: float) -> str:
    return f"surest {100 * x:.0f} %: {percent(y)} right"
