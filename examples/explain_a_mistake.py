"""Take the mistake a model is surest of, and see where it saw what.

    python examples/explain_a_mistake.py                 photographs of hands that come along
    python examples/explain_a_mistake.py pictures/       your own: a folder for each class

Two maps of the same picture are made: where the model sees the class it named, and where it sees
the true one.
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
    split = [*result.outcomes, "train"][0]  # what it has not learned from, if there is any
    source = vitrail.open_dataset(data, split)
    findings = vitrail.evaluate(result.folder, source)
    mistakes = findings.mistakes  # most confident first
    print(f"accuracy {findings.accuracy:.1%} (n={findings.samples})")
    if not mistakes:
        print("there is no mistake to explain; try less time")
        return None

    worst = mistakes[0]
    named, true = source.classes[worst.predicted], source.classes[worst.label]
    print(f"{worst.name} shows {true!r} and is predicted as {named!r}: ", end="")
    print(f"confidence {worst.confidence:.1%}, label probability {worst.label_probability:.1%}")

    picture = out / f"mistake{Path(worst.name).suffix or '.png'}"
    data = source[worst.index].data  # the bytes of a file, or an array
    if isinstance(data, bytes):
        picture.write_bytes(data)
    else:
        Image.fromarray(data.squeeze()).save(picture)
    inside = out / "inspection"
    found = vitrail.inspect_model(result.folder, [picture], out=inside, classes=[named, true])
    for name, values in found.images[0].class_maps["relevance"].items():
        row, column = divmod(int(values.argmax()), values.shape[1])
        print(f"  {name!r} is seen most in row {row + 1} of {values.shape[0]}, ", end="")
        print(f"column {column + 1} of {values.shape[1]}")

    print(f"the picture: {picture}")
    print(f"the maps, drawn over it: {inside}/report.html")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
