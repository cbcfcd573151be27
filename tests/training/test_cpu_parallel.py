"""CPU data parallelism matches the whole batch."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tiny_runs import SETTINGS, Recorder, tiny_run, write_colors
from vitrail import create
from vitrail.cli.train import Train
from vitrail.errors import ConfigError
from vitrail.models.registry import configuration
from vitrail.training import cpu_parallel, memory
from vitrail.training.auto_config import choose_shards
from vitrail.training.config import LossSettings, MachineSettings, RunConfig, Settings
from vitrail.training.cpu_parallel import CpuDataParallel, worth_sharding
from vitrail.training.memory import MALLOC_OPTIONS, configure_malloc
from vitrail.training.objectives import Classification, FeatureDistillation, Teacher
from vitrail.training.trainer import run

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def any_size(monkeypatch):
    """Shard batches of any size."""
    monkeypatch.setattr(cpu_parallel, "MIN_SHARD", 0)


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
@pytest.mark.parametrize("soft", [False, True])
def test_shards_have_the_loss_and_gradients_of_the_batch(any_size, objective, count, parts, soft):
    images, labels = batch(count)
    targets = torch.rand(count, 3, dtype=torch.float64).softmax(dim=1) if soft else labels
    whole = objective(images, targets)
    expected = gradients(objective, whole)
    loss = CpuDataParallel(objective, parts)(images, targets)
    sharded = gradients(objective, loss)
    torch.testing.assert_close(loss, whole, rtol=1e-12, atol=0)
    assert sharded.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(sharded[name], gradient, rtol=1e-9, atol=1e-13)


def test_autocast_applies_to_all_shards(any_size):
    torch.manual_seed(0)
    model = create("ViT-Mu/4", image_size=8, num_classes=3)
    nn.init.normal_(model.head.weight)
    objective = Classification(model, LossSettings(kind="softmax"))
    images, labels = batch(6)
    images = images.float()
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(objective, objective(images, labels))
        sharded = gradients(objective, CpuDataParallel(objective, 2)(images, labels))
    exact = gradients(objective, objective(images, labels))
    for name in ("model.head.weight", "model.encoder.blocks.0.mlp.fc1.weight"):
        close = (sharded[name] - expected[name]).norm() / exact[name].norm()
        rounded = (exact[name] - expected[name]).norm() / exact[name].norm()
        assert close < 0.05  # bfloat16 has 8 bits
        assert rounded > 1e-4  # and so autocast was on


def test_gradient_accumulation_and_scaling(any_size, objective):
    parallel = CpuDataParallel(objective, 2)
    once = gradients(objective, parallel(*batch(6)))
    objective.zero_grad()
    for _ in range(3):
        (parallel(*batch(6)) / 2).backward()
    for name, parameter in objective.named_parameters():
        torch.testing.assert_close(parameter.grad, 1.5 * once[name], rtol=1e-9, atol=1e-13)


def test_replicas_follow_weight_changes(any_size, objective):
    parallel = CpuDataParallel(objective, 2)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.mul_(1.5)
    torch.testing.assert_close(parallel(*batch(6)), objective(*batch(6)), rtol=1e-12, atol=0)
    for parameter in objective.parameters():
        parameter.data = parameter.data * 0.5
    torch.testing.assert_close(parallel(*batch(6)), objective(*batch(6)), rtol=1e-12, atol=0)


def test_replicas_share_the_teacher(objective):
    loss = LossSettings(kind="softmax", teaching="features")
    teacher = Teacher(create("ViT-Mu/4", image_size=8, num_classes=3), objective.model)
    parallel = CpuDataParallel(FeatureDistillation(objective.model, loss, teacher), 2)
    models = [teacher.model, *(replica.teacher.model for replica in parallel.replicas)]
    assert len({model.stem.projection.weight.data_ptr() for model in models}) == 1


def test_frozen_weights_get_no_gradient(any_size, objective):
    objective.model.stem.requires_grad_(False)
    parallel = CpuDataParallel(objective, 2)
    assert len(list(parallel.parameters())) == len(list(objective.parameters()))
    sharded = gradients(objective, parallel(*batch(6)))
    assert not any("stem" in name for name in sharded)
    assert any("encoder" in name for name in sharded)


def test_errors_of_shards_are_raised(any_size, objective):
    images, labels = batch(6)
    loss = CpuDataParallel(objective, 2)(images, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError):  # once only
        loss.backward()
    with pytest.raises(IndexError, match="out of bounds"):
        CpuDataParallel(objective, 2)(images, labels + 3)


@pytest.fixture
def two_threads():
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(usual)


def test_sharded_run_matches_and_is_deterministic(any_size, two_threads, tmp_path):
    data = write_colors(tmp_path / "colors.npz")
    recorders = {}
    for name, parts in (("whole", 1), ("parts", 2), ("again", None)):
        recorders[name] = Recorder()
        machine = MachineSettings(parts=parts)
        tiny_run(data, tmp_path / name, callback=recorders[name], machine=machine)
    losses = {name: [row["loss"] for row in recorder.rows] for name, recorder in recorders.items()}
    assert losses["parts"] == pytest.approx(losses["whole"], rel=1e-5)
    assert losses["parts"] == losses["again"]  # two cpu_parallel, so two parts are chosen


@pytest.mark.parametrize(
    ("model", "changes", "processes", "reason"),
    [
        ("ViT-Mu/4", {"objective": "masked-patches"}, 1, "objective='classify'"),
        ("ViT-Mu/4", {"loss": LossSettings(teacher="x")}, 1, "the teacher"),
        ("Mixer-S/16", {}, 1, "a Vision Transformer"),
        ("ViT-Mu/4", {}, 2, "each process has its own shard"),
    ],
)
def test_unsupported_configurations_are_not_sharded(
    two_threads, monkeypatch, model, changes, processes, reason
):
    monkeypatch.setattr("vitrail.distributed.world_size", lambda: processes)
    config, settings = configuration(model), Settings(**changes)
    assert choose_shards(config, settings, torch.float32, CPU) == 1
    forced = replace(settings, machine=MachineSettings(parts=2))
    with pytest.raises(ConfigError, match=f"machine.parts=2 is not possible: .*{reason}"):
        choose_shards(config, forced, torch.float32, CPU)


def test_sharding_by_dropout_precision_and_cores(two_threads):
    config = create("ViT-Mu/4", num_classes=3).config
    settings = Settings()
    for dropout, precision, shards in (
        (0.0, torch.float32, 2),
        (0.1, torch.float32, 1),
        (0.0, torch.bfloat16, 2),
        (0.0, torch.float16, 1),
    ):
        assert choose_shards(config.change(dropout=dropout), settings, precision, CPU) == shards
    torch.set_num_threads(1)
    assert choose_shards(config, settings, torch.float32, CPU) == 1
    with pytest.raises(ConfigError, match="parts=0 must be 1 or more"):
        MachineSettings(parts=0)
    femto = create("ViT-Femto/4", num_classes=3).config  # 64 channels; small shards do not pay
    for images, side, worth in ((128, 32, True), (16, 32, False), (128, 8, False)):
        assert worth_sharding(femto, (images, 3, side, side), 2) is worth


@pytest.mark.parametrize(("whose", "calls"), [("the library's", 0), ("the command's", 3)])
def test_malloc_is_configured_only_by_commands(whose, calls, tmp_path, monkeypatch, two_threads):
    data, called = write_colors(tmp_path / "colors.npz"), []
    library = SimpleNamespace(mallopt=lambda *setting: called.append(setting))
    for name in MALLOC_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    settings = replace(SETTINGS, steps=2, machine=MachineSettings(parts=2))
    command = Train(data=str(data), out=tmp_path / "run", settings=settings, json=True)
    config = RunConfig(data=str(data), out=tmp_path / "run", settings=settings)
    monkeypatch.setattr(memory, "ctypes", SimpleNamespace(CDLL=lambda _: library))
    monkeypatch.setattr(memory, "sys", SimpleNamespace(platform="linux"))
    assert run(config).finished if calls == 0 else command.run() == 0
    assert len(called) == calls
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # which wins
    configure_malloc()
    assert len(called) == calls
