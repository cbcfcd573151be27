"""A whole training step: vitrail's loop against that of timm's train.py, and its overhead.

Both normalize the same image bytes and use AdamW, gradient clipping and EMA.
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F

from peers import Shape, make_torchvision_importable, timm, vitrail
from timing import claim, interleave, spread

ROUNDS = 7
BATCH = 16
SHAPE = Shape(224, 16, 384, 12, 6, 1536, 1000)
DECAY, CLIP = 0.9999, 1.0


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    make_torchvision_importable()
    whole, bare = vitrail_steps()
    calls = {"vitrail": whole, "timm": timm_step(), "bare": bare}
    seconds = interleave(calls, rounds=ROUNDS)
    ours = seconds["vitrail"]
    ratio = statistics.median(t / own for t, own in zip(seconds["timm"], ours, strict=True))
    over = statistics.median(1 - b / own for b, own in zip(seconds["bare"], ours, strict=True))
    return "\n".join(
        [
            "## The training loop",
            "",
            claim(
                "A whole training step, ViT-S/16", f"timm takes {ratio:.2f} times vitrail's time"
            ),
            "",
            f"One step of ViT-S/16 at 224 pixels, batch {BATCH}: bytes to floats, forward,",
            "backward, clipping, AdamW and EMA, in the training loop of each library.",
            f"Interleaved, {ROUNDS} rounds. *Ratio* is the median over rounds of timm's time",
            "divided by vitrail's.",
            "",
            "| loop | best, ms | median, ms | ratio |",
            "|---|---|---|---|",
            f"| vitrail, `loop.train_step` | {spread(ours)} | 1.00 |",
            f"| timm, as in its train.py | {spread(seconds['timm'])} | {ratio:.2f} |",
            f"| vitrail, forward and backward alone | {spread(seconds['bare'])} | |",
            "",
            f"Normalization, clipping, optimizer, EMA and the loop take {over:.1%} of a step.",
            "",
        ]
    )


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randint(0, 256, (BATCH, 3, 224, 224), dtype=torch.uint8)
    return images, torch.randint(1000, (BATCH,))


def vitrail_steps() -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of our loop, and its forward and backward pass alone."""
    from itertools import repeat

    from vitrail.data.loader import Batch
    from vitrail.data.preprocessing import Mixing, Preprocessing
    from vitrail.training.auto_config import MAX_SHARDS
    from vitrail.training.config import LossSettings, OptimSettings, Settings
    from vitrail.training.cpu_parallel import CpuDataParallel
    from vitrail.training.data_module import batch_preparation
    from vitrail.training.loop import make_state, train_step
    from vitrail.training.objectives import make_objective
    from vitrail.training.schedules import Schedule

    optim = OptimSettings(kind="adamw", learning_rate=1e-4, weight_decay=0.05, clip_norm=CLIP)
    settings = Settings(
        batch_size=BATCH, average=DECAY, optim=optim, loss=LossSettings(kind="softmax")
    )
    model = vitrail(SHAPE)
    objective = make_objective(model, settings)  # pyright: ignore[reportArgumentType]
    named = dict(model.named_parameters())
    shards = min(MAX_SHARDS, torch.get_num_threads())
    state = make_state(
        objective,
        CpuDataParallel(objective, shards),  # pyright: ignore[reportArgumentType]
        Schedule(settings=settings, length=1000, stages=((0.0, 224),)),
    )
    prepare = batch_preparation(
        Preprocessing(size=(224, 224)), Mixing(), 1000, torch.device("cpu"), steps_per_epoch=1
    )
    images, labels = random_batch()
    batches = repeat(Batch(images, labels, torch.arange(BATCH)))
    ready = torch.randn(BATCH, 3, 224, 224)

    def bare() -> None:
        state.wrapped(ready, labels).backward()
        for parameter in named.values():
            parameter.grad = None

    return lambda: train_step(state, batches, prepare), bare


def timm_step() -> Callable[[], object]:
    """The body of train_one_epoch in timm's train.py, with its own optimizer, clipping and EMA."""
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    model = timm(SHAPE).train()
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-4, weight_decay=0.05)
    average = ModelEmaV3(model, decay=DECAY, foreach=True)
    images, labels = random_batch()
    mean = torch.full((1, 3, 1, 1), 127.5)

    def step() -> None:
        inputs = images.float().sub_(mean).div_(mean)  # as timm's PrefetchLoader does
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), CLIP, mode="norm")
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)

    return step
