import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vitrail.checkpoints.save import save
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.formatting import MIB
from vitrail.models.registry import configuration
from vitrail.models.vit import create
from vitrail.planning.flops import PUBLISHED_RUNS, UTILIZATION, cost_of
from vitrail.planning.plan import make_plan
from vitrail.planning.request import PlanRequest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TINY = {"model": "ViT-Mu/4", "classes": 10, "precision": "float32"}


def counted(**changes):
    return make_plan(PlanRequest(**TINY | changes), measure=False)


@pytest.fixture(scope="module")
def one_device():
    return counted(batch_size=8)


def test_flops_of_vit_and_attention_pool_match_the_formula():
    tokens, width, depth, hidden = 197, 768, 12, 3072
    stem = 196 * 768 * width
    block = 4 * tokens * width**2 + 2 * tokens**2 * width + 2 * tokens * width * hidden
    config = configuration("ViT-B/16").change(num_classes=0)
    cost = cost_of(config)
    assert cost.forward == 2 * (stem + depth * block)
    assert cost.tokens == tokens
    assert cost.training == 3 * cost.forward
    assert cost_of(config, 384) == cost_of(config.change(image_size=384))
    assert cost_of(config, 384).tokens == 577
    tokens = 196
    pool = 2 * width**2 + 2 * tokens * width**2 + 2 * tokens * width + 2 * width * hidden
    added = cost_of(config.change(pool="map")).forward - cost_of(config.change(pool="mean")).forward
    assert added == 2 * pool
    reached = [run.utilization for run in PUBLISHED_RUNS]
    assert min(reached) < UTILIZATION < max(reached)  # assumed for other hardware


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["ViT-B/61"], "unknown model 'ViT-B/61'"),
        (["ViT-Ti/16", "--batch-size", "0"], "batch_size=0 must be 1 or more"),
        (["ViT-Ti/16", "--image-size", "225"], "try image_size=224"),
        (["ViT-Ti/16", "--batch-size", "30", "--devices", "4"], "try batch_size=28"),
        (["ViT-Ti/16", "--batch-size", "32", "--micro-batch", "5"], "try micro_batch=4"),
        (["ViT-Ti/16", "--batch-size", "8", "--micro-batch", "16"], "try micro_batch=8"),
        (["ViT-Ti/16", "--epochs", "7"], "needs the number of images"),
        (["ViT-Ti/16", "--images", "0"], "images=0 must be"),
        (["ViT-Ti/16", "--average", "2"], "average=2.0 must be 0"),
        (["ViT-Ti/16", "--utilization", "1.5"], "utilization=1.5 must be a share"),
        (["ViT-Ti/16", "--data", "nowhere"], "Dataset not found: nowhere"),
    ],
)
def test_invalid_options_end_with_one_line(options, message, capsys):
    assert main(["plan", *options, "--no-probe"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_command_prints_a_table_or_json(capsys):
    options = ["--images", "303e6", "--epochs", "7", "--batch-size", "64", "--classes", "10"]
    assert main(["plan", "ViT-Mu/4", *options, "--devices", "2", "--micro-batch", "8"]) == 0
    assert "exaFLOPs" in capsys.readouterr().out
    assert main(["plan", "ViT-Mu/4", "--no-probe", "--json", "--images", "1e6"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["epochs"] == 1
    assert plan["exaflops"] == pytest.approx(plan["flops"]["training"] * 1e6 / 1e18)
    assert plan["time"] is None
    assert plan["largest_batch"] > 32
    memory = plan["memory"]
    assert memory["peak"] > memory["tensors"] > memory["parts"]["weights"]


def test_fsdp_shards_weights_and_ddp_has_gradient_buckets(one_device):
    assert one_device.to_dict()["exaflops"] is None  # without the length of the run
    sharded = counted(batch_size=32, devices=4, strategy="fsdp").memory.parts
    whole = one_device.memory.parts
    for part in ("weights", "optimizer"):
        assert sharded[part] == pytest.approx(whole[part] / 4, abs=4)
    assert sharded["activations"] == pytest.approx(whole["activations"], rel=0.02)
    assert sharded["gathered"] > 0
    parts = counted(batch_size=32, devices=2, micro_batch=8, strategy="fsdp").memory.parts
    assert parts["gradients"] == one_device.memory.whole["gradients"]  # whole until the last
    parts = counted(batch_size=16, devices=2, strategy="fsdp", optimizer="muon").memory.parts
    assert parts["gathered"] >= 4 * (4 * 32 * 32 + 2 * 32 * 128 + 32 * 3 * 4 * 4)  # its matrices
    parts = counted(batch_size=16, devices=2).memory.parts
    assert parts["buckets"] == parts["weights"] == one_device.memory.parts["weights"]


def test_cpu_shards_have_gradients_of_their_own(one_device, monkeypatch):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 0)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    parts = counted(batch_size=8).memory.parts
    assert parts["copies"] == parts["weights"] == one_device.memory.parts["weights"]
    assert "copies" not in one_device.memory.parts


def test_largest_batch_fits_and_a_larger_one_does_not(one_device):
    largest = one_device.largest_batch
    for batch, fits in ((largest, True), (largest + largest // 20, False)):
        peak = counted(batch_size=batch, micro_batch=batch).memory.peak
        assert (peak <= one_device.free) is fits


def test_bundle_keeps_its_architecture(tmp_path):
    save(create("ViT-Mu/4", num_classes=3, depth=2), tmp_path / "bundle")
    plan = counted(model=str(tmp_path / "bundle"), classes=None)
    assert (plan.config.depth, plan.config.num_classes) == (2, 3)


@pytest.fixture(scope="module")
def gray(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "gray.npz"
    pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32), np.uint8)
    labels = np.arange(40) % 4
    np.savez(path, x_train=pixels, y_train=labels, x_test=pixels, y_test=labels)
    return str(path)


def test_steps_are_timed_on_the_data(gray):
    request = PlanRequest(model="ViT-Mu/4", data=gray, batch_size=8, epochs=2)
    made = make_plan(request)
    plan = made.to_dict()
    assert (made.config.channels, plan["classes"], plan["images"]) == (1, 4, 40)
    assert len(plan["time"]["steps"]) >= 3
    assert plan["time"]["epoch"] == pytest.approx(plan["time"]["step"] * 5)
    assert plan["time"]["run"] == pytest.approx(plan["time"]["epoch"] * 2)
    assert plan["memory"]["measured"]
    assert 200 * MIB < plan["memory"]["process"] <= plan["memory"]["peak"] < 1000 * MIB
    with pytest.raises(ConfigError, match="more than the 40 training images"):
        make_plan(PlanRequest(model="ViT-Mu/4", data=gray, batch_size=64))


def test_scale_page_has_the_tables_of_the_script():
    script = [sys.executable, ROOT / "scripts" / "scale_tables.py"]
    output = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for table in output.strip().split("\n\n"):
        assert table in page, "update docs/scale.md from `python scripts/scale_tables.py`"
