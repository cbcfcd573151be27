"""The page and JSON of `vitrail evaluate --corruptions --out`: one chart, one table."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from vitrail.data.corruptions import CORRUPTIONS, SEVERITIES
from vitrail.data.storage import write_atomic
from vitrail.evaluation.robustness import mean_over_corruptions
from vitrail.formatting import percent
from vitrail.reports.figures import add_axes, inline_svg, new_figure, plot_style, set_tooltip
from vitrail.reports.html import LIGHT, NBSP, render

METRICS = {"accuracy": "accuracy", "ece": "ECE", "coverage": "coverage of the sets"}
CELL_WIDTH, CELL_HEIGHT = 46, 22


def write_robustness(
    folder: Path, rows: Sequence[Mapping[str, Any]], facts: Mapping[str, str]
) -> list[Path]:
    """Write corruptions.html and corruptions.json."""
    table = [dict(row) for row in rows]
    known = [key for key in METRICS if key in table[0]]
    means = {key: mean_over_corruptions(table, key) for key in known}
    page, values = folder / "corruptions.html", folder / "corruptions.json"
    tiles = [
        {
            "name": f"{METRICS[key]}, corrupted",
            "value": percent(fmean(means[key][s] for s in SEVERITIES)).replace(" ", NBSP),
            "lines": [f"{percent(means[key][0])} clean"],
            "first": key == "accuracy",
        }
        for key in known
    ]
    html = render(
        "robustness.html",
        "Common corruptions",
        facts,
        tiles=tiles,
        chart=inline_svg(corruption_chart(table)),
        means=[(METRICS[key], list(means[key].values())) for key in known],
        severities=["clean", *SEVERITIES],
    )
    write_atomic(page, html)
    write_atomic(values, json.dumps(dict(facts) | {"corruptions": table}, indent=1))
    return [page, values]


def corruption_chart(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Accuracy of each corruption and severity as a table of shaded cells."""
    by_cell = {(row["corruption"], row["severity"]): row for row in rows}
    clean = by_cell["clean", 0]["accuracy"]
    height, width = CELL_HEIGHT * len(CORRUPTIONS), CELL_WIDTH * len(SEVERITIES)
    with plot_style():
        figure = new_figure(150 + width, height + 44, "accuracy by corruption and severity")
        axes = add_axes(figure, 140, 8, width, height)
        axes.set(xlim=(0.5, 5.5), ylim=(len(CORRUPTIONS) - 0.5, -0.5), xlabel="severity")
        axes.grid(False)
        axes.spines["bottom"].set_visible(False)
        axes.set_yticks(range(len(CORRUPTIONS)), [name.replace("_", " ") for name in CORRUPTIONS])
        for number, name in enumerate(CORRUPTIONS):
            for severity in SEVERITIES:
                row = by_cell[name, severity]
                lost = min(max(1 - row["accuracy"] / max(clean, 1e-9), 0), 1)
                (cell,) = axes.bar(severity, 0.94, 0.96, number - 0.47, color=LIGHT["bad"])
                cell.set_alpha(0.05 + 0.75 * lost)
                text = ", ".join(f"{METRICS[k]} {percent(row[k])}" for k in METRICS if k in row)
                set_tooltip(cell, f"{name.replace('_', ' ')} {severity}: {text}")
                axes.text(
                    severity, number, f"{100 * row['accuracy']:.0f}", ha="center", va="center"
                )
        return figure
