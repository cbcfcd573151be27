"""Linear probing, then fine-tuning: head initialization, and the probe as a lower bound."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import vitrail
from tiny_runs import Recorder, equal, tiny_run, weights, write_colors
from vitrail.data.datasets import open_dataset
from vitrail.evaluation.metrics import score_samples
from vitrail.evaluation.results import summarize
from vitrail.formatting import percent
from vitrail.training.config import MachineSettings, ModelSettings, OptimSettings
from vitrail.training.model_init import PROBE_HEAD, ProbeHead, fit_probe_head, read_probe_head

pytestmark = pytest.mark.slow

HARMFUL = OptimSettings(kind="sgd", learning_rate=10.0, clip_norm=1.0, warmup_steps=0)
FLOAT32 = MachineSettings(precision="float32")


@pytest.fixture
def colors(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return write_colors(tmp_path / "colors.npz", train=90)


@pytest.fixture
def start(colors, tmp_path):
    """A trained backbone without a head."""
    tiny_run(colors, tmp_path / "start", steps=20, machine=FLOAT32)
    model = vitrail.load(tmp_path / "start", num_classes=0, log=lambda line: None)
    vitrail.save(model, tmp_path / "backbone")
    return str(tmp_path / "backbone")


def tune(colors, out, start, **changes):
    changes = {"model": ModelSettings(), "head_init": "probe", "machine": FLOAT32} | changes
    return tiny_run(colors, out, start=start, **changes)


def test_initial_loss_is_that_of_the_probe(colors, tmp_path, start):
    first = {}
    for init in ("probe", "zeros"):
        recorder = Recorder()
        tune(colors, tmp_path / init, start, callback=recorder, steps=2, head_init=init)
        first[init] = recorder.rows[0]["loss"]
    assert first["zeros"] == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    assert first["probe"] < 0.8 * first["zeros"]


def test_probe_head_reproduces_its_metrics_and_round_trips(colors, tmp_path, start):
    model = vitrail.load(start)
    train, dev = (open_dataset(str(colors), split) for split in ("train", "test"))
    probe = fit_probe_head(model, train, dev, "val", dev_from_train=True, workers=0)
    images = torch.stack([model.metadata.prepare(sample.data)[0] for sample in dev])
    labels = torch.tensor([sample.label for sample in dev])
    with torch.inference_mode():
        logits = F.linear(model.features(images), *probe.init.values())
    accuracy = (logits.argmax(1) == labels).double().mean()
    assert probe.accuracy == pytest.approx(accuracy.item())
    assert probe.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)
    probe.save(tmp_path)
    again = read_probe_head(tmp_path)
    for name in ("accuracy", "loss", "images", "dev"):
        assert getattr(again, name) == getattr(probe, name)
    assert (probe.dev, probe.images) == ("val", 12)
    for name, tensor in probe.final.items():
        assert torch.equal(again.final[name], tensor)
        assert not torch.equal(probe.init[name], tensor)  # it has learned from dev as well
    assert read_probe_head(tmp_path / "nothing") is None
    for damaged in (b"", (2).to_bytes(8, "little") + b"{}"):  # without a header, without metadata
        (tmp_path / PROBE_HEAD).write_bytes(damaged)
        assert read_probe_head(tmp_path) is None


def test_run_below_the_probe_returns_the_probe(colors, tmp_path, start):
    recorder = Recorder()
    result = tune(colors, tmp_path / "run", start, callback=recorder, optim=HARMFUL, steps=4)
    (line,) = [line for line in recorder.lines if "keeping the linear probe" in line]
    dev = result.outcomes["dev"]  # of the probe that was fitted without dev
    assert f"linear probe {percent(dev.accuracy)}" in line
    assert dev.samples == 9  # a tenth of 90
    comparison = line.removesuffix("; keeping the linear probe")
    note = f"linear probe, which fine-tuning did not improve; {comparison}"
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert f"The result is the {note}. The curves and steps below" in page
    assert f"| result | {note} |" in (tmp_path / "run" / "README.md").read_text(encoding="utf-8")
    assert result.outcomes["test"].samples == 12
    before, after = weights(start), weights(tmp_path / "run")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert result.outcomes["test"].accuracy > 0.9
    assert dev.accuracy > 0.9


def test_run_whose_probe_may_be_kept_does_not_overwrite_its_start(colors, tmp_path, start):
    run = tmp_path / "start"
    before = weights(run)
    with pytest.raises(vitrail.ConfigError, match="would overwrite it; choose another --out"):
        tune(colors, run, str(run), overwrite=True)
    assert equal(weights(run), before)


def test_probe_is_kept_unless_fine_tuning_improves_it():
    probe = ProbeHead(init={}, final={}, accuracy=0.9, loss=0.5)
    for accuracy, loss, kept in ((0.9, 0.499999, True), (0.9, 0.49, False), (0.91, 0.6, False)):
        assert probe.beats(SimpleNamespace(accuracy=accuracy, loss=loss)) is kept


def test_probe_of_many_classes_is_compared_by_balanced_accuracy():
    labels, logits = torch.tensor([0, 0, 0, 1]), F.one_hot(torch.zeros(4, dtype=torch.long), 1001)
    scores = score_samples(logits, labels, "softmax")
    named = SimpleNamespace(name=str)
    tuned = summarize(scores, labels.numpy(), np.arange(4), 1001, named, {})
    assert (tuned.confusion, tuned.accuracy, tuned.balanced_accuracy) == (None, 0.75, 0.5)
    for accuracy, kept in ((0.6, True), (0.4, False)):
        probe = ProbeHead(init={}, final={}, accuracy=accuracy, balanced=True)
        assert probe.beats(tuned) is kept


def test_run_above_the_probe_is_kept(colors, tmp_path, start, monkeypatch):
    monkeypatch.setattr(ProbeHead, "beats", lambda self, tuned: False)
    recorder = Recorder()
    tune(colors, tmp_path / "run", start, callback=recorder, steps=3)
    assert any("keeping the fine-tuned model" in line for line in recorder.lines)
    for name in ("report.html", "README.md"):
        text = (tmp_path / "run" / name).read_text(encoding="utf-8")
        assert "linear probe, which fine-tuning did not improve" not in text
    before, after = weights(start), weights(tmp_path / "run")
    assert not torch.equal(after["stem.projection.weight"], before["stem.projection.weight"])


def test_resume_is_bit_exact(colors, tmp_path, start, stop_after):
    tune(colors, tmp_path / "alone", start)
    with stop_after(3):
        assert not tune(colors, tmp_path / "stopped", start).finished
    assert (tmp_path / "stopped" / PROBE_HEAD).exists()
    done = vitrail.train(colors, tmp_path / "stopped", resume=True)
    assert done.finished
    assert done.outcomes["dev"].samples == 9
    assert equal(weights(tmp_path / "alone"), weights(tmp_path / "stopped"))
    assert not (tmp_path / "stopped" / PROBE_HEAD).exists()


def test_head_is_kept_for_the_same_classes_only(colors, tmp_path):
    tiny_run(colors, tmp_path / "start", steps=60, machine=FLOAT32)
    recorder = Recorder()
    options = {"start": str(tmp_path / "start"), "steps": 2, "model": ModelSettings()}
    tiny_run(colors, tmp_path / "next", optim=OptimSettings(), callback=recorder, **options)
    assert not any("linear probe" in line for line in recorder.lines)
    assert recorder.rows[0]["loss"] < 0.7
    arrays = dict(np.load(colors)) | {"class_names": np.array(["green", "red", "blue"])}
    np.savez(tmp_path / "others.npz", **arrays)  # as many classes, in another order
    recorder = Recorder()
    tiny_run(tmp_path / "others.npz", tmp_path / "new", callback=recorder, **options)
    assert any("head        new, initialized to zero" in line for line in recorder.lines)
    assert recorder.rows[0]["loss"] == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
