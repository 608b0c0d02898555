"""Norms, gates, rotary positions, places and best tokens on a GPU, against their references."""

import pytest
import torch

pytest.importorskip("triton")

from headlong.backends.torch.gpu import norms, places
from headlong.backends.torch.kernels import norm
from headlong.backends.torch.kernels.rope import Rope
from headlong.backends.torch.native.library import references_only

SIZE = 40


@pytest.fixture(autouse=True)
def references():
    with references_only():
        yield


def near(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("adds", [True, False])
def test_add_norm(device, normal, adds):
    x, add, weight = (tensor.to(device) for tensor in (normal(3, SIZE), normal(3, SIZE), normal(SIZE)))
    wanted = norm.add_norm(x.clone(), add if adds else None, weight, 1e-6)
    for mine, other in zip(norms.add_norm(x.clone(), add if adds else None, weight, 1e-6), wanted, strict=True):
        near(mine, other)


def test_pair_norm(device, normal):
    first, second, weight = (tensor.to(device) for tensor in (normal(3, SIZE), normal(3, SIZE), normal(2, SIZE)))
    near(norms.pair_norm(first, second, weight, 1e-6), norm.pair_norm(first, second, weight, 1e-6))


def test_gates(device, normal):
    x, wide = normal(3, SIZE).to(device), normal(3, 2 * SIZE + 20).to(device)
    near(norms.gated(x, wide[:, 20 : 20 + SIZE]), norm.gated(x, wide[:, 20 : 20 + SIZE]))
    near(norms.swiglu(wide), norm.swiglu(wide))


@pytest.mark.parametrize(("dim", "rotary"), [(24, 8), (32, 32), (16, 4)])
def test_turned_heads(device, normal, dim, rotary):
    rope, positions = Rope(64, rotary, 1e4, device), torch.tensor([3, 9, 60], device=device)
    wide, weight = normal(3, 9 * dim).to(device), normal(5, dim).to(device)
    found = norms.norm_rope(wide[:, dim : 6 * dim], weight, 1e-6, (rope.cos, rope.sin), positions)
    near(found, rope.normed(wide[:, dim : 6 * dim], weight, 1e-6, positions))
    alone = norms.norm_rope(wide[1:2, dim : 6 * dim], weight, 1e-6, (rope.cos, rope.sin), positions[1:2])
    assert torch.equal(alone[0], found[1])


def test_the_first_of_the_best_tokens(device, normal):
    scores = normal(3, 20000).to(device)
    scores[1, [700, 9000, 19999]] = 99.0
    scores[2] = -torch.inf
    assert places.best(scores).tolist() == [int(scores[0].argmax()), 700, 0]
    words, to = torch.arange(20000, device=device).flip(0), torch.zeros(2, 3, dtype=torch.long, device=device)
    places.best(scores, words, to[1])
    assert to.tolist() == [[0, 0, 0], [int(words[scores[0].argmax()]), 19299, 19999]]


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_a_token_where_no_score_is_a_number(device):
    assert 0 <= places.best(torch.full((1, 20000), torch.nan, device=device)).item() < 20000


def test_the_last_that_is_kept(device, normal):
    x, offsets, kept = normal(6, SIZE).to(device), torch.tensor([0, 1, 4, 6]), torch.tensor([1, 2, 2])
    assert torch.equal(places.last_kept(x, offsets.to(device), kept.to(device)), x[[0, 2, 5]])


@pytest.mark.parametrize("counts", [None, [2, 3]])
def test_places_of_tokens(device, counts):
    table = torch.arange(40, device=device).view(5, 8) + 2
    index, starts, offsets = (torch.tensor(x, device=device) for x in ([4, 1], [5, 30], [0, 3, 6]))
    counted = None if counts is None else torch.tensor(counts, device=device)
    last = torch.tensor([0, 7, 0, 0, 2], device=device)
    positions, write_pages, read_pages, kept = places.place(index, starts, offsets, counted, table, last, (6, 4, 1))
    assert positions.tolist() == [5, 6, 7, 30, 31, 32]
    assert write_pages.tolist() == [35, 35, 35 if counts is None else 1, 17, 17, 17]  # the last stands past its table
    assert torch.equal(read_pages, table[index])
    assert kept.tolist() == [2, 7]
