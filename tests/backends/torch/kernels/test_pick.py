import pytest
import torch

from headlong.backends.torch.kernels.pick import best, embed, last_kept


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
