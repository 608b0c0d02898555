import pytest
import torch

from headlong.backends.torch.kernels.experts import Experts, experts, route, window_experts
from headlong.backends.torch.kernels.linear import Weight, linear
from headlong.backends.torch.native.library import references_only

HIDDEN, INNER, COUNT, CHOSEN, TOKENS = 20, 13, 7, 3, 23


@pytest.fixture
def matrices(normal):
    return normal(COUNT, 2 * INNER, HIDDEN) / HIDDEN**0.5, normal(COUNT, HIDDEN, INNER) / INNER**0.5


@pytest.fixture
def mix(kernels, matrices):
    weights = [[Weight(matrix) for matrix in part] for part in matrices]
    return lambda x, shares, ids: experts(x, shares, ids, *weights, linear)


def test_fixed_shapes_give_the_same_and_see_nobody(matrices, normal, monkeypatch):
    """The way that is captured: plain matrices, one product for every token and choice."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with references_only():
        gate_up, down = (Experts(part) for part in matrices)
        assert gate_up.stacked is not None
        x = normal(TOKENS, HIDDEN)
        shares, ids = route(2 * normal(TOKENS, COUNT), CHOSEN, True)
        found = window_experts(x, shares, ids, gate_up, down)
        torch.testing.assert_close(found.double(), slow(x, shares, ids, *matrices), atol=2e-6, rtol=1e-5)
        for token in range(TOKENS):
            alone = window_experts(*(t[token : token + 1] for t in (x, shares, ids)), gate_up, down)
            assert torch.equal(alone[0], found[token])


def slow(x, shares, ids, gate_up, down):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for share, expert in zip(shares[token].double(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            out[token] += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
    return out


@pytest.mark.parametrize("renormalise", [True, False])
def test_route(renormalise, normal):
    scores = 2 * normal(TOKENS, COUNT)
    shares, ids = route(scores, CHOSEN, renormalise)
    for token in range(TOKENS):
        every = scores[token].double().softmax(0)
        best = sorted(range(COUNT), key=lambda expert: -every[expert])[:CHOSEN]
        assert ids[token].tolist() == best
        wanted = every[best] / (every[best].sum() if renormalise else 1)
        torch.testing.assert_close(shares[token].double(), wanted, atol=1e-6, rtol=1e-6)


def test_near_float64(mix, matrices, normal):
    x = normal(TOKENS, HIDDEN)
    shares, ids = route(2 * normal(TOKENS, COUNT), CHOSEN, True)
    found = mix(x, shares, ids)
    torch.testing.assert_close(found.double(), slow(x, shares, ids, *matrices), atol=2e-6, rtol=1e-5)


def test_experts_that_nobody_or_everybody_chose(mix, matrices, normal):
    x, shares = normal(5, HIDDEN), torch.tensor([[0.5, 0.3, 0.2]]).expand(5, 3)
    ids = torch.tensor([[6, 0, 2]]).expand(5, 3)
    torch.testing.assert_close(mix(x, shares, ids).double(), slow(x, shares, ids, *matrices), atol=2e-6, rtol=1e-5)


def test_a_token_does_not_see_who_else_came(mix, normal):
    x = normal(TOKENS, HIDDEN)
    shares, ids = route(2 * normal(TOKENS, COUNT), CHOSEN, True)
    whole = mix(x, shares, ids)
    for count in (1, 2, 5, 16, 17):
        assert torch.equal(mix(x[:count], shares[:count], ids[:count]), whole[:count])
    for token in range(TOKENS):
        assert torch.equal(mix(*(t[token : token + 1] for t in (x, shares, ids)))[0], whole[token])
    turned = mix(*(t.roll(4, 0) for t in (x, shares, ids)))
    assert torch.equal(turned.roll(-4, 0), whole)
