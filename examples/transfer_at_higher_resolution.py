"""Pre-train with small pictures and fine-tune with larger ones: section 3.2 of the paper.

    python examples/transfer_at_higher_resolution.py              photographs that come along
    python examples/transfer_at_higher_resolution.py pictures/    your own: a folder for each class

Twice as many pixels along each side are four times as many patches of the same size. The weights
fit as they are, except for the positions, which are stretched to the larger grid.
"""

import sys
import tempfile
from pathlib import Path

import vitrail

MODEL = {"name": "ViT-Pico/8", "stem": "conv", "pool": "mean"}
SMALL, LARGE = 32, 64  # pixels along each side


def main(data="builtin:sign-digits", out=None, minutes=0.6):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"pre-training with {SMALL} pixels, {60 * minutes:.0f} seconds")
    first = vitrail.train(
        data, out / "small", minutes=minutes, model={**MODEL, "image_size": SMALL}
    )
    stretched = vitrail.load(first.folder, image_size=LARGE, log=print)

    print(f"fine-tuning with {LARGE} pixels, {60 * minutes:.0f} seconds")
    second = vitrail.train(
        data,
        out / "large",
        start=str(first.folder),
        minutes=minutes,
        model={"image_size": LARGE},
    )

    split = [*second.outcomes, "train"][0]  # what they have not learned from, if there is any
    rows = {
        f"{SMALL} pixels, as pre-trained": first.folder,
        f"{LARGE} pixels, positions stretched": stretched,
        f"{LARGE} pixels, fine-tuned": second.folder,
    }
    accuracies = {}
    for name, model in rows.items():
        found = vitrail.evaluate(model, data, split).estimates["accuracy"]
        print(f"  {name:32}  {found.value:6.1%}   ({found.low:.1%} to {found.high:.1%})")
        accuracies[name] = found.value
    print(f"the models and their reports: {first.folder} and {second.folder}")
    return accuracies


if __name__ == "__main__":
    main(*sys.argv[1:2])
