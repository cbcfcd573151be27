import json

import numpy as np
import pytest

from vitrail.checkpoints.save import save
from vitrail.cli import main
from vitrail.errors import ConfigError
from vitrail.formatting import MIB
from vitrail.models.vit import create
from vitrail.planning.accelerators import REPORTED, UTILIZATION, reached
from vitrail.planning.planner import plan
from vitrail.planning.wish import Wish

TINY = {"model": "ViT-Mu/4", "classes": 10, "precision": "float32"}


def counted(**changes):
    return plan(Wish(**TINY | changes), probing=False)


@pytest.fixture(scope="module")
def alone():
    return counted(batch_size=8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["ViT-B/61"], "unknown model 'ViT-B/61'"),
        (["ViT-Ti/16", "--batch-size", "0"], "batch_size=0 must be 1 or more"),
        (["ViT-Ti/16", "--image-size", "225"], "try image_size=224"),
        (["ViT-Ti/16", "--batch-size", "30", "--devices", "4"], "try batch_size=28"),
        (["ViT-Ti/16", "--batch-size", "32", "--micro-batch", "5"], "try micro_batch=4"),
        (["ViT-Ti/16", "--batch-size", "8", "--micro-batch", "16"], "try micro_batch=8"),
        (["ViT-Ti/16", "--epochs", "7"], "of how many pictures?"),
        (["ViT-Ti/16", "--images", "0"], "images=0 must be"),
        (["ViT-Ti/16", "--average", "2"], "average=2.0 must be 0"),
        (["ViT-Ti/16", "--utilization", "1.5"], "utilization=1.5 must be a share"),
        (["ViT-Ti/16", "--data", "nowhere"], "Dataset not found: nowhere"),
        (["ViT-Ti/16", "--page", "x.md"], "needs --images and --epochs"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(options, words, capsys):
    assert main(["plan", *options, "--no-probe"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_table_fits_80_columns(capsys):
    options = ["--images", "303e6", "--epochs", "7", "--batch-size", "64", "--classes", "10"]
    assert main(["plan", "ViT-Mu/4", *options, "--devices", "2", "--micro-batch", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("exaFLOPs" in line for line in lines)


def test_json_has_everything(capsys):
    assert main(["plan", "ViT-Mu/4", "--no-probe", "--json", "--images", "1e6"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["epochs"] == 1
    assert facts["exaflops"] == pytest.approx(facts["flops"]["training"] * 1e6 / 1e18)
    assert facts["time"] is None
    assert facts["largest_batch"] > 32
    assert (
        facts["memory"]["peak"] > facts["memory"]["tensors"] > facts["memory"]["parts"]["weights"]
    )


def test_without_a_length_there_are_no_exaflops(alone):
    assert alone.to_dict()["exaflops"] is None


def test_fsdp_leaves_each_device_its_share(alone):
    split = counted(batch_size=32, devices=4, strategy="fsdp").memory.parts
    one = alone.memory.parts
    for part in ("weights", "optimizer"):
        assert split[part] == pytest.approx(one[part] / 4, abs=4)
    assert split["activations"] == pytest.approx(one["activations"], rel=0.02)
    assert split["gathered"] > 0


def test_gradients_stay_whole_while_parts_are_accumulated(alone):
    parts = counted(batch_size=32, devices=2, micro_batch=8, strategy="fsdp").memory.parts
    assert parts["gradients"] == alone.memory.whole["gradients"]


def test_ddp_sums_gradients_in_copies(alone):
    copied = counted(batch_size=16, devices=2).memory.parts
    assert copied["buckets"] == copied["weights"] == alone.memory.parts["weights"]


def test_cores_that_share_a_batch_have_gradients_of_their_own(alone, monkeypatch):
    monkeypatch.setattr("vitrail.training.cpu_parallel.MIN_SHARD", 0)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)
    shared = counted(batch_size=8).memory.parts
    assert shared["copies"] == shared["weights"] == alone.memory.parts["weights"]
    assert "copies" not in alone.memory.parts


def test_muon_gathers_what_it_turns():
    parts = counted(batch_size=16, devices=2, strategy="fsdp", optimizer="muon").memory.parts
    matrices = 4 * 32 * 32 + 2 * 32 * 128 + 32 * 3 * 4 * 4
    assert parts["gathered"] >= 4 * matrices


def test_the_largest_batch_fits_and_the_next_does_not(alone):
    most = alone.largest_batch
    for batch, fits in ((most, True), (most + most // 20, False)):
        wanted = counted(batch_size=batch, micro_batch=batch).memory.peak
        assert (wanted <= alone.free) is fits


def test_the_papers_own_days_are_near_the_assumption():
    shares = [reached(report) for report in REPORTED]
    assert min(shares) < UTILIZATION < max(shares)


def test_a_bundle_is_planned_as_it_is(tmp_path):
    save(create("ViT-Mu/4", num_classes=3, depth=2), tmp_path / "bundle")
    outlook = counted(model=str(tmp_path / "bundle"), classes=None)
    assert (outlook.config.depth, outlook.config.num_classes) == (2, 3)


@pytest.fixture(scope="module")
def gray(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "gray.npz"
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 32, 32), np.uint8)
    np.savez(
        path, x_train=pixels, y_train=np.arange(40) % 4, x_test=pixels, y_test=np.arange(40) % 4
    )
    return path


def test_a_probe_takes_real_steps_on_the_data(gray):
    outlook = plan(Wish(model="ViT-Mu/4", data=str(gray), batch_size=8, epochs=2))
    facts = outlook.to_dict()
    assert (outlook.config.channels, facts["classes"], facts["images"]) == (1, 4, 40)
    assert len(facts["time"]["steps"]) >= 3
    assert facts["time"]["epoch"] == pytest.approx(facts["time"]["step"] * 5)
    assert facts["time"]["run"] == pytest.approx(facts["time"]["epoch"] * 2)
    assert facts["memory"]["measured"]
    assert 200 * MIB < facts["memory"]["process"] <= facts["memory"]["peak"] < 1000 * MIB


def test_a_probe_that_cannot_be_tells_why(gray):
    with pytest.raises(ConfigError, match="more than the 40 training images"):
        plan(Wish(model="ViT-Mu/4", data=str(gray), batch_size=64))
