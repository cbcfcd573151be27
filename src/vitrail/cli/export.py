"""`vitrail export`: a model as a file that runs without vitrail."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.cli.console import Progress, log_stderr, paragraph, print_lines
from vitrail.cli.options import DataOptions, Json, ModelReference, Preset
from vitrail.export import MAX_DROP, Target
from vitrail.formatting import byte_size, duration

if TYPE_CHECKING:
    from vitrail.export.api import Exported


@dataclass(frozen=True, kw_only=True)
class Export(DataOptions):
    """Export a model to ONNX or torch.export, and verify its outputs."""

    model: ModelReference
    out: Path
    """File to write: model.onnx or model.pt2."""
    to: Target = "onnx"
    """ONNX, a torch.export program, or that program compiled with AOTInductor."""
    int8: bool = False
    """Quantize weights to 8 bits: smaller and faster; the accuracy is measured."""
    data: str | None = None
    """int8: labeled dataset to measure the accuracy on (default: the training data)."""
    max_drop: float = MAX_DROP
    """int8: fail if the accuracy drops by more than this fraction."""
    preprocessing: Preset = None
    with_preprocessing: bool = False
    """Include preprocessing: the file takes uint8 pixels of any size."""
    overwrite: bool = False
    """Replace the file in --out."""
    json: Json = False

    def run(self) -> None:
        from vitrail.checkpoints.load import load
        from vitrail.export.api import export_model

        model = self.model
        if self.preprocessing is not None:
            model = load(model, preprocessing=self.preprocessing, log=log_stderr)
        with Progress() as progress:
            done = export_model(
                model,
                self.out,
                to=self.to,
                int8=self.int8,
                data=self.data,
                max_drop=self.max_drop,
                preprocessing=self.with_preprocessing,
                overwrite=self.overwrite,
                progress=progress,
            )
        if self.json:
            values: dict[str, Any] = asdict(done) | {"path": str(done.path)}
            if done.cost is not None:
                values["cost"]["pictures"] = values["cost"].pop("images")  # the key of 0.1
            print(json.dumps(values, indent=1))
        else:
            print_lines(report(done))


def report(done: "Exported") -> Iterator[str]:
    yield f"{done.model} -> {done.to}, {byte_size(done.bytes)}"
    if (cost := done.cost) is not None:
        yield from paragraph(f"  {cost}", 4)
    for note in done.notes:
        yield from paragraph(f"  note: {note}", 4)
    yield f"verified: largest relative difference of logits and features {done.difference:.1e}"
    yield f"done in {duration(done.seconds)}: {done.path}"
