"""Explain the most confident mistake of a model.

    python examples/explain_a_mistake.py                 the built-in photos of hands
    python examples/explain_a_mistake.py pictures/       your own: one subfolder per class

Draws two relevance maps of the same image: for the predicted class and for the label.
"""

import sys
import tempfile
from pathlib import Path

from PIL import Image

import vitrail


def main(data="builtin:sign-digits", out=None, minutes=0.5):
    out = Path(out or tempfile.mkdtemp(prefix="vitrail-"))
    print(f"training on {data}, {60 * minutes:.0f} seconds")
    result = vitrail.train(data, out / "model", minutes=minutes)
    split = [*result.outcomes, "train"][0]  # a held-out split, if there is one
    dataset = vitrail.open_dataset(data, split)
    evaluation = vitrail.evaluate(result.folder, dataset)
    mistakes = evaluation.mistakes  # most confident first
    print(f"accuracy {evaluation.accuracy:.1%} (n={evaluation.samples})")
    if not mistakes:
        print("no mistakes; train for less time")
        return None

    worst = mistakes[0]
    predicted, label = dataset.classes[worst.predicted], dataset.classes[worst.label]
    print(f"{worst.name}: label {label!r}, predicted {predicted!r}: ", end="")
    print(f"confidence {worst.confidence:.1%}, label probability {worst.label_probability:.1%}")

    image = out / f"mistake{Path(worst.name).suffix or '.png'}"
    data = dataset[worst.index].data  # the bytes of a file, or an array
    if isinstance(data, bytes):
        image.write_bytes(data)
    else:
        Image.fromarray(data.squeeze()).save(image)
    folder, classes = out / "inspection", [predicted, label]
    inspection = vitrail.inspect_model(result.folder, [image], out=folder, classes=classes)
    for name, values in inspection.images[0].class_maps["relevance"].items():
        row, column = divmod(int(values.argmax()), values.shape[1])
        print(f"  {name!r} is most relevant in row {row + 1} of {values.shape[0]}, ", end="")
        print(f"column {column + 1} of {values.shape[1]}")

    print(f"the image: {image}")
    print(f"the maps, drawn over it: {folder}/report.html")
    return inspection


if __name__ == "__main__":
    main(*sys.argv[1:2])
