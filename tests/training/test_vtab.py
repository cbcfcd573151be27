"""The VTAB-1k protocol: what is drawn, what chooses, what is judged, and what is not done twice."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import TINY, Notebook, write_colors
from vitrail.cli.vtab import Vtab, words
from vitrail.data.datasets import ImageDataset, open_dataset, stratified_subset
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError
from vitrail.models.build import create
from vitrail.training import transfer
from vitrail.training.scores import Ledger, Report, Score, TaskScores
from vitrail.training.tasks import Task, deal, open_task, read_tasks
from vitrail.training.vtab import Bench, Protocol, measure

SMALL = {"steps": 8, "batch_size": 6, "image_size": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def save_model(folder, seed=0, classes=2):
    generator = torch.Generator().manual_seed(seed)
    made = create("ViT-Mu/4", generator=generator, **TINY.changes() | {"num_classes": classes})
    torch.nn.init.normal_(made.head.weight, generator=generator)
    vitrail.save(made, folder)
    return str(folder)


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


@pytest.fixture
def colors(tmp_path):
    return open_task(Task(name="colors", data=str(write_colors(tmp_path / "colors.npz"))))


def bench(model, tmp_path, **changes):
    lines = []
    made = Bench(
        reference=model,
        protocol=Protocol(**{"examples": 20, **changes}),
        out=tmp_path / "out",
        tell=lines.append,
    )
    return made, lines


def tasks_file(tmp_path, text):
    path = tmp_path / "tasks.toml"
    path.write_text(text)
    return path


def places(part):
    return set(range(len(part)) if part.rows is None else part.rows.tolist())


# What is drawn


@pytest.mark.parametrize("count", [20, 30, 1000])
def test_four_fifths_and_one_fifth_are_disjoint_and_together_all(colors, count):
    hand = deal(colors.train, count, seed=0)
    assert len(hand.train) == min(count, 30)
    assert len(hand.fit) == 0.8 * len(hand.train)
    assert places(hand.fit).isdisjoint(places(hand.dev))
    assert places(hand.fit) | places(hand.dev) == places(hand.train)
    assert places(hand.train) <= places(colors.train)


def test_a_thousand_are_eight_hundred_and_two_hundred(tmp_path):
    data = write_colors(tmp_path / "many.npz", train=1200)
    hand = deal(open_dataset(data, "train"), transfer.EXAMPLES, seed=0)
    assert [len(part) for part in (hand.train, hand.fit, hand.dev)] == [1000, 800, 200]
    assert np.ptp(np.bincount(hand.dev.labels())) <= 1


def test_the_draw_is_the_seeds(colors):
    rows = [places(deal(colors.train, 20, seed=seed).train) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_classes_keep_their_shares_and_the_rarest_has_one():
    labels = np.repeat(np.arange(4), [600, 300, 99, 1])
    drawn = stratified_subset(labels, 100, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 100
    assert np.abs(np.bincount(labels[drawn]) - [60, 30, 9, 1]).max() <= 1
    assert np.bincount(labels[drawn])[3] == 1


def test_more_classes_than_pictures_is_no_error():
    drawn = stratified_subset(np.arange(50), 10, np.random.default_rng(0))
    assert len(drawn) == 10


# What chooses


class Spy:
    """A method that remembers what it was asked, and likes some settings better."""

    setting = "rate"

    def __init__(self, accuracies, candidates):
        self.accuracies, self.candidates, self.asked = accuracies, candidates, []

    def begin(self, task, hand, seed):
        def trial(setting, stage, folder):
            self.asked.append((setting, stage))
            return self.accuracies[stage, setting], 12

        return trial


def test_the_setting_that_the_held_out_fifth_likes_is_tested_and_no_other(
    model, colors, tmp_path, monkeypatch
):
    found = {("choice", 0.1): 0.5, ("choice", 0.2): 0.7, ("choice", 0.3): 0.7}
    found |= {("test", 0.1): 1.0, ("test", 0.2): 0.6, ("test", 0.3): 0.9}
    spy = Spy(found, (0.1, 0.2, 0.3))
    monkeypatch.setitem(transfer.METHODS, "finetune", lambda bench, model: spy)
    report = measure(bench(model, tmp_path)[0], [colors])
    assert spy.asked == [(0.1, "choice"), (0.2, "choice"), (0.3, "choice"), (0.2, "test")]
    assert report.tasks[0].scores[0].setting == 0.2
    assert report.mean == 0.6
    assert report.tasks[0].scores[0].choices == {0.1: 0.5, 0.2: 0.7, 0.3: 0.7}


def test_a_single_setting_leaves_nothing_to_choose(model, colors, tmp_path, monkeypatch):
    spy = Spy({("test", 0.1): 0.25}, (0.1,))
    monkeypatch.setitem(transfer.METHODS, "finetune", lambda bench, model: spy)
    measure(bench(model, tmp_path)[0], [colors])
    assert spy.asked == [(0.1, "test")]


def test_fine_tuning_learns_from_four_fifths_to_choose_and_from_all_to_be_judged(
    model, colors, tmp_path, monkeypatch
):
    orders = []

    def watched(order, watch):
        orders.append(order)
        return run(order, watch)

    run = transfer.run
    monkeypatch.setattr(transfer, "run", watched)
    made, lines = bench(model, tmp_path, learning_rates=(0.01, 0.1), **SMALL)
    report = measure(made, [colors])
    hand = deal(colors.train, 20, seed=0)
    learned = [places(order.material.train) for order in orders]
    judged = [places(part) for order in orders for part in order.material.judged.values()]
    assert learned == [places(hand.fit)] * 2 + [places(hand.train)]
    assert judged == [places(hand.dev)] * 2 + [places(colors.test)]
    assert report.tasks[0].scores[0].judged == len(colors.test) == 12
    assert [f.name.split("-")[0] for f in (tmp_path / "out/runs/colors").iterdir()] == ["test"]
    assert any("all of them, rate" in line for line in lines)


def failing(monkeypatch, error):
    """Runs that fail at a rate of 0.1."""
    run = transfer.run

    def perhaps(order, watch):
        if order.settings.optim.learning_rate == 0.1:
            raise error
        return run(order, watch)

    monkeypatch.setattr(transfer, "run", perhaps)


def test_a_rate_at_which_training_diverges_is_not_chosen(model, colors, tmp_path, monkeypatch):
    failing(monkeypatch, TrainingError("training failed at step 3; and more"))
    made, lines = bench(model, tmp_path, learning_rates=(0.1, 0.01), **SMALL)
    score = measure(made, [colors]).tasks[0].scores[0]
    assert score.choices[0.1] == 0.0
    assert score.setting == 0.01
    assert "  training failed at step 3: this rate counts as 0 %" in lines


def test_a_full_disk_says_nothing_about_a_rate(model, colors, tmp_path, monkeypatch):
    failing(monkeypatch, CheckpointError("cannot write state: No space left on device"))
    made, _ = bench(model, tmp_path, learning_rates=(0.1, 0.01), **SMALL)
    with pytest.raises(CheckpointError, match="No space left"):
        measure(made, [colors])
    assert not Ledger(tmp_path / "out" / "results.jsonl").rows


def test_a_head_that_happens_to_fit_is_not_taken_over(colors, tmp_path):
    book = Notebook()
    made, _ = bench(save_model(tmp_path / "three", classes=3), tmp_path, **SMALL)
    measure(replace(made, watch=lambda: book), [colors])
    assert not (tmp_path / "out" / "headless").exists()
    assert len(book.verdicts) == 1  # the test pictures are looked at once, at the end
    assert book.rows[0]["loss"] == pytest.approx(math.log(3), abs=1e-6)


def test_the_papers_setting_is_the_default():
    protocol = Protocol()
    assert protocol.learning_rates == (0.01,)
    settings = transfer.settings_for(protocol, 0.01, 1000, vary=True)
    assert (settings.steps, settings.batch_size, settings.model.image_size) == (2500, 512, 384)
    optim = settings.optim
    assert (optim.kind, optim.learning_rate, optim.momentum) == ("sgd", 0.01, 0.9)
    assert (optim.schedule, optim.clip_norm, optim.warmup_steps) == ("cosine", 1.0, 100)
    short = transfer.settings_for(Protocol(steps=50), 0.01, 40, vary=False)
    assert (short.optim.warmup_steps, short.batch_size) == (2, 40)
    assert short.preprocessing is None  # the model's own
    assert (short.augment.crop, short.augment.flip) == ("whole", False)


@pytest.mark.parametrize(("method", "setting"), [("linear", "decay"), ("probe", "l2")])
def test_probes_learn_colors_and_choose_their_strength(model, colors, tmp_path, method, setting):
    report = measure(bench(model, tmp_path, method=method)[0], [colors])
    score = report.tasks[0].scores[0]
    assert report.setting == setting
    assert report.mean > 0.9
    assert score.choices[score.setting] == max(score.choices.values())
    assert len(score.choices) == len(transfer.DECAYS if method == "linear" else transfer.PATH)
    assert score.learned == 20
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["choice"] * len(score.choices) + ["test"]


def test_a_probe_learns_from_four_fifths_to_choose_and_from_all_to_be_judged(
    model, colors, tmp_path, monkeypatch
):
    rows = []

    def watched(values, labels, classes, l2):
        rows.append(len(labels))
        return fit(values, labels, classes, l2)

    fit = transfer.fit
    monkeypatch.setattr(transfer, "fit", watched)
    measure(bench(model, tmp_path, method="probe")[0], [colors])
    assert rows == [16] * len(transfer.PATH) + [20]


def test_the_test_pictures_choose_nothing(model, tmp_path):
    """Other test labels change the score, and not the choice."""
    write_colors(tmp_path / "colors.npz")
    with np.load(tmp_path / "colors.npz") as parts:
        parts = dict(parts)
    parts["y_test"] = (parts["y_test"] + 1) % 3
    np.savez(tmp_path / "wrong.npz", **parts)
    names = ("colors", "wrong")
    tasks = [open_task(Task(name=name, data=str(tmp_path / f"{name}.npz"))) for name in names]
    right, wrong = measure(bench(model, tmp_path, method="probe")[0], tasks).tasks
    assert right.accuracy > 0.9
    assert wrong.accuracy < 0.1
    assert right.scores[0].choices == wrong.scores[0].choices
    assert right.scores[0].setting == wrong.scores[0].setting


def test_what_is_odd_about_the_pictures_is_told_once_for_each_task(
    model, colors, tmp_path, monkeypatch
):
    divided = "dataset defines no splits"
    train = ImageDataset(colors.train.index, colors.train.rows, [divided])
    test = ImageDataset(colors.test.index, colors.test.rows, [divided, "1 file was left out"])
    spy = Spy({("test", 0.1): 0.25}, (0.1,))
    monkeypatch.setitem(transfer.METHODS, "finetune", lambda bench, model: spy)
    made, lines = bench(model, tmp_path)
    measure(made, [replace(colors, train=train, test=test)], seeds=2)
    assert lines[1:3] == [f"  note: {divided}", "  note: 1 file was left out"]
    assert sum(divided in line for line in lines) == 1


# What is not done twice


def test_a_second_call_repeats_nothing_and_says_so(model, colors, tmp_path, monkeypatch):
    made, lines = bench(model, tmp_path, **SMALL)
    first = measure(made, [colors])
    assert not any("done before" in line for line in lines)
    monkeypatch.setattr(transfer, "run", None)
    second = measure(made, [colors])
    assert second.to_dict() == first.to_dict()
    assert any("done before" in line for line in lines)
    with pytest.raises(TypeError):  # other settings are another trial
        measure(bench(model, tmp_path, **SMALL | {"steps": 9})[0], [colors])


def test_another_model_under_the_same_name_is_measured_anew(model, colors, tmp_path):
    made, lines = bench(model, tmp_path, method="probe")
    measure(made, [colors])
    save_model(model, seed=1)
    measure(made, [colors])
    assert not any("done before" in line for line in lines)


def test_a_run_that_was_stopped_goes_on(model, colors, tmp_path, monkeypatch):
    class StopAtOnce(vitrail.training.survival.Stop):
        def __bool__(self):
            return True

    made, lines = bench(model, tmp_path, **SMALL)
    with monkeypatch.context() as patched:
        patched.setattr("vitrail.training.survival.Stop", StopAtOnce)
        with pytest.raises(KeyboardInterrupt):
            measure(made, [colors])
    assert lines[-1].startswith("stopped; nothing is lost")
    resumed = []
    run = transfer.run
    monkeypatch.setattr(transfer, "run", lambda o, w: resumed.append(o.resume) or run(o, w))
    assert len(measure(made, [colors]).tasks) == 1
    assert resumed == [True]


def test_a_line_that_a_crash_cut_off_is_left_out_and_the_next_is_whole(tmp_path):
    path = tmp_path / "results.jsonl"
    ledger = Ledger(path)
    ledger.add({"task": "a"}, {"accuracy": 0.5, "pictures": 2})
    with path.open("a") as file:
        file.write('{"task": "b", "accu')
    again = Ledger(path)
    assert again.find({"task": "b"}) is None
    again.add({"task": "c"}, {"accuracy": 0.25, "pictures": 4})
    assert [row["task"] for row in Ledger(path).rows] == ["a", "c"]


# Means


def scored(name, group, *accuracies):
    scores = [
        Score(seed=seed, setting=0.01, accuracy=value, learned=1000, judged=9, choices={})
        for seed, value in enumerate(accuracies)
    ]
    return TaskScores(task=Task(name=name, data=name, group=group), classes=2, scores=scores)


def test_means_are_of_tasks_of_groups_and_of_group_means():
    tasks = [scored("a", "natural", 0.9), scored("b", "natural", 0.7), scored("c", "odd", 0.2, 0.4)]
    report = Report(model="m", protocol={"method": "probe"}, setting="l2", tasks=tasks)
    assert report.groups == pytest.approx({"natural": 0.8, "odd": 0.3})
    assert report.mean == pytest.approx((0.9 + 0.7 + 0.3) / 3)
    assert report.mean_of_groups == pytest.approx(0.55)
    plain = Report(model="m", protocol={}, setting="l2", tasks=[scored("a", "other", 0.5)])
    assert (plain.groups, plain.mean_of_groups, plain.mean) == ({}, None, 0.5)


def test_the_table_fits_in_80_columns():
    tasks = [scored("a" * 90, "g" * 90, 0.123, 1.0), scored("b", "g" * 90, 1.0)]
    report = Report(model="m", protocol={"method": "finetune"}, setting="rate", tasks=tasks)
    lines = list(words(report))
    assert max(map(len, lines)) <= 80
    assert any("56.1 % ± 62.0" in line for line in lines)


# The file of tasks


def test_paths_are_relative_to_the_file_and_addresses_are_not(tmp_path):
    write_colors(tmp_path / "colors.npz")
    text = '[[task]]\ndata = "colors.npz"\n'
    text += '[[task]]\ndata = "builtin:sign-digits"\ngroup = "structured"\n'
    text += f'[[task]]\ndata = "{tmp_path}/colors.npz"\nname = "again"\nvary = false\n'
    first, second, third = read_tasks(tasks_file(tmp_path, text))
    assert (first.name, first.group, first.vary) == ("colors", "other", True)
    assert len(open_task(first).test) == 12
    assert (second.name, second.data, second.vary) == ("sign-digits", "builtin:sign-digits", False)
    assert (third.data, third.vary) == (first.data, False)


def test_without_a_test_split_val_is_the_judge(tmp_path):
    for split in ("train", "val"):
        for name in ("ape", "bee"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for number in range(4):
                (tmp_path / "set" / split / name / f"{number}.png").write_bytes(b"")
    assert len(open_task(Task(name="set", data=str(tmp_path / "set"))).test) == 8


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "names no tasks"),
        ("[task]\ndata = 'a'", r"write \[\[task\]\]"),
        ("[[tasks]]\ndata = 'a'", "unknown key 'tasks'; did you mean 'task'?"),
        ("[[task]]\ndata = 'a'\ngruop = 'b'", "task 1: unknown key 'gruop'; did you mean 'group'?"),
        ("[[task]]\nname = 'a'", "task 1 names no data"),
        ("[[task]]\ndata = 3", "data=3 must be text in quotes"),
        ("[[task]]\ndata = 'a'\nvary = 'no'", "vary='no' must be true or false"),
        ("[[task]]\ndata = 'a'\nname = '../b'", "cannot name a folder"),
        ("[[task]]\ndata = 'a'\n[[task]]\ndata = 'b/a.tar'", "two tasks are called 'a'"),
        ("[[task]\ndata = 'a'", "is not a TOML file"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path, text, told):
    with pytest.raises(ConfigError, match=told):
        read_tasks(tasks_file(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the tasks in"):
        read_tasks(tmp_path / "none.toml")


def test_data_that_does_not_fit_the_protocol_is_refused_by_the_tasks_name(tmp_path):
    write_colors(tmp_path / "colors.npz")
    write_colors(tmp_path / "few.npz", train=4)
    write_colors(tmp_path / "one.npz", classes=1)
    (tmp_path / "many.csv").write_text("path,label,split\na.png,x|y,train\nb.png,y,test\n")
    (tmp_path / "odd.csv").write_text("path,label,split\na.png,x,train\nb.png,y,odd\n")
    for changes, told in [
        ({"data": "none.npz"}, "Dataset not found: "),
        ({"data": "many.csv"}, "several labels"),
        ({"data": "odd.csv"}, "has neither test nor val to judge by; it has: train, odd"),
        ({"data": "few.npz"}, "4 training pictures; 5 are the least"),
        ({"data": "one.npz"}, "1 classes"),
        ({"data": "colors.npz", "test": "val"}, "has no split 'val'"),
        ({"data": "colors.npz", "test": "training"}, "share pictures"),
        ({"data": "colors.npz", "test": "all"}, "share pictures"),
    ]:
        path = str(tmp_path / changes.pop("data"))
        with pytest.raises(DataError, match=f"^task 'it': .*{told}"):
            open_task(Task(name="it", data=path, **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "prob"}, "did you mean 'probe'"),
        ({"method": "probe", "steps": 3}, "steps is for the method finetune"),
        ({"method": "linear", "learning_rates": (0.1,)}, "learning_rates is for"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"learning_rates": (0.1, -1.0)}, "learning rate -1.0 must be"),
    ],
)
def test_an_impossible_protocol_is_refused(changes, told):
    with pytest.raises(ConfigError, match=told):
        Protocol(**changes)


def test_names_without_weights_and_no_seeds_are_refused(model, colors, tmp_path):
    with pytest.raises(CheckpointError, match="is a name"):
        measure(bench("ViT-Mu/4", tmp_path)[0], [colors])
    with pytest.raises(ConfigError, match="seeds=0 draws nothing"):
        measure(bench(model, tmp_path)[0], [colors], seeds=0)


# The command


def test_the_command_opens_all_tasks_before_it_begins(model, tmp_path):
    write_colors(tmp_path / "colors.npz")
    text = '[[task]]\ndata = "colors.npz"\n[[task]]\ndata = "none.npz"\n'
    command = Vtab(model=model, tasks=tasks_file(tmp_path, text), out=tmp_path / "out")
    with pytest.raises(DataError, match="task 'none': Dataset not found: "):
        command.run()
    assert not (tmp_path / "out").exists()


def test_the_command_tells_a_table_and_writes_what_it_tells(model, tmp_path, capsys):
    write_colors(tmp_path / "a.npz")
    write_colors(tmp_path / "b.npz", train=15)
    text = '[[task]]\ndata = "a.npz"\ngroup = "natural"\n[[task]]\ndata = "b.npz"\ngroup = "odd"\n'
    given = {"model": model, "tasks": tasks_file(tmp_path, text), "out": tmp_path / "out"}
    Vtab(**given, method="probe", seeds=2).run()
    told = capsys.readouterr().out
    assert "note: 30 training pictures are all there are, of 1,000" in told
    assert "mean of natural (1)" in told
    assert "mean of all tasks (2)" in told
    assert "mean of the groups' means" in told
    Vtab(**given, method="probe", seeds=2, json=True).run()
    out, err = capsys.readouterr()
    assert "done before" in err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads(out) == results | {"written": str(tmp_path / "out")}
    seeds = [[score["seed"] for score in task["scores"]] for task in results["tasks"]]
    assert seeds == [[0, 1], [0, 1]]


def test_fine_tuning_from_the_command_says_which_task_is_running(model, tmp_path, capsys):
    write_colors(tmp_path / "a.npz")
    path = tasks_file(tmp_path, '[[task]]\ndata = "a.npz"\n')
    Vtab(model=model, tasks=path, out=tmp_path / "out", **SMALL).run()
    told = capsys.readouterr().out
    assert "a, task 1 of 1" in told
    assert "step      1 of 8" in told
    assert "mean of all tasks (1)" in told
