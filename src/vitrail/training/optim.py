"""Optimizers and their parameter groups; the moving average of the weights.

Weight decay applies to kernels only, as in the authors' code. Layer-wise decay gives blocks that
are further from the head a smaller learning rate (Bao et al. 2022). Each group has its `peak`
learning rate, and `set_learning_rates` follows the schedule.
"""

# pyright: reportPrivateImportUsage=false
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vitrail import distributed
from vitrail.checkpoints.load import HEADS
from vitrail.data.loader import start_pool
from vitrail.distributed import distribute_like, full_tensor
from vitrail.errors import ConfigError, unknown
from vitrail.training.config import OptimSettings

NamedParameters = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]

# Blocks of a Vision Transformer or a Mixer, with the positions that enter them; units of a BiT.
BLOCK = re.compile(r"(?:encoder\.)?(?:blocks|positions)\.(\d+)\.")
UNIT = re.compile(r"stages\.(\d+)\.(\d+)\.")
# What comes before the first block, and is frozen with the first blocks.
INPUT_WEIGHTS = ("stem.*", "root.*", "position.*", "encoder.positions.*", "encoder.pre_norm.*")
INPUT_WEIGHTS += ("cls_token", "distillation_token", "registers")
IN_BLOCK = re.compile(r"(?:encoder\.)?blocks\.\d+\..*\.weight")
MUON_RATE = 0.02  # from scratch
ADAM_BETAS, LION_BETAS = (0.9, 0.999), (0.9, 0.99)  # of their papers
FUSED_DEVICES = {"cpu", "cuda", "mps"}  # torch itself raises only at the first step


def make_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimSettings, depth: int
) -> list[Optimizer]:
    """Create the optimizers of the trainable parameters of a model of `depth` blocks.

    There is one optimizer, or two for Muon. Parameters that are not part of the model, such as
    those of a decoder, are treated like the head.
    """
    assert optim.kind is not None, "set by auto_config"
    assert optim.learning_rate is not None, "set by auto_config"
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    distances = distances_from_head([name for name, _ in trainable], depth)
    if optim.kind != "muon":
        groups = parameter_groups(trainable, optim.learning_rate, optim, distances)
        return [build_optimizer(optim.kind, groups, optim)]
    matrices = [(name, p) for name, p in trainable if is_muon_parameter(name, p)]
    if not matrices:
        raise ConfigError(
            "optim.kind=muon updates matrices of blocks and convolutions, and all of these are "
            "frozen or missing; use optim.kind=adamw"
        )
    others = [(name, p) for name, p in trainable if not is_muon_parameter(name, p)]
    rest = parameter_groups(others, optim.learning_rate, optim, distances)
    groups, rate = [], optim.muon_learning_rate or MUON_RATE
    for parts in (1, 3):  # the fused weight of queries, keys and values is three matrices
        named = [item for item in matrices if item[0].endswith(".qkv.weight") == (parts == 3)]
        groups += [g | {"parts": parts} for g in parameter_groups(named, rate, optim, distances)]
    muon = Muon(groups, momentum=optim.muon_momentum)
    return [muon, *([build_optimizer("adamw", rest, optim)] if rest else [])]


def set_learning_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set all learning rates to `factor` times their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Freeze the weights whose names match a pattern; return their names."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            parts = [name.split(".") for name in named]
            depths = range(1, max(len(part) for part in parts))
            modules = [".".join([*p[:n], "*"]) for n in depths for p in parts if n < len(p)]
            top = dict.fromkeys(".".join([p[0], "*"]) if len(p) > 1 else p[0] for p in parts)
            known = [*dict.fromkeys(modules), *named]
            raise unknown("weights in optim.freeze", pattern, known, f"there are {', '.join(top)}")
    frozen = [name for name in named if any(fnmatchcase(name, p) for p in patterns)]
    if frozen and len(frozen) == len(named):
        raise ConfigError(
            f"optim.freeze={' '.join(patterns)} freezes every weight; leave out head.*"
        )
    for name in frozen:
        named[name].requires_grad_(False)
    return frozen


