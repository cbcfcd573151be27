"""What a step of Adafactor needs for a moment, beside what it remembers."""

import numpy as np
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from vitrail.planning.trace import Ledger
from vitrail.training.optim import Adafactor

SIDE = 64
MATRIX = 4 * SIDE * SIDE  # bytes


def bytes_for_a_moment(matrices: int) -> int:
    ledger = Ledger()
    with FakeTensorMode(allow_non_fake_inputs=True), ledger:
        parameters = [nn.Parameter(torch.empty(SIDE, SIDE)) for _ in range(matrices)]
        for parameter in parameters:
            parameter.grad = torch.empty(SIDE, SIDE)
        optimizer = Adafactor(parameters)
        optimizer.step()  # makes what is remembered
        begin = len(ledger.blocks)
        optimizer.step()
        changes = [ledger.bytes[b] * s for b, s in zip(ledger.blocks, ledger.signs, strict=True)]
    return int(np.cumsum(changes[begin:]).max())


def test_a_step_needs_room_for_one_matrix_at_a_time():
    few, many = bytes_for_a_moment(2), bytes_for_a_moment(12)
    assert few == many
    assert MATRIX < few < 6 * MATRIX
