"""Mixtures of experts on a GPU: right, and each token's the same bits whoever else chose the same experts."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from headlong.backends.torch.gpu import experts
from headlong.backends.torch.gpu.experts import mix
from headlong.backends.torch.kernels.experts import Experts, Mixture, window_experts
from headlong.backends.torch.kernels.linear import Weight
from headlong.backends.torch.native.library import references_only

SHAPES = {  # hidden, experts, chosen, inner, inner of the shared one
    "even": (64, 8, 2, 32, 32),
    "odd": (40, 7, 3, 13, 21),
    "split": (256, 6, 2, 32, 16),
    "many": (33, 30, 8, 16, 16),
}
TOKENS = 35


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Tensors made without values hold NaN, or the largest number."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make(device, normal, monkeypatch):
    """A mixture of a shape: plain matrices, as they are on a GPU."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    def made(shape, renormalise=True, dtype=torch.float32):
        hidden, count, chosen, inner, shared = SHAPES[shape]

        def drawn(*sizes):
            return (normal(*sizes) / sizes[-1] ** 0.5).to(device, dtype)

        with references_only():
            return Mixture(
                Weight(3 * drawn(count + 1, hidden)),
                Experts(drawn(count, 2 * inner, hidden)),
                Experts(drawn(count, hidden, inner)),
                Weight(drawn(2 * shared, hidden)),
                Weight(drawn(hidden, shared)),
                chosen,
                renormalise,
            )

    return made


def draw(normal, mixture, tokens=TOKENS):
    matrix = mixture.routers.matrix
    return normal(tokens, matrix.shape[1]).to(matrix.device, matrix.dtype)


def exact(x, mixture):
    """In float64, expert by expert."""
    x, out, every = x.double(), [], (x.double() @ mixture.routers.matrix.double().T)

    def through(token, gate_up, down):
        gate, up = (gate_up.double() @ token).chunk(2)
        return down.double() @ (gate * gate.sigmoid() * up)

    for token, scores in zip(x, every, strict=True):
        scores, gate = scores[:-1].to(mixture.routers.matrix.dtype).double(), scores[-1]
        best = sorted(range(len(scores)), key=lambda expert: (-float(scores[expert]), expert))[: mixture.chosen]
        shares = scores.softmax(0)[best]
        shares = shares / shares.sum() if mixture.renormalise else shares
        mixed = gate.sigmoid() * through(token, mixture.shared_gate_up.matrix, mixture.shared_down.matrix)
        for share, expert in zip(shares, best, strict=True):
            mixed += share * through(token, mixture.gate_up.stacked[expert], mixture.down.stacked[expert])
        out.append(mixed)
    return torch.stack(out)


def near(found, wanted, error=1e-5):
    torch.testing.assert_close(found.double(), wanted, rtol=error, atol=error)


@pytest.mark.parametrize(
    ("shape", "tokens"), [*((shape, 3) for shape in SHAPES), ("odd", 1), ("odd", 17), ("many", TOKENS)]
)
def test_near_float64(make, normal, shape, tokens):
    mixture = make(shape)
    x = draw(normal, mixture, tokens)
    near(mix(x, mixture), exact(x, mixture))


def test_shares_that_are_not_made_to_add_up_to_one(make, normal):
    mixture = make("even", renormalise=False)
    x = draw(normal, mixture, 5)
    near(mix(x, mixture), exact(x, mixture))


def test_near_the_reference(make, normal):
    mixture = make("odd")
    x = draw(normal, mixture, 5)
    with references_only():
        near(mix(x, mixture), window_experts(x, mixture).double())


def test_half_precision(make, normal):
    mixture = make("split", dtype=torch.float16)
    x = draw(normal, mixture, 5)
    found = mix(x, mixture)
    assert found.dtype == torch.float16
    near(found, exact(x, mixture), 2e-2)
    assert torch.equal(mix(x[4:5], mixture)[0], found[4])


@pytest.mark.parametrize("shape", ["odd", "split"])
def test_a_token_does_not_see_who_else_came(make, normal, shape):
    mixture = make(shape)
    x = draw(normal, mixture)
    together = mix(x, mixture)
    for token in (0, 15, 16, 34):
        assert torch.equal(mix(x[token : token + 1], mixture)[0], together[token])
    for count in (2, 17):
        assert torch.equal(mix(x[:count], mixture), together[:count])
    assert torch.equal(mix(x.roll(5, 0), mixture).roll(-5, 0), together)


@pytest.mark.parametrize("wide", [16, 64])
def test_all_tokens_choose_the_same_experts(make, normal, monkeypatch, wide):
    """In several groups, or in one."""
    monkeypatch.setattr(experts, "PAIRS", (wide,))
    mixture = make("odd")
    mixture.routers.matrix[:-1, 0] = 30.0 - 5 * torch.arange(7)
    x = draw(normal, mixture)
    x[:, 0] = 1.0
    found = mix(x, mixture)
    near(found, exact(x, mixture))
    assert torch.equal(mix(x[32:33], mixture)[0], found[32])


def test_of_equal_scores_the_lower_expert_is_chosen(make, normal):
    mixture = make("many")
    mixture.routers.matrix[1:-1] = mixture.routers.matrix[0].clone()
    x = draw(normal, mixture, 5)
    near(mix(x, mixture), exact(x, mixture))
    with references_only():
        near(mix(x, mixture), window_experts(x, mixture).double())


def test_what_counts_is_left_at_zero(make, normal):
    mixture = make("split")
    x = draw(normal, mixture, 17)
    assert torch.equal(mix(x, mixture), mix(x, mixture))


def test_what_stands_behind_the_tokens_does_not_matter(make, normal):
    mixture = make("odd")
    room = draw(normal, mixture)
    room[3:] = torch.nan
    near(mix(room[:3], mixture), exact(room[:3], mixture))


def test_a_token_that_is_nothing_harms_nobody(make, normal):
    mixture = make("odd")
    x = draw(normal, mixture)
    together = mix(x, mixture)
    x[[4, 20]] = torch.nan
    found = mix(x, mixture)
    assert found[[4, 20]].isnan().all()
    others = [token for token in range(TOKENS) if token not in (4, 20)]
    assert torch.equal(found[others], together[others])


def test_rows_may_stand_apart(make, normal):
    mixture = make("even")
    wide = draw(normal, mixture, 6)
    assert torch.equal(mix(wide[::2], mixture), mix(wide[::2].contiguous(), mixture))


def test_groups_are_as_wide_as_experts_are_sought_after(make):
    sizes = replace(experts._sizes(make("even")), experts=256, pairs=9)
    assert {experts._pairs_in_group(n, sizes) for n in range(1, 257)} == {16}
    assert [experts._pairs_in_group(n, sizes) for n in (257, 512, 1024, 5000)] == [32, 32, 64, 128]


def test_there_is_room_for_every_way_to_group(make):
    """However the choices fall: all tokens at the same experts, or each alone at its own."""
    sizes = experts._sizes(make("many"))
    for n in (1, 2, 16, 17, 40):
        room = len(experts._table(n, 16, sizes, torch.device("cpu")).groups)
        alike, apart = 8 * -(-n // 16), min(8 * n, 30)
        assert room >= max(alike, apart)
