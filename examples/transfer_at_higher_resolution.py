"""Pre-train at a low resolution and fine-tune at a higher one: section 3.2 of the paper.

    python examples/transfer_at_higher_resolution.py              the built-in photos
    python examples/transfer_at_higher_resolution.py pictures/    your own: one subfolder per class

Doubling the resolution gives four times as many patches of the same size. All weights are reused
unchanged, except for the position embeddings, which are interpolated.
"""

import sys
import tempfile
from pathlib import Path

import vitrail

MODEL = {"name": "ViT-Pico/8", "stem": "conv", "pool": "mean"}
SMALL, LARGE = 32, 64  # pixels along each side


def main(data="builtin:sign-digits", out=None, minutes=0.6):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"pre-training at {SMALL} pixels, {60 * minutes:.0f} seconds")
    first = vitrail.train(
        data, out / "small", minutes=minutes, model={**MODEL, "image_size": SMALL}
    )
    interpolated = vitrail.load(first.folder, image_size=LARGE, log=print)

    print(f"fine-tuning at {LARGE} pixels, {60 * minutes:.0f} seconds")
    second = vitrail.train(
        data,
        out / "large",
        start=str(first.folder),
        minutes=minutes,
        model={"image_size": LARGE},
    )

    split = [*second.outcomes, "train"][0]  # a held-out split, if there is one
    rows = {
        f"{SMALL} pixels, as pre-trained": first.folder,
        f"{LARGE} pixels, positions interpolated": interpolated,
        f"{LARGE} pixels, fine-tuned": second.folder,
    }
    accuracies = {}
    for name, model in rows.items():
        accuracy = vitrail.evaluate(model, data, split).estimates["accuracy"]
        print(f"  {name:35}  {accuracy.value:6.1%}   ({accuracy.low:.1%} to {accuracy.high:.1%})")
        accuracies[name] = accuracy.value
    print(f"the models and their reports: {first.folder} and {second.folder}")
    return accuracies


if __name__ == "__main__":
    main(*sys.argv[1:2])
