"""Table 2: the best published accuracies, and what can be checked of them without JFT.

    vitrail reproduce table2
    vitrail reproduce table2 --weights "ViT-L/16 (ImageNet-21k)=hf:…" --data ImageNet=/data/imagenet

The second form measures accuracies (`measuring.py`) and puts them beside the published ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vitrail.models.registry import configuration
from vitrail.planning.accelerators import DAY, TPU_V3_CORE
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.measuring import Measurement, as_data, beside, in_words, judged, percent
from vitrail.reproduction.published import (
    BIT,
    CORE_DAYS,
    JFT_IMAGES,
    L21,
    MODELS2,
    TABLE2,
    H,
    L,
)
from vitrail.reproduction.report import Report, Table
from vitrail.reproduction.sizes import EXA, exaflops, giga, millions, parameters, trunk

IMAGENET21K_IMAGES = 14.2e6

TITLE = "The best accuracies, and what they cost"
CLAIM = (
    "Pre-trained on JFT, ViT-L/16 is at least as accurate as the ResNet BiT-L on all tasks and "
    "ViT-H/14 better still, with 88.55 % on ImageNet, for 0.68 and 2.5 thousand TPUv3-core-days of "
    "pre-training where BiT-L took 9.9 (published)."
)
DID = (
    "The published numbers are repeated here as data. Computed from the models: their parameters, "
    "what pre-training takes (forward and backward at 224 pixels), tokens and work at the size of "
    "fine-tuning, and what share of a TPUv3 core's published peak of 61.5 TFLOP/s (bfloat16) the "
    "published core-days imply. The claim is examined on the published numbers: no task where a "
    "ViT is behind BiT-L by more than both published deviations together, and no share above 100 %."
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A pre-training of the table, as far as the paper tells its length."""

    column: str
    model: str
    images: float
    epochs: int
    size: int  # pixels of fine-tuning on ImageNet

    @property
    def exaflops(self) -> float:
        return exaflops(self.model, self.images, self.epochs)

    @property
    def utilization(self) -> float:
        """The share of the peak rate that the published core-days imply."""
        return self.exaflops * EXA / (CORE_DAYS[self.column] * DAY * TPU_V3_CORE.peak)


TRAININGS = (
    Training(column=H, model="ViT-H/14", images=JFT_IMAGES, epochs=14, size=518),
    Training(column=L, model="ViT-L/16", images=JFT_IMAGES, epochs=14, size=512),
    Training(column=L21, model="ViT-L/16", images=IMAGENET21K_IMAGES, epochs=90, size=512),
    Training(column=L21, model="ViT-L/16", images=IMAGENET21K_IMAGES, epochs=30, size=512),
)  # table 3 has both 30 and 90 epochs for ImageNet-21k, and table 2 does not tell which it was


def behind_bit(column: str) -> list[str]:
    """The tasks on which a model is behind BiT-L by more than both deviations together."""
    return [
        data
        for data, row in TABLE2.items()
        if row[BIT].value - row[column].value
        > (row[BIT].deviation or 0.0) + (row[column].deviation or 0.0)
    ]


def ahead_of_bit(column: str) -> int:
    """On how many tasks a model's published mean is above BiT-L's."""
    return sum(row[column].value > row[BIT].value for row in TABLE2.values())


def sound() -> bool:
    """Whether the claim follows from the published numbers, and the costs are possible."""
    possible = all(0 < training.utilization < 1 for training in TRAININGS)
    return possible and not behind_bit(H) and not behind_bit(L)


def words() -> str:
    shares = {f"{t.column}, {t.epochs} epochs": t.utilization for t in TRAININGS}
    told = ", ".join(f"{100 * share:.0f} % ({name})" for name, share in shares.items())
    worse = ", ".join([*behind_bit(H), *behind_bit(L)]) or "none"
    return (
        f"By the published means ViT-H/14 is ahead of BiT-L on {ahead_of_bit(H)} of {len(TABLE2)} "
        f"tasks and ViT-L/16 on {ahead_of_bit(L)}; behind by more than the deviations on: {worse}. "
        f"The published core-days imply these shares of a TPUv3's peak: {told}."
    )


def published_table() -> Table:
    days = [f"{CORE_DAYS[model]:,.0f}" for model in MODELS2]
    return Table(
        caption="Published: top-1 after fine-tuning, mean and deviation of three runs",
        head=("data", *MODELS2),
        rows=[
            *((name, *(percent(row.get(m)) for m in MODELS2)) for name, row in TABLE2.items()),
            ("TPUv3-core-days", *days),
        ],
    )


def costs_table() -> Table:
    return Table(
        caption="Computed here: what the pre-training takes, against the published core-days",
        head=(
            "model",
            "parameters",
            "epochs",
            "exaFLOPs",
            "core-days (published)",
            "share of peak",
        ),
        rows=[
            (
                t.column,
                millions(parameters(configuration(t.model))),
                str(t.epochs),
                f"{t.exaflops:,.0f}",
                f"{CORE_DAYS[t.column]:,.0f}",
                f"{100 * t.utilization:.0f} %",
            )
            for t in TRAININGS
        ],
    )


def finetuning_table() -> Table:
    """What a larger picture costs: tokens and forward operations."""
    sizes = {t.model: t.size for t in TRAININGS}
    rows = []
    for model, size in sizes.items():
        before, after = trunk(model), trunk(model, size)
        rows.append(
            (
                model,
                str(size),
                f"{before.tokens} → {after.tokens}",
                f"{giga(before.forward)} → {giga(after.forward)}",
                f"{after.forward / before.forward:.1f}",
            )
        )
    return Table(
        caption="Computed here: a picture at 224 pixels and at the size of fine-tuning on ImageNet",
        head=("model", "pixels", "tokens", "GFLOPs forward", "times"),
        rows=rows,
    )


def report_with(found: Sequence[Measurement]) -> Report:
    """The report, with what `measured(weights, data)` gave; that may be nothing."""
    own = (beside(found),) if found else ()
    return EXPERIMENT.reported(
        did=DID,
        found=f"{words()} {in_words(found)}",
        verdict=judged(found, sound()),
        tables=(published_table(), costs_table(), finetuning_table(), *own),
        data={
            "trainings": [
                {
                    "model": t.column,
                    "epochs": t.epochs,
                    "exaflops": t.exaflops,
                    "utilization": t.utilization,
                }
                for t in TRAININGS
            ],
            "measured": as_data(found),
        },
    )


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    return report_with(())


EXPERIMENT = Experiment(
    name="table2", title=TITLE, claim=CLAIM, cells=lambda sets: {}, report=report
)
