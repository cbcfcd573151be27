"""Early stopping: the best weights on val are kept, also by a run that was killed."""

import pytest

import vitrail
from tiny_runs import Recorder, equal, tiny_run, weights, write_folder
from vitrail import ConfigError
from vitrail.training.config import MachineSettings, OptimSettings, Settings

pytestmark = pytest.mark.slow

# A learning rate that destroys the weights after a while, so that the best are not the last.
RATE = OptimSettings(kind="sgd", learning_rate=0.3, schedule="constant", warmup_steps=40)
OPTIONS = {"steps": 60, "evaluate_every": 0.5, "optim": RATE, "retries": 0}


@pytest.fixture
def data(tmp_path):
    return write_folder(tmp_path / "colors", count=20)


def val_rows(recorder):
    return [row for row in recorder.evaluations if "val/accuracy" in row]


def test_best_weights_are_kept(data, tmp_path):
    recorder = Recorder()
    tiny_run(data, tmp_path / "run", patience=3, callback=recorder, **OPTIONS)
    *during, final = val_rows(recorder)
    scores = [(row["val/accuracy"], -row["val/loss"]) for row in during]
    assert (final["val/accuracy"], -final["val/loss"]) >= max(scores)
    best = scores.index(max(scores))
    assert best < len(scores) - 1, "the run did not get worse; the test shows nothing"
    assert len(scores) - 1 - best <= 3
    (line,) = [line for line in recorder.lines if line.startswith("keeping the weights of step")]
    assert "optimistic by up to" in line
    assert not list((tmp_path / "run").glob("best-*"))
    result = vitrail.evaluate(tmp_path / "run", data, "val")
    assert result.accuracy == final["val/accuracy"]


def test_killed_run_resumes_bit_exactly(data, tmp_path):
    tiny_run(data, tmp_path / "whole", patience=3, **OPTIONS)

    class Kill(Recorder):
        def on_evaluate(self, row):
            super().on_evaluate(row)
            if len(self.evaluations) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tiny_run(data, tmp_path / "parts", callback=Kill(), patience=3, save_minutes=0.0, **OPTIONS)
    tiny_run(data, tmp_path / "parts", resume=True, patience=3, **OPTIONS)
    assert equal(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_last_weights_are_kept_if_they_are_best(data, tmp_path):
    recorder, options = Recorder(), {"steps": 15, "evaluate_every": 1.0, "average": 0.8}
    tiny_run(data, tmp_path / "patient", patience=50, callback=recorder, **options)
    assert any(line.startswith("keeping the weights of step 15:") for line in recorder.lines)
    tiny_run(data, tmp_path / "plain", **options)
    assert equal(weights(tmp_path / "patient"), weights(tmp_path / "plain"))


def test_patience_needs_whole_weights():
    with pytest.raises(ConfigError, match="use ddp, not fsdp"):
        Settings(patience=2, machine=MachineSettings(strategy="fsdp"))
