"""Train the same small ViT with each kind of position embedding: table 8 of the paper, in small.

    python examples/compare_positions.py                 photographs of hands that come along
    python examples/compare_positions.py pictures/       your own: a folder for each class

Every model has the same time, one run each. `vitrail reproduce table8` runs several seeds.
"""

import sys
import tempfile
from pathlib import Path

import vitrail

KINDS = ("none", "learned", "sincos-2d", "relative")
# Patches are cut, not convolved: a convolution would let a model see where it is by itself.
MODEL = {"name": "ViT-Pico/4", "image_size": 32, "stem": "patches", "pool": "mean"}
BAR = 40  # letters


def main(data="builtin:sign-digits", out=None, minutes=0.4, kinds=KINDS):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training {len(kinds)} models on {data}, {60 * minutes:.0f} seconds each")
    found = {}
    for kind in kinds:
        model = {**MODEL, "position": kind}
        result = vitrail.train(data, out / kind, minutes=minutes, model=model)
        split = [*result.outcomes, "train"][0]  # what it has not learned from, if there is any
        accuracy = vitrail.evaluate(result.folder, data, split).estimates["accuracy"]
        bar = "█" * round(BAR * accuracy.value)
        interval = f"{accuracy.low:.1%} to {accuracy.high:.1%}"
        print(f"  {kind:10} {accuracy.value:6.1%}  ({interval})  {bar}")
        found[kind] = accuracy
    best = max(found, key=lambda kind: found[kind].value)
    alike = [kind for kind in found if kind != best and found[kind].high >= found[best].low]
    print(f"best: {best!r}; not clearly worse: {', '.join(alike) or 'none of the others'}")
    print(f"the models and their reports: {out}")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
