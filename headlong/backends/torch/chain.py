"""The sampling chain: penalties, bias, temperature, top-k, top-p, min-p, XTC, at every window position.

Parameters live on the device, one entry a row. Which steps a batch needs at all is known on the host from its
requests; a step that a row did not ask for leaves that row's scores as they are, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.kernels import noise
from headlong.engine.request import Sampling

NO_TOP_P = 2.0  # above any sum of probabilities, rounding included


@dataclass(frozen=True)
class Needs:
    """Which parts of the chain some row of a batch asks for."""

    penalties: bool = False
    bias: bool = False
    noise: bool = False
    truncation: bool = False
    rejection: bool = False

    @staticmethod
    def of(sampling: Sampling) -> "Needs":
        drawn = not sampling.greedy
        cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.xtc_probability > 0
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        return Needs(
            penalties=penalties != (1.0, 0.0, 0.0),
            bias=bool(sampling.logit_bias),
            noise=drawn,
            truncation=drawn and cut,
            rejection=drawn and sampling.seed is None,
        )

    @property
    def nothing(self) -> bool:
        """Whether scores are the logits as they are, and the best of them is the token."""
        return self == NOTHING

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(*(a or b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


NOTHING = Needs()


@dataclass(frozen=True)
class Seen:
    """Tokens that stand before a position but are not counted yet: tokens [B, E], visible [B, W, E]."""

    tokens: Tensor
    visible: Tensor


class Chain:
    """Sampling parameters and token counts of every row."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.rows, self.vocab, self.device = rows, vocab, device
        self.needs = [Needs()] * rows
        self.seed = torch.zeros(rows, dtype=torch.long, device=device)
        self.coupled = torch.ones(rows, dtype=torch.bool, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.float32, device=device)  # 1 where noise applies, 0 for greedy rows
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.top_k = torch.full((rows,), vocab, dtype=torch.long, device=device)
        self.top_p = torch.full((rows,), NO_TOP_P, dtype=torch.float32, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float32, device=device)
        self.xtc = torch.zeros(rows, 2, dtype=torch.float32, device=device)  # probability, threshold
        self.penalty = torch.zeros(rows, 3, dtype=torch.float32, device=device)  # repetition, presence, frequency
        # As large as the vocabulary for every row, so made when a request first needs them.
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        self.bias: Tensor | None = None

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        needs = self.needs[row] = Needs.of(sampling)
        self.seed[row] = seed
        self.coupled[row] = not needs.rejection
        self.drawn[row] = float(needs.noise)
        self.temperature[row] = sampling.temperature if needs.noise else 1.0
        cut = needs.truncation
        self.top_k[row] = min(sampling.top_k, self.vocab) if cut and sampling.top_k else self.vocab
        self.top_p[row] = sampling.top_p if cut and sampling.top_p < 1 else NO_TOP_P
        self.min_p[row] = sampling.min_p if cut else 0.0
        self.xtc[row, 0] = sampling.xtc_probability if cut else 0.0
        self.xtc[row, 1] = sampling.xtc_threshold
        self._start_counts(row, prompt, sampling)
        self._start_bias(row, sampling)

    def _start_counts(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        if self.needs[row].penalties and self.counts is None:
            self.counts = torch.zeros(self.rows, self.vocab, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(self.rows, self.vocab, dtype=torch.bool, device=self.device)
        values = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.penalty[row] = torch.tensor(values, dtype=torch.float32, device=self.device)
        if self.counts is not None and self.in_prompt is not None:
            self.counts[row] = 0
            self.in_prompt[row] = False
            self.in_prompt[row, torch.tensor(prompt, device=self.device)] = True

    def _start_bias(self, row: int, sampling: Sampling) -> None:
        if self.needs[row].bias and self.bias is None:
            self.bias = torch.zeros(self.rows, self.vocab, dtype=torch.float32, device=self.device)
        if self.bias is not None:
            self.bias[row] = 0
            for token, value in sampling.logit_bias.items():
                self.bias[row, token] = value

    def needs_of(self, rows: Sequence[int]) -> Needs:
        total = Needs()
        for row in rows:
            total = total | self.needs[row]
        return total

    def apply(self, logits: Tensor, rows: Tensor, needs: Needs, positions: Tensor, seen: Seen) -> Tensor:
        """logits [B, W, V] for tokens at positions [B, W] -> scores: log weights, -inf where cut off."""
        scores = logits
        if needs.penalties:
            scores = self._penalise(scores, rows, seen)
        if needs.bias and self.bias is not None:
            scores = scores + self.bias[rows, None]
        if needs.noise:
            scores = scores / self.temperature[rows, None, None]
        if needs.truncation:
            scores = self._truncate(scores, rows, positions)
        return scores

    def _penalise(self, scores: Tensor, rows: Tensor, seen: Seen) -> Tensor:
        assert self.counts is not None
        assert self.in_prompt is not None
        counts = self.counts[rows, None].expand(scores.shape).clone()
        tokens = seen.tokens[:, None].expand(seen.visible.shape)
        counts.scatter_add_(2, tokens, seen.visible.to(counts.dtype))
        repetition, presence, frequency = self.penalty[rows].split(1, -1)
        output = counts > 0
        strained = torch.where(scores > 0, scores / repetition[..., None], scores * repetition[..., None])
        scores = torch.where(output | self.in_prompt[rows, None], strained, scores)
        return scores - (frequency[..., None] * counts + presence[..., None] * output)

    def _truncate(self, scores: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        ranked, order = scores.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(self.vocab, device=self.device)
        keep = rank < self.top_k[rows, None, None]
        share = ranked.masked_fill(~keep, -torch.inf).softmax(-1)
        keep = keep & ((share.cumsum(-1) - share < self.top_p[rows, None, None]) | (rank == 0))  # [B, W, V] from here
        keep &= share >= self.min_p[rows, None, None] * share[..., :1]
        probability, threshold = self.xtc[rows, None].split(1, -1)  # [B, 1, 1]
        share = ranked.masked_fill(~keep, -torch.inf).softmax(-1)
        viable = (share >= threshold).sum(-1, keepdim=True)
        coin = noise.uniform(self.seed[rows], noise.XTC, positions)[..., None] < probability
        keep &= ~(coin & (rank < viable - 1))  # of the viable tokens only the last stays
        return scores.masked_fill(torch.empty_like(keep).scatter_(-1, order, ~keep), -torch.inf)

    def count(self, rows: Tensor, tokens: Tensor, kept: Tensor) -> None:
        """Count the kept tokens [B, W] as output."""
        if self.counts is not None:
            mine = torch.arange(tokens.shape[1], device=self.device) < kept[:, None]
            counts = self.counts[rows].scatter_add_(1, tokens, mine.to(self.counts.dtype))
            self.counts[rows] = counts
