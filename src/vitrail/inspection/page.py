"""An inspection as one page: what a model looks at, what it learned, and whether maps are true.

    write_inspection(folder / "report.html", inspection)

The page asks nothing of the network: pictures, charts and style are inside it, and so is the one
script, that of the attention browser, which the page's policy names by its hash. Layers, heads,
rows and columns are counted from 0, as in the arrays.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from vitrail.data.storage import write_atomic
from vitrail.formatting import percent
from vitrail.inspection import browser, gallery, habits, plots, truth
from vitrail.inspection.browser_script import SCRIPT
from vitrail.inspection.drawing import filter_sheet, mixing_sheet, position_sheet
from vitrail.inspection.findings import Filters, Inspection, Look, PositionTiles, Scatter
from vitrail.inspection.gallery import with_words
from vitrail.reports.html import page as render_page
from vitrail.reports.html import prose
from vitrail.reports.images import smallest_data_url

STYLE = """
.contents { display: flex; flex-wrap: wrap; gap: .4rem .5rem; margin: 1.5rem 0 0; padding: 0;
  list-style: none; font-size: .875rem; }
.contents a { display: block; color: var(--ink); text-decoration: none; background: var(--card);
  border-radius: 99px; padding: .2rem .8rem; }
.contents a:hover { color: var(--accent); }
h1 + .soft + .facts { margin-top: .75rem; }
section { margin-top: 3rem; }
section h2 { font-size: 1.3rem; margin: 0 0 .4rem; line-height: 1.3; }
section > p { margin: .4rem 0; max-width: 44rem; }
section .soft { max-width: 44rem; }
section > p.how { margin-bottom: 1.1rem; }
.plate { display: block; background: #fff; border-radius: 8px; padding: .5rem; max-width: 100%;
  height: auto; }
