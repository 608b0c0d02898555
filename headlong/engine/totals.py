"""Counts of everything that an engine did since it was loaded, and how full it is now."""

from collections import Counter
from dataclasses import dataclass, field

from headlong.engine.request import Output

STAGES = ("prefill", "verify", "draft", "host")
DOES_NOT_PAY = "no draft was expected to pay"


@dataclass
class Totals:
    """Written by the thread that steps, read by any."""

    requests: Counter[str] = field(default_factory=Counter)  # that ended, by why they did
    undrafted: Counter[str] = field(default_factory=Counter)  # of these, the ones without a draft, by why
    prompt_tokens: int = 0  # of requests that ended
    cached_tokens: int = 0  # of these, the ones found in the prefix cache
    tokens: int = 0
    chunks: int = 0  # of prompts
    rounds: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    windows: Counter[int] = field(default_factory=Counter)  # of rows in rounds, by the drafts in them
    drafted: Counter[int] = field(default_factory=Counter)  # by position, from 1
    accepted: Counter[int] = field(default_factory=Counter)

    def record_piece(self, seconds: float, complete: bool) -> None:
        """Of a chunk."""
        self.chunks += complete
        self.seconds["prefill"] += seconds

    def record_round(self, verify_s: float, draft_s: float, host_s: float) -> None:
        self.rounds += 1
        for stage, seconds in (("verify", verify_s), ("draft", draft_s), ("host", host_s)):
            self.seconds[stage] += seconds

    def record_window(self, drafts: int, accepted: int) -> None:
        self.windows[drafts] += 1
        self.drafted.update(range(1, drafts + 1))
        self.accepted.update(range(1, accepted + 1))

    def record_end(self, output: Output, reason: str) -> None:
        """`reason` says why nothing could be drafted for it, where that was clear before it ran."""
        self.requests[output.finish_reason] += 1
        self.prompt_tokens += output.prompt_tokens
        self.cached_tokens += output.timings.cached_tokens
        if output.tokens and not output.speculative.drafted:
            self.undrafted[reason or DOES_NOT_PAY] += 1


@dataclass(frozen=True)
class Load:
    """How full an engine is."""

    running: int  # requests that have a row
    waiting: int
    rows: int
    pages: int
    pages_held: int  # by rows or cached prefixes
    pages_cached: int  # of these, those that prefixes hold
    prefix_lookups: int
    prefix_hits: int
