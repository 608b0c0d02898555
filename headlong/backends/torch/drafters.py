"""Drafters: whatever proposes the next tokens of a row. The target decides, so a drafter can cost speed, never text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import Cache
from headlong.backends.torch.chain import Chain, Needs, Seen
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best, last_kept
from headlong.backends.torch.models.base import Head
from headlong.backends.torch.native.tape import Taped
from headlong.backends.torch.step import Prefill, Window


@dataclass(frozen=True)
class Feed:
    """What became true in a pass: hidden [B, W, H] at starts + j, tokens [B, W] at starts + j + 1; kept [B] of them."""

    rows: list[int]
    index: Tensor  # rows on the device, [B]
    starts: Tensor  # [B]
    hidden: Tensor
    tokens: Tensor
    kept: Tensor
    needs: Needs

    @property
    def lengths(self) -> Tensor:
        return self.starts + self.kept


@dataclass(frozen=True)
class Proposal:
    """tokens [B, D] for the positions after each row's newest token; probs [B, D, V], None where drafts are certain."""

    tokens: Tensor
    probs: Tensor | None = None


class Drafter(Protocol):
    name: str

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        """Take in a prompt chunk: hidden [T, H] and the token after each, [T]."""

    def draft(self, feed: Feed, depths: Sequence[int]) -> Proposal:
        """Take in a round and propose; D is the largest of the depths."""


class HeadDrafter:
    """The model's own head. True pairs first, which makes its cache exact again; then it chains on its own output."""

    name = "mtp"

    def __init__(self, head: Head, cache: Cache, chain: Chain) -> None:
        self.head, self.cache, self.chain = head, cache, chain
        self.feed = Taped(self._feed)

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        self.head(hidden, tokens, step)

    def draft(self, feed: Feed, depths: Sequence[int]) -> Proposal:
        hidden, logits = self.feed(feed.rows, feed.index, feed.starts, feed.kept, feed.hidden, feed.tokens)
        wanted, lengths = torch.tensor(depths, device=hidden.device), feed.lengths
        token, share = self._pick(logits, feed, feed.tokens[:, :0])
        drafts, probs = token, [share]
        for j in range(1, max(depths)):
            pair = (hidden[:, None], token)
            hidden, logits = self.feed(feed.rows, feed.index, lengths + j - 1, (wanted > j).long(), *pair)
            token, share = self._pick(logits, feed, drafts)
            drafts = torch.cat([drafts, token], 1)
            probs.append(share)
        return Proposal(drafts, torch.stack(probs, 1) if feed.needs.rejection else None)

    def _feed(
        self, rows: list[int], index: Tensor, starts: Tensor, widths: Tensor, hidden: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Pairs [B, W, H] and [B, W], of which `widths` count -> the output at the last of them, and its logits."""
        step = Window(self.cache, rows, index, starts, widths, tokens.shape[1])
        out = self.head(hidden.flatten(0, 1), tokens.flatten(), step)
        last = last_kept(out.view(hidden.shape), widths)
        return last, self.head.logits(last)

    def _pick(self, logits: Tensor, feed: Feed, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """One draft [B, 1] from logits [B, V], through the target's own chain, and its distribution [B, V]."""
        chain, needs = self.chain, feed.needs
        if needs.nothing:
            return best(logits)[:, None], logits
        position = (feed.lengths + drafts.shape[1] + 1)[:, None]
        seen = Seen(drafts, torch.ones_like(drafts, dtype=torch.bool)[:, None])
        scores = chain.apply(logits[:, None], feed.index, needs, position, seen)
        share = scores.softmax(-1)[:, 0] if needs.rejection else scores
        if needs.noise:
            # A coupled row's draft uses the target's noise, so that the two agree as often as they can.
            stream = torch.where(chain.coupled[feed.index, None], noise.TARGET, noise.DRAFT)
            gumbel = noise.gumbel(chain.seed[feed.index], stream, position, scores.shape[-1])
            scores = scores + gumbel * chain.drawn[feed.index, None, None]
        return best(scores), share


class Right:
    """For tests: always right, given each row's whole sequence. Past its end it proposes token 0."""

    name = "right"
    shift = 0

    def __init__(self, sequences: Mapping[int, Sequence[int]], vocab: int) -> None:
        self.sequences, self.vocab = sequences, vocab

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        pass

    def draft(self, feed: Feed, depths: Sequence[int]) -> Proposal:
        drafts = []
        for row, length in zip(feed.rows, feed.lengths.tolist(), strict=True):
            tokens = [*self.sequences[row][length + 1 : length + 1 + max(depths)], *[0] * max(depths)]
            drafts.append([(token + self.shift) % self.vocab for token in tokens[: max(depths)]])
        return Proposal(torch.tensor(drafts, device=feed.starts.device))


class Wrong(Right):
    """For tests: never right."""

    name = "wrong"
    shift = 1
