"""Transfer from the built-in weights, end to end, on built-in photographs."""

import re

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import Recorder
from vitrail.checkpoints import builtin
from vitrail.models.init import initialize
from vitrail.models.vit import build
from vitrail.probing.features import features_of, pixels_of
from vitrail.probing.fewshot import draw, try_shots

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not builtin.references(), reason="this checkout has no built-in weights"),
]
DATA = "builtin:sign-digits"
DRAWS = 10


@pytest.fixture(scope="module")
def model():
    return vitrail.load("builtin:vit-photos")


@pytest.fixture(scope="module")
def parts():
    """Some photographs of each class to draw from, and others to test on."""
    every = vitrail.open_dataset(DATA, "all")
    rows = draw(np.asarray(every.labels()), len(every.classes), 40, seed=0).reshape(-1, 40)
    return [every.subset(np.sort(part.ravel())) for part in (rows[:, :20], rows[:, 20:])]


def five_shots(features):
    (row,) = try_shots(*features, shots=[5], seeds=DRAWS)
    return row[-1]  # with the best l2


def test_model_is_as_its_card_says(model):
    assert model.config.num_classes == 0
    assert (model.config.image_size, model.config.num_features) == (120, 384)
    folder = builtin.find("builtin:vit-photos")
    assert (folder / "model.safetensors").stat().st_size <= 6_000_000
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# vit-photos")
    assert not {"data", "samples"} & model.metadata.provenance.keys()


def test_five_images_per_class_beat_pixels_and_random_weights(model, parts):
    untrained = build(model.config, device="cpu")
    initialize(untrained, generator=torch.Generator().manual_seed(0))
    untrained.metadata = model.metadata
    trained, random = (
        five_shots([features_of(each, part, cache=False) for part in parts])
        for each in (model, untrained.eval())
    )
    pixels = five_shots([pixels_of(part) for part in parts])
    assert trained.interval[0] > random.interval[1]
    assert trained.interval[0] > pixels.interval[1]


def test_fine_tuning_is_not_worse_than_its_probe(parts, tmp_path):
    callback = Recorder()
    for row in range(len(parts[0])):
        sample = parts[0][row]
        path = tmp_path / "photos" / parts[0].classes[sample.label] / f"{row}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(sample.data)
    options = {"start": "builtin:vit-photos", "steps": 6, "callback": callback}
    result = vitrail.train(tmp_path / "photos", tmp_path / "run", **options)
    (probe,) = (x for x in callback.lines if x.startswith("linear probe of the frozen model"))
    name, accuracy = re.search(r": (\w+) accuracy ([\d.]+) %", probe).groups()
    assert round(100 * result.outcomes[name].accuracy, 1) >= float(accuracy)
    assert vitrail.load(tmp_path / "run").metadata.class_names == parts[0].classes
