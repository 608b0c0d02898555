"""The sampling chain on NVIDIA GPUs: logits to scores in one pass, and a draw from scores in another."""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.gpu.noise import gumbel, keys, token_word
from headlong.backends.torch.gpu.places import best_in_block, best_of_blocks

if TYPE_CHECKING:
    from headlong.backends.torch.chain import Chain, Needs, Seen

BLOCK = 2048  # scores that one program looks at


def score(chain: "Chain", logits: Tensor, rows: Tensor, needs: "Needs", positions: Tensor, seen: "Seen") -> Tensor:
    """What Chain.apply does before it truncates: logits [B, W, V] -> scores [B, W, V], in memory of their own."""
    logits, vocab, width = logits.contiguous(), chain.vocab, positions.shape[1]
    scores, n, before = torch.empty_like(logits), positions.numel(), seen.tokens.shape[1]
    steps = {"PENALTIES": needs.penalties, "BIAS": needs.bias, "QUIET": needs.quiet, "MASKED": seen.masks is not None}
    tokens, visible = (x.contiguous() if needs.penalties else None for x in (seen.tokens, seen.visible))
    tables = (chain.counts, chain.in_prompt, tokens, visible, chain.bias, chain.quiet, seen.masks)
    given = (logits if table is None else table for table in tables)  # what is not asked for is not read
    _score[(n, triton.cdiv(vocab, BLOCK))](
        scores, logits, rows, positions, chain.temperature, chain.penalty, chain.quiet_until, *given, vocab, width,
        before, **steps, BLOCK=BLOCK, **options(logits.device)
    )  # fmt: skip
    return scores


def draw(chain: "Chain", scores: Tensor, rows: Tensor, stream: int, positions: Tensor) -> Tensor:
    """The best of scores [B, W, V] with noise on them, none on greedy rows' -> [B, W]."""
    n, vocab, width = positions.numel(), chain.vocab, positions.shape[1]
    blocks, scores = triton.cdiv(vocab, BLOCK), scores.contiguous()
    tops = torch.empty(n, blocks, dtype=torch.float32, device=scores.device)
    places = torch.empty(n, blocks, dtype=torch.int64, device=scores.device)
    tensors = scores, rows, positions, chain.seed, chain.drawn
    _draw[(n, blocks)](tops, places, *tensors, vocab, width, STREAM=stream, BLOCK=BLOCK, **options(scores.device))
    return best_of_blocks(tops, places).view(positions.shape)


@Kernel
@triton.jit
def _score(scores, logits, rows, positions, temperature, penalty, quiet_until, counts, in_prompt, tokens, visible, bias,
           quiet, masks, vocab, width, before, PENALTIES: tl.constexpr, BIAS: tl.constexpr, QUIET: tl.constexpr,
           MASKED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b, inside = n // width, at < vocab
    row = tl.load(rows + b)
    mine = row * vocab + at
    value = tl.load(logits + n * vocab + at, mask=inside, other=0.0)
    if PENALTIES:
        count = tl.load(counts + mine, mask=inside, other=0)
        for e in range(before):
            count += tl.where(at == tl.load(tokens + b * before + e), tl.load(visible + n * before + e).to(tl.int32), 0)
        repetition, presence, frequency = (
            tl.load(penalty + 3 * row),
            tl.load(penalty + 3 * row + 1),
            tl.load(penalty + 3 * row + 2),
        )
        strained = tl.where(value > 0, tl.div_rn(value, repetition), value * repetition)
        known = (count > 0) | (tl.load(in_prompt + mine, mask=inside, other=0) != 0)
        value = tl.where(known, strained, value) - (frequency * count + presence * (count > 0))
    if BIAS:
        value += tl.load(bias + mine, mask=inside, other=0.0)
    if QUIET:
        silent = tl.load(quiet + mine, mask=inside, other=0) != 0
        value = tl.where(silent & (tl.load(positions + n) < tl.load(quiet_until + row)), float("-inf"), value)
    if MASKED:
        word = tl.load(masks + n * tl.cdiv(vocab, 32) + at // 32, mask=inside, other=0)
        value = tl.where((word >> (at % 32)) & 1 == 1, value, float("-inf"))
    tl.store(scores + n * vocab + at, tl.div_rn(value, tl.load(temperature + row)), mask=inside)


@Kernel
@triton.jit
def _draw(tops, places, scores, rows, positions, seed, drawn, vocab, width, STREAM: tl.constexpr, BLOCK: tl.constexpr,
          EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    n, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, at = tl.load(rows + n // width), part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(scores + n * vocab + at, mask=at < vocab, other=float("-inf"))
    # Most blocks hold nothing but -inf once the scores are cut.
    if (tl.load(drawn + row) > 0) & (tl.max(value, 0) > float("-inf")):
        low, high = keys(tl.load(seed + row), STREAM, tl.load(positions + n))
        value += gumbel(token_word(at, low, high))
    best_in_block(tops, places, value, n, part, at, vocab)
