"""Resumed runs are bit-exact."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from kill_and_resume import arguments, kill_and_resume, wait_for_rows

import vitrail
from tiny_runs import SETTINGS, TINY, Recorder, equal, tiny_run, weights
from vitrail.cli import main
from vitrail.training import trainer
from vitrail.training.checkpoint import has_state, lock_folder
from vitrail.training.objectives import Classification
from vitrail.training.recipes import write_run
from vitrail.training.schedules import Schedule

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"average": 0.9},
        {"image_sizes": ((0.0, 4), (0.5, 8))},
        {"optim": type(SETTINGS.optim)(kind="muon", learning_rate=1e-3, warmup_steps=1)},
        {"machine": type(SETTINGS.machine)(parts=2)},
    ],
    ids=["plain", "averaged", "growing", "muon", "in parts"],
)
def test_resume_is_bit_exact(colors, tmp_path, monkeypatch, stop_after, changes):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 0)
    tiny_run(colors, tmp_path / "alone", **changes)
    with stop_after(3):
        stopped = tiny_run(colors, tmp_path / "stopped", **changes)
    assert not stopped.finished
    assert stopped.step == 3
    recorder = Recorder()
    done = tiny_run(colors, tmp_path / "stopped", resume=True, callback=recorder, **changes)
    assert done.finished
    assert "resumed at step 3" in recorder.lines
    assert equal(weights(tmp_path / "alone"), weights(tmp_path / "stopped"))


def test_resumed_run_keeps_its_micro_batch(colors, tmp_path, monkeypatch, stop_after):
    changes = {"model": replace(TINY, dropout=0.2)}  # whose draws are others in other parts
    tiny_run(colors, tmp_path / "alone", **changes)
    with stop_after(1):
        tiny_run(colors, tmp_path / "stopped", **changes)
    monkeypatch.setattr("vitrail.training.auto_config.free_bytes", lambda device: 0)
    recorder = Recorder()
    tiny_run(colors, tmp_path / "stopped", resume=True, callback=recorder, **changes)
    assert any("micro-batches of 6, as before" in line for line in recorder.lines)
    assert equal(weights(tmp_path / "alone"), weights(tmp_path / "stopped"))


def test_micro_batch_is_chosen_again_for_other_process_counts(
    colors, tmp_path, monkeypatch, stop_after
):
    with stop_after(1), monkeypatch.context() as patched:
        written = Schedule.state_dict
        patched.setattr(Schedule, "state_dict", lambda plan: written(plan) | {"processes": 6})
        tiny_run(colors, tmp_path / "run")
    sizes, forward = [], Classification.forward

    def record(self, images, targets):
        sizes.append(len(images))
        return forward(self, images, targets)

    monkeypatch.setattr(Classification, "forward", record)
    monkeypatch.setattr("vitrail.training.auto_config.free_bytes", lambda device: 0)
    assert tiny_run(colors, tmp_path / "run", resume=True).finished
    assert set(sizes) == {1}


@pytest.mark.parametrize("times", [{"steps": 4}, {"minutes": 0.01}], ids=["steps", "minutes"])
def test_out_of_memory_advice_works(colors, tmp_path, monkeypatch, capsys, times):
    forward = Classification.forward

    def fill_memory(self, images, targets):
        if len(images) > 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return forward(self, images, targets)

    monkeypatch.setattr(Classification, "forward", fill_memory)
    begin = ["train", str(colors), "--model.name", "ViT-Mu/4", "--model.image-size", "8"]
    begin += ["--batch-size", "6", "--machine.parts", "1", "--optim.warmup-steps", "0"]
    begin += [f"--{name}={value}" for name, value in times.items()]
    resume, out = ["train", "--resume"], ["--out", str(tmp_path / "run")]
    advised, args = [], begin
    while main([*args, *out]):
        message = capsys.readouterr().err
        assert "out of memory at step" in message
        resumes = "resume with " in message
        advice = message.strip().rpartition("resume with " if resumes else "try ")[2]
        assert advice not in advised
        advised.append(advice)
        args = [*(resume if resumes else begin), *advice.partition(", or ")[0].split()]
    assert [advice.split()[1] for advice in advised] == ["3,", "1,"]


def test_unfinished_run_is_resumed_only_by_a_restarted_process(colors, tmp_path, monkeypatch):
    recorder = Recorder()
    with monkeypatch.context() as patched:  # it ends before its bundle is written
        patched.setattr(trainer.Trainer, "finish", lambda *_: {})
        tiny_run(colors, tmp_path / "run")
    with pytest.raises(vitrail.ConfigError, match="has an unfinished run; use --resume"):
        tiny_run(colors, tmp_path / "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    tiny_run(colors, tmp_path / "run", callback=recorder)
    assert any("resumed at step" in line for line in recorder.lines)


def test_resume_after_kill_is_bit_exact(tmp_path):
    _, different = kill_and_resume(tmp_path, kills=2, seed=0, steps=40)
    assert not different


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_the_first_step_interrupts_at_once(colors, tmp_path, number):
    class Signal(Recorder):
        def log(self, line):
            super().log(line)
            signal.raise_signal(number)

    handler, recorder = signal.getsignal(number), Signal()
    with pytest.raises(KeyboardInterrupt):
        tiny_run(colors, tmp_path / "run", callback=recorder)
    assert len(recorder.lines) == 1
    assert not recorder.rows
    assert not has_state(tmp_path / "run")
    assert signal.getsignal(number) is handler


def test_sigterm_during_a_step_saves_the_state_even_if_repeated(colors, tmp_path):
    class Signal(vitrail.Callback):
        def on_step(self, row):
            for _ in range(2 * (row["step"] == 3)):
                signal.raise_signal(signal.SIGTERM)

    result = tiny_run(colors, tmp_path / "run", callback=Signal())
    assert (result.step, result.finished) == (3, False)
    assert tiny_run(colors, tmp_path / "run", resume=True).finished


def test_sigterm_saves_the_state(colors, tmp_path):
    args = arguments(colors, tmp_path / "run", resume=False)
    process = subprocess.Popen([sys.executable, "-m", "vitrail", *args], stderr=subprocess.PIPE)
    assert wait_for_rows(tmp_path / "run", 1, lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors.decode()
    assert (tmp_path / "run" / "state").exists()
    assert (tmp_path / "run" / "model.safetensors").exists()
    assert main(["train", "--resume", "--out", str(tmp_path / "run")]) == 0
    assert vitrail.load(tmp_path / "run").config.num_classes == 3


def test_second_command_in_the_same_folder_fails(colors, tmp_path, capsys):
    with lock_folder(tmp_path / "run"):
        assert main(["train", str(colors), "--out", str(tmp_path / "run"), "--steps", "2"]) == 2
    assert "another run is writing into" in capsys.readouterr().err


@pytest.mark.parametrize("spelled", ["pictures", "./pictures", "{}/pictures", "other/../pictures"])
def test_equivalent_data_paths_are_accepted(tmp_path, monkeypatch, capsys, spelled):
    monkeypatch.chdir(tmp_path)
    run, data = tmp_path / "run", spelled.format(tmp_path)
    run.mkdir()
    write_run(run, SETTINGS, data="pictures", start="")
    (run / "config.json").touch()
    with pytest.raises(vitrail.ConfigError, match="is finished"):  # it has asked no more
        vitrail.train(data, run, resume=True)
    with pytest.raises(vitrail.ConfigError, match="was trained on pictures, not others"):
        vitrail.train("others", run, resume=True)
    assert main(["train", data, "--resume", "--out", str(run)]) == 2
    assert "is finished" in capsys.readouterr().err
