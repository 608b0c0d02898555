"""Gated DeltaNet between its projections: token by token over windows with a late commit, in blocks over a chunk.

For one head with state S [Dk, Dv], decay a, key k, value v, query q and write strength b:

    d = b (v - a S'k)        what the token corrects
    S = a S + k d'           the state after it
    o = S'q = a S'q + (k'q) d
"""

import ctypes
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, prompt_recurrence, recurrence
from headlong.backends.torch.kernels.norm import gated_rms_norm, l2_norm, sigmoid, silu, softplus
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout

BLOCK = 64


class _NativeDelta(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("states", "waiting", "inputs", "conv", "decay", "dt_bias", "norm")),
        *((name, ctypes.c_long) for name in ("heads", "key_heads", "key_dim", "value_dim", "taps", "max_width")),
        ("eps", ctypes.c_float),
    ]


@dataclass(frozen=True)
class Delta:
    """A layer's parameters, float32. Its input is projected [N, C + heads Dv + 2 heads]: qkv, z, b, a."""

    conv: Tensor  # [K, C], oldest tap first
    decay: Tensor  # [heads], -exp(A_log)
    dt_bias: Tensor  # [heads]
    norm: Tensor  # [Dv]
    key_heads: int
    key_dim: int
    eps: float

    @property
    def heads(self) -> int:
        return self.decay.shape[0]

    @property
    def value_dim(self) -> int:
        return self.norm.shape[0]

    def parts(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """qkv [N, C], z [N, heads, Dv], log decays and strengths [N, heads] in float32."""
        values = self.heads * self.value_dim
        qkv, z, b, a = projected.split([self.conv.shape[1], values, self.heads, self.heads], -1)
        log_decays = self.decay * softplus(a.float() + self.dt_bias)
        return qkv, z.unflatten(-1, (self.heads, self.value_dim)), log_decays, sigmoid(b.float())

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Convolved [B, W, C] -> unit q (scaled) and k as [B, W, heads, 2, Dk], v [B, W, heads, Dv].

        There are fewer key heads than value heads; value head j uses key head j // ratio.
        """
        keys = self.key_heads * self.key_dim
        qk, v = mixed.split([2 * keys, self.heads * self.value_dim], -1)
        qk = l2_norm(qk.unflatten(-1, (2, self.key_heads, self.key_dim))).transpose(2, 3)
        qk = qk * qk.new_tensor([self.key_dim**-0.5, 1.0])[:, None]
        return qk.repeat_interleave(self.heads // self.key_heads, 2), v.unflatten(-1, (self.heads, self.value_dim))


@dataclass(frozen=True)
class Memory:
    """What a layer remembers of every row R, for windows of at most X tokens."""

    states: Tensor  # [R, heads, Dk, Dv] float32: after the committed tokens but the last window's
    waiting: Tensor  # [R, X, heads, Dk + Dv + 1] float32: key, correction and decay of the last window's tokens
    inputs: Tensor  # [R, K - 1 + X, C]: the convolution's inputs, those before the last window first
    _native: list[_NativeDelta] = field(default_factory=list)

    def native(self, delta: Delta) -> int:
        """The address of what the kernels know of it and of its layer."""
        if not self._native:
            tensors = (self.states, self.waiting, self.inputs, delta.conv, delta.decay, delta.dt_bias, delta.norm)
            sizes = (delta.heads, delta.key_heads, delta.key_dim, delta.value_dim, len(delta.conv))
            pointers = (t.data_ptr() for t in tensors)
            self._native.append(_NativeDelta(*pointers, *sizes, self.waiting.shape[1], delta.eps))
        return ctypes.addressof(self._native[0])


@dataclass(frozen=True)
class Kept:
    """Rows [B], how many tokens of each one's last window count, [B], and the widest of those windows."""

    rows: Tensor
    counts: Tensor
    widest: int


def window(delta: Delta, memory: Memory, projected: Tensor, kept: Kept, layout: Layout) -> Tensor:
    """Fold what was kept, then run windows: projected [N, ...] -> [N, heads Dv], gated."""
    if fused(projected, memory.inputs):
        return recurrence().window(delta, memory, projected, kept, layout)
    lib = library(projected, memory.inputs)
    if lib is None:
        return _window_reference(delta, memory, projected, kept, layout)
    out = fresh(projected, projected.shape[0], delta.heads * delta.value_dim)
    tensors = (t.data_ptr() for t in (out, projected, kept.rows, kept.counts, layout.offsets))
    lib.delta_window(memory.native(delta), *tensors, len(kept.rows), projected.stride(0))
    return out


def _window_reference(delta: Delta, memory: Memory, projected: Tensor, kept: Kept, layout: Layout) -> Tensor:
    """Over padded windows; what padding leaves in the memory stands past all that can be kept."""
    rows = kept.rows
    qkv, z, log_decays, strengths = delta.parts(projected)
    inputs = torch.cat([settled_inputs(delta, memory, kept), layout.pad(qkv)], 1)
    memory.inputs[rows, : inputs.shape[1]] = inputs
    qk, v = delta.split(_convolve(inputs, delta.conv))
    state = _fold_reference(delta, memory, kept)
    memory.states[rows] = state
    decays, strengths = layout.pad(log_decays.exp()), layout.pad(strengths)
    outputs, corrections = _recur(state.flatten(0, 1), _by_head(qk), _by_head(v), _by_head(decays), _by_head(strengths))
    outputs, corrections = (x.unflatten(0, (len(rows), -1)).transpose(1, 2) for x in (outputs, corrections))
    memory.waiting[rows, : layout.widest] = torch.cat([qk[..., 1, :], corrections, decays[..., None]], -1)
    return gated_rms_norm(layout.unpad(outputs), z, delta.norm, delta.eps).flatten(1)


def settled_state(delta: Delta, memory: Memory, kept: Kept) -> Tensor:
    """[B, heads, Dk, Dv] with the kept tokens folded in, bit for bit what the next window will start from."""
    lib = library(memory.inputs)
    if lib is None:
        return _fold_reference(delta, memory, kept)
    states = memory.states[kept.rows]
    tensors = (t.data_ptr() for t in (states, memory.waiting, kept.rows, kept.counts))
    lib.delta_fold(*tensors, *states.shape, memory.waiting.shape[1])
    return states


def _fold_reference(delta: Delta, memory: Memory, kept: Kept) -> Tensor:
    """A token that was not kept has correction 0 and decay 1 and leaves every bit as it was. The corrections are those
    the window computed, so a fold repeats its updates exactly and needs no further product with the state."""
    waiting = memory.waiting[kept.rows, : kept.widest]
    keys, corrections, decays = waiting.split([delta.key_dim, delta.value_dim, 1], -1)
    counts = (torch.arange(kept.widest, device=waiting.device) < kept.counts[:, None])[:, :, None, None]
    keys, corrections = _by_head(keys), _by_head(torch.where(counts, corrections, 0.0))
    decays = _by_head(torch.where(counts, decays, 1.0)[..., 0])
    state = memory.states[kept.rows].flatten(0, 1)
    for j in range(kept.widest):
        state = _advance(state, keys[:, j], corrections[:, j], decays[:, j])
    return state.unflatten(0, (len(kept.rows), -1))


def settled_inputs(delta: Delta, memory: Memory, kept: Kept) -> Tensor:
    """[B, K - 1, C]: the convolution's inputs that end with the last kept token."""
    taps = torch.arange(len(delta.conv) - 1, device=memory.inputs.device)
    return memory.inputs[kept.rows[:, None], kept.counts[:, None] + taps]


def _advance(state: Tensor, key: Tensor, correction: Tensor, decay: Tensor) -> Tensor:
    return (state * decay[:, None, None]).add_(key[:, :, None] * correction[:, None, :])


def _convolve(inputs: Tensor, conv: Tensor) -> Tensor:
    """inputs [B, K - 1 + W, C] -> silu of the convolution, [B, W, C] in float32."""
    wide, width = inputs.float(), inputs.shape[1] - len(conv) + 1
    total = wide[:, :width] * conv[0]
    for tap in range(1, len(conv)):
        total = total + wide[:, tap : tap + width] * conv[tap]
    return silu(total)


def _recur(state: Tensor, qk: Tensor, v: Tensor, decays: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """state [M, Dk, Dv], qk [M, W, 2, Dk], v [M, W, Dv], decays, strengths [M, W] -> outputs, corrections as v."""
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


def chunk(delta: Delta, memory: Memory, projected: Tensor, row: Tensor, count: Tensor | None = None) -> Tensor:
    """A prompt chunk of one settled row [1]: projected [T, ...] -> [T, heads Dv], gated; the memory moves on by the
    first count [1] tokens, or by all; the others are padding, whose outputs mean nothing."""
    if fused(projected, memory.inputs):
        return prompt_recurrence().chunk(delta, memory, projected, row, count)
    lib = library(projected, memory.inputs) if count is None else None
    if lib is None:
        return _chunk_reference(delta, memory, projected, row, count)
    tokens = projected.shape[0]
    out = fresh(projected, tokens, delta.heads * delta.value_dim)
    tensors = (t.data_ptr() for t in (out, projected, row))
    lib.delta_chunk(memory.native(delta), *tensors, tokens, projected.stride(0))
    return out


def _chunk_reference(
    delta: Delta, memory: Memory, projected: Tensor, row: Tensor, count: Tensor | None = None
) -> Tensor:
    past, tokens = len(delta.conv) - 1, torch.arange(len(projected), device=projected.device)
    count = tokens[-1:] + 1 if count is None else count
    qkv, z, log_decays, strengths = delta.parts(projected)
    log_decays, strengths = (torch.where((tokens < count)[:, None], x, 0.0) for x in (log_decays, strengths))
    inputs = torch.cat([memory.inputs[row, :past], qkv[None]], 1)
    memory.inputs[row, :past] = inputs[:, count + tokens.new_tensor(range(past))]
    qk, v = delta.split(_convolve(inputs, delta.conv))
    outputs, state = _blockwise(
        memory.states[row][0], _by_head(qk), _by_head(v), _by_head(log_decays[None]), _by_head(strengths[None])
    )
    memory.states[row] = state
    return gated_rms_norm(outputs.transpose(0, 1), z, delta.norm, delta.eps).flatten(1)


def _blockwise(state: Tensor, qk: Tensor, v: Tensor, log_decays: Tensor, strengths: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens in blocks: the shapes of `_recur` with log decays -> outputs [M, T, Dv], the state after them.

    Inside a block the corrections D solve (I + L) D = B (V - A K S) with L = strictly lower B (K K') A_i / A_j,
    A the running product of decays and B the strengths; then O = A Q S + lower (Q K') (A_i / A_j) D.
    """
    tokens = v.shape[1]
    q, k, v, g, b = (_blocks(x) for x in (qk[:, :, 0], qk[:, :, 1], v, log_decays, strengths))
    g = g.cumsum(2)
    ratio = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [M, N, BLOCK, BLOCK]
    lower = ((k @ k.mT) * ratio * b[..., None]).tril(-1)
    right = torch.cat([v, k * g.exp()[..., None]], -1) * b[..., None]
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    own, carried = solved.split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.mT) * ratio
    outputs = []
    for n in range(v.shape[1]):
        corrections = own[:, n] - carried[:, n] @ state
        outputs.append((q[:, n] * g[:, n].exp()[..., None]) @ state + within[:, n] @ corrections)
        last = g[:, n, -1:]
        state = state * last.exp()[..., None] + (k[:, n] * (last - g[:, n]).exp()[..., None]).mT @ corrections
    return torch.stack(outputs, 1).flatten(1, 2)[:, :tokens], state


def _blocks(x: Tensor) -> Tensor:
    """[M, T, ...] -> [M, N, BLOCK, ...], padded with tokens that change nothing."""
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, -x.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK))


def _by_head(x: Tensor) -> Tensor:
    """[B, W, heads, ...] -> [B heads, W, ...]."""
    return x.transpose(1, 2).flatten(0, 1)
