"""`vitrail calibrate`: prediction sets and an abstention threshold with a guaranteed error rate."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.cli.console import Progress, log, note_lines, paragraph, print_json, print_lines, table
from vitrail.cli.options import (
    BatchSize,
    DataOptions,
    DataReference,
    Device,
    Json,
    ModelReference,
    Preset,
    options_of,
)
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.conformal import Conformal
    from vitrail.evaluation.results import EvaluationResult


@dataclass(frozen=True, kw_only=True)
class Calibrate(DataOptions):
    """Calibrate for a target error rate: conformal prediction sets and abstention.

    The guarantee holds for images from the same distribution as DATA, which must not have been used
    for training."""

    model: ModelReference
    data: DataReference
    split: str | None = None
    """Split to calibrate on (default: as for evaluate)."""
    error_rate: float = 0.05
    """Target error rate: fraction of prediction sets that miss the true class, and of accepted
    predictions that are wrong."""
    method: Literal["lac", "aps", "raps"] = "lac"
    """Conformal score: lac gives the smallest sets, aps and raps larger ones for hard images."""
    per_class: bool = False
    """Class-conditional coverage instead of marginal; needs more images."""
    out: Path | None = None
    """Bundle to write, which may be the model's own."""
    preprocessing: Preset = None
    batch_size: BatchSize = 64
    device: Device = ""
    json: Json = False

    def run(self) -> None:
        from vitrail.checkpoints.bundle import check_overwrite
        from vitrail.checkpoints.load import load
        from vitrail.checkpoints.save import save
        from vitrail.evaluation.conformal import calibrate
        from vitrail.probing.teach import load_memory, saving_memory

        if self.out is not None:
            own = self.out == Path(self.model)
            check_overwrite(self.out, overwrite=own, hint="use another --out")
        with Progress() as progress:
            model, conformal, result = calibrate(
                load(self.model, preprocessing=self.preprocessing),
                self.data,
                self.split,
                progress=progress,
                **options_of(self, "error_rate", "method", "per_class", "batch_size", "device"),
            )
        if self.out is not None:
            with saving_memory(load_memory(Path(self.model), model), self.out):
                save(model, self.out)
        values = summarize(conformal, result)
        if self.json:
            values["written"] = self.out and str(self.out)
            print_json({"model": self.model, "data": self.data} | values)
            return
        print_lines(report(conformal, values, list(result.notes)))
        if self.out is None:
            log("\nUse --out to store the thresholds in a bundle; predict and serve use them.")
        else:
            print(f"done: {self.out}")


def summarize(conformal: "Conformal", result: "EvaluationResult") -> dict[str, Any]:
    """Return the thresholds, and what they do on the calibration images."""
    from vitrail.evaluation.calibration import probabilities
    from vitrail.evaluation.conformal import clopper_pearson, coverage_range, images_needed

    assert result.predictions is not None
    p, labels = probabilities(result.predictions.logits, "softmax"), result.predictions.labels
    sizes = conformal.sets(p).sum(axis=1)
    accepted = conformal.accepts(p)
    errors = int((p.argmax(axis=1) != labels)[accepted].sum())
    count = min(int((labels == k).sum()) for k in set(labels.tolist()))
    samples = conformal.samples if len(conformal.thresholds) == 1 else count
    abstention = {
        "accepted": float(accepted.mean()),
        "accepted_error": errors / max(int(accepted.sum()), 1),
        "accepted_error_bound": clopper_pearson(errors, int(accepted.sum())),
    }
    return conformal.to_dict() | {
        "accuracy": result.accuracy,
        "images_needed": images_needed(conformal.error_rate),
        "coverage_range": coverage_range(samples, conformal.error_rate),
        "set_size": float(sizes.mean()),
        "one_class": float((sizes == 1).mean()),
        **(abstention if conformal.abstain else dict.fromkeys(abstention)),
        "notes": list(result.notes),
    }


def report(conformal: "Conformal", values: dict[str, Any], notes: list[str]) -> Iterator[str]:
    from vitrail.evaluation.conformal import correct_needed

    rate, per_class = percent(conformal.error_rate), len(conformal.thresholds) > 1
    yield f"{conformal.samples:,} calibration images, accuracy {percent(values['accuracy'])}"
    yield from note_lines(notes)
    yield ""
    low, high = map(percent, values["coverage_range"])
    rows = [
        ["prediction sets", f"{conformal.method}, {'per class' if per_class else 'marginal'}"],
        [
            "coverage",
            f"at least {percent(1 - conformal.error_rate)} on average over calibration sets",
        ],
        ["", f"{low} to {high} in 90 % of calibrations{' (smallest class)' * per_class}"],
        ["mean set size", f"{values['set_size']:.2f}"],
        ["sets with one class", percent(values["one_class"])],
    ]
    if conformal.abstain:
        rows += [
            ["abstain below", "class-dependent" if per_class else percent(conformal.abstain[0])],
            ["accepted predictions", percent(values["accepted"])],
            ["  error rate", f"at most {rate}, with 95 % confidence"],
        ]
        never = sum(threshold > 1 for threshold in conformal.abstain)
        if never:
            rows.append(["", f"{never:,} classes are never accepted: too few images or too hard"])
    yield from table(rows, "lw")
    if not conformal.abstain:
        yield from paragraph(
            f"No abstention threshold: these images do not show for any threshold, with 95 % "
            f"confidence, that at most {rate} of the accepted predictions are wrong. That needs "
            f"{correct_needed(conformal.error_rate):,} accepted predictions that are all correct, "
            "among the four fifths of the images that thresholds are tested on, and more if some "
            "are wrong. Add images, or allow a higher --error-rate.",
            0,
        )
    yield ""
    yield from paragraph(
        "Assumption: new images are drawn from the same distribution as these (exchangeability). "
        "predict and serve warn if the confidence distribution shifts.",
        0,
    )
