"""How far our logits are from the authors', model by model."""

from pathlib import Path

import numpy as np
import torch

from timing import claim
from vitrail import load

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
NAMES = ("vit-token", "vit-prelogits", "vit-gap", "mixer", "hybrid", "bit")


def report() -> str:
    """The section of benchmarks/README.md, measured now."""
    rows, singles = [], []
    for name in NAMES:
        single, double = (difference(name, t) for t in (torch.float32, torch.float64))
        singles.append(single)
        rows.append(f"| {name} | {single:.1e} | {double:.1e} |")
    return "\n".join(
        [
            "## Fidelity",
            "",
            claim("The authors' logits, largest difference in float32", f"{max(singles):.1e}"),
            "",
            "The largest difference from the logits of the authors' code on the same random",
            "weights, relative to the largest logit. Their logits are float32: the difference",
            "in float64 is their rounding error.",
            "",
            "| model | float32 | float64 |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


@torch.no_grad()
def difference(name: str, dtype: torch.dtype) -> float:
    arrays = np.load(GOLDEN / f"{name}.io.npz")
    images = torch.from_numpy(arrays["images"]).permute(0, 3, 1, 2).to(dtype)
    logits = torch.from_numpy(arrays["logits"])
    ours = load(GOLDEN / f"{name}.npz").eval().to(dtype)(images)
    return ((ours - logits).abs().max() / logits.abs().max()).item()
