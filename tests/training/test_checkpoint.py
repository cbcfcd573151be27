"""The resumable state is bit-exact and atomic; locks, signals, and NaN diagnosis."""

import json
import logging
import os
import pickle
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from processes import fork
from vitrail import VisionTransformer, VitConfig, distributed
from vitrail.errors import CheckpointError, DataError
from vitrail.training import checkpoint
from vitrail.training.checkpoint import (
    first_nonfinite,
    graceful_stop,
    has_state,
    load_state,
    lock_folder,
    remove_state,
    save_state,
)
from vitrail.training.optim import Adafactor, Lion, Muon

pytestmark = pytest.mark.slow


class Objective(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        config = {"mlp_width": 32, "heads": 2, "patch_size": 4, "image_size": 8, "num_classes": 3}
        self.model = VisionTransformer(VitConfig(depth=1, width=width, **config))

    def forward(self, images):
        return self.model(images).square().mean()


def all_of(kind, **settings):
    return lambda objective: [kind(objective.parameters(), **settings)]


def two_optimizers(objective):
    weights = list(objective.parameters())
    matrices = [p for p in weights if p.ndim == 2]
    parts = 3 if matrices[0].shape[0] % 3 == 0 else 1
    groups = [{"params": matrices[:1], "parts": parts}, {"params": matrices[1:], "peak": 0.1}]
    rest = {"params": [p for p in weights if p.ndim != 2], "peak": 0.7}
    return [Muon(groups), AdamW([rest], lr=1e-3, betas=(0.8, 0.95))]


OPTIMIZERS = {
    "adamw fused": all_of(AdamW, lr=0.01, fused=True),
    "adam": all_of(Adam, lr=0.01, betas=(0.8, 0.9)),
    "sgd fused": all_of(SGD, lr=0.1, momentum=0.9, fused=True),
    "sgd without momentum": all_of(SGD, lr=0.1),
    "lion": all_of(Lion, lr=0.01),
    "adafactor": all_of(Adafactor, lr=0.01),  # rows and columns, and half precision
    "muon and adamw": two_optimizers,
}


class Run:
    """A tiny training run."""

    def __init__(self, kind: str = "adamw fused", *, frozen: str = "", seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.objective = Objective()
        for name, parameter in self.objective.named_parameters():
            nn.init.normal_(parameter, std=0.3)
            parameter.requires_grad_(not frozen or frozen not in name)
        self.optimizers = OPTIMIZERS[kind](self.objective)
        self.average = {n: torch.randn_like(p) for n, p in self.objective.named_parameters()}
        self.step = 0

    def learn(self, steps: int = 1) -> "Run":
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            self.objective(torch.randn(2, 3, 8, 8, generator=generator)).backward()
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.9
                optimizer.step()
                optimizer.zero_grad()
            for name, parameter in self.objective.named_parameters():
                self.average[name].lerp_(parameter.detach(), 0.1)
            self.step += 1
        return self

    @property
    def parts(self):
        return {"objective": self.objective, "optimizers": self.optimizers, "average": self.average}

    def save(self, folder: Path) -> "Run":
        save_state(folder, extra={"step": self.step, "seconds": 1.5}, **self.parts)
        return self

    def load(self, folder: Path) -> "Run":
        self.extra = load_state(folder, **self.parts)
        self.step = self.extra["step"]
        return self

    def bits(self):
        """Return everything that must be restored, comparable with ==."""
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return exact([self.objective.state_dict(), optimizers, self.average])


def exact(value):
    match value:
        case torch.Tensor():
            data = value.detach().flatten().view(torch.uint8).numpy().tobytes()
            return value.dtype, value.shape, data
        case dict():
            return {key: exact(inner) for key, inner in value.items()}
        case list() | tuple():
            return type(value)(exact(inner) for inner in value)
    return value


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "state").iterdir())


@pytest.mark.parametrize("frozen", ["", "attention"])
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_round_trip_is_bit_exact(tmp_path, kind, frozen, steps):
    run = Run(kind, frozen=frozen).learn(steps)
    before = run.bits()
    run.save(tmp_path)
    assert run.bits() == before  # to save is not to change
    again = Run(kind, frozen=frozen, seed=1).learn(1 - steps % 2).load(tmp_path)
    assert again.bits() == before
    assert again.extra == {"step": steps, "seconds": 1.5}
    assert again.learn(2).bits() == run.learn(2).bits()


