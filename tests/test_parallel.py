"""Two processes compute the losses and weights of one, with DDP and FSDP2."""

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import parallel_worker as worker
import vitrail
from parallel_worker import HALF, MODELS, RESUMED, SETUPS, STEPS
from processes import in_two_processes
from vitrail import distributed
from vitrail.errors import ConfigError
from vitrail.training import optim

pytestmark = pytest.mark.slow

STRATEGIES = ("ddp", "fsdp")
CLOSE = {"rtol": 0, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("parallel")


@pytest.fixture(scope="module")
def one(folder) -> dict:
    """Results of one process for every setup."""
    runs = {name: worker.whole_run(s, "ddp", folder / f"one-{name}") for name, s in SETUPS.items()}
    return runs | {family: worker.one_step(family, "ddp") for family in MODELS}


@pytest.fixture(scope="module")
def two(folder, one) -> dict:
    """Results of two processes, which also resume from the state of one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [worker.__file__, str(folder)]
    how = {"capture_output": True, "text": True, "timeout": 280}
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **how)
    assert done.returncode == 0, done.stderr[-5000:]
    return torch.load(folder / "results.pt", weights_only=False) | {"stderr": done.stderr}


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_norms_and_weights_equal_those_of_one_process(one, two, strategy, name):
    here, there, close = one[name], two[strategy, name], {"rtol": 0, "atol": SETUPS[name].close}
    near = close | {"atol": 10 * SETUPS[name].close}  # weights with small gradients drift first
    assert len(here["losses"]) == 2 * STEPS
    assert here["losses"][0] != pytest.approx(here["losses"][-2], abs=1e-3)  # the loss changes
    assert_close(there["losses"], here["losses"], **close)
    assert there["weights"].keys() == here["weights"].keys()  # the bare model's names
    assert_close(there["weights"], here["weights"], **near)
    assert_close(there["average"], here["average"], **near)
    assert_close(there["logits"], here["logits"], **close)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_family_can_be_parallelized(one, two, strategy, family):
    assert_close(two[strategy, family], one[family], **CLOSE)


@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        *(("two-ddp", "two-fsdp"), ("two-fsdp", "two-ddp"), ("one", "two-fsdp")),
        *(("two-ddp", "one"), ("two-fsdp", "one")),
    ],
)
def test_state_resumes_with_other_strategy_and_processes(folder, one, two, before, after, name):
    processes, _, strategy = after.partition("-")
    saved = one[name] if before == "one" else two[before.removeprefix("two-"), name]
    if processes == "one":
        resumed = worker.resumed(SETUPS[name], "ddp", folder / f"{before}-{name}")
    else:
        resumed = two["resumed", strategy, before, name]
    assert resumed["extra"] == {"step": HALF, "who": 1 if before == "one" else 2}
    assert_close(resumed["weights"], saved["weights"], rtol=0, atol=0)
    assert_close(resumed["average"], saved["average"], rtol=0, atol=0)
    close = {"rtol": 0, "atol": SETUPS[name].close}
    assert_close(resumed["losses"], saved["losses"][2 * HALF :], **close)


def test_gradients_are_synchronized_in_the_last_micro_batch(two):
    first, second = two["apart"]
    assert first["ddp"] != second["ddp"]
    assert first["ddp summed"] == second["ddp summed"]
    for result in (first, second):  # FSDP2 has not even sharded the gradients of the blocks
        assert result["fsdp"] is None
        assert result["fsdp summed"] == pytest.approx(first["ddp summed"], abs=1e-5)


def test_collectives_failed_save_and_no_warnings(two):
    expected = {"size": 2, "sum": 3.0, "mean": 1.5, "any": True, "none": False}
    expected |= {"objects": ["from 0", "from 1"], "first": "from 0", "weights on rank 0 only": True}
    assert two["talk"] == [expected | {"rank": rank} for rank in (0, 1)]
    first, second = two["failures"]
    assert first == second
    assert first.startswith("cannot save the run's state in ")
    assert "\n" not in first
    assert two["nonfinite"] == ["the images", "the images"]
    assert two["warnings"] == []
    assert "Warning" not in two["stderr"]


MATRICES = [(24, 8), (8, 8), (8, 8), (8, 32), (32, 8), (8, 8), (8, 8), (1, 7)]


def orthogonalize_together(path: str) -> int:
    """Save the updates of a rank, and the shapes of the batches that it has computed."""
    distributed.init("cpu")
    generator, batches = torch.Generator().manual_seed(0), []
    matrices = [torch.randn(shape, generator=generator) for shape in MATRICES]
    compute = optim.newton_schulz
    optim.newton_schulz = lambda x: batches.append(tuple(x.shape)) or compute(x)
    results = [optim.orthogonalize(matrices), tuple(batches), optim.orthogonalize(matrices[:1])]
    torch.save(results, f"{path}-{distributed.rank()}.pt")
    distributed.shutdown()
    return 0


def test_processes_share_the_work_of_muon(tmp_path):
    in_two_processes(tmp_path, orthogonalize_together, str(tmp_path / "muon"))
    parts = [torch.load(tmp_path / f"muon-{rank}.pt") for rank in (0, 1)]
    (updates, first, one), (others, second, other) = parts
    assert_close(updates, others, rtol=0, atol=0)
    assert_close(one, other, rtol=0, atol=0)  # fewer matrices than processes
    assert sorted(first) == [(1, 8, 24), (1, 8, 32), (2, 8, 8)]
    assert sorted(second) == [(1, 1, 7), (1, 8, 32), (2, 8, 8)]
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator) for shape in MATRICES]
    assert_close(updates, optim.orthogonalize(matrices), rtol=1e-6, atol=1e-6)
    assert_close(one, updates[:1], rtol=1e-6, atol=1e-6)


# One process


def test_everything_is_a_no_op_in_one_process():
    objective = worker.objective_of(worker.VIT)
    assert distributed.parallelize(objective, "fsdp") is objective
    assert (distributed.rank(), distributed.world_size(), distributed.is_main()) == (0, 1, True)
    tensor = torch.ones(3)
    for act in (distributed.all_reduce_mean, distributed.all_reduce_sum, distributed.full_tensor):
        assert act(tensor) is tensor
    assert distributed.distribute_like(tensor, tensor) is tensor
    assert distributed.all_gather_object(5) == [5]
    assert distributed.broadcast_object(5) == 5
    assert distributed.all_reduce_any(True)
    assert not distributed.all_reduce_any(False)
    with distributed.sync_gradients(objective, enabled=False):
        distributed.barrier()
    distributed.shutdown()


def test_process_group_of_the_caller_is_kept(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        distributed.init("cpu")
        distributed.shutdown()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_gathered_weights_are_copies_with_the_names_of_the_model():
    objective = worker.objective_of(worker.VIT)
    expected = {name: tensor.clone() for name, tensor in objective.model.state_dict().items()}
    weights = distributed.gather_state_dict(objective)
    torch.nn.init.zeros_(objective.model.head.weight)
    assert_close(weights, expected, rtol=0, atol=0)
    objective.model = torch.compile(objective.model, backend="eager")
    assert distributed.gather_state_dict(objective).keys() == expected.keys()


def test_clip_grad_norm():
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    frozen = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 2.0)
    norms = [float(distributed.clip_grad_norm([*parameters, frozen], x)) for x in (None, 1.0, 1.0)]
    assert norms == pytest.approx([20**0.5, 20**0.5, 1], abs=1e-5)
    assert float(distributed.clip_grad_norm([frozen], 1.0)) == 0


def test_device_selection_and_errors(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert distributed.init() == distributed.init("cpu") == torch.device("cpu")

    def rejects(**messages):
        for device, message in messages.items():
            with pytest.raises(ConfigError, match=message):
                distributed.init(device.replace("_", ":"))

    rejects(cdua="unknown device 'cdua'; did you mean 'cuda'", cuda_x="unknown device 'cuda:x'")
    rejects(cuda="device=cuda is not available on this machine")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert distributed.init() == torch.device("mps")
    monkeypatch.setenv("WORLD_SIZE", "2")
    rejects(mps="device=mps does not support 2 processes", cpu="WORLD_SIZE=2 is set, but RANK is")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name in distributed.TORCHRUN:
        monkeypatch.setenv(name, "1")
    rejects(cuda="started process 2 on a machine with 1 GPUs", cuda_3="this machine has 1 GPUs")


RECORDS = "torch.distributed.checkpoint.metadata"


def build(module: str, name: str, attribute: str, value: bytes, *, call: bytes = b"") -> bytes:
    """Return a pickle that sets an attribute of a global, or of its result when it is called."""
    text = attribute.encode()
    state = b"N}X" + len(text).to_bytes(4, "little") + text + value + b"s\x86"
    return f"c{module}\n{name}\n".encode() + call + state + b"b."


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (build(RECORDS, "MetadataIndex", "__init__", b"K\x07"), "type"),
        (build(RECORDS, "_MEM_FORMAT_ENCODING", "evil", b"K\x07"), "EnumType"),
        (build("torch.serialization", "_get_layout", "__defaults__", b"K\x07\x85"), "function"),
        (build(RECORDS, "_MEM_FORMAT_ENCODING", "_value_", b"K\x63", call=b"K\x00\x85R"),
         "_MEM_FORMAT_ENCODING"),
        (build("torch", "float32", "evil", b"K\x07"), "dtype"),
    ],
)  # fmt: skip
def test_unpickling_cannot_change_classes_and_functions(data, kind):
    """BUILD on an allowed global would stay changed for the whole process."""
    from torch.distributed.checkpoint import metadata

    format = metadata._MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT
    changeable = (vars(metadata.MetadataIndex), vars(torch.serialization._get_layout), vars(format))
    before = [dict(values) for values in changeable]
    with pytest.raises(pickle.UnpicklingError, match=f"would change the state of a {kind}"):
        distributed.MetadataUnpickler(io.BytesIO(data)).load()
    assert [dict(values) for values in changeable] == before
    assert torch.serialization._get_layout.__defaults__ is None


def test_predictor_needs_no_process_group(monkeypatch):
    model = vitrail.create("ViT-Mu/4", image_size=8, num_classes=2)
    monkeypatch.setenv("WORLD_SIZE", "2")  # by a scheduler
    assert vitrail.Predictor(model).device == distributed.local_device()
    for name in distributed.TORCHRUN:
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_: pytest.fail("hangs"))
    vitrail.Predictor(model, device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert distributed.local_device() == torch.device("cuda", 1)


def test_only_a_group_that_this_call_created_is_destroyed(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", **dict.fromkeys(distributed.TORCHRUN, "0")}.items():
        monkeypatch.setenv(name, value)
    groups, dist = [], torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: bool(groups))
    monkeypatch.setattr(dist, "init_process_group", groups.append)
    monkeypatch.setattr(dist, "destroy_process_group", groups.clear)
    with distributed.process_group("cpu") as device:
        assert (device, groups) == (torch.device("cpu"), ["gloo"])
    assert not groups
    distributed.init("cpu")  # by an earlier call
    with distributed.process_group("cpu"):
        pass
    assert groups
    distributed.shutdown()
    assert not groups
