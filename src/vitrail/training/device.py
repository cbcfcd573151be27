"""Which precision pays on a device, and why."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from vitrail.training.settings import Precision

# avx512_bf16 is left out: a step of ViT-Ti/16 takes 0.96 to 1.2 times as long with it. For ViT-S/16
# it takes 0.7 times as long (docs/notebook.md), so wider models would gain by asking for it.
FAST_BFLOAT16 = ("amx_bf16",)


def choose_precision(wish: Precision, device: torch.device) -> tuple[torch.dtype, str]:
    """The type of the matrix products, and the reason."""
    if wish != "auto":
        return getattr(torch, wish), "as asked for"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU multiplies bfloat16 faster, without loss of range"
        return torch.float16, "this GPU multiplies float16 faster; gradients are scaled for it"
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        if any(able.get(name) for name in FAST_BFLOAT16):
            return torch.bfloat16, "this CPU has AMX instructions for bfloat16"
        return torch.float32, "on CPUs bfloat16 is chosen with AMX only; wide models may gain by it"
    return torch.float32, f"nothing else is known to pay on {device.type}"


def autocast_for(
    precision: torch.dtype, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """A context in which matrix products have the precision; weights stay float32."""
    if precision == torch.float32:
        return nullcontext
    return lambda: torch.autocast(device.type, precision)


def scaler_for(precision: torch.dtype, device: torch.device) -> torch.amp.GradScaler | None:
    """float16 alone has too little range for gradients."""
    return torch.amp.GradScaler(device.type) if precision == torch.float16 else None


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told, so that a clock means something."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
