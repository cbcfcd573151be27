"""Write a built-in model from the folder of a training run.

    python scripts/make_builtin.py runs/vit-photos [--name vit-photos] [--size 144]

The head is dropped and the weights are rounded to float16. The run's provenance, which names
folders of the machine that trained it, is replaced by `PROVENANCE`. The model card, README.md, is
written by hand and kept. Prints what the rounding changes, and fails above 6 MB.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import vitrail
from vitrail.checkpoints import builtin
from vitrail.checkpoints.save import max_difference

MAX_BYTES = 6_000_000
PROVENANCE = {
    "trained on": "54,878 photographs of 2,266 classes from 20 public datasets",
    "teacher": "DeiT-Ti/16 (Apache-2.0), trained on ImageNet-1k",
    "recipe": "builtin-vit-photos",
    "license": "Apache-2.0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of the finished run")
    parser.add_argument("--name", default=builtin.NAMES[0], choices=builtin.NAMES)
    parser.add_argument("--size", type=int, default=144, help="image size in pixels")
    options = parser.parse_args()
    written = write(options.run, options.name, options.size)
    print(f"done: {written}")


def write(run: Path, name: str, size: int) -> Path:
    """Write the bundle into the package and return its folder."""
    model = vitrail.load(run, num_classes=0, image_size=size)
    steps = {k: v for k, v in model.metadata.provenance.items() if k in ("steps", "seed")}
    model.metadata = replace(model.metadata, provenance=PROVENANCE | steps)
    folder = builtin.FOLDER / name
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        bundle = Path(scratch) / name
        vitrail.save(model, bundle, dtype=torch.float16)
        bytes = (bundle / "model.safetensors").stat().st_size
        if bytes > MAX_BYTES:
            raise SystemExit(f"{bytes:,} bytes: more than the {MAX_BYTES:,} of a built-in model")
        difference = max_difference(model, vitrail.load(bundle))
        for file in ("model.safetensors", "config.json"):
            (bundle / file).replace(folder / file)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{parameters:,} parameters, {bytes:,} bytes")
    print(f"float16 changes features by up to {difference:.1e} of the largest")
    return folder


if __name__ == "__main__":
    main()
