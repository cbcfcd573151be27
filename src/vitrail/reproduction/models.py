"""The small models and the recipe that the experiments share, so that they share runs too.

Pictures have 32 pixels along each side. The base is a ViT of 4 blocks and width 64 that sees 16
patches of 8 x 8 pixels. All learn as the paper's models do: Adam with decoupled weight decay and a
linear schedule, without any variation of the pictures but flips, one recipe for all families.
"""

from dataclasses import replace
from typing import Any

from vitrail.models.config import Config
from vitrail.models.registry import configuration
from vitrail.reproduction.cells import Cell
from vitrail.reproduction.experiments import Sets
from vitrail.training.config import (
    AugmentSettings,
    MachineSettings,
    MixSettings,
    ModelSettings,
    OptimSettings,
    Settings,
)

SIZE = 32
BATCH = 128
STEPS = 300
JUDGED = 2500  # test pictures
RATE = 3e-3
LONG = 600  # steps of the models that are looked into
FINE_PICTURES = 50  # of the set that a model is carried over to
FINE_STEPS, FINE_BATCH, FINE_RATE = 100, 32, 1e-3
SAVE_MINUTES = 0.25
ADAM = OptimSettings(
    kind="adamw",
    learning_rate=RATE,
    schedule="linear",
    warmup=0.1,
    weight_decay=0.1,
    clip_norm=1.0,
)

BASE: dict[str, Any] = {
    "name": "ViT-Femto/4",
    "image_size": SIZE,
    "patch_size": 8,
    "stem": "patches",
    "pool": "cls",
}
VITS: dict[str, dict[str, Any]] = {
    "S": {"depth": 2, "width": 48, "mlp_width": 192, "heads": 2},
    "M": {"depth": 4, "width": 64, "mlp_width": 256, "heads": 4},
    "L": {"depth": 4, "width": 128, "mlp_width": 512, "heads": 4},
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "S": {"depth": 1, "width": 48, "mlp_width": 192, "heads": 2},
    "M": {"depth": 4, "width": 64, "mlp_width": 256, "heads": 4},
}
BITS = {"S": (1,), "M": (1, 1)}  # the next one would cost twice what the others do
MIXERS: dict[str, dict[str, Any]] = {
    "S": {"depth": 2, "width": 48, "tokens_mlp": 24, "channels_mlp": 192},
    "M": {"depth": 4, "width": 64, "tokens_mlp": 32, "channels_mlp": 256},
    "L": {"depth": 4, "width": 128, "tokens_mlp": 64, "channels_mlp": 512},
}


def vit(size: str = "M", /, **changes: Any) -> ModelSettings:
    return ModelSettings(**(BASE | VITS[size] | changes))


def hybrid(size: str = "M", /, **changes: Any) -> ModelSettings:
    """A root convolution and one ResNet unit, whose map of 8 x 8 is cut into 2 x 2."""
    under: dict[str, Any] = {"stem": "resnet", "resnet_blocks": (1,), "patch_size": 2}
    return ModelSettings(**(BASE | HYBRIDS[size] | under | changes))


def bit(size: str = "M") -> ModelSettings:
    return ModelSettings(name="BiT-R50x1", image_size=SIZE, blocks=BITS[size])


def mixer(size: str = "M") -> ModelSettings:
    named: dict[str, Any] = {"name": "Mixer-S/16", "image_size": SIZE, "patch_size": 8}
    return ModelSettings(**(named | MIXERS[size]))


FAMILIES = {
    "ViT": (vit, VITS),
    "hybrid": (hybrid, HYBRIDS),
    "BiT": (bit, BITS),
    "Mixer": (mixer, MIXERS),
}


def pretraining(
    sets: Sets,
    model: ModelSettings,
    seed: int,
    *,
    steps: int = STEPS,
    rate: float = RATE,
    pictures: int | None = None,
    objective: str = "classify",
) -> Cell:
    """A model that learns from scratch, from all pictures or some."""
    settings = usual(
        seed,
        steps=steps,
        batch_size=BATCH,
        objective=objective,
        model=model,
        optim=replace(ADAM, learning_rate=rate),
    )
    return Cell(data=sets.pretrain, settings=settings, pictures=pictures, judged=JUDGED)


def before_transfer(sets: Sets, model: ModelSettings, seed: int, **how: Any) -> Cell:
    """A model that is carried over: to another set, or to the other half of the classes."""
    cell = pretraining(sets, model, seed, **how)
    return cell if sets.target else replace(cell, half="even")


def on_target(sets: Sets, start: Cell | None, model: ModelSettings, seed: int) -> Cell:
    """A few pictures of the target, learned from a pre-trained model or from nothing.

    As in the paper's fine-tuning, a cosine without weight decay; yet with Adam, because a hundred
    steps of SGD leave so small a model where it began.
    """
    settings = usual(
        seed,
        steps=FINE_STEPS,
        batch_size=FINE_BATCH,
        model=model,
        optim=replace(ADAM, learning_rate=FINE_RATE, schedule="cosine", weight_decay=0.0),
    )
    return Cell(
        data=sets.target or sets.pretrain,
        settings=settings,
        pictures=FINE_PICTURES,
        judged=JUDGED,
        half="" if sets.target else "odd",
        start=start,
    )


def usual(seed: int, **more: Any) -> Settings:
    """What is the same in all runs."""
    common: dict[str, Any] = {
        "seed": seed,
        "evaluate_every": 1e6,  # in the end only
        "save_minutes": SAVE_MINUTES,
        "augment": AugmentSettings(crop="whole", flip=True),
        "mix": MixSettings(mixup=0.0, cutmix=0.0),
        "machine": MachineSettings(workers=0),
    }
    return Settings(**(common | more))


def config_of(cell: Cell) -> Config:
    """The model of a cell before its data is looked at: all but the head and the colors."""
    model = cell.settings.model
    if cell.start is not None:
        return config_of(cell.start).change(**model.changes())
    assert model.name is not None
    return configuration(model.name).change(**model.changes())


def looked_at(sets: Sets) -> dict[str, Cell]:
    """The models that are looked into: 64 patches each, and longer runs than the others."""
    fine: dict[str, Any] = {"patch_size": 4}
    return {
        "ViT, patch 4": pretraining(sets, vit(**fine), 0, steps=LONG),
        "ViT, patch 4, short": pretraining(sets, vit(**fine), 0),
        "ViT, patch 4, low rate": pretraining(sets, vit(**fine), 0, rate=RATE / 3),
        "hybrid": pretraining(sets, hybrid(patch_size=1), 0, steps=LONG),
    }
