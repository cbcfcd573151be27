"""`vitrail evaluate`: how good a model is, how sure it may be of itself, where it goes wrong."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from vitrail.cli.arguments import DataOptions, DataReference, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.text import aside, paragraph, printable, tell
from vitrail.errors import ConfigError
from vitrail.export.kinds import MOST_DROP, EngineKind
from vitrail.formatting import percent, truncate

if TYPE_CHECKING:
    from vitrail.evaluation.findings import Estimate, Findings
    from vitrail.models.build import Model
    from vitrail.prediction.predictor import Predictor

MOST_ROWS = 10  # of the table of classes: the weakest
LONGEST_NAME = 28
NAMES = {
    "accuracy": "accuracy",
    "real_accuracy": "accuracy by real labels",
    "top5": "among the first five",
    "balanced_accuracy": "mean over classes",
    "accuracy_at_80": "of the surest 80 %",
    "mean_average_precision": "mean average precision",
    "f1_micro": "F1 over all labels",
    "f1_macro": "F1, mean over classes",
    "ece": "calibration error",
    "loss": "loss",
}


@dataclass(frozen=True, kw_only=True)
class Evaluate(DataOptions):
    """Measure a model on pictures: accuracy, calibration, classes, mistakes."""

    model: ModelReference
    """A bundle, a file of weights, hf:owner/name, or an .onnx file of `vitrail export`."""
    data: DataReference
    """A folder of class folders, a list, .tar or .npz files, builtin:sign-digits or another."""
    split: str | None = None
    """Which part: test, or else val; all of a set without splits, but if the model learned from it,
    what was kept apart."""
    out: Path | None = None
    """A folder to write evaluation.html, evaluation.json and predictions.csv into."""
    flip: bool = False
    """Look at mirror images too, and average."""
    crops: Literal[1, 5] = 1
    """5: look at the corners and the middle, and average."""
    restrict: bool = False
    """Choose only among the classes that the data has, as for ImageNet-A and -R."""
    by_order: bool = False
    """The classes of model and data are the same in the same order, but go by other names."""
    real: Path | None = None
    """A real.json of ImageNet-ReaL: what the validation pictures really show."""
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """sigmoid for a model that was trained with it: a yes or no for each class."""
    save_temperature: Path | None = None
    """Write the model with calibrated probabilities to this bundle, which may be the model's."""
    preprocessing: Preset = None
    engine: EngineKind | None = None
    """What computes; auto measures for two seconds and takes the fastest. torch unless you say."""
    merge: int = 0
    """Tokens to merge in each layer of a Vision Transformer: faster, a little less accurate."""
    batch_size: int = 64
    """Pictures at once."""
    workers: int | None = None
    """Processes that read pictures."""
    backend: Literal["torch", "pillow"] = "torch"
    """pillow resizes pictures as published numbers were made; torch is quicker."""
    strict: bool = False
    """Stop at the first picture that cannot be read."""
    device: str = ""
    """cpu, cuda, mps; chosen if not given."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail import distributed

        try:
            self.measure()
        finally:
            distributed.shutdown()

    def measure(self) -> None:
        from vitrail import distributed
        from vitrail.checkpoints.bundle import check_overwrite
        from vitrail.evaluation.api import evaluate
        from vitrail.prediction.engines import Guard
        from vitrail.prediction.predictor import Predictor

        if self.save_temperature is not None:
            if self.flip or self.crops > 1 or self.restrict or self.engine or self.merge:
                raise ConfigError(
                    "--save-temperature is for the model as it is; leave --flip, --crops, "
                    "--restrict, --engine and --merge out"
                )
            if self.model.endswith(".onnx"):
                raise ConfigError(
                    f"--save-temperature writes a bundle, and {self.model} is exported already; "
                    "give the model it was made of"
                )
            here = self.save_temperature == Path(self.model)
            check_overwrite(
                self.save_temperature, overwrite=here, hint="give --save-temperature another"
            )
        distributed.init(self.device)
        guard = Guard(data=self.data, max_drop=MOST_DROP if self.engine == "auto" else 1.0)
        predictor = Predictor(
            self.model,
            engine=self.engine or "",
            merge=self.merge,
            preprocessing=self.preprocessing,
            guard=guard,
            device=self.device,
            tell=aside,
        )
        with Progress() as progress:
            findings = evaluate(
                predictor.runner,
                self.data,
                self.split,
                flip=self.flip,
                crops=self.crops,
                restrict=self.restrict,
                by_order=self.by_order,
                real=self.real,
                loss=self.loss,
                batch_size=self.batch_size,
                workers=self.workers,
                backend=self.backend,
                strict=self.strict,
                device=self.device,
                progress=progress if distributed.is_main() else None,
            )
        if not distributed.is_main():
            return
        written = [str(path) for path in self.written(predictor, findings)]
        if self.json:
            about = {"model": self.model, "data": self.data}
            print(json.dumps(about | findings.to_dict() | {"written": written}, indent=1))
        else:
            for line in report(findings, f"{self.model} on {self.data}"):
                print(printable(line))
            for path in written:
                print(f"done: {path}")
            if not written:
                tell("\nWith --out, a page with pictures of the mistakes.")
        if self.save_temperature is not None:
            assert predictor.model is not None
            self.calibrate(predictor.model, findings, self.save_temperature)
            if not self.json:
                print(f"done: {self.save_temperature}")

    def written(self, predictor: "Predictor", findings: "Findings") -> Iterator[Path]:
        """Write what was asked for."""
        from vitrail.evaluation.folder import write_folder
        from vitrail.evaluation.pictures import open_part
        from vitrail.models.registry import name_of

        if self.out is not None:
            source, _ = open_part(self.data, self.split, predictor.metadata)
            facts = {"model": self.model, "data": self.data}
            if predictor.model is not None:
                facts["architecture"] = name_of(predictor.model.config)
            if predictor.engine.name != "torch":
                facts["engine"] = predictor.engine.name
            title = f"{Path(self.model).name} on {self.data}"
            yield from write_folder(self.out, findings, source, title=title, facts=facts)

    def calibrate(self, model: "Model", findings: "Findings", out: Path) -> None:
        """Write the model with its logits divided by the best temperature."""
        from dataclasses import replace

        from vitrail.checkpoints.adapt import with_temperature
        from vitrail.checkpoints.save import save
        from vitrail.probing.memory import load_memory, memory_beside

        if findings.calibration is None:
            raise ConfigError(
                "--save-temperature is for pictures of one class each; these have several"
            )
        if findings.accuracy == 1:
            raise ConfigError(
                f"all {findings.samples:,} pictures are named rightly, which cannot tell how sure "
                "the model may be; find the temperature on pictures it gets wrong, too"
            )
        temperature = findings.calibration.temperature
        calibrated = with_temperature(model, temperature)
        if (memory := load_memory(Path(self.model), model)) is None:
            save(calibrated, out)
            return
        memory = replace(memory, temperature=memory.temperature * temperature)
        with memory_beside(memory, out):
            save(calibrated, out)


def report(findings: "Findings", title: str) -> Iterator[str]:
    """The numbers for people, in 80 columns."""
    from vitrail.evaluation.verdict import verdict

    yield from paragraph(f"{title}: {findings.samples:,} pictures")
    for note in findings.notes:
        yield from paragraph(f"  note: {note}", 4)
    if skipped := findings.outcome.skipped:
        name, why = next(iter(skipped.items()))
        yield from paragraph(f"  {len(skipped):,} could not be read, such as {name}: {why}", 4)
    yield ""
    yield f"  {'':26}{'':>9}   19 times of 20"
    for key, called in NAMES.items():
        if key in findings.estimates:
            yield f"  {called:26}{number_line(key, findings.estimates[key])}"
    if (calibration := findings.calibration) is not None and findings.accuracy < 1:
        yield f"  {'best temperature':26}{calibration.temperature:>9.3g}"
        yield f"  {'calibration error after it':26}{percent(calibration.ece_scaled):>9}"
    yield ""
    for sentence in verdict(findings):
        yield from paragraph(f"- {sentence}")
    yield ""
    yield from table(findings)


def number_line(key: str, found: "Estimate") -> str:
    if key == "loss":
        return f"{found.value:>9.4f}   {found.low:.4f} to {found.high:.4f}"
    low = percent(found.low).removesuffix(" %")
    return f"{percent(found.value):>9}   {low} to {percent(found.high)}"


def table(findings: "Findings") -> Iterator[str]:
    """The classes that do worst."""
    shown = [c for c in findings.classes if c.pictures]
    shown = sorted(shown, key=lambda c: c.f1 if c.f1 == c.f1 else 0.0)[:MOST_ROWS]
    widest = max((min(LONGEST_NAME, len(c.name)) for c in shown), default=0)
    widest = max(widest, len("weakest classes"))
    yield f"{'weakest classes':{widest}}  pictures  precision   recall       F1"
    for c in shown:
        shares = f"{percent(c.precision):>9}  {percent(c.recall):>7}  {percent(c.f1):>7}"
        yield f"{truncate(c.name, widest):{widest}}  {c.pictures:>8,}  {shares}"
