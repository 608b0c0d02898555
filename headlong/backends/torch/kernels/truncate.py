"""Which tokens may come at every position: top-k, top-p, min-p and XTC.

Tokens are ranked by score, the lower one first among equals. Their weights are whole numbers, so that no sum depends on
its order: kernels find where a ranking is cut without making one, and split a vocabulary as they like.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, truncation
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.native.library import library

WHOLE = 1 << 40  # the weight of a position's best token


@dataclass(frozen=True)
class Cuts:
    """What each row [R] asks for; all of the vocabulary, 2, 0 and 0 ask for nothing."""

    seed: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    xtc: Tensor  # [R, 2]: probability, threshold


def truncate(scores: Tensor, rows: Tensor, positions: Tensor, cuts: Cuts) -> Tensor:
    """scores [B, W, V] of rows [B] for tokens at positions [B, W] -> -inf where cut off. They may be overwritten."""
    if fused(scores):
        found: Tensor = truncation().truncate(scores, rows, positions, cuts)
        return found
    coin = noise.uniform(cuts.seed[rows], noise.XTC, positions) < cuts.xtc[rows, :1]
    lib = library(scores)
    if lib is None:
        return _truncate_reference(scores, rows, coin, cuts)
    asked = (cuts.top_k, cuts.top_p, cuts.min_p, cuts.xtc[:, 1])
    each = [x[rows, None].expand(positions.shape).contiguous() for x in asked]
    scores = scores.contiguous()
    lib.truncate_scores(*(t.data_ptr() for t in (scores, *each, coin)), positions.numel(), scores.shape[-1])
    return scores


def _truncate_reference(scores: Tensor, rows: Tensor, coin: Tensor, cuts: Cuts) -> Tensor:
    """coin [B, W]: where XTC applies."""
    ranked, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    keep = rank < cuts.top_k[rows, None, None]
    weights = ((ranked - ranked[..., :1]).exp() * WHOLE).long() * keep
    keep = keep & (weights.cumsum(-1) - weights < _share(cuts.top_p[rows, None, None], weights))  # [B, W, V] from here
    keep &= weights >= (cuts.min_p[rows, None, None].double() * WHOLE).ceil()
    weights = weights * keep
    viable = (weights >= _share(cuts.xtc[rows, None, 1:], weights)).sum(-1, keepdim=True)
    keep &= ~(coin[..., None] & (rank < viable - 1))  # of the viable tokens only the last stays
    return scores.masked_fill(torch.empty_like(keep).scatter_(-1, order, ~keep), -torch.inf)


def _share(part: Tensor, weights: Tensor) -> Tensor:
    """The least weight that is such a part of all, and not nothing."""
    return (part.double() * weights.sum(-1, keepdim=True)).ceil().long().clamp(min=1)
