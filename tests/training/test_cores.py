"""Parts of a batch on cores of their own learn what the whole batch learns."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tiny_runs import SETTINGS, Notebook, tiny_run, write_colors
from vitrail import create
from vitrail.cli.train import Train
from vitrail.errors import ConfigError
from vitrail.models.registry import configuration
from vitrail.training import cores, memory
from vitrail.training.cores import EachCoreAPart, parts_for, pays
from vitrail.training.memory import KEPT, keep_memory
from vitrail.training.objectives import Classification
from vitrail.training.run import run
from vitrail.training.settings import LossSettings, MachineSettings, ModelSettings, Settings

CPU = torch.device("cpu")


@pytest.fixture
def any_size(monkeypatch):
    """However little a part is."""
    monkeypatch.setattr(cores, "ENOUGH", 0)


@pytest.fixture
def objective():
    torch.manual_seed(0)
    model = create("ViT-Mu/4", image_size=8, num_classes=3).double()
    nn.init.normal_(model.head.weight)  # at first it is zero, and so are most gradients
    return Classification(model, LossSettings(kind="softmax"))


def batch(count):
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, 8, 8, generator=generator, dtype=torch.float64)
    return images, torch.arange(count) % 3


def gradients(objective, loss):
    objective.zero_grad()
    loss.backward()
    return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("count", "parts"), [(6, 2), (7, 2), (7, 3), (4, 4)])
def test_parts_have_the_loss_and_the_gradients_of_the_whole(any_size, objective, count, parts):
    whole = objective(*batch(count))
    expected = gradients(objective, whole)
    loss = EachCoreAPart(objective, parts)(*batch(count))
    found = gradients(objective, loss)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13)


def test_autocast_reaches_the_threads_of_all_parts(any_size):
    torch.manual_seed(0)
    model = create("ViT-Mu/4", image_size=8, num_classes=3)
    nn.init.normal_(model.head.weight)
    objective = Classification(model, LossSettings(kind="softmax"))
    images, labels = batch(6)
    images = images.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(objective, objective(images, labels))
        found = gradients(objective, EachCoreAPart(objective, 2)(images, labels))
    exact = gradients(objective, objective(images, labels))
    for name in ("model.head.weight", "model.encoder.blocks.0.mlp.fc1.weight"):
        close = (found[name] - expected[name]).norm() / exact[name].norm()
        rounded = (exact[name] - expected[name]).norm() / exact[name].norm()
        assert close < 0.05  # bfloat16 has 8 bits
        assert rounded > 1e-4  # and so autocast was on


def test_mixed_labels_are_cut_with_their_pictures(any_size, objective):
    images, _ = batch(5)
    shares = torch.rand(5, 3, dtype=torch.float64).softmax(dim=1)
    expected = gradients(objective, objective(images, shares))
    found = gradients(objective, EachCoreAPart(objective, 2)(images, shares))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13)


def test_accumulated_and_scaled_losses_give_scaled_sums(any_size, objective):
    parted = EachCoreAPart(objective, 2)
    once = gradients(objective, parted(*batch(6)))
    objective.zero_grad()
    for _ in range(3):
        (parted(*batch(6)) / 2).backward()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(parameter.grad, 1.5 * once[name], rtol=1e-9, atol=1e-13)


def test_copies_follow_the_weights_whoever_changes_them_and_however(any_size, objective):
    parted = EachCoreAPart(objective, 2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(parted(*batch(6)), objective(*batch(6)), rtol=1e-12, atol=0)
    for parameter in objective.parameters():
        parameter.data = parameter.data * 0.5
    torch.testing.assert_close(parted(*batch(6)), objective(*batch(6)), rtol=1e-12, atol=0)


def test_frozen_weights_stay_without_gradient(any_size, objective):
    objective.model.stem.requires_grad_(False)
    found = gradients(objective, EachCoreAPart(objective, 2)(*batch(6)))
    assert not any("stem" in name for name in found)
    assert any("encoder" in name for name in found)


def test_weights_are_found_once(objective):
    parted = EachCoreAPart(objective, 2)
    assert len(list(parted.parameters())) == len(list(objective.parameters()))


def test_gradients_are_given_away_once(any_size, objective):
    loss = EachCoreAPart(objective, 2)(*batch(6))
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError):
        loss.backward()


def test_a_part_that_is_little_work_is_not_worth_a_core():
    config = create("ViT-Femto/4", num_classes=3).config  # 64 channels
    assert pays(config, (128, 3, 32, 32), 2)
    assert not pays(config, (16, 3, 32, 32), 2)
    assert not pays(config, (128, 3, 8, 8), 2)


def test_an_error_in_a_part_is_the_error_of_the_step(any_size, objective):
    images, labels = batch(6)
    with pytest.raises(IndexError, match="out of bounds"):
        EachCoreAPart(objective, 2)(images, labels + 3)


@pytest.fixture
def two_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def test_a_run_in_parts_learns_what_a_whole_one_does_and_repeats_to_the_bit(
    any_size, two_threads, tmp_path
):
    data = write_colors(tmp_path / "colors.npz")
    books = {}
    for name, parts in (("whole", 1), ("parts", 2), ("again", None)):
        books[name] = Notebook()
        machine = MachineSettings(parts=parts)
        tiny_run(data, tmp_path / name, watch=books[name], machine=machine)
    losses = {name: [row["loss"] for row in book.rows] for name, book in books.items()}
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-5)
    assert losses["parts"] == losses["again"]  # two cores, so two parts are chosen


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("ViT-Mu/4", {"objective": "masked-patches"}, "learn classes"),
        ("ViT-Mu/4", {"loss": LossSettings(teacher="x")}, "a teacher"),
        ("Mixer-S/16", {}, "Vision Transformers"),
    ],
)
def test_what_needs_the_batch_whole_gets_it_whole(two_threads, model, changes, reason):
    config, settings = configuration(model), Settings(**changes)
    assert parts_for(config, settings, torch.float32, CPU) == 1
    forced = replace(settings, machine=MachineSettings(parts=2))
    with pytest.raises(ConfigError, match=f"machine.parts=2 cannot be: .*{reason}"):
        parts_for(config, forced, torch.float32, CPU)


def test_dropout_bfloat16_and_one_core_keep_the_batch_whole(two_threads):
    config = create("ViT-Mu/4", num_classes=3).config
    settings = Settings(model=ModelSettings(name="ViT-Mu/4"))
    assert parts_for(config, settings, torch.float32, CPU) == 2
    assert parts_for(config.change(dropout=0.1), settings, torch.float32, CPU) == 1
    assert parts_for(config, settings, torch.bfloat16, CPU) == 2
    assert parts_for(config, settings, torch.float16, CPU) == 1
    torch.set_num_threads(1)
    assert parts_for(config, settings, torch.float32, CPU) == 1


def test_processes_have_their_parts_already(two_threads, monkeypatch):
    monkeypatch.setattr("vitrail.distributed.world_size", lambda: 2)
    config, settings = configuration("ViT-Mu/4"), Settings()
    assert parts_for(config, settings, torch.float32, CPU) == 1
    forced = replace(settings, machine=MachineSettings(parts=2))
    with pytest.raises(ConfigError, match="each process has a part"):
        parts_for(config, forced, torch.float32, CPU)


def test_settings_of_malloc_that_stand_outside_are_left_alone(monkeypatch):
    called = []
    library = SimpleNamespace(mallopt=lambda *setting: called.append(setting))
    monkeypatch.setattr("ctypes.CDLL", lambda name: library)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    keep_memory()
    assert called == []
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    keep_memory()
    assert len(called) == 3


@pytest.mark.parametrize(("whose", "calls"), [("the library's", 0), ("the command's", 3)])
def test_malloc_is_set_by_the_command_and_never_by_the_library(
    whose, calls, tmp_path, monkeypatch, two_threads
):
    data, called = write_colors(tmp_path / "colors.npz"), []
    library = SimpleNamespace(mallopt=lambda *setting: called.append(setting))
    for name in KEPT:
        monkeypatch.delenv(name, raising=False)
    settings = replace(SETTINGS, steps=2, machine=MachineSettings(parts=2))
    command = Train(data=str(data), out=tmp_path / "run", settings=settings, json=True)
    order = command.order()
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="linux"))
    assert run(order).finished if calls == 0 else command.run() == 0
    assert len(called) == calls


def test_less_than_one_part_is_refused():
    with pytest.raises(ConfigError, match="parts=0 must be 1 or more"):
        replace(SETTINGS, machine=MachineSettings(parts=0))
