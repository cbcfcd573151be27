"""`vitrail pack`: a data set into a few large files that are fast to read and to copy."""

import json
from dataclasses import dataclass

from vitrail.cli.arguments import DataOptions, DataReference, FolderToWrite
from vitrail.cli.text import printable, tell
from vitrail.formatting import MIB, byte_size

MAX_BYTES = 256 * MIB  # that of data/tar_shards.py, which imports more than an option should
MOST_NAMED = 20  # files that were left out; the others are counted


@dataclass(frozen=True, kw_only=True)
class Pack(DataOptions):
    """Write a data set as .tar shards in WebDataset layout; pictures are copied as they are.

    Files that are no images are left out and named."""

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
        from vitrail.data.tar_shards import pack

        splits: dict[str, dict[str, int]] = {}
        left_out: list[str] = []
        for shard in pack(
            self.source, self.destination, split=self.split, max_bytes=self.max_bytes
        ):
            counts = splits.setdefault(shard.split, {"shards": 0, "samples": 0, "bytes": 0})
            counts["shards"] += 1
            counts["samples"] += shard.samples
            counts["bytes"] += shard.bytes
            left_out += shard.skipped
            if not self.json:
                tell(f"{shard.path}  {shard.samples:,} pictures  {byte_size(shard.bytes)}")
        if self.json:
            done = {"destination": str(self.destination), "splits": splits, "left_out": left_out}
            print(json.dumps(done, indent=1))
            return
        for name in left_out[:MOST_NAMED]:
            print(printable(f"left out, not an image: {name}"))
        if len(left_out) > MOST_NAMED:
            print(f"left out, not images: {len(left_out) - MOST_NAMED:,} more; --json lists all")
        counted = ", ".join(f"{counts['samples']:,} {split}" for split, counts in splits.items())
        print(f"done: {self.destination} ({counted}); it can be given wherever a data set can")
