"""Logprobs: how likely the model found the tokens that it gave, and its likeliest ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from headlong.backends.torch.ragged import Layout
from headlong.engine.request import Logprob


@dataclass(frozen=True)
class Told:
    """Of one row's window, on the device until asked for."""

    tokens: Tensor  # [W]
    own: Tensor  # [W]: the logprobs of those tokens
    top: Tensor  # [W, n]: the likeliest, best first
    top_tokens: Tensor  # [W, n]

    def logprobs(self, count: int) -> tuple[Logprob, ...]:
        """Of the first tokens, which were kept."""
        rows = zip(
            *(tensor[:count].tolist() for tensor in (self.tokens, self.own, self.top_tokens, self.top)), strict=True
        )
        return tuple(Logprob(token, own, tuple(zip(tokens, top, strict=True))) for token, own, tokens, top in rows)


def tell(layout: Layout, logits: Tensor, tokens: Tensor, asked: Sequence[int | None]) -> dict[int, Told]:
    """For the rows that asked, from logits [N, V] and the round's tokens [N]: those of the model before any sampling.

    Each row alone, so that its bits do not depend on who else asks.
    """
    told = {}
    first = 0
    for row, width in zip(layout.rows, layout.widths, strict=True):
        count = asked[row]
        if count is not None:
            mine = tokens[first : first + width].clone()
            logprobs = logits[first : first + width].log_softmax(-1)
            top = logprobs.topk(count, -1)
            own = logprobs.gather(1, mine[:, None])[:, 0]
            told[row] = Told(mine, own, top.values, top.indices)
        first += width
    return told
