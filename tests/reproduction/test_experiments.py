"""The trained experiments: their grids, their rules, their reports."""

import random
from dataclasses import replace

import pytest

from vitrail.models.config import BitConfig, MixerConfig, VitConfig
from vitrail.models.registry import configuration
from vitrail.reproduction import carrying, compute, heads, positions, scaling, set_size
from vitrail.reproduction.catalog import EXPERIMENTS, work_of
from vitrail.reproduction.cells import Result
from vitrail.reproduction.experiments import Sets
from vitrail.reproduction.means import Mean, average, by_seed, judged, over_seeds
from vitrail.reproduction.models import FAMILIES, FINE_PICTURES, config_of
from vitrail.reproduction.names import NAMES

SETS = Sets("builtin:sign-digits")
ONE = Result(
    folder=None,
    accuracy=0.5,
    fewshot=0.5,
    images=38_400,
    judged=2500,
    seconds=1.0,
    config=configuration("ViT-Mu/4"),
)
TRAINED = {
    name: EXPERIMENTS[name]
    for name in ("table8", "figure3", "figure4", "figure5", "figure8", "heads", "transfer")
} | {"selfsupervised": EXPERIMENTS["selfsupervised"]}


def results(experiment, accuracy, sets=SETS):
    """Made-up results: `accuracy` gives that of a key."""
    return {
        key: replace(
            ONE, accuracy=accuracy(key), fewshot=accuracy(key) - 0.05, config=config_of(cell)
        )
        for key, cell in experiment.cells(sets).items()
    }


def report(name, accuracy):
    """A report of runs that are a little off, each in its own way."""
    experiment = EXPERIMENTS[name]
    off = random.Random(0)
    made = results(experiment, lambda key: accuracy(key) + off.uniform(-0.002, 0.002))
    return experiment.report(made, SETS)


@pytest.mark.parametrize("name", TRAINED)
def test_every_trained_experiment_has_seeds_and_reports_what_it_did(name):
    experiment = TRAINED[name]
    cells = experiment.cells(SETS)
    assert len({key[-1] for key in cells}) >= 2
    made = report(name, lambda key: 0.8)
    assert made.name == name
    assert made.tables
    assert all(len(row) == len(table.head) for table in made.tables for row in table.rows)
    assert made.pictures
    assert all(picture.content.startswith("<svg") for picture in made.pictures)
    assert "part" in made.found or "is said to hold" in made.found
    assert made.verdict != "holds" or name == "heads"


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


def test_positions_hold_if_they_gain_more_than_their_kinds_differ():
    def found(gain, spread):
        def accuracy(key):
            kind, place, _ = key
            return 0.7 + (0 if kind == "none" else gain + (spread if place == "shared" else 0))

        return report("table8", accuracy)

    assert found(0.05, 0.01).verdict == "holds"
    assert found(0.02, 0.06).verdict == "holds in part"
    assert found(-0.05, 0.01).verdict == "does not hold"
    assert "beyond doubt for 7 of 7 (1-D (stem)," in found(0.05, 0.01).found


@pytest.mark.parametrize(
    ("name", "one", "other"), [("figure4", "ViT", "BiT"), ("figure3", "ViT L", "ViT M")]
)
def test_a_crossing_is_told_from_a_trend(name, one, other):
    """`one` gains on `other` from the smallest set to the largest."""

    def found(first, last):
        smallest = min(key[1] for key in EXPERIMENTS[name].cells(SETS))

        def accuracy(key):
            return 0.7 + key[0].startswith(one) * (first if key[1] == smallest else last)

        return report(name, accuracy).verdict

    assert found(-0.1, 0.1) == "holds"
    assert found(-0.1, -0.05) == found(0.05, 0.1) == "holds in part"
    assert found(0.1, -0.1) == "does not hold"


def test_compute_holds_if_vit_beats_bit_and_the_hybrid_vit():
    def found(bit, hybrid):
        more = {"BiT": bit, "hybrid": hybrid}
        return report("figure5", lambda key: 0.7 + more.get(key[0], 0)).verdict

    assert found(-0.1, 0.1) == "holds"
    assert found(-0.1, -0.1) == found(0.1, 0.1) == "holds in part"
    assert found(0.1, -0.1) == "does not hold"
    assert found(0.0, 0.0) == "cannot be told"


def test_scaling_holds_if_depth_beats_width_and_finer_patches_pay():
    def found(depth, width, finer):
        def accuracy(key):
            axis, value, _ = key
            large = {"depth": {"8"}, "width": {"128"}, "patch": {"4"}}.get(axis, set())
            gain = {"depth": depth, "width": width, "patch": finer}.get(axis, 0)
            return 0.7 + gain * (1 if value in large else -1 if axis in ("patch", "width") else 0)

        return report("figure8", accuracy).verdict

    assert found(0.1, 0.0, 0.1) == "holds"
    assert found(0.0, 0.1, 0.1) == found(0.1, 0.0, -0.1) == "holds in part"
    assert found(0.0, 0.1, -0.1) == "does not hold"


