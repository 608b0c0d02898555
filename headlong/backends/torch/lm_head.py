"""A cheap copy of the LM head for drafting."""

from torch import Tensor

from headlong.backends.torch.gpu.paths import draft_words, fused
from headlong.backends.torch.kernels.linear import Int8Weight, Weight
from headlong.backends.torch.native.library import library


class DraftHead:
    """Logits for drafts. They decide nothing, so 8 bits a weight are worth their last digits; a GPU leaves out tokens
    that texts hardly have."""

    def __init__(self, matrix: Tensor, exact: Weight) -> None:
        lib = library() if matrix.device.type == "cpu" else None
        self.lexicon = draft_words().Lexicon(matrix) if fused(matrix) else None
        self.weight = Int8Weight(lib, len(matrix), [matrix]) if lib else exact

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
