"""The paper's own runs: each can be built, costs what is published, and has its command."""

import shlex
from dataclasses import replace

import pytest

from reproduction import paper_scale
from reproduction.paper_scale import changed_options, check_run, command, runs_of, trainable
from reproduction.published import TABLE6
from vitrail.cli import main
from vitrail.cli.train import Finetune, Train
from vitrail.errors import ConfigError
from vitrail.training.recipes import read_recipe

pytestmark = pytest.mark.slow

NAMES = list(paper_scale.DATA["experiments"])
ALL = {run.folder: run for name in NAMES for run in runs_of(name)}
CHANGED = {
    tuple(changed_options(run.settings, read_recipe(run.recipe))): run for run in ALL.values()
}


def test_every_model_of_the_paper_can_be_built():
    assert len(ALL) == len(paper_scale.DATA["runs"])  # folders are unique
    assert runs_of("table1") == []
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
        assert exaflops == pytest.approx(row.exaflops, rel=0.051), row.model
        days = exaflops * 1e18 / (8 * paper_scale.A100.peak * paper_scale.UTILIZATION) / 86_400
        assert float(cells[5].replace(",", "")) == pytest.approx(days, abs=0.06)


def test_all_subsets_of_jft_have_equal_steps():
    runs = runs_of("figure4")
    assert len(runs) == 6 * 4
    assert len({run.steps for run in runs}) == 1
    assert [run.data for run in runs[:4]] == [
        *("/data/jft-9m", "/data/jft-30m", "/data/jft-90m", "/data/jft")
    ]
    assert runs[0].steps * 4096 / runs[0].images == pytest.approx(7 * 303 / 9, rel=1e-4)


def test_fine_tuning_replaces_the_head_and_enlarges_images():
    run = runs_of("transfer")[2]
    before, after = run.start.config, run.config
    assert run.data == "/data/cifar10"
    assert (before.representation, before.image_size) == (1024, 224)
    assert (after.representation, after.image_size, after.num_classes) == (0, 384, 10)
    assert after.num_tokens == 577


def test_masked_patches_train_a_mask_token_and_colors_but_no_classes():
    run = runs_of("selfsupervised")[0]
    assert run.config.num_classes == 0
    extra = 768 + (768 + 1) * 512  # the mask token, and the head for 512 colors
    assert trainable(run.config, run.settings) == 85_798_656 + extra


def test_impossible_runs_are_refused():
    run = runs_of("figure4")[4]
    short = replace(run, settings=replace(run.settings, steps=5000))
    with pytest.raises(ConfigError, match="warm"):
        check_run(short)
    with pytest.raises(ConfigError, match="is not divisible by 7 devices"):
        check_run(runs_of("heads")[0], devices=7)
