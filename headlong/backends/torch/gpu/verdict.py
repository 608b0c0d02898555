"""What a round begins with and what it ends with, on NVIDIA GPUs: windows, the drafts that stand, rows one step on."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options


def look_up(index: Tensor, length: Tensor, windows: Tensor, offsets: Tensor, sizes: tuple[int, int]
            ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rows [B]; sizes: N, and tokens in the widest window -> where their windows start [B], and what they hold [N]."""
    tokens, widest = sizes
    starts, window = torch.empty_like(index), index.new_empty(tokens)
    tensors = starts, window, index, length, windows, offsets
    _look_up[(len(index),)](*tensors, windows.stride(0), **_launch(index, widest))
    return starts, window


def accept_coupled(chosen: Tensor, window: Tensor, offsets: Tensor, counts: Tensor, widest: int
                   ) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the target chose after each token of windows [N], of which counts [B] count -> tokens [N] and kept [B]."""
    tokens, kept = torch.empty_like(chosen), torch.empty_like(counts)
    _accept_coupled[(len(counts),)](tokens, kept, chosen, window, offsets, counts, **_launch(chosen, widest))
    return tokens, kept


def commit(index: Tensor, starts: Tensor, offsets: Tensor, tokens: Tensor, kept: Tensor, state: tuple[Tensor, ...]
           ) -> None:  # fmt: skip
    """state, of all rows: lengths [R], windows [R, W] and how many tokens of the last window are kept [R]."""
    stride = state[1].stride(0)
    _commit[(len(index),)](*state, index, starts, offsets, tokens, kept, stride, num_warps=1, **options(index.device))


def _launch(like: Tensor, widest: int) -> dict[str, int]:
    return {"BLOCK": triton.next_power_of_2(widest), "num_warps": 1, **options(like.device)}


@Kernel
@triton.jit
def _look_up(starts, window, index, length, windows, offsets, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    b, at = tl.program_id(0), tl.arange(0, BLOCK)
    row, first = tl.load(index + b), tl.load(offsets + b)
    inside = at < tl.load(offsets + b + 1) - first
    tl.store(starts + b, tl.load(length + row))
    tl.store(window + first + at, tl.load(windows + row * stride + at, mask=inside), mask=inside)


@Kernel
@triton.jit
def _accept_coupled(tokens, kept, chosen, window, offsets, counts, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    b, at = tl.program_id(0), tl.arange(0, BLOCK)
    first, count = tl.load(offsets + b), tl.load(counts + b)
    width = tl.load(offsets + b + 1) - first
    drafts = tl.load(window + first + at + 1, mask=at + 1 < width, other=0)
    stands = (at + 1 < count) & (drafts == tl.load(chosen + first + at, mask=at < width, other=0))
    accepted = tl.min(tl.where(stands, BLOCK, at), 0)  # the first that does not
    following = tl.load(chosen + first + accepted)
    tl.store(tokens + first + at, tl.where(at < accepted, drafts, following), mask=at < width)
    tl.store(kept + b, (accepted + 1).to(tl.int64))


@Kernel
@triton.jit
def _commit(length, windows, kept_of, index, starts, offsets, tokens, kept, stride, EARLY: tl.constexpr):
    make_way(EARLY)
    follow(EARLY)
    b = tl.program_id(0)
    row, count = tl.load(index + b), tl.load(kept + b)
    tl.store(length + row, tl.load(starts + b) + count)
    tl.store(windows + row * stride, tl.load(tokens + tl.load(offsets + b) + count - 1))
    tl.store(kept_of + row, count)
