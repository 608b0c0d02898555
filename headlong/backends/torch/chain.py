"""The sampling chain: penalties, bias, constraints, temperature, top-k, top-p, min-p, XTC, at every window position.

Parameters live on the device, one entry a row. Which rows need the chain and which steps of it is known on the host
from their requests; a step that a row did not ask for leaves that row's scores as they are, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from headlong.backends.torch.draws import COUPLED, REJECTION, Draws
from headlong.backends.torch.gpu.paths import fused, sampler
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best, bits
from headlong.backends.torch.kernels.truncate import Cuts, truncate
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout
from headlong.engine.request import Sampling, Start
from headlong.settings import MAX_DEPTH

NO_TOP_P = 2.0  # above any sum of probabilities, rounding included


class Rule(Enum):
    """How a row's tokens are chosen."""

    BEST = "the best logit, as it is"
    ALLOWED = "the best logit of those that a constraint allows"
    COUPLED = "the best score, with noise that belongs to the position"
    REJECTION = "a draw by the rejection rule"


@dataclass(frozen=True)
class Needs:
    """Which parts of the chain some row of a batch asks for. Without any, the best logit is the token."""

    penalties: bool = False
    bias: bool = False
    quiet: bool = False
    masked: bool = False
    noise: bool = False
    truncation: bool = False
    rejection: bool = False

    @staticmethod
    def of(start: Start) -> "Needs":
        sampling = start.sampling
        drawn = not sampling.greedy
        cut = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.xtc_probability > 0
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        return Needs(
            penalties=penalties != (1.0, 0.0, 0.0),
            bias=bool(sampling.logit_bias),
            quiet=bool(start.quiet),
            masked=start.masked,
            noise=drawn,
            truncation=drawn and cut,
            rejection=drawn and sampling.seed is None,
        )

    @property
    def rule(self) -> Rule:
        if self.rejection:
            return Rule.REJECTION
        if self == Needs(masked=self.masked):
            return Rule.ALLOWED if self.masked else Rule.BEST
        return Rule.COUPLED

    @property
    def scores(self) -> bool:
        """Whether tokens follow from other scores than the logits over a temperature."""
        return self.penalties or self.bias or self.quiet or self.truncation or (self.masked and self.noise)

    def __or__(self, other: "Needs") -> "Needs":
        return Needs(*(a or b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Seen:
    """What stands before positions but is not counted yet, tokens [B, E], visible [B, W, E]; and what may stand there:
    masks [B, W, ceil(V / 32)], a bit a token, of rows with a constraint, all ones for others."""

    tokens: Tensor
    visible: Tensor
    masks: Tensor | None = None


class Chain:
    """Sampling parameters and token counts of every row."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self.rows, self.vocab, self.device = rows, vocab, device
        self.needs = [Needs()] * rows
        self.rules = [Rule.BEST] * rows
        self._chosen: set[int] = set()  # rows whose tokens are chosen by scores, under one of the last two rules
        self.seed = torch.zeros(rows, dtype=torch.long, device=device)
        self.drawn = torch.zeros(rows, dtype=torch.float32, device=device)  # 1 where noise applies, 0 for greedy rows
        self.temperature = torch.ones(rows, dtype=torch.float32, device=device)
        self.draft_probs: Tensor | None = None  # [rows, D, V]: what drafts under the rejection rule were drawn from
        if device.type == "cpu":  # where recorded passes find it; what is never written takes no memory
            probs = self.room_for_probs()
            self.from_logits = Draws(self.seed, self.temperature, probs)
            self.from_scores = Draws(self.seed, torch.ones_like(self.temperature), probs)
        self.cuts = Cuts(
            self.seed,
            top_k=torch.full((rows,), vocab, dtype=torch.long, device=device),
            top_p=torch.full((rows,), NO_TOP_P, dtype=torch.float32, device=device),
            min_p=torch.zeros(rows, dtype=torch.float32, device=device),
            xtc=torch.zeros(rows, 2, dtype=torch.float32, device=device),
        )
        self.penalty = torch.tensor([[1.0, 0.0, 0.0]], device=device).repeat(rows, 1)  # repetition, presence, frequency
        # As large as the vocabulary for every row, so made when a request first needs them.
        self.counts: Tensor | None = None
        self.in_prompt: Tensor | None = None
        self.bias: Tensor | None = None
        self.quiet: Tensor | None = None
        self.quiet_until = torch.zeros(rows, dtype=torch.long, device=device)  # the first position that is not

    def start(self, start: Start) -> None:
        row, sampling = start.row, start.sampling
        needs = self.needs[row] = Needs.of(start)
        self.rules[row] = needs.rule
        (self._chosen.add if needs.rule in (Rule.COUPLED, Rule.REJECTION) else self._chosen.discard)(row)
        self.seed[row] = start.seed
        self.drawn[row] = float(needs.noise)
        self.temperature[row] = sampling.temperature if needs.noise else 1.0
        if self.seed.is_cpu:
            code = (REJECTION if needs.rejection else COUPLED) if needs.noise else 0
            self.from_logits.rules[row], self.from_scores.rules[row] = (0, code) if needs.scores else (code, 0)
        self._start_cuts(row, sampling)
        self._start_counts(row, start.prompt, sampling)
        self._start_bias(row, sampling)
        self._start_quiet(start)

    def _start_cuts(self, row: int, sampling: Sampling) -> None:
        cut, cuts = self.needs[row].truncation, self.cuts
        cuts.top_k[row] = min(sampling.top_k, self.vocab) if cut and sampling.top_k else self.vocab
        cuts.top_p[row] = sampling.top_p if cut and sampling.top_p < 1 else NO_TOP_P
        cuts.min_p[row] = sampling.min_p if cut else 0.0
        cuts.xtc[row, 0] = sampling.xtc_probability if cut else 0.0
        cuts.xtc[row, 1] = sampling.xtc_threshold

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

    def _start_quiet(self, start: Start) -> None:
        if start.quiet and self.quiet is None:
            self.quiet = torch.zeros(self.rows, self.vocab, dtype=torch.bool, device=self.device)
        if self.quiet is not None:
            self.quiet[start.row] = False
            self.quiet[start.row, list(start.quiet)] = True
        self.quiet_until[start.row] = len(start.prompt) + start.min_tokens

    def views(self, row: int) -> dict[str, Tensor]:
        """What a row's text has changed here since its start."""
        found = {} if self.counts is None else {"counts": self.counts[row]}
        if self.rules[row] is Rule.REJECTION and self.draft_probs is not None:
            found["draft probs"] = self.room_for_probs()[row]
        return found

    def room_for_probs(self) -> Tensor:
        """Made when it is first needed: it is as large as the vocabulary for every row and draft."""
        if self.draft_probs is None:
            shape = (self.rows, MAX_DEPTH, self.vocab)
            self.draft_probs = torch.empty(shape, dtype=torch.float32, device=self.device)
        return self.draft_probs

    def under(self, rows: Sequence[int], *rules: Rule) -> tuple[int, ...]:
        """The places among these rows that stand under one of some rules."""
        return tuple(b for b, row in enumerate(rows) if self.rules[row] in rules)

    def scored(self, rows: Sequence[int], *rules: Rule) -> tuple[int, ...]:
        """Those of them whose tokens are not found from the logits alone."""
        if self.device.type != "cpu" or library() is None:
            return self.under(rows, *rules)
        return tuple(b for b, row in enumerate(rows) if self.rules[row] in rules and self.needs[row].scores)

    def from_logits_alone(self, rows: Sequence[int]) -> bool:
        """Whether these rows all take their best logits, of all or of those allowed, or a kernel draws by them."""
        return self._chosen.isdisjoint(rows) or not self.scored(rows, Rule.COUPLED, Rule.REJECTION)

    def needs_of(self, rows: Sequence[int]) -> Needs:
        total = Needs()
        for row in rows:
            total = total | self.needs[row]
        return total

    def apply(self, logits: Tensor, rows: Tensor, needs: Needs, positions: Tensor, seen: Seen) -> Tensor:
        """logits [B, W, V] for tokens at positions [B, W] -> scores: log weights, -inf where cut off."""
        if fused(logits):
            scores: Tensor = sampler().score(self, logits, rows, needs, positions, seen)
        else:
            scores = self._score(logits, rows, needs, positions, seen)
        return truncate(scores, rows, positions, self.cuts) if needs.truncation else scores

    def _score(self, scores: Tensor, rows: Tensor, needs: Needs, positions: Tensor, seen: Seen) -> Tensor:
        """All steps that take each token for itself."""
        if needs.penalties:
            scores = self._penalise(scores, rows, seen)
        if needs.bias and self.bias is not None:
            scores = scores + self.bias[rows, None]
        if needs.quiet and self.quiet is not None:
            silent = self.quiet[rows, None] & (positions < self.quiet_until[rows, None])[..., None]
            scores = scores.masked_fill(silent, -torch.inf)
        if seen.masks is not None:
            scores = scores.masked_fill(~bits(seen.masks, self.vocab), -torch.inf)
        if needs.noise:
            scores = scores / self.temperature[rows, None, None]
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

    def draw(self, scores: Tensor, rows: Tensor, stream: int, positions: Tensor) -> Tensor:
        """A draw by scores [B, W, V] -> [B, W]: the best with Gumbel noise on them, and none on greedy rows'."""
        if fused(scores):
            found: Tensor = sampler().draw(self, scores, rows, stream, positions)
            return found
        gumbel = noise.gumbel(self.seed[rows], stream, positions, self.vocab)
        return best(scores + gumbel * self.drawn[rows, None, None])

    def count(self, layout: Layout, tokens: Tensor, kept: Tensor) -> None:
        """Count as output the first `kept` [B] of each row's tokens [N], where a row has penalties."""
        if self.counts is None:
            return
        counted = tuple(b for b, row in enumerate(layout.rows) if self.needs[row].penalties)
        if counted:
            part = layout.part(counted)
            mine = part.layout.steps < kept[part.which][part.layout.owners]
            where = (part.layout.token_rows, tokens[part.flat])
            self.counts.index_put_(where, mine.to(self.counts.dtype), accumulate=True)
