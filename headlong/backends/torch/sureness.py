"""Which drafts are left: while those so far are likely enough to be kept, by how sure the head was of each.

C kernels alone tell how sure it was, so this is for a CPU. Captured rounds are padded, and would gain nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.chain import Chain
from headlong.backends.torch.native.library import library, recording
from headlong.backends.torch.ragged import Layout
from headlong.settings import MAX_DEPTH

RULES, SURENESSES = 2, 10  # as in native/sure.h


@dataclass(frozen=True)
class Pick:
    """What a step of the head picks for B rows."""

    tokens: Tensor  # [B]
    sure: Tensor | None = None  # [B]: how sure it is of each; its chance to be kept grows with that


class Sureness:
    """What was asked for each of an engine's rows, what was found, and how often drafts of each sureness are kept."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.most = torch.zeros(chain.rows, dtype=torch.long)
        self.least = torch.zeros(chain.rows, dtype=torch.float32)
        self.chances = torch.ones(chain.rows, dtype=torch.float32)
        self.left = torch.zeros(chain.rows, dtype=torch.long)
        self.classes = torch.full((chain.rows, MAX_DEPTH), -1, dtype=torch.long)
        self.counts = torch.zeros(RULES, SURENESSES, 2, dtype=torch.float32)
        # Writing to these takes a tenth of the time.
        self._most, self._least, self._classes = self.most.numpy(), self.least.numpy(), self.classes.numpy()
        self._left = self.left.numpy()
        self._asked: tuple[Sequence[int], Sequence[int], Sequence[float]] = ((), (), ())

    def start(self, row: int) -> None:
        self.forget(row)
        self._asked = (), (), ()

    def forget(self, row: int) -> None:
        """What stands in its next window are other drafts."""
        self._classes[row] = -1

    def ask(self, rows: Sequence[int], most: Sequence[int], least: Sequence[float]) -> None:
        """At most so many drafts of each row, each with those before it likely to be kept with at least such a chance.

        What is known is known of drafts that logits alone decide. And where a window ends must not depend on what was
        drawn under the rejection rule.
        """
        if self._asked == (rows, most, least):
            return
        self._asked = rows, most, least
        places = list(rows)
        self._most[places], self._least[places] = most, least
        others = [row for row in rows if self.chain.needs[row].scores or self.chain.needs[row].rejection]
        if others:
            self._least[others] = 0.0

    def leave(self, rows: Layout, step: int, pick: Pick, goes_on: Tensor) -> bool:
        """Take in the drafts of a step; to goes_on [B] whether rows are to have another. Whether to make one: a pass
        that is recorded has all steps, and ends by itself when it is played."""
        lib = library()
        assert lib is not None
        assert pick.sure is not None
        tensors = (goes_on, pick.sure, rows.index, *self._rows())
        lib.leave(*(t.data_ptr() for t in tensors), len(rows.index), step, MAX_DEPTH)
        return recording() or any(goes_on.tolist())

    def found(self, rows: Sequence[int]) -> list[int]:
        """Drafts that were left of each row."""
        left: list[int] = self._left[list(rows)].tolist()
        return left

    def learn(self, layout: Layout, kept: Tensor) -> None:
        """Take what windows kept, [B]."""
        lib = library()
        assert lib is not None
        tensors = (layout.index, layout.offsets, kept, *self._rows())
        lib.learn(*(t.data_ptr() for t in tensors), len(layout.index), MAX_DEPTH)

    def _rows(self) -> tuple[Tensor, ...]:
        rules = self.chain.from_logits.rules
        return self.most, self.least, rules, self.chances, self.left, self.classes, self.counts
