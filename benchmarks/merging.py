"""Token merging on a trained model: accuracy and speed by the number of pairs merged in a block.

    python benchmarks/merging.py runs/first builtin:sign-digits test

Not a section of `make bench`: it needs a model that was trained.
"""

import statistics
import sys
import time

import torch
from torch import Tensor

import vitrail
from vitrail.data.datasets import open_dataset
from vitrail.evaluation.passes import look_at_all

PAIRS = (0, 8, 16, 24, 32, 40, 48)
BATCHES = (32, 8, 1)
ROUNDS = 7


def main(reference: str, data: str, split: str) -> None:
    model = vitrail.load(reference).eval()
    images, labels = pictures(model, data, split)
    whole = answers(model, images, 0)
    print(f"{len(images)} pictures, {whole.eq(labels).float().mean():.2%} right without merging")
    print("pairs  accuracy  same answer  " + "  ".join(f"x batch {size:>2}" for size in BATCHES))
    for pairs in PAIRS:
        found = answers(model, images, pairs)
        ratios = "  ".join(f"{ratio(model, images, size, pairs):>10.2f}" for size in BATCHES)
        right, same = found.eq(labels).float().mean(), found.eq(whole).float().mean()
        print(f"{pairs:>5}  {right:8.2%}  {same:11.2%}  {ratios}", flush=True)


def pictures(model: torch.nn.Module, data: str, split: str) -> tuple[Tensor, Tensor]:
    """All pictures, normalized, and their labels."""
    images, labels = [], []
    look_at_all(
        lambda batch: batch,
        open_dataset(data, split),
        model.facts.preprocessing,
        lambda found, batch: (images.append(found.clone()), labels.append(batch.labels)),
        channels=model.config.channels,
        batch_size=64,
        workers=0,
    )
    return torch.cat(images), torch.cat(labels)


def answers(model: torch.nn.Module, images: Tensor, pairs: int) -> Tensor:
    model.merge = pairs
    return torch.cat([model(part).argmax(1) for part in images.split(32)])


def ratio(model: torch.nn.Module, images: Tensor, size: int, pairs: int) -> float:
    """How many times faster than without: the median over rounds that took turns."""
    return statistics.median(
        seconds(model, images, size, 0) / seconds(model, images, size, pairs) for _ in range(ROUNDS)
    )


def seconds(model: torch.nn.Module, images: Tensor, size: int, pairs: int) -> float:
    model.merge = pairs
    begun = time.perf_counter()
    for part in images.split(size):
        model(part)
    return time.perf_counter() - begun


if __name__ == "__main__":
    with torch.inference_mode():
        main(*sys.argv[1:])
