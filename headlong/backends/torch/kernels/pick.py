"""Rows picked out of larger tensors: the best token, the embedding of a token, the last kept of a window."""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, places
from headlong.backends.torch.kernels.linear import HALF, Weight
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library


def best(scores: Tensor) -> Tensor:
    """[..., V] -> [...]: the token with the highest score, the first of equals."""
    if fused(scores):
        found: Tensor = places().best(scores.flatten(0, -2))
        return found.view(scores.shape[:-1])
    lib = library(scores)
    if lib is None:
        return scores.argmax(-1)
    scores = scores.contiguous()
    tokens = fresh(scores, *scores.shape[:-1], dtype=torch.long)
    lib.best(tokens.data_ptr(), None, scores.data_ptr(), tokens.numel(), scores.shape[-1])
    return tokens


def bits(masks: Tensor, count: int) -> Tensor:
    """[..., ceil(count / 32)] -> [..., count]: the bits of words, the lowest first."""
    places = torch.arange(32, dtype=masks.dtype, device=masks.device)
    return ((masks[..., None] >> places) & 1).bool().flatten(-2)[..., :count]


def best_word(scores: Tensor, words: Tensor | None, to: Tensor, leads: Tensor | None = None) -> None:
    """Of scores [N, S] of some words [S], or of all tokens, the best one's token to [N]; and by how much it leads the
    next, where there are kernels that tell."""
    lib = library(scores) if words is None else None
    if fused(scores):
        places().best(scores, words, to)
    elif lib is None:
        token = best(scores)
        to.copy_(token if words is None else words[token])
    else:
        told = None if leads is None else leads.data_ptr()
        lib.best(to.data_ptr(), told, scores.contiguous().data_ptr(), *scores.shape)


def embed(table: Tensor | Weight, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [N] of a table [V, H] in the model's dtype; from bfloat16 to float32 no bit is lost."""
    if packed := isinstance(table, Weight):  # one of our own kernels' weights
        rows, size, lib = table.matrix, table.in_features, table.native
    else:
        rows, size, lib = table, table.shape[1], library() if table.is_cpu and table.dtype in HALF else None
    if lib is None:
        return rows[tokens].to(dtype)
    y = fresh(tokens, len(tokens), size, dtype=torch.float32)
    lib.embed(y.data_ptr(), rows.data_ptr(), packed, HALF[rows.dtype], tokens.data_ptr(), len(tokens), size)
    return y.to(dtype)


def last_kept(x: Tensor, offsets: Tensor, kept: Tensor) -> Tensor:
    """x [N, H] of rows at offsets [B + 1] -> [B, H]: the last of those that each row keeps, of which there is one."""
    if fused(x):
        found: Tensor = places().last_kept(x, offsets, kept)
        return found
    lib = library(x)
    if lib is None:
        return x[offsets[:-1] + kept - 1]
    x, y = x.contiguous(), fresh(x, len(kept), x.shape[1])
    lib.last_kept(*(t.data_ptr() for t in (y, x, offsets, kept)), *y.shape)
    return y
