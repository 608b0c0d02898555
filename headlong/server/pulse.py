"""How it goes, in one line every ten seconds while anything runs."""

import asyncio
import logging
from collections import Counter
from time import monotonic

from headlong.engine.engine import Engine

EVERY_S = 10.0
LOG = logging.getLogger("headlong.server.pulse")


class Pulse:
    """What an engine did since the last line."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._remember()

    async def beat(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            line = self.line()
            if line:
                LOG.info(line)

    def line(self) -> str:
        """Empty if no round ran."""
        totals, load = self._engine.totals, self._engine.load
        rounds, tokens = totals.rounds - self._rounds, totals.tokens - self._tokens
        windows = sum(totals.windows.values()) - self._windows
        drafted, accepted = Counter(totals.drafted), Counter(totals.accepted)
        drafted.subtract(self._drafted)
        accepted.subtract(self._accepted)
        seconds = monotonic() - self._since
        self._remember()
        if not rounds or not windows:
            return ""
        rates = " ".join(f"{accepted[place] / count:.0%}" for place, count in sorted(drafted.items()) if count)
        kept = f"accepted by position: {rates}" if rates else "no drafts"
        return (
            f"{load.running} running, {load.waiting} waiting, {tokens / seconds:.1f} tok/s, "
            f"{1 + accepted.total() / windows:.2f} tokens a round, {kept}"
        )

    def _remember(self) -> None:
        totals = self._engine.totals
        self._since = monotonic()
        self._rounds, self._tokens, self._windows = totals.rounds, totals.tokens, sum(totals.windows.values())
        self._drafted, self._accepted = Counter(totals.drafted), Counter(totals.accepted)
