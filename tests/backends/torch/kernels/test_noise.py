import math

import numpy as np
import pytest
import torch
from scipy import stats

from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.noise import gumbel, uniform
from headlong.backends.torch.native.library import library, references_only

STREAMS = (noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL, noise.XTC)
WORD = 2**32 - 1
MAX_SEED = 2**63 - 1


# --- the same numbers everywhere ---------------------------------------------------------------------------------


def mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D & WORD
    x = (x ^ (x >> 15)) * 0x846CA68B & WORD
    return x ^ (x >> 16)


def keys(seed, stream, position):
    low = mix((seed & WORD) ^ (stream * 0x9E3779B9 & WORD))
    high = mix(((seed >> 32 ^ stream * 0x85EBCA6B & WORD) + low) & WORD)
    low = mix(low ^ high)
    return mix(low ^ mix(position & WORD)), mix((high + mix((position ^ 0x5BD1E995) & WORD)) & WORD)


def uniform_word(seed, stream, position):
    low, high = keys(seed, stream, position)
    return mix(low ^ high)


def token_word(seed, stream, position, token):
    low, high = keys(seed, stream, position)
    return mix(mix(token ^ low) ^ high)


# seed, stream, position -> the uniform word there, and the word of token 1000
GOLDEN = {
    (0, 1, 0): (0xA6C6ACA6, 0xD2A370E1),
    (0, 1, 1): (0xDDBD809A, 0xAE3F78E9),
    (1, 2, 0): (0x5919876D, 0x340BE916),
    (7, 3, 12345): (0x29B77FD0, 0xAC115B28),
    (2**31, 4, 16383): (0x7C7EBF13, 0xC57009AE),
    (2**32 + 5, 5, 2**20): (0x16A5A07F, 0x4312B8DD),
    (MAX_SEED, 1, 99): (0x7881ABDE, 0x0D7C6E2E),
}


@pytest.mark.parametrize("place", GOLDEN, ids=str)
def test_golden_numbers(place):
    """Plain integers, which every backend must give."""
    (seed, stream, position), (word, of_token) = place, GOLDEN[place]
    assert (uniform_word(*place), token_word(*place, 1000)) == (word, of_token)
    args = (torch.tensor([seed]), stream, torch.tensor([[position]]))
    assert uniform(*args).item() == (word + 0.5) / 2**32
    exact = -math.log(-math.log1p(-(of_token + 0.5) / 2**32))
    assert gumbel(*args, 1001)[0, 0, 1000].item() == pytest.approx(exact, rel=1e-5, abs=1e-5)


def test_a_number_does_not_depend_on_its_company():
    seeds, positions = torch.tensor([3, 2**40, MAX_SEED]), torch.arange(12).view(3, 4) * 1000
    streams = torch.tensor([[1], [2], [1]])
    together, flat = gumbel(seeds, streams, positions, 301), uniform(seeds, streams, positions)
    for row in range(3):
        for j in range(4):
            args = (seeds[row : row + 1], int(streams[row]), positions[row : row + 1, j : j + 1])
            assert torch.equal(gumbel(*args, 301)[0, 0], together[row, j])
            assert torch.equal(gumbel(*args, 17)[0, 0], together[row, j, :17])
            assert torch.equal(uniform(*args)[0, 0], flat[row, j])


# --- the right distribution --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform(stream):
    found = uniform(torch.arange(64) * 0x1234567, stream, torch.arange(2048).expand(64, -1)).numpy()
    assert found.min() > 0
    assert found.max() < 1
    assert stats.kstest(found.ravel(), "uniform").pvalue > 1e-4
    bits = (found * 2**32).astype(np.uint64).ravel()
    for bit in range(32):
        assert abs((bits >> np.uint64(bit) & np.uint64(1)).mean() - 0.5) < 0.007


def test_gumbel_follows_its_law():
    found = gumbel(torch.tensor([11]), noise.TARGET, torch.arange(256)[None], 2048).double().numpy().ravel()
    assert np.isfinite(found).all()
    assert abs(found.mean() - np.euler_gamma) < 0.008
    assert abs(found.var() - math.pi**2 / 6) < 0.02
    assert stats.kstest(found, "gumbel_r").pvalue > 1e-4


def test_its_argmax_draws_from_softmax():
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])
    drawn = (gumbel(torch.tensor([5]), noise.TARGET, torch.arange(40000)[None], 6)[0] + logits).argmax(-1)
    expected = logits.double().softmax(0) * 40000
    assert stats.chisquare(drawn.bincount(minlength=6).numpy(), expected.numpy()).pvalue > 1e-4


def test_neighbours_are_independent():
    """Seeds, halves of seeds, streams, positions and tokens one apart, all against all."""

    def row(seed=9, stream=noise.TARGET, first=0):
        return gumbel(torch.tensor([seed]), stream, torch.arange(first, first + 32)[None], 1024)[0]

    base = row()
    others = [row(seed=10), row(seed=8), row(seed=9 + 2**32), row(seed=9 + 2**62), row(first=32), row(first=2**16)]
    others += [row(stream=stream) for stream in STREAMS[1:]] + [base.roll(1, 1), base.roll(1, 0)]
    table = torch.stack([base, *others]).flatten(1).double().numpy()
    correlation = np.corrcoef(table) - np.eye(len(table))
    shared = (table[:, None, :] == table[None, :, :]).mean(-1) - np.eye(len(table))
    assert np.abs(np.triu(correlation, 1)).max() < 0.03
    assert np.triu(shared, 1).max() < 0.001


def test_shifted_positions_are_the_same_noise():
    one, two = (gumbel(torch.tensor([4]), 1, torch.arange(first, first + 9)[None], 50)[0] for first in (0, 1))
    assert torch.equal(one[1:], two[:-1])


def test_no_two_tokens_share_a_word():
    """A bijection of tokens at each place, so ties come from rounding alone."""
    words = {token_word(123, noise.TARGET, 45, token) for token in range(20000)}
    assert len(words) == 20000


# --- the kernel --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(
    "stream", [noise.TARGET, torch.tensor([[noise.TARGET], [noise.DRAFT], [noise.TARGET]])], ids=str
)
def test_native_noise_is_the_references(stream):
    seed = torch.tensor([0, 2**40 + 3, MAX_SEED])
    position = torch.tensor([[0, 1, 2, 3], [99, 2**20, 16383, 7], [5, 5, 4, 12345]])
    found = gumbel(seed, stream, position, 70_003)  # 840,000 numbers: both tails, and a last part of a vector
    with references_only():
        wanted = gumbel(seed, stream, position, 70_003)
    assert found.isfinite().all()
    assert wanted.max() > 12
    assert wanted.min() < -2.4
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
