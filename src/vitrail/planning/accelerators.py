"""How long accelerators take for so many operations: published peaks, and the share one reaches.

The share is an assumption; `REPORTED` tells which one the paper's own days amount to.
"""

from dataclasses import dataclass

from vitrail.formatting import GIB
from vitrail.planning.cost import EXA

DAY = 86_400  # seconds
UTILIZATION = 0.35  # of the peak; the paper's own runs come to 0.32 to 0.43 (`reached`)


@dataclass(frozen=True)
class Accelerator:
    """As its maker describes it."""

    name: str
    peak: float  # operations per second in bfloat16 (V100: float16), dense
    memory: int  # bytes


# Published by the makers: cloud.google.com/tpu/docs, and the data sheets of NVIDIA and AMD.
# A TPUv3 chip of two cores has 123e12 and 32 GiB; the paper counts cores.
ACCELERATORS = (
    Accelerator("TPUv3 core", 61.5e12, 16 * GIB),
    Accelerator("TPUv4", 275e12, 32 * GIB),
    Accelerator("TPUv5e", 197e12, 16 * GIB),
    Accelerator("TPUv5p", 459e12, 95 * GIB),
    Accelerator("V100", 125e12, 32 * GIB),
    Accelerator("A100", 312e12, 80 * GIB),
    Accelerator("H100", 989e12, 80 * GIB),
    Accelerator("MI300X", 1307e12, 192 * GIB),
)
TPU_V3_CORE = ACCELERATORS[0]


@dataclass(frozen=True)
class Reported:
    """A pre-training of the paper: table 2 tells the days, table 6 the work (both published)."""

    model: str
    epochs: int
    exaflops: float
    core_days: float  # TPUv3


REPORTED = (
    Reported("ViT-H/14", 14, 4262, 2500),
    Reported("ViT-L/16", 14, 1567, 680),
)


def reached(report: Reported) -> float:
    """The share of the peak that the authors' run comes to."""
    return report.exaflops * EXA / (report.core_days * DAY * TPU_V3_CORE.peak)


def device_days(flops: float, accelerator: Accelerator, utilization: float) -> float:
    """Days that one device would take; n devices take one n-th of them."""
    return flops / (accelerator.peak * utilization) / DAY
