import pytest
import torch

from headlong.backends.torch.kernels.rope import Rope

EPS = 1e-6


def slow(x, weight, positions, rotary, theta):
    """x [N, heads, D] in float64: normed, then each pair (j, j + rotary / 2) turned as a complex number."""
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight
    half = rotary // 2
    angle = positions[:, None, None] * theta ** (-2 * torch.arange(half, dtype=torch.float64) / rotary)
    turned = torch.complex(x[..., :half], x[..., half:rotary]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([turned.real, turned.imag, x[..., rotary:]], -1)


@pytest.mark.parametrize(("heads", "dim", "rotary"), [(1, 2, 2), (3, 16, 4), (5, 24, 6), (6, 64, 16), (2, 40, 40)])
def test_near_float64(kernels, heads, dim, rotary, normal):
    rope = Rope(5000, rotary, 1e4, torch.device("cpu"))
    positions = torch.tensor([0, 1, 4999, 17, 17, 300, 2])
    wide, weight = normal(7, heads * dim + 11), 1 + 0.3 * normal(heads, dim)
    x = wide[:, : heads * dim]
    found = rope.normed(x, weight, EPS, positions)
    wanted = slow(x.double().unflatten(-1, (heads, dim)), weight.double(), positions.double(), rotary, 1e4)
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    for row in range(7):
        assert torch.equal(rope.normed(x[row : row + 1], weight, EPS, positions[row : row + 1])[0], found[row])


def test_products_depend_on_distance_alone(kernels, normal):
    rope, ones = Rope(1000, 16, 1e4, torch.device("cpu")), torch.ones(2, 32)
    qk = normal(1, 64).expand(3, 64)
    products = []
    for start in (0, 5, 900):
        q, k = rope.normed(qk[:2], ones, EPS, torch.tensor([start + 30, start])).unbind(1)
        products.append((q[0] * k[1]).sum())
    torch.testing.assert_close(torch.stack(products), products[0].expand(3), atol=1e-4, rtol=1e-4)
