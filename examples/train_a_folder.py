"""Train on a folder of pictures, measure the model, and ask it about a few of them.

    python examples/train_a_folder.py                 photographs of hands that come along
    python examples/train_a_folder.py pictures/       your own: a folder for each class

Nothing is said about the model or the optimizer: that is chosen from the data.
"""

import sys
import tempfile
from pathlib import Path

import vitrail


class Printing(vitrail.Watch):
    """Hears how a run goes; this one prints how good the model is along the way."""

    def evaluated(self, row):
        found = {name: value for name, value in row.items() if name.endswith("/accuracy")}
        told = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
        print(f"  step {row['step']}, after {row['seconds']:.0f} s: {told}")


def main(data="builtin:sign-digits", out=None, minutes=1.0):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training on {data}")
    result = vitrail.train(data, out / "model", minutes=minutes, watch=Printing())

    split = [*result.outcomes, "train"][0]  # what it has not learned from, if there is any
    findings = vitrail.evaluate(result.folder, data, split)
    accuracy = findings.estimates["accuracy"]
    print(f"accuracy on {findings.samples} pictures of {split}: {accuracy.value:.1%}; ", end="")
    print(f"19 times of 20 it lies between {accuracy.low:.1%} and {accuracy.high:.1%}")
    weakest = min((c for c in findings.classes if c.pictures), key=lambda found: found.recall)
    print(f"the weakest class is {weakest.name!r}: {weakest.recall:.0%} of it are found")

    source = vitrail.open_dataset(data, split)
    predictor = vitrail.Predictor(result.folder)
    for index in range(0, len(source), len(source) // 3 + 1):
        picture = source[index]
        answer = predictor(picture.data)  # a path, bytes, a Pillow image or an array
        print(f"  {picture.name}: {answer.label!r}, {answer.probability:.1%} sure")

    print(f"curves and the worst mistakes: {result.folder / 'report.html'}")
    print(f"the model: vitrail.load('{result.folder}')")
    return findings


if __name__ == "__main__":
    main(*sys.argv[1:2])