def test_state_without_average(tmp_path):
    run = Run().learn()
    save_state(tmp_path, extra={"step": 1}, **run.parts | {"average": None})
    again = Run(seed=1)
    load_state(tmp_path, **again.parts | {"average": None})
    assert exact(again.objective.state_dict()) == exact(run.objective.state_dict())
    with pytest.raises(CheckpointError, match=r"checkpoint mismatch: .* has average\.model"):
        again.load(tmp_path)


def test_fused_option_is_not_part_of_the_state(tmp_path):
    Run("adamw fused").learn().save(tmp_path)
    run = Run()
    run.optimizers = [AdamW(run.objective.parameters(), lr=0.5, foreach=True)]
    run.load(tmp_path).learn()
    group = run.optimizers[0].param_groups[0]
    assert group["foreach"]
    assert not group["fused"]
    assert group["lr"] == 0.01 * 0.9 * 0.9


def test_saving_logs_nothing_and_leaves_other_logs_alone(tmp_path, caplog):
    caplog.set_level("INFO")
    with distributed.checkpoint_io():
        logging.getLogger("another thread").info("message")
    Run().learn().save(tmp_path)
    Run().load(tmp_path)
    assert caplog.messages == ["message"]


def test_has_state_and_remove_state(tmp_path):
    remove_state(tmp_path)
    Run().save(tmp_path)
    assert has_state(tmp_path)
    remove_state(tmp_path)
    assert not has_state(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError, match="has no saved state to resume from"):
        Run().load(tmp_path)
    (tmp_path / "state").write_text("in the way")
    with pytest.raises(CheckpointError, match=r"cannot save the run's state in .*: File exists"):
        Run().save(tmp_path)


def test_newest_state_is_the_last_saved_and_older_ones_are_removed(tmp_path):
    run = Run()
    for _ in range(4):
        run.learn().save(tmp_path)
    assert names(tmp_path) == ["step-3", "step-4"]
    late, early = Run().learn(5).save(tmp_path), Run(seed=1).learn(2).save(tmp_path)
    assert Run().load(tmp_path).bits() == early.bits() != late.bits()
    again = Run(seed=2).learn(2).save(tmp_path)  # the same step once more
    (tmp_path / "moved").mkdir()
    shutil.move(tmp_path / "state", tmp_path / "moved" / "state")
    assert Run().load(tmp_path / "moved").bits() == again.bits()
    assert len(names(tmp_path / "moved")) == 2


class Killed(BaseException):
    """Simulates the end of the process."""


def test_save_killed_at_any_point_leaves_a_valid_state(tmp_path, monkeypatch):
    kind = "sgd without momentum"  # few tensors, for there are many moments
    started = tmp_path / "started"
    Run(kind, seed=1).save(started)
    old, new, after = Run(kind).learn(1).save(started), Run(kind).learn(2), Run(kind).learn(3)
    left = 0

    def killing(act):
        def wrapper(*arguments, **named):
            nonlocal left
            left -= 1
            if left == 0:
                raise Killed
            return act(*arguments, **named)

        return wrapper

    restored = []
    for moment in range(1, 100):
        folder = tmp_path / str(moment)
        shutil.copytree(started, folder)
        with monkeypatch.context() as patch:
            for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
                patch.setattr(os, name, killing(getattr(os, name)))
            for module in (json, pickle):
                patch.setattr(module, "dump", killing(module.dump))
            left = moment
            try:
                new.save(folder)
            except Killed:
                pass
            else:
                break  # all moments have been tried
        restored.append(Run(kind, seed=2).load(folder).bits())
        after.save(folder)  # and the next save tidies up
        assert names(folder) in (["step-1", "step-3"], ["step-2", "step-3"])
    assert len(restored) > 10
    before = restored.count(old.bits())
    assert restored == before * [old.bits()] + (len(restored) - before) * [new.bits()]
    assert 0 < before < len(restored)


