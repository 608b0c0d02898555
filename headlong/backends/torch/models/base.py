"""What a round needs of a model and of its head."""

from typing import Protocol

from torch import Tensor

from headlong.backends.torch.cache import CacheShape
from headlong.backends.torch.step import Step


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

    @property
    def head(self) -> Head | None: ...

    def __call__(self, tokens: Tensor, step: Step) -> Tensor:
        """tokens [N] -> hidden states [N, H] after the final norm, which is what the head takes too."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab] in float32."""
