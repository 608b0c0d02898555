"""What a round needs of a model and of its head."""

from collections.abc import Generator
from typing import Protocol

from torch import Tensor

from headlong.backends.torch.cache import CacheShape
from headlong.backends.torch.step import Step

Layers = Generator[None, None, Tensor]  # a pass that pauses between two layers, and gives its hidden states in the end


def finish(layers: Layers) -> Tensor:
    """All of a pass, or what is left of it."""
    while True:
        if (hidden := go_on(layers, 1)) is not None:
            return hidden


def go_on(layers: Layers, count: int) -> Tensor | None:
    """So many layers more; the hidden states if those were the last."""
    try:
        for _ in range(count):
            next(layers)
    except StopIteration as end:
        hidden: Tensor = end.value
        return hidden
    return None


class Head(Protocol):
    """A multi-token-prediction head: from a hidden state and the token after it, the next hidden state."""

    def __call__(self, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        """hidden [N, H] of positions i and tokens [N] at i + 1 -> hidden [N, H] that predicts token i + 2."""

    def remember(self, hidden: Tensor, tokens: Tensor, step: Step) -> None:
        """Take pairs that nothing is asked of: what later ones see of them, and nothing else, is computed."""

    @property
    def words(self) -> Tensor | None:
        """The tokens [S] that drafts may be, in the order of their logits; None: all of the vocabulary."""

    def learn(self, tokens: Tensor) -> None:
        """Tokens [N] that texts have had: drafts may well be such."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab or S] in float32. Drafts decide nothing, so this may be approximate."""


class Model(Protocol):
    """A target, made from (its family's config, a loader, the longest position, whether to load the head)."""

    cache_shape: CacheShape
    layer_count: int

    @property
    def head(self) -> Head | None: ...

    def by_layer(self, tokens: Tensor, step: Step) -> Layers:
        """tokens [N] -> hidden states [N, H] after the final norm, which is what the head takes too; with pauses, in
        which passes over other rows may come."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab] in float32."""
