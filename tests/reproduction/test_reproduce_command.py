"""`vitrail reproduce`: from a name to a report, a page and one line for what cannot be."""

import json
from dataclasses import replace

import pytest

from tiny_runs import SETTINGS, tiny_run, write_colors
from vitrail.cli import main
from vitrail.reproduction import catalog
from vitrail.reproduction.cells import Cell
from vitrail.reproduction.experiments import Experiment, Sets
from vitrail.reproduction.means import by_seed, fewshot
from vitrail.reproduction.report import Picture, Report, Table


@pytest.fixture(scope="module")
def colors(tmp_path_factory):
    return write_colors(tmp_path_factory.mktemp("colors") / "colors.npz", train=60, test=24)


@pytest.fixture
def tiny(monkeypatch):
    """An experiment of two runs in the place of a long one."""

    def cells(sets):
        return {
            ("one", seed): Cell(data=sets.pretrain, settings=replace(SETTINGS, seed=seed))
            for seed in range(2)
        }

    def report(results, sets):
        mean = by_seed(results, fewshot)["one",]
        return Report(
            name="table8",
            title="A tiny one",
            claim="It learns.",
            did=f"It learned {sets.pretrain_name}.",
            found=f"5-shot {mean.text} %.",
            verdict="holds",
            tables=[Table(caption="in percent", head=("run", "5-shot"), rows=[("one", mean.text)])],
            pictures=[Picture(file="tiny.svg", caption="none", content="<svg></svg>")],
        )

    tiny = Experiment(
        name="table8", title="A tiny one", claim="It learns.", cells=cells, report=report
    )
    monkeypatch.setitem(catalog.EXPERIMENTS, "table8", tiny)


def test_an_experiment_is_run_told_and_written(tiny, colors, tmp_path, capsys):
    words = ["reproduce", "table8", "--data", str(colors), "--out", str(tmp_path / "out")]
    assert main([*words, "--docs", str(tmp_path / "docs")]) == 0
    told = capsys.readouterr()
    assert "  one, seed 0: test " in told.out
    assert "It learned colors." in told.out
    assert "0 of 2 runs done, about 0:" in told.err
    assert (tmp_path / "out" / "table8" / "report.md").exists()
    page = (tmp_path / "docs" / "reproduction.md").read_text()
    assert "![none](reproduction/tiny.svg)" in page
    assert (tmp_path / "docs" / "reproduction" / "tiny.svg").exists()
    assert main([*words, "--json"]) == 0  # and is not run again
    told = capsys.readouterr()
    assert json.loads(told.out)["verdict"] == "holds"
    assert told.err == ""
    assert json.loads(told.out)["command"] == "vitrail reproduce table8 --data colors.npz"


def test_full_scale_is_built_without_data_or_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "heads", "--scale", "full", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "checked"
    assert any("torchrun" in word for row in found["tables"][1]["rows"] for word in row)
    assert not list(tmp_path.iterdir())


def test_weights_of_ones_own_stand_beside_the_published(colors, tmp_path, capsys):
    tiny_run(colors, tmp_path / "run")
    words = ["reproduce", "table2", "--weights", f"ViT-H/14={tmp_path / 'run'}"]
    assert main([*words, "--data", f"CIFAR-10={colors}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(
        "99.50" in cell for table in found["tables"] for row in table["rows"] for cell in row
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tabel8"], "unknown experiment 'tabel8'; did you mean 'table8'?"),
        (["table8", "--workers", "0"], "--workers 0 runs nothing; give 1 or more"),
        (["table8", "--data", "a", "b"], "--data a b: one set is pre-trained on; give one"),
        (["table8", "--data", "nowhere.npz"], "Dataset not found: nowhere.npz"),
        (
            ["table2", "--weights", "ViT", "--data", "a=b"],
            "ViT is no NAME=VALUE, such as --weights",
        ),
        (["table2", "--weights", "ViT=b", "--data", "a"], "a is no NAME=VALUE, such as --data"),
        (["table2", "--weights", "ViT=b"], "--weights need pictures; give --data NAME=DATA"),
        (["heads", "--scale", "full", "--docs", "d"], "a page of what was run here; leave it out"),
        (["heads", "--weights", "a=b", "--data", "c=d"], "beside table2 and table5, and heads"),
        (["table2", "--weights", "a=b", "--scale", "full"], "leave --scale out"),
    ],
)
def test_what_cannot_be_reproduced_is_told_in_one_line(
    words, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", *words]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_a_set_of_few_classes_cannot_be_halved(colors, tmp_path, capsys):
    words = ["reproduce", "transfer", "--data", str(colors), "--out", str(tmp_path)]
    assert main(words) == 2
    assert "3 classes are too few to be halved; give --target as well" in capsys.readouterr().err


def test_names_of_sets_are_short():
    assert Sets("../data/fashion_mnist.npz").pretrain_name == "fashion_mnist"
    assert Sets("builtin:sign-digits").source_name == "every other class of sign-digits"
    assert Sets("a.npz", "b.npz").target_name == "b"
