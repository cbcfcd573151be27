"""A fine-tuned model under scrutiny: token merging, test resolution, faithfulness of its maps.

    python benchmarks/trained_model.py merging runs/flowers5 flowers5_160.tar
    python benchmarks/trained_model.py resolution runs/flowers5 flowers5_160.tar
    python benchmarks/trained_model.py faithfulness runs/flowers5 flowers5_160.tar

Not a section of `make bench`: it needs a trained model. `--split` chooses another split than val,
`--merge` and `--sizes` other values.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch
from torch import Tensor

import vitrail

BATCHES = (32, 8, 1)
TIMED = 64  # images
ROUNDS = 5


def merging(model_path: str, data: str, split: str, pairs: list[int]) -> None:
    """Accuracy and speed against the pairs of tokens that each block merges."""
    model = vitrail.load(model_path).eval()
    channels, (height, width) = model.config.channels, model.metadata.preprocessing.size
    images = torch.randn(TIMED, channels, height, width)
    print("| merged per block | tokens left | accuracy | speedup at batch 32 | 8 | 1 |")
    print("|---|---|---|---|---|---|")
    for count in pairs:
        model.merge = count
        accuracy = vitrail.evaluate(model, data, split).accuracy
        ratios = [speedup(model, images[: max(size, 8)], size, count) for size in BATCHES]
        left = max(1, model.config.num_tokens - count * model.config.depth)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"| {count} | {left} | {100 * accuracy:.1f} % | {cells} |", flush=True)


@torch.inference_mode()
def speedup(model: torch.nn.Module, images: Tensor, size: int, pairs: int) -> float:
    """Time without merging over time with it; the median of interleaved rounds."""

    def seconds(count: int) -> float:
        model.merge = count
        begun = time.perf_counter()
        for batch in images.split(size):
            model(batch)
        return time.perf_counter() - begun

    seconds(0)
    return statistics.median(seconds(0) / seconds(pairs) for _ in range(ROUNDS))


def resolution(model_path: str, data: str, split: str, sizes: list[int]) -> None:
    """Accuracy against test resolution, with the authors' and timm's position interpolation."""
    numerics = vitrail.load(model_path).config.numerics
    print("| test resolution | authors' interpolation | timm's |")
    print("|---|---|---|")
    for size in sizes:
        cells = []
        for method in ("google", "timm"):
            changed = replace(numerics, position_resize=method)
            model = vitrail.load(
                model_path, image_size=size, numerics=changed, log=lambda line: None
            )
            cells.append(f"{100 * vitrail.evaluate(model, data, split).accuracy:.1f} %")
        print(f"| {size} | {' | '.join(cells)} |", flush=True)


def faithfulness(model_path: str, data: str, split: str) -> None:
    """Insertion and deletion of every explanation method beside random and center maps."""
    inspection = vitrail.inspect_model(vitrail.load(model_path), data=data, images=16, score=True)
    curves = inspection.faithfulness.curves
    print("| method | insertion | deletion |")
    print("|---|---|---|")
    for method, curve in curves.items():
        print(f"| {method} | {curve.insertion_area:.3f} | {curve.deletion_area:.3f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=["merging", "resolution", "faithfulness"])
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--split", default="val")
    parser.add_argument("--merge", type=int, nargs="+", default=[0, 4, 8, 13])
    parser.add_argument("--sizes", type=int, nargs="+", default=[96, 128, 160, 192, 224, 288, 384])
    options = parser.parse_args()
    where = (options.model, options.data, options.split)
    if options.study == "merging":
        merging(*where, options.merge)
    elif options.study == "resolution":
        resolution(*where, options.sizes)
    else:
        faithfulness(*where)


if __name__ == "__main__":
    main()
