"""Every block of memory that a training step takes and gives back, found without computing.

The real step of `vitrail.training` (forward, backward, clipping, optimizer, average) runs on
tensors that have shapes and no memory, and a ledger beneath it writes down when each block of
memory appears and when it is gone. So checkpointing, accumulation, precision, every optimizer and
every family of models are counted as they are, and nothing is known here of any of them.

Two micro-batches of different size give two traces with the same events; a block's size is a
line through both, and so the trace of any micro-batch is known.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing, Preprocessing
from vitrail.data.transforms import normalize
from vitrail.models.config import Config, pair
from vitrail.models.vit import Model, build
from vitrail.training.config import Settings
from vitrail.training.data_module import batch_preparation
from vitrail.training.loop import TrainState, autocast_for, make_state, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.schedules import Schedule

PARTS = ("weights", "gradients", "optimizer", "average", "activations")
SAMPLED = (2, 4)  # pictures of the two traces; one alone is a special case to many operations
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trace:
    """Events in their order: a block appears (+1) or is gone (-1)."""

    blocks: np.ndarray  # (events,) which block
    signs: np.ndarray  # (events,) +1 or -1
    fixed: np.ndarray  # (blocks,) bytes that do not depend on the pictures
    each: np.ndarray  # (blocks,) bytes for each picture of a micro-batch
    parts: np.ndarray  # (blocks,) place in PARTS
    begin: int  # the event with which the step begins; what is there before, stays

    def sizes(self, pictures: int) -> np.ndarray:
        """Bytes of each block."""
        return self.fixed + self.each * pictures

    def at_peak(self, pictures: int) -> dict[str, int]:
        """Bytes of each part at the moment of the step when all together are most."""
        change = self.sizes(pictures)[self.blocks] * self.signs
        total = np.cumsum(change)
        moment = self.begin + int(np.argmax(total[self.begin :]))
        of = self.parts[self.blocks[: moment + 1]]
        sums = np.bincount(of, weights=change[: moment + 1], minlength=len(PARTS))
        return {part: round(n) for part, n in zip(PARTS, sums.tolist(), strict=True)}

    def part(self, name: str, pictures: int = 0) -> int:
        """Bytes of all blocks of a part; activations are never all there at once."""
        return round(self.sizes(pictures)[self.parts == PARTS.index(name)].sum())


class Ledger(TorchDispatchMode):
    """Writes down each block of memory that tensors without memory would have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[int] = []
        self.signs: list[int] = []
        self.bytes: list[int] = []  # of each block
        self.block_of: dict[int, int] = {}  # storage → its block

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is torch.ops.aten._local_scalar_dense.default:  # `float(loss)`, `if usable`
            return True if args[0].dtype == torch.bool else 1.0
        given = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, FakeTensor):
                self.note(tensor)
        if operation is torch.ops.aten.gelu.default:
            self.change_gelu(args[0], given)
        return given

    def note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.block_of:
            self.block_of[storage._cdata] = self.appear(storage.nbytes())
            weakref.finalize(storage, self.forget, storage._cdata)

    def appear(self, size: int) -> int:
        block = len(self.bytes)
        self.bytes.append(size)
        self.blocks.append(block)
        self.signs.append(1)
        return block

    def vanish(self, block: int) -> None:
        self.blocks.append(block)
        self.signs.append(-1)

    def forget(self, storage: int) -> None:
        self.vanish(self.block_of.pop(storage))

    def change_gelu(self, x: Tensor, y: Tensor) -> None:
        """What `models/mlp.py` does on a CPU and torch's own operation does not.

        With a gradient, it keeps a slope of its own in place of x; without one, y is in the
        memory of x.
        """
        before, after = x.untyped_storage()._cdata, y.untyped_storage()._cdata
        if x.dtype != torch.float32 or before not in self.block_of:
            return
        taken = self.block_of[before]
        if torch.is_grad_enabled():
            self.block_of[before] = self.appear(self.bytes[taken])
            self.vanish(taken)
        else:
            self.block_of[before], self.block_of[after] = self.block_of[after], taken

    def tag(self, parts: dict[int, str], tensors: Iterator[Tensor], part: str) -> None:
        for tensor in tensors:
            parts[self.block_of[tensor.untyped_storage()._cdata]] = part


