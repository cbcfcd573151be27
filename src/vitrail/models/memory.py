"""Memory reuse: a cache for values derived from parameters, and checks for in-place operations."""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks as GLOBAL_HOOKS


class Cache:
    """Cache the last value that was computed from a parameter.

    The value is valid while the parameter is bitwise equal to a copy taken at the time. Version
    counters would be cheaper but miss fused optimizers and writes to `.data`. The cache is
    bypassed while gradients are recorded (each step needs its own graph) and during tracing, and
    fake tensors are not cached.
    """

    def __init__(self) -> None:
        # (key, copy of the source, value); one attribute, so that updates are atomic for threads
        self.entry: tuple[Hashable, Tensor | None, Tensor] | None = None

    def get(self, source: Tensor | None, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, or its last result if `source` and `key` have not changed."""
        in_graph = source is not None and torch.is_grad_enabled() and source.requires_grad
        if is_tracing() or in_graph or (source is not None and source.is_meta):
            return compute()
        entry = self.entry
        if entry is not None and entry[0] == key and identical(entry[1], source):
            return entry[2]
        with torch.inference_mode(False), torch.no_grad():  # the value must be usable in any mode
            value = compute()
            if type(value) is Tensor:
                self.entry = (key, None if source is None else source.detach().clone(), value)
        return value

    def __reduce__(self) -> tuple[type["Cache"], tuple[()]]:
        return Cache, ()  # copies and pickles start empty


def identical(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return (a.dtype, a.device, a.shape) == (b.dtype, b.device, b.shape) and torch.equal(a, b)


def is_tracing() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace is recording operations."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def can_overwrite(output: Tensor, *modules: nn.Module) -> bool:
    """Whether the output of `modules` may be modified in place: no autograd, no forward hooks."""
    if is_tracing() or (torch.is_grad_enabled() and output.requires_grad):
        return False
    return not GLOBAL_HOOKS and not any(module._forward_hooks for module in modules)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether a layer is an nn.Linear without hooks or parametrizations, so that using its weight
    directly is equivalent to calling it."""
    before, after = layer._forward_pre_hooks, layer._forward_hooks
    hooks = (GLOBAL_HOOKS, before, after, layer._backward_pre_hooks, layer._backward_hooks)
    return type(layer) is nn.Linear and not any(hooks)
