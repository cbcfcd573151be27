"""Pictures for the page: what a model says of each, where it looks, what it finds alike."""

from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from vitrail.inspection.drawing import color_picture, fitted, overlay
from vitrail.inspection.findings import Look, Neighbor
from vitrail.reports.html import percent_html, prose
from vitrail.reports.images import smallest_data_url

STYLE = """
.look { display: grid; grid-template-columns: minmax(0, 13rem) minmax(0, 1fr); gap: 1rem 1.75rem;
  padding: 1.25rem 0; border-top: 1px solid var(--line); }
.look h3 { margin: 0; }
.look p { margin: .1rem 0 .6rem; line-height: 1.35; font-size: .8rem; }
.look h4 { margin: 0 0 .5rem; font-size: .9rem; font-weight: 600; }
.maps { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17.2rem), 1fr));
  gap: 1.1rem 1.5rem; align-content: start; }
.look > div > img { width: 100%; border-radius: 8px; display: block; margin-bottom: .75rem; }
@media (max-width: 38rem) { .look { grid-template-columns: minmax(0, 1fr); }
  .look > div:first-child { display: grid; grid-template-columns: 9rem 1fr; gap: 0 1rem;
    align-items: start; } .look h3, .look p { grid-column: 1 / -1; } }
.general { grid-column: 1 / -1; }
.answers { list-style: none; margin: 0; padding: 0; font-size: .9rem; }
.answers li { display: flex; justify-content: space-between; gap: .75rem; padding: .2rem 0 .3rem;
  background: linear-gradient(var(--s2), var(--s2)) no-repeat left bottom / var(--part) 3px,
    linear-gradient(var(--track), var(--track)) no-repeat left bottom / 100% 3px; margin: .25rem 0;
  font-variant-numeric: tabular-nums; }
.answers .true { color: var(--good); font-weight: 650; background-image:
  linear-gradient(var(--good), var(--good)), linear-gradient(var(--track), var(--track)); }
.answers .wrong { color: var(--bad); background-image:
  linear-gradient(var(--bad), var(--bad)), linear-gradient(var(--track), var(--track)); }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.6rem, 1fr)); gap: .75rem; }
.row.two { grid-template-columns: repeat(auto-fill, minmax(min(100%, 16rem), 1fr));
  gap: 1rem 1.5rem; }
.row.two figure { display: grid; grid-template-columns: 1fr 1fr; gap: 0 .4rem; align-items: start; }
.row.two figcaption { grid-column: 1 / -1; }
.row.small { grid-template-columns: repeat(auto-fill, minmax(6.4rem, 1fr)); margin-bottom: 1.1rem; }
.row.small img { aspect-ratio: 1; object-fit: cover; }
@media (max-width: 38rem) { .row.small { grid-template-columns: repeat(4, 1fr); gap: .5rem; } }
.row figure { width: auto; }
.row img { width: 100%; border-radius: 6px; }
.row .other { color: var(--bad); font-weight: 600; }
.row .own img { outline: 3px solid var(--accent); outline-offset: -3px; }
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
    title = escape(look.label or look.name)
    below = f'<p class="soft">{escape(look.name)}</p>' if look.label else ""
    answers = "".join(
        f'<li class="{kind}" style="--part:{100 * chance:.1f}%">'
        f"<span>{escape(name)}</span><span>{percent_html(chance)}</span></li>"
        for name, chance, kind in judged(look)
    )
    listed = f'<ul class="answers">{answers}</ul>' if answers else ""
    maps = "".join(map_rows(look))
    return (
        f'<article class="look"><div><h3>{title}</h3>{below}{picture(look)}{listed}</div>'
        f'<div class="maps">{maps}</div></article>'
    )


def judged(look: Look) -> Iterator[tuple[str, float, str]]:
    """Each class, its probability, and what is to be said of that where the truth is known."""
    for place, (name, chance) in enumerate(look.classes):
        wrong = "wrong" if look.label and not place else "other"
        yield name, chance, "true" if name == look.label else wrong


def map_rows(look: Look) -> Iterator[str]:
    """A row of methods to compare; then one for each class that was asked about."""
    if look.maps:
        row = methods_row(look, look.maps, "looks")
        yield f'<div class="general"><h4>What it looks at</h4>{row}</div>'
    chances = dict(look.classes)
    for name in dict.fromkeys(name for maps in look.class_maps.values() for name in maps):
        chance = f" ({percent_html(chances[name])})" if name in chances else ""
        maps = {how: found[name] for how, found in look.class_maps.items() if name in found}
        row = methods_row(look, maps, f"sees {name}")
        yield f"<div><h4>What speaks for “{escape(name)}”{chance}</h4>{row}</div>"


def methods_row(look: Look, maps: dict[str, np.ndarray], what: str) -> str:
    figures = []
    for method, values in maps.items():
        image = overlay(look.pixels, values, look.box, "heat", lag=look.lag)
        image.thumbnail((SMALL, SMALL))
        alt = escape(f"{method}: where it {what} in {look.name}")
        figures.append(figure(smallest_data_url(image), alt, escape(method)))
    return f'<div class="row">{"".join(figures)}</div>'


def picture(look: Look) -> str:
    return f'<img alt="{escape(look.name)}" src="{address(look.pixels)}">'


def address(pixels: np.ndarray, side: int = 480) -> str:
    """Pixels as an address that holds them, their longer side no more than `side`."""
    image = fitted(pixels)
    image.thumbnail((side, side))
    return smallest_data_url(image)


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
            colors = smallest_data_url(color_picture(look.colors, (wide, SMALL)))
            figures.append(
                f'<figure><img alt="{name}" src="{address(look.pixels, SMALL)}">'
                f'<img alt="patch tokens of {name}" src="{colors}">'
                f"<figcaption>{escape(look.label) or name}</figcaption></figure>"
            )
    return f'<div class="row two">{"".join(figures)}</div>' if figures else ""


def neighbors_of(looks: Sequence[Look]) -> str:
    """A row for each picture: itself, then what is nearest."""
    rows = []
    for look in looks:
        if look.neighbors:
            name = escape(look.label or look.name)
            own = figure(address(look.pixels, TINY), escape(look.name), f"<b>{name}</b>", "own")
            others = "".join(neighbor_of(near, look.label) for near in look.neighbors)
            rows.append(f'<div class="row small">{own}{others}</div>')
    return "".join(rows)


def neighbor_of(near: Neighbor, label: str) -> str:
    name = escape(near.label or near.name)
    kind = "other" if label and near.label != label else "same"
    text = f'<span class="{kind}">{name}</span> {near.similarity:.2f}'
    return figure(address(near.pixels, TINY), escape(near.name), text)
