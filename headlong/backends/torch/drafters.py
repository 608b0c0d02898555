"""Drafters: whatever proposes the next tokens of a row. The target decides, so a drafter can cost speed, never text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from headlong.backends.torch.cache import Cache
from headlong.backends.torch.chain import Chain, Rule, Seen
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best, best_word, last_kept
from headlong.backends.torch.models.base import Head
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library
from headlong.backends.torch.native.tape import Taped
from headlong.backends.torch.pairs import BACKLOG, Backlog, Feed
from headlong.backends.torch.ragged import Grid, Layout, Part
from headlong.backends.torch.step import Prefill, Window
from headlong.backends.torch.sureness import Pick, Sureness
from headlong.settings import MAX_DEPTH

EVEN = 0.5  # share of the deepest row's drafts that rows must have on average, to make as many steps together


@dataclass(frozen=True)
class Proposal:
    """tokens [B, D] for the positions after each row's newest token, padded past a row's own depth.

    They are certain, or what those under the rejection rule were drawn from is with the chain.
    """

    tokens: Tensor
    certain: bool
    left: Sequence[int] | None = None  # how many of each row's are worth a place in its window; None: all
    steps: Sequence[int] | None = None  # rows in each of the head's steps, where it may have made fewer


class Drafter(Protocol):
    name: str

    @property
    def backlog(self) -> Backlog | None:
        """What it has yet to take in."""

    @property
    def sureness(self) -> Sureness | None:
        """What tells which drafts are left, where anything does."""

    @property
    def once_s(self) -> float:
        """What the last drafts took that the next such will not; infinite if that is not known."""

    def caught_up(self) -> tuple[int, float]:
        """Pairs that had waited and were taken in since the last call, and seconds of it."""

    def start(self, row: int, follows: bool) -> None:
        """Forget what a row was; whether it may ever draft."""

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        """Take in a prompt chunk: hidden [T, H] and the token after each, [T]."""

    def follow(self, feed: Feed) -> None:
        """Take in a round of rows that are not to draft now, but may later."""

    def rest(self, rows: Sequence[int], widths: Sequence[int]) -> None:
        """The same where the backlog has the round's pairs already."""

    def draft(self, feed: Feed, depths: Sequence[int], least: Sequence[float]) -> Proposal:
        """Take in a round and propose; the deepest row comes first, and all depths are above 0. What is less likely to
        be kept than the least chance of its row need not be left."""


