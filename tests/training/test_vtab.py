"""The VTAB-1k protocol: draws, choices, tests, and reuse of trials."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import TINY, Recorder, write_colors
from vitrail.cli.vtab import Vtab, words
from vitrail.data.datasets import ImageDataset, open_dataset, stratified_subset
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError
from vitrail.models.vit import create
from vitrail.training import vtab
from vitrail.training.vtab import (
    Benchmark,
    BenchmarkReport,
    Protocol,
    Score,
    Task,
    TaskScores,
    TrialLog,
    draw_images,
    measure,
    open_task,
    read_tasks,
)

SMALL = {"steps": 8, "batch_size": 6, "image_size": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def save_model(folder, seed=0, classes=2):
    generator = torch.Generator().manual_seed(seed)
    benchmark = create("ViT-Mu/4", generator=generator, **TINY.changes() | {"num_classes": classes})
    torch.nn.init.normal_(benchmark.head.weight, generator=generator)
    vitrail.save(benchmark, folder)
    return str(folder)


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


@pytest.fixture
def colors(tmp_path):
    return open_task(Task(name="colors", data=str(write_colors(tmp_path / "colors.npz"))))


def make_benchmark(model, tmp_path, **changes):
    lines = []
    benchmark = Benchmark(
        reference=model,
        protocol=Protocol(**{"examples": 20, **changes}),
        out=tmp_path / "out",
        log=lines.append,
    )
    return benchmark, lines


def tasks_file(tmp_path, text):
    path = tmp_path / "tasks.toml"
    path.write_text(text)
    return path


def indices(part):
    return set(range(len(part)) if part.rows is None else part.rows.tolist())


# Draws


@pytest.mark.parametrize("count", [20, 30, 1000])
def test_draw_is_split_four_to_one(colors, count):
    draw = draw_images(colors.train, count, seed=0)
    assert len(draw.train) == min(count, 30)
    assert len(draw.fit) == 0.8 * len(draw.train)
    assert indices(draw.fit).isdisjoint(indices(draw.dev))
    assert indices(draw.fit) | indices(draw.dev) == indices(draw.train)
    assert indices(draw.train) <= indices(colors.train)


def test_thousand_examples_are_split_800_200(tmp_path):
    data = write_colors(tmp_path / "many.npz", train=1200)
    draw = draw_images(open_dataset(data, "train"), vtab.EXAMPLES, seed=0)
    assert [len(part) for part in (draw.train, draw.fit, draw.dev)] == [1000, 800, 200]
    assert np.ptp(np.bincount(draw.dev.labels())) <= 1


def test_draw_depends_on_the_seed(colors):
    rows = [indices(draw_images(colors.train, 20, seed=seed).train) for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


def test_representative_draw_is_stratified():
    labels = np.repeat(np.arange(4), [600, 300, 99, 1])
    drawn = stratified_subset(labels, 100, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 100
    assert np.abs(np.bincount(labels[drawn]) - [60, 30, 9, 1]).max() <= 1
    assert np.bincount(labels[drawn])[3] == 1


def test_representative_draw_with_more_classes_than_images():
    drawn = stratified_subset(np.arange(50), 10, np.random.default_rng(0))
    assert len(drawn) == 10


# Choices


class FakeMethod:
    """Records its calls and returns given accuracies."""

    setting = "rate"

    def __init__(self, accuracies, candidates):
        self.accuracies, self.candidates, self.calls = accuracies, candidates, []

    def prepare(self, task, draw, seed):
        def trial(setting, stage, folder):
            self.calls.append((setting, stage))
            return self.accuracies[stage, setting], 12

        return trial


def test_only_the_best_setting_is_tested(model, colors, tmp_path, monkeypatch):
    accuracies = {("choice", 0.1): 0.5, ("choice", 0.2): 0.7, ("choice", 0.3): 0.7}
    accuracies |= {("test", 0.1): 1.0, ("test", 0.2): 0.6, ("test", 0.3): 0.9}
    fake = FakeMethod(accuracies, (0.1, 0.2, 0.3))
    monkeypatch.setitem(vtab.METHODS, "finetune", lambda bench, model: fake)
    report = measure(make_benchmark(model, tmp_path)[0], [colors])
    assert fake.calls == [(0.1, "choice"), (0.2, "choice"), (0.3, "choice"), (0.2, "test")]
    assert report.tasks[0].scores[0].setting == 0.2
    assert report.mean == 0.6
    assert report.tasks[0].scores[0].choices == {0.1: 0.5, 0.2: 0.7, 0.3: 0.7}


def test_single_setting_skips_the_choice(model, colors, tmp_path, monkeypatch):
    fake = FakeMethod({("test", 0.1): 0.25}, (0.1,))
    monkeypatch.setitem(vtab.METHODS, "finetune", lambda bench, model: fake)
    measure(make_benchmark(model, tmp_path)[0], [colors])
    assert fake.calls == [(0.1, "test")]


def test_finetuning_uses_fit_to_choose_and_train_to_test(model, colors, tmp_path, monkeypatch):
    configs = []

    def recording(config, callback):
        configs.append(config)
        return run(config, callback)

    run = vtab.run
    monkeypatch.setattr(vtab, "run", recording)
    benchmark, lines = make_benchmark(model, tmp_path, learning_rates=(0.01, 0.1), **SMALL)
    report = measure(benchmark, [colors])
    draw = draw_images(colors.train, 20, seed=0)
    trained = [indices(config.splits.train) for config in configs]
    evaluated = [indices(part) for config in configs for part in config.splits.held_out.values()]
    assert trained == [indices(draw.fit)] * 2 + [indices(draw.train)]
    assert evaluated == [indices(draw.dev)] * 2 + [indices(colors.test)]
    assert report.tasks[0].scores[0].test_images == len(colors.test) == 12
    assert [f.name.split("-")[0] for f in (tmp_path / "out/runs/colors").iterdir()] == ["test"]
    assert any("training on all 20 images, rate" in line for line in lines)


def failing(monkeypatch, error):
    """Let runs fail at a rate of 0.1."""
    run = vtab.run

    def failing_run(config, callback):
        if config.settings.optim.learning_rate == 0.1:
            raise error
        return run(config, callback)

    monkeypatch.setattr(vtab, "run", failing_run)


def test_diverged_rate_is_not_chosen(model, colors, tmp_path, monkeypatch):
    failing(monkeypatch, TrainingError("training diverged at step 3; and more"))
    benchmark, lines = make_benchmark(model, tmp_path, learning_rates=(0.1, 0.01), **SMALL)
    score = measure(benchmark, [colors]).tasks[0].scores[0]
    assert score.choices[0.1] == 0.0
    assert score.setting == 0.01
    assert "  training diverged at step 3: this rate counts as 0 %" in lines


def test_full_disk_raises(model, colors, tmp_path, monkeypatch):
    failing(monkeypatch, CheckpointError("cannot write state: No space left on device"))
    benchmark, _ = make_benchmark(model, tmp_path, learning_rates=(0.1, 0.01), **SMALL)
    with pytest.raises(CheckpointError, match="No space left"):
        measure(benchmark, [colors])
    assert not TrialLog(tmp_path / "out" / "results.jsonl").rows


def test_matching_head_is_not_reused(colors, tmp_path):
    recorder = Recorder()
    benchmark, _ = make_benchmark(save_model(tmp_path / "three", classes=3), tmp_path, **SMALL)
    measure(replace(benchmark, make_callback=lambda: recorder), [colors])
    assert not (tmp_path / "out" / "headless").exists()
    assert len(recorder.evaluations) == 1  # the test set is evaluated once, at the end
    assert recorder.rows[0]["loss"] == pytest.approx(math.log(3), abs=1e-6)


def test_defaults_match_the_paper():
    protocol = Protocol()
    assert protocol.learning_rates == (0.01,)
    settings = vtab.finetune_settings(protocol, 0.01, 1000, augment=True)
    assert (settings.steps, settings.batch_size, settings.model.image_size) == (2500, 512, 384)
    optim = settings.optim
    assert (optim.kind, optim.learning_rate, optim.momentum) == ("sgd", 0.01, 0.9)
    assert (optim.schedule, optim.clip_norm, optim.warmup_steps) == ("cosine", 1.0, 100)
    short = vtab.finetune_settings(Protocol(steps=50), 0.01, 40, augment=False)
    assert (short.optim.warmup_steps, short.batch_size) == (2, 40)
    assert short.preprocessing is None  # the model's own
    assert (short.augment.crop, short.augment.flip) == ("whole", False)


@pytest.mark.parametrize(("method", "setting"), [("linear", "decay"), ("probe", "l2")])
def test_probes_choose_their_regularization(model, colors, tmp_path, method, setting):
    report = measure(make_benchmark(model, tmp_path, method=method)[0], [colors])
    score = report.tasks[0].scores[0]
    assert report.setting == setting
    assert report.mean > 0.9
    assert score.choices[score.setting] == max(score.choices.values())
    assert len(score.choices) == len(vtab.DECAYS if method == "linear" else vtab.PATH)
    assert score.train_images == 20
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["choice"] * len(score.choices) + ["test"]


def test_probe_uses_fit_to_choose_and_train_to_test(model, colors, tmp_path, monkeypatch):
    rows = []

    def recording(values, labels, classes, l2):
        rows.append(len(labels))
        return fit(values, labels, classes, l2)

    fit = vtab.fit
    monkeypatch.setattr(vtab, "fit", recording)
    measure(make_benchmark(model, tmp_path, method="probe")[0], [colors])
    assert rows == [16] * len(vtab.PATH) + [20]


def test_test_labels_do_not_affect_the_choice(model, tmp_path):
    """Other test labels change the score, but not the choice."""
    write_colors(tmp_path / "colors.npz")
    with np.load(tmp_path / "colors.npz") as parts:
        parts = dict(parts)
    parts["y_test"] = (parts["y_test"] + 1) % 3
    np.savez(tmp_path / "wrong.npz", **parts)
    names = ("colors", "wrong")
    tasks = [open_task(Task(name=name, data=str(tmp_path / f"{name}.npz"))) for name in names]
    right, wrong = measure(make_benchmark(model, tmp_path, method="probe")[0], tasks).tasks
    assert right.accuracy > 0.9
    assert wrong.accuracy < 0.1
    assert right.scores[0].choices == wrong.scores[0].choices
    assert right.scores[0].setting == wrong.scores[0].setting


def test_notes_are_logged_once_per_task(model, colors, tmp_path, monkeypatch):
    divided = "dataset defines no splits"
    train = ImageDataset(colors.train.index, colors.train.rows, [divided])
    test = ImageDataset(colors.test.index, colors.test.rows, [divided, "1 file was left out"])
    fake = FakeMethod({("test", 0.1): 0.25}, (0.1,))
    monkeypatch.setitem(vtab.METHODS, "finetune", lambda bench, model: fake)
    benchmark, lines = make_benchmark(model, tmp_path)
    measure(benchmark, [replace(colors, train=train, test=test)], seeds=2)
    assert lines[1:3] == [f"  note: {divided}", "  note: 1 file was left out"]
    assert sum(divided in line for line in lines) == 1


# Reuse of trials


def test_second_call_reuses_all_trials(model, colors, tmp_path, monkeypatch):
    benchmark, lines = make_benchmark(model, tmp_path, **SMALL)
    first = measure(benchmark, [colors])
    assert not any("done before" in line for line in lines)
    monkeypatch.setattr(vtab, "run", None)
    second = measure(benchmark, [colors])
    assert second.to_dict() == first.to_dict()
    assert any("done before" in line for line in lines)
    with pytest.raises(TypeError):  # other settings are another trial
        measure(make_benchmark(model, tmp_path, **SMALL | {"steps": 9})[0], [colors])


def test_changed_weights_are_measured_again(model, colors, tmp_path):
    benchmark, lines = make_benchmark(model, tmp_path, method="probe")
    measure(benchmark, [colors])
    save_model(model, seed=1)
    measure(benchmark, [colors])
    assert not any("done before" in line for line in lines)


def test_stopped_benchmark_resumes(model, colors, tmp_path, monkeypatch):
    class StopAtOnce(vitrail.training.checkpoint.StopSignal):
        def __bool__(self):
            return True

    benchmark, lines = make_benchmark(model, tmp_path, **SMALL)
    with monkeypatch.context() as patched:
        patched.setattr("vitrail.training.checkpoint.StopSignal", StopAtOnce)
        with pytest.raises(KeyboardInterrupt):
            measure(benchmark, [colors])
    assert lines[-1].startswith("stopped; run the same command")
    resumed = []
    run = vtab.run
    monkeypatch.setattr(vtab, "run", lambda o, w: resumed.append(o.resume) or run(o, w))
    assert len(measure(benchmark, [colors]).tasks) == 1
    assert resumed == [True]


def test_trial_log_survives_a_truncated_line(tmp_path):
    path = tmp_path / "results.jsonl"
    log = TrialLog(path)
    log.add({"task": "a"}, {"accuracy": 0.5, "pictures": 2})
    with path.open("a") as file:
        file.write('{"task": "b", "accu')
    again = TrialLog(path)
    assert again.find({"task": "b"}) is None
    again.add({"task": "c"}, {"accuracy": 0.25, "pictures": 4})
    assert [row["task"] for row in TrialLog(path).rows] == ["a", "c"]


# Means


def scored(name, group, *accuracies):
    scores = [
        Score(seed=seed, setting=0.01, accuracy=value, train_images=1000, test_images=9, choices={})
        for seed, value in enumerate(accuracies)
    ]
    return TaskScores(task=Task(name=name, data=name, group=group), classes=2, scores=scores)


def test_means_of_tasks_and_groups():
    tasks = [scored("a", "natural", 0.9), scored("b", "natural", 0.7), scored("c", "odd", 0.2, 0.4)]
    report = BenchmarkReport(model="m", protocol={"method": "probe"}, setting="l2", tasks=tasks)
    assert report.groups == pytest.approx({"natural": 0.8, "odd": 0.3})
    assert report.mean == pytest.approx((0.9 + 0.7 + 0.3) / 3)
    assert report.mean_of_groups == pytest.approx(0.55)
    plain = BenchmarkReport(model="m", protocol={}, setting="l2", tasks=[scored("a", "other", 0.5)])
    assert (plain.groups, plain.mean_of_groups, plain.mean) == ({}, None, 0.5)


def test_table_fits_in_80_columns():
    tasks = [scored("a" * 90, "g" * 90, 0.123, 1.0), scored("b", "g" * 90, 1.0)]
    report = BenchmarkReport(
        model="m", protocol={"method": "finetune"}, setting="rate", tasks=tasks
    )
    lines = list(words(report))
    assert max(map(len, lines)) <= 80
    assert any("56.1 % ± 62.0" in line for line in lines)


# Tasks files


def test_paths_are_relative_to_the_tasks_file(tmp_path):
    write_colors(tmp_path / "colors.npz")
    text = '[[task]]\ndata = "colors.npz"\n'
    text += '[[task]]\ndata = "builtin:sign-digits"\ngroup = "structured"\n'
    text += f'[[task]]\ndata = "{tmp_path}/colors.npz"\nname = "again"\nvary = false\n'
    first, second, third = read_tasks(tasks_file(tmp_path, text))
    assert (first.name, first.group, first.vary) == ("colors", "other", True)
    assert len(open_task(first).test) == 12
    assert (second.name, second.data, second.vary) == ("sign-digits", "builtin:sign-digits", False)
    assert (third.data, third.vary) == (first.data, False)


def test_val_is_used_without_a_test_split(tmp_path):
    for split in ("train", "val"):
        for name in ("ape", "bee"):
            (tmp_path / "set" / split / name).mkdir(parents=True)
            for number in range(4):
                (tmp_path / "set" / split / name / f"{number}.png").write_bytes(b"")
    assert len(open_task(Task(name="set", data=str(tmp_path / "set"))).test) == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no tasks"),
        ("[task]\ndata = 'a'", r"write \[\[task\]\]"),
        ("[[tasks]]\ndata = 'a'", "unknown key 'tasks'; did you mean 'task'?"),
        ("[[task]]\ndata = 'a'\ngruop = 'b'", "task 1: unknown key 'gruop'; did you mean 'group'?"),
        ("[[task]]\nname = 'a'", "task 1 has no data"),
        ("[[task]]\ndata = 3", "data=3 must be a string"),
        ("[[task]]\ndata = 'a'\nvary = 'no'", "vary='no' must be true or false"),
        ("[[task]]\ndata = 'a'\nname = '../b'", "cannot be used as a folder"),
        ("[[task]]\ndata = 'a'\n[[task]]\ndata = 'b/a.tar'", "two tasks are called 'a'"),
        ("[[task]\ndata = 'a'", "is not a TOML file"),
    ],
)
def test_invalid_tasks_file_raises(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read_tasks(tasks_file(tmp_path, text))


def test_missing_tasks_file_raises(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the tasks in"):
        read_tasks(tmp_path / "none.toml")


def test_unsuitable_data_names_the_task(tmp_path):
    write_colors(tmp_path / "colors.npz")
    write_colors(tmp_path / "few.npz", train=4)
    write_colors(tmp_path / "one.npz", classes=1)
    (tmp_path / "many.csv").write_text("path,label,split\na.png,x|y,train\nb.png,y,test\n")
    (tmp_path / "odd.csv").write_text("path,label,split\na.png,x,train\nb.png,y,odd\n")
    for changes, message in [
        ({"data": "none.npz"}, "Dataset not found: "),
        ({"data": "many.csv"}, "several labels"),
        ({"data": "odd.csv"}, "has neither test nor val to evaluate on; it has: train, odd"),
        ({"data": "few.npz"}, "4 training images; at least 5 needed"),
        ({"data": "one.npz"}, "1 classes"),
        ({"data": "colors.npz", "test": "val"}, "has no split 'val'"),
        ({"data": "colors.npz", "test": "training"}, "share images"),
        ({"data": "colors.npz", "test": "all"}, "share images"),
    ]:
        path = str(tmp_path / changes.pop("data"))
        with pytest.raises(DataError, match=f"^task 'it': .*{message}"):
            open_task(Task(name="it", data=path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "prob"}, "did you mean 'probe'"),
        ({"method": "probe", "steps": 3}, "steps is for the method finetune"),
        ({"method": "linear", "learning_rates": (0.1,)}, "learning_rates is for"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"learning_rates": (0.1, -1.0)}, "learning rate -1.0 must be"),
    ],
)
def test_invalid_protocol_raises(changes, message):
    with pytest.raises(ConfigError, match=message):
        Protocol(**changes)


def test_model_name_and_zero_seeds_raise(model, colors, tmp_path):
    with pytest.raises(CheckpointError, match="is an architecture"):
        measure(make_benchmark("ViT-Mu/4", tmp_path)[0], [colors])
    with pytest.raises(ConfigError, match="seeds=0 draws no training images"):
        measure(make_benchmark(model, tmp_path)[0], [colors], seeds=0)


# The command


def test_command_opens_all_tasks_first(model, tmp_path):
    write_colors(tmp_path / "colors.npz")
    text = '[[task]]\ndata = "colors.npz"\n[[task]]\ndata = "none.npz"\n'
    command = Vtab(model=model, tasks=tasks_file(tmp_path, text), out=tmp_path / "out")
    with pytest.raises(DataError, match="task 'none': Dataset not found: "):
        command.run()
    assert not (tmp_path / "out").exists()


def test_command_prints_a_table_and_writes_results(model, tmp_path, capsys):
    write_colors(tmp_path / "a.npz")
    write_colors(tmp_path / "b.npz", train=15)
    text = '[[task]]\ndata = "a.npz"\ngroup = "natural"\n[[task]]\ndata = "b.npz"\ngroup = "odd"\n'
    options = {"model": model, "tasks": tasks_file(tmp_path, text), "out": tmp_path / "out"}
    Vtab(**options, method="probe", seeds=2).run()
    message = capsys.readouterr().out
    assert "note: only 30 training images, of 1,000" in message
    assert "mean of natural (1)" in message
    assert "mean of all tasks (2)" in message
    assert "mean of the groups' means" in message
    Vtab(**options, method="probe", seeds=2, json=True).run()
    out, err = capsys.readouterr()
    assert "done before" in err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads(out) == results | {"written": str(tmp_path / "out")}
    seeds = [[score["seed"] for score in task["scores"]] for task in results["tasks"]]
    assert seeds == [[0, 1], [0, 1]]


def test_command_logs_the_current_task(model, tmp_path, capsys):
    write_colors(tmp_path / "a.npz")
    path = tasks_file(tmp_path, '[[task]]\ndata = "a.npz"\n')
    Vtab(model=model, tasks=path, out=tmp_path / "out", **SMALL).run()
    message = capsys.readouterr().out
    assert "a, task 1 of 1" in message
    assert "step      1 of 8" in message
    assert "mean of all tasks (1)" in message
