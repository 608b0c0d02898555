"""A cheap copy of the LM head for drafting."""

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import draft_words, fused
from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.kernels.pick import embed

PART = 1024  # rows that are in memory once more while they are copied


class DraftHead:
    """Logits for drafts. They decide nothing, so 8 bits a weight are worth their last digits; a GPU leaves out tokens
    that texts hardly have."""

    def __init__(self, exact: Weight) -> None:
        lib, rows = exact.native, exact.out_features
        self.lexicon = draft_words().Lexicon(exact.matrix) if fused(exact.matrix) else None
        parts = (embed(exact, some, torch.float32) for some in torch.arange(rows).split(PART))
        self.weight = Int8Weight(lib, rows, parts) if lib else exact

    @property
    def words(self) -> Tensor | None:
        """The tokens that logits are for; None: all of the vocabulary."""
        found: Tensor | None = self.lexicon.words if self.lexicon else None
        return found

    def learn(self, tokens: Tensor) -> None:
        """Know of tokens [N] that a text has."""
        if self.lexicon:
            self.lexicon.learn(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, vocab], or of the words alone; float32."""
        found: Tensor = self.lexicon.logits(hidden) if self.lexicon else self.weight.multiply(hidden).float()
        return found
