"""`torchrun -m vitrail train` with DDP and FSDP matches one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from tiny_runs import write_colors
from vitrail.cli import main
from vitrail.training.callbacks import read_rows

pytestmark = pytest.mark.slow

STEPS = 8
OPTIONS = ["--model.name", "ViT-Mu/4", "--model.image-size", "8", "--steps", str(STEPS)]
OPTIONS += ["--batch-size", "8", "--optim.kind", "sgd", "--optim.learning-rate", "0.1"]
OPTIONS += ["--machine.precision", "float32"]  # some CPUs would choose bfloat16
OPTIONS += ["--mix.cutmix=0", "--optim.clip-norm=1", "--evaluate-every=1", "--average=0.9"]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a script or module in two processes."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run([sys.executable, *several, *words], **options)


def train(data: Path, out: Path, *more: str, processes: int = 2, command: str = "train") -> None:
    args = [command, str(data), "--out", str(out), *more]
    if processes == 1:
        assert main(args) == 0
        return
    done = launch("-m", "vitrail", *args)
    assert done.returncode == 0, done.stdout + done.stderr


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Path]:
    """A dataset, and a single-process run on it."""
    folder = tmp_path_factory.mktemp("alone")
    data = write_colors(folder / "colors.npz")
    train(data, folder / "run", *OPTIONS, processes=1)
    return data, folder / "run"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_match_one(alone, tmp_path, strategy):
    data, one = alone
    train(data, tmp_path / "two", *OPTIONS, "--machine.strategy", strategy)
    assert losses(tmp_path / "two") == pytest.approx(losses(one), abs=1e-5)
    expected, actual = (vitrail.load(path).state_dict() for path in (one, tmp_path / "two"))
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=1e-5, rtol=1e-4)
    rows = [read_rows(path / "metrics.jsonl") for path in (one, tmp_path / "two")]
    accuracies = [[row.get("test/accuracy") for row in each] for each in rows]
    assert accuracies[0] == accuracies[1]


DYING = """
import os, signal, sys
from vitrail.training.trainer import Trainer
from vitrail.cli import main

on_step = Trainer.on_step

def die(self, state, result):
    if state.step == 5:
        self.save_checkpoint()
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
    return on_step(self, state, result)

Trainer.on_step = die
sys.exit(main(sys.argv[1:]))
"""


def test_run_resumes_with_fewer_processes_after_a_kill(alone, tmp_path):
    data, one = alone
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    args = ["train", str(data), "--out", str(tmp_path / "run"), *OPTIONS]
    assert launch(str(script), *args, "--machine.strategy", "fsdp").returncode != 0
    train(data, tmp_path / "run", "--resume", processes=1)
    assert losses(tmp_path / "run") == pytest.approx(losses(one), abs=1e-5)


def test_multiple_processes_need_an_output_folder(alone, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(alone[0])]) == 2
    expected = "vitrail: several processes need the same run folder; pass --out\n"
    assert capsys.readouterr().err == expected
