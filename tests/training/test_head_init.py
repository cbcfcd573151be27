"""Linear probing, then fine-tuning: where the head starts, and what a run never falls below."""

import pytest
import torch
import torch.nn.functional as F

import vitrail
from tiny_runs import Notebook, tiny_run, write_colors
from vitrail.data.sources import open_source
from vitrail.formatting import percent
from vitrail.training.head_init import (
    PROBE_HEAD,
    ProbeHead,
    fit_probe_head,
    read_probe_head,
)
from vitrail.training.settings import MachineSettings, ModelSettings, Optim
from vitrail.training.survival import Stop

HARMFUL = Optim(kind="sgd", learning_rate=10.0, clip_norm=1.0, warmup_steps=0)
FLOAT32 = MachineSettings(precision="float32")


@pytest.fixture
def colors(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    return write_colors(tmp_path / "colors.npz", train=90)


@pytest.fixture
def start(colors, tmp_path):
    """A model with features and without a head."""
    tiny_run(colors, tmp_path / "start", steps=20, machine=FLOAT32)
    model = vitrail.load(tmp_path / "start", num_classes=0, log=lambda line: None)
    vitrail.save(model, tmp_path / "backbone")
    return str(tmp_path / "backbone")


def tune(colors, out, start, **changes):
    changes = {"model": ModelSettings(), "head_init": "probe", "machine": FLOAT32} | changes
    return tiny_run(colors, out, start=start, **changes)


def weights(folder):
    return vitrail.load(folder).state_dict()


def test_the_first_loss_is_the_probes_not_that_of_a_zero_head(colors, tmp_path, start):
    first = {}
    for init in ("probe", "zeros"):
        book = Notebook()
        tune(colors, tmp_path / init, start, watch=book, steps=2, head_init=init)
        first[init] = book.rows[0]["loss"]
    assert first["zeros"] == pytest.approx(torch.tensor(3.0).log().item(), rel=1e-5)
    assert first["probe"] < 0.8 * first["zeros"]


def test_the_head_gives_the_accuracy_and_loss_that_the_probe_reports(colors, start):
    model = vitrail.load(start)
    train = open_source(str(colors), "train")
    dev = open_source(str(colors), "test")
    probe = fit_probe_head(model, train, dev, "dev", cut=False, workers=0)
    images = torch.stack([model.metadata.prepare(sample.data)[0] for sample in dev])
    labels = torch.tensor([sample.label for sample in dev])
    with torch.inference_mode():
        logits = F.linear(model.features(images), *probe.init.values())
    accuracy = (logits.argmax(1) == labels).double().mean()
    assert probe.accuracy == pytest.approx(accuracy.item())
    assert probe.loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)


def test_a_run_that_ends_below_the_probe_returns_the_probe(colors, tmp_path, start):
    book = Notebook()
    result = tune(colors, tmp_path / "run", start, watch=book, optim=HARMFUL, steps=4)
    assert any("the linear probe is kept" in line for line in book.lines)
    before, after = weights(start), weights(tmp_path / "run")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    model = vitrail.load(start)
    train = open_source(str(colors), "train")
    whole = fit_probe_head(model, train, None, "", cut=False, workers=0)
    # Refitted to all training images with the l2 that was chosen without dev.
    assert after["head.weight"].shape == whole.final["head.weight"].shape
    assert result.outcomes["test"].accuracy > 0.9
    assert result.outcomes["dev"].accuracy > 0.9


def test_a_run_that_beats_the_probe_is_kept(colors, tmp_path, start, monkeypatch):
    monkeypatch.setattr(ProbeHead, "beats", lambda self, tuned: False)
    book = Notebook()
    tune(colors, tmp_path / "run", start, watch=book, steps=3)
    assert any("the fine-tuned model is kept" in line for line in book.lines)
    before, after = weights(start), weights(tmp_path / "run")
    assert not torch.equal(after["stem.projection.weight"], before["stem.projection.weight"])


def test_dev_is_held_out_of_the_training_images_and_never_test(colors, tmp_path, start):
    result = tune(colors, tmp_path / "run", start, steps=2)
    assert result.outcomes["dev"].samples == 9  # a tenth of 90
    assert result.outcomes["test"].samples == 12


def test_a_stopped_run_resumes_to_identical_weights(colors, tmp_path, start, monkeypatch):
    tune(colors, tmp_path / "alone", start)

    class StopAfter(Stop):
        asked = 0

        def __bool__(self):
            self.asked += 1
            return self.asked >= 3

    with monkeypatch.context() as patched:
        patched.setattr("vitrail.training.survival.Stop", StopAfter)
        assert not tune(colors, tmp_path / "stopped", start).finished
    assert (tmp_path / "stopped" / PROBE_HEAD).exists()
    done = vitrail.train(colors, tmp_path / "stopped", resume=True)
    assert done.finished
    assert done.outcomes["dev"].samples == 9
    alone, resumed = weights(tmp_path / "alone"), weights(tmp_path / "stopped")
    assert all(torch.equal(alone[name], tensor) for name, tensor in resumed.items())
    assert not (tmp_path / "stopped" / PROBE_HEAD).exists()


def test_a_probe_head_is_read_as_it_was_saved(colors, tmp_path, start):
    model, train = vitrail.load(start), open_source(str(colors), "train")
    dev = open_source(str(colors), "test")
    probe = fit_probe_head(model, train, dev, "val", cut=True, workers=0)
    probe.save(tmp_path)
    again = read_probe_head(tmp_path)
    assert again is not None
    assert (again.dev, again.accuracy, again.loss, again.images) == (
        *("val", probe.accuracy, probe.loss),
        12,
    )
    for name, tensor in probe.final.items():
        assert torch.equal(again.final[name], tensor)
        assert not torch.equal(probe.init[name], tensor)  # it has learned from dev as well
    assert read_probe_head(tmp_path / "nothing") is None


def test_the_head_of_a_model_for_the_same_classes_is_kept(colors, tmp_path):
    tiny_run(colors, tmp_path / "start", steps=60, machine=FLOAT32)
    book = Notebook()
    tiny_run(
        colors,
        tmp_path / "next",
        start=str(tmp_path / "start"),
        model=ModelSettings(),
        optim=Optim(),
        steps=2,
        watch=book,
    )
    assert not any("linear probe" in line for line in book.lines)
    assert book.rows[0]["loss"] < 0.7


def test_dev_accuracy_of_a_returned_probe_is_that_of_the_head_which_has_not_seen_dev(
    colors, tmp_path, start
):
    book = Notebook()
    result = tune(colors, tmp_path / "run", start, watch=book, optim=HARMFUL, steps=4)
    (line,) = [line for line in book.lines if "the linear probe is kept" in line]
    shown = f"linear probe {percent(result.outcomes['dev'].accuracy)}"
    assert shown in line
