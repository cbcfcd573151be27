"""Figures 6 and 11: where the small models look; figures 7 and 10 are in `learned.py`.

Each model is looked at with pictures that it was not trained on. A figure of the paper has no
numbers to compare with, so each claim gets a measure and a rule, both of which are told.

Shapes: B pictures, C channels, H x W pixels, h x w patches.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from vitrail.checkpoints.metadata import get_metadata
from vitrail.data.thumbnails import to_png
from vitrail.inspection import drawing
from vitrail.inspection.layers import lag
from vitrail.inspection.pictures import Picture as Seen
from vitrail.inspection.relevance import METHODS
from vitrail.inspection.scoring import insertion_deletion, predicted, sanity
from vitrail.models.vit import VisionTransformer
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.report import Picture, Report, Table
from vitrail.reproduction.structure import (
    EVERYWHERE,
    MARGIN,
    Reach,
    by_areas,
    less_local,
    mean_of,
    span,
)
from vitrail.reproduction.subjects import (
    HYBRID,
    VIT,
    distance_plot,
    images_for,
    of_names,
    opened,
    reach_of,
    studied,
    unseen,
    within,
)

DRAWN = 8  # pictures under their maps
SCORED = 64  # pictures that maps are tested with


def figure6(results: Mapping[Key, Result], sets: Sets) -> Report:
    model = opened(results, VIT)
    pictures = unseen(model, sets, SCORED)
    images = torch.stack([picture.image for picture in pictures])  # (B, C, H, W)
    classes = predicted(model, images)
    maps = {name: METHODS[name](model, images, classes) for name in ("rollout", "center", "random")}
    areas = {name: areas_of(model, images, found, classes) for name, found in maps.items()}
    beyond = {name: mean_of(areas["rollout"] - areas[name]) for name in ("random", "center")}
    same = sanity(model, "rollout", images, classes)
    rows = [(name, within(mean_of(found))) for name, found in areas.items()]
    rows += [(f"rollout less {name}", within(found, sign="+")) for name, found in beyond.items()]
    drawn = first_of_each([picture.label for picture in pictures])[:DRAWN]
    return FIGURE6.reported(
        did=(
            f"Attention rollout of {VIT} for {len(pictures)} test pictures. Does it show what "
            "matters? Pixels of the blurred picture become sharp in the order of the map, and the "
            "area under the probability of the predicted class is taken (insertion; larger is "
            "better), against maps at random and against one that is always the center. Rule: it "
            "holds if rollout is better than both, in part if only better than random, not if it "
            "is worse than random, each by the whole 95 % interval over pictures."
        ),
        found=(
            f"Area {areas['rollout'].mean():.3f} for rollout, {areas['center'].mean():.3f} for the "
            f"center, {areas['random'].mean():.3f} at random: {within(beyond['random'], sign='+')} "
            f"above random, {within(beyond['center'], sign='+')} against the center. The rank "
            f"correlation with the maps of random weights is {same:.2f}."
        ),
        verdict=by_areas(beyond["random"], beyond["center"]),
        tables=[
            Table(
                caption=f"Area under insertion, {len(pictures)} pictures, 95 % interval",
                head=("map", "area"),
                rows=rows,
            )
        ],
        pictures=[
            Picture(
                file="figure6.png",
                caption="Test pictures, and below each where the class token looks (rollout).",
                content=rollout_sheet(
                    model, [pictures[n] for n in drawn], maps["rollout"][drawn].numpy()
                ),
            )
        ],
        data={
            "areas": {name: mean_of(found)._asdict() for name, found in areas.items()},
            "rollout less": {name: found._asdict() for name, found in beyond.items()},
            "likeness to random weights": same,
            "pictures": len(pictures),
        },
    )


def first_of_each(labels: Sequence[str]) -> list[int]:
    """The places of the first of every label, in order."""
    return [place for place, label in enumerate(labels) if label not in labels[:place]]


def areas_of(model: VisionTransformer, images: Tensor, maps: Tensor, classes: Tensor) -> np.ndarray:
    """The area under insertion of each picture (B,), for maps (B, h, w)."""
    parts = zip(images.split(1), maps.split(1), classes.split(1), strict=True)
    return np.array([insertion_deletion(model, *part).insertion_area for part in parts])


def rollout_sheet(model: VisionTransformer, pictures: Sequence[Seen], maps: np.ndarray) -> bytes:
    """Rows of four pictures as they are, each row with its maps (B, h, w) below."""
    names = get_metadata(model).names(model.config.num_classes)
    said = predicted(model, torch.stack([picture.image for picture in pictures])).tolist()
    drawn, captions = [], []
    for start in range(0, len(pictures), 4):
        row = range(start, min(start + 4, len(pictures)))
        drawn += [drawing.fitted(pictures[n].pixels) for n in row]
        captions += [pictures[n].label for n in row]
        drawn += [
            drawing.overlay(pictures[n].pixels, maps[n], pictures[n].box, "heat", lag=lag(model))
            for n in row
        ]
        captions += [f"said: {names[said[n]]}" for n in row]
    sheet = drawing.strip(drawn, captions, width=4 * 260)
    return to_png(sheet.quantize(256))  # a third of the bytes


def figure11(results: Mapping[Key, Result], sets: Sets) -> Report:
    models = {name: opened(results, name) for name in (VIT, HYBRID)}
    studies = {name: studied(model, images_for(model, sets)) for name, model in models.items()}
    reach = {name: reach_of(model, studies[name]) for name, model in models.items()}
    vit, hybrid = reach[VIT], reach[HYBRID]
    return FIGURE11.reported(
        did=(
            f"Attention of {VIT} and of a hybrid, one seed each, over {studies[VIT].images} test "
            "pictures, from patches to patches, as a share of an even head's distance, which looks "
            "at all patches alike. Rule: the claim holds if the nearest head in the lower half of "
            f"the hybrid's layers looks farther than the ViT's, by {MARGIN:.0%} of that distance "
            "or more, and it does not if it looks less far by as much; else, and where both look "
            f"farther than {EVERYWHERE:.0%}, it cannot be told."
        ),
        found=(
            f"The nearest head of the lower layers looks {vit.shortest:.0%} as far as an even one "
            f"in the ViT and {hybrid.shortest:.0%} in the hybrid; all heads of them "
            f"{vit.lower.mean():.0%} and {hybrid.lower.mean():.0%} on the mean."
        ),
        verdict=less_local(vit.shortest, hybrid.shortest),
        tables=[
            Table(
                caption="Attention distance as a share of an even head's: mean of the heads "
                "(nearest to farthest)",
                head=("layer", *reach),
                rows=[
                    (str(layer), *(row_of(it, layer) for it in reach.values()))
                    for layer in range(max(len(it.pixels) for it in reach.values()))
                ],
            )
        ],
        pictures=[
            Picture(
                file="figure11.png",
                caption="Attention distance by layer, a dot for each head.",
                content=distance_plot(
                    studies.values(), {name: it.pixels for name, it in reach.items()}
                ),
            )
        ],
        data={
            name: {"distance": it.pixels.tolist(), "even distance": it.even, "nearest": it.shortest}
            for name, it in reach.items()
        },
    )


def row_of(reach: Reach, layer: int) -> str:
    if layer >= len(reach.pixels):
        return "—"
    heads = reach.shares[layer]
    return f"{heads.mean():.0%} ({span(heads)})"


FIGURE6 = Experiment(
    name="figure6",
    title="Where the class token looks",
    claim=(
        "Followed back to the picture by attention rollout (ViT-L/16), the output token attends to "
        "regions that matter for the class. Published as pictures, without numbers."
    ),
    cells=of_names(VIT),
    report=figure6,
)
FIGURE11 = Experiment(
    name="figure11",
    title="Attention distance of ViT and hybrid",
    claim=(
        "The highly local attention of some heads in the low layers (ViT-L/16) is less pronounced "
        "after a ResNet (R50+ViT-L/16), so it may do what early convolutions do. Published as "
        "pictures."
    ),
    cells=of_names(VIT, HYBRID),
    report=figure11,
)
