"""The gated delta rule: token by token over windows, with a late commit, and in blocks over a prompt chunk.

For one head with state S [Dk, Dv], decay a = exp(g), key k, value v, query q and write strength b:

    d = b (v - a S'k)        what the token corrects
    S = a S + k d'           the state after it
    o = S'q = a S'q + (k'q) d
"""

import torch
from torch import Tensor

BLOCK = 64


def fold(state: Tensor, keys: Tensor, corrections: Tensor, decays: Tensor) -> Tensor:
    """Commit F tokens: state [M, Dk, Dv], keys [M, F, Dk], corrections [M, F, Dv], decays [M, F].

    A token that was not kept has correction 0 and decay 1 and leaves every bit as it was. The corrections are those
    the window computed, so this repeats its updates exactly and needs no further product with the state.
    """
    for j in range(keys.shape[1]):
        state = _advance(state, keys[:, j], corrections[:, j], decays[:, j])
    return state


def _advance(state: Tensor, key: Tensor, correction: Tensor, decay: Tensor) -> Tensor:
    return (state * decay[:, None, None]).add_(key[:, :, None] * correction[:, None, :])


def window(state: Tensor, qk: Tensor, v: Tensor, decays: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """W tokens in order on top of a committed state, which is left alone.

    state [M, Dk, Dv], qk [M, W, 2, Dk] (query, key), v [M, W, Dv], decays, strengths [M, W]
    -> outputs and corrections, both [M, W, Dv]. All float32.
    """
    width = v.shape[1]
    overlap = (qk[:, :, 0] * qk[:, :, 1]).sum(-1)  # [M, W]
    outputs, corrections = [], []
    for j in range(width):
        seen = torch.bmm(qk[:, j], state) * decays[:, j, None, None]  # [M, 2, Dv]: a S'q, a S'k
        correction = (v[:, j] - seen[:, 1]) * strengths[:, j, None]
        outputs.append(seen[:, 0] + overlap[:, j, None] * correction)
        corrections.append(correction)
        if j + 1 < width:
            state = _advance(state, qk[:, j, 1], correction, decays[:, j])
    return torch.stack(outputs, 1), torch.stack(corrections, 1)


def chunk(state: Tensor, qk: Tensor, v: Tensor, log_decays: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens in blocks: the same shapes as `window` with log decays -> outputs [M, T, Dv], the state after them.

    Inside a block the corrections D solve (I + L) D = B (V - A K S) with L = strictly lower B (K K') A_i / A_j,
    A the running product of decays and B the strengths; then O = A Q S + lower (Q K') (A_i / A_j) D.
    """
    m, t = v.shape[:2]
    pad = -t % BLOCK
    q, k, v, g, b = (_blocks(x, pad) for x in (qk[:, :, 0], qk[:, :, 1], v, log_decays, strengths))
    g = g.cumsum(2)
    ratio = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [M, N, BLOCK, BLOCK]
    lower = ((k @ k.transpose(-1, -2)) * ratio * b[..., None]).tril(-1)
    right = torch.cat([v, k * g.exp()[..., None]], -1) * b[..., None]
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    own, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * ratio
    outputs = []
    for n in range(v.shape[1]):
        corrections = own[:, n] - carried[:, n] @ state
        outputs.append((q[:, n] * g[:, n].exp()[..., None]) @ state + within[:, n] @ corrections)
        last = g[:, n, -1:]
        state = state * last.exp()[..., None] + (k[:, n] * (last - g[:, n]).exp()[..., None]).mT @ corrections
    return torch.stack(outputs, 1).flatten(1, 2)[:, :t], state


def _blocks(x: Tensor, pad: int) -> Tensor:
    """[M, T, ...] -> [M, N, BLOCK, ...], padded with tokens that change nothing."""
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, pad))
    return padded.unflatten(1, (-1, BLOCK))