def test_families_are_compared_at_the_same_work():
    one = [(1.0, 0.6), (4.0, 0.8)]
    assert compute.at(one, 2.0) == pytest.approx(0.7)
    assert compute.lead(one, [(1.0, 0.5), (4.0, 0.7)]) == pytest.approx(0.1)
    assert compute.lead(one, [(8.0, 0.5), (16.0, 0.7)]) is None


def test_slopes_are_points_for_each_doubling():
    flat, steep = Mean((0.5, 0.6), 0.02, 0.01), Mean((0.7, 0.8), 0.02, 0.01)
    found = scaling.slope([(1e6, flat), (4e6, steep)])
    assert found.values == pytest.approx((0.1, 0.1))
    assert found.error == pytest.approx(0.02 / 2**0.5)  # one doubling to either side of the middle


def test_heads_are_level_only_if_their_difference_is_known_to_be_small():
    def found(more):
        return report("heads", lambda key: 0.8 + more * (key[0] == heads.MEAN)).verdict

    assert found(0.0) == found(0.01) == "holds"
    assert found(0.05) == found(-0.05) == "does not hold"
    assert heads.level(Mean((0.0, 0.0), 0.05)) == "cannot be told"
    assert heads.level(Mean((0.025, 0.025), 0.01)) == "cannot be told"


def test_transfer_holds_if_it_helps_at_every_size_and_larger_is_better():
    def found(gain, larger):
        def accuracy(key):
            how, size, _ = key
            return 0.5 + gain * (how == carrying.PRETRAINED) + larger * size

        return report("transfer", accuracy).verdict

    assert found(0.1, 0.01) == "holds"
    assert found(0.1, -0.01) == found(-0.1, 0.01) == "holds in part"
    assert found(-0.1, -0.01) == "does not hold"
    assert found(0.0, 0.0) == "cannot be told"


def test_selfsupervision_holds_between_scratch_and_labels():
    def found(labels, masked):
        more = {carrying.SUPERVISED: labels, carrying.MASKED: masked}
        return report("selfsupervised", lambda key: 0.5 + more.get(key[0], 0)).verdict

    assert found(0.1, 0.05) == "holds"
    assert found(0.05, 0.1) == found(0.1, 0.0) == "holds in part"
    assert found(-0.1, -0.05) == "does not hold"


def test_differences_err_as_both_do_beside_each_other():
    gap = Mean((0.5, 0.7), 0.9, 0.03) - Mean((0.4, 0.6), 0.9, 0.04)
    assert gap.mean == pytest.approx(0.1)
    assert gap.half == pytest.approx(0.05 / 2**0.5)
    assert gap.signed == "+10.0 ± 3.5"
    assert (-gap).signed == "-10.0 ± 3.5"


def test_intervals_come_from_all_seeds_together_and_a_common_seed_falls_out_of_differences():
    values = {("a", 0): 0.5, ("a", 1): 0.6, ("b", 0): 0.7, ("b", 1): 0.8}
    found = over_seeds(values)
    # squares 4 * 0.05**2 over 2 degrees of freedom, t = 4.303
    assert found["a",].error == found["b",].error == pytest.approx(4.303 * 0.005**0.5)
    assert found["a",].text == "55.0 ± 21.5"
    assert (found["b",] - found["a",]).half == pytest.approx(0, abs=1e-9)  # as far in both seeds
    apart = over_seeds(values | {("b", 1): 0.7})
    # residuals of 0.025 in all four, one degree of freedom, t = 12.706
    assert apart["a",].paired == pytest.approx(12.706 * 0.05)


def test_averages_of_cells_err_less():
    found = average([Mean((0.5, 0.7), 0.2, 0.1), Mean((0.7, 0.9), 0.2, 0.1)])
    assert found.values == pytest.approx((0.6, 0.8))
    assert (found.error, found.paired) == pytest.approx((0.2 / 2**0.5, 0.1 / 2**0.5))


def test_claims_are_judged_by_whole_intervals():
    up, down, wide = Mean((0.1, 0.1), 0.1), Mean((-0.1, -0.1), 0.1), Mean((0.1, 0.1), 0.2)
    assert judged([up, up]) == "holds"
    assert judged([up, wide]) == judged([up, down]) == "holds in part"
    assert judged([wide, down]) == "does not hold"
    assert judged([wide, wide]) == "cannot be told"


def test_seeds_are_taken_together():
    found = by_seed(results(EXPERIMENTS["heads"], lambda key: 0.5 + key[-1]), lambda r: r.accuracy)
    assert found[heads.CLASS, heads.RATE].values == (0.5, 1.5, 2.5)
