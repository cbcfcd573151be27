"""What an evaluation leaves behind in a folder: a page, the numbers, and every prediction.

evaluation.html    for people
evaluation.json    the same numbers for machines
predictions.csv    one line for each picture: what it is, what it was taken for, how surely

The folder may be that of a run: nothing there has these names, its own page is report.html.
"""

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from vitrail.data.datasets import Dataset
from vitrail.data.storage import atomic_path, write_atomic
from vitrail.evaluation.findings import Findings, Predictions
from vitrail.evaluation.page import write_evaluation


def write_folder(
    folder: Path,
    findings: Findings,
    source: Dataset,
    *,
    title: str,
    facts: Mapping[str, str],
) -> Iterator[Path]:
    """Write each file whole or not at all; their paths."""
    assert findings.predictions is not None
    page = folder / "evaluation.html"
    write_evaluation(page, findings, title=title, facts=facts, source=source)
    yield page
    text = json.dumps(dict(facts) | findings.to_dict(), indent=1)
    write_atomic(folder / "evaluation.json", text)
    yield folder / "evaluation.json"
    with (
        atomic_path(folder / "predictions.csv") as temporary,
        temporary.open("w", encoding="utf-8", errors="replace", newline="") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["picture", "label", "predicted", "confidence", "right"])
        writer.writerows(lines(findings.predictions, source))
    yield folder / "predictions.csv"


def lines(predictions: Predictions, source: Dataset) -> Iterator[list[str | int]]:
    """Each picture's name, label, likeliest class and its probability, and whether it is right.

    Several labels are separated by a vertical bar. As many are right as the outcome says.
    """
    classes, scores = predictions.classes, predictions.scores
    rows = zip(
        predictions.indices.tolist(),
        predictions.labels,
        scores.predicted.tolist(),
        scores.confidence.tolist(),
        scores.position.tolist(),
        strict=True,
    )
    for index, label, predicted, sure, position in rows:
        true = label.nonzero()[0].tolist() if predictions.multi_label else [int(label)]
        named = "|".join(classes[number] for number in true)
        yield [source.name(index), named, classes[predicted], f"{sure:.6f}", int(position == 0)]
