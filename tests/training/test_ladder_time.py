"""The ladder keeps its time: what is left out for want of it, and what never is."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_ladders import named, order_of, real_run

import vitrail
from tiny_runs import Notebook
from vitrail.data.sources import open_source
from vitrail.errors import TrainingError
from vitrail.probing.memory import load_memory
from vitrail.training import ground, rungs, summit
from vitrail.training.ground import Clock, prepare
from vitrail.training.ladder import climb
from vitrail.training.material import subsample
from vitrail.training.run import Result
from vitrail.training.watch import Watch


def looks(monkeypatch, seconds) -> list[set[str]]:
    """Let a look at a picture take so long; what the probes then look at."""
    seen, look = [], rungs.features_of

    def remembered(model, source, **how):
        seen.append(named(source))
        return look(model, source, **how)

    monkeypatch.setattr(ground, "seconds_each", lambda ground, device: seconds)
    monkeypatch.setattr(rungs, "features_of", remembered)
    return seen


def test_the_probes_see_no_more_pictures_than_there_is_time_for(
    colors, start, tmp_path, quick, monkeypatch
):
    quick(probes=1.0)
    seen, book = looks(monkeypatch, 60.0), Notebook()
    found = climb(order_of(colors, tmp_path / "out", start, minutes=71.5), book)
    part, dev = seen
    assert (len(part), len(dev)) == (11, 3)  # a quarter of what 12 test pictures leave
    assert not part & dev
    assert "the probes see 11 of 27 pictures: there is no time for more" in book.lines
    assert found.pictures == 3
    about = vitrail.load(tmp_path / "out").metadata.provenance
    assert about["head"] == "few-shot probe on 14 pictures"
    assert not any("on top" in line for line in book.lines)


def test_dev_is_made_smaller_too_where_even_that_takes_too_long(
    colors, start, tmp_path, quick, monkeypatch
):
    runs, book = quick({"attention": 1.0}, probes=0.0), Notebook()
    seen = looks(monkeypatch, 60.0)
    stopped = {"step": 1, "seconds": 1.0, "finished": False}
    monkeypatch.setattr(summit, "run", lambda order, watch: Result(folder=order.out, **stopped))
    order = order_of(colors, tmp_path / "out", start, minutes=51.5, dev=0.5)
    found = climb(order, book)
    assert [len(part) for part in seen] == [5, 4]
    assert "dev is 4 of 15 pictures: there is no time for more" in book.lines
    assert found.pictures == 4
    assert {len(order.material.judged["dev"]) for order in runs.orders} == {4}  # the same for all
    assert {len(order.material.train) for order in runs.orders} == {15}


def test_without_a_time_to_keep_nothing_is_measured_and_all_is_seen(
    colors, start, tmp_path, quick, monkeypatch
):
    quick(probes=1.0)
    seen = looks(monkeypatch, None)
    climb(order_of(colors, tmp_path / "out", start))
    assert [len(part) for part in seen] == [27, 3]


def test_fewer_pictures_are_the_same_ones_each_time_and_some_of_each_class(colors):
    train = open_source(colors, "train")
    some = subsample(train, 12)
    assert np.bincount(some.labels()).tolist() == [4, 4, 4]
    assert named(some) == named(subsample(train, 12))
    assert np.bincount(subsample(train, 0).labels()).tolist() == [1, 1, 1]
    assert subsample(train, 30) is train


def test_time_is_kept_for_judging_the_result(colors, start, tmp_path, quick, monkeypatch):
    runs = quick(probes=1.0)
    looks(monkeypatch, 10.0)  # two minutes for the test pictures
    climb(order_of(colors, tmp_path / "out", start, minutes=10.0))
    first, second = (order.settings.minutes for order in runs.orders[:2])
    assert first == pytest.approx(8 / 6, rel=0.1)  # two trials in a third of what is free
    assert second == pytest.approx(8 / 3, rel=0.1)  # the first took no time


def test_judging_that_takes_longer_than_all_is_told_and_done(
    colors, start, tmp_path, quick, monkeypatch
):
    runs, book = quick(probes=1.0), Notebook()
    looks(monkeypatch, 10.0)
    found = climb(order_of(colors, tmp_path / "out", start, minutes=3.0), book)
    told = "note: judging the result by 12 pictures takes about 2 min 0 s, which comes on top"
    assert any(line.startswith(told) for line in book.lines)
    assert found.outcomes["test"].samples == 12
    assert runs.orders[0].settings.minutes == pytest.approx(1, rel=0.1)  # a third, in one trial


def test_the_bundle_is_there_before_it_is_judged(colors, start, tmp_path, quick, monkeypatch):
    def stopped(*about, **how):
        raise KeyboardInterrupt

    quick(probes=1.0)
    monkeypatch.setattr(summit, "quick_outcome", stopped)
    with pytest.raises(KeyboardInterrupt):
        climb(order_of(colors, tmp_path / "out", start))
    model = vitrail.load(tmp_path / "out")
    assert model.metadata.provenance["head"] == "few-shot probe on 30 pictures"
    assert load_memory(tmp_path / "out", model) is not None


def test_how_long_a_look_takes_is_measured_after_a_warm_up(colors, start, tmp_path, monkeypatch):
    class Time:
        now = 0.0

        @classmethod
        def monotonic(cls):
            return cls.now

    device = torch.device("cpu")
    made = prepare(order_of(colors, tmp_path, start), Watch(), device, 0.0, 0.5)
    model, seen = made.learner.model, []
    features = model.features

    def slow(images):
        Time.now += 100.0 if not seen else 2.0 * len(images)
        seen.append(len(images))
        return features(images)

    monkeypatch.setattr(model, "features", slow)
    monkeypatch.setattr(ground, "time", Time)
    assert ground.seconds_each(made, device) == 2.0
    assert seen == [4, 15]


def test_the_time_is_shared_out_among_trials_and_the_last_run(
    colors, start, tmp_path, quick, monkeypatch
):
    runs, last = quick({"full-fine-tuning": 1.0}, probes=0.0), []

    def one_step(order, watch):
        last.append(order.settings)
        short = replace(order.settings, minutes=None, steps=1)
        return real_run(replace(order, settings=short), watch)

    monkeypatch.setattr(summit, "run", one_step)
    climb(order_of(colors, tmp_path / "out", start, minutes=9.0))
    minutes = [order.settings.minutes for order in runs.orders]
    assert minutes[:3] == pytest.approx([1, 1.5, 3], abs=0.1)  # what one leaves, others have
    assert minutes[3:] == pytest.approx([2, 3, 6], abs=0.1)
    assert last[0].minutes == pytest.approx(9, abs=0.1)
    assert (last[0].steps, last[0].epochs) == (None, None)


def test_with_little_time_fewer_learning_rates_are_tried(colors, start, tmp_path, quick):
    runs = quick()
    found = climb(order_of(colors, tmp_path / "out", start, minutes=0.25))
    assert found.rungs[2].trials[0].accuracy is not None  # the usual one, with all the time
    assert [trial.problem for trial in found.rungs[2].trials] == ["", *[rungs.NO_TIME] * 2]
    assert runs.orders[0].settings.minutes > 0.05


def test_steps_for_which_there_is_no_time_are_told_and_the_others_count(
    colors, start, tmp_path, quick
):
    runs, book = quick(), Notebook()
    found = climb(order_of(colors, tmp_path / "out", start, minutes=0.01), book)
    assert not runs.orders
    assert found.finished
    assert [rung.problem for rung in found.rungs[2:]] == [rungs.NO_TIME] * 2
    assert f"  attention-only, learning rate 0.0002: {rungs.NO_TIME}" in book.lines


def test_a_trial_with_time_for_one_step_only_does_not_count(colors, start, tmp_path, quick):
    quick({"attention": 1.0}, steps=1)
    found = climb(order_of(colors, tmp_path / "out", start, minutes=9.0))
    assert found.rungs[2].accuracy is None
    assert found.rungs[2].problem == rungs.TOO_SHORT


@pytest.mark.parametrize("time", ["left", "free"])  # none at all, or only to judge
def test_where_there_is_no_time_to_train_it_again_the_trial_is_the_result(
    colors, start, tmp_path, quick, monkeypatch, time
):
    class Late(Notebook):
        def say(self, line):
            super().say(line)
            if line.startswith("chosen"):
                monkeypatch.setattr(Clock, time, lambda clock: 0.0)

    quick({"attention": 1.0}, real=True, probes=0.0)
    book = Late()
    found = climb(order_of(colors, tmp_path / "out", start), book)
    assert book.lines[-1].startswith("note: no time is left to train on all pictures")
    check_result(found, colors)


def test_where_training_it_again_fails_the_trial_is_the_result(
    colors, start, tmp_path, quick, monkeypatch
):
    def fail(order, watch):
        raise TrainingError("training failed at step 1; and more")

    quick({"attention": 1.0}, real=True, probes=0.0)
    monkeypatch.setattr(summit, "run", fail)
    book = Notebook()
    found = climb(order_of(colors, tmp_path / "out", start), book)
    assert book.lines[-1].startswith("note: training failed at step 1; the result is the model")
    check_result(found, colors)


def check_result(found, data) -> None:
    assert found.finished
    assert vitrail.evaluate(str(found.folder), data).accuracy == found.outcomes["test"].accuracy
    assert not (found.folder / "trials").exists()
