"""The tokens that drafts may be on NVIDIA GPUs: of a large vocabulary its first ones and those that texts have had.

A vocabulary of 248k tokens takes longer to multiply with than the rest of a head does, and a text uses few of it. Ids
of byte-pair vocabularies are ordered by how common a token was when they were made, so the first are a fair beginning.
A token that comes in a prompt or an answer and has no place takes one, the rarest beginners' places first.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headlong.backends.torch.gpu.build import Kernel
from headlong.backends.torch.gpu.launch import follow, make_way, options
from headlong.backends.torch.gpu.linear import linear

PLACES = 1 << 15
LARGE = 2 * PLACES  # a vocabulary from which on choosing pays
PART = 1 << 14
ABSENT, COMING = tl.constexpr(-1), tl.constexpr(-2)


class Lexicon:
    """Rows of an LM head [V, H] in 8 bits: codes [S, H] with scales [S], of the tokens `words` [S]; None: of all."""

    def __init__(self, matrix: Tensor, places: int = PLACES, large: int = LARGE) -> None:
        vocab, device = len(matrix), matrix.device
        count = places if vocab >= large else vocab
        self.matrix = matrix
        self.codes, self.scales = _rounded(matrix[:count])
        self.words = torch.arange(count, device=device) if count < vocab else None
        self.where = torch.full((vocab,), ABSENT.value, dtype=torch.int32, device=device)
        self.where[:count] = torch.arange(count, device=device)
        self.learnt = torch.zeros(1, dtype=torch.int32, device=device)  # how many words have come

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, S], float32."""
        return linear(hidden, self.codes, self.scales, torch.float32)

    def learn(self, tokens: Tensor) -> None:
        """Make room for those of a text's tokens [N] that have no place."""
        if self.words is not None:
            size = self.matrix.shape[1]
            _learn[(len(tokens),)](
                self.words, self.where, self.codes, self.scales, self.learnt, tokens, self.matrix, size,
                len(self.words), BLOCK=triton.next_power_of_2(size), **options(tokens.device),
            )  # fmt: skip


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """[V, H] in 8 bits with one scale a row, [V]; a part at a time, or the largest matrix would be there twice more."""
    codes = torch.empty(matrix.shape, dtype=torch.int8, device=matrix.device)
    scales = torch.empty(len(matrix), dtype=torch.float32, device=matrix.device)
    for first in range(0, len(matrix), PART):
        part = matrix[first : first + PART].float()
        scale = (part.abs().amax(1) / 127).clamp_(min=1e-30)
        scales[first : first + len(part)] = scale
        codes[first : first + len(part)] = (part / scale[:, None]).round_()
    return codes, scales


@Kernel
@triton.jit
def _learn(words, where, codes, scales, learnt, tokens, matrix, size, places, BLOCK: tl.constexpr,
           EARLY: tl.constexpr):  # fmt: skip
    make_way(EARLY)
    follow(EARLY)
    token = tl.load(tokens + tl.program_id(0))
    # Of several that bring the same token one goes on. Which places are taken may depend on chance; drafts may.
    if tl.atomic_cas(where + token, ABSENT, COMING) == ABSENT:
        place = (places - 1 - tl.atomic_add(learnt, 1) % places).to(tl.int64)
        tl.store(where + tl.load(words + place), ABSENT)
        at = tl.arange(0, BLOCK)
        row = tl.load(matrix + token * size + at, mask=at < size, other=0.0).to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(row), 0) / 127, 1e-30)
        tl.store(codes + place * size + at, tl.floor(row / scale + 0.5).to(tl.int8), mask=at < size)
        tl.store(scales + place, scale)
        tl.store(words + place, token)
        tl.store(where + token, place.to(tl.int32))
