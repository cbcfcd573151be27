"""Stream a million samples out of shards, in random order, and print what memory it took.

    python tests/data/stream_million.py [SAMPLES] [FOLDER]

Makes about 2 GiB of tiny shards in FOLDER (a temporary one if none is given), in a process of its
own so that making them does not count.
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from vitrail.data.datasets import Sample, open_dataset
from vitrail.data.provenance import fingerprint
from vitrail.data.tar_shards import write_shards

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Tiny:
    """A PNG's signature and 8 bytes: enough to see whether the right one comes back."""

    classes = tuple(f"class {number}" for number in range(100))
    multi_label = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> Sample:
        return Sample(SIGNATURE + index.to_bytes(8, "little"), index % 100, self.name(index))

    def name(self, index: int, /) -> str:
        return f"{index:09}.png"

    def labels(self) -> np.ndarray:
        return np.arange(self.length) % 100


def make(folder: Path, samples: int) -> None:
    list(write_shards(Tiny(samples), folder, "train", 32 * 2**20))


def stream(folder: Path, samples: int) -> tuple[float, float]:
    """Read every sample once, in random order; MiB at the peak after a tenth and at the end."""
    start = time.perf_counter()
    source = open_dataset(folder)
    assert len(source) == samples
    print(f"opened in {time.perf_counter() - start:.1f} s, {peak():.0f} MiB")
    start = time.perf_counter()
    early = 0.0
    for step, index in enumerate(np.random.default_rng(0).permutation(samples).tolist()):
        data, label, _ = source[index]
        assert data == SIGNATURE + index.to_bytes(8, "little")
        assert label == index % 100
        if step == samples // 10:
            early = peak()
            print(f"after 10 %: {early:.1f} MiB")
    rate = samples / (time.perf_counter() - start)
    print(f"at the end: {peak():.1f} MiB; {rate:,.0f} samples per second")
    return early, peak()


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(samples: int = 1_000_000, folder: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(folder or temporary)
        if not any(place.glob("train-*.tar")):
            start = time.perf_counter()
            child = multiprocessing.get_context("spawn").Process(target=make, args=(place, samples))
            child.start()
            child.join()
            size = sum(path.stat().st_size for path in place.glob("*.tar")) / 2**30
            print(f"{samples:,} samples, {size:.2f} GiB, in {time.perf_counter() - start:.1f} s")
        print(f"before opening: {peak():.0f} MiB")
        stream(place, samples)
        start = time.perf_counter()
        print(f"fingerprint {fingerprint(open_dataset(place))}", end=" ")
        print(f"in {time.perf_counter() - start:.1f} s with opening again, from the kept index")


if __name__ == "__main__":
    main(*(int(text) for text in sys.argv[1:2]), *sys.argv[2:3])
