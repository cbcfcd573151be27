"""The ladder: what each step may see, which is chosen, and what is left of it."""

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_ladders import FINE, named, order_of, real_run, without_times, written

import vitrail
from tiny_runs import CLASSES, Notebook, write_colors
from vitrail.cli import main
from vitrail.cli.ladder import report
from vitrail.data.samples import Collection, Rows, Samples
from vitrail.data.sources import fingerprint, open_source
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.models.build import create
from vitrail.probing.memory import MEMORY, load_memory
from vitrail.training import rungs, summit
from vitrail.training.folder import read_run
from vitrail.training.ground import apart, prepare
from vitrail.training.ladder import Climb, climb
from vitrail.training.material import Material
from vitrail.training.optimizers import freeze
from vitrail.training.rungs import ATTENTION, FULL, LINEAR, PROBE, Rung, Trial
from vitrail.training.settings import Optim
from vitrail.training.setup import Order
from vitrail.training.state import has_state

# From one end to the other


def test_all_steps_are_tried_from_cheap_to_costly_and_the_bundle_does_as_well_as_is_said(
    colors, start, tmp_path
):
    out, book = tmp_path / "out", Notebook()
    found = climb(order_of(colors, out, start), book)
    assert [rung.name for rung in found.rungs] == [PROBE, LINEAR, ATTENTION, FULL]
    assert all(rung.accuracy is not None for rung in found.rungs)
    assert found.finished
    assert found.outcomes.keys() == {"test"}
    stated = written(out)
    assert [rung["chosen"] for rung in stated["rungs"]].count(True) == 1
    assert stated["results"]["test"]["accuracy"] == found.outcomes["test"].accuracy
    assert vitrail.evaluate(str(out), colors).accuracy == found.outcomes["test"].accuracy
    assert vitrail.load(out).metadata.class_names == CLASSES
    assert not (out / "trials").exists()
    assert any("cut out of train" in line for line in book.lines)


def test_the_file_tells_every_learning_rate_that_was_tried(colors, start, tmp_path, quick):
    quick({("attention", 2e-4): 0.5, ("attention", 6e-4): 0.75}, probes=0.6)
    climb(order_of(colors, tmp_path / "out", start))
    probe, linear, attention, full = map(without_times, written(tmp_path / "out")["rungs"])
    assert probe == {
        "name": PROBE,
        "accuracy": 0.6,
        "gain": None,
        "chosen": False,
        "learning_rate": None,
        "problem": "",
        "trials": [],
    }
    assert linear["gain"] == 0.0
    assert attention["chosen"]
    assert attention["gain"] == pytest.approx(0.15)
    assert attention["learning_rate"] == 6e-4
    assert [(t["learning_rate"], t["accuracy"]) for t in attention["trials"]] == [
        (2e-4, 0.5),
        (6e-5, 0.0),
        (6e-4, 0.75),
    ]
    assert full["gain"] == -0.75


# What is chosen


@pytest.mark.parametrize(
    ("attention", "full", "chosen"),
    [(0.5, 0.5, PROBE), (0.6, 0.6, ATTENTION), (0.6, 0.7, FULL), (0.7, 0.6, ATTENTION)],
)
def test_the_best_is_chosen_and_of_equal_ones_the_cheaper(attention, full, chosen):
    tried = zip((PROBE, LINEAR, ATTENTION, FULL), (0.5, 0.5, attention, full), strict=True)
    assert a_climb(*tried).chosen.name == chosen


def test_a_tie_of_learning_rates_goes_to_the_usual_one():
    trials = tuple(Trial(rate=rate, accuracy=0.5) for rate in rungs.SGD_RATES)
    assert Rung(name=FULL, accuracy=0.5, seconds=1.0, trials=trials).rate == 0.01


