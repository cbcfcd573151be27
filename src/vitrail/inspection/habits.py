"""How attention goes over many pictures, for the page: far or near, wide or sharp, and norms."""

from collections.abc import Sequence
from html import escape

import numpy as np

from vitrail.formatting import percent
from vitrail.inspection import plots
from vitrail.inspection.findings import Study
from vitrail.inspection.gallery import with_words
from vitrail.reports.svg import ticks, tidy

VARIANTS = {  # where there are tokens that are no patches
    "patches": "From patches to patches; what goes to other tokens counts as nothing.",
    "patches, renormalized": "The same, with what goes to patches scaled to be all.",
    "all tokens": "Other tokens count too, and stand at the center of the picture.",
}


def distance(study: Study) -> str:
    first = next(iter(study.distance.values()))
    low, high = first[0], first[-1]
    told = (
        f"In layer 0 heads look {span(low)} pixels far, in layer {len(first) - 1} {span(high)}; "
        f"a patch is {tidy(study.patch[1])} pixels wide. Heads low on the left work like small "
        "convolutions, heads high up bring together what is far apart."
    )
    marks = ticks(0.0, max(float(values.max()) for values in study.distance.values()))
    charts = "".join(
        f'<div class="narrow"><h3>{escape(name)}</h3>'
        + plots.by_layer(values, label=f"attention distance, {name}", shown=pixels, marks=marks)
        + (f'<p class="soft">{VARIANTS[name]}</p></div>' if name in VARIANTS else "</div>")
        for name, values in study.distance.items()
    )
    how = (
        "Figure 7, right, and figure 11: the distance in pixels from a patch to every other, "
        f"weighed by attention, mean over patches and over {study.images:,} pictures; a dot for "
        "each head."
    )
    return with_words(told, how, f'<div class="panels">{charts}</div>')


def pixels(value: float) -> str:
    return f"{tidy(value)} px"


def span(values: np.ndarray) -> str:
    low, high = tidy(float(values.min())), tidy(float(values.max()))
    return low if low == high else f"{low} to {high}"


def heads(study: Study) -> str:
    marks = (0.0, 0.25, 0.5, 0.75, 1.0)
    entropy = plots.by_layer(study.entropy, label="entropy", shown=whole_percent, marks=marks)
    charts = f'<div class="narrow"><h3>How widely a head looks (entropy)</h3>{entropy}</div>'
    count = study.redundancy.shape[-1]
    if count > 1:
        others = (study.redundancy.sum(axis=2) - 1) / (count - 1)  # (L, H)
        alike = plots.by_layer(others, label="likeness to other heads", shown=tidy)
        charts += f'<div class="narrow"><h3>How like the other heads it is</h3>{alike}</div>'
    return with_words(
        "A head of low entropy looks at few patches, one near 100 % at all of them alike. "
        "Heads that are very like each other do the same work twice.",
        "Entropy of each query's attention as a share of the largest possible; cosine similarity "
        f"of a head's maps with those of the other heads of its layer, mean. Over "
        f"{study.images:,} pictures.",
        f'<div class="panels">{charts}</div>',
    )


def whole_percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def norms(study: Study, prefix: Sequence[str]) -> str:
    count = study.prefix_norms.shape[1]
    others = {"class token": study.prefix_norms[:, 0]} if count and "class token" in prefix else {}
    if count > len(others):
        others["other tokens"] = study.prefix_norms[:, len(others) :].mean(axis=1)
    layer = int(study.outliers.argmax())
    if study.outliers[layer] > 0:
        told = (
            f"In layer {layer}, {percent(float(study.outliers[layer]))} of the patch tokens are "
            "far longer than the median: such tokens often lie on plain background and hold what "
            "the model knows of the whole picture. Their places in maps are artifacts; registers "
            "take them over."
        )
    else:
        told = (
            "No patch token is far longer than the others, so maps have no artifacts of that kind."
        )
    chart = plots.lengths(study.norms, others)
    shares = "".join(
        f"<li><span>layer {n}</span><span>{percent(float(value))}</span></li>"
        for n, value in enumerate(study.outliers)
        if value > 0
    )
    listed = (
        f'<h3>Far above the median</h3><ul class="pairs narrow">{shares}</ul>' if shares else ""
    )
    return with_words(
        told,
        "Norm of the tokens after each layer: the line is the median of the patches, the dark band "
        "holds half of them, the pale one all. Darcet et al. 2024.",
        f'<div class="panels"><div class="narrow">{chart}</div><div>{listed}</div></div>',
    )
