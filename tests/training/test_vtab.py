"""The VTAB-1k protocol: draws, choices, tests, and reuse of trials."""

import json
import math

import numpy as np
import pytest
import torch

import vitrail
from tiny_runs import TINY, Recorder, write_colors, write_folder
from vitrail.cli.vtab import Vtab
from vitrail.cli.vtab import report as report_lines
from vitrail.data.datasets import ImageDataset, open_dataset, stratified_subset
from vitrail.errors import CheckpointError, ConfigError, DataError, TrainingError
from vitrail.models.vit import create
from vitrail.training import adapt, data_module
from vitrail.training.adapt import METHODS, Benchmark, Search, Trial
from vitrail.training.data_module import draw_images, open_task, read_tasks

pytestmark = pytest.mark.slow

SMALL = {"steps": 8, "batch_size": 6, "image_size": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def save_model(folder, seed=0, classes=2):
    generator = torch.Generator().manual_seed(seed)
    model = create("ViT-Mu/4", generator=generator, **TINY.changes() | {"num_classes": classes})
    torch.nn.init.normal_(model.head.weight, generator=generator)
    vitrail.save(model, folder)
    return str(folder)


def open_keys(data, name="colors", **keys):
    defaults = {"group": "other", "train": "train", "test": None, "vary": True}
    return open_task({"name": name, "data": str(data), **defaults, **keys})


@pytest.fixture
def model(tmp_path):
    return save_model(tmp_path / "model")


@pytest.fixture
def colors(tmp_path):
    return open_keys(write_colors(tmp_path / "colors.npz"))


@pytest.fixture
def benchmark(model, tmp_path):
    """Make a benchmark whose log is `lines`."""

    def make(**changes):
        options = {"reference": model, "out": tmp_path / "out", "examples": 20}
        made = Benchmark(**options | {"callback": Recorder()} | changes)
        made.lines = made.callback.lines
        return made

    return make


@pytest.fixture
def fake_runs(monkeypatch):
    """Replace fine-tuning by given accuracies of (split, rate); return the calls."""

    def install(accuracies):
        calls = []

        def trial(self, name, rate, seconds, *, test, folder):
            split = "test" if test else "dev"
            calls.append((rate, split))
            return Trial(value=rate, accuracy=accuracies[split, rate], images=12)

        monkeypatch.setattr(Search, "trial", trial)
        return calls

    return install


def tasks_file(tmp_path, text):
    path = tmp_path / "tasks.toml"
    path.write_text(text)
    return path


def indices(part):
    return set(range(len(part)) if part.rows is None else part.rows.tolist())


@pytest.mark.parametrize("count", [20, 1000])
def test_draw_is_split_four_to_one(tmp_path, count):
    data = open_dataset(write_colors(tmp_path / "many.npz", train=1200), "train")
    train, fit, dev = draw_images(data, count, seed=0)
    assert (len(train), len(fit)) == (count, 0.8 * count)
    assert indices(fit).isdisjoint(indices(dev))
    assert indices(fit) | indices(dev) == indices(train)
    assert np.ptp(np.bincount(dev.labels())) <= 1
    assert indices(train) == indices(draw_images(data, count, seed=0)[0])
    assert indices(train) != indices(draw_images(data, count, seed=1)[0])


def test_representative_draw_is_stratified():
    labels = np.repeat(np.arange(4), [600, 300, 99, 1])
    drawn = stratified_subset(labels, 100, np.random.default_rng(0))
    assert len(set(drawn.tolist())) == 100
    assert np.abs(np.bincount(labels[drawn]) - [60, 30, 9, 1]).max() <= 1
    assert len(stratified_subset(np.arange(50), 10, np.random.default_rng(0))) == 10


def test_only_the_best_setting_is_tested(benchmark, colors, fake_runs):
    accuracies = {("dev", 0.1): 0.5, ("dev", 0.2): 0.7, ("dev", 0.3): 0.7}
    accuracies |= {("test", 0.1): 1.0, ("test", 0.2): 0.6, ("test", 0.3): 0.9}
    calls = fake_runs(accuracies)
    report = benchmark(learning_rates=(0.1, 0.2, 0.3)).measure([colors])
    assert calls == [(0.1, "dev"), (0.2, "dev"), (0.3, "dev"), (0.2, "test")]
    score = report["tasks"][0]["scores"][0]
    assert (score["setting"], report["mean"]) == (0.2, 0.6)
    assert score["choices"] == {0.1: 0.5, 0.2: 0.7, 0.3: 0.7}
    calls.clear()
    divided = "dataset defines no splits"  # noted once per task
    train = ImageDataset(colors.train.index, colors.train.rows, [divided])
    test = ImageDataset(colors.test.index, colors.test.rows, [divided, "1 file was left out"])
    bench = benchmark(learning_rates=(0.1,))
    bench.measure([colors._replace(train=train, test=test)], seeds=2)
    assert calls == [(0.1, "test")] * 2  # a single setting skips the choice
    assert bench.lines[1:3] == [f"  note: {divided}", "  note: 1 file was left out"]
    assert sum(divided in line for line in bench.lines) == 1


def test_finetuning_uses_fit_to_choose_and_train_to_test(benchmark, colors, tmp_path, monkeypatch):
    configs = []

    def recording(config, callback):
        configs.append(config)
        return run(config, callback)

    run = adapt.run
    monkeypatch.setattr(adapt, "run", recording)
    bench = benchmark(learning_rates=(0.01, 0.1), **SMALL)
    report = bench.measure([colors])
    train, fit, dev = draw_images(colors.train, 20, seed=0)
    trained = [indices(config.splits.train) for config in configs]
    evaluated = [indices(part) for config in configs for part in config.splits.held_out.values()]
    assert trained == [indices(fit)] * 2 + [indices(train)]
    assert evaluated == [indices(dev)] * 2 + [indices(colors.test)]
    assert report["tasks"][0]["scores"][0]["judged"] == len(colors.test) == 12
    assert [f.name.split("-")[0] for f in (tmp_path / "out/runs/colors").iterdir()] == ["test"]
    assert any("training on all 20 images, rate" in line for line in bench.lines)


def test_diverged_rate_is_not_chosen(benchmark, colors, monkeypatch):
    run = adapt.run

    def failing(config, callback):
        if config.settings.optim.learning_rate == 0.1:
            raise TrainingError("training diverged at step 3; and more")
        return run(config, callback)

    monkeypatch.setattr(adapt, "run", failing)
    bench = benchmark(learning_rates=(0.1, 0.01), **SMALL)
    score = bench.measure([colors])["tasks"][0]["scores"][0]
    assert (score["choices"][0.1], score["setting"]) == (0.0, 0.01)
    assert "  training diverged at step 3: this rate counts as 0 %" in bench.lines


def test_matching_head_is_not_reused_and_batch_size_is_limited(benchmark, colors, tmp_path):
    recorder = Recorder()
    three = save_model(tmp_path / "three", classes=3)
    options = {"reference": three, "callback": recorder} | SMALL | {"batch_size": 99}
    assert benchmark(**options).measure([colors])["batch_size"] == 99
    assert "  note: batch size 20, the number of training images" in recorder.lines
    assert not (tmp_path / "out" / "headless").exists()
    assert len(recorder.evaluations) == 1  # the test set is evaluated once, at the end
    assert recorder.rows[0]["loss"] == pytest.approx(math.log(3), abs=1e-6)


def test_defaults_match_the_paper(benchmark):
    settings = benchmark().settings()
    assert (settings.steps, settings.batch_size, settings.model.image_size) == (2500, 512, 384)
    optim = settings.optim
    assert (optim.kind, optim.learning_rate, optim.momentum) == ("sgd", 0.01, 0.9)
    assert (optim.schedule, optim.clip_norm, optim.warmup_steps) == ("cosine", 1.0, 100)
    short = benchmark(steps=50).settings(augment=False)
    assert (short.optim.warmup_steps, short.preprocessing) == (2, None)  # the model's own
    assert (short.augment.crop, short.augment.flip) == ("whole", False)


@pytest.mark.parametrize(("method", "setting"), [("linear", "decay"), ("probe", "l2")])
def test_probes_choose_their_regularization(
    benchmark, colors, tmp_path, monkeypatch, method, setting
):
    rows, name = [], "fit" if method == "probe" else "fit_logistic"
    original, grid = getattr(adapt, name), METHODS[method][2]

    def recording(values, labels, *args, **options):
        rows.append(len(labels))
        return original(values, labels, *args, **options)

    monkeypatch.setattr(adapt, name, recording)
    report = benchmark(method=method).measure([colors])
    score = report["tasks"][0]["scores"][0]
    assert report["setting"] == setting
    assert report["mean"] > 0.9
    assert score["choices"][score["setting"]] == max(score["choices"].values())
    assert [*score["choices"]] == [*grid]
    assert rows == [16] * len(grid) + [20]
    assert score["learned"] == 20
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [row["stage"] for row in rows] == ["choice"] * len(grid) + ["test"]


def test_test_labels_do_not_affect_the_choice(benchmark, colors, tmp_path):
    with np.load(tmp_path / "colors.npz") as parts:
        parts = dict(parts)
    parts["y_test"] = (parts["y_test"] + 1) % 3
    np.savez(tmp_path / "wrong.npz", **parts)
    tasks = [colors, open_keys(tmp_path / "wrong.npz", name="wrong")]
    right, wrong = benchmark(method="probe").measure(tasks)["tasks"]
    assert right["accuracy"] > 0.9 > 0.1 > wrong["accuracy"]
    for key in ("choices", "setting"):
        assert right["scores"][0][key] == wrong["scores"][0][key]


def test_means_of_tasks_and_groups(benchmark, colors, monkeypatch):
    scores = iter([0.9, 0.9, 0.7, 0.7, 0.2, 0.4, 0.5])
    choice = {"seed": 0, "setting": 0.01, "learned": 1000, "judged": 9, "choices": {}}
    monkeypatch.setattr(
        Benchmark, "score", lambda self, task, seed: {"accuracy": next(scores), **choice}
    )
    groups = {"a" * 90: "natural", "b": "natural", "c": "g" * 90}
    tasks = [colors._replace(keys=colors.keys | {"name": n, "group": g}) for n, g in groups.items()]
    report = benchmark().measure(tasks, seeds=2)
    assert report["groups"] == pytest.approx({"natural": 0.8, "g" * 90: 0.3})
    assert report["mean"] == pytest.approx((0.9 + 0.7 + 0.3) / 3)
    assert report["mean_of_groups"] == pytest.approx(0.55)
    assert any("30.0 % ± 14.1" in line for line in report_lines(report))
    plain = benchmark().measure([colors])
    assert (plain["groups"], plain["mean_of_groups"], plain["mean"]) == ({}, None, 0.5)


def test_trials_are_reused_unless_anything_changed(benchmark, model, colors, tmp_path, monkeypatch):
    bench = benchmark(**SMALL)
    first = bench.measure([colors])
    assert not any("done before" in line for line in bench.lines)
    with monkeypatch.context() as patch:
        patch.setattr(adapt, "run", None)
        assert bench.measure([colors]) == first
        assert any("done before" in line for line in bench.lines)
        with pytest.raises(TypeError):  # other settings are another trial
            benchmark(**SMALL | {"steps": 9}).measure([colors])
    path = tmp_path / "probe" / "results.jsonl"
    bench = benchmark(method="probe", out=tmp_path / "probe")
    bench.measure([colors])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # cut off by a crash
    bench.measure([colors])
    assert path.read_text().splitlines(keepends=True) == lines
    save_model(model, seed=1)
    bench.measure([colors])
    assert not any("done before" in line for line in bench.lines)  # the last trial was repeated


def test_stopped_benchmark_resumes(benchmark, colors, monkeypatch, stop_after):
    bench = benchmark(**SMALL)
    with stop_after(1), pytest.raises(KeyboardInterrupt):
        bench.measure([colors])
    assert bench.lines[-1].startswith("stopped; run the same command")
    resumed, run = [], adapt.run
    monkeypatch.setattr(adapt, "run", lambda o, w: resumed.append(o.resume) or run(o, w))
    assert len(bench.measure([colors])["tasks"]) == 1
    assert resumed == [True]


def test_paths_are_relative_to_the_tasks_file(tmp_path, monkeypatch):
    write_colors(tmp_path / "colors.npz")
    monkeypatch.setattr(data_module, "open_task", lambda keys: keys)
    text = '[[task]]\ndata = "colors.npz"\n'
    text += '[[task]]\ndata = "builtin:sign-digits"\ngroup = "structured"\n'
    text += f'[[task]]\ndata = "{tmp_path}/colors.npz"\nname = "again"\nvary = false\n'
    first, second, third = read_tasks(tasks_file(tmp_path, text))
    assert (first["name"], first["group"], first["vary"]) == ("colors", "other", True)
    assert (second["name"], second["vary"]) == ("sign-digits", False)
    assert second["data"] == "builtin:sign-digits"
    assert (third["data"], third["vary"]) == (first["data"], False)


def test_val_is_used_without_a_test_split(tmp_path):
    for split in ("train", "val"):
        write_folder(tmp_path / "set" / split, count=2)
    assert len(open_keys(tmp_path / "set").test) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read the tasks in"),
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
    path = tasks_file(tmp_path, text) if text is not None else tmp_path / "none.toml"
    with pytest.raises(ConfigError, match=message):
        read_tasks(path)


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
            open_keys(path, name="it", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "prob"}, "did you mean 'probe'"),
        ({"method": "probe", "steps": 3}, "steps applies to method finetune"),
        ({"method": "linear", "learning_rates": (0.1,)}, "learning_rates applies to"),
        ({"steps": 0}, "steps=0 must be 1 or more"),
        ({"learning_rates": (0.1, -1.0)}, "learning_rate=-1.0 must be"),
        ({"reference": "ViT-Mu/4"}, "is an architecture"),
        ({"seeds": 0}, "seeds=0 draws no training images"),
    ],
)
def test_invalid_protocol_raises(benchmark, colors, changes, message):
    seeds = changes.pop("seeds", 1)
    with pytest.raises((ConfigError, CheckpointError), match=message):
        benchmark(**changes).measure([colors], seeds)


