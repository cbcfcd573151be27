"""Which weights are changed how: groups of parameters, and the optimizers for them.

Weight decay is for kernels only, as in the authors' code. Layer-wise decay gives blocks that are
further from the head a smaller learning rate (Bao et al. 2022). Each group knows its `peak`, and
`set_rates` follows the schedule.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from vitrail.errors import ConfigError, unknown
from vitrail.training.adafactor import Adafactor
from vitrail.training.lion import Lion
from vitrail.training.muon import Muon
from vitrail.training.settings import Optim

Named = list[tuple[str, nn.Parameter]]
Group = dict[str, Any]

# Blocks of a Vision Transformer or a Mixer, with the positions that enter them; units of a BiT.
BLOCK = re.compile(r"(?:encoder\.)?(?:blocks|positions)\.(\d+)\.")
UNIT = re.compile(r"stages\.(\d+)\.(\d+)\.")
BEFORE_BLOCKS = ("stem.", "root.", "position.", "cls_token", "distillation_token", "registers")
IN_BLOCK = re.compile(r"(?:encoder\.)?blocks\.\d+\..*\.weight")
FUSED_QKV = ".qkv.weight"  # three matrices
ADAM_BETAS, LION_BETAS = (0.9, 0.999), (0.9, 0.99)  # of their papers
FUSED_ON = {"cpu", "cuda", "mps"}  # torch would not say so before the first step


def make_optimizers(
    named: Iterable[tuple[str, nn.Parameter]], optim: Optim, depth: int
) -> list[Optimizer]:
    """The optimizers for parameters by their names in a model of `depth` blocks.

    One, or for Muon two. Whatever is frozen is left out. A name that is no part of a model, such
    as that of a decoder, counts as the head.
    """
    assert optim.kind is not None, "chosen before training begins"
    assert optim.learning_rate is not None, "chosen before training begins"
    learning = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    distances = distances_from_head([name for name, _ in learning], depth)
    if optim.kind == "muon":
        return muon_and_adamw(learning, optim, distances)
    return [OPTIMIZERS[optim.kind](groups(learning, optim.learning_rate, optim, distances), optim)]


def set_rates(optimizers: Iterable[Optimizer], factor: float) -> None:
    """Set all learning rates to a share of their peaks."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor


def freeze(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Let the weights whose names match a pattern stay as they are; gives their names."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            raise unknown("weights in optim.freeze", pattern, *known_patterns(named))
    frozen = [name for name in named if any(fnmatchcase(name, p) for p in patterns)]
    if frozen and len(frozen) == len(named):
        raise ConfigError(
            f"optim.freeze={' '.join(patterns)} leaves no weight to learn; leave out head.*"
        )
    for name in frozen:
        named[name].requires_grad_(False)
    return frozen


def known_patterns(names: Collection[str]) -> tuple[list[str], str]:
    """Every module with all that is in it, and every weight; and what to say of the largest."""
    parts = [name.split(".") for name in names]
    depths = range(1, max(len(part) for part in parts))
    modules = [".".join([*p[:n], "*"]) for n in depths for p in parts if n < len(p)]
    largest = dict.fromkeys(".".join([p[0], "*"]) if len(p) > 1 else p[0] for p in parts)
    return [*dict.fromkeys(modules), *names], f"there are {', '.join(largest)}"


def distances_from_head(names: Collection[str], depth: int) -> dict[str, int]:
    """Blocks from each weight to the head: 0 for the head and the last norm, 1 in the last block.

    A BiT has units in stages in place of blocks; they are counted here.
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
            distances[name] = depth + 1 if name.startswith(BEFORE_BLOCKS) else 0
    return distances


def groups(named: Named, rate: float, optim: Optim, distances: Mapping[str, int]) -> list[Group]:
    """Parameters that share a peak learning rate and a weight decay."""
    found: dict[tuple[float, float], Group] = {}
    for name, parameter in named:
        peak = rate * (optim.layer_decay or 1.0) ** distances[name]
        decay = (optim.weight_decay or 0.0) if is_kernel(name, parameter) else 0.0
        start = {"params": [], "lr": peak, "peak": peak, "weight_decay": decay}
        found.setdefault((peak, decay), start)["params"].append(parameter)
    return list(found.values())


def is_kernel(name: str, parameter: nn.Parameter) -> bool:
    """The weight of a dense layer or a convolution; no norm, bias, position or token."""
    return name.endswith(".weight") and parameter.ndim >= 2


def is_turned(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon is for it: a matrix of a block, or a convolution."""
    return parameter.ndim == 4 or (parameter.ndim == 2 and bool(IN_BLOCK.fullmatch(name)))


def muon_and_adamw(named: Named, optim: Optim, distances: Mapping[str, int]) -> list[Optimizer]:
    """Muon for the matrices of blocks and for convolutions, AdamW for the rest."""
    assert optim.learning_rate is not None
    matrices = [(name, p) for name, p in named if is_turned(name, p)]
    if not matrices:
        raise ConfigError(
            "optim.kind=muon turns the matrices of blocks and convolutions, and here none learns; "
            "use optim.kind=adamw"
        )
    turned = {name for name, _ in matrices}
    rest = groups([n for n in named if n[0] not in turned], optim.learning_rate, optim, distances)
    single = [(name, p) for name, p in matrices if not name.endswith(FUSED_QKV)]
    triple = [(name, p) for name, p in matrices if name.endswith(FUSED_QKV)]
    rate = optim.muon_learning_rate
    ours = groups(single, rate, optim, distances)
    ours += [group | {"parts": 3} for group in groups(triple, rate, optim, distances)]
    return [Muon(ours), *([adamw(rest, optim)] if rest else [])]


def adamw(groups: list[Group], optim: Optim) -> Optimizer:
    return AdamW(groups, betas=optim.betas or ADAM_BETAS, eps=optim.eps, **at_once(groups))


def adam(groups: list[Group], optim: Optim) -> Optimizer:
    """Weight decay goes through the moments, as in the first Adam."""
    return Adam(groups, betas=optim.betas or ADAM_BETAS, eps=optim.eps, **at_once(groups))


def sgd(groups: list[Group], optim: Optim) -> Optimizer:
    """Torch's kernel does not know parts of weights ("fsdp"), which are of another type."""
    known = all(type(p) is nn.Parameter for group in groups for p in group["params"])
    return SGD(groups, momentum=optim.momentum, **(at_once(groups) if known else {"foreach": True}))


def lion(groups: list[Group], optim: Optim) -> Optimizer:
    return Lion(groups, betas=optim.betas or LION_BETAS)


def adafactor(groups: list[Group], optim: Optim) -> Optimizer:
    return Adafactor(groups, betas=optim.betas or ADAM_BETAS)


OPTIMIZERS: dict[str, Callable[[list[Group], Optim], Optimizer]] = {
    "adamw": adamw,
    "adam": adam,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
}


def at_once(groups: list[Group]) -> dict[str, bool]:
    """One kernel for all weights; where torch has none, one operation for all after another."""
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return {"fused": True} if devices <= FUSED_ON else {"foreach": True}
