"""The paper's own runs: each can be built, costs what is published, and has its command."""

import shlex
from dataclasses import replace

import pytest

from reproduction import paper_scale
from reproduction.paper_scale import changed_options, check_run, command, runs_of, trainable
from reproduction.published import DATA, TABLE6, TABLE8
from vitrail.cli import main
from vitrail.cli.train import Finetune, Train
from vitrail.errors import ConfigError
from vitrail.models.config import VitConfig
from vitrail.models.registry import configuration
from vitrail.training.recipes import read_recipe

pytestmark = pytest.mark.slow

NAMES = list(paper_scale.DATA["experiments"])
ALL = {run.folder: run for name in NAMES for run in runs_of(name)}
CHANGED = {
    tuple(changed_options(run.settings, read_recipe(run.recipe))): run for run in ALL.values()
}


def test_folders_are_unique():
    assert len(ALL) == len(paper_scale.DATA["runs"])
    for name in NAMES:
        assert all(ALL[run.folder].settings == run.settings for run in runs_of(name)), name


def test_every_model_of_the_paper_can_be_built():
    for config, run in {run.config: run for run in ALL.values()}.items():
        assert trainable(config, run.settings) > 1e6, run.label


def test_every_command_parses_to_the_settings_of_its_run(monkeypatch):
    parsed = []
    for kind in (Train, Finetune):
        monkeypatch.setattr(kind, "run", lambda self: parsed.append(self))
    for run in CHANGED.values():
        words = command(run)
        assert words[:4] == ["torchrun", "--nproc-per-node=8", "-m", "vitrail"]
        assert main(words[4:]) == 0
        options = parsed.pop()
        assert options.settings == run.settings, shlex.join(words)
        assert (options.data, str(options.out)) == (run.data, run.folder)
        if run.start is not None:
            assert options.origin == run.start.folder


def test_a_model_is_trained_before_it_is_fine_tuned():
    for name in NAMES:
        done = set()
        for run in runs_of(name):
            assert run.start is None or run.start.folder in done, run.label
            done.add(run.folder)


def test_figure5_has_the_compute_of_table_6():
    rows = paper_scale.full_report("figure5").tables[0].rows
    for run, row, cells in zip(runs_of("figure5"), TABLE6, rows, strict=True):
        assert run.settings.model.name == row.model
        assert run.settings.epochs == row.epochs
        _, exaflops = check_run(run)
        assert exaflops == pytest.approx(row.exaflops, rel=0.051), row.name
        days = exaflops * 1e18 / (8 * paper_scale.A100.peak * paper_scale.UTILIZATION) / 86_400
        assert float(cells[5].replace(",", "")) == pytest.approx(days, abs=0.06)


def test_runs_on_jft_have_the_learning_rates_of_table_3():
    rows = [row for row in DATA["table3"]["rows"] if row["data"] == "JFT"]
    rates = {model: row["learning_rate"] for row in rows for model in row["models"]}
    for run in runs_of("figure5"):
        if run.settings.model.name in rates:  # table 3 has no BiT-R200x3
            assert run.settings.optim.learning_rate == rates[run.settings.model.name]


def test_table_8_has_every_position():
    runs = runs_of("table8")
    configs = [run.config for run in runs]
    assert [(c.position, c.position_place) for c in configs] == list(TABLE8)  # type: ignore[union-attr]
    assert all(run.steps == round(7 * 303e6 / 4096) for run in runs)


def test_a_halved_base_model_is_as_small_as_vit_s():
    half = runs_of("figure4")[0].config
    small = configuration("ViT-S/32")
    assert isinstance(half, VitConfig)
    assert isinstance(small, VitConfig)
    for name in ("depth", "width", "mlp_width", "heads", "patch_size"):
        assert getattr(half, name) == getattr(small, name)


def test_all_subsets_of_jft_have_equal_steps():
    runs = runs_of("figure4")
    assert len(runs) == 6 * 4
    assert len({run.steps for run in runs}) == 1
    assert [run.data for run in runs[:4]] == [
        *("/data/jft-9m", "/data/jft-30m", "/data/jft-90m", "/data/jft"),
    ]
    assert runs[0].steps * 4096 / runs[0].images == pytest.approx(7 * 303 / 9, rel=1e-4)


def test_figure_8_scales_its_base():
    runs = {run.label: run.config for run in runs_of("figure8")}
    base = runs["figure 8, base"]
    assert isinstance(base, VitConfig)
    assert (base.depth, base.width, base.mlp_width, base.patch_size) == (8, 1024, 2048, 32)
    assert runs["figure 8, depth 64"] == base.change(depth=64)


def test_heads_are_those_of_figure_9():
    heads = [(run.config.pool, run.settings.optim.learning_rate) for run in runs_of("heads")]  # type: ignore[union-attr]
    assert heads == [("cls", 8e-4), ("mean", 8e-4), ("mean", 3e-4)]


def test_fine_tuning_replaces_the_head_and_enlarges_images():
    run = runs_of("transfer")[2]
    before, after = run.start.config, run.config
    assert run.data == "/data/cifar10"
    assert isinstance(before, VitConfig)
    assert isinstance(after, VitConfig)
    assert (before.representation, before.image_size) == (1024, 224)
    assert (after.representation, after.image_size, after.num_classes) == (0, 384, 10)
    assert after.num_tokens == 577


def test_masked_patches_train_a_mask_token_and_colors_but_no_classes():
    run = runs_of("selfsupervised")[0]
    assert run.config.num_classes == 0
    extra = 768 + (768 + 1) * 512  # the mask token, and the head for 512 colors
    assert trainable(run.config, run.settings) == 85_798_656 + extra


def test_table_1_has_no_runs():
    assert runs_of("table1") == []
    assert paper_scale.full_report("table1").tables == ()


def test_a_run_that_is_shorter_than_its_warm_up_is_refused():
    run = runs_of("figure4")[4]
    short = replace(run, settings=replace(run.settings, steps=5000))
    with pytest.raises(ConfigError, match="warm"):
        check_run(short)


def test_an_indivisible_batch_is_refused():
    with pytest.raises(ConfigError, match="is not divisible by 7 devices"):
        check_run(runs_of("heads")[0], devices=7)


def test_tables_name_every_run_with_its_command():
    runs, commands = paper_scale.full_report("heads").tables
    assert [row[0] for row in runs.rows] == [row[0] for row in commands.rows]
    assert "8 accelerators" in runs.caption
    assert "assumed" in runs.caption
    assert "--model.pool mean --optim.learning-rate 0.0003" in commands.rows[2][1]
