"""Tokens picked out of scores, with and without kernels in C."""

import numpy as np
import pytest
import torch

from headlong.backends.torch.kernels.pick import best_allowed
from headlong.backends.torch.native import library as native


def masks_of(allowed):
    """[N, V] of booleans as words of 32 bits."""
    count, vocab = allowed.shape
    padded = np.zeros((count, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@pytest.fixture(params=["native", "plain"])
def kernels(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(native, "_allowed", False)
    elif native.library() is None:
        pytest.skip("there is no C compiler")


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_the_best_of_those_that_are_allowed(vocab, share):
    random = np.random.default_rng(vocab)
    scores = torch.from_numpy(random.integers(-3, 3, (40, vocab)).astype(np.float32))  # of which many are equal
    allowed = random.random((40, vocab)) < share
    allowed[np.arange(40), random.integers(0, vocab, 40)] = True
    wanted = [max(np.flatnonzero(row), key=lambda at: scores[n, at].item()) for n, row in enumerate(allowed)]
    assert best_allowed(scores, masks_of(allowed)).tolist() == wanted


@pytest.mark.usefixtures("kernels")
def test_where_nothing_may_come_the_first_does_and_bits_past_the_vocabulary_mean_nothing():
    scores, words = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([[0], [-8]], dtype=torch.int32)
    assert best_allowed(scores, words).tolist() == [0, 0]
