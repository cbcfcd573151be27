"""What a run does when memory is short."""

from dataclasses import replace

import pytest
import torch

from vitrail import ConfigError, create
from vitrail.training import auto_config, memory
from vitrail.training.auto_config import choose_accumulation
from vitrail.training.config import MachineSettings, OptimSettings, Settings

SETTINGS = Settings(
    batch_size=8, optim=OptimSettings(kind="adamw"), machine=MachineSettings(parts=1)
)


def chosen(monkeypatch, free: int, settings=SETTINGS):
    """Parts of a batch, the model, and what was said, with so many bytes for activations."""
    model, lines = create("ViT-Femto/4", num_classes=3), []
    each = memory.bytes_per_weight(settings)
    own = each * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(auto_config, "free_bytes", lambda device: own + free)
    return choose_accumulation(settings, model, torch.device("cpu"), lines.append), model, lines


def test_with_room_enough_nothing_is_said_or_done(monkeypatch):
    parts, model, lines = chosen(monkeypatch, 2**40)
    assert (parts, model.checkpointing, lines) == (1, False, [])


def test_where_one_picture_does_not_fit_blocks_are_computed_twice(monkeypatch):
    kept = memory.activation_bytes(create("ViT-Femto/4", num_classes=3), (1, 3, 32, 32))
    _, model, lines = chosen(monkeypatch, int(0.9 * kept / memory.USABLE))
    assert model.checkpointing
    assert "activation checkpointing enabled" in lines[0]
    assert not any("note" in line for line in lines)


def test_where_not_even_that_helps_it_is_told_before_the_first_step(monkeypatch):
    parts, _, lines = chosen(monkeypatch, 0)
    assert parts == 8
    assert "--optim.kind adafactor" in next(line for line in lines if line.startswith("note"))


def test_a_micro_batch_that_was_asked_for_is_taken(monkeypatch):
    settings = replace(SETTINGS, machine=replace(SETTINGS.machine, micro_batch=4))
    parts, model, _ = chosen(monkeypatch, 0, settings)
    assert (parts, model.checkpointing) == (2, False)


def test_a_micro_batch_that_leaves_some_over_is_refused_with_one_that_does_not(monkeypatch):
    settings = replace(SETTINGS, machine=replace(SETTINGS.machine, micro_batch=6))
    with pytest.raises(
        ConfigError, match=r"machine\.micro_batch=6 does not divide the 8 .*; try 4"
    ):
        chosen(monkeypatch, 0, settings)


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
def test_whatever_is_advised_is_possible_and_new(share, micro_batch, checkpointing, options):
    assert memory.memory_options(share, micro_batch, checkpointing=checkpointing) == options


@pytest.mark.parametrize(("kind", "each"), [("adamw", 12), ("sgd", 8), ("adafactor", 6)])
def test_what_an_optimizer_remembers_is_counted(kind, each):
    settings = Settings(optim=OptimSettings(kind=kind))
    assert memory.bytes_per_weight(settings) == each
    assert memory.bytes_per_weight(replace(settings, average=0.9)) == each + 4


@pytest.mark.parametrize("layout", memory.CGROUP_LIMITS)
def test_a_container_has_what_its_limit_leaves(monkeypatch, tmp_path, layout):
    limit, taken, droppable = layout
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    assert memory.cgroup_free_bytes() == []
    (tmp_path / limit).parent.mkdir(exist_ok=True)
    (tmp_path / limit).write_text("1000\n")
    (tmp_path / taken).write_text("400\n")
    (tmp_path / limit).with_name("memory.stat").write_text(f"other 7\n{droppable} 50\n")
    assert memory.cgroup_free_bytes() == [650]
    assert memory.free_bytes(torch.device("cpu")) == 650
    (tmp_path / limit).write_text("max\n")
    assert memory.cgroup_free_bytes() == []
