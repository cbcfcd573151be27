"""`vitrail export`: a model into a file that runs without vitrail."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.cli.arguments import DataOptions, ModelReference, Preset
from vitrail.cli.progress import Progress
from vitrail.cli.text import aside, paragraph, printable
from vitrail.export.kinds import MOST_DROP, Target
from vitrail.formatting import byte_size, duration, percent

if TYPE_CHECKING:
    from vitrail.export.api import Exported


@dataclass(frozen=True, kw_only=True)
class Export(DataOptions):
    """Write a model for onnxruntime or torch, compared with the original before it says done."""

    model: ModelReference
    """A bundle, a file of weights, or hf:owner/name."""
    out: Path
    """The file to write: model.onnx, or model.pt2."""
    to: Target = "onnx"
    """onnx runs everywhere; torch is a torch.export program; aotinductor is that, compiled."""
    int8: bool = False
    """Round weights to 8 bits: a quarter of the size, quicker; what it costs is measured."""
    data: str | None = None
    """Pictures to measure int8 by: their test split; without it, those of the training."""
    max_drop: float = MOST_DROP
    """Refuse int8 if it loses more than this share of the accuracy."""
    preprocessing: Preset = None
    with_preprocessing: bool = False
    """The file takes the pixels of a picture of any size, and prepares them itself."""
    overwrite: bool = False
    """Replace the file that --out names."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.checkpoints.load import load
        from vitrail.export.api import export_model

        model = self.model
        if self.preprocessing is not None:
            model = load(model, preprocessing=self.preprocessing, log=aside)
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
            print(json.dumps(asdict(done) | {"path": str(done.path)}, indent=1))
            return
        for line in report(done):
            print(printable(line))


def report(done: "Exported") -> Iterator[str]:
    """What was written, for people."""
    yield f"{done.model} -> {done.to}, {byte_size(done.bytes)}"
    if (cost := done.cost) is not None:
        yield from paragraph(
            f"  int8 is right on {percent(cost.int8_accuracy)} of {cost.pictures:,} pictures of "
            f"{cost.data}, the model on {percent(cost.accuracy)}",
            4,
        )
    for note in done.notes:
        yield from paragraph(f"  note: {note}", 4)
    yield f"run and compared: logits and features differ by {done.difference:.1e} of the largest"
    yield f"done in {duration(done.seconds)}: {done.path}"
