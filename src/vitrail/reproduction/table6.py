"""Table 6 and figure 5: what pre-training on JFT costs, and what it brings.

The costs are computed here from the models. The accuracies are the paper's, and so is what follows
from them: its own claims are examined on its own numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import exp, log

from vitrail.models.registry import configuration
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Mark, Panel, chart
from vitrail.reproduction.published import JFT_IMAGES, TABLE6, Scaling
from vitrail.reproduction.report import Picture, Report, Table, Verdict
from vitrail.reproduction.sizes import exaflops, millions, parameters, signed

CLOSE = 0.03  # a computed cost agrees if it is this close to the published one
FAMILIES = ("ViT", "ResNet", "hybrid")

TITLE = "Accuracy against the compute of pre-training, as published"
CLAIM = (
    "Vision Transformers need less compute than ResNets for the same accuracy after transfer, 2 to "
    "4 times less (published); hybrids are ahead of both at small budgets, and no longer at large "
    "ones."
)
DID = (
    "The compute of every row was counted from the model: forward operations at 224 pixels, two "
    "for each multiply-add, times 3 for the backward pass, times 303 million pictures, times "
    f"epochs; it agrees within {100 * CLOSE:.0f} %. The claim was examined on the published "
    "accuracies, none of which was measured here: the mean of the five target sets without ReaL, "
    "and for ViT at the compute of another row a straight line over the logarithm of the compute "
    "between its neighbors."
)


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A row of the table, with its cost as it is counted here."""

    row: Scaling
    exaflops: float
    parameters: int

    @property
    def deviation(self) -> float:
        return self.exaflops / self.row.exaflops - 1

    @property
    def agrees(self) -> bool:
        return abs(self.deviation) <= CLOSE


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Another row against ViT at the same compute, by the published numbers."""

    row: Scaling
    vit: float  # average accuracy of a ViT that costs the same
    ratio: float | None  # compute of the row over that of a ViT as good; None beyond ViT's range

    @property
    def lead(self) -> float:
        """By how many points the row is ahead of ViT."""
        return self.row.average - self.vit


def priced() -> list[Priced]:
    return [
        Priced(
            row=row,
            exaflops=exaflops(row.model, JFT_IMAGES, row.epochs),
            parameters=parameters(configuration(row.model)),
        )
        for row in TABLE6
    ]


def frontier(family: str) -> list[Scaling]:
    """The rows of a family that no cheaper row beats, from cheap to dear."""
    best: list[Scaling] = []
    for row in sorted((r for r in TABLE6 if r.family == family), key=lambda r: r.exaflops):
        if not best or row.average > best[-1].average:
            best.append(row)
    return best


def between(
    rows: Sequence[Scaling],
    x: float,
    along: Callable[[Scaling], float],
    wanted: Callable[[Scaling], float],
) -> float | None:
    """The value of `wanted` where `along` is x, straight between neighbors; None outside."""
    for low, high in pairwise(rows):
        if along(low) <= x <= along(high):
            share = (x - along(low)) / (along(high) - along(low))
            return wanted(low) + share * (wanted(high) - wanted(low))
    return None


def budget(row: Scaling) -> float:
    return log(row.exaflops)


def accuracy(row: Scaling) -> float:
    return row.average


def gaps(family: str) -> list[Gap]:
    """Every row of a family that costs as much as some ViT, against that ViT; cheapest first."""
    vits, found = frontier("ViT"), []
    for row in sorted((r for r in TABLE6 if r.family == family), key=lambda r: r.exaflops):
        vit = between(vits, budget(row), budget, accuracy)
        same = between(vits, row.average, accuracy, budget)
        if vit is not None:
            ratio = None if same is None else row.exaflops / exp(same)
            found.append(Gap(row=row, vit=vit, ratio=ratio))
    return found


def vit_leads() -> bool:
    """Whether ViT is ahead of every ResNet of the same compute."""
    return all(gap.lead < 0 for gap in gaps("ResNet"))


def hybrids_fade() -> bool:
    """Whether hybrids lead at the smallest budget, and by less at the largest."""
    found = gaps("hybrid")
    return found[0].lead > 0 and found[-1].lead < found[0].lead


def verdict_of(rows: Sequence[Priced]) -> Verdict:
    """Checked if the claim follows from the published numbers and all ViTs cost what is told."""
    claims = (vit_leads(), hybrids_fade(), all(p.agrees for p in rows if p.row.family == "ViT"))
    return "checked" if all(claims) else "holds in part" if any(claims) else "does not hold"


def words(rows: Sequence[Priced]) -> str:
    resnets, hybrids = gaps("ResNet"), gaps("hybrid")
    ratios = [gap.ratio for gap in resnets if gap.ratio is not None]
    beyond = len(resnets) - len(ratios)
    more = f" ({beyond} below the worst ViT left out)" if beyond else ""
    behind = sum(gap.lead < 0 for gap in resnets)
    return (
        f"{spans(rows)} By the published accuracies ViT is ahead of {behind} of {len(resnets)} "
        f"ResNets of the same compute, by {-max(g.lead for g in resnets):.2f} to "
        f"{-min(g.lead for g in resnets):.2f} points, and is as good with "
        f"{min(ratios):.1f} to {max(ratios):.1f} times less compute{more}. Hybrids are "
        f"{hybrids[0].lead:+.2f} points from ViT at {hybrids[0].row.exaflops:,.0f} exaFLOPs and "
        f"{hybrids[-1].lead:+.2f} at {hybrids[-1].row.exaflops:,.0f}. {doubled()}"
    )


def spans(rows: Sequence[Priced]) -> str:
    """How far the computed costs are from the published ones, family by family."""
    parts = []
    for family in FAMILIES:
        off = [p.deviation for p in rows if p.row.family == family]
        agreeing = sum(abs(x) <= CLOSE for x in off)
        parts.append(
            f"{family} {signed(min(off))} to {signed(max(off))} ({agreeing} of {len(off)} rows "
            f"within {100 * CLOSE:.0f} %)"
        )
    return f"Computed costs differ from the published ones by: {', '.join(parts)}."


def doubled() -> str:
    """Models that were trained twice as long should cost twice as much."""
    shorter = {row.model: row for row in TABLE6 if row.epochs == 7}
    odd = [
        f"{row.model} costs {shorter[row.model].exaflops:,.0f} exaFLOPs for 7 epochs and "
        f"{row.exaflops:,.0f} for 14"
        for row in TABLE6
        if row.epochs == 14 and row.model in shorter
        if abs(row.exaflops / shorter[row.model].exaflops / 2 - 1) > 0.01
    ]
    if not odd:
        return "In the table twice the epochs cost twice as much."
    return f"In the table itself twice the epochs are not twice the cost: {'; '.join(odd)}."


def costs_table(rows: Sequence[Priced]) -> Table:
    return Table(
        caption="ExaFLOPs of pre-training on JFT: published, and computed here",
        head=("model", "epochs", "parameters", "published", "computed", "deviation"),
        rows=[
            (
                p.row.model,
                str(p.row.epochs),
                millions(p.parameters),
                f"{p.row.exaflops:,.0f}",
                f"{p.exaflops:,.1f}",
                signed(p.deviation),
            )
            for p in rows
        ],
    )


def claims_table() -> Table:
    """The claim on the published numbers, row by row."""
    return Table(
        caption="Published mean accuracy of five sets, and that of a ViT of the same compute",
        head=("model", "exaFLOPs", "accuracy", "ViT", "lead", "times the compute of an equal ViT"),
        rows=[
            (
                gap.row.name,
                f"{gap.row.exaflops:,.0f}",
                f"{gap.row.average:.2f}",
                f"{gap.vit:.2f}",
                f"{gap.lead:+.2f}",
                "-" if gap.ratio is None else f"{gap.ratio:.1f}",
            )
            for family in ("ResNet", "hybrid")
            for gap in gaps(family)
        ],
    )


def figure() -> Picture:
    """Figure 5 of the paper, from its own numbers."""
    panels = [
        Panel(
            title=title,
            lines=[curve(family, value) for family in FAMILIES],
            x_label="exaFLOPs of pre-training",
            y_label="transfer accuracy",
            log_x=True,
        )
        for title, value in (
            ("Mean of five sets", accuracy),
            ("ImageNet", lambda row: row.imagenet),
        )
    ]
    caption = "Figure 5 of the paper, drawn from the published numbers of table 6"
    return Picture(file="table6.svg", caption=caption, content=chart(panels))


def curve(family: str, value: Callable[[Scaling], float]) -> Line:
    rows = sorted((r for r in TABLE6 if r.family == family), key=lambda r: r.exaflops)
    marks = [Mark(r.exaflops, value(r) / 100, label=r.model) for r in rows]
    return Line(family, marks, joined=False)


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    rows = priced()
    return EXPERIMENT.reported(
        did=DID,
        found=words(rows),
        verdict=verdict_of(rows),
        tables=(costs_table(rows), claims_table()),
        pictures=(figure(),),
        data={
            p.row.name: {
                "parameters": p.parameters,
                "published_exaflops": p.row.exaflops,
                "exaflops": p.exaflops,
            }
            for p in rows
        },
    )


EXPERIMENT = Experiment(
    name="table6", title=TITLE, claim=CLAIM, cells=lambda sets: {}, report=report
)
