"""Which drafts stand, and the token after them: the two rules of docs/round.md."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headlong.backends.torch.chain import Needs
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best
from headlong.backends.torch.native.library import Kernels, library


@dataclass(frozen=True)
class Verdict:
    """tokens [B, W]: the kept drafts, then the target's own token at index kept - 1; what follows is padding."""

    tokens: Tensor
    kept: Tensor  # [B]


@dataclass(frozen=True)
class Draws:
    """What the rows of a batch draw with."""

    positions: Tensor  # [B, W], of the tokens the scores are for
    seed: Tensor  # [B]
    coupled: Tensor  # [B], False for rows under the rejection rule
    drawn: Tensor  # [B], 0 for greedy rows
    probs: Tensor | None  # of the drafts, [B, W - 1, V]; None when no row needs it


@dataclass(frozen=True)
class Trial:
    """What is on trial: the target's scores [B, W, V], and the window [B, W] that led to them."""

    scores: Tensor
    window: Tensor
    verify: Tensor  # [B], drafts in each row's window
    draws: Draws | None = None  # None where every row is greedy

    @property
    def tested(self) -> Tensor:
        """[B, W - 1]: the window positions that hold a draft."""
        return torch.arange(self.window.shape[1] - 1, device=self.window.device) < self.verify[:, None]


def accept(trial: Trial, needs: Needs) -> Verdict:
    chosen = best(_with_noise(trial) if needs.noise else trial.scores)  # [B, W]
    lib = library(trial.scores)
    if lib and not needs.rejection:
        return _coupled_native(trial, chosen, lib)
    accepted, following = _coupled(trial, chosen)
    if needs.rejection:
        assert trial.draws is not None
        other_accepted, other_following = _rejection(trial, trial.draws)
        accepted = torch.where(trial.draws.coupled, accepted, other_accepted)
        following = torch.where(trial.draws.coupled, following, other_following)
    index = torch.arange(trial.window.shape[1], device=accepted.device)
    drafts = torch.cat([trial.window[:, 1:], following[:, None]], 1)
    tokens = torch.where(index == accepted[:, None], following[:, None], drafts)
    return Verdict(tokens, accepted + 1)


def _with_noise(trial: Trial) -> Tensor:
    assert trial.draws is not None
    draws, scores = trial.draws, trial.scores
    gumbel = noise.gumbel(draws.seed, noise.TARGET, draws.positions, scores.shape[-1])
    return scores + gumbel * draws.drawn[:, None, None]


def _coupled(trial: Trial, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy and seeded rows: the target's token is fixed by position; a draft is kept while it is that token."""
    accepted = _leading((trial.window[:, 1:] == chosen[:, :-1]) & trial.tested)
    return accepted, chosen.gather(1, accepted[:, None])[:, 0]


def _coupled_native(trial: Trial, chosen: Tensor, lib: Kernels) -> Verdict:
    verdict = Verdict(torch.empty_like(chosen), torch.empty_like(trial.verify))
    tensors = (verdict.tokens, verdict.kept, chosen, trial.window, trial.verify)
    lib.accept_coupled(*(t.data_ptr() for t in tensors), *chosen.shape)
    return verdict


def _rejection(trial: Trial, draws: Draws) -> tuple[Tensor, Tensor]:
    """Unseeded rows, p the target, q the drafter: keep with min(1, p / q), else draw from what p has above q."""
    assert draws.probs is not None
    p = trial.scores.softmax(-1).double()
    q = draws.probs.double()
    drafts = trial.window[:, 1:, None]
    chance = noise.uniform(draws.seed, noise.ACCEPT, draws.positions[:, :-1])
    passed = chance * q.gather(2, drafts)[..., 0] < p[:, :-1].gather(2, drafts)[..., 0]
    accepted = _leading(passed & trial.tested)
    # After the last draft nothing was proposed: q is zero there and the draw is from p itself.
    proposed = torch.cat([q * trial.tested[..., None], torch.zeros_like(p[:, :1])], 1)
    at = accepted[:, None, None].expand(-1, 1, p.shape[-1])
    p_at, q_at = p.gather(1, at)[:, 0], proposed.gather(1, at)[:, 0]
    residual = (p_at - q_at).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_at)
    position = draws.positions.gather(1, accepted[:, None])
    gumbel = noise.gumbel(draws.seed, noise.RESIDUAL, position, p.shape[-1])[:, 0]
    return accepted, (residual.log() + gumbel).argmax(-1)


def _leading(flags: Tensor) -> Tensor:
    """[B, N] -> how many are true before the first false."""
    return flags.long().cumprod(1).sum(1)
