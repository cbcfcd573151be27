import copy
import io
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail import create
from vitrail.models.attention import is_plain_linear
from vitrail.models.pos_embed import fixed_table
from vitrail.models.vit import build


def test_table_is_cached_for_its_grid_and_dtype():
    grids = []

    def ones(grid):
        grids.append(grid)
        return torch.ones(2)

    def get(grid, dtype=torch.float32):
        return fixed_table(torch.empty(0, dtype=dtype), ones, grid)

    with torch.inference_mode():
        get((1, 2))
    weight = torch.ones(2, requires_grad=True)
    (weight * get((1, 2))).sum().backward()
    assert torch.equal(weight.grad, torch.ones(2))
    assert grids == [(1, 2)]
    assert get((1, 2), torch.float64).dtype == torch.float64
    get((2, 2), torch.float64)
    assert grids == [(1, 2), (1, 2), (2, 2)]


def test_interpolated_positions_are_not_compared_with_a_copy(monkeypatch):
    """Comparing values waits for the GPU in each forward pass."""
    monkeypatch.setattr(torch, "equal", None)
    for model in [small_vit(**kind) for kind in POSITIONS]:
        logits_at_other_size(model)
        logits_at_other_size(model)


def logits_at_other_size(model):
    """Logits at an image size that needs interpolated positions."""
    with torch.no_grad():
        return model.eval()(torch.ones(2, 3, 48, 40))


def small_vit(**changes):
    model = create("ViT-Mu/4", num_classes=3, **changes)
    torch.nn.init.normal_(model.head.weight)
    return model


POSITIONS = [{}, {"position": "learned-2d"}, {"position": "relative"}, {"position": "sincos-2d"}]


@pytest.mark.parametrize("kind", POSITIONS, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_no_stale_positions_between_training_steps(kind, fused):
    torch.manual_seed(0)
    model = small_vit(**kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        logits_at_other_size(model)
        model.train()(torch.ones(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = build(model.config, device="cpu")
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(logits_at_other_size(model), logits_at_other_size(fresh))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R+ViT-Ti/16"])
def test_no_stale_standardized_kernels(name):
    small = {"blocks": (1,)} if name.startswith("BiT") else {"depth": 1, "image_size": 64}
    model, images = create(name, num_classes=0, **small).eval(), torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        before = model(images)
        for parameter in model.parameters():
            parameter.data = torch.randn_like(parameter)
        after = model(images)
    fresh = build(model.config, device="cpu").eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(after, fresh(images))
    assert not torch.allclose(after, before)


def test_copies_and_pickles_do_not_contain_the_cache():
    model = small_vit(position="sincos-2d")
    size_before = pickled_size(model)
    logits_at_other_size(model)
    assert pickled_size(model) == size_before
    twin = copy.deepcopy(model)
    twin.load_state_dict(small_vit(position="sincos-2d").state_dict())
    fresh = build(model.config, device="cpu")
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(logits_at_other_size(twin), logits_at_other_size(fresh))


def pickled_size(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return len(buffer.getvalue())


def test_cache_is_thread_safe():
    model = small_vit(position="sincos-2d").eval()
    sizes = [(48, 64), (64, 48)]
    with torch.no_grad():
        expected = {size: model(torch.ones(1, 3, *size)) for size in sizes}
    mismatches = []

    def run(size):
        with torch.no_grad():
            for _ in range(100):
                if not torch.equal(model(torch.ones(1, 3, *size)), expected[size]):
                    mismatches.append(size)

    threads = [threading.Thread(target=run, args=(size,)) for size in sizes * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mismatches == []


def test_fake_tensors_are_not_cached():
    model = small_vit(position="sincos-2d").eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(torch.ones(1, 3, 48, 40))
    assert type(logits_at_other_size(model)) is torch.Tensor


@pytest.mark.parametrize("kind", POSITIONS, ids=str)
def test_vmap_values_are_not_cached(kind):
    model = small_vit(**kind).eval()
    stacked = {name: torch.stack([p, -p]).detach() for name, p in model.named_parameters()}
    images = torch.ones(2, 3, 48, 40)
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no batching rule
        expected = logits_at_other_size(copy.deepcopy(model))
        for _ in range(2):  # with an empty cache, then with one
            logits = vmap(lambda p: functional_call(model, p, images))(stacked)
            torch.testing.assert_close(logits[0], expected)
            assert torch.equal(logits_at_other_size(model), expected)


def func_jvp(function, primals, tangents):
    return jvp(function, (primals,), (tangents,))[1]


def dual_jvp(function, primals, tangents):
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p, tangents[name]) for name, p in primals.items()}
        return forward_ad.unpack_dual(function(duals)).tangent


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # by torch's own rules
@pytest.mark.parametrize("kind", POSITIONS[:3], ids=str)
@pytest.mark.parametrize("derive", [func_jvp, dual_jvp])
def test_forward_mode_derivatives_use_the_current_tangent(kind, derive):
    torch.manual_seed(0)
    model, images = small_vit(**kind).double().eval(), torch.randn(2, 3, 48, 40).double()
    positions = {name: p for name, p in model.named_parameters() if "position" in name}
    with sdpa_kernel(SDPBackend.MATH):
        gradients = torch.autograd.grad(model(images).sum(), list(positions.values()))
        primals = {name: p.detach() for name, p in positions.items()}
        for _ in range(2):
            tangents = {name: torch.randn_like(p) for name, p in primals.items()}
            slopes = derive(lambda p: functional_call(model, p, images), primals, tangents)
            expected = sum((g * t).sum() for g, t in zip(gradients, tangents.values(), strict=True))
            torch.testing.assert_close(slopes.sum(), expected)


def test_hooked_linear_is_not_plain():
    layer = torch.nn.Linear(2, 2)
    hooks = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
    registers = [getattr(layer, f"register_{kind}") for kind in hooks]
    kinds = ("forward_hook", "forward_pre_hook", "full_backward_hook")
    everywhere = [getattr(torch.nn.modules.module, f"register_module_{kind}") for kind in kinds]
    for register in (*registers, *everywhere):
        assert is_plain_linear(layer)
        handle = register(lambda *_: None)
        try:
            assert not is_plain_linear(layer)
        finally:
            handle.remove()
    assert not is_plain_linear(torch.nn.utils.parametrizations.weight_norm(layer))
