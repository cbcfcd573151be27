"""Train a small ViT with each kind of position embedding: a small version of the paper's table 8.

    python examples/compare_positions.py                 the built-in photos of hands
    python examples/compare_positions.py pictures/       your own: one subfolder per class

Every model trains for the same time, one run each. `vitrail reproduce table8` runs several seeds.
"""

import sys
import tempfile
from pathlib import Path

import vitrail

KINDS = ("none", "learned", "sincos-2d", "relative")
# No convolutional stem: its zero padding would reveal the position.
MODEL = {"name": "ViT-Pico/4", "image_size": 32, "stem": "patches", "pool": "mean"}
BAR = 40  # characters


def main(data="builtin:sign-digits", out=None, minutes=0.4, kinds=KINDS):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training {len(kinds)} models on {data}, {60 * minutes:.0f} seconds each")
    estimates = {}
    for kind in kinds:
        model = {**MODEL, "position": kind}
        result = vitrail.train(data, out / kind, minutes=minutes, model=model)
        split = [*result.outcomes, "train"][0]  # a held-out split, if there is one
        accuracy = vitrail.evaluate(result.folder, data, split).estimates["accuracy"]
        bar = "█" * round(BAR * accuracy.value)
        interval = f"{accuracy.low:.1%} to {accuracy.high:.1%}"
        print(f"  {kind:10} {accuracy.value:6.1%}  ({interval})  {bar}")
        estimates[kind] = accuracy
    best = max(estimates, key=lambda kind: estimates[kind].value)
    similar = [
        kind for kind in estimates if kind != best and estimates[kind].high >= estimates[best].low
    ]
    print(f"best: {best!r}; not clearly worse: {', '.join(similar) or 'none'}")
    print(f"the models and their reports: {out}")
    return estimates


if __name__ == "__main__":
    main(*sys.argv[1:2])
