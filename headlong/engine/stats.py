"""Counts of one request: rounds, drafts and seconds."""

from headlong.engine.request import Limits, Request, Speculative, Timings
from headlong.settings import Settings


def plain_reason(request: Request, limits: Limits) -> str:
    """Why a request runs without drafts; empty when it drafts."""
    if not request.draft:
        return "the request asked for plain decoding"
    if request.depth == 0:
        return "depth 0 was asked"
    return limits.no_draft_reason


def depth_of(request: Request, limits: Limits) -> int:
    """Drafts a round that the request asks for and the backend can make."""
    return 0 if plain_reason(request, limits) else min(request.drafts_a_round, limits.depth)


class Counts:
    """What it took to produce one request. Seconds are those of the calls that the request was part of."""

    def __init__(self, request: Request, limits: Limits) -> None:
        self._reason = plain_reason(request, limits)
        self._depth = depth_of(request, limits)
        self._asked_plain = not request.draft
        self._drafter = limits.drafter
        self._drafted = [0] * self._depth
        self._accepted = [0] * self._depth
        self._rounds = 0
        self._prefill_s = 0.0
        self._decode_s = 0.0

    def record_chunk(self, seconds: float) -> None:
        self._prefill_s += seconds

    def record_round(self, verified: int, accepted: int, seconds: float) -> None:
        """`accepted` counts the drafts that became output; those after a stop did not."""
        self._rounds += 1
        self._decode_s += seconds
        for position in range(verified):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted

    def speculative(self, settings: Settings) -> Speculative:
        return Speculative(
            requested="none" if self._asked_plain else settings.draft_kind,
            used="none" if self._reason else self._drafter,
            reason=self._reason,
            depth=self._depth,
            rounds=self._rounds,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
        )

    def timings(self, prompt_tokens: int, tokens: int) -> Timings:
        return Timings(self._prefill_s, self._decode_s, prompt_tokens, tokens)
