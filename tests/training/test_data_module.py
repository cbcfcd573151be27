"""Preparation of micro-batches."""

import numpy as np
import pytest
import torch

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing, Preprocessing
from vitrail.errors import ConfigError
from vitrail.training.data_module import batch_preparation


def targets_at(step, after):
    mixing = Mixing(cutmix=1.0, after=after)
    preprocessing = Preprocessing(size=(8, 8))
    prepare = batch_preparation(preprocessing, mixing, 4, torch.device("cpu"), steps_per_epoch=10)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    batch = Batch(images, torch.arange(4), torch.arange(4))
    return prepare(batch, np.random.default_rng(0), step)[1]


@pytest.mark.parametrize(
    ("step", "after", "mixed"), [(0, 0, True), (29, 3, False), (30, 3, True), (25, 2.5, True)]
)
def test_mixing_starts_after_the_configured_epochs(step, after, mixed):
    assert targets_at(step, after).ndim == (2 if mixed else 1)


def test_negative_mixing_start_raises():
    with pytest.raises(ConfigError, match="after=-1"):
        Mixing(after=-1)
