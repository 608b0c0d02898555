import numpy as np
import pytest
import torch

from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.ragged import Layout

CPU = torch.device("cpu")
ROWS, WIDTHS = (5, 0, 3, 9), (3, 1, 9, 4)  # the last is free, others are bound


def masks_of(allowed):
    """[N, V] of booleans as words of 32 bits."""
    count, vocab = allowed.shape
    padded = np.zeros((count, -(-vocab // 32) * 32), bool)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 500])
@pytest.mark.parametrize("share", [0.02, 0.5, 1.0])
def test_bound_rows_take_the_best_of_those_that_are_allowed(kernels, vocab, share, normal):
    layout, random = Layout.of(ROWS, WIDTHS, CPU), np.random.default_rng(vocab)
    scores = (2 * normal(layout.tokens, vocab)).round()  # many equals
    allowed = random.random(scores.shape) < share
    allowed[np.arange(layout.tokens), random.integers(0, vocab, layout.tokens)] = True
    masks = Allowed(10, vocab, CPU)
    for row, mine in zip(ROWS, np.split(allowed, np.cumsum(WIDTHS)[:-1]), strict=True):
        masks.start(row, bound=row != ROWS[-1])
        masks.put(row, masks_of(mine))
    allowed[-WIDTHS[-1] :] = True
    wanted = [max(np.flatnonzero(row), key=lambda at: scores[n, at].item()) for n, row in enumerate(allowed)]
    assert masks.choose(layout, scores).tolist() == wanted


def test_where_nothing_may_come_the_first_does_and_bits_past_the_vocabulary_mean_nothing(kernels):
    layout, scores, masks = Layout.of((1,), (2,), CPU), torch.tensor([[1.0, 2.0, 3.0]] * 2), Allowed(2, 3, CPU)
    masks.start(1, bound=True)
    masks.put(1, np.array([[0], [-8]], np.int32))
    assert masks.choose(layout, scores).tolist() == [0, 0]


def test_a_new_sequence_begins_free(kernels):
    layout, scores, masks = Layout.of((1,), (1,), CPU), torch.tensor([[1.0, 2.0]]), Allowed(2, 2, CPU)
    masks.put(1, np.array([[1]], np.int32))
    masks.start(1, bound=True)
    assert masks.choose(layout, scores).tolist() == [1]
    assert masks.at(layout).tolist() == [[[-1]]]