def all_but_attention_patterns(model: nn.Module) -> tuple[str, ...]:
    """Return `optim.freeze` for all weights but those of attention and heads, as few as possible.

    Empty if there is no attention.
    """
    names = [name for name, _ in model.named_parameters()]
    trained = [n for n in names if ".attention." in n or n.split(".")[0] in HEADS]
    if not any(".attention." in name for name in names):
        return ()
    patterns: dict[str, None] = {}
    for name in names:
        if name not in trained:
            parts = re.sub(r"\.\d+(?=\.)", ".*", name).split(".")
            wider = [".".join([*parts[:n], "*"]) for n in range(1, len(parts))]
            fitting = (p for p in wider if not any(fnmatchcase(n, p) for n in trained))
            patterns[next(fitting, ".".join(parts))] = None
    return tuple(patterns)


def distances_from_head(names: Collection[str], depth: int) -> dict[str, int]:
    """Return the blocks between each weight and the head: 0 for the head and the last norm.

    The units of a BiT's stages are counted like blocks.
    """
    units = {name: (int(m[1]), int(m[2])) for name in names if (m := UNIT.match(name))}
    order = sorted(set(units.values()), reverse=True)
    depth = len(order) or depth
    distances = {}
    for name in names:
        if name in units:
            distances[name] = 1 + order.index(units[name])
        elif match := BLOCK.match(name):
            distances[name] = depth - int(match[1])
        else:
            is_input = any(fnmatchcase(name, pattern) for pattern in INPUT_WEIGHTS)
            distances[name] = depth + 1 if is_input else 0
    return distances


def parameter_groups(
    named: NamedParameters, rate: float, optim: OptimSettings, distances: Mapping[str, int]
) -> list[Group]:
    """Group parameters by peak learning rate and weight decay."""
    groups: dict[tuple[float, float], Group] = {}
    for name, parameter in named:
        peak = rate * (optim.layer_decay or 1.0) ** distances[name]
        decay = (optim.weight_decay or 0.0) if is_kernel(name, parameter) else 0.0
        group = {"params": [], "lr": peak, "peak": peak, "weight_decay": decay}
        groups.setdefault((peak, decay), group)["params"].append(parameter)
    return list(groups.values())


def is_kernel(name: str, parameter: nn.Parameter) -> bool:
    """Return whether it is the weight of a dense layer or a convolution."""
    return name.endswith(".weight") and parameter.ndim >= 2


def is_muon_parameter(name: str, parameter: nn.Parameter) -> bool:
    """Return whether Muon updates it: a matrix of a block, or a convolution."""
    convolution = parameter.ndim == 4 and name.endswith(".weight")
    return convolution or (parameter.ndim == 2 and bool(IN_BLOCK.fullmatch(name)))


def build_optimizer(kind: str, groups: list[Group], optim: OptimSettings) -> Optimizer:
    """Create an optimizer, with torch's fused kernels where they exist."""
    params = [parameter for group in groups for parameter in group["params"]]
    fused = {parameter.device.type for parameter in params} <= FUSED_DEVICES
    if kind == "sgd":  # the fused kernel does not support DTensors (FSDP)
        fused = fused and all(type(parameter) is nn.Parameter for parameter in params)
    options = {"fused": True} if fused else {"foreach": True}
    match kind:
        case "sgd":
            return SGD(groups, momentum=optim.momentum, **options)
        case "lion":
            return Lion(groups, betas=optim.betas or LION_BETAS)
        case "adafactor":
            return Adafactor(groups, betas=optim.betas or ADAM_BETAS)
    adam = AdamW if kind == "adamw" else Adam  # Adam: L2 regularization, not decoupled decay
    return adam(groups, betas=optim.betas or ADAM_BETAS, eps=optim.eps, **options)


