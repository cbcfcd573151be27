"""What a dataset costs before its first image: opening it, holding its index, an epoch's start.

python benchmarks/growth_data.py FILE.tar      one measurement: three numbers as JSON
"""

import io
import json
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from curves import Curve
from fewshot import PEAK, held

IMAGE_COUNTS, ROUNDS = (8_000, 16_000, 32_000, 64_000, 128_000), 3
STARTS, BATCH = 9, 8
CLASSES = 10


def data_curves(counts: Sequence[int] = IMAGE_COUNTS) -> tuple[Curve, Curve, Curve]:
    """Opening (ms), memory (MiB) and the first batch of an epoch (ms), over numbers of images."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_tars(folder, counts)
        write_tars(folder / "tiny", [CLASSES])
        rounds = [[opened(path) for path in paths] for _ in range(ROUNDS)]
    opening, held_for, first = (
        [[values[n] for values in once] for once in rounds] for n in range(3)
    )
    return (
        Curve("opening", counts, opening, "ms"),
        Curve("memory", counts, held_for, "MiB"),
        Curve("first batch", counts, first, "ms"),
    )


def write_tars(folder: Path, counts: Sequence[int]) -> list[Path]:
    """Tars of so many tiny images in class folders, each the beginning of the largest."""
    buffer = io.BytesIO()
    Image.new("L", (8, 8)).save(buffer, "PNG")
    data = buffer.getvalue()
    padding = bytes(-len(data) % tarfile.BLOCKSIZE)
    folder.mkdir(exist_ok=True)
    members, paths = [], []
    for number in range(max(counts)):
        header = tarfile.TarInfo(f"train/class{number % CLASSES}/{number:07d}.png")
        header.size = len(data)
        members.append(header.tobuf(tarfile.USTAR_FORMAT) + data + padding)
    for count in counts:
        paths.append(folder / f"{count}.tar")
        paths[-1].write_bytes(b"".join(members[:count]) + bytes(2 * tarfile.BLOCKSIZE))
    return paths


def opened(path: Path) -> list[float]:
    """Measure one tar without a cached index."""
    path.with_name(f".{path.name}.index.npz").unlink(missing_ok=True)
    words = [sys.executable, __file__, str(path)]
    return json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout)


def numbers(path: Path) -> list[float]:
    """Milliseconds to open, MiB that this takes, milliseconds to the first batch of an epoch."""
    from vitrail.data.datasets import open_dataset
    from vitrail.data.loader import Loader, TrainSampler
    from vitrail.data.preprocessing import Augmentation, preset
    from vitrail.data.transforms import TrainTransform

    preprocessing = preset("timm", (8, 8))
    transform = TrainTransform(preprocessing=preprocessing, augmentation=Augmentation())

    def first_batch(source, seed: int) -> float:
        start = time.perf_counter()
        order = TrainSampler(samples=len(source), batch_size=BATCH, seed=seed)
        batches = iter(Loader(source, transform, order, workers=0))
        next(batches)
        taken = time.perf_counter() - start
        batches.close()
        return 1e3 * taken

    first_batch(open_dataset(path.parent / "tiny" / f"{CLASSES}.tar"), 0)  # libraries are loaded
    PEAK.write_text("5")
    before, start = held("VmRSS"), time.perf_counter()
    source = open_dataset(path)
    taken = 1e3 * (time.perf_counter() - start)
    grown = held("VmHWM") - before
    starts = [first_batch(source, seed) for seed in range(STARTS)]
    return [taken, grown, statistics.median(starts)]


if __name__ == "__main__":
    print(json.dumps(numbers(Path(sys.argv[1]))))