def test_test_pictures_choose_nothing(colors, start, tmp_path):
    other = dict(np.load(colors))
    other["y_test"] = (other["y_test"] + 1) % 3
    other["x_test"] = 255 - other["x_test"]
    np.savez(tmp_path / "other.npz", **other)
    found = []
    for data in (colors, tmp_path / "other.npz"):
        climb(order_of(data, tmp_path / data.stem, start))
        found.append([without_times(rung) for rung in written(tmp_path / data.stem)["rungs"]])
    assert found[0] == found[1]
    one, two = (vitrail.load(tmp_path / name).state_dict() for name in ("colors", "other"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_set_with_val_and_test_is_chosen_by_val(colors, start, tmp_path, quick):
    whole = dict(np.load(colors))
    whole |= {"x_val": whole["x_test"], "y_val": whole["y_test"]}
    np.savez(colors, **whole)
    runs = quick()
    found = climb(order_of(colors, tmp_path / "out", start))
    assert (found.dev, found.pictures) == ("val", 12)
    assert found.outcomes.keys() == {"val", "test"}
    material = runs.orders[0].material
    assert named(material.train) == named(open_source(colors, "train"))
    assert named(material.judged["dev"]) == named(open_source(colors, "val"))


@pytest.mark.parametrize(("pictures", "kept"), [(1000, 100), (20_000, 400), (100_000, 1000)])
def test_the_larger_the_set_the_smaller_the_share_that_is_kept_apart(pictures, kept):
    class Nowhere:
        in_memory = True

    labels = np.arange(pictures) % 4
    names = Rows([("train", pictures)])
    collection = Collection(names=names, labels=labels, classes=tuple("abcd"), store=Nowhere())
    part, dev = apart(Material(reference="x", train=Samples(collection), judged={}))
    assert len(dev) == kept
    assert len(part) + len(dev) == pictures
    assert np.bincount(dev.labels()).tolist() == [kept // 4] * 4
    assert not set(part.rows) & set(dev.rows)


def test_a_share_to_keep_apart_that_is_given_takes_nothing_from_the_last_run(
    colors, start, tmp_path, quick
):
    runs = quick({"full-fine-tuning": 1.0}, probes=0.0)
    found = climb(order_of(colors, tmp_path / "out", start, dev=0.2))
    assert (found.dev, found.pictures) == ("train", 6)
    assert len(runs.orders[0].material.train) == 24
    assert found.outcomes.keys() == {"test"}
    train = fingerprint(open_source(colors, "train"))
    assert vitrail.load(tmp_path / "out").metadata.provenance["fingerprint"] == train
    assert read_run(tmp_path / "out")[0].dev is None  # nor when it is resumed


def test_no_share_is_the_usual_one(colors, start, tmp_path, quick):
    quick()
    assert climb(order_of(colors, tmp_path / "out", start, dev=0.0)).pictures == 3


def test_too_few_pictures_to_keep_some_apart_are_refused(colors, start, tmp_path):
    few = write_colors(colors, train=6)
    with pytest.raises(DataError, match="6 training pictures, too few to keep some apart"):
        climb(order_of(few, tmp_path / "out", start, batch_size=None))


# What learns from what


def test_trials_do_not_see_dev_and_the_last_run_sees_all(colors, start, tmp_path, quick):
    runs = quick({"full-fine-tuning": 1.0}, real=True, probes=0.0)
    found = climb(order_of(colors, tmp_path / "out", start))
    assert found.chosen.name == FULL
    train = open_source(colors, "train")
    for order in runs.orders:
        learned, dev = named(order.material.train), named(order.material.judged["dev"])
        assert not learned & dev
        assert learned | dev == named(train)
        assert order.material.judged.keys() == {"dev"}
    assert len(runs.orders) == 6
    model = vitrail.load(tmp_path / "out")
    assert model.metadata.provenance["fingerprint"] == fingerprint(train)
    assert "dev accuracy" not in model.metadata.provenance
    assert found.outcomes["test"].accuracy == vitrail.evaluate(model, colors).accuracy
    assert (tmp_path / "out" / "report.html").exists()
    assert read_run(tmp_path / "out")[0].optim.learning_rate == 2e-4


def test_a_probe_that_is_chosen_has_seen_all_training_pictures(colors, start, tmp_path, quick):
    quick(probes=1.0)
    climb(order_of(colors, tmp_path / "out", start))
    model = vitrail.load(tmp_path / "out")
    memory = load_memory(tmp_path / "out", model)
    assert memory is not None  # so that it can be taught more
    assert int(memory.counts.sum()) == 30
    assert model.metadata.provenance["head"] == "few-shot probe on 30 pictures"


def test_a_linear_head_that_is_chosen_is_the_bundle(colors, start, tmp_path, quick, monkeypatch):
    quick()
    monkeypatch.setattr(rungs, "right", lambda probe, dev: float(hasattr(probe, "bias")))
    found = climb(order_of(colors, tmp_path / "out", start))
    assert found.chosen.name == LINEAR
    assert vitrail.evaluate(str(tmp_path / "out"), colors).accuracy == (
        found.outcomes["test"].accuracy
    )
    assert not (tmp_path / "out" / MEMORY).exists()


def test_attention_only_changes_attention_and_head_and_nothing_else(colors, start, tmp_path, quick):
    quick({"attention": 1.0}, real=True, probes=0.0)
    found = climb(order_of(colors, tmp_path / "out", start))
    assert found.chosen.name == ATTENTION
    before, after = (vitrail.load(folder).state_dict() for folder in (start, tmp_path / "out"))
    for name in before:
        learned = ".attention." in name or name.startswith("head.")
        assert torch.equal(before[name], after[name]) is not learned, name


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("ViT-Mu/4", {}),
        ("ViT-Mu/4", {"pool": "map"}),
        ("ViT-Mu/4", {"stem": "conv", "layer_scale": 0.1, "position": "relative"}),
        ("ViT-Mu/4", {"pool": "cls", "distillation": True}),
    ],
)
def test_the_patterns_freeze_all_but_attention_and_heads(name, changes):
    model = create(name, num_classes=3, **changes)
    patterns = rungs.frozen(ATTENTION, model)
    freeze(model, patterns)
    for weight, parameter in model.named_parameters():
        learns = ".attention." in weight or weight.startswith(("head.", "distillation_head."))
        assert parameter.requires_grad == learns, weight
    assert len(patterns) < 12  # they are for people to read


def test_a_model_without_attention_goes_from_its_head_to_all_weights(colors, tmp_path, quick):
    quick({"full-fine-tuning": 0.5})
    small = {"width": 16, "tokens_mlp": 8, "channels_mlp": 16, "depth": 2}
    mixer = create("Mixer-S/16", image_size=8, patch_size=4, num_classes=3, **small)
    vitrail.save(mixer, tmp_path / "mixer")
    book = Notebook()
    found = climb(order_of(colors, tmp_path / "out", str(tmp_path / "mixer")), book)
    attention = found.rungs[2]
    assert attention.accuracy is None
    assert "no attention" in attention.problem
    assert found.rungs[3].accuracy == 0.5


# Learning rates


@pytest.mark.parametrize(
    ("optim", "rates"),
    [
        (Optim(kind="sgd", learning_rate=0.01), (0.01, 0.003, 0.03, 0.001)),
        (Optim(kind="adamw", learning_rate=2e-4), (2e-4, 6e-5, 6e-4)),
        (Optim(kind="lion", learning_rate=3e-5), (3e-5, 9e-6, 9e-5)),
    ],
)
def test_the_grid_is_that_of_the_paper_or_lies_around_the_usual_rate(optim, rates):
    assert rungs.rates_around(optim) == rates


def test_muons_matrices_follow_the_grid():
    settings = replace(FINE, optim=Optim(kind="muon", learning_rate=1e-3))
    optim = rungs.tuned(settings, 3e-3, (), float("inf")).optim
    assert optim.muon_learning_rate == pytest.approx(0.06)


def test_a_trial_that_diverges_is_told_and_does_not_stop_the_ladder(colors, start, tmp_path):
    book = Notebook()
    optim = Optim(kind="sgd", warmup_steps=0, schedule="constant")
    order = order_of(colors, tmp_path / "out", start, optim=optim, steps=4)
    found = climb(order, book, rate=1e30)
    assert [rung.accuracy for rung in found.rungs[2:]] == [None, None]
    assert found.rungs[3].problem.startswith("training failed at step ")
    assert any(
        line.startswith("  full fine-tuning, learning rate 1e+30: train") for line in book.lines
    )
    assert found.finished
    assert found.chosen.name in (PROBE, LINEAR)
    assert written(tmp_path / "out")["rungs"][3]["trials"][0]["problem"] == found.rungs[3].problem


@pytest.mark.parametrize("where", [rungs, summit])
def test_a_full_disk_is_no_matter_of_learning_rates(
    colors, start, tmp_path, quick, monkeypatch, where
):
    def fail(order, watch):
        raise CheckpointError("cannot write state: No space left on device")

    quick({"full-fine-tuning": 1.0}, probes=0.0)
    monkeypatch.setattr(where, "run", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        climb(order_of(colors, tmp_path / "out", start))


# Stopping


def test_a_ladder_that_is_stopped_in_a_trial_leaves_nothing(colors, start, tmp_path, quick):
    class Impatient(Notebook):
        def step(self, row):
            signal.raise_signal(signal.SIGINT)

    order = order_of(colors, tmp_path / "out", start)
    with pytest.raises(KeyboardInterrupt):
        climb(order, Impatient())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {".lock"}
    quick()
    assert climb(order).finished  # starts over


def test_a_ladder_that_is_stopped_in_its_last_run_can_be_resumed(colors, start, tmp_path, quick):
    class Impatient(Notebook):
        def step(self, row):
            if "chosen: full fine-tuning" in self.lines and row["step"] == 1:
                signal.raise_signal(signal.SIGINT)

    quick({"full-fine-tuning": 1.0}, probes=0.0)
    out = tmp_path / "out"
    found = climb(order_of(colors, out, start), Impatient())
    assert not found.finished
    assert written(out)["finished"] is False
    assert has_state(out)
    assert not (out / "config.json").exists()
    settings, data, origin = read_run(out)
    done = real_run(Order(data=data, out=out, settings=settings, start=origin, resume=True))
    assert done.finished
    assert done.step == 2


def test_an_older_ladder_is_replaced_if_that_is_wished(colors, start, tmp_path, quick):
    out = tmp_path / "out"
    quick(probes=1.0)
    climb(order_of(colors, out, start))
    with pytest.raises(ConfigError, match="holds a model already"):
        climb(order_of(colors, out, start))
    quick({"full-fine-tuning": 1.0}, probes=0.0)
    climb(order_of(colors, out, start, overwrite=True))
    assert "head" not in vitrail.load(out).metadata.provenance
    assert not (out / MEMORY).exists()  # it was of other weights


def test_what_else_lies_in_a_folder_called_trials_stays(colors, start, tmp_path):
    mine = tmp_path / "out" / "trials" / "mine.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    climb(order_of(colors, tmp_path / "out", start))
    assert [path.name for path in mine.parent.iterdir()] == ["mine.txt"]


# What is refused, and what is said


def test_what_was_left_out_of_the_pictures_to_judge_by_is_told(start, tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("test", 1)):
        for name in CLASSES:
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "set" / "test" / "red" / "notes.txt").write_text("not a picture")
    book = Notebook()
    prepare(order_of(tmp_path / "set", tmp_path, start), book, torch.device("cpu"), 0.0, None)
    told = [line for line in book.lines if line.startswith("note: ")]
    assert told == ["note: 1 files are no pictures and were left out: .txt 1"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "masked-patches"}, "the ladder compares classifiers"),
        ({"until_accuracy": 0.9}, "until_accuracy ends one run early"),
    ],
)
def test_what_is_no_comparison_of_classifiers_is_refused(colors, start, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        climb(order_of(colors, tmp_path / "out", start, **changes))


def test_several_processes_are_refused(colors, start, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="one process, and there are 2; start it without torchrun"
    ):
        climb(order_of(colors, tmp_path / "out", start))


def test_several_labels_are_refused(start, tmp_path):
    path = tmp_path / "list.csv"
    path.write_text("\n".join(["path,label", *(f"{i}.png,red|blue" for i in range(4))]))
    with pytest.raises(DataError, match="several labels each, and the ladder's probes take one"):
        climb(order_of(path, tmp_path / "out", start, batch_size=None))


def a_climb(*tried, **changes) -> Climb:
    found = tuple(Rung(name=name, accuracy=accuracy, seconds=190.0) for name, accuracy in tried)
    about = {"folder": Path("out"), "data": "flowers", "start": "run", "dev": "train"}
    return Climb(**about, pictures=240, rungs=found, finished=True, **changes)


def test_it_is_told_which_step_paid():
    tried = ((PROBE, 0.912), (LINEAR, 0.908), (ATTENTION, 0.94), (FULL, 0.936))
    lines = list(report(a_climb(*tried)))
    assert max(map(len, lines)) <= 80
    told = " ".join(line.strip() for line in lines)
    assert (
        "few-shot probe: 91.2 %; linear head did not pay (90.8 %); attention-only paid: "
        "91.2 -> 94.0 % for 3 min 10 s; full fine-tuning did not pay (93.6 %)."
    ) in told
    assert "dev is 240 pictures, cut out of train" in told


def test_the_command_tells_the_ladder_as_json(colors, start, tmp_path, capsys, quick):
    runs = quick()
    words = ["finetune", str(colors), "--from", start, "--ladder", "--out", str(tmp_path / "out")]
    small = ["--batch-size", "6", "--model.image-size", "8"]
    assert main([*words, "--json", "--recipe", "paper-finetune", *small]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == written(tmp_path / "out")
    rates = [order.settings.optim.learning_rate for order in runs.orders]
    assert rates == [*rungs.SGD_RATES] * 2  # the recipe's is the middle of them


def test_a_learning_rate_that_is_given_is_the_only_one(colors, start, tmp_path, capsys, quick):
    runs = quick()
    words = ["finetune", str(colors), "--from", start, "--ladder", "--out", str(tmp_path / "out")]
    assert main([*words, "--optim.learning-rate", "0.5"]) == 0
    assert [order.settings.optim.learning_rate for order in runs.orders] == [0.5, 0.5]
    printed = capsys.readouterr().out
    assert "attention-only" in printed
    assert "test: " in printed


def test_a_ladder_is_not_resumed(colors, start, tmp_path, capsys):
    words = ["finetune", str(colors), "--from", start, "--ladder", "--resume"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    message = "vitrail: --ladder begins anew and --resume goes on; leave one of them out\n"
    assert capsys.readouterr().err == message
