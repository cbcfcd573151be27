"""Table 5: transfer accuracy by what was pre-trained on (figure 3), and what can be checked of it.

Accuracies are measured where weights and data are given, as for table 2 (`measuring.py`).
"""

from collections.abc import Mapping, Sequence

from vitrail.models.config import VitConfig
from vitrail.models.registry import configuration
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.measuring import Measurement, as_data, beside, in_words, judged
from vitrail.reproduction.published import MODELS5, TABLE5, TABLE6, TARGETS
from vitrail.reproduction.report import Report, Table
from vitrail.reproduction.sizes import giga, millions, parameters, trunk

SIZE = 384  # pixels of fine-tuning
PAIRS = (("ViT-B/16", "ViT-L/16"), ("ViT-B/32", "ViT-L/32"))

TITLE = "Transfer accuracy by what was pre-trained on, as published"
CLAIM = (
    "Pre-trained on ImageNet, the large models are behind the base models; on ImageNet-21k they "
    "are about equal; only with JFT does size bring its full benefit (published; figure 3)."
)
DID = (
    "The published numbers are repeated here as data, and the claim is examined on them: by how "
    "many points of ImageNet accuracy the large model is ahead of the base model of the same patch "
    "size. It follows if that is below zero for ImageNet, above zero for JFT, and rises with the "
    "set, for both patch sizes. The column of JFT is compared with the rows of table 6. Computed "
    f"from the models: parameters, tokens and work at the {SIZE} pixels of fine-tuning."
)


def accuracies(pretrained: str, data: str) -> dict[str, float]:
    """By model; ViT-H/14 is missing where it was not trained."""
    return dict(zip(MODELS5, TABLE5[pretrained][data], strict=False))


def lead(pretrained: str, small: str, large: str) -> float:
    """By how much the large model is ahead on ImageNet."""
    values = accuracies(pretrained, "ImageNet")
    return values[large] - values[small]


def leads(small: str, large: str) -> list[float]:
    """From the smallest set to the largest."""
    return [lead(pretrained, small, large) for pretrained in TABLE5]


def sound() -> bool:
    """Whether the claim follows from the published numbers."""
    both = [leads(*pair) for pair in PAIRS]
    return all(found[0] < 0 < found[-1] and found == sorted(found) for found in both)


def apart() -> list[str]:
    """Where the column of JFT is not what table 6 has for the same model, trained longest."""
    rows = {row.model: row for row in sorted(TABLE6, key=lambda row: row.epochs)}
    found = []
    for model in MODELS5:
        for data, there in zip(TARGETS, rows[model].accuracies, strict=True):
            here = accuracies("JFT", data)[model]
            if here != there:
                found.append(f"{model} on {data} ({here} here, {there} there)")
    return found


def words() -> str:
    told = [
        f"{large} against {small}: {', '.join(f'{x:+.2f}' for x in leads(small, large))}"
        for small, large in PAIRS
    ]
    whole = [model for model in MODELS5 if tokens_at(model) is None]
    odd = f" {SIZE} pixels are no whole number of patches of {', '.join(whole)}." if whole else ""
    others = "; ".join(apart()) or "nowhere"
    return (
        f"Points of ImageNet accuracy by which the large model is ahead, pre-trained on "
        f"{', '.join(TABLE5)} (published): {'; '.join(told)}. The column of JFT differs from "
        f"table 6: {others}.{odd}"
    )


def tokens_at(model: str) -> int | None:
    """Tokens of a picture of 384 pixels; None where that does not divide into patches."""
    config = configuration(model)
    assert isinstance(config, VitConfig)
    return None if SIZE % config.stride[0] else config.change(image_size=SIZE).num_tokens


def published_table() -> Table:
    rows = []
    for pretrained, targets in TABLE5.items():
        for data in targets:
            values = accuracies(pretrained, data)
            texts = (f"{values[m]:.2f}" if m in values else "-" for m in MODELS5)
            rows.append((pretrained, data, *texts))
    return Table(
        caption=f"Published: top-1 after fine-tuning at {SIZE} pixels",
        head=("pre-trained on", "evaluated on", *MODELS5),
        rows=rows,
    )


def costs_table() -> Table:
    rows = []
    for model in MODELS5:
        count, before = millions(parameters(configuration(model))), trunk(model)
        if tokens_at(model) is None:
            rows.append((model, count, str(before.tokens), giga(before.forward)))
            continue
        after = trunk(model, SIZE)
        work = f"{giga(before.forward)} → {giga(after.forward)}"
        rows.append((model, count, f"{before.tokens} → {after.tokens}", work))
    return Table(
        caption=f"Computed here: a picture at 224 and at {SIZE} pixels",
        head=("model", "parameters", "tokens", "GFLOPs forward"),
        rows=rows,
    )


def report_with(found: Sequence[Measurement]) -> Report:
    """The report, with what `measured(weights, data, "table5")` gave; that may be nothing."""
    own = (beside(found),) if found else ()
    return EXPERIMENT.reported(
        did=DID,
        found=f"{words()} {in_words(found)}",
        verdict=judged(found, sound()),
        tables=(published_table(), costs_table(), *own),
        data={
            "leads": {large: leads(small, large) for small, large in PAIRS},
            "measured": as_data(found),
        },
    )


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    return report_with(())


EXPERIMENT = Experiment(
    name="table5", title=TITLE, claim=CLAIM, cells=lambda sets: {}, report=report
)
