"""Parameter groups, optimizers, and the average of the weights."""

import pytest
import torch
from torch import nn

from vitrail.errors import ConfigError
from vitrail.models.config import BitConfig, MixerConfig
from vitrail.models.vit import build
from vitrail.training.config import OptimSettings, Settings
from vitrail.training.loop import DivergedError, TrainState, optimizer_step
from vitrail.training.optim import (
    EMA,
    Muon,
    distances_from_head,
    freeze,
    is_kernel,
    is_muon_parameter,
    make_optimizers,
    orthogonalize,
    set_learning_rates,
)
from vitrail.training.schedules import Schedule

KINDS = ["adamw", "adam", "sgd", "lion", "adafactor", "muon"]


@pytest.fixture
def model(tiny):
    return build(tiny.change(layer_scale=0.1, registers=1, representation=8, pre_norm=True))


@pytest.fixture
def mixer():
    return build(
        MixerConfig(depth=2, width=8, tokens_mlp=4, channels_mlp=16, patch_size=4, image_size=8)
    )


@pytest.fixture
def bit():
    return build(BitConfig(blocks=(2, 1), image_size=32, num_classes=3))


def net(seed=0):
    """Return one weight of each kind."""
    torch.manual_seed(seed)
    names = {
        "stem.projection.weight": (4, 3, 2, 2),
        "cls_token": (1, 4),
        "encoder.blocks.0.attention.qkv.weight": (12, 4),
        "encoder.blocks.0.norm1.weight": (4,),
        "encoder.blocks.1.mlp.fc1.weight": (40, 36),
        "head.weight": (3, 4),
        "head.bias": (3,),
    }
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in names.items()}


def gradients(named, seed, scale=1.0):
    torch.manual_seed(seed)
    for parameter in named.values():
        parameter.grad = scale * torch.randn_like(parameter)


def settings(kind, **changes):
    rates = {"learning_rate": 0.01, "muon_learning_rate": 0.02}
    return OptimSettings(kind=kind, weight_decay=0.1, layer_decay=0.7, **(rates | changes))


@pytest.mark.parametrize("kind", KINDS)
def test_weight_decay_is_for_kernels_only(kind, model):
    named = dict(model.named_parameters())
    groups = [g for o in make_optimizers(named.items(), settings(kind), 2) for g in o.param_groups]
    decayed = {p for group in groups if group["weight_decay"] for p in group["params"]}
    blocks = ["attention.qkv", "attention.merge", "mlp.fc1", "mlp.fc2"]
    kernels = {f"encoder.blocks.{i}.{name}.weight" for i in (0, 1) for name in blocks}
    kernels |= {f"{name}.weight" for name in ("stem.projection", "representation", "head")}
    assert {name for name, parameter in named.items() if parameter in decayed} == kernels


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned-2d"},
        {"position": "relative", "distillation": True},
        {"pool": "map", "stem": "conv"},
        {"stem": "resnet", "patch_size": 1},
    ],
    ids=str,
)
def test_kernels_exclude_positions_tokens_and_norms(tiny, changes):
    model = build(tiny.change(image_size=32, **changes))
    kernels = {"Linear", "Conv2d", "PatchProjection", "StandardizedConv2d"}
    types = {f"{name}.weight": type(module).__name__ for name, module in model.named_modules()}
    expected = {name for name, kind in types.items() if kind in kernels}
    assert {name for name, p in model.named_parameters() if is_kernel(name, p)} == expected


# Distances from the head by prefix; every weight must have one.
VIT = {"head.": 0, "representation.": 0, "encoder.norm.": 0, "encoder.blocks.1.": 1}
VIT |= {"encoder.blocks.0.": 2, "stem.": 3, "position.": 3, "cls_token": 3, "registers": 3}
VIT |= {"encoder.pre_norm.": 3}
VIT |= {"encoder.positions.1.": 1, "encoder.positions.0.": 2}  # relative: part of their block
MIXER = {"head.": 0, "norm.": 0, "blocks.1.": 1, "blocks.0.": 2, "stem.": 3}
BIT = {"head.": 0, "norm.": 0, "stages.1.0.": 1, "stages.0.1.": 2, "stages.0.0.": 3, "root.": 4}