def test_command_prints_a_table_and_writes_results(model, tmp_path, capsys):
    write_colors(tmp_path / "a.npz")
    write_colors(tmp_path / "b.npz", train=15)
    text = '[[task]]\ndata = "a.npz"\ngroup = "natural"\n[[task]]\ndata = "b.npz"\ngroup = "odd"\n'
    options = {"model": model, "out": tmp_path / "out", "method": "probe", "seeds": 2}
    missing = text + '[[task]]\ndata = "none.npz"\n'
    with pytest.raises(DataError, match="task 'none': Dataset not found: "):
        Vtab(**options, tasks=tasks_file(tmp_path, missing)).run()
    assert not (tmp_path / "out").exists()  # all tasks are opened first
    options["tasks"] = tasks_file(tmp_path, text)
    Vtab(**options).run()
    message = capsys.readouterr().out
    assert "note: only 30 training images, of 1,000" in message
    for mean in ("of natural (1)", "of all tasks (2)", "of the group means"):
        assert f"mean {mean}" in message
    Vtab(**options, json=True).run()
    out, err = capsys.readouterr()
    assert "done before" in err
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert json.loads(out) == results | {"written": str(tmp_path / "out")}
    seeds = [[score["seed"] for score in task["scores"]] for task in results["tasks"]]
    assert seeds == [[0, 1], [0, 1]]