class HeadDrafter:
    """The model's own head. True pairs first, which makes its cache exact again; then it chains on its own output.

    Pairs of rows that do not draft are set aside and fed later, many at once: the cache is the same in the end.
    """

    name = "mtp"

    def __init__(self, head: Head, cache: Cache, chain: Chain) -> None:
        self.head, self.cache, self.chain = head, cache, chain
        self.backlog = Backlog(cache)
        self.sureness = Sureness(chain) if cache.device.type == "cpu" else None
        self.feed = Taped(self._feed)
        self.chains = {depth: Taped(partial(self._chain, depth), beside=self.feed) for depth in range(1, MAX_DEPTH + 1)}
        self._once_s = 0.0
        self._late, self._late_s = 0, 0.0

    def start(self, row: int, follows: bool) -> None:
        self.backlog.start(row, follows)
        if self.sureness:
            self.sureness.start(row)

    @property
    def once_s(self) -> float:
        return self._once_s

    def caught_up(self) -> tuple[int, float]:
        late, self._late, self._late_s = (self._late, self._late_s), 0, 0.0
        return late

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        self.head.learn(tokens)
        self.head.remember(hidden, tokens, step)

    def follow(self, feed: Feed) -> None:
        if self.cache.spare:  # in captured rounds taking them in costs less than the host's part in setting them aside
            self._take_in(feed)
        else:
            self.backlog.put(feed)
            self.rest(feed.layout.rows, feed.layout.widths)

    def rest(self, rows: Sequence[int], widths: Sequence[int]) -> None:
        if self.backlog.count(rows, widths):
            self._catch_up(rows, BACKLOG)

    def draft(self, feed: Feed, depths: Sequence[int], least: Sequence[float]) -> Proposal:
        rows = feed.layout.rows
        self._catch_up(rows, 1)
        self.head.learn(feed.tokens)
        sureness = self.sureness if library(feed.hidden) else None
        if sureness:
            sureness.ask(rows, depths, least)
        even = self.chains[depths[0]].plays and sum(depths) >= EVEN * depths[0] * len(depths)
        if (even or depths[0] == depths[-1]) and self.chain.from_logits_alone(rows):
            drafts = self._draft_alike(feed, depths[0])
            steps = [len(rows)] * depths[0]
        else:
            drafts = self._draft_apart(feed, depths, sureness)
            steps = _steps(depths)
        if sureness is None:
            return Proposal(drafts.T, certain=False)
        left = sureness.found(rows)
        made = max(min(most, 1 + found) for most, found in zip(depths, left, strict=True))
        return Proposal(drafts.T, certain=False, left=left, steps=steps[:made])

    def _draft_apart(self, feed: Feed, depths: Sequence[int], sureness: Sureness | None) -> Tensor:
        """Drafts [D, B]; in each step are only the rows that are to draft so deep."""
        self._once_s = 0.0
        rows, starts, counts, hidden, tokens = feed.layout, feed.starts, feed.kept, feed.hidden, feed.tokens
        drafts = rows.index.new_zeros(depths[0], len(depths))
        goes_on = torch.ones_like(rows.index) if sureness else None
        if sureness:
            sureness.learn(rows, counts)
        for j, count in enumerate(_steps(depths)):
            if j:
                rows = feed.layout.ones(count)
                starts, counts, hidden, tokens = starts[:count], rows.sizes, hidden[:count], tokens[:count]
            hidden, logits = self.feed(rows, rows.index, rows.offsets, starts, counts, hidden, tokens)
            self._once_s += self.feed.once_s
            tokens = drafts[j, :count]
            pick = Pick(tokens, torch.zeros(count, dtype=torch.float32) if sureness else None)
            self._pick(rows, logits, (starts, counts), drafts[:j, :count].T, pick)
            if sureness and goes_on is not None and not sureness.leave(rows, j, pick, goes_on[:count]):
                break
            starts = starts + counts
        return drafts

    def _draft_alike(self, feed: Feed, depth: int) -> Tensor:
        """Drafts [D, B] of rows for which they follow from the head's logits alone, as many steps for all of them."""
        taped, layout = self.chains[depth], feed.layout
        (drafts,) = taped(layout, layout.index, layout.offsets, feed.starts, feed.kept, feed.hidden, feed.tokens)
        self._once_s = taped.once_s
        return drafts

    def _catch_up(self, rows: Sequence[int], least: int) -> None:
        """Feed what was set aside of those rows that have at least so many pairs."""
        late = tuple(row for row in rows if self.backlog.most[row] >= least)
        if late:
            started = perf_counter()
            self._late += sum(self.backlog.most[row] for row in late)
            self._take_in(self.backlog.take(late))
            self._late_s += perf_counter() - started

    def _take_in(self, feed: Feed) -> None:
        self.head.remember(feed.hidden, feed.tokens, Window(self.cache, feed.layout, feed.starts, feed.kept))

    def _feed(
        self,
        layout: Layout,
        index: Tensor,
        offsets: Tensor,
        starts: Tensor,
        counts: Tensor,
        hidden: Tensor,
        tokens: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Pairs [N, H] and [N], of which `counts` [B] count -> outputs at each row's last, [B, H], and their logits."""
        out = self.head(hidden, tokens, Window(self.cache, layout.at(index, offsets), starts, counts))
        last = out if layout.widest == 1 else last_kept(out, offsets, counts)
        return last, self.head.logits(last)

    def _chain(self, depth: int, layout: Layout, *pairs: Tensor) -> tuple[Tensor]:
        """Pairs as `_feed` takes them -> drafts of so many steps, [depth, B]."""
        index, offsets, starts, counts, hidden, tokens = pairs
        # Flat: lines of their own would take whole blocks, whatever the number of rows in them.
        drafts = fresh(index, depth * len(index)).view(depth, -1)
        sureness = self.sureness if library(hidden) else None
        goes_on = fresh(index, len(index)) if sureness else None
        if sureness:
            sureness.learn(layout.at(index, offsets), counts)
        for j in range(depth):
            if j:
                layout, starts, counts = _next(layout.at(index, offsets), starts, counts, goes_on)
                index, offsets = layout.index, layout.offsets
            hidden, logits = self._feed(layout, index, offsets, starts, counts, hidden, tokens)
            rows, tokens = layout.at(index, offsets), drafts[j]
            pick = Pick(tokens, fresh(hidden, len(index)) if sureness else None)
            self._pick_by_logits(rows, logits, (starts, counts), j, pick)
            if sureness and goes_on is not None and not sureness.leave(rows, j, pick, goes_on):
                break
        return (drafts,)

    def _pick_by_logits(self, rows: Layout, logits: Tensor, fed: tuple[Tensor, Tensor], step: int, to: Pick) -> None:
        """Drafts of B rows as if none needed the chain."""
        best_word(logits, self.head.words, to.tokens, to.sure)
        if library(logits):
            self.chain.from_logits.draft(rows, fed, logits, step, (to.tokens, to.sure))

    def _pick(self, rows: Layout, logits: Tensor, fed: tuple[Tensor, Tensor], drafts: Tensor, to: Pick) -> None:
        """Drafts of B rows, after those so far [B, j], from logits [B, V], or of the head's words, of what was fed,
        starts and counts [B], through the target's own chain."""
        chain, step = self.chain, drafts.shape[1]
        self._pick_by_logits(rows, logits, fed, step, to)
        for rule in (Rule.COUPLED, Rule.REJECTION):
            asking = chain.scored(rows.rows, rule)
            if asking:
                part = rows.part(asking)
                starts, counts = map(part.of_rows, fed)
                scores = self._score(part, logits, starts + counts + 1, drafts)
                to.tokens[part.which] = self._draw(part.layout, rule, scores, (starts, counts), step)

    def _score(self, part: Part, logits: Tensor, positions: Tensor, drafts: Tensor) -> Tensor:
        """The chain's scores for some rows' positions [b] -> [b, V]."""
        chain, words = self.chain, self.head.words
        before, mine = part.of_rows(drafts), part.of_rows(logits)
        mine = mine if words is None else _spread(mine, words, chain.vocab)
        seen = Seen(before, torch.ones_like(before, dtype=torch.bool)[:, None])
        needs = chain.needs_of(part.layout.rows)
        return chain.apply(mine[:, None], part.layout.index, needs, positions[:, None], seen)[:, 0]

    def _draw(self, rows: Layout, rule: Rule, scores: Tensor, fed: tuple[Tensor, Tensor], step: int) -> Tensor:
        """Drafts [b] of rows under one rule. A coupled row's takes the target's noise, so that the two agree as often
        as they can."""
        chain = self.chain
        if library(scores):
            chosen = best(scores)
            chain.from_scores.draft(rows, fed, scores.contiguous(), step, (chosen, None))
            return chosen
        if rule is Rule.REJECTION:
            chain.room_for_probs()[rows.index, step] = scores.softmax(-1)
        elif not chain.needs_of(rows.rows).noise:
            return best(scores)
        stream = noise.DRAFT if rule is Rule.REJECTION else noise.TARGET
        return chain.draw(scores[:, None], rows.index, stream, (fed[0] + fed[1] + 1)[:, None])[:, 0]


def _next(layout: Layout, starts: Tensor, counts: Tensor, goes_on: Tensor | None) -> tuple[Layout, Tensor, Tensor]:
    """One token of each row behind `counts` [B] others: its layout, start and count, which is none where a row does not
    go on."""
    lib = library() if starts.is_cpu else None
    if lib is None or goes_on is None:
        ones = layout.ones(len(layout.rows))
        return ones, starts + counts, ones.sizes
    count = len(layout.rows)
    ends, sizes, offsets = (fresh(starts, size) for size in (count, count, count + 1))
    lib.go_on(*(t.data_ptr() for t in (ends, sizes, offsets, starts, counts, goes_on)), count)
    grid = Grid((1,) * count, starts.device, offsets)
    return Layout(layout.rows, grid, layout.index), ends, sizes


def _steps(depths: Sequence[int]) -> list[int]:
    """Rows in each step, if each makes as many as it is to leave drafts."""
    return [sum(depth > step for depth in depths) for step in range(max(depths))]


def _spread(logits: Tensor, words: Tensor, vocab: int) -> Tensor:
    """[B, S] of some words -> [B, V], without a chance for all others."""
    return logits.new_full((len(logits), vocab), -torch.inf).index_copy(1, words, logits)


class Right:
    """For tests: always right, given each row's whole sequence. Past its end it proposes token 0."""

    name = "right"
    shift = 0
    backlog: Backlog | None = None
    sureness: Sureness | None = None
    once_s = 0.0

    def __init__(self, sequences: Mapping[int, Sequence[int]], vocab: int) -> None:
        self.sequences, self.vocab = sequences, vocab

    def caught_up(self) -> tuple[int, float]:
        return 0, 0.0

    def start(self, row: int, follows: bool) -> None:
        pass

    def prime(self, hidden: Tensor, tokens: Tensor, step: Prefill) -> None:
        pass

    def follow(self, feed: Feed) -> None:
        pass

    def rest(self, rows: Sequence[int], widths: Sequence[int]) -> None:
        pass

    def draft(self, feed: Feed, depths: Sequence[int], least: Sequence[float]) -> Proposal:
        drafts = []
        for row, length in zip(feed.layout.rows, feed.lengths.tolist(), strict=True):
            tokens = [*self.sequences[row][length + 1 : length + 1 + max(depths)], *[0] * max(depths)]
            drafts.append([(token + self.shift) % self.vocab for token in tokens[: max(depths)]])
        return Proposal(torch.tensor(drafts, device=feed.starts.device), certain=True)


class Wrong(Right):
    """For tests: never right."""

    name = "wrong"
    shift = 1
