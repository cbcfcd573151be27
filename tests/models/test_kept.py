import copy
import io
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vitrail import create
from vitrail.models.build import build
from vitrail.models.init import initialize
from vitrail.models.memory import Cache, is_plain_linear


def counted(kept, source, key):
    calls = []

    def make():
        calls.append(key)
        return source * 2

    kept.get(source, key, make)
    return len(calls)


def test_a_value_is_kept_until_its_source_changes():
    kept, source = Cache(), torch.ones(2)
    assert counted(kept, source, "a") == 1
    assert counted(kept, source, "a") == 0
    assert counted(kept, source, "b") == 1
    assert counted(kept, source.clone(), "b") == 0  # an equal one is as good
    source.add_(1)
    assert counted(kept, source, "b") == 1
    assert counted(kept, source.double(), "b") == 1
    source.data[0] = 7  # what no counter sees
    assert counted(kept, source.double(), "b") == 1


def test_nothing_is_kept_while_gradients_flow():
    kept, source = Cache(), torch.ones(2, requires_grad=True)
    assert counted(kept, source, "a") == counted(kept, source, "a") == 1
    with torch.no_grad():
        assert counted(kept, source, "a") == 1
        assert counted(kept, source, "a") == 0


def test_what_was_kept_in_inference_mode_can_be_used_for_training_later():
    kept, source = Cache(), torch.ones(2)
    with torch.inference_mode():
        kept.get(source, "a", lambda: source * 2)
    weight = torch.ones(2, requires_grad=True)
    (weight * kept.get(source, "a", lambda: source * 2)).sum().backward()
    assert torch.equal(weight.grad, torch.full((2,), 2.0))


def other_size(model):
    """Logits at a size for which positions must be stretched."""
    with torch.no_grad():
        return model.eval()(torch.ones(2, 3, 48, 40))


def awake(**changes):
    model = create("ViT-Mu/4", num_classes=3, **changes)
    torch.nn.init.normal_(model.head.weight)
    return model


POSITIONS = [{}, {"position": "learned-2d"}, {"position": "relative"}, {"position": "sincos-2d"}]


@pytest.mark.parametrize("kind", POSITIONS, ids=str)
@pytest.mark.parametrize("fused", [False, True])
def test_evaluation_between_training_steps_sees_the_new_weights(kind, fused):
    torch.manual_seed(0)
    model = awake(**kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    for _ in range(3):
        other_size(model)
        model.train()(torch.ones(2, 3, 32, 32)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = build(model.config, device="cpu")
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(other_size(model), other_size(fresh))


@pytest.mark.parametrize("name", ["BiT-R50x1", "R+ViT-Ti/16"])
def test_convolutions_see_the_new_weights_too(name):
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


def test_copies_and_pickles_go_their_own_way():
    model = awake()
    size_before = pickled(model)
    other_size(model)
    assert pickled(model) == size_before
    twin = copy.deepcopy(model)
    twin.load_state_dict(awake().state_dict())
    fresh = build(model.config, device="cpu")
    fresh.load_state_dict(twin.state_dict())
    assert torch.equal(other_size(twin), other_size(fresh))


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return len(buffer.getvalue())


def test_threads_do_not_get_each_others_positions():
    model = awake().eval()
    sizes = [(48, 64), (64, 48)]
    with torch.no_grad():
        right = {size: model(torch.ones(1, 3, *size)) for size in sizes}
    wrong = []

    def work(size):
        with torch.no_grad():
            for _ in range(100):
                if not torch.equal(model(torch.ones(1, 3, *size)), right[size]):
                    wrong.append(size)

    threads = [threading.Thread(target=work, args=(size,)) for size in sizes * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_fake_tensors_are_not_kept():
    model = awake().eval()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model(torch.ones(1, 3, 48, 40))
    assert type(other_size(model)) is torch.Tensor


def test_every_weight_has_its_first_value_after_all_this():
    model = awake(layer_scale=0.1)
    initialize(model)
    assert torch.equal(model.encoder.blocks[0].branch1.scale, torch.full((32,), 0.1))


@pytest.mark.parametrize(
    "register",
    [
        torch.nn.Linear.register_forward_hook,
        torch.nn.Linear.register_forward_pre_hook,
        torch.nn.Linear.register_full_backward_hook,
        torch.nn.Linear.register_full_backward_pre_hook,
        lambda _, hook: torch.nn.modules.module.register_module_forward_hook(hook),
    ],
)
def test_a_layer_is_bare_until_a_hook_waits_for_it(register):
    layer = torch.nn.Linear(2, 2)
    assert is_plain_linear(layer)
    handle = register(layer, lambda *_: None)
    try:
        assert not is_plain_linear(layer)
    finally:
        handle.remove()
    assert is_plain_linear(layer)


def test_a_layer_with_another_weight_than_it_shows_is_not_bare():
    layer = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(2, 2))
    assert not is_plain_linear(layer)
