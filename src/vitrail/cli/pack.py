"""`vitrail pack`: a data set into a few large files that are fast to read and to copy."""

import json
from dataclasses import dataclass

from vitrail.cli.arguments import DataReference, FolderToWrite
from vitrail.cli.text import tell
from vitrail.words import MIB, size

MAX_BYTES = 256 * MIB  # that of data/packing.py, which imports more than an option should


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Write a data set as .tar shards in WebDataset layout; pictures are copied as they are."""

    source: DataReference
    """What to pack: a folder of class folders, a list, .npz, builtin:sign-digits or another."""
    destination: FolderToWrite
    """The folder to write the shards into."""
    split: str | None = None
    """Pack this split only; "all" puts everything together."""
    max_bytes: int = MAX_BYTES
    """The size at which the next shard begins."""
    json: bool = False
    """Print one JSON object instead of words."""

    def run(self) -> None:
        from vitrail.data.packing import pack

        splits: dict[str, dict[str, int]] = {}
        for shard in pack(
            self.source, self.destination, split=self.split, max_bytes=self.max_bytes
        ):
            counts = splits.setdefault(shard.split, {"shards": 0, "samples": 0, "bytes": 0})
            counts["shards"] += 1
            counts["samples"] += shard.samples
            counts["bytes"] += shard.bytes
            if not self.json:
                tell(f"{shard.path}  {shard.samples:,} pictures  {size(shard.bytes)}")
        if self.json:
            print(json.dumps({"destination": str(self.destination), "splits": splits}, indent=1))
            return
        counted = ", ".join(f"{counts['samples']:,} {split}" for split, counts in splits.items())
        print(f"done: {self.destination} ({counted}); it can be given wherever a data set can")
