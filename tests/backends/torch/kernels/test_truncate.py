"""What is kept of a vocabulary, against a sort of all of it."""

import pytest
import torch

from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.truncate import WHOLE, Cuts, truncate

ALL = 2.0  # a top-p that keeps everything
ASKED = {  # top-k, top-p, min-p, XTC's probability and threshold; a top-k of 0: the whole vocabulary
    "nothing": (0, ALL, 0.0, 0.0, 0.1),
    "top-k-1": (1, ALL, 0.0, 0.0, 0.1),
    "top-k-50": (50, ALL, 0.0, 0.0, 0.1),
    "top-p-0": (0, 0.0, 0.0, 0.0, 0.1),
    "top-p-half": (0, 0.5, 0.0, 0.0, 0.1),
    "top-p-nearly-1": (0, 0.999, 0.0, 0.0, 0.1),
    "top-p-1": (0, 1.0, 0.0, 0.0, 0.1),
    "top-k-and-top-p": (20, 0.95, 0.0, 0.0, 0.1),
    "large-top-k-and-top-p": (900, 0.6, 0.0, 0.0, 0.1),
    "min-p": (0, ALL, 0.05, 0.0, 0.1),
    "min-p-1": (0, ALL, 1.0, 0.0, 0.1),
    "xtc": (0, ALL, 0.0, 1.0, 0.01),
    "xtc-sometimes": (0, ALL, 0.0, 0.5, 0.02),
    "xtc-of-few": (30, 0.9, 0.02, 1.0, 0.05),
    "xtc-of-all": (40, ALL, 0.0, 1.0, 0.0),
    "everything": (100, 0.98, 0.01, 0.5, 0.03),
}
SHAPES = ("normal", "peaked", "flat", "equal", "ties", "few", "alone", "signed-zeros")


def cuts_of(asked, vocab, device="cpu"):
    """A row for each."""
    tops, top_p, min_p, chance, threshold = zip(*asked, strict=True)
    top_k = [min(k, vocab) if k else vocab for k in tops]
    floats = (torch.tensor(x, dtype=torch.float32, device=device) for x in (top_p, min_p))
    xtc = torch.tensor(list(zip(chance, threshold, strict=True)), dtype=torch.float32, device=device)
    return Cuts(torch.arange(len(asked), device=device) + 5, torch.tensor(top_k, device=device), *floats, xtc)


def scores_of(shape, rows, width, vocab):
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(rows, width, vocab, generator=generator)
    if shape == "peaked":
        return 8 * x
    if shape == "flat":
        return 0.01 * x
    if shape == "equal":
        return torch.full_like(x, -3.25)
    if shape == "ties":
        return (2 * x).round() / 2
    if shape == "few":
        return (
            (4 * x)
            .masked_fill(torch.rand(x.shape, generator=generator) < 0.9, -torch.inf)
            .index_fill(-1, torch.tensor([0]), 1.0)
        )
    if shape == "alone":
        return torch.full_like(x, -torch.inf).index_fill(-1, torch.tensor([vocab // 2]), 7.0)
    if shape == "signed-zeros":
        return (0 * x).copysign(x).where(x.abs() < 2, x)
    return 3 * x


def sort_all(scores, top_k, top_p, min_p, coin, threshold):
    """One position, from the definition; the tokens that are kept."""
    ranked, order = scores.double().sort(descending=True, stable=True)
    ranked, order = ranked[:top_k], order[:top_k]
    weight = ((ranked - ranked[0]).exp() * WHOLE).floor()
    before = weight.cumsum(0) - weight
    keep = ((before < top_p * weight.sum()) | (before == 0)) & (weight >= min_p * WHOLE)
    if coin:
        weight = weight * keep
        viable = int(((weight > 0) & (weight >= threshold * weight.sum())).sum())
        keep[: max(viable - 1, 0)] = False
    return set(order[keep].tolist())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab", [1, 7, 1000])
def test_what_a_sort_keeps(kernels, shape, vocab):
    cuts, rows = cuts_of(ASKED.values(), vocab), torch.arange(len(ASKED))
    scores, positions = scores_of(shape, len(ASKED), 2, vocab), torch.tensor([[3, 70]]).expand(len(ASKED), -1)
    found = truncate(scores.clone(), rows, positions, cuts)
    coins = noise.uniform(cuts.seed, noise.XTC, positions) < cuts.xtc[:, :1]
    for row, name in enumerate(ASKED):
        for j in range(2):
            kept = found[row, j] > -torch.inf
            asked = (int(cuts.top_k[row]), float(cuts.top_p[row]), float(cuts.min_p[row]))
            wanted = sort_all(scores[row, j], *asked, coins[row, j], float(cuts.xtc[row, 1]))
            wanted -= set((scores[row, j] == -torch.inf).nonzero().flatten().tolist())
            assert set(kept.nonzero().flatten().tolist()) == wanted, name
            assert torch.equal(found[row, j][kept], scores[row, j][kept])


def test_a_position_alone_keeps_the_same(kernels):
    cuts, rows = cuts_of(ASKED.values(), 300), torch.arange(len(ASKED))
    scores, positions = scores_of("normal", len(ASKED), 2, 300), torch.tensor([[3, 70]]).expand(len(ASKED), -1)
    together = truncate(scores.clone(), rows, positions, cuts)
    for row in range(len(ASKED)):
        alone = truncate(scores[row : row + 1, 1:].clone(), rows[row : row + 1], positions[row : row + 1, 1:], cuts)
        assert torch.equal(alone[0, 0], together[row, 1])
