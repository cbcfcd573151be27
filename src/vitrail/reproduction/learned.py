"""Figures 7 and 10: filters, positions and attention distance that small models learned."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from vitrail.checkpoints.load import load
from vitrail.data.thumbnails import to_png
from vitrail.formatting import percent
from vitrail.inspection import drawing
from vitrail.inspection.findings import PositionTiles
from vitrail.inspection.layers import with_attention
from vitrail.inspection.scoring import fresh
from vitrail.inspection.weights import filters, position_similarity
from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.models import looked_at
from vitrail.reproduction.report import Picture, Report, Table
from vitrail.reproduction.structure import (
    Part,
    Structure,
    components_for,
    joint,
    likeness,
    structure,
)
from vitrail.reproduction.subjects import (
    HYBRID,
    SHORT,
    VIT,
    distance_plot,
    images_for,
    of_names,
    opened,
    reach_of,
    studied,
    yes,
)

EVERY = 10**6  # components: all that there are
MOST = 0.9  # of the variance
OTHER = 0.1  # of a rank correlation: less is no difference


def figure7(results: Mapping[Key, Result], sets: Sets) -> Report:
    model = opened(results, VIT)
    (tiles,) = position_similarity(model)
    images = images_for(model, sets)
    both = model, with_attention(fresh(model), "figures")
    shares = [filters(it, EVERY).explained for it in both]
    few, many = (components_for(explained, MOST) for explained in shares)
    grid = structure(tiles.similarity)
    studies = [studied(it, images) for it in both]
    reach, before = map(reach_of, both, studies)
    even = np.full((len(reach.pixels), 1), reach.even)
    distance = {"heads": reach.pixels, "before training": before.pixels, "an even head": even}
    shown = filters(model)
    basis = Part(
        says="filters are a low-dimensional basis",
        measured=f"{few} of {len(shares[0])} components hold {MOST:.0%} of the variance, "
        f"{many} before training",
        rule="fewer than before training",
        holds=few < many,
    )
    parts = [basis, *grid.parts(), *reach.parts(before)]
    return FIGURE7.reported(
        did=(
            f"Filters, positions and attention of {VIT}, one seed; attention from patches to "
            f"patches over {len(images)} test pictures, against an even head, which looks at all "
            "patches alike. Before training, weights are random. Each part of the claim has a "
            "rule: the claim holds if all parts do, and in part if some do."
        ),
        found="; ".join(f"{part.measured} ({yes(part.holds)})" for part in parts) + ".",
        verdict=joint([part.holds for part in parts]),
        tables=[
            Table(
                caption="Part by part",
                head=("the paper says", "here", "rule", "holds"),
                rows=[(part.says, part.measured, part.rule, yes(part.holds)) for part in parts],
            )
        ],
        pictures=[
            Picture(
                file="figure7-filters.png",
                caption=f"Left: {len(shown.explained)} principal components of the filters, "
                f"{shown.explained.sum():.0%} of the variance.",
                content=to_png(drawing.filter_sheet(shown)),
            ),
            Picture(
                file="figure7-positions.png",
                caption="Center: how alike the positions of patches are.",
                content=to_png(drawing.position_sheet(tiles)),
            ),
            Picture(
                file="figure7-distance.png",
                caption="Right: attention distance by layer, a dot for each head.",
                content=distance_plot(studies, distance),
            ),
        ],
        data={
            "components": {"trained": few, "untrained": many},
            "explained": shown.explained.tolist(),
            "positions": vars(grid),
            "distance": reach.pixels.tolist(),
            "even distance": reach.even,
        },
    )


def with_positions(sets: Sets) -> dict[Key, Cell]:
    """Every ViT, and a twin of the one that learned least: the same with another seed."""
    models = looked_at(sets)
    seed = models[SHORT].settings.seed + 1
    twin = replace(models[SHORT], settings=replace(models[SHORT].settings, seed=seed))
    vits = {(name, it.settings.seed): it for name, it in models.items() if name != HYBRID}
    return {**vits, (SHORT, seed): twin}


def figure10(results: Mapping[Key, Result], sets: Sets) -> Report:
    tables = {}
    for key, result in results.items():
        (tiles,) = position_similarity(with_attention(load(result.folder), "figures"))
        tables[key] = replace(tiles, title=f"{key[0]}, seed {key[-1]}")
    found = {key: structure(tiles.similarity) for key, tiles in tables.items()}
    seeds = sorted(key[-1] for key in tables if key[0] == SHORT)
    own, twin = (SHORT, seeds[0]), (SHORT, seeds[-1])
    alike = {
        key: likeness(tables[twin].similarity, tiles.similarity)
        for key, tiles in tables.items()
        if key != twin
    }
    parts = figure10_parts(found, alike, own, twin)
    return FIGURE10.reported(
        did=(
            "The same small ViT trained in several ways, and the shortest of them twice, so that "
            "what the seed does can be told from what the settings do: patterns are only compared "
            "between models of different seeds. The claim holds if both of its parts do. "
            "(Positions begin at random; those that have moved less are less alike for that, too.)"
        ),
        found="; ".join(f"{part.measured} ({yes(part.holds)})" for part in parts) + ".",
        verdict=joint([part.holds for part in parts]),
        tables=[
            figure10_table(results, found, alike, twin),
        ],
        pictures=[
            Picture(
                file="figure10.png",
                caption="How alike the positions of patches are, a tile for each patch.",
                content=side_by_side(list(tables.values())),
            )
        ],
        data={
            f"{key[0]}, seed {key[-1]}": {**vars(it), "pattern": alike.get(key)}
            for key, it in found.items()
        },
    )


def figure10_parts(
    found: Mapping[Key, Structure], alike: Mapping[Key, float], own: Key, twin: Key
) -> list[Part]:
    """What the claim says in parts: nearness, and a pattern that comes from the training."""
    least = min((key for key in alike if key != own), key=lambda key: alike[key])
    return [
        Part(
            says="positions of near patches are similar whatever the training",
            measured=f"rank correlations with nearness from "
            f"{min(it.nearness for it in found.values()):.2f} to "
            f"{max(it.nearness for it in found.values()):.2f}",
            rule="above chance in each model",
            holds=all(next(it.parts()).holds for it in found.values()),
        ),
        Part(
            says="the pattern depends on how the model was trained",
            measured=f"the pattern of {SHORT}, seed {twin[-1]}, has a rank correlation of "
            f"{alike[own]:.2f} with that of its twin and {alike[least]:.2f} with {least[0]}",
            rule=f"at least {OTHER} less with some other training than with the twin",
            holds=alike[own] - alike[least] >= OTHER,
        ),
    ]


def figure10_table(
    results: Mapping[Key, Result],
    found: Mapping[Key, Structure],
    alike: Mapping[Key, float],
    twin: Key,
) -> Table:
    return Table(
        caption=f"Structure of the positions. Pattern: rank correlation of the "
        f"similarities with those of {SHORT}, seed {twin[-1]}",
        head=(
            *("model", "seed", "pictures seen", "accuracy"),
            *("nearness", "rows", "columns", "pattern"),
        ),
        rows=[
            (
                str(key[0]),
                str(key[-1]),
                f"{results[key].images:,}",
                percent(results[key].accuracy),
                f"{it.nearness:.2f}",
                f"{it.rows:+.2f}",
                f"{it.columns:+.2f}",
                f"{alike[key]:.2f}" if key in alike else "—",
            )
            for key, it in found.items()
        ],
    )


def side_by_side(tables: Sequence[PositionTiles]) -> bytes:
    sheets = [drawing.position_sheet(tiles) for tiles in tables]
    width = 2 * max(sheet.width for sheet in sheets) + 60
    return to_png(drawing.strip(sheets, [""] * len(sheets), width=width))


FIGURE7 = Experiment(
    name="figure7",
    title="Filters, positions and attention distance",
    claim=(
        "The 28 first principal components of the embedding filters (ViT-L/32) look like a basis "
        "for the fine structure of a patch; positions are alike where patches are near, or in one "
        "row or column; some heads attend to most of the image in the lowest layers, others to "
        "what is near, and distance grows with depth (ViT-L/16). Published as pictures."
    ),
    cells=of_names(VIT),
    report=figure7,
)
FIGURE10 = Experiment(
    name="figure10",
    title="Positions under other hyperparameters",
    claim=(
        "Learned positions show the grid, but their pattern of similarity depends on epochs, "
        "learning rate and weight decay (ViT-L/16). Published as pictures."
    ),
    cells=with_positions,
    report=figure10,
)
