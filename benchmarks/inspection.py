"""Time and memory of attention statistics over many images."""

import statistics
import subprocess
import sys
from collections.abc import Callable

import torch

from fewshot import PEAK, held
from peers import Shape, vitrail
from timing import claim, interleave, spread
from vitrail.inspection.attention import attention_stats
from vitrail.inspection.relevance import rollout
from vitrail.models.vit import create

ROUNDS = 5
IMAGES, BATCH = 128, 16
SHAPE = Shape(224, 16, 384, 12, 6, 1536, 1000)
LARGE, SIZE = "ViT-L/16", 512


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    return "\n".join(["## Inspection", "", *cost(), "", *memory(), ""])


def cost() -> list[str]:
    """A study of many images beside their plain forward pass."""
    model = vitrail(SHAPE).eval()
    batches = torch.randn(IMAGES, 3, 224, 224).split(BATCH)

    @torch.inference_mode()
    def forward() -> None:
        for images in batches:
            model(images)

    calls = {"forward": forward, "study": lambda: attention_stats(model, batches)}
    seconds = interleave(calls, rounds=ROUNDS)
    pairs = zip(seconds["study"], seconds["forward"], strict=True)
    ratio = statistics.median(own / plain for own, plain in pairs)
    return [
        claim("A study of attention over many images", f"{ratio:.2f} times their forward pass"),
        "",
        f"ViT-S/16 at 224 pixels, {IMAGES} images in batches of {BATCH}: mean attention distance",
        "(all variants), entropy, similarity of heads and token norms, all layers and heads,",
        f"compared with the plain forward pass. Interleaved, {ROUNDS} rounds; *ratio* is the",
        "median over rounds. The target is at most 1.6.",
        "",
        "| pass | best, ms | median, ms | ratio |",
        "|---|---|---|---|",
        f"| forward | {spread(seconds['forward'])} | 1.00 |",
        f"| forward with attention statistics | {spread(seconds['study'])} | {ratio:.2f} |",
    ]


EVALUATIONS: dict[str, Callable[..., object]] = {
    "forward": lambda model, image: model(image),
    "rollout": rollout,
    "attention distance": lambda model, image: attention_stats(model, [image]),
}


def memory() -> list[str]:
    """Measure the memory of a fresh process of each beyond a loaded, warmed-up model."""
    if not PEAK.exists():
        return ["Memory is not measured on this system."]
    grown = {
        name: subprocess.run(
            [sys.executable, __file__, name], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in EVALUATIONS
    }
    config = create_large("meta").config
    stored = config.depth * config.heads * config.num_tokens**2 * 4 / 2**20
    return [
        f"{LARGE} at {SIZE} x {SIZE} pixels, one image: peak memory above that of the model, each",
        f"in a fresh process. All maps at once would be {stored:,.0f} MiB; the target is",
        "at most 300 MB.",
        "",
        "| what | MiB |",
        "|---|---|",
        *(f"| {name} | {mebibytes} |" for name, mebibytes in grown.items()),
    ]


def create_large(device: str) -> torch.nn.Module:
    with torch.device(device):
        return create(LARGE, image_size=SIZE).eval()


def growth(name: str) -> float:
    """Return MiB, after a small image that loads the libraries."""
    model = create_large("cpu")
    image = torch.randn(1, 3, SIZE, SIZE)
    with torch.inference_mode():
        EVALUATIONS[name](model, image[..., :64, :64])
        PEAK.write_text("5")
        before = held("VmRSS")
        EVALUATIONS[name](model, image)
    return held("VmHWM") - before


if __name__ == "__main__":
    print(f"{growth(sys.argv[1]):.0f}")
