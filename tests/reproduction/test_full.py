"""The paper's own runs: every one can be built, costs what is published, and has its command."""

import shlex

import pytest

from vitrail.cli import main
from vitrail.cli.train import Finetune, Train
from vitrail.errors import ConfigError
from vitrail.models.config import VitConfig
from vitrail.models.registry import configuration
from vitrail.reproduction import full
from vitrail.reproduction.full import check, command, config_of, differences, learning, orders
from vitrail.reproduction.orders import on_jft, order
from vitrail.reproduction.paper_runs import ORDERS
from vitrail.reproduction.published import TABLE3, TABLE6, TABLE8
from vitrail.training.recipes import read_recipe

ALL = {run.folder: run for name in ORDERS for run in orders(name)}
CHANGED = {tuple(differences(run.settings, read_recipe(run.recipe))): run for run in ALL.values()}


def test_a_folder_is_one_run():
    for name in ORDERS:
        assert all(ALL[run.folder].settings == run.settings for run in orders(name)), name


def test_every_model_of_the_paper_can_be_built():
    different = {config_of(run): run for run in ALL.values()}
    for config, run in different.items():
        assert learning(config, run.settings) > 1e6, run.label


def test_every_command_is_understood_as_it_is_meant(monkeypatch):
    seen = []
    for kind in (Train, Finetune):
        monkeypatch.setattr(kind, "run", lambda self: seen.append(self))
    for run in CHANGED.values():
        words = command(run)
        assert words[:4] == ["torchrun", "--nproc-per-node=8", "-m", "vitrail"]
        assert main(words[4:]) == 0
        understood = seen.pop()
        assert understood.settings == run.settings, shlex.join(words)
        assert (understood.data, str(understood.out)) == (run.data, run.folder)
        if run.start is not None:
            assert understood.origin == run.start.folder


def test_a_model_is_trained_before_it_is_fine_tuned():
    for name in ORDERS:
        done = set()
        for run in orders(name):
            assert run.start is None or run.start.folder in done, run.label
            done.add(run.folder)


def test_the_runs_of_figure_5_cost_what_table_6_says():
    for one, row in zip(check("figure5"), TABLE6, strict=True):
        assert one.order.settings.model.name == row.model
        assert one.order.epochs == row.epochs
        assert one.exaflops == pytest.approx(row.exaflops, rel=0.051), row.name
        seconds = one.exaflops * 1e18 / (8 * full.A100.peak * full.UTILIZATION)
        assert one.days == pytest.approx(seconds / 86_400)


def test_runs_on_jft_have_the_rates_of_table_3():
    rates = {m: row.learning_rate for row in TABLE3 if row.data == "JFT" for m in row.models}
    for row in TABLE6:
        if row.model != "BiT-R200x3":  # which table 3 does not have
            assert on_jft(row.model, row.epochs).settings.optim.learning_rate == rates[row.model]


def test_table_8_has_every_position():
    runs = orders("table8")
    configs = [config_of(run) for run in runs]
    assert [(c.position, c.position_place) for c in configs] == list(TABLE8)  # type: ignore[union-attr]
    assert all(run.steps == round(7 * 303e6 / 4096) for run in runs)


def test_a_halved_base_model_is_as_small_as_vit_s():
    half = config_of(orders("figure4")[0])
    small = configuration("ViT-S/32")
    assert isinstance(half, VitConfig)
    assert isinstance(small, VitConfig)
    for name in ("depth", "width", "mlp_width", "heads", "patch_size"):
        assert getattr(half, name) == getattr(small, name)


def test_all_parts_of_jft_are_trained_on_for_as_many_steps():
    runs = orders("figure4")
    assert len(runs) == 6 * 4
    assert len({run.steps for run in runs}) == 1
    assert [run.data for run in runs[:4]] == [
        *("/data/jft-9m", "/data/jft-30m", "/data/jft-90m", "/data/jft"),
    ]
    assert runs[0].epochs == pytest.approx(7 * 303 / 9, rel=1e-4)


def test_figure_8_turns_on_its_base():
    runs = {run.label: config_of(run) for run in orders("figure8")}
    base = runs["figure 8, base"]
    assert isinstance(base, VitConfig)
    assert (base.depth, base.width, base.mlp_width, base.patch_size) == (8, 1024, 2048, 32)
    assert runs["figure 8, depth 64"] == base.change(depth=64)


def test_heads_are_those_of_figure_9():
    found = [(config_of(run).pool, run.settings.optim.learning_rate) for run in orders("heads")]  # type: ignore[union-attr]
    assert found == [("cls", 8e-4), ("mean", 8e-4), ("mean", 3e-4)]


def test_fine_tuning_replaces_the_whole_head_and_sees_larger_pictures():
    run = orders("transfer")[2]
    before, after = config_of(orders("transfer")[0]), config_of(run)
    assert run.data == "/data/cifar10"
    assert isinstance(before, VitConfig)
    assert isinstance(after, VitConfig)
    assert (before.representation, before.image_size) == (1024, 224)
    assert (after.representation, after.image_size, after.num_classes) == (0, 384, 10)
    assert after.num_tokens == 577


def test_masked_patches_learn_a_mask_and_colors_but_no_classes():
    run = orders("selfsupervised")[0]
    config = config_of(run)
    assert config.num_classes == 0
    extra = 768 + (768 + 1) * 512  # the vector for a masked patch, and the head for 512 colors
    assert learning(config, run.settings) == 85_798_656 + extra


def test_what_trains_nothing_has_no_orders():
    assert orders("table1") == []
    assert full.tables("table1") == []


def test_a_run_that_is_shorter_than_its_warm_up_is_refused():
    short = order("short", "paper-jft-vit-b32", steps=5000)
    with pytest.raises(ConfigError, match="warm"):
        full.built(short)


def test_devices_that_do_not_share_a_batch_are_refused():
    with pytest.raises(ConfigError, match="does not split over 7 devices"):
        check("heads", devices=7)


def test_tables_name_every_run_with_its_command():
    runs, commands = full.tables("heads")
    assert [row[0] for row in runs.rows] == [row[0] for row in commands.rows]
    assert "8 accelerators" in runs.caption
    assert "assumed" in runs.caption
    assert "--model.pool mean --optim.learning-rate 0.0003" in commands.rows[2][1]
