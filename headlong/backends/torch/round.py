"""One round for all rows at once: verify, accept, commit, draft. Nothing here is read back to the host in between."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headlong.backends.torch.accept import Draws, Trial, Verdict, accept
from headlong.backends.torch.cache import Cache
from headlong.backends.torch.chain import Chain, Needs, Seen
from headlong.backends.torch.drafters import Drafter, Feed
from headlong.backends.torch.models.base import Model
from headlong.backends.torch.native.tape import Taped
from headlong.backends.torch.step import Prefill, Window
from headlong.engine.request import Chunk, Kept, RowPlan
from headlong.settings import MAX_DEPTH


class RoundHandle:
    """A round's result, on the device until asked for."""

    def __init__(self, plan: Sequence[RowPlan], verdict: Verdict) -> None:
        self.plan, self.verdict = plan, verdict

    def result(self) -> list[Kept]:
        tokens, kept = self.verdict.tokens.tolist(), self.verdict.kept.tolist()
        return [
            Kept(row.row, tuple(mine[:count]), row.verify)
            for row, mine, count in zip(self.plan, tokens, kept, strict=True)
        ]


class Rounds:
    """Where each row stands, and how it goes on.

    length  tokens of the row in the cache
    last    the newest token, at position `length`, which the next window begins with
    drafts  proposals for the positions after it, and under the rejection rule the probabilities they were drawn with
    """

    def __init__(self, model: Model, cache: Cache, chain: Chain, drafter: Drafter | None) -> None:
        self.model, self.cache, self.chain, self.drafter = model, cache, chain, drafter
        rows, device = cache.limits.rows, cache.device
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.last = torch.zeros(rows, dtype=torch.long, device=device)
        self.drafts = torch.zeros(rows, MAX_DEPTH, dtype=torch.long, device=device)
        self.draft_probs: Tensor | None = None
        self.verify = Taped(self._verify)

    def start(self, row: int, last: int) -> None:
        self.length[row] = 0
        self.last[row] = last

    def prefill(self, chunk: Chunk) -> None:
        tokens = torch.tensor([*chunk.tokens, chunk.after], device=self.cache.device)
        step = Prefill(self.cache, chunk.row, chunk.start, len(chunk.tokens))
        hidden = self.model(tokens[:-1], step)
        self.length[chunk.row] = step.end
        if self.drafter:
            self.drafter.prime(hidden, tokens[1:], step)
        if chunk.draft:
            index = torch.tensor([chunk.row], device=self.cache.device)
            one = torch.ones_like(index)
            needs = self.chain.needs_of([chunk.row])
            feed = Feed([chunk.row], index, one * (step.end - 1), hidden[None, -1:], tokens[None, -1:], one, needs)
            self._draft(feed, [chunk.draft])

    def run(self, plan: Sequence[RowPlan]) -> RoundHandle:
        rows = [row.row for row in plan]
        verify = torch.tensor([row.verify for row in plan], device=self.cache.device)
        width = 1 + max(row.verify for row in plan)
        needs = self.chain.needs_of(rows)
        index = torch.tensor(rows, device=self.cache.device)
        starts = self.length[index]

        window = torch.cat([self.last[index, None], self.drafts[index, : width - 1]], 1)
        hidden, logits = self.verify(rows, index, starts, window, verify + 1)
        verdict = accept(self._trial(logits, window, index, starts, verify, needs), needs)
        self._commit(index, verdict)
        for row in rows:
            self.cache.widths[row] = width

        depths = [row.draft for row in plan]
        if any(depths):
            self._draft(Feed(rows, index, starts, hidden, verdict.tokens, verdict.kept, needs), depths)
        return RoundHandle(plan, verdict)

    def _verify(
        self, rows: list[int], index: Tensor, starts: Tensor, window: Tensor, widths: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Windows [B, W] -> hidden [B, W, H] and logits [B, W, V]."""
        step = Window(self.cache, rows, index, starts, widths, window.shape[1])
        hidden = self.model(window.flatten(), step)
        return hidden.view(*window.shape, -1), self.model.logits(hidden, step).view(*window.shape, -1)

    def _trial(
        self, logits: Tensor, window: Tensor, index: Tensor, starts: Tensor, verify: Tensor, needs: Needs
    ) -> Trial:
        if needs.nothing:
            return Trial(logits, window, verify)
        offset = self.cache.counting[: window.shape[1]]
        positions = starts[:, None] + offset + 1
        # Position j has the drafts 1 .. j before it.
        before = (offset[1:] <= offset[:, None]).expand(len(index), -1, -1)
        scores = self.chain.apply(logits, index, needs, positions, Seen(window[:, 1:], before))
        probs = self._probs()[index, : window.shape[1] - 1] if needs.rejection else None
        chain = self.chain
        draws = Draws(positions, chain.seed[index], chain.coupled[index], chain.drawn[index], probs)
        return Trial(scores, window, verify, draws)

    def _commit(self, index: Tensor, verdict: Verdict) -> None:
        self.length[index] += verdict.kept
        self.last[index] = verdict.tokens.gather(1, verdict.kept[:, None] - 1)[:, 0]
        self.cache.kept[index] = verdict.kept
        self.chain.count(index, verdict.tokens, verdict.kept)

    def _draft(self, feed: Feed, depths: Sequence[int]) -> None:
        assert self.drafter is not None
        proposal = self.drafter.draft(feed, depths)
        depth = proposal.tokens.shape[1]
        self.drafts[feed.index, :depth] = proposal.tokens
        if feed.needs.rejection:
            certain = torch.nn.functional.one_hot(proposal.tokens, self.chain.vocab).float()
            self._probs()[feed.index, :depth] = certain if proposal.probs is None else proposal.probs

    def _probs(self) -> Tensor:
        """Made when a row first needs it: it is as large as the vocabulary for every row and draft."""
        if self.draft_probs is None:
            shape = (self.cache.limits.rows, MAX_DEPTH, self.chain.vocab)
            self.draft_probs = torch.zeros(shape, dtype=torch.float32, device=self.cache.device)
        return self.draft_probs
