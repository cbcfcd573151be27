"""Figure 5: accuracy against the work of pre-training, for four families."""

import math
from collections.abc import Mapping, Sequence

from vitrail.planning.cost import training_flops
from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Mark, Panel, chart
from vitrail.reproduction.means import Mean, accuracy, by_seed, fewshot, numbers
from vitrail.reproduction.models import BATCH, FAMILIES, STEPS, pretraining
from vitrail.reproduction.published import TABLE6
from vitrail.reproduction.report import Picture, Report, Table, Verdict

SEEDS = 2
PETA = 1e15


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
    leads = {other: lead(curves["ViT"], curves[other]) for other in ("BiT", "hybrid", "Mixer")}
    parts = [part is not None and part > 0 for part in (leads["BiT"], ahead_first(curves))]
    verdict: Verdict = "holds" if all(parts) else "holds in part" if any(parts) else "does not hold"
    return Report(
        name="figure5",
        title=EXPERIMENT.title,
        claim=EXPERIMENT.claim,
        did=(
            f"Two or three sizes of each family learned {sets.pretrain_name}, {STEPS} steps of "
            f"{BATCH} pictures and one recipe for all, {SEEDS} seeds; judged by 2,500 test "
            "pictures. Work is that of forward and backward passes, counted as in table 6."
        ),
        found=(
            f"At the same work ViT is ahead of BiT by {points(leads['BiT'])}, of the hybrid by "
            f"{points(leads['hybrid'])} and of Mixer by {points(leads['Mixer'])} on the average "
            "over the range that both cover. At the smallest budget that both reach, the hybrid is "
            f"ahead of ViT by {points(ahead_first(curves))}. The claim is said to hold if ViT is "
            "ahead of BiT at the same work and the hybrid of ViT at that budget; in part if one is."
        ),
        verdict=verdict,
        tables=[table(results, means, few, spent)],
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


def points(value: float | None) -> str:
    return "(no common budget)" if value is None else f"{100 * value:+.1f} points"


def table(
    results: Mapping[Key, Result],
    means: Mapping[Key, Mean],
    few: Mapping[Key, Mean],
    spent: Mapping[Key, float],
) -> Table:
    times = by_seed(results, lambda result: result.seconds)
    return Table(
        caption="accuracies in percent; seconds on one core, with whatever else it had to do",
        head=("model", "petaFLOPs", "test", "5-shot", "seconds"),
        rows=[
            (
                f"{family} {size}",
                f"{spent[family, size] / PETA:.2f}",
                means[family, size].text,
                few[family, size].text,
                f"{times[family, size].mean:.0f}",
            )
            for family, size in means
        ],
    )


def here(means: Mapping[Key, Mean], spent: Mapping[Key, float], sets: Sets) -> Panel:
    return Panel(
        title=f"here ({sets.pretrain_name})",
        lines=[
            Line(family, [means[family, size].mark(spent[family, size] / PETA) for size in sizes])
            for family, (_, sizes) in FAMILIES.items()
        ],
        x_label="petaFLOPs of pre-training",
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
