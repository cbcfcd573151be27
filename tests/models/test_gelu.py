import pytest
import torch
import torch.nn.functional as F

from vitrail.models.encoder import CHUNK, CUBIC, LINEAR, gelu

KINDS = {"tanh": "tanh", "exact": "none"}
EPS = torch.finfo(torch.float32).eps


def sample_inputs(count=4001):
    special = torch.tensor([0.0, -0.0, 1e-30, 90.0, -90.0])
    return torch.cat([torch.linspace(-12, 12, count), special])


@pytest.mark.parametrize("kind", KINDS)
def test_gelu_matches_torch(kind):
    x = sample_inputs()
    expected = F.gelu(x.double(), approximate=KINDS[kind])
    # x times a factor in [0, 1], which is accurate to a few eps. torch's own erf is off by
    # 2.3 eps |x|, depending on the instruction set.
    bound = 4 * EPS * x.abs()
    for ours in (gelu(x.clone(), kind), gelu(x.clone().requires_grad_(), kind)):
        assert ((ours - expected).abs() <= bound).all()


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_matches_torch(kind):
    ours, theirs = sample_inputs().requires_grad_(), sample_inputs().double().requires_grad_()
    gelu(ours, kind).sum().backward()
    F.gelu(theirs, approximate=KINDS[kind]).sum().backward()
    # s + y (2 u)' - y (2 u)' s: the last two are up to x (2 u)' and cancel, leaving the rounding
    # errors of their product and of s, one eps each. Beyond |x| = 6, s is 0 or 1.
    x = theirs.detach().abs().clamp(max=6)
    bound = 2 * EPS * (2 + x * (LINEAR + 3 * CUBIC * x**2))
    assert ((ours.grad - theirs.grad).abs() <= bound).all()


def test_inputs_larger_than_a_chunk():
    ours = torch.randn(3, CHUNK + 7).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    values, expected = gelu(ours, "tanh"), F.gelu(theirs, approximate="tanh")
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gelu(ours.detach(), "tanh"), expected)
    values.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-5)


def test_input_is_overwritten_only_if_inplace():
    for kind in KINDS:
        x = torch.randn(5)
        before = x.clone()
        assert gelu(x, kind).data_ptr() != x.data_ptr()
        assert torch.equal(x, before)
        assert gelu(x, kind, inplace=True).data_ptr() == x.data_ptr()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_traced_gelu_accepts_any_shape():
    traced = torch.jit.trace(lambda x: gelu(x * 1, "tanh"), torch.randn(2, 5))
    x = torch.randn(2, CHUNK)
    torch.testing.assert_close(traced(x), F.gelu(x, approximate="tanh"))


def test_dtypes_and_functorch_transforms():
    x = torch.randn(100)
    expected = gelu(x, "tanh")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(gelu(x, "tanh"), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    for other in (x.double(), x.bfloat16()):
        assert torch.equal(gelu(other.clone(), "tanh"), F.gelu(other, approximate="tanh"))
    x = torch.randn(3, 4)
    slopes = torch.func.vmap(torch.func.grad(lambda row: gelu(row * 1, "tanh").sum()))(x)
    expected = x.clone().requires_grad_()
    F.gelu(expected, approximate="tanh").sum().backward()
    torch.testing.assert_close(slopes, expected.grad)
