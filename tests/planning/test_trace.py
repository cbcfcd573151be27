from dataclasses import replace
from itertools import accumulate, repeat

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vitrail import VitConfig
from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Mixing
from vitrail.models.config import BitConfig
from vitrail.models.vit import build
from vitrail.planning import trace as tracing
from vitrail.planning.trace import trace_evaluation, trace_step, walk
from vitrail.planning.wish import Wish
from vitrail.training.data_module import batch_preparation
from vitrail.training.loop import make_state, train_step
from vitrail.training.objectives import make_objective
from vitrail.training.schedules import Schedule

SMALL = VitConfig(
    depth=3, width=64, mlp_width=256, heads=2, patch_size=4, image_size=32, num_classes=10
)
RESNET = BitConfig(blocks=(1, 1), image_size=32, num_classes=10)
PLAIN = Wish(model="ViT-Mu/4")


def traced(config=SMALL, accumulated=1, precision=torch.float32, **changes):
    settings = replace(PLAIN, **changes).settings()
    return trace_step(config, settings, accumulate=accumulated, precision=precision)


@pytest.fixture(scope="module")
def plain():
    return traced()


def real_peak(config, settings, pictures, accumulated=1):
    """Bytes that torch took at most in a real step, beyond what was there before it."""
    model = build(config, device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    if settings.machine.checkpointing:
        model.checkpointing = True
    objective = make_objective(model, settings)
    schedule = Schedule(
        settings=settings, length=9, accumulate=accumulated, stages=((0.0, config.image_size),)
    )
    state = make_state(objective, objective, schedule)
    prepare = batch_preparation(
        tracing.plain(config), Mixing(), 10, torch.device("cpu"), steps_per_epoch=1
    )
    shape = (pictures, 3, config.image_size, config.image_size)

    def batches():
        for _ in repeat(None):
            yield Batch(
                torch.zeros(shape, dtype=torch.uint8),
                torch.zeros(pictures, dtype=torch.long),
                torch.arange(pictures),
            )

    train_step(state, batches(), prepare)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train_step(state, batches(), prepare)
    memory = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())))


@pytest.mark.parametrize(
    ("config", "accumulated", "changes", "tolerance"),
    [
        (SMALL, 1, {}, 0.04),
        (SMALL, 1, {"checkpointing": True}, 0.04),
        (SMALL, 2, {"optimizer": "muon", "average": 0.9}, 0.04),
        (RESNET, 1, {"optimizer": "sgd"}, 0.15),  # a convolution orders pictures anew for itself
    ],
)
def test_a_real_step_takes_the_bytes_that_were_counted(config, accumulated, changes, tolerance):
    trace = traced(config, accumulated, **changes)
    static = sum(trace.part(part) for part in ("weights", "optimizer", "average"))
    counted = sum(trace.at_peak(64).values()) - static
    found = real_peak(config, replace(PLAIN, **changes).settings(), 64, accumulated)
    assert counted == pytest.approx(found, rel=tolerance)


def test_two_walks_tell_of_every_batch(plain):
    seven = walk(SMALL, PLAIN.settings(), 7, 1, torch.float32)
    live = accumulate(seven.bytes[block] * sign for block, sign in seven.events)
    assert sum(plain.at_peak(7).values()) == max(list(live)[seven.begin :])


def test_parts_are_as_large_as_they_must_be(plain):
    weights = 4 * sum(p.numel() for p in build(SMALL).parameters())
    assert plain.part("weights") == plain.part("gradients") == weights
    assert plain.part("optimizer") == pytest.approx(2 * weights, rel=0.01)
    assert plain.at_peak(64)["weights"] == weights


def test_checkpointing_keeps_less(plain):
    less = traced(checkpointing=True).at_peak(64)["activations"]
    assert less < 0.7 * plain.at_peak(64)["activations"]


def test_accumulated_gradients_are_there_at_the_peak(plain):
    assert plain.at_peak(64)["gradients"] < 0.5 * plain.part("gradients")
    assert traced(accumulated=3).at_peak(64)["gradients"] == plain.part("gradients")


def test_half_precision_is_traced_although_its_cache_has_no_order(plain):
    half = traced(precision=torch.bfloat16).at_peak(64)
    assert half["weights"] == plain.at_peak(64)["weights"]
    assert half["activations"] < 0.8 * plain.at_peak(64)["activations"]


def test_evaluating_needs_less_than_learning(plain):
    assert 0 < trace_evaluation(SMALL, 64) < 0.5 * plain.at_peak(64)["activations"]
