"""Table 1: the sizes of the Vision Transformer, and those of what it is compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitrail.models.config import VitConfig
from vitrail.models.registry import configuration
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.published import TABLE1, Shape
from vitrail.reproduction.report import Report, Table, Verdict
from vitrail.reproduction.sizes import giga, headless, millions, parameters, trunk

PATCHED = {
    "ViT-Base": ("ViT-B/16", "ViT-B/32"),
    "ViT-Large": ("ViT-L/16", "ViT-L/32"),
    "ViT-Huge": ("ViT-H/14",),
}  # the patch sizes that the paper trains; the table gives one number for all of them
OTHERS = (
    *("R50+ViT-B/16", "R50+ViT-L/16", "BiT-R50x1", "BiT-R152x2"),
    *("Mixer-B/16", "Mixer-L/16"),
)
CLASSES = 1000
MILLION = 1e6

TITLE = "The sizes of the models"
CLAIM = (
    "ViT-Base, -Large and -Huge have 12, 24 and 32 layers of width 768, 1024 and 1280, and 86, 307 "
    "and 632 million parameters (published)."
)
DID = (
    "Every model was built by its name without memory, with a head of 1,000 classes and without, "
    "and its parameters were counted; a number agrees if it rounds to the published one. All is "
    "checked if one way of counting gives all three for some patch size that the paper trains; it "
    "holds in part if it takes several. Operations are those of a forward pass at 224 pixels "
    "without a head, two for each multiply-add."
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model, as it is built here, beside its row of table 1."""

    size: str
    name: str
    published: Shape
    same_shape: bool
    without_head: int
    with_head: int

    @property
    def met_by(self) -> list[str]:
        """Which ways of counting give the published number of parameters."""
        wanted = round(self.published.parameters / MILLION)
        ways = {"without a head": self.without_head, "with a head": self.with_head}
        return [way for way, count in ways.items() if round(count / MILLION) == wanted]


def variants() -> list[Variant]:
    return [variant(size, name) for size, names in PATCHED.items() for name in names]


def variant(size: str, name: str) -> Variant:
    config = configuration(name)
    assert isinstance(config, VitConfig)
    ours = (config.depth, config.width, config.mlp_width, config.heads)
    return Variant(
        size=size,
        name=name,
        published=TABLE1[size],
        same_shape=ours == TABLE1[size][:4],
        without_head=parameters(headless(config)),
        with_head=parameters(config.change(num_classes=CLASSES)),
    )


def one_way(found: Sequence[Variant]) -> bool:
    """Whether a single way of counting, with a head or without, gives all published numbers."""
    ways = [{way for one in found if one.size == size for way in one.met_by} for size in TABLE1]
    return bool(set.intersection(*ways))


def verdict_of(found: Sequence[Variant]) -> Verdict:
    if not all(one.same_shape for one in found) or not any(one.met_by for one in found):
        return "does not hold"
    return "checked" if one_way(found) else "holds in part"


def words(found: Sequence[Variant]) -> str:
    shapes = "are" if all(one.same_shape for one in found) else "are not"
    met = [
        f"{one.published.parameters / MILLION:.0f} million is {one.name} {' or '.join(one.met_by)}"
        for one in found
        if one.met_by
    ]
    unmet = [
        f"{one.name} ({one.without_head / MILLION:.1f} without a head, "
        f"{one.with_head / MILLION:.1f} with one, published for its size "
        f"{one.published.parameters / MILLION:.0f})"
        for one in found
        if not one.met_by
    ]
    told = "one way of counting" if one_way(found) else "no single way of counting"
    rest = f" No number of the table is met by {' and '.join(unmet)}." if unmet else ""
    return (
        f"Layers, widths, MLPs and heads {shapes} those of the table. Of the parameters, "
        f"{', '.join(met)}: {told} gives all of them.{rest}"
    )


def sizes_table(found: Sequence[Variant]) -> Table:
    return Table(
        caption="Vision Transformers: published (per size) and counted here (per model)",
        head=(
            *("model", "layers", "width", "MLP", "heads", "published", "no head"),
            *("1,000 classes", "agrees", "tokens", "GFLOPs"),
        ),
        rows=[
            (
                one.name,
                *(str(x) for x in one.published[:4]),
                f"{one.published.parameters / MILLION:.0f} M",
                millions(one.without_head),
                millions(one.with_head),
                ", ".join(one.met_by) or "no",
                *cost_cells(one.name),
            )
            for one in found
        ],
    )


def others_table() -> Table:
    return Table(
        caption="What they are compared with, counted here",
        head=("model", "no head", "1,000 classes", "tokens", "GFLOPs"),
        rows=[
            (
                name,
                millions(parameters(headless(configuration(name)))),
                millions(parameters(configuration(name))),
                *cost_cells(name),
            )
            for name in OTHERS
        ],
    )


def cost_cells(name: str) -> tuple[str, str]:
    cost = trunk(name)
    return str(cost.tokens or "-"), giga(cost.forward)


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    found = variants()
    return EXPERIMENT.reported(
        did=DID,
        found=words(found),
        verdict=verdict_of(found),
        tables=(sizes_table(found), others_table()),
        data={
            one.name: {
                "published": one.published.parameters,
                "without_head": one.without_head,
                "with_head": one.with_head,
            }
            for one in found
        },
    )


EXPERIMENT = Experiment(
    name="table1", title=TITLE, claim=CLAIM, cells=lambda sets: {}, report=report
)
