"""Make a built-in model: its initialization from the teacher, and the bundle of the finished run.

    python scripts/make_builtin.py start deit-ti16 --out runs/start
    vitrail finetune photos_60k.tar --from runs/start --recipe builtin-vit-photos \\
        --loss.teacher deit-ti16 --out runs/photos
    python scripts/make_builtin.py write runs/photos

`start` keeps half of the teacher's blocks (as DistilBERT does, Sanh et al. 2019), with smaller
patches and the mean of the patches as additional features. `write` drops the head and rounds the
weights to float16. The run's provenance, which names folders of the machine that trained it, is
replaced by `PROVENANCE`. The model card, README.md, is written by hand and kept. `write` prints
what the rounding changes, and fails above 6 MB.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

import vitrail
from vitrail.checkpoints import builtin
from vitrail.checkpoints.save import max_difference
from vitrail.models.vit import build

MAX_BYTES = 6_000_000
IMAGE_SIZE, PATCH_SIZE = 120, 12
# Removing the other six one by one changed the teacher's probabilities least (KL divergence).
BLOCKS = (0, 2, 3, 5, 6, 11)
PROVENANCE = {
    "trained on": "54,878 photographs of 2,266 classes from 23 public datasets",
    "teacher": "DeiT-Ti/16 (Apache-2.0), trained on ImageNet-1k",
    "initialized from": f"blocks {', '.join(map(str, BLOCKS))} of the teacher",
    "recipe": "builtin-vit-photos",
    "license": "Apache-2.0",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    begin = commands.add_parser("start", help="initialize the student from its teacher")
    begin.add_argument("teacher", help="DeiT-Ti/16: a folder, a file or a hub reference")
    begin.add_argument("--out", type=Path, required=True, help="folder of the new bundle")
    end = commands.add_parser("write", help="write the finished run into the package")
    end.add_argument("run", type=Path, help="folder of the finished run")
    end.add_argument("--name", default=builtin.NAMES[0], choices=builtin.NAMES)
    end.add_argument("--size", type=int, default=IMAGE_SIZE, help="image size in pixels")
    options = parser.parse_args()
    if options.command == "start":
        start(options.teacher, options.out)
        print(f"done: {options.out}")
    else:
        print(f"done: {write(options.run, options.name, options.size)}")


def start(teacher: str, out: Path) -> None:
    """Write the student at step 0: some blocks of the teacher, with smaller patches."""
    whole = vitrail.load(teacher, num_classes=0, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE)
    student = build(whole.config.change(depth=len(BLOCKS), pool="cls+mean"))
    weights = {}
    for name, tensor in whole.state_dict().items():
        if name.startswith("encoder.blocks."):
            block, _, rest = name.removeprefix("encoder.blocks.").partition(".")
            if int(block) not in BLOCKS:
                continue
            name = f"encoder.blocks.{BLOCKS.index(int(block))}.{rest}"
        weights[name] = tensor
    student.load_state_dict(weights, assign=True)
    student.metadata = replace(whole.metadata, provenance={}, class_names=())
    vitrail.save(student, out)


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
