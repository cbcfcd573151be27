"""`make bench` with sections that measure nothing: the page, going on, and what is missing."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import result_cache
import run
from timing import claim
from vitrail.errors import ConfigError


class Bench:
    """Three sections that say what the test tells them to; `asked` are those that were measured."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.texts: dict[str, object] = {
            "fidelity": "## Fidelity\n\nexact\n",
            "models": f"## Models\n\n{claim('Speed', '1.23 times timm')}\n\n| a | b |\n",
            "data": "## Data\n\n900 a second\n",
        }

    def module(self, name: str) -> SimpleNamespace:
        def report() -> str:
            self.asked.append(name)
            text = self.texts[name]
            if isinstance(text, BaseException):
                raise text
            return str(text)

        return SimpleNamespace(report=report)


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    made = Bench()
    monkeypatch.setattr(run, "import_module", made.module)
    monkeypatch.setattr(run, "PAGE", tmp_path / "docs" / "benchmarks.md")
    monkeypatch.setattr(run, "SECTIONS", {name: run.SECTIONS[name] for name in made.texts})
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path / ".bench")
    return made


def page() -> str:
    return run.PAGE.read_text(encoding="utf-8")


def again(names: list[str], monkeypatch) -> None:
    """Another process: what `main` did to the folder of kept results is undone."""
    with monkeypatch.context() as patch:
        patch.setattr(result_cache, "FOLDER", result_cache.FOLDER)
        run.main(names)


def test_the_page_has_all_sections_in_order(bench, monkeypatch):
    again([], monkeypatch)
    headings = [line for line in page().splitlines() if line.startswith("## ")]
    assert headings == ["## Summary", "## Fidelity", "## Models", "## Data"]
    assert "| Speed | 1.23 times timm | [Models](#models) |" in page()
    folder = Path(run.__file__).parent
    assert all((folder / f"{name}.py").exists() for name in run.SECTIONS)
    bench.texts["fidelity"] = "## Fidelity\n\nother\n"
    again([], monkeypatch)  # a finished bench begins anew
    assert "other" in page()
    assert len(bench.asked) == 6


def test_what_was_measured_before_an_interruption_is_not_measured_again(bench, monkeypatch):
    bench.texts["data"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        again([], monkeypatch)
    assert not run.PAGE.exists()
    bench.texts["data"] = "## Data\n\n901 a second\n"
    again([], monkeypatch)
    assert bench.asked == ["fidelity", "models", "data", "data"]
    assert "exact" in page()
    assert "901" in page()


def test_a_named_section_is_measured_anew_and_the_rest_stays(bench, monkeypatch):
    again([], monkeypatch)
    bench.texts["data"] = "## Data\n\n950 a second\n"
    again(["data"], monkeypatch)
    assert bench.asked[3:] == ["data"]
    assert "950" in page()
    assert "900" not in page()
    assert "exact" in page()
    assert page().count("## Data") == 1


def test_a_named_section_leaves_an_interrupted_bench_alone(bench, monkeypatch):
    bench.texts["data"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        again([], monkeypatch)
    bench.texts["data"] = "## Data\n\n900 a second\n"
    again(["fidelity"], monkeypatch)
    again([], monkeypatch)
    assert bench.asked == ["fidelity", "models", "data", "fidelity", "data"]


@pytest.mark.parametrize(
    "lacking",
    [
        "## Data\n\nNot measured: flowers.tar is not there\n",
        "flowers.tar is not there",
        ModuleNotFoundError("No module named 'flowers.tar'", name="flowers.tar"),
    ],
)
def test_a_section_that_misses_something_says_so_and_keeps_its_text(
    bench, monkeypatch, capsys, lacking
):
    again([], monkeypatch)
    bench.texts["data"] = lacking
    again([], monkeypatch)
    assert "900 a second" in page()
    assert "data: flowers.tar is not" in capsys.readouterr().out


def test_a_section_that_missed_something_is_tried_again(bench, monkeypatch):
    bench.texts |= {"fidelity": "no golden files", "data": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        again([], monkeypatch)
    bench.texts |= {"fidelity": "## Fidelity\n\nexact\n", "data": "## Data\n\nnow\n"}
    again([], monkeypatch)
    assert bench.asked.count("fidelity") == 2
    assert "exact" in page()


def test_an_unknown_section_is_refused_with_a_suggestion(bench, monkeypatch):
    with pytest.raises(ConfigError, match="did you mean 'models'"):
        again(["model"], monkeypatch)


def test_the_claim_of_a_table_is_about_its_fastest_peer(monkeypatch):
    import models
    from peers import LIBRARIES

    def made_up(calls, *, rounds):
        return {name: [2.0, 2.0] for name in calls} | {"vitrail": [1.0, 1.0], "timm": [1.5, 1.5]}

    monkeypatch.setattr(models, "interleave", made_up)
    monkeypatch.setattr(models, "forward_call", lambda *_: None)
    monkeypatch.setattr(models, "LIBRARIES", dict.fromkeys(LIBRARIES, lambda shape: None))
    lines = models.table("small, forward", models.Shape(8, 4, 8, 1, 1, 16, 3), 1, 1)
    (found,) = run.CLAIM.findall("\n".join(lines))
    assert found[0] == "small, forward, the fastest peer"
    assert found[1].startswith("timm takes 1.50 times vitrail's time; ")
    assert found[1].endswith("of the matrix-product limit")
