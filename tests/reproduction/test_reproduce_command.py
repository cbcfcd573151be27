"""`vitrail reproduce`: from a name to a report and a page; errors are one line."""

import json
from dataclasses import replace

import pytest

from reproduction import runner
from reproduction.jobs import Datasets, Job
from reproduction.report import Figure, Report, Table
from tiny_runs import SETTINGS, tiny_run, write_colors
from vitrail.cli import main, reproduce

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("colors") / "colors.npz", train=60, test=24)


@pytest.fixture
def tiny(monkeypatch):
    """Replace an experiment by one with two small runs."""

    def jobs(datasets):
        return {
            ("one", seed): Job(data=datasets.pretrain, settings=replace(SETTINGS, seed=seed))
            for seed in range(2)
        }

    def report(results):
        mean = results.fewshot["one",]
        text = {"name": "table8", "title": "A tiny one", "claim": "It learns.", "verdict": "holds"}
        text["method"] = f"It was trained on {results.datasets.names['pretrain']}."
        tables = [Table("in percent", ("run", "5-shot"), [("one", mean.text)])]
        figures = [Figure("tiny.svg", "none", b"<svg></svg>")]
        return Report(**text, result=mean.text, tables=tables, figures=figures)

    monkeypatch.setitem(runner.EXPERIMENTS, "table8", report)
    monkeypatch.setattr(runner, "list_jobs", lambda name, datasets: jobs(datasets))


def test_an_experiment_is_run_printed_and_written(tiny, colors, tmp_path, capsys):
    words = ["reproduce", "table8", "--data", str(colors), "--out", str(tmp_path / "out")]
    assert main([*words, "--docs", str(tmp_path / "docs")]) == 0
    output = capsys.readouterr()
    assert "  one, seed 0: test " in output.out
    assert "It was trained on colors." in output.out
    assert "0 of 2 runs finished, about 0:" in output.err
    assert (tmp_path / "out" / "table8" / "report.md").exists()
    page = (tmp_path / "docs" / "README.md").read_text()
    assert "![none](figures/tiny.svg)" in page
    assert (tmp_path / "docs" / "figures" / "tiny.svg").exists()
    assert main([*words, "--json"]) == 0  # and is not run again
    output = capsys.readouterr()
    found = json.loads(output.out)
    assert (found["verdict"], output.err) == ("holds", "")
    assert found["command"] == "vitrail reproduce table8 --data colors.npz"


def test_full_scale_needs_no_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "heads", "--scale", "full", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "checked"
    assert "torchrun" in json.dumps(report["tables"][1]["rows"])
    assert not list(tmp_path.iterdir())


def test_weights_are_measured_next_to_the_published(colors, tmp_path, capsys):
    tiny_run(colors, tmp_path / "run")
    words = ["reproduce", "table2", "--weights", f"ViT-H/14={tmp_path / 'run'}"]
    assert main([*words, "--data", f"CIFAR-10={colors}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tables"][-1]["rows"][0][:3] == ["ViT-H/14 (JFT)", "CIFAR-10", "99.50 ± 0.06"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tabel8"], "unknown experiment 'tabel8'; did you mean 'table8'?"),
        (["table8", "--workers", "0"], "--workers 0: must be 1 or more"),
        (["table8", "--data", "a", "b"], "--data a b: give one pre-training dataset"),
        (["table8", "--data", "nowhere.npz"], "Dataset not found: nowhere.npz"),
        (["table2", "--weights", "ViT", "--data", "a=b"], "ViT is not NAME=VALUE, such as --wei"),
        (["table2", "--weights", "ViT=b", "--data", "a"], "a is not NAME=VALUE, such as --data"),
        (["table2", "--weights", "ViT=b"], "--weights needs --data NAME=DATA"),
        (["heads", "--scale", "full", "--docs", "d"], "--docs cannot be combined with"),
        (["heads", "--weights", "a=b", "--data", "c=d"], "works with table2 and table5"),
        (["table2", "--weights", "a=b", "--scale", "full"], "cannot be combined with --scale full"),
    ],
)
def test_errors_are_one_line(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_datasets_have_short_names():
    assert Datasets("../data/fashion_mnist.npz").names["pretrain"] == "fashion_mnist"
    assert Datasets("builtin:sign-digits").names["source"] == "every other class of sign-digits"
    names = Datasets("a.npz", "b.npz").names
    assert (names["pretrain"], names["source"], names["target"]) == ("a", "a", "b")
    probe = Datasets("a", probes=("c.tar", "d.npz")).names["probe"]
    assert "images per class of c, d (mean" in probe


def test_an_installed_package_refers_to_the_checkout(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reproduce, "CHECKOUT", tmp_path)
    assert main(["reproduce", "table1"]) == 2
    error = capsys.readouterr().err
    assert "run `vitrail reproduce` from a checkout" in error
    assert error.count("\n") == 1
