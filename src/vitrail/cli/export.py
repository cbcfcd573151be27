"""`vitrail export`: a model as a file that runs without vitrail. `vitrail convert`: as a checkpoint
of another format, with the same logits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.cli.console import Progress, log_stderr, note_lines, paragraph, print_json, print_lines
from vitrail.cli.options import (
    Command,
    DataOptions,
    FileToWrite,
    Int8Data,
    Json,
    MaxDrop,
    ModelReference,
    Preset,
    options_of,
)
from vitrail.export import MAX_DROP, Target
from vitrail.formatting import byte_size, duration


@dataclass(frozen=True, kw_only=True)
class Export(DataOptions):
    """Export a model to ONNX, torch.export or a web page, and verify its outputs."""

    model: ModelReference
    out: Path
    """File to write: model.onnx, model.pt2 or model.html."""
    to: Target = "onnx"
    """Format: ONNX, a torch.export program, the same compiled with AOTInductor, or a web page that
    runs the model offline."""
    int8: bool = False
    """Quantize weights to 8 bits: smaller and faster; the accuracy is measured."""
    data: Int8Data = None
    max_drop: MaxDrop = MAX_DROP
    preprocessing: Preset = None
    with_preprocessing: bool = False
    """Include preprocessing: the file takes uint8 pixels of any size."""
    examples: str | None = None
    """html: embed a few images of this dataset as examples."""
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
                preprocessing=self.with_preprocessing,
                progress=progress,
                **options_of(self, "to", "int8", "data", "max_drop", "examples", "overwrite"),
            )
        if self.json:
            values = done._asdict() | {"path": str(done.path)}
            if done.cost is not None:
                values["cost"] = done.cost._asdict()
                values["cost"]["pictures"] = values["cost"].pop("images")  # the key of 0.1
            print_json(values)
            return
        print(f"{done.model} -> {done.to}, {byte_size(done.bytes)}")
        if done.cost is not None:
            print_lines(paragraph(f"  {done.cost}", 4))
        print_lines(note_lines(done.notes))
        print("verified: largest relative difference of logits and features", end=" ")
        print(f"{done.difference:.1e}\ndone in {duration(done.seconds)}: {done.path}")


@dataclass(frozen=True, kw_only=True)
class Convert(Command):
    """Convert a checkpoint to another format, and verify that the logits are equal."""

    source: ModelReference
    destination: FileToWrite
    """The file or folder to write, depending on the format."""
    to: Literal[
        "bundle", "google", "google-older", "timm", "huggingface", "torchvision", "bit_pytorch"
    ]
    """Output format."""
    source_format: Annotated[
        Literal["bundle", "google", "timm", "huggingface", "torchvision", "bit_pytorch"] | None,
        tyro.conf.arg(name="from"),
    ] = None
    """Input format, if it is not detected."""
    heads: int | None = None
    """Number of attention heads, if the checkpoint does not state it."""
    preprocessing: Preset = None
    adapter: Path | None = None
    """LoRA adapter of the source (`vitrail finetune --lora`) to merge into its weights."""
    drop_head: bool = False
    """Leave out the head: the result returns features."""
    half: bool = False
    """bundle: round the weights to float16, for half the size; the difference is printed."""
    allow_loss: bool = False
    """Drop numerics that the format cannot express. Weights are never dropped."""
    dry_run: bool = False
    """Print what would be done, and write nothing."""
    overwrite: bool = False
    """Replace a bundle at the destination, or the source."""
    json: Json = False

    def run(self) -> None:
        from vitrail.checkpoints.save import convert, summarize

        done = convert(
            self.source,
            self.destination,
            self.to,
            from_format=self.source_format,
            **options_of(self, "heads", "preprocessing", "adapter", "drop_head", "half"),
            **options_of(self, "allow_loss", "dry_run", "overwrite"),
        )
        if done.notice:
            log_stderr(done.notice)
        for line in done.warnings:
            log_stderr(f"warning: {line}")
        if self.json:
            print_json(done._asdict() | {"destination": str(self.destination)})
            return
        print(f"{done.model}: {self.source} ({done.source_format}) -> {self.to}")
        print_lines(f"  {line}" for line in summarize(done.tensors))
        for kind, lines in (("changed", done.changes), ("lost", done.lost), ("note", done.notes)):
            print_lines(f"  {kind}: {line}" for line in lines)
        if done.difference is None:
            print(f"dry run: nothing written; without --dry-run this writes {self.destination}")
            return
        print(f"verified: logits on a probe image differ by {done.difference:.1e}")
        print(f"done: {self.destination}")
