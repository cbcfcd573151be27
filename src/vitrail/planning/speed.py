"""What is fast on this machine: a second or two of measuring, for `vitrail doctor`.

Matrix products, because a Vision Transformer is made of them, in both types a processor may
choose from; and JPEGs, because pictures are. The best of several is told: what else the machine
does can only slow a measurement down.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from vitrail.data.datasets import open_dataset
from vitrail.data.decode import decode, load_simplejpeg, thumbnail, to_jpeg
from vitrail.data.loader import start_pool
from vitrail.distributed import device_type
from vitrail.models.registry import CONFIGURATIONS
from vitrail.training.auto_config import choose_precision, choose_shards
from vitrail.training.config import Settings

SECONDS = 0.2  # for each measurement
WIDTH = 768  # of the matrices: that of ViT-B
SIDE = 480  # pixels of the JPEG
PICTURE = "builtin:sign-digits"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Operations or pictures in a second."""

    threads: int
    float32: float  # of matrix products, by all threads
    float32_alone: float  # by one
    bfloat16: float  # by all threads
    jpeg_simplejpeg: float | None  # pictures of SIDE x SIDE, by one thread; None: not installed
    jpeg_pillow: float
    precision: str  # what training chooses here
    reason: str
    parts: int  # of a batch, in the training of ViT-S/16


def measure(seconds: float = SECONDS, width: int = WIDTH, side: int = SIDE) -> Speeds:
    """On the processor, whatever else there is."""
    picture = thumbnail(open_dataset(PICTURE, "test"), 0, side)
    assert picture is not None, "it comes along, and can be read"
    jpeg = to_jpeg(picture)
    with start_pool(1, torch_threads=1, name="alone") as pool:
        alone = pool.submit(products, torch.float32, seconds, width).result()
    quick = None
    if load_simplejpeg() is not None:
        quick = 1 / best(lambda: decode(jpeg), seconds)
    device = torch.device(device_type("", 1))
    precision, reason = choose_precision("auto", device, CONFIGURATIONS["ViT-S/16"])
    return Speeds(
        threads=torch.get_num_threads(),
        float32=products(torch.float32, seconds, width),
        float32_alone=alone,
        bfloat16=products(torch.bfloat16, seconds, width),
        jpeg_simplejpeg=quick,
        jpeg_pillow=1 / best(lambda: decode(jpeg, backend="pillow"), seconds),
        precision=str(precision).removeprefix("torch."),
        reason=reason,
        parts=choose_shards(CONFIGURATIONS["ViT-S/16"], Settings(), precision, device),
    )


def products(dtype: torch.dtype, seconds: float, width: int) -> float:
    """Operations in a second; a multiply-add is two."""
    matrix = torch.ones(width, width, dtype=dtype)
    return 2 * width**3 / best(lambda: matrix @ matrix, seconds)


def best(work: Callable[[], object], seconds: float) -> float:
    """The shortest time it took, of two at least: the first also warms up."""
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)
