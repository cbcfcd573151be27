"""Train on a folder of pictures, measure the model, and ask it about a few of them.

    python examples/train_a_folder.py                 photographs of hands that come along
    python examples/train_a_folder.py pictures/       your own: a folder for each class

Nothing is said about the model or the optimizer: that is chosen from the data.
"""

import sys
import tempfile
from pathlib import Path

import vitrail


class Printing(vitrail.Callback):
    """Print the accuracy during training."""

    def on_evaluate(self, row):
        found = {name: value for name, value in row.items() if name.endswith("/accuracy")}
        told = ", ".join(f"{name} {value:.1%}" for name, value in found.items())
        print(f"  step {row['step']}, after {row['seconds']:.0f} s: {told}")


def main(data="builtin:sign-digits", out=None, minutes=1.0):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training on {data}")
    result = vitrail.train(data, out / "model", minutes=minutes, callback=Printing())

    split = [*result.outcomes, "train"][0]  # what it has not learned from, if there is any
    findings = vitrail.evaluate(result.folder, data, split)
    accuracy = findings.estimates["accuracy"]
    interval = f"95 % CI {100 * accuracy.low:.1f}-{100 * accuracy.high:.1f}"
    print(f"{split} accuracy {accuracy.value:.1%} ({interval}, n={findings.samples})")
    weakest = min((c for c in findings.classes if c.support), key=lambda c: c.recall)
    print(f"lowest recall: {weakest.name!r}, {weakest.recall:.0%} (n={weakest.support})")

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