@pytest.mark.parametrize(
    ("name", "depth", "expected"),
    [("model", 2, VIT), ("relative", 2, VIT), ("mixer", 2, MIXER), ("bit", 0, BIT)],
)
def test_layer_decay_follows_the_distance_from_the_head(request, tiny, name, depth, expected):
    relative = name == "relative"
    made = build(tiny.change(position=name)) if relative else request.getfixturevalue(name)
    for weight, distance in distances_from_head(dict(made.named_parameters()), depth).items():
        assert [d for start, d in expected.items() if weight.startswith(start)] == [distance]
    names = ["mask_token", "decoder.weight", "encoder.blocks.0.norm1.bias"]  # of the objective
    assert list(distances_from_head(names, 2).values()) == [0, 0, 2]


def test_every_parameter_is_in_one_group(model):
    named = dict(model.named_parameters())
    [optimizer] = make_optimizers(named.items(), settings("adamw"), 2)
    distances = distances_from_head(named, 2)
    peaks = {p: g["peak"] for g in optimizer.param_groups for p in g["params"]}
    assert len(peaks) == sum(len(g["params"]) for g in optimizer.param_groups) == len(named)
    for name, parameter in named.items():
        assert peaks[parameter] == pytest.approx(0.01 * 0.7 ** distances[name])
    assert all(group["lr"] == group["peak"] for group in optimizer.param_groups)
    assert len(optimizer.param_groups) == 8  # with and without decay, for each distance
    plain = OptimSettings(kind="adamw", learning_rate=0.01)
    assert len(make_optimizers(named.items(), plain, 2)[0].param_groups) == 1


@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd"])
def test_torch_optimizers_are_fused_where_possible(kind):
    for device, fused in (("cpu", True), ("meta", False)):
        named = {name: nn.Parameter(p.to(device)) for name, p in net().items()}
        [optimizer] = make_optimizers(named.items(), settings(kind), 2)
        assert all(bool(group["fused"]) is fused for group in optimizer.param_groups)


