import pytest
import torch

from headlong.backends.torch.kernels.norm import (
    add_norm,
    gated,
    gated_rms_norm,
    l2_norm,
    pair_norm,
    rms_norm,
    softplus,
    swiglu,
)

SIZES = (1, 7, 16, 17, 33, 64, 100)
EPS = 1e-6


def slow_norm(x, weight, eps=EPS):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def assert_rows_alone(function, *tensors):
    """Each row's bits are those it has alone and at any other place."""
    whole = function(*tensors)
    for row in range(len(whole)):
        assert torch.equal(function(*(tensor[row : row + 1].clone() for tensor in tensors))[0], whole[row])
    assert torch.equal(function(*(tensor.roll(1, 0) for tensor in tensors)).roll(-1, 0), whole)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
def test_add_norm(kernels, size, added, normal):
    x, add, weight = 3 * normal(37, size), normal(37, size), 1 + normal(size)
    total = x + add if added else x.clone()
    stream, normed = add_norm(x.clone(), add if added else None, weight, EPS)
    assert torch.equal(stream, total)
    torch.testing.assert_close(normed.double(), slow_norm(total.double(), weight.double()), atol=3e-6, rtol=3e-6)
    assert_rows_alone(lambda x, add: add_norm(x.clone(), add, weight, EPS)[1], x, add)


@pytest.mark.parametrize("size", SIZES)
def test_pair_norm(kernels, size, normal):
    first, second, weight = normal(5, size), 3 * normal(5, 2 * size)[:, :size], 1 + normal(2, size)
    normed = pair_norm(first, second, weight, EPS)
    wanted = [slow_norm(part.double(), scale) for part, scale in zip((first, second), weight.double(), strict=True)]
    torch.testing.assert_close(normed.double(), torch.cat(wanted, 1), atol=3e-6, rtol=3e-6)
    assert_rows_alone(lambda first, second: pair_norm(first, second, weight, EPS), first, second)


def test_eps_matters(kernels, normal):
    x, weight = 1e-3 * normal(3, 20), torch.ones(20)
    for eps in (1e-6, 1e-5):
        normed = add_norm(x.clone(), None, weight, eps)[1]
        torch.testing.assert_close(normed.double(), slow_norm(x.double(), weight.double(), eps), atol=1e-6, rtol=1e-5)


def test_norm_of_nothing_is_nothing(kernels):
    assert torch.equal(add_norm(torch.zeros(2, 20), None, torch.ones(20), EPS)[1], torch.zeros(2, 20))


@pytest.mark.parametrize("size", SIZES)
def test_swiglu(kernels, size, normal):
    gate_up = 3 * normal(37, 2 * size)
    gate, up = gate_up.double().chunk(2, -1)
    torch.testing.assert_close(swiglu(gate_up).double(), gate * gate.sigmoid() * up, atol=1e-6, rtol=1e-6)
    assert_rows_alone(swiglu, gate_up)


@pytest.mark.parametrize("size", SIZES)
def test_gated(kernels, size, normal):
    x, wide = normal(37, size), 3 * normal(37, size + 9)
    gate = wide[:, 9:]  # columns of a wider tensor
    torch.testing.assert_close(gated(x, gate).double(), x * gate.double().sigmoid(), atol=1e-6, rtol=1e-6)
    assert_rows_alone(gated, x, gate)


def test_gates_far_out(kernels):
    far = torch.tensor([[-1000.0, -200.0, -90.0, -80.0, 0.0, 80.0, 90.0, 200.0, 1000.0]])
    ones = torch.ones_like(far)
    wanted = far.double().sigmoid()
    torch.testing.assert_close(gated(ones, far).double(), wanted, atol=1e-30, rtol=1e-6)
    torch.testing.assert_close(swiglu(torch.cat([far, ones], 1)).double(), far * wanted, atol=1e-27, rtol=1e-6)


@pytest.mark.parametrize("size", SIZES)
def test_the_other_norms(size, normal):
    x, gate, weight = normal(5, 3, size), normal(5, 3, size), 1 + normal(size)
    near = {"atol": 3e-6, "rtol": 3e-6}
    wanted = slow_norm(x.double(), weight.double())
    torch.testing.assert_close(rms_norm(x, weight, EPS).double(), wanted, **near)
    wanted = wanted * gate.double() * gate.double().sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, EPS).double(), wanted, **near)
    wanted = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(x).double(), wanted, **near)


def test_softplus():
    x = torch.cat([torch.linspace(-100, 100, 401), torch.tensor([-1e4, 1e4])])
    wanted = torch.logaddexp(x.double(), torch.zeros_like(x.double()))
    torch.testing.assert_close(softplus(x).double(), wanted, atol=1e-30, rtol=1e-6)
