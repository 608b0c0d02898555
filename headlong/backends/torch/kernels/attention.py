"""Attention of windows over paged K/V, and of a prompt chunk over its own past."""

import torch
from torch import Tensor


def window_attention(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """q [B, W, A, D] over keys, values [B, S, K, P, D] (S pages of P tokens), visible [B, W, S, P] -> [B, W, A, D].

    The split is the page: every query sees the same partition at absolute positions however long its neighbours
    are, each window position is its own product, and pages are added in order, so a page too many adds exact zeros.
    """
    b, w, a, d = q.shape
    s, k, p = keys.shape[1:4]
    group = a // k
    queries = (q.float() * d**-0.5).view(b, w, 1, k, group, d).expand(b, w, s, k, group, d)
    flat_keys = keys.float().reshape(b * s * k, p, d).transpose(1, 2)
    scores = torch.stack([torch.bmm(queries[:, j].reshape(-1, group, d), flat_keys) for j in range(w)])
    scores = scores.view(w, b, s, k, group, p).masked_fill_(~visible.transpose(0, 1)[:, :, :, None, None], -torch.inf)
    weights = torch.exp(scores - scores.amax((2, 5), keepdim=True))
    flat_values = values.float().reshape(b * s * k, p, d)
    mixed = torch.stack([torch.bmm(weights[j].view(-1, group, p), flat_values) for j in range(w)])
    mixed = _add_in_order(mixed.view(w, b, s, k, group, d))
    total = _add_in_order(weights.sum(-1, keepdim=True))
    return (mixed / total).transpose(0, 1).reshape(b, w, a, d).to(q.dtype)


def _add_in_order(parts: Tensor) -> Tensor:
    """Sum over pages, dimension 2, first to last."""
    return parts[:, :, 0] if parts.shape[2] == 1 else parts.cumsum(2)[:, :, -1]


def chunk_attention(q: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """q [T, A, D] at positions start .. start + T - 1 over keys, values [K, start + T, D] -> [T, A, D]."""
    t, end = q.shape[0], keys.shape[1]
    position = torch.arange(end, device=q.device)
    mask = position <= position[start:, None]
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask[:t], enable_gqa=True
    )
    return out[0].transpose(0, 1)
