"""The peers in the race, each trained as its own scripts and readme do it.

They get decoded training images, test tensors, and schedules that end with the time. transformers
is in `race_trainer.py`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

import race_models as models
from race_clock import AccuracyClock
from race_sets import SMALL, DecodedImages, prepared, read, test_split_of
from race_variants import Variant
from vitrail.models.config import VitConfig

Result = dict[str, Any]

WORKERS = 0  # data loading processes; they only slow down two compute threads
SMOOTHING = 0.1  # of labels, timm's default
DECAY = 0.05  # of weights, usual for AdamW in timm
WARMUP, TICKS = 0.05, 10_000  # share of a cosine schedule; into how many parts time is cut for it


@dataclass(frozen=True, kw_only=True)
class Task:
    """Dataset, model, settings and time of a peer's run."""

    data: str
    config: VitConfig
    variant: Variant
    seconds: float
    seed: int

    @property
    def normal(self) -> dict[str, tuple[float, ...]]:
        half = (0.5,) * self.config.channels
        return {"mean": half, "std": half}

    @property
    def size(self) -> int:
        return self.config.stride[0] * self.config.grid[0]

    def test_tensors(self, crop: float) -> tuple[Tensor, Tensor]:
        """Test images and labels; large images are cropped to `crop` of the short side."""
        from torchvision import transforms as t

        split = read(self.data, test_split_of(self.data))
        crop = crop if min(split.images[0].size) > SMALL else 1.0
        steps = [t.Resize(round(self.size / crop)), t.CenterCrop(self.size), t.ToTensor()]
        transform = t.Compose([*steps, t.Normalize(**self.normal)])
        return prepared(split, transform), split.labels


class Endless(Sampler[int]):
    """Endless random permutations of all images, so that workers are never restarted."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.generator = length, torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(self.length, generator=self.generator).tolist()

    def __len__(self) -> int:
        return 2**40


class Varied(Dataset[tuple[Tensor, int]]):
    """Images in memory, augmented anew at each access."""

    def __init__(self, split: DecodedImages, transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.transform = split.images, transform
        self.labels = split.labels.tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self.images[index]), self.labels[index]


def run_timm(task: Task) -> Result:
    """timm's model, optimizer, schedule, transforms and mixing, as its train.py puts them."""
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    how = task.variant
    model = models.timm_model(task.config, drop_path=how.drop_path, pool=how.pool)
    size = models.size_of(model, task.config)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=how.rate, weight_decay=DECAY)
    schedule = CosineLRScheduler(
        optimizer,
        t_initial=TICKS,
        warmup_t=round(WARMUP * TICKS),
        warmup_lr_init=1e-5,
        t_in_epochs=False,
    )
    mix, loss_of = timm_loss(task)
    batches, floats = timm_batches(task), timm_floats(task)
    clock = AccuracyClock(*task.test_tensors(crop=0.875), task.seconds)  # timm's default
    clock.start()
    for pixels, labels in batches:
        images = floats(pixels)
        images, labels = mix(images, labels) if mix else (images, labels)
        loss_of(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step_update(round(TICKS * clock.progress()))
        if not clock.keep_training(logits_of(model)):
            break
    return size | clock.result()


def timm_loss(task: Task) -> tuple[Callable[..., tuple[Tensor, Tensor]] | None, nn.Module]:
    """Return timm's Mixup or CutMix, if enabled, and the loss."""
    from timm.data import Mixup
    from timm.loss import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

    how, classes = task.variant, task.config.num_classes
    if not how.mixup and not how.cutmix:
        return None, LabelSmoothingCrossEntropy(SMOOTHING)
    mix = Mixup(how.mixup, how.cutmix, label_smoothing=SMOOTHING, num_classes=classes)
    return mix, SoftTargetCrossEntropy()


def timm_floats(task: Task) -> Callable[[Tensor], Tensor]:
    """Bytes → floats as timm's PrefetchLoader makes them, on the whole batch."""
    from timm.data.random_erasing import RandomErasing

    half = torch.full((1, task.config.channels, 1, 1), 127.5)  # mean and std, of 255
    how = task.variant
    erase = RandomErasing(how.erasing, mode="pixel", device="cpu") if how.erasing else None

    def floats(pixels: Tensor) -> Tensor:
        images = pixels.float().sub_(half).div_(half)
        return erase(images) if erase else images

    return floats


def timm_batches(task: Task) -> DataLoader[tuple[Tensor, Tensor]]:
    """Yield endless batches of bytes, augmented by timm's transforms."""
    from timm.data import create_transform
    from timm.data.loader import fast_collate

    allow_few_bits()
    how = task.variant
    transform = create_transform(
        (task.config.channels, task.size, task.size),
        is_training=True,
        scale=how.crop,
        color_jitter=how.jitter,
        auto_augment=how.policy,
        interpolation="random",
        use_prefetcher=True,
        **task.normal,
    )
    split = read(task.data, "train")
    order = Endless(len(split.labels), task.seed)
    return DataLoader(
        Varied(split, transform),
        how.batch,
        sampler=order,
        num_workers=WORKERS,
        collate_fn=fast_collate,
    )


def allow_few_bits() -> None:
    """Patch timm's RandAugment, which sometimes asks for 0 bits: Pillow 13 rejects that."""
    from timm.data import auto_augment

    original = auto_augment.posterize
    auto_augment.NAME_TO_OP["PosterizeIncreasing"] = lambda image, bits, **more: original(
        image, max(1, bits), **more
    )


def run_vit_pytorch(task: Task) -> Result:
    """Adam and cross-entropy as in the readme; photographs are mirrored half of the time."""
    from torchvision import transforms as t

    split = read(task.data, "train")
    steps = [t.Resize(task.size), t.CenterCrop(task.size), t.ToTensor(), t.Normalize(**task.normal)]
    images = prepared(split, t.Compose(steps))
    model = models.vit_pytorch_model(task.config)
    size = models.size_of(model, task.config)
    optimizer = torch.optim.Adam(model.parameters(), lr=task.variant.rate)
    order = iter(Endless(len(images), task.seed))
    clock = AccuracyClock(*task.test_tensors(crop=1.0), task.seconds)
    clock.start()
    while True:
        rows = [next(order) for _ in range(task.variant.batch)]
        batch = images[rows]
        if task.config.channels == 3:
            mirrored = torch.rand(len(batch)) < 0.5
            batch[mirrored] = batch[mirrored].flip(-1)
        F.cross_entropy(model(batch), split.labels[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not clock.keep_training(logits_of(model)):
            return size | clock.result()


def logits_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a function from images to logits, in eval mode."""

    def predict(images: Tensor) -> Tensor:
        model.eval()
        logits = model(images)
        model.train()
        return getattr(logits, "logits", logits)

    return predict
