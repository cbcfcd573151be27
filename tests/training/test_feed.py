"""Micro-batches are made ready as the step they are for wants it."""

import numpy as np
import pytest
import torch

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing, Preprocessing
from vitrail.errors import ConfigError
from vitrail.training.feed import preparation


def targets_at(step, after):
    mixing = Mixing(cutmix=1.0, after=after)
    how = Preprocessing(size=(8, 8))
    prepare = preparation(how, mixing, 4, torch.device("cpu"), epoch=10)
    pictures = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(pictures, torch.arange(4), torch.arange(4))
    return prepare(batch, np.random.default_rng(0), step)[1]


@pytest.mark.parametrize(
    ("step", "after", "mixed"), [(0, 0, True), (29, 3, False), (30, 3, True), (25, 2.5, True)]
)
def test_pictures_are_mixed_once_they_are_known(step, after, mixed):
    assert targets_at(step, after).ndim == (2 if mixed else 1)


def test_mixing_before_the_beginning_is_refused():
    with pytest.raises(ConfigError, match="after=-1"):
        Mixing(after=-1)
