"""Exponents, figures and tables of growth on made-up measurements; opening a small tar for real."""

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import growth
import growth_data
from curves import Curve, drawing, exponent
from run import CLAIM
from vitrail.data.datasets import open_dataset


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0, 3.5])
def test_the_exponent_of_a_power_is_its_power(power):
    sizes = [1, 2, 5, 10, 40]
    assert exponent(sizes, [7 * size**power for size in sizes]) == pytest.approx(power)


def made_up(what: str, sizes, power: float) -> Curve:
    rounds = [[factor * size**power for size in sizes] for factor in (1.0, 1.1, 0.9)]
    return Curve(what, sizes, rounds, "ms")


def panels() -> dict[str, tuple[Curve, ...]]:
    return {
        sweep.what: (made_up("time", sweep.sizes, 1.5), made_up("memory", sweep.sizes, 1.0))
        for sweep in growth.SWEEPS
    }


def data() -> tuple[Curve, ...]:
    names = ("opening", "memory", "first batch")
    return tuple(made_up(name, growth_data.IMAGE_COUNTS, n / 4) for n, name in enumerate(names))


def test_the_table_has_measured_counted_and_expected_exponents():
    table = "\n".join(growth.page(panels(), data()))
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert len({line.count("|") for line in rows}) == 1
    assert len(rows) == 1 + 2 * len(growth.SWEEPS) + 3
    found = dict(CLAIM.findall("\n".join(growth.claims(panels(), data()))))
    assert list(found.values()) == [
        "time 1.50, memory 1.00",
        "opening 0.00, memory 0.25, first batch 0.50",
    ]
    batch = next(line for line in rows if line.startswith("| images in a batch | time"))
    assert batch.split(" | ")[3:6] == ["1.50 (1.50 to 1.50)", "1.00", "1"]


def test_the_figure_shows_every_panel_with_its_exponents():
    groups = panels() | {"data": data()}
    text = " ".join(ElementTree.fromstring(drawing(groups)).itertext())
    for title, curves in groups.items():
        assert title in text
        assert f"exponents {', '.join(f'{curve.exponent:.2f}' for curve in curves)}" in text


@pytest.mark.skipif(not growth.PEAK.exists(), reason="memory is told by Linux only")
def test_opening_and_a_first_batch_are_measured(tmp_path):
    growth_data.write_tars(tmp_path / "tiny", [growth_data.CLASSES])
    (path,) = growth_data.write_tars(tmp_path, [200])
    assert len(open_dataset(path)) == 200
    opening, memory, first = growth_data.numbers(path)
    assert opening > 0
    assert memory >= 0
    assert first > 0
