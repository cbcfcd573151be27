"""`vitrail evaluate`: accuracy, calibration, per-class metrics and mistakes of a model."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.cli.console import (
    Progress,
    log,
    log_stderr,
    note_lines,
    paragraph,
    print_json,
    print_lines,
    table,
)
from vitrail.cli.options import (
    BatchSize,
    DataReference,
    EngineOptions,
    Json,
    RunnableModel,
    Workers,
    options_of,
)
from vitrail.errors import ConfigError
from vitrail.export import MAX_DROP
from vitrail.formatting import percent

if TYPE_CHECKING:
    from vitrail.evaluation.results import EvaluationResult
    from vitrail.models.vit import Model

MAX_ROWS = 10  # of the table of classes
METRICS = {
    "accuracy": "top-1 accuracy",
    "real_accuracy": "top-1 accuracy, ReaL labels",
    "top5": "top-5 accuracy",
    "balanced_accuracy": "balanced accuracy",
    "accuracy_at_80": "selective accuracy at 80 % coverage",
    "mean_average_precision": "mean average precision (mAP)",
    "f1_micro": "F1 (micro)",
    "f1_macro": "F1 (macro)",
    "ece": "expected calibration error (ECE)",
    "loss": "",
}


@dataclass(frozen=True, kw_only=True)
class Evaluate(EngineOptions):
    """Evaluate a model: accuracy, calibration, per-class metrics, mistakes."""

    model: RunnableModel
    data: DataReference
    split: str | None = None
    """Split to evaluate (default: test, else val; without splits all images, or only the held-out
    ones if the model was trained on this dataset)."""
    out: Path | None = None
    """Folder for evaluation.html, evaluation.json and predictions.csv."""
    corruptions: bool = False
    """Also evaluate under 15 common corruptions at 5 severities (ImageNet-C)."""
    corruption_images: int = 500
    """Images for --corruptions, evenly spaced; each is evaluated 76 times."""
    flip: bool = False
    """Test-time augmentation: average the probabilities of each image and its mirror image."""
    crops: Literal[1, 5] = 1
    """Number of crops: 5 averages the probabilities of the corner and center crops."""
    restrict: bool = False
    """Predict only classes of the dataset, as usual for ImageNet-A and -R."""
    by_order: bool = False
    """Match classes by index instead of by name."""
    real: Path | None = None
    """ImageNet-ReaL labels (real.json) for the validation images."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Loss to report; use sigmoid for a model trained with a sigmoid loss."""
    save_temperature: Path | None = None
    """Write the model with temperature-scaled logits to this bundle, which may be the model's."""
    batch_size: BatchSize = 64
    workers: Workers = None
    backend: Literal["torch", "pillow"] = "torch"
    """Resizing backend: pillow matches published results; torch is faster."""
    strict: bool = False
    """Fail on the first unreadable image."""
    json: Json = False

    def run(self) -> None:
        from vitrail import distributed
        from vitrail.checkpoints.bundle import check_overwrite
        from vitrail.evaluation.dataset import open_evaluation_split
        from vitrail.evaluation.evaluate import evaluate
        from vitrail.models.registry import name_of

        if self.save_temperature is not None:
            if self.flip or self.crops > 1 or self.restrict or self.engine or self.merge:
                raise ConfigError(
                    "--save-temperature cannot be combined with --flip, --crops, --restrict, "
                    "--engine and --merge"
                )
            if self.model.endswith(".onnx"):
                raise ConfigError(
                    f"--save-temperature needs a bundle, and {self.model} is an exported model; "
                    "pass the model it was exported from"
                )
            in_place = self.save_temperature == Path(self.model)
            hint = "use another --save-temperature"
            check_overwrite(self.save_temperature, overwrite=in_place, hint=hint)
        augmented = self.flip or self.crops > 1
        if self.corruptions and (augmented or self.restrict or self.by_order or self.real):
            raise ConfigError(
                "--corruptions cannot be combined with --flip, --crops, --restrict, --by-order "
                "and --real; use two runs"
            )
        if self.corruption_images < 1:
            raise ConfigError(f"--corruption-images {self.corruption_images}: must be 1 or more")
        distributed.init(self.device)
        max_drop = MAX_DROP if self.engine == "auto" else 1.0
        predictor = self.open_predictor(
            self.model, data=self.data, max_drop=max_drop, log=log_stderr
        )
        protocol = options_of(self, "flip", "crops", "restrict", "by_order", "real", "loss")
        loading = options_of(self, "batch_size", "workers", "backend", "strict")
        with Progress() as progress:
            shown = progress if distributed.is_main() else None
            result = evaluate(
                predictor.runner,
                self.data,
                self.split,
                **protocol,
                **loading,
                device=self.device,
                progress=shown,
            )
            rows = None
            if self.corruptions:
                from vitrail.evaluation.robustness import evaluate_corruptions

                rows = evaluate_corruptions(
                    predictor.runner,
                    self.data,
                    self.split,
                    images=self.corruption_images,
                    conformal=predictor.conformal,
                    loss=self.loss,
                    **loading,
                    progress=shown,
                )
        if not distributed.is_main():
            return
        about, written = {"model": self.model, "data": self.data}, []
        if self.out is not None:
            from vitrail.reports.pages import write_evaluation, write_robustness

            source, _ = open_evaluation_split(self.data, self.split, predictor.metadata)
            more = {}
            if predictor.model is not None:
                more["architecture"] = name_of(predictor.model.config)
            if predictor.engine.name != "torch":
                more["engine"] = predictor.engine.name
            title = f"{Path(self.model).name} on {self.data}"
            written += write_evaluation(self.out, result, source, title=title, facts=about | more)
            if rows is not None:
                written += write_robustness(self.out, rows, about)
            written = [str(path) for path in written]
        if self.json:
            extra = {"written": written} | ({} if rows is None else {"corruptions": rows})
            print_json(about | result.to_dict() | extra)
        else:
            print_lines(report(result, f"{self.model} on {self.data}"))
            if rows is not None:
                print_lines(corruption_report(rows))
            for path in written:
                print(f"done: {path}")
            if not written:
                log("\nUse --out for a page with charts and the most confident mistakes.")
        if self.save_temperature is not None:
            assert predictor.model is not None
            self.calibrate(predictor.model, result, self.save_temperature)
            if not self.json:
                print(f"done: {self.save_temperature}")

    def calibrate(self, model: "Model", result: "EvaluationResult", out: Path) -> None:
        """Write the model with its logits divided by the temperature."""
        from vitrail.checkpoints.load import with_temperature
        from vitrail.checkpoints.save import save
        from vitrail.probing.teach import load_memory, saving_memory

        if result.calibration is None:
            raise ConfigError(
                "--save-temperature needs single-label data; these images have several labels"
            )
        if result.accuracy == 1:
            raise ConfigError(
                f"cannot fit a temperature: all {result.samples:,} images are classified "
                "correctly; use images on which the model makes mistakes"
            )
        temperature = result.calibration.temperature
        calibrated = with_temperature(model, temperature)
        if (memory := load_memory(Path(self.model), model)) is not None:
            memory = replace(memory, temperature=memory.temperature * temperature)
        with saving_memory(memory, out):
            save(calibrated, out)