class Lion(Optimizer):
    """weight -= lr * (sign(b1 * momentum + (1 - b1) * gradient) + weight_decay * weight).

    Chen et al. 2023 (arXiv:2302.06675), algorithm 2. It needs a learning rate 3 to 10 times smaller
    than AdamW's and a larger weight decay; its state takes half the memory.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = LION_BETAS
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            lr, (beta1, beta2) = group["lr"], group["betas"]
            gradients = [p.grad for p in params]
            for parameter in params:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[p]["momentum"] for p in params]
            updates = list(torch._foreach_mul(momenta, beta1))
            torch._foreach_add_(updates, gradients, alpha=1 - beta1)
            for update in updates:
                update.sign_()  # one by one: foreach sign does not support DTensors
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
            torch._foreach_add_(params, updates, alpha=-lr)
            torch._foreach_lerp_(momenta, gradients, 1 - beta2)


MIN_FACTORED_DIM = 32  # smaller dimensions are not factored
DECAY_EXPONENT = 0.8  # second moments decay with 1 - t^-0.8, at most the second beta
EPS = 1e-30  # added to squared gradients


class Adafactor(Optimizer):
    """Adafactor as in big_vision: second moments factored into row and column means.

    Shazeer & Stern 2018 (arXiv:1804.04235), modified by Zhai et al. 2022 (arXiv:2106.04560): an
    external learning rate, a cap on the decay of the second moments, and bfloat16 momentum. Two
    bytes per weight, where Adam needs eight. Updates are clipped to an rms of 1.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = ADAM_BETAS
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, cap) = self.state[parameter], group["betas"]
        shape, dims = parameter.shape, None  # the two largest dimensions, if large enough
        if len(shape) >= 2:
            *_, second, first = sorted(range(len(shape)), key=lambda dim: shape[dim])
            if shape[second] >= MIN_FACTORED_DIM:
                dims = {"rows": first, "columns": second}  # the dimension that a mean reduces
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU: no synchronization
            state["momentum"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
            if dims is None:
                state["squares"] = torch.zeros_like(parameter)
            for name, dim in (dims or {}).items():
                means = [1 if i == dim else n for i, n in enumerate(shape)]
                state[name] = torch.zeros(means, dtype=parameter.dtype, device=parameter.device)
        state["step"] += 1
        decay = min(cap, 1 - state["step"].item() ** -DECAY_EXPONENT)
        squares = gradient.square() + EPS
        if dims is None:
            scale = state["squares"].lerp_(squares, 1 - decay).rsqrt()
        else:
            for name, dim in dims.items():
                mean = full_tensor(squares.sum(dim=dim, keepdim=True)) / gradient.shape[dim]
                state[name].lerp_(mean, 1 - decay)
            rows = state["rows"] / state["rows"].mean(dim=dims["columns"], keepdim=True)
            scale = distribute_like(rows.rsqrt() * state["columns"].rsqrt(), gradient)
        update = gradient * scale
        rms = (full_tensor(update.square().sum()) / update.numel()).sqrt()
        update /= rms.clamp(min=1.0)
        momentum = torch.lerp(state["momentum"].to(update.dtype), update, 1 - beta1)
        state["momentum"].copy_(momentum)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(momentum, alpha=-group["lr"])


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at zero, so that small singular values grow fast
NEWTON_SCHULZ_STEPS = 5
MUON_EPS = 1e-7  # a zero gradient stays zero
SMALL_MATRIX = 2**18  # elements up to which one core per matrix is faster than all cores
thread_pool = cache(partial(start_pool, torch_threads=1, name="muon"))


class Muon(Optimizer):
    """Momentum, orthogonalized before it is applied (Jordan et al. 2024); for matrices only.

    Five Newton-Schulz steps orthogonalize closely enough, in float32 on every device: bfloat16,
    which torch's own Muon requires, is many times slower on most CPUs. A convolution is treated as
    an (out, in * kh * kw) matrix. `parts` in a group is the number of matrices in each weight: the
    fused weight of queries, keys and values is three, stacked along the rows. The update of an
    (m, n) matrix is scaled by sqrt(max(1, m / n)), so that its effect on the output does not depend
    on the shape. `step` overwrites the gradients.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.8,  # 0.95 is usual, for long runs (docs/notebook.md)
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "parts": 1}
        super().__init__(params, defaults)
        self.cores = torch.get_num_threads()  # `step` may be called with fewer threads
        for group in self.param_groups:
            for parameter in group["params"]:
                assert parameter.ndim >= 2, "Muon updates matrices"
                assert parameter.shape[0] % group["parts"] == 0, "rows must divide evenly"

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        updated = []  # groups and those of their weights with a gradient
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not params:
                continue
            updated.append((group, params))
            for parameter in params:
                if "momentum" not in self.state[parameter]:
                    self.state[parameter]["momentum"] = torch.zeros_like(parameter)
            momenta = [self.state[p]["momentum"] for p in params]
            gradients = [p.grad for p in params]
            torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
            torch._foreach_lerp_(gradients, momenta, group["momentum"])  # Nesterov, in place
        updates = iter(orthogonalize(self.gradients(), self.cores))
        for group, params in updated:
            parts = [[next(updates) for _ in range(group["parts"])] for _ in params]
            full = [torch.cat(u).view(p.shape) for u, p in zip(parts, params, strict=True)]
            shares = [distribute_like(u, p) for u, p in zip(full, params, strict=True)]
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(params, shares, alpha=-group["lr"])

    def gradients(self) -> list[Tensor]:
        """Return the gradients as matrices."""
        found = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found += full_tensor(parameter.grad).flatten(1).chunk(group["parts"])
        return found


def orthogonalize(matrices: list[Tensor], cores: int = 1) -> list[Tensor]:
    """Return the orthogonalized matrices, scaled by their shape.

    Matrices of the same shape, up to transposition, form a batch, which is divided among the cores
    of a CPU. All processes hold the same matrices and divide the work round-robin, from the largest
    to the smallest.
    """
    processes = distributed.world_size()
    order = sorted(range(len(matrices)), key=lambda i: sorted(matrices[i].shape), reverse=True)
    turns = [order[rank::processes] for rank in range(processes)]
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for index in turns[distributed.rank()]:
        by_shape.setdefault(tuple(sorted(matrices[index].shape)), []).append(index)
    if not all(type(m) is Tensor and m.is_cpu and m.numel() <= SMALL_MATRIX for m in matrices):
        cores = 1  # large products use all cores themselves; fake tensors use none
    jobs = [same[start::cores] for same in by_shape.values() for start in range(cores)]
    jobs = [job for job in jobs if job]

    def run(job: list[int]) -> Tensor:
        batch = (matrices[index] for index in job)
        return newton_schulz(torch.stack([m.mT if m.shape[0] > m.shape[1] else m for m in batch]))

    updates = list(matrices)
    batches = map(run, jobs) if cores == 1 else thread_pool(cores).map(run, jobs)
    for job, batch in zip(jobs, batches, strict=True):
        for index, update in zip(job, batch, strict=True):
            rows, columns = matrices[index].shape
            scale = (rows / columns) ** 0.5
            updates[index] = update.mT * scale if rows > columns else update
    # CPU time of two gloo processes, relative to each computing all: 0.52 at width 384, 0.8 at 48.
    for rank, turn in enumerate(turns):
        if processes > 1 and turn:
            shared = distributed.broadcast_tensors([updates[index] for index in turn], rank)
            for index, update in zip(turn, shared, strict=True):
                updates[index] = update
    return updates


def newton_schulz(x: Tensor) -> Tensor:
    """Return approximately the nearest matrices with orthogonal rows: (B, m, n).

    A step is x ← (a + b g + c g²) x with g = x xᵀ, which moves singular values towards one. The
    steps need only g, and (a + b g + c g²) commutes with it: for wide matrices, such as those of an
    MLP, the steps multiply small (B, m, m) matrices, and x is multiplied once, with half the work.
    """
    a, b, c = COEFFICIENTS
    x = x.float()
    norm = x.flatten(1).norm(dim=1)[:, None, None] + MUON_EPS
    if x.shape[2] >= 2 * x.shape[1]:
        g = x @ x.mT / norm**2
        product = torch.eye(g.shape[1], dtype=g.dtype, device=g.device).expand_as(g)
        for step in range(NEWTON_SCHULZ_STEPS):
            change = torch.baddbmm(g, g, g, beta=b, alpha=c)  # b g + c g²
            product = torch.baddbmm(product, change, product, beta=a)
            if step < NEWTON_SCHULZ_STEPS - 1:
                half = torch.baddbmm(g, change, g, beta=a)
                g = torch.baddbmm(half, change, half, beta=a)
        return product / norm @ x
    x = x / norm
    for _ in range(NEWTON_SCHULZ_STEPS):
        g = x @ x.mT  # (B, m, m)
        x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=b, alpha=c), x, beta=a)
    return x


class EMA:
    """Exponential moving average of the weights (Polyak & Juditsky 1992).

    After each step, average = decay * average + (1 - decay) * weights, from the initialization on.
    The paper's best ImageNet numbers use it (decay 0.9999, table 2). `values` are updated in place:
    checkpoints are written from them and loaded into them.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        assert 0 <= decay < 1
        self.decay = decay
        self.parameters = dict(parameters)
        self.values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        values, weights = [*self.values.values()], [*self.parameters.values()]
        torch._foreach_lerp_(values, weights, 1 - self.decay)  # pyright: ignore[reportArgumentType, reportCallIssue]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the model the averaged weights inside `with`, and its own, bit for bit, after it.

        Values are copied, not swapped by pointer: FSDP gathers weights from its own storage.
        """
        weights = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self.write(self.values)
            yield
        finally:
            self.write(weights)

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(values[name])
