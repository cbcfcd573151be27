"""`vitrail pack`: a dataset as .tar shards, which are fast to read and to copy."""

import json
from dataclasses import dataclass

from vitrail.cli.console import log, printable
from vitrail.cli.options import DataOptions, DataReference, FolderToWrite, Json
from vitrail.formatting import MIB, byte_size

MAX_BYTES = 256 * MIB  # as in data/tar_shards.py, which imports more than options should
MAX_NAMES = 20  # of skipped files; the others are counted


@dataclass(frozen=True, kw_only=True)
class Pack(DataOptions):
    """Write a dataset as .tar shards (WebDataset layout); image files are unchanged.

    Files that are not images are skipped and listed."""

    source: DataReference
    destination: FolderToWrite
    """Folder for the shards."""
    split: str | None = None
    """Pack only this split; "all" merges all splits."""
    max_bytes: int = MAX_BYTES
    """Size at which the next shard begins."""
    json: Json = False

    def run(self) -> None:
        from vitrail.data.tar_shards import pack

        splits: dict[str, dict[str, int]] = {}
        skipped: list[str] = []
        for shard in pack(
            self.source, self.destination, split=self.split, max_bytes=self.max_bytes
        ):
            counts = splits.setdefault(shard.split, {"shards": 0, "samples": 0, "bytes": 0})
            counts["shards"] += 1
            counts["samples"] += shard.samples
            counts["bytes"] += shard.bytes
            skipped += shard.skipped
            if not self.json:
                log(f"{shard.path}  {shard.samples:,} images  {byte_size(shard.bytes)}")
        if self.json:
            done = {"destination": str(self.destination), "splits": splits, "left_out": skipped}
            print(json.dumps(done, indent=1))
            return
        for name in skipped[:MAX_NAMES]:
            print(printable(f"skipped, not an image: {name}"))
        if len(skipped) > MAX_NAMES:
            print(f"skipped, not images: {len(skipped) - MAX_NAMES:,} more; --json lists all")
        counted = ", ".join(f"{counts['samples']:,} {split}" for split, counts in splits.items())
        print(f"done: {self.destination} ({counted}); use the folder wherever DATA is expected")
