"""Which drafts stand, and the token after them: the two rules of docs/round.md."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.chain import Chain, Rule, Seen
from headlong.backends.torch.draws import Draws
from headlong.backends.torch.gpu.paths import fused, verdicts
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout, Part


@dataclass(frozen=True)
class Verdict:
    """tokens [N]: of each row the kept drafts and then the target's own token; what follows in the row is padding."""

    tokens: Tensor
    kept: Tensor  # [B]


@dataclass(frozen=True)
class Trial:
    """What is on trial: windows [N] from starts [B] on, and the target's logits [N, V] after each of their tokens."""

    layout: Layout
    starts: Tensor
    window: Tensor
    logits: Tensor
    allowed: Allowed


@dataclass(frozen=True)
class Scored:
    """Some rows of a trial, padded: their windows [b, W], and the chain's scores [b, W, V] for the next positions."""

    layout: Layout
    window: Tensor
    positions: Tensor  # [b, W], of the tokens the scores are for
    scores: Tensor


def accept(trial: Trial, chain: Chain) -> Verdict:
    """Rows whose tokens follow from their logits alone, and the others through the chain, only they."""
    verdict = accept_by_logits(trial, chain)
    accept_scored(verdict, trial, chain)
    return verdict


def accept_by_logits(trial: Trial, chain: Chain) -> Verdict:
    """As if no row needed the chain."""
    layout, logits = trial.layout, trial.logits
    # On a GPU the chain's own kernel looks at masks.
    chosen = best(logits) if fused(logits) else trial.allowed.choose(layout, logits)
    if library(logits):
        return _judge(layout, trial.starts, trial.window, logits, chosen, chain.from_logits)
    return _keep_chosen(layout, trial.window, chosen)


def accept_scored(verdict: Verdict, trial: Trial, chain: Chain) -> None:
    """What rows that need the chain keep, instead of what was found without."""
    rows, bound = trial.layout.rows, (Rule.ALLOWED,) if fused(trial.logits) else ()
    judges: list[tuple[tuple[Rule, ...], Callable[[Scored, Chain], Verdict]]] = [
        ((Rule.COUPLED, *bound), _judge_coupled),
        ((Rule.REJECTION,), _judge_rejection),
    ]
    if library(trial.logits):
        judges = [((Rule.COUPLED, Rule.REJECTION), _judge_scored)]
    for rules, judge in judges:
        places = chain.scored(rows, *rules)
        if places:
            part = trial.layout.part(places)
            mine = judge(_score(trial, part, chain), chain)
            verdict.tokens[part.flat], verdict.kept[part.which] = mine.tokens, mine.kept


def _score(trial: Trial, part: Part, chain: Chain) -> Scored:
    layout = part.layout
    window, logits = layout.pad(part.of_tokens(trial.window)), layout.pad(part.of_tokens(trial.logits))
    step = torch.arange(layout.widest, device=window.device)
    positions = part.of_rows(trial.starts)[:, None] + step + 1
    # Position j has the drafts 1 .. j before it.
    before = (step[1:] <= step[:, None]).expand(len(window), -1, -1)
    needs = chain.needs_of(layout.rows)
    seen = Seen(window[:, 1:], before, trial.allowed.at(layout) if needs.masked else None)
    scores = chain.apply(logits, layout.index, needs, positions, seen)
    return Scored(layout, window, positions, scores)


def _judge_scored(scored: Scored, chain: Chain) -> Verdict:
    layout, scores = scored.layout, scored.layout.unpad(scored.scores).contiguous()
    window, starts = layout.unpad(scored.window), scored.positions[:, 0] - 1
    return _judge(layout, starts, window, scores, best(scores), chain.from_scores)