def corruption_report(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Accuracy by corruption and severity, then the means."""
    from vitrail.data.corruptions import CORRUPTIONS, SEVERITIES
    from vitrail.evaluation.robustness import mean_over_corruptions

    accuracy = {(row["corruption"], row["severity"]): percent(row["accuracy"]) for row in rows}
    lines = [
        [name.replace("_", " "), "", *(accuracy[name, severity] for severity in SEVERITIES)]
        for name in CORRUPTIONS
    ]
    for key in ("accuracy", "ece", "coverage"):
        if key in rows[0]:
            means = mean_over_corruptions(rows, key).values()
            lines.append([f"mean {METRICS.get(key, key)}", *map(percent, means)])
    yield ""
    yield from table(lines, "lrrrrrr", ["severity", "clean", *map(str, SEVERITIES)])


def report(result: "EvaluationResult", title: str) -> Iterator[str]:
    from vitrail.reports.html import interval
    from vitrail.reports.pages import MIN_SUPPORT, loss_name, summary, weakest_classes

    yield from paragraph(f"{title}: {result.samples:,} images")
    yield from note_lines(result.notes, result.skipped)
    rows = []
    for key, label in METRICS.items():
        if key in result.estimates:
            value, low, high = result.estimates[key]
            cells = [percent(value), interval(low, high)]
            if key == "loss":
                label, cells = loss_name(result), [f"{value:.4f}", f"{low:.4f}-{high:.4f}"]
            rows.append([label, *cells])
    if (calibration := result.calibration) is not None and result.accuracy < 1:
        rows.append(["temperature (minimizes NLL)", f"{calibration.temperature:.3g}", ""])
        rows.append(["ECE after temperature scaling", percent(calibration.ece_scaled), ""])
    yield ""
    yield from table(rows, "lrl", ["metric", "", "95 % CI"], indent=2)
    yield ""
    for sentence in summary(result):
        yield from paragraph(f"- {sentence}")
    yield ""
    rows = [
        [c.name, f"{c.support:,}", percent(c.precision), percent(c.recall), percent(c.f1)]
        for c in weakest_classes(result)[:MAX_ROWS]
    ]
    title = f"weakest classes (n >= {MIN_SUPPORT})"
    if rows:
        yield from table(rows, "lrrrr", [title, "images", "precision", "recall", "F1"])
    else:
        yield f"{title}: no class has that many images"
