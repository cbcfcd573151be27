import pytest
import torch
import torch.nn.functional as F

from vitrail.models.activation import CHUNK, gelu

KINDS = {"tanh": "tanh", "exact": "none"}


def values(count=4001):
    return torch.cat(
        [torch.linspace(-12, 12, count), torch.tensor([0.0, -0.0, 1e-30, 90.0, -90.0])]
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gelu_is_torchs_to_the_last_digits(kind):
    x = values()
    expected = F.gelu(x.double(), approximate=KINDS[kind])
    for ours in (gelu(x.clone(), kind), gelu(x.clone().requires_grad_(), kind)):
        torch.testing.assert_close(ours.double(), expected, atol=3e-7, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_its_gradient_is_torchs_to_the_last_digits(kind):
    ours, theirs = values().requires_grad_(), values().double().requires_grad_()
    gelu(ours, kind).sum().backward()
    F.gelu(theirs, approximate=KINDS[kind]).sum().backward()
    torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-6, rtol=1e-6)


def test_more_values_than_fit_at_once_are_all_done():
    x = torch.randn(2, CHUNK + 7)
    expected = F.gelu(x, approximate="tanh")
    torch.testing.assert_close(gelu(x.clone().requires_grad_(), "tanh"), expected)
    torch.testing.assert_close(gelu(x, "tanh"), expected)


def test_memory_is_used_again_only_where_no_gradient_needs_it():
    x = torch.randn(5)
    assert gelu(x, "tanh").data_ptr() == x.data_ptr()
    kept = torch.randn(5, requires_grad=True)
    assert gelu(kept, "tanh").data_ptr() != kept.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_keep_their_type(dtype):
    x = torch.randn(7).to(dtype)
    assert torch.equal(gelu(x.clone(), "tanh"), F.gelu(x, approximate="tanh"))


def test_function_transforms_see_an_ordinary_operation():
    x = torch.randn(3, 4)
    slopes = torch.func.vmap(torch.func.grad(lambda row: gelu(row * 1, "tanh").sum()))(x)
    expected = x.clone().requires_grad_()
    F.gelu(expected, approximate="tanh").sum().backward()
    torch.testing.assert_close(slopes, expected.grad)
