"""The trained experiments: their grids, their rules, their reports."""

import pytest

from vitrail.models.config import BitConfig, MixerConfig, VitConfig
from vitrail.models.names import configuration
from vitrail.reproduction import carrying, compute, heads, positions, scaling, set_size
from vitrail.reproduction.catalog import EXPERIMENTS, work_of
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Sets
from vitrail.reproduction.means import Mean, by_seed, difference
from vitrail.reproduction.models import FAMILIES, FINE_PICTURES, config_of
from vitrail.reproduction.names import NAMES

SETS = Sets("builtin:sign-digits")
TRAINED = {
    name: EXPERIMENTS[name]
    for name in ("table8", "figure3", "figure4", "figure5", "figure8", "heads", "transfer")
} | {"selfsupervised": EXPERIMENTS["selfsupervised"]}


def results(experiment, accuracy, sets=SETS):
    """Made-up results: `accuracy` gives that of a key."""
    return {
        key: Result(
            folder=None,
            accuracy=accuracy(key),
            fewshot=accuracy(key) - 0.05,
            images=38_400,
            seconds=30.0,
            config=config_of(cell),
        )
        for key, cell in experiment.cells(sets).items()
    }


def report(name, accuracy):
    experiment = EXPERIMENTS[name]
    return experiment.report(results(experiment, accuracy), SETS)


def noise(key):
    """A little that depends on the seed."""
    return 0.001 * key[-1]


@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_experiment_has_seeds_and_reports_what_it_did(name):
    experiment = TRAINED[name]
    cells = experiment.cells(SETS)
    assert len({key[-1] for key in cells}) >= 2
    assert {cell.settings.seed for cell in cells.values()} == {key[-1] for key in cells}
    made = report(name, lambda key: 0.8 + noise(key))
    assert made.name == name
    assert made.tables
    assert all(len(row) == len(table.head) for table in made.tables for row in table.rows)
    assert made.pictures
    assert all(picture.content.startswith("<svg") for picture in made.pictures)
    assert "is said to hold" in made.found or "are said to hold" in made.found


def test_all_experiments_of_the_paper_are_there():
    assert tuple(EXPERIMENTS) == NAMES
    assert len(NAMES) == 16


def test_the_small_models_are_of_their_families():
    kinds = {"ViT": VitConfig, "hybrid": VitConfig, "BiT": BitConfig, "Mixer": MixerConfig}
    for family, (make, sizes) in FAMILIES.items():
        for size in sizes:
            model = make(size)
            config = configuration(model.name).change(**model.changes())
            assert isinstance(config, kinds[family])
            assert (getattr(config, "stem", "") == "resnet") == (family == "hybrid")


def test_compared_models_cost_about_the_same():
    cells = set_size.cells4(SETS)
    work = {key[0]: work_of(cell) for key, cell in cells.items()}
    for ours, theirs in set_size.RIVALS:
        assert 0.4 < work[ours] / work[theirs] < 2.5


def test_runs_are_shared_between_experiments():
    usual = positions.cells(SETS)["learned", "stem", 0]
    assert usual == compute.cells(SETS)["ViT", "M", 0]
    assert usual == scaling.cells(SETS)["base", "", 0]
    assert usual == heads.cells(SETS)[heads.CLASS, heads.RATE, 0]
    assert usual == set_size.cells4(SETS)["ViT M", 1653, 0]


def test_without_a_target_the_other_half_of_the_classes_is_carried_over_to():
    cell = carrying.cells_transfer(SETS)[carrying.PRETRAINED, 32, 0]
    assert (cell.half, cell.start.half) == ("odd", "even")
    assert cell.data == cell.start.data == SETS.pretrain
    assert cell.pictures == FINE_PICTURES
    other = carrying.cells_transfer(Sets("a.npz", "b.npz"))[carrying.PRETRAINED, 32, 0]
    assert (other.half, other.start.half, other.data, other.start.data) == (
        "",
        "",
        "b.npz",
        "a.npz",
    )


