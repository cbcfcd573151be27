"""Memory of a step, and what a run does when memory is short."""

from dataclasses import replace

import pytest
import torch

from vitrail import ConfigError, create
from vitrail.training import auto_config, memory
from vitrail.training.auto_config import choose_accumulation
from vitrail.training.config import MachineSettings, OptimSettings, Settings
from vitrail.training.memory import activation_bytes

SETTINGS = Settings(
    batch_size=8, optim=OptimSettings(kind="adamw"), machine=MachineSettings(parts=1)
)
SHAPE = (1, 3, 32, 32)


def femto(**changes):
    return create("ViT-Femto/4", num_classes=3, **changes)


def chosen(monkeypatch, free: int, **machine):
    """Return accumulation, model and log, with `free` bytes for activations."""
    model, lines = femto(), []
    settings = replace(SETTINGS, machine=replace(SETTINGS.machine, **machine))
    own = memory.bytes_per_weight(settings) * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(auto_config, "free_bytes", lambda device: own + free)
    return choose_accumulation(settings, model, torch.device("cpu"), lines.append), model, lines


def test_memory_decides_about_checkpointing_and_accumulation(monkeypatch):
    accumulate, model, lines = chosen(monkeypatch, 2**40)
    assert (accumulate, model.checkpointing, lines) == (1, False, [])
    activations = activation_bytes(femto(), SHAPE)
    _, model, lines = chosen(monkeypatch, int(0.9 * activations / memory.USABLE))
    assert model.checkpointing
    assert "activation checkpointing enabled" in lines[0]
    assert not any("note" in line for line in lines)
    accumulate, _, lines = chosen(monkeypatch, 0)
    assert accumulate == 8
    assert "--optim.kind adafactor" in next(line for line in lines if line.startswith("note"))


def test_explicit_micro_batch(monkeypatch):
    accumulate, model, _ = chosen(monkeypatch, 0, micro_batch=4)
    assert (accumulate, model.checkpointing) == (2, False)
    with pytest.raises(ConfigError, match=r"micro_batch=6 does not divide the 8 .*; try 4"):
        chosen(monkeypatch, 0, micro_batch=6)


@pytest.mark.parametrize(
    ("share", "micro_batch", "checkpointing", "options"),
    [
        (8, 8, False, ["--machine.micro-batch 4", "--machine.checkpointing"]),
        (30, 15, False, ["--machine.micro-batch 6", "--machine.checkpointing"]),
        (8, 4, True, ["--machine.micro-batch 2 --machine.checkpointing"]),
        (8, 1, False, ["--machine.checkpointing"]),
        (8, 1, True, []),
    ],
)
def test_memory_options_are_valid_and_new(share, micro_batch, checkpointing, options):
    assert memory.memory_options(share, micro_batch, checkpointing=checkpointing) == options


@pytest.mark.parametrize(("kind", "each"), [("adamw", 12), ("sgd", 8), ("adafactor", 6)])
def test_bytes_per_weight_by_optimizer(kind, each):
    settings = Settings(optim=OptimSettings(kind=kind))
    assert memory.bytes_per_weight(settings) == each
    assert memory.bytes_per_weight(replace(settings, average=0.9)) == each + 4


@pytest.mark.parametrize("layout", memory.CGROUP_LIMITS)
def test_cgroup_limits_are_respected(monkeypatch, tmp_path, layout):
    limit, usage, reclaimable = layout
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.cgroup_free_bytes() == []
    assert memory.free_bytes(torch.device("cpu")) > 2**20
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / usage).write_text("400\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"other 7\n{reclaimable} 50\n")
    assert memory.cgroup_free_bytes() == [650]
    assert memory.free_bytes(torch.device("cpu")) == 650
    (tmp_path / limit).write_text("max\n")
    assert memory.cgroup_free_bytes() == []


def test_activation_bytes_scale_with_the_batch():
    model = femto()
    one, four = (activation_bytes(model, (n, *SHAPE[1:])) for n in (1, 4))
    assert 3.4 < four / one < 4.1
    tokens = 65 * 4  # and each block keeps some tens of values for each channel of each token
    assert 10 * tokens * 64 * 4 < one < 60 * tokens * 64 * 4
    model.checkpointing = True
    assert activation_bytes(model, SHAPE) < one / 3


def test_activation_bytes_leaves_the_model_unchanged():
    model = femto(stem="conv")
    before, shape = model.head.weight, (2, *SHAPE[1:])
    for mode in (True, False):
        real = activation_bytes(model.train(mode), shape)
        assert model.training is mode
    assert model.head.weight is before
    assert before.grad is None
    assert activation_bytes(model.to("meta"), shape) == pytest.approx(real, rel=0.15)
