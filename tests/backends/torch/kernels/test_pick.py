import numpy as np
import pytest
import torch

from headlong.backends.torch.kernels.pick import best, best_allowed, embed, last_kept


@pytest.mark.parametrize("size", [1, 5, 16, 17, 100, 1000])
def test_best_is_the_first_of_equals(kernels, size, normal):
    scores = (3 * normal(3, 7, size)).round()  # many equals
    scores[0, 0] = -torch.inf
    scores[0, 1, : size // 2] = -torch.inf
    wanted = [[row.index(max(row)) for row in rows] for rows in scores.tolist()]
    assert best(scores).tolist() == wanted
    assert best(scores.transpose(0, 1)).T.tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_embed_loses_nothing(kernels, dtype, normal):
    table, tokens = normal(9, 37).to(dtype), torch.tensor([3, 8, 0, 3])
    assert torch.equal(embed(table, tokens, torch.float32), table[tokens].float())


def test_last_kept(kernels, normal):
    x, offsets, kept = normal(9, 5), torch.tensor([0, 1, 5, 9]), torch.tensor([1, 4, 2])
    assert torch.equal(last_kept(x, offsets, kept), x[[0, 4, 6]])


def masks_of(allowed):
    """[N, V] of booleans as words of 32 bits."""
    count, vocab = allowed.shape
    padded = np.zeros((count, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_the_best_of_those_that_are_allowed(kernels, vocab, share, normal):
    scores, random = (2 * normal(40, vocab)).round(), np.random.default_rng(vocab)  # many equals
    allowed = random.random((40, vocab)) < share
    allowed[np.arange(40), random.integers(0, vocab, 40)] = True
    wanted = [max(np.flatnonzero(row), key=lambda at: scores[n, at].item()) for n, row in enumerate(allowed)]
    assert best_allowed(scores, masks_of(allowed)).tolist() == wanted


def test_where_nothing_may_come_the_first_does_and_bits_past_the_vocabulary_mean_nothing(kernels):
    scores, words = torch.tensor([[1.0, 2.0, 3.0]] * 2), torch.tensor([[0], [-8]], dtype=torch.int32)
    assert best_allowed(scores, words).tolist() == [0, 0]
