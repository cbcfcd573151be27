"""Forward pass and training step of the same ViT in five libraries."""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from peers import LIBRARIES, Shape, make_torchvision_importable
from timing import in_turns, matrix_call, matrix_rate, spread

ROUNDS = 9
CASES = {
    "ViT-S/16 at 224, batch 8": (Shape(224, 16, 384, 12, 6, 1536, 1000), 8),
    "32 pixels, patch 4, width 128, depth 6, batch 128": (Shape(32, 4, 128, 6, 4, 512, 10), 128),
}


def report() -> str:
    """The section of docs/benchmarks.md, measured now."""
    make_torchvision_importable()
    lines = [
        "## Models",
        "",
        "The same network in five libraries, each with its own defaults (the peers compute the",
        "exact GELU, vitrail the authors' tanh form). A training step is forward, cross-entropy,",
        f"backward and fused AdamW. Interleaved, {ROUNDS} rounds. *Ratio* is the median over",
        "rounds of the library's time divided by vitrail's: above 1, vitrail is faster. *Share* is",
        "how much of the machine's best float32 matrix-product rate the plain network's products",
        "make up; vitrail leaves out those of the last block that nobody reads.",
        "",
    ]
    for title, (shape, batch) in CASES.items():
        for kind, passes in (("forward", 1), ("training step", 3)):
            print(f"  {title}: {kind}", flush=True)
            lines += [f"### {title}: {kind}", "", *table(shape, batch, kind, passes), ""]
    return "\n".join(lines)


def table(shape: Shape, batch: int, kind: str, passes: int) -> list[str]:
    images = torch.randn(batch, 3, shape.image_size, shape.image_size)
    labels = torch.randint(shape.classes, (batch,))
    make = forward_call if kind == "forward" else step_call
    calls = {name: make(build(shape), images, labels) for name, build in LIBRARIES.items()}
    seconds = in_turns(calls | {"matrix": matrix_call()}, rounds=ROUNDS)
    rate = matrix_rate(seconds.pop("matrix"))
    ours = seconds["vitrail"]
    rows = ["| library | best, ms | median, ms | ratio | share |", "|---|---|---|---|---|"]
    for name, times in sorted(seconds.items(), key=lambda item: min(item[1])):
        ratio = statistics.median(t / own for t, own in zip(times, ours, strict=True))
        share = passes * batch * shape.forward_flops() / min(times) / rate
        rows.append(f"| {name} | {spread(times)} | {ratio:.2f} | {share:.0%} |")
    return [*rows, "", f"The machine's best matrix product: {rate / 1e9:.0f} Gflop/s."]


def forward_call(model: nn.Module, images: torch.Tensor, _: torch.Tensor) -> Callable[[], object]:
    model.eval()

    def call() -> None:
        with torch.inference_mode():
            model(images)

    return call


def step_call(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], object]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def call() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return call
