import pytest
import torch

from headlong.backends.torch.kernels.experts import (
    Experts,
    Mixture,
    add_parts,
    chunk_experts,
    grouped,
    looked_up,
    route,
    window_experts,
)
from headlong.backends.torch.kernels.linear import Weight, linear
from headlong.backends.torch.native.library import references_only

HIDDEN, INNER, SHARED, COUNT, CHOSEN, TOKENS = 20, 13, 9, 7, 3, 23


@pytest.fixture
def matrices(normal):
    return normal(COUNT, 2 * INNER, HIDDEN) / HIDDEN**0.5, normal(COUNT, HIDDEN, INNER) / INNER**0.5


@pytest.fixture
def others(normal):
    """Routers, and the shared expert's two."""
    return 3 * normal(COUNT + 1, HIDDEN) / HIDDEN**0.5, normal(2 * SHARED, HIDDEN) / 4, normal(HIDDEN, SHARED) / 3


def make(matrices, others):
    (gate_up, down), (routers, shared_gate_up, shared_down) = map(Experts, matrices), map(Weight, others)
    return Mixture(routers, gate_up, down, shared_gate_up, shared_down, CHOSEN, renormalise=True)


@pytest.fixture
def mixture(kernels, matrices, others):
    return make(matrices, others)


@pytest.fixture
def mix(mixture):
    return lambda x, shares, ids: add_parts(shares, grouped(x, ids, mixture, linear))


def test_fixed_shapes_give_the_same_and_see_nobody(matrices, others, normal, monkeypatch):
    """The way that is captured: plain matrices, one product for every token and choice."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with references_only():
        mixture = make(matrices, others)
        assert mixture.gate_up.stacked is not None
        x = normal(TOKENS, HIDDEN)
        shares, ids = route(2 * normal(TOKENS, COUNT), CHOSEN, True)
        found = add_parts(shares, looked_up(x, ids, mixture))
        torch.testing.assert_close(found.double(), slow(x, shares, ids, *matrices), atol=2e-6, rtol=1e-5)
        whole = window_experts(x, mixture)
        for token in range(TOKENS):
            assert torch.equal(window_experts(x[token : token + 1], mixture)[0], whole[token])


@pytest.mark.parametrize("call", [window_experts, chunk_experts])
def test_experts_and_the_shared_one(call, mixture, matrices, others, normal):
    x, (routers, shared_gate_up, shared_down) = normal(TOKENS, HIDDEN), others
    scores, gate = (x.double() @ routers.double().T).split([COUNT, 1], -1)
    shares, ids = route(scores, CHOSEN, True)
    left, up = (x.double() @ shared_gate_up.double().T).chunk(2, -1)
    shared = (left * left.sigmoid() * up) @ shared_down.double().T * gate.sigmoid()
    wanted = slow(x, shares, ids, *matrices) + shared
    torch.testing.assert_close(call(x, mixture).double(), wanted, atol=2e-5, rtol=1e-5)


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


def test_of_equal_scores_the_lower_expert_is_chosen():
    scores = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 0.0]]).repeat(300, 20)
    assert route(scores, 6, True)[1].tolist() == [[1, 2, 4, 5, 8, 9]] * 300


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
