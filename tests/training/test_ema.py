"""Exponential moving average of the weights."""

import pytest
import torch
from torch import nn

from vitrail.training.config import Settings
from vitrail.training.loop import TrainState, optimizer_step
from vitrail.training.optim import EMA
from vitrail.training.schedules import Schedule


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def perturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_ema_matches_the_recurrence():
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.9)
    expected = {name: value.double() for name, value in weights(model).items()}
    for _ in range(5):
        perturb(model)
        average.update()
        now = weights(model)
        expected = {name: 0.9 * value + 0.1 * now[name] for name, value in expected.items()}
    for name, value in average.values.items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-6)


def test_ema_of_constant_weights_is_bit_exact():
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.99)
    for _ in range(10):
        average.update()
    for name, value in weights(model).items():
        assert torch.equal(average.values[name], value)


def test_ema_has_its_own_storage():
    model = layers()
    first = weights(model)
    average = EMA(dict(model.named_parameters()), decay=0.5)
    perturb(model)
    for name, value in average.values.items():
        assert torch.equal(value, first[name])
        assert not value.requires_grad


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_restored_bit_exactly(fails):
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.5)
    perturb(model)
    average.update()
    own, averaged = weights(model), {name: v.clone() for name, v in average.values.items()}
    memory = [p.data_ptr() for p in model.parameters()]
    try:
        with average.applied():
            assert all(torch.equal(v, averaged[name]) for name, v in weights(model).items())
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert all(torch.equal(value, own[name]) for name, value in weights(model).items())
    assert all(torch.equal(value, averaged[name]) for name, value in average.values.items())
    assert [p.data_ptr() for p in model.parameters()] == memory


def test_applying_the_ema_does_not_affect_training():
    results = []
    for evaluate in (False, True):
        model = layers()
        average = EMA(dict(model.named_parameters()), decay=0.5)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(3):
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            if evaluate:
                with average.applied(), torch.inference_mode():
                    model(torch.ones(2, 3))
        results.append([*weights(model).values(), *average.values.values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("gradient", [1.0, torch.inf])
def test_skipped_float16_step_does_not_update_the_ema(gradient):
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.5)
    before = {name: value.clone() for name, value in average.values.items()}
    perturb(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    state = TrainState(
        objective=model,
        wrapped=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        schedule=Schedule(settings=Settings(), length=1),
        ema=average,
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )
    state.scaler.scale(torch.ones(()))  # as the loss was
    optimizer_step(state, torch.ones(()), [])
    same = all(torch.equal(average.values[name], value) for name, value in before.items())
    assert same == (gradient == torch.inf)
