"""The benchmark of memory: its commands exist, its page from made-up numbers, one small case."""

import sys
from pathlib import Path

import pytest
import tyro

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import memory
import result_cache
from run import CLAIM
from vitrail.cli import main
from vitrail.cli.fewshot import Fewshot
from vitrail.errors import VitrailError

pytestmark = pytest.mark.slow

COMMANDS = [case.command for group in memory.GROUPS for case in group.cases]


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_commands_exist(command, capsys):
    verb, *words = command.split()
    if verb == "finetune":
        assert main([verb, *words, "--print-settings"]) == 0
        assert "steps = " in capsys.readouterr().out
    elif verb == "fewshot":
        assert not tyro.cli(Fewshot, args=words).cache  # or only the first would be measured
    else:
        assert verb == "look"


def test_the_page_tells_the_largest_peak_of_each_claim(monkeypatch, tmp_path):
    peaks = iter(range(1, 20))
    monkeypatch.setattr(result_cache, "FOLDER", tmp_path / "bench")
    monkeypatch.setattr(memory, "resident_bytes", lambda field: 1)
    monkeypatch.setattr(
        memory, "measured", lambda *case: {"peak": next(peaks) * memory.GIB, "seconds": 2.5}
    )
    page = memory.report()
    assert page.startswith("## Memory\n")
    assert dict(CLAIM.findall(page)) == {
        "Fine-tuning ViT-L/16 in 12 GiB": "takes 2.0 GiB at most",
        "Loading and probing ViT-H/14 in 4 GiB": "takes 4.0 GiB at most",
    }
    assert page.count(" | 2.50 |") == len(COMMANDS)
    assert memory.report() == page  # kept


def test_seconds_are_those_of_a_step_for_each_picture_without_the_first(tmp_path):
    rows = [
        '{"step": 1, "loss": 1, "epoch": 0.25, "seconds": 10}',
        '{"step": 2, "loss": 1, "epoch": 0.5, "seconds": 18}',
        '{"step": 3, "loss": 1, "epoch": 0.75, "seconds": 19}',
        '{"step": 4, "loss": 1, "epoch": 1.0, "seconds": 49}',
        '{"step": 4, "test/accuracy": 1, "epoch": 1.0, "seconds": 99}',
    ]
    (tmp_path / memory.METRICS).write_text("\n".join(rows))
    assert memory.per_image(tmp_path) == 8 / (memory.TRAIN_IMAGES * 0.25)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other limits")
def test_a_process_that_wants_more_than_its_limit_does_not_get_it(tmp_path):
    model = str(tmp_path / "model")
    memory.write("ViT-Mu/4", model)
    assert memory.in_process("run", str(2**34), "look", model)["peak"] > 2**26
    with pytest.raises(VitrailError, match=f"look {model} failed"):
        memory.in_process("run", str(2**26), "look", model)
