"""Tokens drawn by C kernels: what accept.py and drafters.py do with scores on a CPU, one call for a whole pass."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headlong.backends.torch.native.library import Kernels, library
from headlong.backends.torch.ragged import Layout

COUPLED, REJECTION = 1, 2  # as in native/draws.h


@dataclass(frozen=True)
class Draws:
    """How the rows of an engine draw from the scores that these kernels are given.

    rules         [rows]: the rule of a row, or 0 where such scores are not what it draws from
    temperatures  [rows]: of scores that are yet to be divided by it
    probs         [rows, depth, V]: under the rejection rule, what a row's drafts were drawn from
    """

    seeds: Tensor
    temperatures: Tensor
    probs: Tensor
    rules: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", torch.zeros_like(self.seeds))

    def choose(self, layout: Layout, starts: Tensor, scores: Tensor, chosen: Tensor) -> None:
        """Of rows under the coupled rule what the target has, by scores [N, V], after each token of their windows from
        starts [B] on, to chosen [N]."""
        places = (chosen, scores, layout.index, starts, layout.offsets)
        sizes = (len(layout.index), *scores.shape)
        _kernels().draw_coupled(*(t.data_ptr() for t in (*places, *self._rows())), *sizes)

    def reject(
        self, layout: Layout, starts: Tensor, window: Tensor, scores: Tensor, found: tuple[Tensor, Tensor]
    ) -> None:
        """Of rows under the rejection rule the tokens [N] and how many are kept, [B]."""
        places = (*found, scores, window, layout.index, starts, layout.offsets)
        counts = None if layout.counts is None else layout.counts.data_ptr()
        sizes = (len(layout.index), scores.shape[1], self.probs.shape[1])
        pointers = ([t.data_ptr() for t in tensors] for tensors in (places, self._rows()))
        _kernels().reject(*next(pointers), counts, *next(pointers), *sizes)

    def draft(
        self, layout: Layout, fed: tuple[Tensor, Tensor], scores: Tensor, step: int, to: tuple[Tensor, Tensor | None]
    ) -> None:
        """The draft of a step of every row that draws, by scores [B, V] after what was fed, starts and counts [B]; and
        how sure it is."""
        places, (tokens, sure) = (scores, layout.index, *fed), to
        pointers = (tokens.data_ptr(), None if sure is None else sure.data_ptr())
        sizes = (*scores.shape, step, self.probs.shape[1])
        _kernels().draw_drafts(*pointers, *(t.data_ptr() for t in (*places, *self._rows())), *sizes)

    def _rows(self) -> tuple[Tensor, ...]:
        return self.rules, self.seeds, self.temperatures, self.probs


def _kernels() -> Kernels:
    lib = library()
    assert lib is not None
    return lib
