"""`torchrun -m vitrail train` with DDP and FSDP matches one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vitrail
from processes import in_two_processes
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
    """Run a script or module in two processes with torchrun."""
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": ""}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 200}
    return subprocess.run([sys.executable, *several, *words], **options)


def arguments(data: Path, out: Path) -> list[str]:
    return ["train", str(data), "--out", str(out), *OPTIONS]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder / "metrics.jsonl") if "loss" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> tuple[Path, Path]:
    """A dataset, and a single-process run on it."""
    folder = tmp_path_factory.mktemp("alone")
    data = write_colors(folder / "colors.npz")
    assert main(arguments(data, folder / "run")) == 0
    return data, folder / "run"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_match_one(alone, tmp_path, strategy):
    data, one = alone
    args = [*arguments(data, tmp_path / "two"), "--machine.strategy", strategy]
    if strategy == "ddp":
        done = launch("-m", "vitrail", *args)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("done in ") == 1  # the result is printed by one process
    else:
        in_two_processes(tmp_path, main, args)
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
    args = [*arguments(data, tmp_path / "run"), "--machine.strategy", "fsdp"]
    assert launch(str(script), *args).returncode != 0
    assert main(["train", str(data), "--out", str(tmp_path / "run"), "--resume"]) == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(one), abs=1e-5)


def test_multiple_processes_need_an_output_folder(alone, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(alone[0])]) == 2
    expected = "vitrail: several processes need the same run folder; pass --out\n"
    assert capsys.readouterr().err == expected