def _judge(layout: Layout, starts: Tensor, window: Tensor, scores: Tensor, chosen: Tensor, draws: Draws) -> Verdict:
    """Scores [N, V] of windows [N], by kernels; chosen [N]: what rows take that do not draw."""
    draws.choose(layout, starts, scores, chosen)
    verdict = _keep_chosen(layout, window, chosen)
    draws.reject(layout, starts, window, scores, (verdict.tokens, verdict.kept))
    return verdict


def _judge_coupled(scored: Scored, chain: Chain) -> Verdict:
    """Greedy and seeded rows: the target's token is fixed by position."""
    layout, scores = scored.layout, scored.scores
    if chain.needs_of(layout.rows).noise:
        chosen = chain.draw(scores, layout.index, noise.TARGET, scored.positions)
    else:
        chosen = best(scores)
    return _keep_chosen(layout, layout.unpad(scored.window), layout.unpad(chosen))


def _keep_chosen(layout: Layout, window: Tensor, chosen: Tensor) -> Verdict:
    """Drafts of windows [N] are kept while they are what the target chose, [N]."""
    if fused(chosen):
        return Verdict(*verdicts().accept_coupled(chosen, window, layout.offsets, layout.sizes, layout.widest))
    lib = library() if chosen.is_cpu else None
    if lib is None:
        window, mine = layout.pad(window), layout.pad(chosen)
        accepted = _leading((window[:, 1:] == mine[:, :-1]) & _drafted(layout))
        following = mine.gather(1, accepted[:, None])[:, 0]
        return Verdict(layout.unpad(_tokens(window, accepted, following)), accepted + 1)
    verdict = Verdict(fresh(chosen, *chosen.shape), fresh(chosen, len(layout.rows)))
    tensors = (verdict.tokens, verdict.kept, chosen, window, layout.offsets)
    counts = None if layout.counts is None else layout.counts.data_ptr()
    lib.accept_coupled(*(t.data_ptr() for t in tensors), counts, len(layout.rows))
    return verdict


def _judge_rejection(scored: Scored, chain: Chain) -> Verdict:
    """Unseeded rows, p the target, q the drafter: keep with min(1, p / q), else draw from what p has above q."""
    layout, rows = scored.layout, scored.layout.index
    p, q = scored.scores.softmax(-1), chain.room_for_probs()[rows, : layout.widest - 1]
    drafts, drafted = scored.window[:, 1:, None], _drafted(layout)
    chance = noise.uniform(chain.seed[rows], noise.ACCEPT, scored.positions[:, :-1])
    passed = chance * q.gather(2, drafts)[..., 0] < p[:, :-1].gather(2, drafts)[..., 0]
    accepted = _leading(passed & drafted)
    # After the last draft nothing was proposed: q is zero there and the draw is from p itself.
    q = torch.cat([q.masked_fill(~drafted[..., None], 0), torch.zeros_like(p[:, :1])], 1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_at, q_at = p.gather(1, at)[:, 0].double(), q.gather(1, at)[:, 0].double()
    residual = (p_at - q_at).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_at)
    position = scored.positions.gather(1, accepted[:, None])
    following = chain.draw(residual.log().float()[:, None], rows, noise.RESIDUAL, position)[:, 0]
    return Verdict(layout.unpad(_tokens(scored.window, accepted, following)), accepted + 1)


def _drafted(layout: Layout) -> Tensor:
    """[B, W - 1]: which window positions after the first hold a draft."""
    return torch.arange(1, layout.widest, device=layout.index.device) < layout.sizes[:, None]


def _tokens(window: Tensor, accepted: Tensor, following: Tensor) -> Tensor:
    """[B, W]: the accepted drafts of a window, then the token that follows them."""
    drafts = torch.cat([window[:, 1:], following[:, None]], 1)
    step = torch.arange(window.shape[1], device=window.device)
    return torch.where(step < accepted[:, None], drafts, following[:, None])


def _leading(flags: Tensor) -> Tensor:
    """[B, N] -> how many are true before the first false."""
    return flags.long().cumprod(1).sum(1)