def test_state_is_synced_before_it_is_renamed(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(
        os, "rename", lambda old, new: (calls.append(Path(new).name), rename(old, new))
    )
    Run().save(tmp_path)
    named = calls.index("step-0")
    assert calls[:named].count("fsync") == 4  # tensors, table, note, and the folder that lists them
    assert [calls[named - 1], *calls[named + 1 :]] == ["fsync", "fsync"]  # the name itself


DAMAGES = {
    "a flipped bit": (
        "__0_0.distcp",
        lambda data: data[:500] + bytes([data[500] ^ 1]) + data[501:],
    ),
    "a short file": ("__0_0.distcp", lambda data: data[:100]),
    "a missing file": (".metadata", None),
    "another rate": ("state.json", lambda data: data.replace(b'"lr": 0.00', b'"lr": 0.01')),
    "no JSON": ("state.json", lambda data: b"{"),
}


def damage_file(state: Path, damage: str) -> int | None:
    name, change = DAMAGES[damage]
    if change is None:
        return (state / name).unlink()
    return (state / name).write_bytes(change((state / name).read_bytes()))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_state_falls_back_to_the_previous(tmp_path, damage):
    first = Run().learn(1).save(tmp_path)
    Run().learn(2).save(tmp_path)
    damage_file(tmp_path / "state" / "step-2", damage)
    again = Run(seed=1).load(tmp_path)
    assert again.bits() == first.bits()
    if damage != "no JSON":  # then it does not even say that it is newer
        assert "step-2 is damaged" in again.extra["damaged"][0]
    damage_file(tmp_path / "state" / "step-1", damage)
    with pytest.raises(CheckpointError, match=r"is damaged: .* delete .*state to start over"):
        Run().load(tmp_path)


def test_full_disk_raises_and_keeps_the_previous_state(tmp_path):
    first = Run().learn(1).save(tmp_path)
    files = sorted((tmp_path / "state" / "step-1").iterdir(), key=lambda path: path.stat().st_size)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for largest in [path.stat().st_size - 1 for path in files]:  # each file once the first to fail
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))
            with pytest.raises(CheckpointError) as caught:
                Run().learn(2).save(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert str(caught.value).startswith(f"cannot save the run's state in {tmp_path}")
        assert "\n" not in str(caught.value)
        assert names(tmp_path) == ["step-1"]
        assert Run(seed=1).load(tmp_path).bits() == first.bits()


def test_state_of_another_model_or_optimizer_raises(tmp_path):
    Run("muon and adamw").learn().save(tmp_path)
    other = Run()
    other.objective = Objective(width=34)
    with pytest.raises(CheckpointError, match=r"mismatch: .* has objective\.model\.\S+ "):
        other.load(tmp_path)
    with pytest.raises(CheckpointError, match="other optimizers or frozen weights"):
        Run("adam").load(tmp_path)


class Evil:
    def __reduce__(self):
        return print, ("the file has run code",)


def test_loading_a_state_executes_no_code(tmp_path, capsys):
    Run().save(tmp_path)
    path = tmp_path / "state" / "step-0"
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    note = json.loads((path / "state.json").read_text())  # with valid digests
    note["files"] |= checkpoint.digests_of([path / ".metadata"])
    note["digest"] = checkpoint.digest_of_note(note)
    (path / "state.json").write_text(json.dumps(note))
    with pytest.raises(CheckpointError, match=r".metadata refers to builtins\.print"):
        Run().load(tmp_path)
    assert capsys.readouterr().out == ""


def hold(folder):
    with lock_folder(folder):
        (folder / "held").touch()
        signal.pause()


def test_lock_is_exclusive_and_released_after_a_kill(tmp_path):
    process = fork(hold, tmp_path, output=tmp_path / "output")
    while not (tmp_path / "held").exists():
        assert process.is_alive()
        time.sleep(0.01)
    with pytest.raises(DataError, match="another run is writing"), lock_folder(tmp_path):
        pass
    process.kill()
    process.join()
    with lock_folder(tmp_path):
        pass
    with lock_folder(tmp_path / "failed"):
        assert (tmp_path / "failed").exists()
    assert not (tmp_path / "failed").exists()
    (tmp_path / "file").write_text("")
    message = r"cannot write into .*choose another folder"
    with pytest.raises(DataError, match=message), lock_folder(tmp_path / "file" / "run"):
        pass


def test_second_interrupt_raises():
    before = signal.getsignal(signal.SIGINT)  # ignored in a background job of a shell
    with graceful_stop() as stop:
        stop.graceful = True
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.signal == "Ctrl-C"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))

    def forward(self, images, targets):
        return self.model(images).sum()


def test_first_nonfinite_module_is_named():
    chain, images = Chain(), torch.ones(1, 2)
    assert first_nonfinite(chain, images, images) == "the gradients"
    assert first_nonfinite(chain, images / 0, images) == "the images"
    with torch.no_grad():
        chain.model[1].weight.fill_(3e38)
    assert first_nonfinite(chain, images * 100, images) == "the output of 1"
    with torch.no_grad():
        chain.model[2].bias.fill_(torch.nan)
    assert first_nonfinite(chain, images, images) == "the weight 2.bias"
