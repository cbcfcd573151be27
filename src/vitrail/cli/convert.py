"""`vitrail convert`: a checkpoint into another format, with the same logits."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from vitrail.cli.console import log_stderr
from vitrail.cli.options import FileToWrite, Json, ModelReference, Preset


@dataclass(frozen=True, kw_only=True)
class Convert:
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
    allow_loss: bool = False
    """Drop numerics that the format cannot express. Weights are never dropped."""
    dry_run: bool = False
    """Print what would be done, and write nothing."""
    json: Json = False

    def run(self) -> None:
        from vitrail.checkpoints.save import convert, summarize

        done = convert(
            self.source,
            self.destination,
            self.to,
            from_format=self.source_format,
            heads=self.heads,
            preprocessing=self.preprocessing,
            allow_loss=self.allow_loss,
            dry_run=self.dry_run,
        )
        if done.notice:
            log_stderr(done.notice)
        if self.json:
            print(json.dumps(asdict(done) | {"destination": str(self.destination)}, indent=1))
            return
        print(f"{done.model}: {self.source} ({done.source_format}) -> {self.to}")
        for line in summarize(done.tensors):
            print(f"  {line}")
        for kind, lines in (("changed", done.changes), ("lost", done.lost), ("note", done.notes)):
            for line in lines:
                print(f"  {kind}: {line}")
        if done.difference is None:
            print(f"dry run: nothing written; without --dry-run this writes {self.destination}")
            return
        print(f"verified: logits on a probe image differ by {done.difference:.1e}")
        print(f"done: {self.destination}")
