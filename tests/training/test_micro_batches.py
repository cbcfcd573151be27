"""How much a step keeps in memory."""

import pytest
import torch

from vitrail import create
from vitrail.training.memory import activation_bytes, free_bytes, largest_micro_batch


def test_what_is_kept_grows_with_the_batch_and_not_with_the_weights():
    model = create("ViT-Femto/4", num_classes=3)
    one, four = (activation_bytes(model, (n, 3, 32, 32)) for n in (1, 4))
    assert 3.4 < four / one < 4.1
    tokens = 65 * 4  # and each block keeps some tens of values for each channel of each token
    assert 10 * tokens * 64 * 4 < one < 60 * tokens * 64 * 4


def test_the_model_itself_is_left_alone():
    model = create("ViT-Mu/4", num_classes=3)
    before = model.head.weight
    activation_bytes(model, (1, 3, 32, 32))
    assert model.head.weight is before
    assert before.grad is None
    assert model.training
    activation_bytes(model.eval(), (1, 3, 32, 32))
    assert not model.training


def test_a_model_without_memory_is_counted_nearly_as_one_with_it():
    model = create("ViT-Femto/4", num_classes=3, stem="conv")
    real = activation_bytes(model, (2, 3, 32, 32))
    assert activation_bytes(model.to("meta"), (2, 3, 32, 32)) == pytest.approx(real, rel=0.15)


def test_checkpointing_keeps_less():
    model = create("ViT-Femto/4", num_classes=3)
    all_of_it = activation_bytes(model, (2, 3, 32, 32))
    model.checkpointing = True
    assert activation_bytes(model, (2, 3, 32, 32)) < all_of_it / 3


def test_a_micro_batch_divides_its_share_and_fits():
    assert largest_micro_batch(512, 10, 10_000) == 512
    assert largest_micro_batch(512, 100, 10_000) == 32  # 60 would fit; 32 divides
    assert largest_micro_batch(7, 100, 500) == 1
    assert largest_micro_batch(4, 10**12, 10) == 1  # too little for one: try all the same
    assert free_bytes(torch.device("cpu")) > 2**20