def muons(model):
    """Return the groups of Muon and of AdamW by the names of their weights."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optim = settings("muon", muon_learning_rate=0.5, muon_momentum=0.9)
    optimizers = make_optimizers(model.named_parameters(), optim, 2)
    assert [type(optimizer) for optimizer in optimizers] == [Muon, torch.optim.AdamW]
    turned, left = (
        {names[p]: group for group in optimizer.param_groups for p in group["params"]}
        for optimizer in optimizers
    )
    assert sorted([*turned, *left]) == sorted(names.values())
    return turned, left


def test_muon_parameters(model, mixer, bit):
    turned, left = muons(model)
    parts = {"attention.qkv": 3, "attention.merge": 1, "mlp.fc1": 1, "mlp.fc2": 1}
    assert {name: group["parts"] for name, group in turned.items()} == {
        f"encoder.blocks.{i}.{name}.weight": count for i in (0, 1) for name, count in parts.items()
    } | {"stem.projection.weight": 1}
    assert turned["encoder.blocks.0.mlp.fc1.weight"]["peak"] == pytest.approx(0.5 * 0.7**2)
    assert {group["momentum"] for group in turned.values()} == {0.9}
    assert left["head.weight"]["peak"] == 0.01
    kinds = {name.split(".", 2)[2] for name in muons(mixer)[0] if name.startswith("blocks.")}
    assert kinds == {f"{m}_mixing.fc{i}.weight" for m in ("token", "channel") for i in (1, 2)}
    assert muons(bit)[0].keys() == {name for name, p in bit.named_parameters() if p.ndim == 4}
    freeze(model, ["stem.*", "encoder.*"])
    with pytest.raises(ConfigError, match=r"optim\.kind=adamw"):
        muons(model)


def one_by_one(kind, values, grads, t, rate, memory):
    """One step in double precision, for one parameter."""
    (b1, b2), decay = (0.9, 0.99 if kind == "lion" else 0.999), memory["decay"]
    grads = grads.double()
    if kind == "adam":
        grads = grads + decay * values
    if kind in ("adam", "adamw"):
        m = memory["m"] = b1 * memory.get("m", 0) + (1 - b1) * grads
        v = memory["v"] = b2 * memory.get("v", 0) + (1 - b2) * grads**2
        step = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + 1e-8)
        return values - rate * (step + (decay * values if kind == "adamw" else 0))
    if kind == "sgd":
        memory["m"] = 0.9 * memory.get("m", 0) + grads + decay * values
        return values - rate * memory["m"]
    m = memory.get("m", torch.zeros_like(grads))
    if kind == "lion":
        memory["m"] = b2 * m + (1 - b2) * grads
        return values - rate * ((b1 * m + (1 - b1) * grads).sign() + decay * values)
    keep, squares = min(b2, 1 - t**-0.8), grads**2 + 1e-30
    average = memory["v"] = keep * memory.get("v", 0) + (1 - keep) * squares
    if grads.ndim == 2 and min(grads.shape) >= 32:  # means of an average are averages of means
        rows, columns = average.mean(1, keepdim=True), average.mean(0, keepdim=True)
        average = rows * columns / average.mean()
    step = grads / average.sqrt()
    step = step / max(1, step.square().mean().sqrt().item())
    m = 0.9 * m + 0.1 * step
    memory["m"] = m.bfloat16().double()
    return values - rate * (m + decay * values)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "muon"])
def test_five_steps_match_the_formula(kind):
    named = net()
    optimizers = make_optimizers(named.items(), settings(kind), 2)
    distances = distances_from_head(named, 2)
    values = {name: parameter.detach().double() for name, parameter in named.items()}
    memory = {name: {"decay": 0.1 if is_kernel(name, p) else 0.0} for name, p in named.items()}
    for t in range(1, 6):
        gradients(named, t, 3**t)  # more than what is remembered: Adafactor clips its updates
        set_learning_rates(optimizers, 1 / t)
        for name, p in named.items():
            rate = 0.01 * 0.7 ** distances[name] / t
            values[name] = one_by_one(kind, values[name], p.grad, t, rate, memory[name])
        for optimizer in optimizers:
            optimizer.step()
    for name, parameter in named.items():
        # An element whose Lion or bfloat16 momentum is about to turn may round the other way.
        atol = 3e-5 if kind == "adafactor" else 1e-6
        torch.testing.assert_close(parameter.detach().double(), values[name], atol=atol, rtol=1e-5)


def test_muon_with_adamw():
    named, before = net(), net()
    optimizers = make_optimizers(named.items(), settings("muon"), 2)
    gradients(named, 0)
    name = "encoder.blocks.1.mlp.fc1.weight"
    gradient = named[name].grad.clone()
    for optimizer in optimizers:
        optimizer.step()
    rate = 0.02 * 0.7
    expected = before[name] * (1 - rate * 0.1) - rate * orthogonalize([gradient])[0]
    torch.testing.assert_close(named[name].detach(), expected.detach(), atol=1e-6, rtol=1e-5)
    moved = named["head.bias"] - before["head.bias"]
    torch.testing.assert_close(moved.abs(), torch.full((3,), 0.01), atol=1e-6, rtol=1e-4)


def test_adafactor_state_is_factored():
    named = net()
    [optimizer] = make_optimizers(named.items(), settings("adafactor"), 2)
    gradients(named, 0)
    optimizer.step()
    matrix = optimizer.state[named["encoder.blocks.1.mlp.fc1.weight"]]
    assert sorted(matrix) == ["columns", "momentum", "rows", "step"]
    assert matrix["rows"].numel() + matrix["columns"].numel() == 40 + 36
    assert matrix["momentum"].dtype == torch.bfloat16
    assert "squares" in optimizer.state[named["stem.projection.weight"]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e10])
def test_extreme_gradients_give_finite_weights(kind, scale):
    named = net()
    optimizers = make_optimizers(named.items(), settings(kind), 2)
    for seed in range(3):
        gradients(named, seed, scale)
        for optimizer in optimizers:
            optimizer.step()
    assert all(parameter.isfinite().all() for parameter in named.values())
    if scale == 0:
        assert torch.equal(named["head.bias"], net()["head.bias"])


def test_freeze_leaves_the_rest_trainable(model):
    names, patterns = dict(model.named_parameters()), ("stem.*", "*.mlp.*", "cls_token")
    frozen = freeze(model, patterns)
    starts = [name for name in names if name.startswith("stem.") or ".mlp." in name]
    assert sorted(frozen) == sorted([*starts, "cls_token"])
    assert freeze(model, patterns) == frozen
    assert freeze(model, ()) == []
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == set(frozen)
    [optimizer] = make_optimizers(model.named_parameters(), settings("adamw"), 2)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(names) - len(frozen)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("stm.*", r"unknown weights in optim\.freeze .*did you mean 'stem\.\*'\?"),
        ("encoder", r"did you mean 'encoder\.\*'\?"),
        ("encoder.block.0.*", r"did you mean 'encoder\.blocks\.0\.\*'\?"),
        ("cls_tokn", r"did you mean 'cls_token'\?"),
        ("nothing at all", r"there are cls_token, .*stem\.\*, .*head\.\*"),
        ("*", "freezes every weight"),
    ],
)
def test_invalid_freeze_patterns_raise(model, pattern, message):
    with pytest.raises(ConfigError, match=message):
        freeze(model, ("head.*", pattern))
    assert all(parameter.requires_grad for parameter in model.parameters())


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def values_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def perturb(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_ema_matches_the_recurrence():
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.9)
    first = values_of(model)
    average.update()  # of constant weights, which is exact
    perturb(model)
    assert all(torch.equal(value, first[name]) for name, value in average.values.items())
    assert not any(value.requires_grad for value in average.values.values())
    expected = {name: value.double() for name, value in first.items()}
    for _ in range(5):
        perturb(model)
        average.update()
        now = values_of(model)
        expected = {name: 0.9 * value + 0.1 * now[name] for name, value in expected.items()}
    for name, value in average.values.items():
        torch.testing.assert_close(value.double(), expected[name], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_weights_are_restored_bit_exactly(fails):
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.5)
    perturb(model)
    average.update()
    own, averaged = values_of(model), {name: v.clone() for name, v in average.values.items()}
    memory = [p.data_ptr() for p in model.parameters()]
    try:
        with average.applied():
            assert all(torch.equal(v, averaged[name]) for name, v in values_of(model).items())
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert all(torch.equal(value, own[name]) for name, value in values_of(model).items())
    assert all(torch.equal(value, averaged[name]) for name, value in average.values.items())
    assert [p.data_ptr() for p in model.parameters()] == memory


@pytest.mark.parametrize("gradient", [1.0, torch.inf])
def test_skipped_float16_step_does_not_update_the_ema(gradient):
    model = layers()
    average = EMA(dict(model.named_parameters()), decay=0.5)
    before = {name: value.clone() for name, value in average.values.items()}
    perturb(model)
    state = float16_state(model, average)
    step_with_gradient(state, gradient)
    same = all(torch.equal(average.values[name], value) for name, value in before.items())
    assert same == (gradient == torch.inf)


def test_float16_run_diverges_after_many_skipped_steps():
    state = float16_state(layers())
    for gradients in ([torch.nan] * 19, [1.0], [torch.inf] * 19):  # a good step starts over
        for gradient in gradients:
            step_with_gradient(state, gradient)
    with pytest.raises(DivergedError, match="20 steps in a row skipped in float16"):
        step_with_gradient(state, torch.nan)
    step_with_gradient(state, torch.nan)  # a rolled back run may skip steps again


def float16_state(model, ema=None):
    return TrainState(
        objective=model,
        wrapped=model,
        optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)],
        schedule=Schedule(settings=Settings(), length=1),
        ema=ema,
        scaler=torch.amp.GradScaler("cpu", init_scale=1.0),
    )


def step_with_gradient(state, gradient):
    for parameter in state.objective.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    state.scaler.scale(torch.ones(()))  # as the loss was
    optimizer_step(state, torch.ones(()), [])


def test_muon_updates_weights_of_convolutions_only():
    """A temperature of each head has four axes, too."""
    temperature, kernel = (nn.Parameter(torch.ones(1, 3, 1, 1)) for _ in range(2))
    assert is_muon_parameter("stem.layers.0.weight", kernel)
    assert not is_muon_parameter("encoder.blocks.0.attention.temperature", temperature)
