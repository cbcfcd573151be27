"""Figure 5: accuracy against the work of pre-training, for four families."""

import math
from collections.abc import Mapping, Sequence

from vitrail.planning.cost import training_flops
from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Mark, Panel, chart
from vitrail.reproduction.means import Mean, accuracy, by_seed, fewshot, judged, numbers, tested
from vitrail.reproduction.models import BATCH, FAMILIES, STEPS, pretraining
from vitrail.reproduction.published import TABLE6
from vitrail.reproduction.report import Picture, Report, Table

SEEDS = 2
TERA = 1e12


def cells(sets: Sets) -> dict[Key, Cell]:
    return {
        (family, size, seed): pretraining(sets, make(size), seed)
        for seed in range(SEEDS)
        for family, (make, sizes) in FAMILIES.items()
        for size in sizes
    }


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    means, few = by_seed(results, accuracy), by_seed(results, fewshot)
    spent = {
        (family, size): training_flops(result.config, result.images)
        for (family, size, _), result in results.items()
    }
    curves = {
        family: sorted((spent[family, size], means[family, size].mean) for size in sizes)
        for family, (_, sizes) in FAMILIES.items()
    }
    error = next(iter(means.values()))
    leads = {other: lead(curves["ViT"], curves[other]) for other in ("BiT", "hybrid", "Mixer")}
    first = ahead_first(curves)
    parts = [as_mean(value, error) for value in (leads["BiT"], first) if value is not None]
    return EXPERIMENT.reported(
        did=(
            f"Two or three sizes of each family learned {sets.pretrain_name}, {STEPS} steps of "
            f"{BATCH} pictures and one recipe for all, {SEEDS} seeds; judged by {tested(results)} "
            "test pictures. Work is that of forward and backward passes, counted as in table 6."
        ),
        found=(
            "At the same work, on the average over the range that both cover, ViT minus BiT is "
            f"{points(leads['BiT'], error)}, ViT minus hybrid {points(leads['hybrid'], error)} and "
            f"ViT minus Mixer {points(leads['Mixer'], error)}. At the smallest budget that both "
            f"reach, hybrid minus ViT is {points(first, error)}. (Intervals are those of two "
            "single models, which is wider than it need be.) The parts of the claim: ViT is ahead "
            "of BiT at the same work; the hybrid is ahead of ViT at that budget."
        ),
        verdict=judged(parts) if len(parts) == 2 else "cannot be told",
        tables=[table(means, few, spent)],
        pictures=[
            Picture(
                file="figure5.svg",
                caption="Accuracy against the work of pre-training, published and here",
                content=chart([published(), here(means, spent, sets)]),
            )
        ],
        data={
            "accuracy": numbers(means),
            "fewshot": numbers(few),
            "operations": {" ".join(map(str, key)): work for key, work in spent.items()},
            "leads of ViT": leads,
        },
    )


def at(curve: Sequence[tuple[float, float]], work: float) -> float:
    """The accuracy of a family at so much work, straight between its sizes on a log scale."""
    (first, value), *rest = curve
    for second, following in rest:
        if work <= second:
            share = math.log(work / first) / math.log(second / first)
            return value + share * (following - value)
        first, value = second, following
    return value


def common(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> list[float]:
    """Nine budgets, evenly spaced on a log scale, over the range that both families cover."""
    low, high = max(one[0][0], other[0][0]), min(one[-1][0], other[-1][0])
    if low >= high:
        return []
    return [low * (high / low) ** (step / 8) for step in range(9)]


def lead(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float | None:
    """By how much one family is ahead at the same work; None where they never spend the same."""
    budgets = common(one, other)
    gaps = [at(one, work) - at(other, work) for work in budgets]
    return sum(gaps) / len(gaps) if gaps else None


def ahead_first(curves: Mapping[str, Sequence[tuple[float, float]]]) -> float | None:
    """How far the hybrid is ahead of ViT at the smallest budget of both."""
    budgets = common(curves["hybrid"], curves["ViT"])
    if not budgets:
        return None
    return at(curves["hybrid"], budgets[0]) - at(curves["ViT"], budgets[0])


def as_mean(value: float, error: Mean) -> Mean:
    """A difference between families, with the interval of one between two models."""
    gap = error - error
    return Mean((value,) * len(gap.values), gap.error, gap.paired)


def points(value: float | None, error: Mean) -> str:
    return (
        "unknown (no common budget)" if value is None else f"{as_mean(value, error).signed} points"
    )


def table(means: Mapping[Key, Mean], few: Mapping[Key, Mean], spent: Mapping[Key, float]) -> Table:
    return Table(
        caption="accuracies in percent",
        head=("model", "teraFLOPs", "test", "5-shot"),
        rows=[
            (
                f"{family} {size}",
                f"{spent[family, size] / TERA:.2f}",
                means[family, size].text,
                few[family, size].text,
            )
            for family, size in means
        ],
    )


def here(means: Mapping[Key, Mean], spent: Mapping[Key, float], sets: Sets) -> Panel:
    return Panel(
        title=f"here ({sets.pretrain_name})",
        lines=[
            Line(family, [means[family, size].mark(spent[family, size] / TERA) for size in sizes])
            for family, (_, sizes) in FAMILIES.items()
        ],
        x_label="teraFLOPs of pre-training",
        y_label="test accuracy",
        log_x=True,
    )


def published() -> Panel:
    """Table 6: the mean over its five transfer tasks, as the left half of figure 5 has it."""
    lines = []
    for family in ("ViT", "hybrid", "BiT"):
        rows = [row for row in TABLE6 if row.family == family.replace("BiT", "ResNet")]
        rows.sort(key=lambda row: row.exaflops)
        lines.append(Line(family, [Mark(row.exaflops, row.average / 100) for row in rows]))
    return Panel(
        title="published (mean of five sets)",
        lines=lines,
        x_label="exaFLOPs of pre-training",
        y_label="accuracy after fine-tuning",
        log_x=True,
    )


EXPERIMENT = Experiment(
    name="figure5",
    title="Transformers get more accuracy out of the same work",
    claim=(
        "Pre-trained on JFT, ViT needs two to four times less work than ResNets for the same "
        "accuracy; hybrids are ahead of ViT for small budgets, and the difference vanishes for "
        "larger models; none has come to its limit. MLP-Mixer was published later and is added."
    ),
    cells=cells,
    report=report,
)
