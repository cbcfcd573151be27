"""Train on a folder of images, evaluate the model, and classify a few of them.

    python examples/train_a_folder.py                 the built-in photos of hands
    python examples/train_a_folder.py pictures/       your own: one subfolder per class

Model and optimizer are chosen from the data.
"""

import sys
import tempfile
from pathlib import Path

import vitrail


class Printing(vitrail.Callback):
    """Print the accuracy during training."""

    def on_evaluate(self, row):
        metrics = {name: value for name, value in row.items() if name.endswith("/accuracy")}
        text = ", ".join(f"{name} {value:.1%}" for name, value in metrics.items())
        print(f"  step {row['step']}, after {row['seconds']:.0f} s: {text}")


def main(data="builtin:sign-digits", out=None, minutes=1.0):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training on {data}")
    result = vitrail.train(data, out / "model", minutes=minutes, callback=Printing())
    if not result.finished:  # Ctrl-C
        sys.exit(f"interrupted at step {result.step}; the state is in {result.folder}")

    split = [*result.outcomes, "train"][0]  # a held-out split, if there is one
    evaluation = vitrail.evaluate(result.folder, data, split)
    accuracy = evaluation.estimates["accuracy"]
    interval = f"95 % CI {100 * accuracy.low:.1f}-{100 * accuracy.high:.1f}"
    print(f"{split} accuracy {accuracy.value:.1%} ({interval}, n={evaluation.samples})")
    weakest = min((c for c in evaluation.classes if c.support), key=lambda c: c.recall)
    print(f"lowest recall: {weakest.name!r}, {weakest.recall:.0%} (n={weakest.support})")

    dataset = vitrail.open_dataset(data, split)
    predictor = vitrail.Predictor(result.folder)
    for index in range(0, len(dataset), len(dataset) // 3 + 1):
        sample = dataset[index]
        prediction = predictor(sample.data)  # a path, bytes, a Pillow image or an array
        print(f"  {sample.name}: {prediction.label!r}, confidence {prediction.probability:.1%}")

    print(f"curves and the worst mistakes: {result.folder / 'report.html'}")
    print(f"the model: vitrail.load('{result.folder}')")
    return evaluation


if __name__ == "__main__":
    main(*sys.argv[1:2])
