"""Figure 8: which dimension of a Transformer to make larger."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitrail.planning.cost import cost_of
from vitrail.reproduction.cells import Cell, Result
from vitrail.reproduction.experiments import Experiment, Key, Sets
from vitrail.reproduction.figures import Line, Panel, chart
from vitrail.reproduction.means import Mean, accuracy, by_seed, fewshot, judged, numbers, tested
from vitrail.reproduction.models import BATCH, STEPS, pretraining, vit
from vitrail.reproduction.report import Picture, Report, Table

SEEDS = 2
BASE = "base"
AXES: dict[str, dict[str, dict[str, Any]]] = {  # axis → value → what it changes
    "depth": {"1": {"depth": 1}, "2": {"depth": 2}, "8": {"depth": 8}},
    "width": {"32": {"width": 32}, "128": {"width": 128}},
    "MLP": {"64": {"mlp_width": 64}, "1024": {"mlp_width": 1024}},
    "patch": {"16": {"patch_size": 16}, "4": {"patch_size": 4}},
    "all": {
        "smaller": {"depth": 2, "width": 48, "mlp_width": 192},
        "larger": {"depth": 6, "width": 96, "mlp_width": 384},
    },
}


def cells(sets: Sets) -> dict[Key, Cell]:
    models = {(BASE, ""): vit()} | {
        (axis, value): vit(**change)
        for axis, values in AXES.items()
        for value, change in values.items()
    }
    return {
        (*key, seed): pretraining(sets, model, seed)
        for seed in range(SEEDS)
        for key, model in models.items()
    }


def report(results: Mapping[Key, Result], sets: Sets) -> Report:
    means, few = by_seed(results, accuracy), by_seed(results, fewshot)
    costs = {key[:-1]: cost_of(result.config) for key, result in results.items()}
    work = {key: cost.forward for key, cost in costs.items()}
    slopes = {axis: slope(row) for axis, row in lines(means, work).items()}
    parts = [slopes["depth"] - slopes["width"], slopes["patch"]]
    told = ", ".join(f"{axis} {value.signed}" for axis, value in slopes.items())
    return EXPERIMENT.reported(
        did=(
            "From a ViT of depth 4, width 64, MLP 256 and patches of 8 pixels, one dimension at a "
            f"time was made smaller or larger. Each learned {sets.pretrain_name}, {STEPS} steps of "
            f"{BATCH} pictures, {SEEDS} seeds; judged by {tested(results)} test pictures."
        ),
        found=(
            f"Points of accuracy for each doubling of the work of a picture: {told}. The parts of "
            f"the claim: depth gives more than width; smaller patches give something."
        ),
        verdict=judged(parts),
        tables=[
            Table(
                caption="accuracies in percent",
                head=("changed", "to", "parameters", "MFLOP", "test", "5-shot"),
                rows=[
                    (
                        str(key[0]),
                        str(key[1]),
                        f"{costs[key].parameters:,}",
                        f"{work[key] / 1e6:.1f}",
                        means[key].text,
                        few[key].text,
                    )
                    for key in means
                ],
            )
        ],
        pictures=[
            Picture(
                file="figure8.svg",
                caption="Test accuracy against the work of a picture, by what was made larger",
                content=chart(
                    [
                        Panel(
                            title=f"here ({sets.pretrain_name})",
                            lines=[
                                Line(axis, [mean.mark(x / 1e6) for x, mean in row])
                                for axis, row in lines(means, work).items()
                            ],
                            x_label="MFLOP of a picture, forward",
                            y_label="test accuracy",
                            log_x=True,
                        )
                    ]
                ),
            )
        ],
        data={
            "accuracy": numbers(means),
            "fewshot": numbers(few),
            "slopes": {axis: value.to_dict() for axis, value in slopes.items()},
        },
    )


def lines(
    means: Mapping[Key, Mean], work: Mapping[Key, float]
) -> dict[str, list[tuple[float, Mean]]]:
    """Axis → (work, accuracy) from the smallest to the largest, the base among them."""
    base = (work[BASE, ""], means[BASE, ""])
    return {
        axis: sorted(
            [base, *((work[axis, value], means[axis, value]) for value in values)],
            key=lambda pair: pair[0],
        )
        for axis, values in AXES.items()
    }


def slope(row: list[tuple[float, Mean]]) -> Mean:
    """Accuracy for each doubling of the work, seed by seed: the least-squares line."""
    xs = np.log2([work for work, _ in row])
    xs -= xs.mean()
    per_seed = np.array([mean.values for _, mean in row]).T @ xs / np.sum(xs**2)
    spread, one = math.sqrt(float(np.sum(xs**2))), row[0][1]
    return Mean(tuple(per_seed.tolist()), one.error / spread, one.paired / spread)


EXPERIMENT = Experiment(
    name="figure8",
    title="Deeper and finer pays more than wider",
    claim=(
        "Scaling one dimension at a time, depth brings the largest improvements, with less to gain "
        "beyond 16 blocks; width the smallest; smaller patches help without any more parameters; "
        "all dimensions together give robust gains. (Published as a picture only.)"
    ),
    cells=cells,
    report=report,
)
