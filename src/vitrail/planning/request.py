"""`PlanRequest`, a training run to be planned, and a few of its steps in a subprocess.

    python -m vitrail.planning.request < request.json

The subprocess does what `vitrail train` does (`build`, then `train_step`) on the given images or on
noise. Its memory is separate from the planner's, and if it is killed for lack of memory, the
planner continues. Nothing here imports torch before it runs, because the options of `vitrail plan`
are made from this file.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from vitrail.errors import ConfigError, VitrailError
from vitrail.training.config import (
    LossSettings,
    MachineSettings,
    ModelSettings,
    OptimizerKind,
    OptimSettings,
    Precision,
    Settings,
    Strategy,
)

if TYPE_CHECKING:
    from vitrail.training.data_module import DataSplits

SCHEDULE_STEPS = 1_000_000  # of a schedule that is never run to its end
RATE = 1e-6  # memory and time do not depend on it, and measured steps should not diverge
WARMUP = 2  # steps whose time does not count; their memory does
MIN_STEPS, MAX_STEPS = 3, 12  # whose time counts
SECONDS = 10.0  # of steps, after which there are enough
MAX_ACCUMULATED = 4  # micro-batches of a step that are measured; more take proportionally longer
NOISE_IMAGES = 64


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A training run to be planned."""

    model: str
    """A name from `vitrail models`, a bundle, or any other model reference."""
    data: str = ""
    """Plan for this dataset: its images, its classes, and the time to read it."""
    batch_size: int = 32
    """Images per step, over all devices."""
    image_size: int | None = None
    """Image size in pixels (default: the model's)."""
    classes: int | None = None
    """Number of classes (default: those of the dataset, or of the model)."""
    optimizer: OptimizerKind = "adamw"
    """Optimizer, as `--optim.kind` of `vitrail train`."""
    lora: int | None = None
    """LoRA rank, as `--lora` of `vitrail finetune`."""
    average: float = 0.0
    """Decay of an exponential moving average (EMA) of the weights; 0 disables it."""
    checkpointing: bool = False
    """Activation checkpointing: recompute activations instead of keeping them."""
    micro_batch: int | None = None
    """Images per forward pass on one device; gradients are accumulated over the batch."""
    devices: int = 1
    """Devices that share a batch."""
    strategy: Strategy = "ddp"
    """Several devices: a replica of the model on each (ddp), or a shard of it (fsdp)."""
    precision: Precision = "auto"
    """Data type of matrix products."""
    images: float | None = None
    """Images in the training set, such as 303e6."""
    epochs: float | None = None
    """Number of epochs (default: 1, if the number of images is known)."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "image_size", "classes", "micro_batch", "devices"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be 1 or more")
        for name in ("images", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}={value:g} must be a number above zero")
        share, odd = divmod(self.batch_size, self.devices)
        if odd:
            raise ConfigError(
                f"batch_size={self.batch_size} does not split over devices={self.devices}; "
                f"try batch_size={max(1, share) * self.devices}"
            )
        if self.micro_batch is not None and share % self.micro_batch:
            fitting = max(n for n in range(1, min(self.micro_batch, share) + 1) if not share % n)
            raise ConfigError(
                f"micro_batch={self.micro_batch} does not divide the {share} images of a "
                f"batch on each device; try micro_batch={fitting}"
            )
        self.settings()  # checks the average and the rank

    @property
    def images_per_device(self) -> int:
        """Images of a batch on one device."""
        return self.batch_size // self.devices

    def settings(self) -> Settings:
        """Return the settings of `vitrail train` for it; only the model is left to choose."""
        return Settings(
            steps=SCHEDULE_STEPS,
            batch_size=self.batch_size,
            average=self.average,
            lora=self.lora,
            model=ModelSettings(image_size=self.image_size),
            optim=OptimSettings(
                kind=self.optimizer,
                learning_rate=RATE,
                schedule="cosine",
                warmup_steps=0,
                weight_decay=0.05,
                clip_norm=1.0,
            ),
            loss=LossSettings(kind="softmax"),
            machine=MachineSettings(
                micro_batch=self.micro_batch,
                checkpointing=self.checkpointing,
                precision=self.precision,
                strategy=self.strategy,
            ),
        )


SMALLEST = PlanRequest(model="ViT-Mu/4", batch_size=2, classes=2)


class StepTiming(TypedDict):
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
        [sys.executable, "-m", "vitrail.planning.request"],
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
