from dataclasses import replace
from itertools import accumulate, repeat

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vitrail import VitConfig
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing
from vitrail.models.config import BitConfig
from vitrail.models.lora import add_lora
from vitrail.models.vit import build
from vitrail.planning.plan import preprocessing_for, record_step, trace_step
from vitrail.planning.request import PlanRequest
from vitrail.training.data_module import batch_preparation
from vitrail.training.loop import make_state, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.schedules import Schedule

pytestmark = pytest.mark.slow

SMALL = VitConfig(
    depth=3, width=64, mlp_width=256, heads=2, patch_size=4, image_size=32, num_classes=10
)
RESNET = BitConfig(blocks=(1, 1), image_size=32, num_classes=10)
PLAIN = PlanRequest(model="ViT-Mu/4")


def traced(config=SMALL, accumulated=1, precision=torch.float32, **changes):
    settings = replace(PLAIN, **changes).settings()
    return trace_step(config, settings, accumulate=accumulated, precision=precision)


@pytest.fixture(scope="module")
def plain():
    return traced()


def real_peak(config, settings, images, accumulated=1):
    """Return the peak bytes that torch allocates in a real step."""
    model = build(config, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if settings.lora is not None:
        add_lora(model, settings.lora)
    if settings.machine.checkpointing:
        model.checkpointing = True
    objective = make_objective(model, settings)
    plan = {"accumulate": accumulated, "stages": ((0.0, config.image_size),)}
    state = make_state(objective, objective, Schedule(settings=settings, length=9, **plan))
    how, cpu = preprocessing_for(config), torch.device("cpu")
    prepare = batch_preparation(how, Mixing(), 10, cpu, steps_per_epoch=1)
    shape, labels = (images, 3, config.image_size, config.image_size), torch.zeros(images).long()

    def batches():
        for _ in repeat(None):
            yield Batch(torch.zeros(shape, dtype=torch.uint8), labels.clone(), torch.arange(images))

    train_step(state, batches(), prepare)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train_step(state, batches(), prepare)
    memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(
    ("config", "accumulated", "changes", "tolerance"),
    [
        (SMALL, 1, {}, 0.04),
        (SMALL, 1, {"checkpointing": True}, 0.04),
        (SMALL, 1, {"lora": 4}, 0.04),
        (SMALL, 2, {"optimizer": "muon", "average": 0.9}, 0.04),
        (RESNET, 1, {"optimizer": "sgd"}, 0.15),  # convolutions copy their input
    ],
)
def test_peak_matches_the_profiler(config, accumulated, changes, tolerance):
    trace = traced(config, accumulated, **changes)
    static = sum(trace.total(part) for part in ("weights", "optimizer", "average"))
    counted = sum(trace.at_peak(64).values()) - static
    measured = real_peak(config, replace(PLAIN, **changes).settings(), 64, accumulated)
    assert counted == pytest.approx(measured, rel=tolerance)


def test_two_traces_predict_every_batch_size(plain):
    recorder, events, begin = record_step(SMALL, PLAIN.settings(), 7, 1, torch.float32)
    live = accumulate(recorder.sizes[block] * sign for block, sign in events)
    assert sum(plain.at_peak(7).values()) == max(list(live)[begin:])


def test_parts_with_accumulation_and_bfloat16(plain):
    weights = 4 * sum(p.numel() for p in build(SMALL).parameters())
    assert plain.total("weights") == plain.total("gradients") == weights
    assert plain.total("optimizer") == pytest.approx(2 * weights, rel=0.01)
    assert plain.at_peak(64)["weights"] == weights
    assert plain.at_peak(64)["gradients"] < 0.5 * plain.total("gradients")
    assert traced(accumulated=3).at_peak(64)["gradients"] == plain.total("gradients")
    half = traced(precision=torch.bfloat16).at_peak(64)
    assert half["weights"] == plain.at_peak(64)["weights"]
    assert half["activations"] < 0.8 * plain.at_peak(64)["activations"]


def test_adafactor_has_a_small_state_and_updates_one_matrix_at_a_time(plain):
    few, many = (traced(SMALL.change(depth=depth), optimizer="adafactor") for depth in (3, 6))
    assert few.total("optimizer") < 0.3 * plain.total("optimizer")
    assert few.at_peak(0)["activations"] == many.at_peak(0)["activations"]
    measured = real_peak(SMALL, replace(PLAIN, optimizer="adafactor").settings(), 1)
    step = few.at_peak(1)  # in the optimizer, with all gradients
    assert step["gradients"] + step["activations"] == pytest.approx(measured, rel=0.04)


def test_lora_has_gradients_and_moments_of_trained_weights_only(plain):
    model = build(SMALL)
    add_lora(model, 4)
    trained = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    trace = traced(lora=4)
    assert trace.total("gradients") == trained < 0.25 * plain.total("gradients")
    assert trace.total("optimizer") == pytest.approx(2 * trained, rel=0.01)
