"""The published numbers agree with each other, with column sums, models and recipes."""

import numpy as np
import pytest

from reproduction import tables
from reproduction.published import CORE_DAYS, DATA, TABLE2, TABLE6, TABLE8, full_name
from vitrail.errors import ConfigError
from vitrail.models.registry import configuration

pytestmark = pytest.mark.slow

VIT_H, VIT_L, *_ = TABLE2
SUMS5 = {
    "ImageNet": [530.04, 514.49, 526.23, 511.71],
    "ImageNet-21k": [556.75, 550.80, 560.49, 551.09, 561.25],
    "JFT": [559.23, 548.77, 567.20, 559.64, 569.66],
}  # of the columns: a single wrong digit shows
SUMS6 = [1520.59, 1597.76, 1781.84, 1654.58, 1720.05, 1774.59]
SUM8 = 5.09945
SUMS2 = [(648.19, 0.47), (644.96, 0.71), (633.32, 0.53), (643.50, 2.12), (178.95, 0.0)]


def test_columns_add_up():
    for pretrained, sums in SUMS5.items():
        columns = zip(*DATA["table5"]["accuracy"][pretrained].values(), strict=True)
        assert [sum(column) for column in columns] == pytest.approx(sums)
    columns = zip(*(row.accuracies for row in TABLE6), strict=True)
    assert [sum(column) for column in columns] == pytest.approx(SUMS6)
    assert sum(row.exaflops for row in TABLE6) == 15_721
    for row, sums in zip(TABLE2.values(), SUMS2, strict=True):
        values = [(number.value, number.deviation or 0.0) for number in row.values()]
        assert np.sum(values, axis=0) == pytest.approx(sums)
    assert [days / 1000 for days in CORE_DAYS.values()] == [2.5, 0.68, 0.23, 9.9, 12.3]
    assert sum(TABLE8.values()) == pytest.approx(SUM8)
    for position, place in TABLE8:
        config = configuration("ViT-B/16").change(position=position, position_place=place)
        assert (config.position, config.position_place) == (position, place)


def test_a_model_may_be_named_without_its_pretraining_where_that_is_unique():
    assert full_name("table2", "ViT-H/14") == VIT_H
    assert full_name("table2", VIT_L) == VIT_L
    with pytest.raises(ConfigError, match=r"ambiguous in table2; use one of: 'ViT-L/16 \(JFT\)'"):
        full_name("table2", "ViT-L/16")
    with pytest.raises(ConfigError, match="unknown model of table5 'ViT-X/16'"):
        full_name("table5", "ViT-X/16")


def gaps_to_vit(family):
    """Return each row within ViT's range of compute with its lead over a ViT of equal compute, and
    its compute relative to a ViT of equal accuracy (None out of range)."""
    vits, gaps = [], []
    for row in sorted(TABLE6, key=lambda row: row.exaflops):
        if row.family == "ViT" and (not vits or row.average > vits[-1].average):
            vits.append(row)  # which no cheaper one beats
    compute, accuracy = np.log([vit.exaflops for vit in vits]), [vit.average for vit in vits]
    for row in TABLE6:
        if row.family == family and compute[0] <= np.log(row.exaflops) <= compute[-1]:
            lead = row.average - float(np.interp(np.log(row.exaflops), compute, accuracy))
            ratio = row.exaflops / float(np.exp(np.interp(row.average, accuracy, compute)))
            gaps.append((row, lead, ratio if row.average >= accuracy[0] else None))
    return gaps


@pytest.mark.parametrize("row", DATA["table6"]["comparison"], ids=lambda row: row["model"])
def test_comparison_of_table_6_follows_from_its_rows(row):
    gaps = {gap[0][:2]: gap for family in ("ResNet", "hybrid") for gap in gaps_to_vit(family)}
    assert len(gaps) == len(DATA["table6"]["comparison"])
    scaling, lead, ratio = gaps[row["model"], row["epochs"]]
    values = (round(scaling.average, 2), round(lead, 2), round(ratio or 0.0, 1))
    assert values == (row["accuracy"], row["lead"], row["ratio"])


@pytest.mark.parametrize("row", TABLE6, ids=lambda row: f"{row.model}, {row.epochs}")
def test_computed_compute_is_close_to_table_6(row):
    exaflops = tables.pretraining_exaflops(row.model, 303e6, row.epochs)
    tolerance = {"ViT": 0.021, "hybrid": 0.03, "ResNet": 0.041}[row.family]
    assert exaflops == pytest.approx(row.exaflops, rel=tolerance)