.plates { display: flex; flex-wrap: wrap; gap: 1rem; align-items: start; }
.methods { font-size: .9rem; margin-top: 1rem; }
.methods dt { display: inline; } .methods dd { display: inline; margin: 0; }
.methods div { margin: .3rem 0; }
.map { max-width: 40rem; }
"""
ATTENTION = "Ask a patch where it looks"  # the section that needs the script
METHODS = {
    "rollout": "the mean of the heads of each layer, with the identity added and rows divided by "
    "their sum, multiplied through all layers (figure 6, appendix D.8; Abnar & Zuidema 2020)",
    "last layer": "the attention of the last layer only, mean of the heads",
    "gradient rollout": "rollout in which each weight counts by the gradient of the class, where "
    "it is positive",
    "relevance": "relevance that is passed back from the class, layer by layer, through gradient "
    "times attention (Chefer et al. 2021)",
}

TILE = "Each tile stands at a patch's place and shows how alike the positions of all patches are "
FIGURES = "Figure 7, center, and figure 10: cosine similarity of the position embeddings."
POSITIONS = {  # what each kind of positions shows, and how that is computed
    "learned": (
        f"{TILE}to it. A bright spot at its own place, and a row and a column through it, mean "
        "that the model has learned that a picture is flat.",
        FIGURES,
    ),
    "learned-2d": (
        f"{TILE}to it. A position is made of one for its row and one for its column, so that the "
        "row and the column through a patch are bright by design; how quickly they fade was "
        "learned.",
        FIGURES,
    ),
    "sincos-2d": (
        f"{TILE}to it. These are waves along rows and columns, the same in every model of this "
        "size: nothing here was learned.",
        FIGURES,
    ),
    "relative": (
        "Each tile stands at a patch's place and shows how alike the way from it to every patch "
        "is to no way at all. Patches are counted along the rows, so that the end of a row is "
        "next to the beginning of the row below; a bright spot with rows like it above and below "
        "means that the model has learned how long a row is.",
        "Relative positions (appendix D.4) have a key for each offset: cosine similarity of the "
        "offset's key and that of no offset.",
    ),
}


def write_inspection(path: Path, inspection: Inspection) -> None:
    """Write the page whole, or leave what was there."""
    write_atomic(path, page(inspection))


def page(found: Inspection) -> str:
    """The page as text; nothing in it points outside."""
    shown = {name: html for name, html in sections(found) if html}
    names = [*shown, *(["Notes"] if found.notes else [])]
    links = "".join(f'<li><a href="#{slug(name)}">{escape(name)}</a></li>' for name in names)
    body = [
        f'<nav aria-label="contents"><ul class="contents">{links}</ul></nav>' if links else "",
        *(
            f'<section id="{slug(n)}"><h2>{escape(n)}</h2>{html}</section>'
            for n, html in shown.items()
        ),
        noted(found.notes),
    ]
    style = plots.STYLE + gallery.STYLE + browser.STYLE + truth.STYLE + STYLE
    script = SCRIPT if ATTENTION in shown else ""
    return render_page(found.title, found.facts, body, style, script)


def sections(found: Inspection) -> Iterator[tuple[str, str]]:
    """Every heading and what stands below it, "" if there is nothing."""
    looks, study, trust = found.looks, found.study, found.trust
    yield "What it says and where it looks", seen(found)
    yield ATTENTION, asked(found)
    if study is not None:
        yield "How far it looks", habits.distance(study)
        yield "How sharply heads look, and how alike", habits.heads(study)
        yield "How long tokens are", habits.norms(study, found.prefix)
    if found.filters is not None:
        yield "What the first layer looks for", filters(found.filters)
    yield "How it knows where a patch is", positions(found.positions)
    if found.mixing is not None:
        yield "How it mixes patches", mixed(found.mixing)
    yield "Patch tokens as colors", colored(looks)
    yield "What it finds alike", alike(looks)
    if found.scatter is not None:
        yield "The data set as a map", mapped(found.scatter)
    if trust is not None:
        yield "Are these explanations true?", truth.tested(trust)


def seen(found: Inspection) -> str:
    used = dict.fromkeys(name for look in found.looks for name in [*look.maps, *look.class_maps])
    listed = "".join(
        f"<div><dt>{escape(name)}</dt>: <dd>{escape(METHODS[name])}</dd></div>"
        for name in used
        if name in METHODS
    )
    methods = f'<dl class="methods soft">{listed}</dl>' if listed else ""
    what = "The likeliest classes of each picture"
    how = "Probabilities are the softmax of the logits. "
    if found.multi_label:
        how = "Several classes may apply: the probability of each is the sigmoid of its logit. "
    if used:
        what += ", and in warm colors the parts that its answer comes from, as each method has it"
        how += "Maps are stretched to run from 0 to 1; what lies outside of the part that the model"
        how += " sees is dark."
    return with_words(
        f"{what}.", how, gallery.looks_of(found.looks) + methods if found.looks else ""
    )


def asked(found: Inspection) -> str:
    looks = browser.browsable(found.looks)
    if not looks:
        return ""
    shown = [browser.Shown(look, gallery.address(look.pixels)) for look in looks]
    left = sum(look.attention is not None for look in found.looks) - len(looks)
    more = f" {left} more would make this page too large." if left else ""
    return with_words(
        "Click a patch of the picture, or move with the arrow keys, and see which patches it looks "
        "at in a layer and a head.",
        "Softmax of query times key, scaled (appendix A), in 256 steps; colors are scaled to the "
        f"patch that gets most. Everything is counted from 0.{more}",
        browser.browser(shown, found.prefix),
    )


def colored(looks: Sequence[Look]) -> str:
    return with_words(
        "Patches of like color are alike to the model: parts of one thing, or of the same kind of "
        "thing in different pictures.",
        "The last layer's patch tokens on their first three principal components, taken over all "
        "of these pictures, as red, green and blue.",
        gallery.colors_of(looks),
    )


def alike(looks: Sequence[Look]) -> str:
    return with_words(
        "The pictures of the data set that are nearest to each of these, nearest first. Names in "
        "color are of another class.",
        "Cosine similarity of the features that the head reads; 1 is the same.",
        gallery.neighbors_of(looks),
    )


def filters(found: Filters) -> str:
    image = filter_sheet(found)
    told = f"{percent(min(1.0, float(found.explained.sum())))} of the variance"
    size = " x ".join(map(str, found.components.shape[1:3]))
    return with_words(
        f"The {len(found.components)} patterns by which its filters differ most, of {size} pixels; "
        f"they stand for {told}. Waves, edges and spots of color come from training, noise does "
        "not.",
        "Figure 7, left: principal components of the filters that read the picture, largest "
        "first, each scaled to its own range.",
        plate(smallest_data_url(image), "filters of the first layer", image.width),
    )


def positions(found: Sequence[PositionTiles]) -> str:
    images = [(tiles.title, position_sheet(tiles)) for tiles in found]
    plates = "".join(plate(smallest_data_url(image), name, image.width) for name, image in images)
    if not plates:
        return ""
    what, how = POSITIONS[found[0].kind]
    return with_words(what, how, f'<div class="plates">{plates}</div>')


def mixed(mixing: np.ndarray) -> str:
    image = mixing_sheet(mixing)
    return with_words(
        "What some units of the first layer take from each patch: red adds, blue takes away.",
        "Rows of the first token-mixing weights at the patches' places, each scaled to its largest "
        "(Tolstikhin et al. 2021, figure 5).",
        plate(smallest_data_url(image), "token-mixing weights", image.width),
    )


def plate(source: str, alt: str, width: int) -> str:
    """A drawing on white paper, by night too."""
    return f'<img class="plate" alt="{escape(alt)}" width="{width}" src="{source}">'


def mapped(scatter: Scatter) -> str:
    return with_words(
        "Each picture is a point, near others that the model sees alike. Classes that lie apart "
        "are easy to tell from each other; where colors meet, it mixes them up.",
        f"The features that the head reads, in two dimensions by {scatter.method}; "
        f"{len(scatter.points):,} pictures. Only nearness means something.",
        f'<div class="map">{plots.map_of_set(scatter)}</div>',
    )


def noted(notes: Sequence[str]) -> str:
    lines = "".join(f"<li>{prose(note)}</li>" for note in notes)
    return f'<section id="notes"><h2>Notes</h2><ul>{lines}</ul></section>' if notes else ""


def slug(name: str) -> str:
    return "-".join("".join(c for c in name.lower() if c.isalnum() or c == " ").split())
