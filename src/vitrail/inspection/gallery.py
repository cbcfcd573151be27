"""Pictures for the page: what a model says of each, where it looks, what it finds alike."""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from vitrail.data.thumbnails import inline_smallest
from vitrail.evaluation.parts import percent, prose, share
from vitrail.inspection.drawing import color_picture, fitted, overlay
from vitrail.inspection.findings import Look, Neighbor

STYLE = """
.look { display: grid; grid-template-columns: minmax(0, 13rem) minmax(0, 1fr); gap: 1rem 1.75rem;
  padding: 1.25rem 0; border-top: 1px solid var(--line); }
.look h3 { margin: 0 0 .6rem; }
.look h4 { margin: 0 0 .5rem; font-size: .9rem; font-weight: 600; }
.look h4 + .row { margin-bottom: 1.1rem; }
.look > div > img { width: 100%; border-radius: 8px; display: block; margin-bottom: .75rem; }
@media (max-width: 38rem) { .look { grid-template-columns: minmax(0, 1fr); } 
  .look > div:first-child { display: grid; grid-template-columns: 9rem 1fr; gap: 0 1rem;
    align-items: start; } .look h3 { grid-column: 1 / -1; } }
.answers { list-style: none; margin: 0; padding: 0; font-size: .9rem; }
.answers li { display: flex; justify-content: space-between; gap: .75rem; padding: .2rem 0 .3rem;
  background: linear-gradient(var(--s2), var(--s2)) no-repeat left bottom / var(--part) 3px,
    linear-gradient(var(--track), var(--track)) no-repeat left bottom / 100% 3px; margin: .25rem 0;
  font-variant-numeric: tabular-nums; }
.answers .true { color: var(--good); font-weight: 650; background-image:
  linear-gradient(var(--good), var(--good)), linear-gradient(var(--track), var(--track)); }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.6rem, 1fr)); gap: .75rem; }
.row.small { grid-template-columns: repeat(auto-fill, minmax(5.4rem, 1fr)); }
.row figure { width: auto; }
.row img { width: 100%; border-radius: 6px; }
.row .other { color: var(--bad); font-weight: 600; }
.row .first { border-right: 1px solid var(--line); padding-right: .75rem; }
"""
SMALL = 260  # pixels of the longer side of a picture in a row
TINY = 120  # of a picture among its neighbors


def with_words(what: str, how: str, html: str) -> str:
    """What is seen, and how it is computed, before it; "" where nothing is seen."""
    return f'<p>{prose(what)}</p><p class="how soft">{prose(how)}</p>{html}' if html else ""


def looks_of(looks: Sequence[Look]) -> str:
    """Each picture, what the model says of it, and its maps."""
    return "".join(look_of(look) for look in looks)


def look_of(look: Look) -> str:
    known = f' <span class="soft">is {escape(look.label)}</span>' if look.label else ""
    answers = "".join(
        f'<li{" class=true" if name == look.label else ""} style="--part:{100 * chance:.1f}%">'
        f"<span>{escape(name)}</span><span>{share(chance)}</span></li>"
        for name, chance in look.classes
    )
    listed = f'<ul class="answers">{answers}</ul>' if answers else ""
    maps = "".join(map_rows(look))
    return (
        f'<article class="look"><div><h3>{escape(look.name)}{known}</h3>'
        f"{picture(look)}{listed}</div><div>{maps}</div></article>"
    )


def map_rows(look: Look) -> Iterator[str]:
    """A row of methods to compare; then one for each class that was asked about."""
    if look.maps:
        yield f"<h4>What it looks at</h4>{methods_row(look, look.maps, 'looks')}"
    chances = dict(look.classes)
    for name in dict.fromkeys(name for maps in look.class_maps.values() for name in maps):
        chance = f" ({percent(chances[name])})" if name in chances else ""
        maps = {how: found[name] for how, found in look.class_maps.items() if name in found}
        row = methods_row(look, maps, f"sees {name}")
        yield f"<h4>What speaks for “{escape(name)}”{escape(chance)}</h4>{row}"


def methods_row(look: Look, maps: dict[str, np.ndarray], what: str) -> str:
    figures = []
    for method, values in maps.items():
        image = overlay(look.pixels, values, look.box, style="heat")
        image.thumbnail((SMALL, SMALL))
        alt = escape(f"{method}: where it {what} in {look.name}")
        figures.append(figure(inline_smallest(image), alt, escape(method)))
    return f'<div class="row">{"".join(figures)}</div>'


def picture(look: Look) -> str:
    return f'<img alt="{escape(look.name)}" src="{address(look.pixels)}">'


def address(pixels: np.ndarray, side: int = 480) -> str:
    """Pixels as an address that holds them, their longer side no more than `side`."""
    image = fitted(pixels)
    image.thumbnail((side, side))
    return inline_smallest(image)


def figure(source: str, alt: str, html: str, kind: str = "") -> str:
    """A picture and what is written below it; `alt` and `html` are escaped already."""
    of = f' class="{kind}"' if kind else ""
    return f'<figure{of}><img alt="{alt}" src="{source}"><figcaption>{html}</figcaption></figure>'


def colors_of(looks: Sequence[Look]) -> str:
    """Each picture beside the colors of its patch tokens."""
    figures = []
    for look in looks:
        if look.colors is not None:
            box, name = look.box, escape(look.name)
            wide = max(1, round(SMALL * (box.right - box.left) / (box.bottom - box.top)))
            colors = inline_smallest(color_picture(look.colors, (wide, SMALL)))
            figures.append(figure(address(look.pixels, SMALL), name, name))
            figures.append(figure(colors, f"patch tokens of {name}", "its patch tokens"))
    return f'<div class="row pairs-of-two">{"".join(figures)}</div>' if figures else ""


def neighbors_of(looks: Sequence[Look]) -> str:
    """A row for each picture: itself, then what is nearest."""
    rows = []
    for look in looks:
        if look.neighbors:
            name = escape(look.label or look.name)
            own = figure(address(look.pixels, TINY), escape(look.name), f"<b>{name}</b>", "first")
            others = "".join(neighbor_of(near, look.label) for near in look.neighbors)
            rows.append(f'<div class="row small">{own}{others}</div>')
    return "".join(rows)


def neighbor_of(near: Neighbor, label: str) -> str:
    name = escape(near.label or near.name)
    kind = "other" if label and near.label != label else "same"
    text = f'<span class="{kind}">{name}</span> {near.similarity:.2f}'
    return figure(address(near.pixels, TINY), escape(near.name), text)
