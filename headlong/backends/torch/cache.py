"""What rows remember: K/V in pages, recurrent states, and the last window's inputs that wait for their commit.

    pages    0          1          2 .. pages + 1
             zeros,     takes      belong to rows; a row's table lists its own
             read past  padding's
             a table    writes

A recurrent layer holds the state after the committed tokens but those of the last window, and that window's keys,
corrections and decays. `kept` says how many of them count. The next window folds those in first, so rejected tokens
never enter a state and nothing is ever undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from headlong.backends.torch.kernels.attention import Pages
from headlong.backends.torch.kernels.gated_delta import Memory
from headlong.backends.torch.ragged import Layout
from headlong.backends.torch.saved import Settled
from headlong.engine.request import Limits
from headlong.settings import MAX_DEPTH

NULL_PAGE = 0
SPARE_PAGE = 1
RESERVED_PAGES = 2
MAX_WIDTH = MAX_DEPTH + 1
MOST_LAYOUTS = 256


@dataclass(frozen=True)
class CacheShape:
    """What a model asks of its cache. The head's attention layers come after the target's."""

    attention_layers: int
    kv_heads: int
    head_dim: int
    recurrent_layers: int = 0
    heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_channels: int = 0
    conv_kernel: int = 1

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of what one row's recurrent layers remember."""
        waiting = MAX_WIDTH * self.heads * (self.key_dim + self.value_dim + 1)
        inputs = (self.conv_kernel - 1 + MAX_WIDTH) * self.conv_channels * dtype.itemsize
        return self.recurrent_layers * (4 * (self.heads * self.key_dim * self.value_dim + waiting) + inputs)

    def page_bytes(self, page: int, dtype: torch.dtype) -> int:
        """Of the keys and values of so many tokens in all layers."""
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * page * dtype.itemsize


class Cache:
    """Fixed tensors for every row and page of an engine."""

    def __init__(
        self, shape: CacheShape, limits: Limits, dtype: torch.dtype, device: torch.device, spare: bool = False
    ) -> None:
        """spare: one row more, the last, is nobody's; captured rounds pad batches with it."""
        self.limits, self.device, self.spare = limits, device, spare
        self.rows = limits.rows + spare
        pages = (limits.pages + RESERVED_PAGES, shape.kv_heads, limits.page, shape.head_dim)
        # Not zeroed here: memory is touched when a page is first given to a row.
        self.pages = [
            Pages(torch.empty(pages, dtype=dtype, device=device), torch.empty(pages, dtype=dtype, device=device))
            for _ in range(shape.attention_layers)
        ]
        table = (self.rows, -(-limits.context // limits.page) + 1)
        self.table = torch.full(table, NULL_PAGE, dtype=torch.long, device=device)
        self.owned = [0] * self.rows  # pages in each row's table, known on the host
        state = (self.rows, shape.heads, shape.key_dim, shape.value_dim)
        waiting = (self.rows, MAX_WIDTH, shape.heads, shape.key_dim + shape.value_dim + 1)
        inputs = (self.rows, shape.conv_kernel - 1 + MAX_WIDTH, shape.conv_channels)
        self.memories = [
            Memory(
                torch.zeros(state, dtype=torch.float32, device=device),
                torch.zeros(waiting, dtype=torch.float32, device=device),
                torch.zeros(inputs, dtype=dtype, device=device),
            )
            for _ in range(shape.recurrent_layers)
        ]
        self.kept = torch.zeros(self.rows, dtype=torch.long, device=device)
        self.widths = [0] * self.rows  # of each row's last window, known on the host
        # Of rows and widths. Most rounds are laid out as one before them, whose tensors are on the device already.
        self.layout = lru_cache(MOST_LAYOUTS)(self._lay_out)
        self._index = lru_cache(MOST_LAYOUTS)(partial(torch.tensor, dtype=torch.long, device=device))
        self._zero(self.send([NULL_PAGE, SPARE_PAGE]))

    def _lay_out(self, rows: tuple[int, ...], widths: tuple[int, ...]) -> Layout:
        return Layout.of(rows, widths, self.device, self._index(rows))

    def send(self, numbers: Sequence[int]) -> Tensor:
        """A copy on the device, which may still be busy with what came before it: nobody waits."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    def start(self, row: int) -> None:
        """Empty a row for a new sequence."""
        self.release(row)
        self.widths[row] = 0
        self.kept[row] = 0
        for memory in self.memories:
            for tensor in (memory.states, memory.waiting, memory.inputs):
                tensor[row] = 0

    def grow(self, row: int, pages: Sequence[int]) -> None:
        """Append pages to a row's table, zeroed: what is not yet written must not disturb a sum."""
        if pages:
            self._zero(self.attach(row, pages))

    def attach(self, row: int, pages: Sequence[int]) -> Tensor:
        """Append pages that are written already; where they are here."""
        first, last = self.owned[row], self.owned[row] + len(pages)
        self.owned[row] = last
        self.table[row, first:last] = mine = self.send(pages) + RESERVED_PAGES
        return mine

    def release(self, row: int) -> None:
        self.table[row] = NULL_PAGE
        self.owned[row] = 0

    def settled(self, row: int) -> Settled:
        """A copy of what recurrent layers remember of a row that has had no window yet."""
        taps = [memory.inputs.shape[1] - MAX_WIDTH for memory in self.memories]
        return Settled(
            [memory.states[row].clone() for memory in self.memories],
            [memory.inputs[row, :past].clone() for memory, past in zip(self.memories, taps, strict=True)],
        )

    def load(self, row: int, settled: Settled) -> None:
        for memory, state, inputs in zip(self.memories, settled.states, settled.inputs, strict=True):
            memory.states[row] = state
            memory.inputs[row, : len(inputs)] = inputs

    def views(self, row: int) -> dict[str, Tensor]:
        """Everything of a row but its pages."""
        found = {"kept": self.kept[row]}
        for layer, memory in enumerate(self.memories):
            for name in ("states", "waiting", "inputs"):
                found[f"{name} {layer}"] = getattr(memory, name)[row]
        return found

    def copy_last_page(self, row: int, to: int) -> None:
        """Into the last page of another row, which shares all pages before it."""
        page = self.owned[to] - 1
        source, mine = self.table[row, page], self.table[to, page]
        for layer in self.pages:
            layer.keys[mine], layer.values[mine] = layer.keys[source], layer.values[source]

    def copy_pages(self, row: int) -> list[tuple[Tensor, Tensor]]:
        mine = self.table[row, : self.owned[row]]
        return [(layer.keys[mine], layer.values[mine]) for layer in self.pages]

    def put_pages(self, row: int, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Into pages that the row has gained since; they may be more than were copied."""
        for layer, (keys, values) in zip(self.pages, copies, strict=True):
            mine = self.table[row, : len(keys)]
            layer.keys[mine], layer.values[mine] = keys, values

    def _zero(self, pages: Tensor) -> None:
        for layer in self.pages:
            layer.keys.index_fill_(0, pages, 0)
            layer.values.index_fill_(0, pages, 0)
