"""`vitrail convert`: anybody's checkpoint into anybody else's format."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import tyro

from vitrail.cli.arguments import FileToWrite, ModelReference, Preset
from vitrail.cli.text import aside


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Turn a checkpoint into another format, and prove that it is the same model."""

    source: ModelReference
    """A file, a folder, or a hub address such as hf:google/vit-base-patch16-224."""
    destination: FileToWrite
    """What to write: a file or a folder, whichever the format is."""
    to: Literal[
        "bundle", "google", "google-older", "timm", "huggingface", "torchvision", "bit_pytorch"
    ]
    """The format to write."""
    source_format: Annotated[
        Literal["bundle", "google", "timm", "huggingface", "torchvision", "bit_pytorch"] | None,
        tyro.conf.arg(name="from"),
    ] = None
    """The format of the source, where it is not recognized."""
    heads: int | None = None
    """How many attention heads the model has, where the source does not say."""
    preprocessing: Preset = None
    allow_loss: bool = False
    """Give up numerics the format cannot express; weights are never given up."""
    dry_run: bool = False
    """Say what would be done, and write nothing."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.checkpoints.convert import convert, summarize

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
            aside(done.notice)
        if self.json:
            print(json.dumps(asdict(done) | {"destination": str(self.destination)}, indent=1))
            return
        print(f"{done.model}: {self.source} ({done.source_format}) -> {self.to}")
        for line in summarize(done.tensors):
            print(f"  {line}")
        for line in done.changes:
            print(f"  changed: {line}")
        for line in done.lost:
            print(f"  lost: {line}")
        for line in done.notes:
            print(f"  note: {line}")
        if done.difference is None:
            print(f"nothing written; without --dry-run this makes {self.destination}")
            return
        print(f"loaded again, logits on a probe image differ by {done.difference:.1e}")
        print(f"done: {self.destination}")
