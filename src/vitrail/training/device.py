"""Which precision pays on a device, and why."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from vitrail.models.config import Config, VitConfig
from vitrail.training.settings import Precision

# With avx512_bf16 a step of ViT-S/16 takes 0.7 times as long as in float32, of ViT-Ti/16 0.96 to
# 1.2 times (docs/notebook.md): narrow models spend the gain on conversions.
WIDE = 384  # channels of a ViT from which avx512_bf16 pays


def choose_precision(
    wish: Precision, device: torch.device, config: Config
) -> tuple[torch.dtype, str]:
    """The type of the matrix products, and the reason."""
    if wish != "auto":
        return getattr(torch, wish), "as asked for"
    if device.type == "cuda":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return torch.bfloat16, "this GPU multiplies bfloat16 faster, without loss of range"
        return torch.float16, "this GPU multiplies float16 faster; gradients are scaled for it"
    if device.type == "cpu":
        able = torch.cpu.get_capabilities()
        if able.get("amx_bf16"):
            return torch.bfloat16, "this CPU has AMX instructions for bfloat16"
        if able.get("avx512_bf16") and isinstance(config, VitConfig) and config.width >= WIDE:
            return torch.bfloat16, "this CPU has AVX-512 instructions for it, and the model is wide"
        return torch.float32, "bfloat16 is not faster for this model on this CPU"
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
