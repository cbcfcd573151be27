"""Whether explanations are true, for the page: curves, areas and the sanity check in words."""

from collections.abc import Iterator
from html import escape

from vitrail.inspection.findings import Trust
from vitrail.inspection.plots import fading
from vitrail.reports.svg import COLORS

STYLE = """
.trust { width: 100%; max-width: 40rem; margin: 1rem 0; }
.trust th { color: var(--soft); font-weight: 400; font-size: .85rem; vertical-align: bottom; }
.trust td:first-child { white-space: nowrap; }
.trust .best { color: var(--good); font-weight: 650; }
.trust .best::after { content: " ★"; } .trust td:not(.best)::after { content: ""; }
.trust .key { display: inline-block; width: 1.4rem; height: 0; margin-right: .6rem;
  border-top: 3px solid; vertical-align: .25em; }
.trust .plain { color: var(--soft); }
.trust .plain .key { border-top: 2px dotted; }
.trust .center .key { border-top-style: dashed; }
"""
PLAIN = ("random", "center")  # what a map must be better than
SAME, PARTLY = 0.7, 0.4  # rank correlations with the maps of random weights


def tested(trust: Trust) -> str:
    """Two charts, a table of their areas, and what follows from them."""
    first = next(iter(trust.curves.values()), None)
    if first is None:
        return ""
    colors = line_colors(trust)
    ways = {
        "Pixels put in, best first": ("insertion", "A line that rises early is good."),
        "Pixels taken out, best first": ("deletion", "A line that falls early is good."),
    }
    charts = "".join(
        f"<div><h3>{title}</h3>"
        + fading(
            first.shares,
            {name: getattr(curves, which) for name, curves in trust.curves.items()},
            colors,
            label=f"probability of the class, {which}",
        )
        + f'<p class="soft">{words}</p></div>'
        for title, (which, words) in ways.items()
    )
    said = "".join(f"<li>{escape(line)}</li>" for line in conclusions(trust))
    return (
        "<p>A map is true if the parts that it calls important are those that the answer comes "
        "from: shown alone they must be enough for it, and without them it must go.</p>"
        '<p class="how soft">The mean probability of the predicted class as pixels are put into '
        "the blurred picture, or give way to the mean color in the whole one, in the order of each "
        f"map (Petsiuk et al. 2018); {trust.images:,} pictures. The gray lines take parts at "
        "random, or from the center outward.</p>"
        f'<ul class="verdict">{said}</ul><div class="panels">{charts}</div>{table(trust, colors)}'
    )


def line_colors(trust: Trust) -> dict[str, str]:
    """A color for each method; none for what it is compared with."""
    methods = [name for name in trust.curves if name not in PLAIN]
    chosen = {name: f"var(--s{number % COLORS})" for number, name in enumerate(methods)}
    return {name: chosen.get(name, "") for name in trust.curves}


def table(trust: Trust, colors: dict[str, str]) -> str:
    """Areas under the curves, the best of each kind marked."""
    curves = trust.curves
    most = max(found.insertion_area for found in curves.values())
    least = min(found.deletion_area for found in curves.values())
    rows = []
    for name, found in curves.items():
        key = f' style="border-color:{colors[name]}"' if colors[name] else ""
        kind = "" if colors[name] else f' class="plain {escape(name)}"'
        cells = cell(found.insertion_area, most) + cell(found.deletion_area, least)
        sanity = f"{trust.sanity[name]:.2f}" if name in set(trust.sanity) - set(PLAIN) else "—"
        rows.append(
            f'<tr{kind}><td><i class="key"{key}></i>{escape(name)}</td>'
            f"{cells}<td>{sanity}</td></tr>"
        )
    heads = ("method", "insertion ↑", "deletion ↓", "likeness to random weights ↓")
    head = "".join(f'<th scope="col">{text}</th>' for text in heads)
    return (
        f'<div class="wide" tabindex="0"><table class="trust"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="soft">Areas under the curves: ↑ larger is better, ↓ smaller is better. Likeness '
        "is the rank correlation of a method's maps with those of the same model with random "
        "weights (Adebayo et al. 2018).</p>"
    )


def cell(value: float, best: float) -> str:
    return f"<td{' class=best' if value == best else ''}>{value:.3f}</td>"


def conclusions(trust: Trust) -> Iterator[str]:
    """Which method to believe, which not, and why."""
    methods = {name: found for name, found in trust.curves.items() if name not in PLAIN}
    plain = {name: found for name, found in trust.curves.items() if name in PLAIN}
    if methods:
        best = max(methods, key=lambda name: methods[name].insertion_area)
        line = f"By insertion {best} tells most: an area of {methods[best].insertion_area:.3f}"
        against = [f"{found.insertion_area:.3f} for {name}" for name, found in plain.items()]
        yield f"{line}, against {' and '.join(against)}." if against else f"{line}."
    for name, found in methods.items():
        worse = [
            other
            for other, it in plain.items()
            if found.insertion_area <= it.insertion_area and found.deletion_area >= it.deletion_area
        ]
        if worse:
            yield f"{name} tells no more than {' or '.join(worse)}: do not read much into its maps."
    for name, value in trust.sanity.items():
        if name not in PLAIN and value >= PARTLY:
            how = "hardly change" if value >= SAME else "change only in part"
            yield (
                f"The maps of {name} {how} when the weights are random ({value:.2f}): they show "
                "the picture or the architecture as much as what the model has learned."
            )
    passed = [name for name, value in trust.sanity.items() if value < PARTLY and name not in PLAIN]
    if passed:
        *others, last = passed
        names, change = (
            (f"{', '.join(others)} and {last}", "change") if others else (last, "changes")
        )
        yield f"{names} {change} when the weights are random, as a true explanation must."
