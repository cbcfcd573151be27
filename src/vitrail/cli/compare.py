"""`vitrail compare`: two models, engines or checkpoints on the same images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

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
    DataOptions,
    DataReference,
    Device,
    Json,
    UnmetError,
    options_of,
)
from vitrail.errors import ConfigError
from vitrail.export import EngineKind
from vitrail.formatting import byte_size, comma_list, percent

if TYPE_CHECKING:
    from vitrail.evaluation.compare import Comparison
    from vitrail.prediction.predictor import Predictor

MAX_ROWS = 5  # classes that lost or gained most
A = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="A", help="Baseline model.")]
B = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="B", help="Candidate model.")]


@dataclass(frozen=True, kw_only=True)
class Compare(DataOptions):
    """Compare two models on the same images: accuracy, changed predictions, speed, size.

    A and B are bundles, weights files, hf:owner/name, or exported .onnx files."""

    a: A
    b: B
    data: DataReference
    split: str | None = None
    """Split to compare on (default: as for evaluate)."""
    engine_a: EngineKind | None = None
    """Inference engine of A (default: torch)."""
    engine_b: EngineKind | None = None
    """Inference engine of B; pass the same model twice to compare engines."""
    max_drop: float | None = None
    """Non-inferiority margin, a fraction: exit with status 1 unless the CI rules out a larger drop
    in accuracy."""
    out: Path | None = None
    """Folder for comparison.html and comparison.json."""
    batch_size: BatchSize = 64
    device: Device = ""
    json: Json = False

    def run(self) -> None:
        from vitrail import distributed
        from vitrail.data.datasets import ImageDataset, open_dataset
        from vitrail.data.provenance import DataProvenance, contains_any, fingerprint
        from vitrail.evaluation.compare import compare_results
        from vitrail.evaluation.dataset import open_evaluation_split
        from vitrail.evaluation.evaluate import evaluate
        from vitrail.prediction.engines import AccuracyGuard
        from vitrail.prediction.predictor import Predictor

        if self.max_drop is not None and not 0 <= self.max_drop < 1:
            raise ConfigError(f"--max-drop {self.max_drop}: expected a fraction, such as 0.01")
        distributed.init(self.device)
        guard = AccuracyGuard(max_drop=1.0)
        pairs: list[tuple[str, EngineKind | None]]
        pairs = [(self.a, self.engine_a), (self.b, self.engine_b)]
        open_one = partial(Predictor, guard=guard, device=self.device, log=log_stderr)
        predictors = [open_one(name, engine=engine or "") for name, engine in pairs]
        # The split is A's choice, so that both are evaluated on the same images.
        source, notes = open_evaluation_split(self.data, self.split, predictors[0].metadata)
        assert isinstance(source, ImageDataset)
        origin = DataProvenance.from_dict(predictors[1].metadata.provenance)
        overlaps = fingerprint(source) == origin.fingerprint or contains_any(source, origin.samples)
        if not overlaps and (splits := origin.splits_for(self.data)) is not None:
            train = open_dataset(self.data, "train", splits=splits)
            names = {train.name(row) for row in range(len(train))}
            overlaps = any(source.name(row) in names for row in range(len(source)))
        if overlaps:
            notes.append("B was trained on some of these images")
        notes += class_notes(*(predictor.metadata.class_names for predictor in predictors))
        loading = options_of(self, "batch_size", "device")
        with Progress() as progress:
            first, second = (
                evaluate(predictor.runner, source, **loading, progress=progress)
                for predictor in predictors
            )
        result = compare_results(first, second)
        names = [f"{name} ({engine})" if engine else name for name, engine in pairs]
        costs = measure_costs(predictors)
        about = {"a": names[0], "b": names[1], "data": self.data, "notes": notes, "costs": costs}
        written: list[str] = []
        if self.out is not None:
            from vitrail.reports.pages import write_comparison

            models = [predictor.model for predictor in predictors]
            paths = write_comparison(self.out, result, source, models, about)
            written = [str(path) for path in paths]
        if self.json:
            print_json(about | result.to_dict() | {"written": written})
        else:
            print_lines(report(result, about))
            for path in written:
                print(f"done: {path}")
            if not written:
                log("\nUse --out for a page with the changed predictions.")
        if self.max_drop is not None and result.difference.low < -self.max_drop:
            raise UnmetError(
                f"B may be {percent(-result.difference.low)} less accurate (95 % CI), more than "
                f"--max-drop {percent(self.max_drop)}; keep A, or narrow the CI with more images"
            )


def class_notes(a: Sequence[str], b: Sequence[str]) -> Iterator[str]:
    """Note the classes that only one of the models has; a model may have no class names."""
    for model, names, others in (("A", a, b), ("B", b, a)):
        only = [name for name in names if name not in others]
        if only and others:
            noun = "class" + "es" * (len(only) > 1)
            yield f"only {model} has the {noun} {comma_list(only, quoted=True)}"


def measure_costs(predictors: "list[Predictor]") -> list[dict[str, float]]:
    """Return milliseconds per image, timed in turns, and bytes of the weights or of the .onnx."""
    import torch

    from vitrail.prediction.engines import TIMING_BATCH_SIZE, best_times

    work, costs = [], []
    for p in predictors:
        shape = (TIMING_BATCH_SIZE, p.channels, *p.metadata.preprocessing.size)
        work.append((p.engine, torch.zeros(shape)))
    for predictor, seconds in zip(predictors, best_times(work), strict=True):
        size = getattr(predictor.engine, "bytes", 0)
        if not size and predictor.model is not None:
            size = sum(x.numel() * x.element_size() for x in predictor.model.parameters())
        costs.append({"milliseconds": 1000 * seconds / TIMING_BATCH_SIZE, "bytes": size})
    return costs


def report(result: "Comparison", about: dict[str, Any]) -> Iterator[str]:
    yield from paragraph(f"A: {about['a']}")
    yield from paragraph(f"B: {about['b']}")
    yield from paragraph(f"{about['data']}: {result.samples:,} images")
    yield from note_lines(about["notes"])
    yield ""
    yield from paragraph(result.verdict[:1].upper() + result.verdict[1:] + ".")
    yield ""
    rows = [
        ["accuracy", *map(percent, result.accuracy)],
        ["ECE", *map(percent, result.ece)],
        ["only this model correct", f"{len(result.lost):,}", f"{len(result.gained):,}"],
        ["ms per image (batch of 8)", *(f"{cost['milliseconds']:.2f}" for cost in about["costs"])],
        ["weights", *(byte_size(cost["bytes"]) for cost in about["costs"])],
        ["same top-1 class", percent(result.agreement), ""],
    ]
    yield from table(rows, "lrr", ["", "A", "B"])
    changed = [c for c in result.classes if c.gained or c.lost]
    if changed:
        hidden = max(0, len(changed) - 2 * MAX_ROWS)
        del changed[MAX_ROWS : MAX_ROWS + hidden]
        rows = [
            [c.name, f"{c.support:,}", f"{c.lost:,}", f"{c.gained:,}", f"{c.p_value:.2g}"]
            for c in changed
        ]
        yield ""
        yield from table(rows, "lrrrr", ["class", "images", "lost", "gained", "McNemar p"])
        if hidden:
            yield f"and {hidden:,} more between them; --json or --out lists all"
