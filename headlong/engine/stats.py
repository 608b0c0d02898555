"""Counts of one request, or of several together: rounds, drafts and seconds."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby, zip_longest
from operator import itemgetter

from headlong.engine.request import Limits, Request, RoundResult, Speculative, Timings
from headlong.engine.scene import HEAD
from headlong.engine.totals import Totals
from headlong.engine.windows import Window
from headlong.settings import Settings

LONG_REST = 8  # rounds without drafts after which people are told why; a row that rests is tried more seldom


def plain_reason(request: Request, limits: Limits, settings: Settings) -> str:
    """Why a request runs without drafts; empty when it may draft."""
    if request.draft_kind == "none":
        return "the request asked for plain decoding"
    if request.depth == 0:
        return "depth 0 was asked"
    if settings.draft_kind == "none":
        return "draft kind none was asked for"
    if not drafters_of(request, limits, settings) and request.constraint is None:
        return limits.no_draft_reason or "draft kind mtp was asked for"
    return ""


def drafters_of(request: Request, limits: Limits, settings: Settings) -> tuple[str, ...]:
    """The drafters that a request lets propose, of those the engine has."""
    has_head = limits.drafter == HEAD and limits.depth > 0 and settings.draft_kind != "ngram"
    available = {
        HEAD: has_head,
        "ngram": settings.draft_kind != "mtp" or request.draft_kind == "ngram",
        "prediction": request.prediction is not None,
    }
    asked = tuple(available) if request.draft_kind == "auto" else (request.draft_kind,)
    return tuple(name for name in asked if available.get(name))


class Counts:
    """What it took to produce one request. Seconds are those of the calls that the request was part of."""

    def __init__(
        self, asked: int | None, requested: str, reason: str, why: Callable[[], str], totals: Totals | None = None
    ) -> None:
        """`reason` says why nothing can be drafted at all, `why` what was last decided."""
        self._asked, self._requested, self.reason, self._why = asked, requested, reason, why
        self._totals = totals or Totals()
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._by_drafter: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._depths: list[list[int]] = []  # drafts in a window, and for how many rounds in a row
        self._rounds = 0
        self.queue_s = self.prefill_s = self.decode_s = self.verify_s = self.draft_s = self.host_s = 0.0
        self.decode_since = 0.0  # when its first round began
        self.cached_tokens = 0

    def record_round(self, window: Window, result: RoundResult, accepted: int) -> None:
        """`accepted` counts the drafts that became output; those after a stop did not."""
        self._rounds += 1
        self._totals.record_window(window.verify, accepted)
        self.verify_s += result.verify_s
        self.draft_s += result.draft_s
        if self._depths and self._depths[-1][0] == window.verify:
            self._depths[-1][1] += 1
        else:
            self._depths.append([window.verify, 1])
        if not window.verify:
            return
        more = window.verify - len(self._drafted)
        self._drafted += [0] * more
        self._accepted += [0] * more
        for position in range(window.verify):
            self._drafted[position] += 1
            self._accepted[position] += position < accepted
        mine = self._by_drafter[window.drafter]
        mine[0] += window.verify
        mine[1] += accepted

    def speculative(self) -> Speculative:
        return Speculative(
            requested=self._requested,
            used="+".join(sorted(self._by_drafter)) or "none",
            reason=self.reason or self._rests_because(),
            depth=0 if self.reason else len(self._drafted) if self._asked is None else self._asked,
            rounds=self._rounds,
            drafted=sum(self._drafted),
            accepted=sum(self._accepted),
            drafted_by_position=tuple(self._drafted),
            accepted_by_position=tuple(self._accepted),
            drafters={name: (drafted, accepted) for name, (drafted, accepted) in sorted(self._by_drafter.items())},
            depths=tuple((depth, rounds) for depth, rounds in self._depths),
        )

    def _rests_because(self) -> str:
        """Why nothing, or nothing any more, is drafted for a row that may have drafts; empty while some are."""
        drafts, rounds = self._depths[-1] if self._depths else (0, 0)
        if drafts or not rounds or (self._drafted and rounds < LONG_REST):
            return ""
        return f"depth {self._asked} was asked for, and no drafts stood ready" if self._asked else self._why()

    def timings(self, prompt_tokens: int, tokens: int) -> Timings:
        return Timings(
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            prompt_tokens=prompt_tokens,
            tokens=tokens,
            queue_s=self.queue_s,
            verify_s=self.verify_s,
            draft_s=self.draft_s,
            host_s=self.host_s,
            cached_tokens=self.cached_tokens,
        )


def combine(parts: Sequence[Speculative]) -> Speculative:
    """Several requests' drafting as if it were one's."""
    drafters: dict[str, tuple[int, int]] = {}
    for name, (drafted, accepted) in chain.from_iterable(part.drafters.items() for part in parts):
        before = drafters.get(name, (0, 0))
        drafters[name] = (before[0] + drafted, before[1] + accepted)
    windows = chain.from_iterable(part.depths for part in parts)
    return Speculative(
        requested=parts[0].requested,
        used="+".join(sorted(drafters)) or "none",
        reason=next((part.reason for part in parts if part.reason), ""),
        depth=max(part.depth for part in parts),
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        drafted_by_position=_sums(part.drafted_by_position for part in parts),
        accepted_by_position=_sums(part.accepted_by_position for part in parts),
        drafters=dict(sorted(drafters.items())),
        depths=tuple((depth, sum(rounds for _, rounds in same)) for depth, same in groupby(windows, itemgetter(0))),
    )


def _sums(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))
