"""LoRA: trainable low-rank updates of frozen matrices (Hu et al. 2021, arXiv:2106.09685).

A dense layer computes W x + b + alpha / r B A x; W and b are frozen and keep their names, `lora_a`
(r, in) is random and `lora_b` (out, r) starts at zero. The fused projection of queries, keys and
values has an update of rank r for each of the three: its B is block-diagonal.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.errors import ConfigError

ALPHA = 16.0  # with alpha / r, the best learning rate hardly depends on the rank
UPDATES = ("lora_a", "lora_b")
HEADS = ("head.", "distillation_head.")


class LoraLinear(nn.Linear):
    """A frozen dense layer with `parts` low-rank updates, each of an equal share of its outputs."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, parts: int, seed: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = alpha / rank
        generator, bound = torch.Generator().manual_seed(seed), self.in_features**-0.5
        a = torch.empty(parts * rank, self.in_features, device="cpu")
        a = a.uniform_(-bound, bound, generator=generator)  # as nn.Linear
        self.lora_a = nn.Parameter(a.to(self.weight))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        b = self.scale * expand(self.lora_a, self.lora_b)
        return super().forward(input) + F.linear(F.linear(input, self.lora_a), b)


def expand(a: Tensor, b: Tensor) -> Tensor:
    """Return B as a matrix (out, parts * r), block-diagonal if A (parts * r, in) has parts."""
    parts = a.shape[0] // b.shape[1]
    return torch.block_diag(*b.chunk(parts)) if parts > 1 else b


def add_lora(model: nn.Module, rank: int, alpha: float = ALPHA, *, seed: int = 0) -> None:
    """Freeze a model but its head, and give the dense layers of its blocks low-rank updates."""
    layers = adaptable_layers(model, rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(HEADS))
    for number, (name, (layer, parts)) in enumerate(layers.items()):
        adapted = LoraLinear(layer, rank, alpha, parts, seed + number)
        model.set_submodule(name, adapted.train(layer.training))


def adaptable_layers(model: nn.Module, rank: int) -> dict[str, tuple[nn.Linear, int]]:
    """Return the dense layers of a model's blocks and the number of updates that each has.

    Raises if there is no such layer, or for a wrong rank.
    """
    layers = {
        name: (module, 3 if name.endswith(".qkv") else 1)
        for name, module in model.named_modules()
        if "blocks." in name and type(module) is nn.Linear
    }
    if not layers:
        raise ConfigError(
            f"lora={rank}: LoRA needs nn.Linear layers in blocks; {type(model).__name__} has none; "
            "leave it out, or use --optim.freeze"
        )
    limit = min(
        layer.weight.numel() // (layer.out_features + parts * layer.in_features)
        for layer, parts in layers.values()
    )
    if not 1 <= rank <= limit:
        raise ConfigError(
            f"lora={rank} must be a rank from 1 to {limit}; with a larger one, the update of a "
            "layer has more weights than its matrix"
        )
    return layers


def is_adapted(name: str) -> bool:
    """Return whether a weight of an adapted model belongs to the adapter: an update or a head."""
    return name.endswith(UPDATES) or name.startswith(HEADS)


@torch.no_grad()
def merge_lora(state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a state dict of the base model's names, with all updates added; `scale` is alpha / r.

    >>> model.load_state_dict(merge_lora(adapted.state_dict(), 16 / 8))
    """
    merged = {name: x for name, x in state.items() if not name.endswith(UPDATES)}
    for name in [name for name in state if name.endswith("lora_b")]:
        layer = name.removesuffix("lora_b")
        a, b = state[f"{layer}lora_a"], state[name]
        merged[f"{layer}weight"] = merged[f"{layer}weight"] + scale * expand(a, b) @ a
    return merged
