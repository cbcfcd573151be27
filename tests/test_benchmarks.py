"""`make bench` with made-up measurements: the page, resuming it, growth and memory."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import growth
import growth_data
import memory
import result_cache
import run
import versions
from curves import Curve, drawing, exponent
from timing import claim
from vitrail.cli import main
from vitrail.cli.fewshot import Fewshot
from vitrail.data.datasets import open_dataset
from vitrail.errors import ConfigError, VitrailError

SECTIONS = {
    "fidelity": "## Fidelity\n\nexact\n",
    "models": f"## Models\n\n{claim('Speed', '1.23 times timm')}\n\n| a | b |\n",
    "data": "## Data\n\n900 a second\n",
}


class Bench:
    """Three sections that return or raise `texts`; `measured` lists those that were run."""

    def __init__(self, patch):
        self.measured, self.texts, self.patch = [], dict(SECTIONS), patch

    def module(self, name):
        def report():
            self.measured.append(name)
            if isinstance(self.texts[name], BaseException):
                raise self.texts[name]
            return self.texts[name]

        return SimpleNamespace(report=report)

    def run(self, *names, **texts):
        """Measure as another process would; return the page."""
        self.texts |= texts
        with self.patch.context() as patch:
            patch.setattr(result_cache, "FOLDER", result_cache.FOLDER)
            run.main(list(names))
        return run.PAGE.read_text(encoding="utf-8")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    made = Bench(monkeypatch)
    monkeypatch.setattr(run, "import_module", made.module)
    monkeypatch.setattr(run, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(run, "SECTIONS", {name: run.SECTIONS[name] for name in made.texts})
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path / ".bench")
    return made


def test_page_has_all_sections_in_order(bench):
    page = bench.run()
    assert re.findall("^## (.*)", page, re.M) == ["Summary", "Fidelity", "Models", "Data"]
    assert "| Speed | 1.23 times timm | [Models](#models) |" in page
    folder = Path(run.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in run.SECTIONS)
    assert "other" in bench.run(fidelity="## Fidelity\n\nother\n")  # a finished bench begins anew
    assert len(bench.measured) == 6
    with pytest.raises(ConfigError, match="did you mean 'models'"):
        bench.run("model")


def test_interrupted_bench_resumes(bench):
    with pytest.raises(KeyboardInterrupt):
        bench.run(fidelity="no golden files", models=KeyboardInterrupt())
    assert "900" in run.PAGE.read_text(encoding="utf-8")  # a finished section is on the page
    bench.run("models", models=SECTIONS["models"])  # a section by itself leaves the bench alone
    page = bench.run(fidelity=SECTIONS["fidelity"], data="## Data\n\n901 a second\n")
    # the shortest first; what was missing something is tried again, what was finished is not
    assert bench.measured == ["fidelity", "data", "models", "models", "fidelity", "models"]
    assert "exact" in page
    assert "900" in page
    page = bench.run("data", data="## Data\n\n950 a second\n")  # the others stay
    assert bench.measured[6:] == ["data"]
    assert "exact" in page
    assert re.findall(r"\d+ a second|## Data", page) == ["## Data", "950 a second"]


@pytest.mark.parametrize(
    "lacking",
    [
        "## Data\n\nNot measured: flowers.tar is not there\n",
        "flowers.tar is not there",
        ModuleNotFoundError("No module named 'flowers.tar'", name="flowers.tar"),
    ],
)
def test_section_that_misses_something_keeps_its_text(bench, capsys, lacking):
    bench.run()
    assert "900 a second" in bench.run(data=lacking)
    assert "data: flowers.tar is not" in capsys.readouterr().out


# Growth


@pytest.mark.slow
def test_table_and_figure_of_exponents():
    def curve(what, sizes, power):
        rounds = [[factor * size**power for size in sizes] for factor in (1.0, 1.1, 0.9)]
        return Curve(what, sizes, rounds, "ms")

    sizes = [1, 2, 5, 10, 40]
    for power in (0.0, 1.0, 2.0, 3.5):
        assert exponent(sizes, [7 * size**power for size in sizes]) == pytest.approx(power)
    panels = {
        sweep.what: (curve("time", sweep.sizes, 1.5), curve("memory", sweep.sizes, 1.0))
        for sweep in growth.SWEEPS
    }
    names = ("opening", "memory", "first batch")
    data = tuple(curve(name, growth_data.IMAGE_COUNTS, n / 4) for n, name in enumerate(names))
    rows = [line for line in growth.page(panels, data) if line.startswith("| ")]
    assert len(rows) == 1 + 2 * len(growth.SWEEPS) + 3
    found = dict(run.CLAIM.findall("\n".join(growth.claims(panels, data)))).values()
    assert [*found] == ["time 1.50, memory 1.00", "opening 0.00, memory 0.25, first batch 0.50"]
    batch = next(line for line in rows if line.startswith("| images in a batch | time"))
    assert batch.split(" | ")[3:6] == ["1.50 (1.50 to 1.50)", "1.00", "1"]
    groups = panels | {"data": data}
    text = " ".join(ElementTree.fromstring(drawing(groups)).itertext())
    for title, curves in groups.items():
        assert title in text
        assert f"exponents {', '.join(f'{each.exponent:.2f}' for each in curves)}" in text


@pytest.mark.skipif(not growth.PEAK.exists(), reason="memory is read from Linux's /proc")
def test_opening_and_a_first_batch_are_measured(tmp_path):
    growth_data.write_tars(tmp_path / "tiny", [growth_data.CLASSES])
    (path,) = growth_data.write_tars(tmp_path, [200])
    assert len(open_dataset(path)) == 200
    opening, memory, first = growth_data.numbers(path)
    assert min(opening, memory + 1, first) > 0


# Memory

COMMANDS = [case.command for group in memory.GROUPS for case in group.cases]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_measured_commands_exist(command, capsys):
    verb, *words = command.split()
    if verb == "finetune":
        assert main([verb, *words, "--print-settings"]) == 0
        assert "steps = " in capsys.readouterr().out
    elif verb == "fewshot":
        assert not tyro.cli(Fewshot, args=words).cache  # or only the first would be measured
    else:
        assert verb == "look"


def test_memory_page_states_the_largest_peak_of_each_claim(monkeypatch, tmp_path):
    peaks = iter(range(1, 20))
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path / "bench")
    monkeypatch.setattr(memory, "resident_bytes", lambda field: 1)
    monkeypatch.setattr(
        memory, "measured", lambda *case: {"peak": next(peaks) * memory.GIB, "seconds": 2.5}
    )
    page = memory.report()
    assert page.startswith("## Memory\n")
    assert dict(run.CLAIM.findall(page)) == {
        "Fine-tuning ViT-L/16 in 12 GiB": "takes 2.0 GiB at most",
        "Loading and probing ViT-H/14 in 4 GiB": "takes 4.0 GiB at most",
    }
    assert page.count(" | 2.50 |") == len(COMMANDS)
    assert memory.report() == page  # cached


def test_seconds_per_image_leave_out_the_first_step(tmp_path):
    times = enumerate((10, 18, 19, 49), 1)
    rows = [{"step": n, "loss": 1, "epoch": n / 4, "seconds": seconds} for n, seconds in times]
    rows.append({"step": 4, "test/accuracy": 1, "epoch": 1.0, "seconds": 99})
    (tmp_path / memory.METRICS).write_text("\n".join(map(json.dumps, rows)))
    assert memory.per_image(tmp_path) == 8 / (memory.TRAIN_IMAGES * 0.25)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_process_cannot_exceed_its_memory_limit(tmp_path):
    model = str(tmp_path / "model")
    memory.write("ViT-Mu/4", model)
    assert memory.in_process("run", str(2**34), "look", model)["peak"] > 2**26
    with pytest.raises(VitrailError, match=f"look {model} failed"):
        memory.in_process("run", str(2**26), "look", model)


@pytest.mark.slow
def test_version_0_1_is_measured_beside_this_one():
    page = versions.report(rounds=1, tasks="Nano/8 at 64, forward")
    if "Not measured: " in page:
        pytest.skip("needs the history of git")
    assert page.startswith(run.SECTIONS["versions"].headings[0])
    before, after, ratio = page.splitlines()[-1].split("|")[2:5]
    assert float(before) > 0
    assert float(ratio) == pytest.approx(float(after) / float(before), rel=0.1)
    assert f"| | 0.1, ms | {versions.__version__}, ms |" in page
    assert f"at most {float(ratio):.2f} (1 measurements)" in page


def test_versions_need_the_commit(monkeypatch):
    monkeypatch.setattr(versions, "COMMIT", "0" * 40)
    assert run.lacks(versions.report())
