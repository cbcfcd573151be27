"""Settings tried for each peer, and the best ones, which the race uses.

`python benchmarks/race.py try SET` runs all of them once, with another seed than the race.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings of a peer's training; the defaults are those of timm's train.py."""

    rate: float
    batch: int = 64
    crop: tuple[float, float] = (0.08, 1.0)  # area of random crops, relative to the image
    jitter: float | None = 0.4
    policy: str | None = None
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    drop_path: float = 0.0
    pool: str = "token"  # timm's global_pool


def light(rate: float, batch: int = 64) -> Variant:
    """timm for small images: mild crops, colors as they are."""
    return Variant(rate=rate, batch=batch, crop=(0.35, 1.0), jitter=None)


DEIT = Variant(
    rate=1e-3,
    policy="rand-m9-mstd0.5-inc1",
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    drop_path=0.1,
)

# Contender → variants. timm: adamw, cosine, weight decay 0.05, label smoothing 0.1. transformers:
# the Trainer as its image-classification example has it. vit-pytorch: Adam as in its readme.
VARIANTS = {
    "timm": {
        "defaults, 1e-3": Variant(rate=1e-3),
        "light, 1e-3": light(1e-3),
        "light, 2e-3": light(2e-3),
        "light, 1e-3, batch 32": light(1e-3, 32),
        "light, 2e-3, batch 32": light(2e-3, 32),
        "light, 2e-3, mean pooling": replace(light(2e-3), pool="avg"),
        "no crops, 2e-3": Variant(rate=2e-3, crop=(1.0, 1.0), jitter=None),
        "no crops, 4e-3": Variant(rate=4e-3, crop=(1.0, 1.0), jitter=None),
        "deit, 1e-3": DEIT,
    },
    "transformers": {
        "5e-5, batch 8": Variant(rate=5e-5, batch=8),  # nothing given
        "5e-4, batch 8": Variant(rate=5e-4, batch=8),
        "1e-3, batch 8": Variant(rate=1e-3, batch=8),
        "1e-3, batch 32": Variant(rate=1e-3, batch=32),
    },
    "vit-pytorch": {
        "3e-4": Variant(rate=3e-4),
        "1e-3": Variant(rate=1e-3),
        "3e-3": Variant(rate=3e-3),
    },
}

BEST = {
    "fashion": {
        "timm": "no crops, 2e-3",
        "transformers": "5e-4, batch 8",
        "vit-pytorch": "1e-3",
    },
    "cifar": {
        "timm": "light, 1e-3, batch 32",
        "transformers": "5e-4, batch 8",
        "vit-pytorch": "1e-3",
    },
    "flowers": {
        "timm": "light, 1e-3, batch 32",
        "transformers": "5e-4, batch 8",
        "vit-pytorch": "1e-3",
    },
}