def trace_step(
    config: Config, settings: Settings, *, accumulate: int, precision: torch.dtype
) -> Trace:
    """The trace of a step that is not the first, for micro-batches of any size."""
    few, more = (walk(config, settings, n, min(accumulate, 2), precision) for n in SAMPLED)
    assert few.events == more.events, "the same operations, whatever the number of pictures"
    low, high = SAMPLED
    each = (np.array(more.bytes) - np.array(few.bytes)) / (high - low)
    blocks, signs = zip(*few.events, strict=True)
    return Trace(
        blocks=np.array(blocks),
        signs=np.array(signs),
        fixed=np.array(few.bytes) - low * each,
        each=each,
        parts=np.array([PARTS.index(few.parts.get(b, "activations")) for b in range(len(each))]),
        begin=few.begin,
    )


@dataclass(frozen=True)
class Walk:
    """One step, as the ledger has it."""

    events: list[tuple[int, int]]
    bytes: list[int]
    parts: dict[int, str]
    begin: int


def walk(
    config: Config, settings: Settings, pictures: int, accumulate: int, precision: torch.dtype
) -> Walk:
    """A step of `accumulate` micro-batches; more than two are like two."""
    model, ledger, parts = build(config), Ledger(), {}
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        size = pair(config.image_size)
        schedule = Schedule(
            settings=settings, length=8, accumulate=accumulate, stages=((0.0, size[0]),), steps=8
        )
        state = state_of(model, schedule, checkpointing=settings.machine.checkpointing)
        for parameter in model.parameters():  # the first step makes the optimizer's memory
            parameter.grad = torch.empty_like(parameter)
        for optimizer in state.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        begin = len(ledger.blocks)
        ledger.tag(parts, model.parameters(), "weights")
        ledger.tag(parts, kept_by(state), "optimizer")
        if state.ema is not None:
            ledger.tag(parts, iter(state.ema.values.values()), "average")
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: ledger.tag(parts, iter([p.grad]), "gradients")
            )
        shape = (pictures, config.channels, *size)
        prepare = batch_preparation(
            plain(config), Mixing(), config.num_classes, CPU, steps_per_epoch=1
        )
        train_step(state, batches(shape), prepare, autocast_for(precision, CPU))
        events = tidy(list(zip(ledger.blocks, ledger.signs, strict=True)))
    return Walk(events, ledger.bytes, parts, begin)


def tidy(events: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What is given back at one moment, in the order of blocks: a cache has none of its own."""
    runs = groupby(events, key=lambda event: event[1])
    return [event for sign, run in runs for event in (run if sign > 0 else sorted(run))]


def trace_evaluation(config: Config, pictures: int) -> int:
    """The most bytes, beside the weights, that a forward pass without gradients takes."""
    model, ledger = build(config), Ledger()
    with FakeTensorMode(allow_non_fake_inputs=True), ledger, torch.no_grad():
        fill(model.eval())
        begin = len(ledger.blocks)
        shape = (pictures, config.channels, *pair(config.image_size))
        model(normalize(torch.empty(shape, dtype=torch.uint8), plain(config)))
        change = [ledger.bytes[b] * s for b, s in zip(ledger.blocks, ledger.signs, strict=True)]
    return int(np.cumsum(change[begin:]).max(initial=0))


def state_of(model: Model, schedule: Schedule, *, checkpointing: bool) -> TrainState:
    """What `training/trainer.py` makes for one process, of weights without memory."""
    fill(model)
    if checkpointing:
        model.checkpointing = True  # pyright: ignore[reportAttributeAccessIssue]
    objective = make_objective(model, schedule.settings)
    return make_state(objective, objective, schedule)


def fill(model: nn.Module) -> None:
    """Weights as the ledger sees them, in place of those of the meta device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape))


def kept_by(state: TrainState) -> Iterator[Tensor]:
    """All tensors that the optimizers remember."""
    for optimizer in state.optimizers:
        for kept in optimizer.state.values():
            yield from (value for value in kept.values() if isinstance(value, Tensor))


def batches(shape: tuple[int, ...]) -> Iterator[Batch]:
    while True:
        images = torch.empty(shape, dtype=torch.uint8)
        yield Batch(images, torch.zeros(shape[0], dtype=torch.long), Nobody())  # pyright: ignore


class Nobody:
    """Indices of pictures that do not exist."""

    def tolist(self) -> list[int]:
        return []


def plain(config: Config) -> Preprocessing:
    return Preprocessing(
        size=pair(config.image_size), mean=(0.5,) * config.channels, std=(0.5,) * config.channels
    )
