"""Which drafts stand, and the token after them: the two rules of docs/round.md."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.chain import Chain, Rule, Seen
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
    draft_probs: Tensor | None  # of every row's drafts, [rows, D, V]; None where no row ever needed them
    allowed: Allowed


@dataclass(frozen=True)
class Scored:
    """Some rows of a trial, padded: their windows [b, W], and the chain's scores [b, W, V] for the next positions."""

    layout: Layout
    window: Tensor
    positions: Tensor  # [b, W], of the tokens the scores are for
    scores: Tensor


def accept_best(layout: Layout, window: Tensor, logits: Tensor, allowed: Allowed) -> Verdict:
    """As if every row took the best of its logits [N, V], of all or of those allowed."""
    return _keep_chosen(layout, window, allowed.choose(layout, logits))


def accept(trial: Trial, chain: Chain) -> Verdict:
    """Rows that ask for nothing but a constraint take the best logits; the others go through the chain, only they."""
    layout, logits = trial.layout, trial.logits
    # Of every row: beside any step of the chain it costs nothing. On a GPU the chain's own kernel looks at masks.
    chosen = best(logits) if fused(logits) else trial.allowed.choose(layout, logits)
    coupled = chain.under(layout.rows, Rule.COUPLED, *((Rule.ALLOWED,) if fused(logits) else ()))
    if coupled:
        part = layout.part(coupled)
        chosen[part.flat] = part.layout.unpad(_choose(_score(trial, part, chain), chain))
    verdict = _keep_chosen(layout, trial.window, chosen)
    rejection = chain.under(layout.rows, Rule.REJECTION)
    if rejection:
        part = layout.part(rejection)
        scored = _score(trial, part, chain)
        accepted, following = _rejection(scored, _proposed(trial, scored), chain)
        verdict.tokens[part.flat] = part.layout.unpad(_tokens(scored.window, accepted, following))
        verdict.kept[part.which] = accepted + 1
    return verdict


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


def _choose(scored: Scored, chain: Chain) -> Tensor:
    """Greedy and seeded rows: the target's token is fixed by position -> [b, W]."""
    layout, scores = scored.layout, scored.scores
    if chain.needs_of(layout.rows).noise:
        return chain.draw(scores, layout.index, noise.TARGET, scored.positions)
    return best(scores)


def _keep_chosen(layout: Layout, window: Tensor, chosen: Tensor) -> Verdict:
    """Drafts of windows [N] are kept while they are what the target chose, [N]."""
    if fused(chosen):
        return Verdict(*verdicts().accept_coupled(chosen, window, layout.offsets, layout.sizes, layout.widest))
    lib = library() if chosen.is_cpu else None
    if lib is None or layout.counts is not None:
        window, mine = layout.pad(window), layout.pad(chosen)
        accepted = _leading((window[:, 1:] == mine[:, :-1]) & _drafted(layout))
        following = mine.gather(1, accepted[:, None])[:, 0]
        return Verdict(layout.unpad(_tokens(window, accepted, following)), accepted + 1)
    verdict = Verdict(fresh(chosen, *chosen.shape), fresh(chosen, len(layout.rows)))
    tensors = (verdict.tokens, verdict.kept, chosen, window, layout.offsets)
    lib.accept_coupled(*(t.data_ptr() for t in tensors), len(layout.rows))
    return verdict


def _proposed(trial: Trial, scored: Scored) -> Tensor:
    """The distributions the drafts were drawn from, [b, W - 1, V]."""
    if trial.draft_probs is None:
        return scored.scores[:, :0]
    return trial.draft_probs[scored.layout.index, : scored.layout.widest - 1]


def _rejection(scored: Scored, proposed: Tensor, chain: Chain) -> tuple[Tensor, Tensor]:
    """Unseeded rows, p the target, q the drafter: keep with min(1, p / q), else draw from what p has above q."""
    p, q, rows = scored.scores.softmax(-1), proposed, scored.layout.index
    drafts, drafted = scored.window[:, 1:, None], _drafted(scored.layout)
    chance = noise.uniform(chain.seed[rows], noise.ACCEPT, scored.positions[:, :-1])
    passed = chance * q.gather(2, drafts)[..., 0] < p[:, :-1].gather(2, drafts)[..., 0]
    accepted = _leading(passed & drafted)
    # After the last draft nothing was proposed: q is zero there and the draw is from p itself.
    q = torch.cat([q * drafted[..., None], torch.zeros_like(p[:, :1])], 1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_at, q_at = p.gather(1, at)[:, 0].double(), q.gather(1, at)[:, 0].double()
    residual = (p_at - q_at).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_at)
    position = scored.positions.gather(1, accepted[:, None])
    return accepted, chain.draw(residual.log().float()[:, None], rows, noise.RESIDUAL, position)[:, 0]


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
