"""What is to be planned: a model, how it is trained, and on what. Impossible wishes are refused.

This file does not import torch, so that the command's options can be made of it.
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

STEPS = 1_000_000  # of the schedule that a plan pretends; nobody takes them
RATE = 1e-6  # memory and time do not depend on it, and a probe should not explode


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A training run that has not begun."""

    model: str
    """A name from `vitrail models`, a bundle, or any other model reference."""
    data: str = ""
    """Plan for these pictures: their number, their classes, and the time to read them."""
    batch_size: int = 32
    """Pictures per step, over all devices."""
    image_size: int | None = None
    """Pixels along each side; the model's own if not given."""
    classes: int | None = None
    """Classes to tell apart; those of the data or of the model if not given."""
    optimizer: OptimizerKind = "adamw"
    """As --optim.kind of `vitrail train`."""
    average: float = 0.0
    """Decay of a running average of the weights; 0 for none."""
    checkpointing: bool = False
    """Compute activations twice instead of keeping them."""
    micro_batch: int | None = None
    """Pictures at once on one device; the rest of a batch is accumulated."""
    devices: int = 1
    """Devices that share a batch."""
    strategy: Strategy = "ddp"
    """Several devices: a copy of the model for each, or each a part of it."""
    precision: Precision = "auto"
    """Of the matrix products."""
    images: float | None = None
    """Pictures of a pre-training, such as 303e6."""
    epochs: float | None = None
    """Times that each is seen; 1 if only images are given."""

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
                f"micro_batch={self.micro_batch} does not divide the {share} pictures that a "
                f"device has of a batch; try micro_batch={fitting}"
            )
        self.settings()  # refuses an average that is none

    @property
    def share(self) -> int:
        """Pictures of a batch on one device."""
        return self.batch_size // self.devices

    def settings(self) -> Settings:
        """The settings of `vitrail train` for it, with nothing left to be chosen but the model."""
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