def test_positions_hold_if_all_kinds_beat_none_and_differ_less():
    def found(gain, spread):
        def accuracy(key):
            kind, place, _ = key
            more = 0 if kind == "none" else gain + (spread if place == "shared" else 0)
            return 0.7 + more + noise(key)

        return report("table8", accuracy).verdict

    assert found(0.05, 0.01) == "holds"
    assert found(0.05, 0.06) == "holds in part"
    assert found(0.0, 0.0) == "does not hold"
    assert found(-0.02, 0.01) == "does not hold"


def test_crossing_is_told_from_a_trend():
    def gaps(*values):
        return [[Mean((value, value)) for value in values]]

    assert set_size.crossing(gaps(-0.1, 0.0, 0.1)) == "holds"
    assert set_size.crossing(gaps(-0.1, 0.0, -0.02)) == "holds in part"
    assert set_size.crossing(gaps(0.02, 0.0, 0.1)) == "holds in part"
    assert set_size.crossing(gaps(0.1, 0.0, -0.1)) == "does not hold"
    assert set_size.crossing(gaps(-0.1, 0.1) + gaps(-0.1, -0.05)) == "holds in part"


def test_families_are_compared_at_the_same_work():
    one = [(1.0, 0.6), (4.0, 0.8)]
    assert compute.at(one, 2.0) == pytest.approx(0.7)
    assert compute.lead(one, [(1.0, 0.5), (4.0, 0.7)]) == pytest.approx(0.1)
    assert compute.lead(one, [(8.0, 0.5), (16.0, 0.7)]) is None


def test_slopes_are_points_for_each_doubling():
    row = [(1e6, Mean((0.5, 0.5))), (2e6, Mean((0.6, 0.6))), (4e6, Mean((0.7, 0.7)))]
    assert scaling.slope(row) == pytest.approx(0.1)


def test_heads_hold_unless_the_difference_is_beyond_doubt():
    def found(more):
        return report("heads", lambda key: 0.8 + more * (key[0] == heads.MEAN) + noise(key)).verdict

    assert found(0.0) == "holds"
    assert found(0.004) == "holds"
    assert found(0.05) == found(-0.05) == "does not hold"


def test_transfer_holds_if_it_helps_at_every_size_and_larger_is_better():
    def found(gain, larger):
        def accuracy(key):
            how, size, _ = key
            return 0.5 + gain * (how == carrying.PRETRAINED) + larger * size + noise(key)

        return report("transfer", accuracy).verdict

    assert found(0.1, 0.01) == "holds"
    assert found(0.1, -0.01) == found(-0.1, 0.01) == "holds in part"
    assert found(-0.1, -0.01) == "does not hold"


def test_selfsupervision_holds_between_scratch_and_labels():
    def found(labels, masked):
        more = {carrying.SUPERVISED: labels, carrying.MASKED: masked}
        return report("selfsupervised", lambda key: 0.5 + more.get(key[0], 0) + noise(key)).verdict

    assert found(0.1, 0.05) == "holds"
    assert found(0.05, 0.1) == found(0.1, 0.0) == "holds in part"
    assert found(-0.1, -0.05) == "does not hold"


def test_differences_are_taken_seed_by_seed():
    one, other = Mean((0.5, 0.7, 0.9)), Mean((0.4, 0.6, 0.8))
    gap = difference(one, other)
    assert gap.mean == pytest.approx(0.1)
    assert gap.half == pytest.approx(0.0, abs=1e-12)
    assert gap.above()
    assert not gap.above(0.2)
    assert one.text == "70.0 ± 49.7"  # t of 4.303 with 2 degrees of freedom, times 0.2 / sqrt(3)


def test_seeds_are_taken_together():
    found = by_seed(results(EXPERIMENTS["heads"], lambda key: 0.5 + key[-1]), lambda r: r.accuracy)
    assert found[heads.CLASS, heads.RATE].values == (0.5, 1.5, 2.5)
