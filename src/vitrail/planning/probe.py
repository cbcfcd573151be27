"""A few real steps in a process of their own: how long they take, and what memory they hold.

    python -m vitrail.planning.probe < wish.json

The process does what `vitrail train` does: `set_up`, then `train_step`, on your pictures or on
noise. That it is another process keeps its memory apart from the planner's, and a probe that is
killed for want of memory ends nothing else.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vitrail.errors import ConfigError, VitrailError
from vitrail.planning.wish import Wish

if TYPE_CHECKING:
    from vitrail.training.config import RunConfig
    from vitrail.training.data_module import DataSplits

WARM_UP = 2  # steps whose time does not count; their memory does
LEAST, MOST = 3, 12  # steps whose time counts
SECONDS = 10.0  # of steps, after which there are enough
PARTS = 4  # micro-batches of a step that speak for more
PICTURES = 64  # of noise
TINY = Wish(model="ViT-Mu/4", batch_size=2, classes=2)


@dataclass(frozen=True)
class Measured:
    """What a probe found."""

    step: float  # seconds, the median
    steps: list[float]  # seconds of each
    process: int  # bytes, after a step of the smallest model
    peak: int  # bytes, the most that was held


def probe(wish: Wish, channels: int, micro_batch: int) -> Measured | None:
    """Take steps; None if they were killed, which is what happens when memory ends."""
    parts = wish.batch_size // micro_batch
    taken = min(parts, PARTS)
    cut = replace(wish, batch_size=micro_batch * taken, micro_batch=micro_batch)
    done = subprocess.run(
        [sys.executable, "-m", "vitrail.planning.probe"],
        input=json.dumps(asdict(cut) | {"channels": channels}),
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        return None
    if done.returncode:
        raise ConfigError(f"the probe failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    found = Measured(**json.loads(done.stdout.splitlines()[-1]))
    return replace(found, step=found.step * parts / taken)


def measure(wish: Wish, channels: int) -> Measured:
    """In this process: first the smallest model, for what the process itself takes."""
    take_steps(TINY, 3, warm_up=1, least=1, seconds=0.0)
    process = resident("VmRSS")
    times = take_steps(wish, channels)
    return Measured(statistics.median(times), times, process, resident("VmHWM"))


def take_steps(
    wish: Wish,
    channels: int,
    warm_up: int = WARM_UP,
    least: int = LEAST,
    seconds: float = SECONDS,
) -> list[float]:
    """Seconds of real steps, reading included."""
    from vitrail import distributed
    from vitrail.training.callbacks import Callback
    from vitrail.training.loop import autocast_for, synchronize, train_step
    from vitrail.training.trainer import build

    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        device = distributed.init()
        trainer = build(order_of(wish, channels, Path(folder)), Callback(), device)
        state, autocast = trainer.state, autocast_for(trainer.precision, device)
        while len(times) < warm_up + least or (
            len(times) < warm_up + MOST and sum(times[warm_up:]) < seconds
        ):
            begun = time.monotonic()
            train_step(state, trainer.batches(state.step), trainer.prepare, autocast)
            synchronize(device)
            state.step += 1
            times.append(time.monotonic() - begun)
    return times[warm_up:]


def order_of(wish: Wish, channels: int, folder: Path) -> "RunConfig":
    """What `vitrail train` or `finetune` would be told."""
    from vitrail.checkpoints.load import is_name
    from vitrail.training.config import RunConfig

    settings = wish.settings()
    start = wish.model
    if is_name(wish.model):
        settings = replace(settings, model=replace(settings.model, name=wish.model))
        start = ""
    splits = None if wish.data else noise(wish, channels)
    return RunConfig(data=wish.data, out=folder, settings=settings, start=start, splits=splits)


def noise(wish: Wish, channels: int) -> "DataSplits":
    """Pictures that show nothing, in as many classes as are wanted."""
    import numpy as np

    from vitrail.data.arrays import ArrayStore, LazyArray
    from vitrail.data.datasets import DatasetIndex, ImageDataset, RowNames
    from vitrail.training.data_module import DataSplits

    side, classes = wish.image_size or 32, wish.classes or 2
    shape = (PICTURES, side, side, channels)

    def make() -> np.ndarray:
        return np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    rows = RowNames([("noise", PICTURES)])
    collection = DatasetIndex(
        names=rows,
        labels=np.arange(PICTURES, dtype=np.int32) % classes,
        classes=tuple(map(str, range(classes))),
        store=ArrayStore([LazyArray(shape, np.dtype(np.uint8), make)], rows),
    )
    return DataSplits(reference="noise", train=ImageDataset(collection), held_out={})


def resident(field: str) -> int:
    """Bytes that this process holds (VmRSS) or has held (VmHWM); 0 where that is not told."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    facts = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(facts[field].split()[0]) * 1024 if field in facts else 0


def main() -> int:
    from vitrail.training.memory import configure_malloc

    configure_malloc()  # as `vitrail train` does
    values = json.load(sys.stdin)
    channels = values.pop("channels")
    try:
        print(json.dumps(asdict(measure(Wish(**values), channels))))
    except VitrailError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
