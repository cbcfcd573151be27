"""Time a few real training steps in a subprocess, and measure the memory they hold.

    python -m vitrail.planning.timing < request.json

The process does what `vitrail train` does (`build`, then `train_step`) on the given images or on
noise. Its memory is separate from the planner's, and if it is killed for lack of memory, the
planner goes on.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from vitrail.errors import ConfigError, VitrailError
from vitrail.planning.request import PlanRequest

if TYPE_CHECKING:
    from vitrail.training.data_module import DataSplits

WARMUP = 2  # steps whose time does not count; their memory does
MIN_STEPS, MAX_STEPS = 3, 12  # whose time counts
SECONDS = 10.0  # of steps, after which there are enough
MAX_ACCUMULATED = 4  # micro-batches of a step that are measured; more take proportionally longer
NOISE_IMAGES = 64
SMALLEST = PlanRequest(model="ViT-Mu/4", batch_size=2, classes=2)


class StepTiming(TypedDict):
    """Measurements of a few steps."""

    step: float  # seconds, the median
    steps: list[float]  # seconds of each
    process: int  # bytes, after a step of the smallest model
    peak: int  # bytes, the most that was held


def time_steps(request: PlanRequest, channels: int, micro_batch: int) -> StepTiming | None:
    """Take steps in a subprocess; None if it was killed, as happens when memory runs out."""
    accumulated = request.batch_size // micro_batch
    measured = min(accumulated, MAX_ACCUMULATED)
    request = replace(request, batch_size=micro_batch * measured, micro_batch=micro_batch)
    done = subprocess.run(
        [sys.executable, "-m", "vitrail.planning.timing"],
        input=json.dumps(asdict(request) | {"channels": channels}),
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        return None
    if done.returncode:
        reason = (done.stderr.strip() or "?").splitlines()[-1]
        raise ConfigError(f"training steps could not be timed: {reason}")
    timing: StepTiming = json.loads(done.stdout.splitlines()[-1])
    timing["step"] *= accumulated / measured
    return timing


def take_steps(
    request: PlanRequest,
    channels: int,
    warmup: int = WARMUP,
    min_steps: int = MIN_STEPS,
    seconds: float = SECONDS,
) -> list[float]:
    """Take real steps in this process; return the seconds of each, data loading included."""
    from vitrail import distributed
    from vitrail.checkpoints.load import is_name
    from vitrail.training.callbacks import Callback
    from vitrail.training.config import RunConfig
    from vitrail.training.loop import autocast_for, synchronize, train_step
    from vitrail.training.trainer import Trainer

    settings, start = request.settings(), request.model
    if is_name(request.model):
        settings = replace(settings, model=replace(settings.model, name=request.model))
        start = ""
    splits = None if request.data else noise(request, channels)
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        device = distributed.init()
        config = RunConfig(
            data=request.data, out=Path(folder), settings=settings, start=start, splits=splits
        )
        trainer = Trainer(config, Callback(), device)
        state, autocast = trainer.state, autocast_for(trainer.precision, device)
        while len(times) < warmup + min_steps or (
            len(times) < warmup + MAX_STEPS and sum(times[warmup:]) < seconds
        ):
            started = time.monotonic()
            train_step(state, trainer.batches(state.step), trainer.prepare, autocast)
            synchronize(device)
            state.step += 1
            times.append(time.monotonic() - started)
    return times[warmup:]


def noise(request: PlanRequest, channels: int) -> "DataSplits":
    """Return a training set of random pixels with the requested classes."""
    import numpy as np

    from vitrail.data.arrays import ArrayStore, row_names
    from vitrail.data.datasets import DatasetIndex, ImageDataset
    from vitrail.training.data_module import DataSplits

    side, classes = request.image_size or 32, request.classes or 2
    shape = (NOISE_IMAGES, side, side, channels)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    index = DatasetIndex(
        names=row_names([("noise", NOISE_IMAGES)]),
        labels=np.arange(NOISE_IMAGES, dtype=np.int32) % classes,
        classes=tuple(map(str, range(classes))),
        store=ArrayStore([images], [NOISE_IMAGES]),
    )
    return DataSplits(reference="noise", train=ImageDataset(index), held_out={})


def resident_bytes(field: str) -> int:
    """Return what this process holds (VmRSS) or has held at most (VmHWM); 0 where unknown."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii")
    except OSError:
        return 0
    status = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(status[field].split()[0]) * 1024 if field in status else 0


def main() -> int:
    from vitrail.training.memory import configure_malloc

    configure_malloc()  # as `vitrail train` does
    values = json.load(sys.stdin)
    channels = values.pop("channels")
    try:
        take_steps(SMALLEST, 3, warmup=1, min_steps=1, seconds=0.0)
        process = resident_bytes("VmRSS")
        times = take_steps(PlanRequest(**values), channels)
    except VitrailError as error:
        print(error, file=sys.stderr)
        return 2
    timing = StepTiming(
        step=statistics.median(times), steps=times, process=process, peak=resident_bytes("VmHWM")
    )
    print(json.dumps(timing))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
