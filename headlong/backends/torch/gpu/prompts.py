"""Prompt chunks as captured graphs: one for each length that chunks are padded to, replayed for whoever comes next.

A pass over a chunk is some hundred kernels, which a host begins no faster than a GPU runs them. Which row it is, where
the chunk starts and how many of its tokens count are read from a tensor, so a graph knows nothing of them.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from headlong.backends.torch.cache import Cache
from headlong.backends.torch.gpu.stream import Replay, Stream
from headlong.backends.torch.step import PaddedPrefill, Prefill
from headlong.engine.request import Chunk

LENGTHS = tuple(64 * parts for parts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))

TakeIn = Callable[[Tensor, Prefill], Tensor]  # tokens and the one after them, [T + 1] -> hidden [T, H]


@dataclass
class Captured:
    """The graph of one length T and what it reads and leaves."""

    inputs: Tensor  # [1, 3 + T + 1]: row, start, how many tokens count; those tokens, the one after them, padding
    last: Tensor | None = None  # [1, H]: the hidden state of the last token that counts
    graph: Replay | None = None


class Prompts:
    """What runs a chunk."""

    def __init__(self, cache: Cache, stream: Stream, take_in: TakeIn) -> None:
        self.cache, self.stream, self.take_in = cache, stream, take_in
        self.captured: dict[int, Captured] = {}

    def run(self, chunk: Chunk) -> Tensor:
        """The hidden state of the chunk's last token, [1, H], which the next chunk overwrites."""
        count = len(chunk.tokens)
        length = padded(count, self.cache.limits.chunk)
        if length not in self.captured:
            self.captured[length] = self._capture(length)
        captured = self.captured[length]
        padding = [0] * (length - count)
        self.stream.send(captured.inputs, [[chunk.row, chunk.start, count, *chunk.tokens, chunk.after, *padding]])
        assert captured.graph is not None
        captured.graph.replay()
        assert captured.last is not None
        return captured.last

    def _capture(self, length: int) -> Captured:
        """On the row that is nobody's, of which no token counts, since what is captured runs once beforehand."""
        started = perf_counter()
        captured = Captured(torch.zeros(1, 3 + length + 1, dtype=torch.long, device=self.cache.device))
        self.stream.send(captured.inputs, [[self.cache.rows - 1, *[0] * (2 + length + 1)]])

        def pass_over() -> None:
            row, start, count, tokens = captured.inputs[0].split([1, 1, 1, length + 1])
            hidden = self.take_in(tokens, PaddedPrefill(self.cache, row, start, count, length))
            captured.last = hidden[(count - 1).clamp_(min=0)]

        (captured.graph,) = self.stream.record([pass_over])
        log = logging.getLogger("headlong")
        log.info("captured prompt chunks of %d tokens: %.1f s", length, perf_counter() - started)
        return captured


def padded(tokens: int, most: int) -> int:
    return min(most, next((length for length in LENGTHS if tokens <= length), most))
