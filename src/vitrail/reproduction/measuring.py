"""Accuracies of models that the user has, beside the published ones.

Weights are named as in the table, and may be for one data set only, since the paper fine-tunes a
model for each:

    {"ViT-L/16 (ImageNet-21k)": "hf:…", "ViT-L/16 (ImageNet-21k)@CIFAR-10": "runs/cifar"}

Data sets are named as in the table too. ImageNet ReaL is a file of labels for the pictures of
ImageNet, which must then be given as well.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.errors import ConfigError, unknown
from vitrail.evaluation.evaluate import evaluate
from vitrail.evaluation.results import Estimate, EvaluationResult
from vitrail.reproduction.published import REAL, Number, by_model, full_name
from vitrail.reproduction.report import Table, Verdict

MARGIN = 2  # published standard deviations beyond our interval that still agree


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One accuracy, in percent: as it was published, and as it was measured here."""

    model: str
    data: str
    published: Number
    ours: Estimate
    pictures: int

    @property
    def agrees(self) -> bool:
        """Whether the published value lies in our interval, or close beside it."""
        beside = MARGIN * (self.published.deviation or 0.0)
        return self.ours.low - beside <= self.published.value <= self.ours.high + beside


def measured(
    weights: Mapping[str, str], data: Mapping[str, str], table: str = "table2"
) -> list[Measurement]:
    """Evaluate every model on the test pictures of every data set it is for."""
    numbers = by_model(table)
    check_data(data, {name for row in numbers.values() for name in row}, table)
    found = []
    for name, reference in weights.items():
        model, only = meant(name, table, data)
        for target in only:
            real = data.get(REAL) if target == "ImageNet" else None
            findings = evaluate(reference, data[target], real=real)
            for seen, key in ((target, "accuracy"), (REAL, "real_accuracy")):
                if key in findings.estimates and seen in numbers[model]:
                    found.append(compare(model, seen, numbers[model][seen], findings, key))
    return found


def compare(
    model: str, data: str, number: Number, findings: EvaluationResult, key: str
) -> Measurement:
    ours = Estimate(*(100 * x for x in findings.estimates[key]))
    pictures = findings.samples
    return Measurement(model=model, data=data, published=number, ours=ours, pictures=pictures)


def check_data(data: Mapping[str, str], known: set[str], table: str) -> None:
    for name in data:
        if name not in known:
            raise unknown(f"data set of {table}", name, known)
    if "VTAB" in data:
        raise ConfigError("VTAB is a mean of 19 tasks; `vitrail vtab` measures it")
    if REAL in data and "ImageNet" not in data:
        raise ConfigError(f"{REAL} is other labels for the pictures of ImageNet; give those too")


def meant(name: str, table: str, data: Mapping[str, str]) -> tuple[str, list[str]]:
    """The model that weights are of, and the data sets they are to be evaluated on."""
    name, _, only = name.partition("@")
    model = full_name(table, name)
    if only and only not in data:
        given = ", ".join(data) or "none"
        raise ConfigError(f"weights of {name} are for {only}, and the data given is: {given}")
    targets = [only] if only else [target for target in data if target != REAL]
    if not targets:
        raise ConfigError(f"{name} can be measured on data only, such as ImageNet=/data/imagenet")
    return model, targets


def beside(found: Sequence[Measurement]) -> Table:
    """Published and measured, side by side."""
    return Table(
        caption="Measured here with weights and data that were given, beside the published numbers",
        head=("model", "data", "published", "here", "95 % interval", "pictures", "agrees"),
        rows=[
            (
                m.model,
                m.data,
                percent(m.published),
                f"{m.ours.value:.2f}",
                f"{m.ours.low:.2f} to {m.ours.high:.2f}",
                f"{m.pictures:,}",
                "yes" if m.agrees else "no",
            )
            for m in found
        ],
    )


def percent(number: Number | None) -> str:
    """`88.55 ± 0.04`, as the paper writes it."""
    if number is None:
        return "-"
    if number.deviation is None:
        return f"{number.value}"  # with as many digits as are told
    return f"{number.value:.2f} ± {number.deviation:.2f}"


def as_data(found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The same for machines."""
    return [
        {"model": m.model, "data": m.data, "published": m.published.value, "here": m.ours}
        for m in found
    ]


def judged(found: Sequence[Measurement], sound: bool) -> Verdict:
    """Holds if every accuracy agrees; "checked" if none was measured and what was computed fits."""
    if not sound:
        return "does not hold"
    if not found:
        return "checked"
    agreeing = sum(m.agrees for m in found)
    if agreeing == len(found):
        return "holds"
    return "holds in part" if agreeing else "does not hold"


def in_words(found: Sequence[Measurement]) -> str:
    """What the measurements say, in a sentence."""
    if not found:
        return "No accuracy was measured: that takes weights and data."
    agreeing = sum(m.agrees for m in found)
    return (
        f"{agreeing} of {len(found)} measured accuracies agree with the published ones: those lie "
        f"in our 95 % interval, or within {MARGIN} published standard deviations of it."
    )
