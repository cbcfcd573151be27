"""`PlanRequest`: a model, how it would be trained, and on what.

This file does not import torch, because the options of `vitrail plan` are made from it.
"""

from dataclasses import dataclass

from vitrail.errors import ConfigError
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

STEPS = 1_000_000  # of a schedule that is never run to its end
RATE = 1e-6  # memory and time do not depend on it, and measured steps should not diverge


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
    """As --optim.kind of `vitrail train`."""
    average: float = 0.0
    """Decay of an exponential moving average (EMA) of the weights; 0: no EMA."""
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
    """Passes over the images (default: 1, if the number of images is known)."""

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
        self.settings()  # checks the average

    @property
    def images_per_device(self) -> int:
        """Images of a batch on one device."""
        return self.batch_size // self.devices

    def settings(self) -> Settings:
        """Return the settings of `vitrail train` for it; only the model is left to choose."""
        return Settings(
            steps=STEPS,
            batch_size=self.batch_size,
            average=self.average,
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
