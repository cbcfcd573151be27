"""Memory used again: values kept for the next call, and tensors nobody else holds."""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as GLOBAL_HOOKS


class Memory(NamedTuple):
    key: Hashable
    source: Tensor | None  # a copy: whoever changes the parameter, and however, it will differ
    value: Tensor


class Kept:
    """Keeps the last value made from a parameter.

    A value is used again only if the parameter still equals, bit for bit, what it was made from.
    Counting changes would be cheaper and wrong: fused optimizers and `.data` do not count theirs.
    Nothing is kept while gradients flow (each step needs its own graph) or while a compiler or a
    fake tensor looks on (they must see the computation, not its result).
    """

    def __init__(self) -> None:
        self.memory: Memory | None = None  # one attribute, so that threads never see half of it

    def get(self, source: Tensor | None, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, or what it gave last time if `source` and `key` are the same."""
        if watched():
            return make()
        in_graph = torch.is_grad_enabled() and source is not None and source.requires_grad
        if in_graph or (source is not None and source.is_meta):
            return make()
        memory = self.memory
        if memory is not None and memory.key == key and same(memory.source, source):
            return memory.value
        with torch.inference_mode(False), torch.no_grad():  # usable in any later mode
            value = make()
            if type(value) is Tensor:
                copy = None if source is None else source.detach().clone()
                self.memory = Memory(key, copy, value)
        return value

    def __reduce__(self) -> tuple[type["Kept"], tuple[()]]:
        return Kept, ()  # copies and pickles begin without memory


def watched() -> bool:
    """A compiler, an exporter or a tracer looks on, and must see plain operations."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def may_reuse(output: Tensor, *modules: nn.Module) -> bool:
    """The output of these modules is ours alone: no gradient needs it and no hook has seen it."""
    if watched() or (torch.is_grad_enabled() and output.requires_grad):
        return False
    return not GLOBAL_HOOKS and not any(module._forward_hooks for module in modules)


def bare(layer: nn.Module) -> bool:
    """Its weights are all there is: no hook waits for it, and nothing else stands in its place."""
    before, after = layer._forward_pre_hooks, layer._forward_hooks
    hooks = (GLOBAL_HOOKS, before, after, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is nn.Linear and not any(hooks)


def same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    alike = (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)
    return alike and torch.equal(one, other)
