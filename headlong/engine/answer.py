"""One request's answer as it grows: tokens, text, and why it ended."""

import math
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from headlong.engine.request import Emitted, Kept, Logprob, Output, Request, RoundResult
from headlong.engine.stats import Counts
from headlong.engine.stops import StopStrings
from headlong.engine.windows import Window

if TYPE_CHECKING:
    from headlong.engine.scheduler import Job
    from headlong.engine.text import Decoder


class Waiting(NamedTuple):
    """A token whose text is not written yet."""

    token: int
    position: int  # of the draft in its round; 0: the target's own
    logprob: Logprob | None
    last: str | None  # why the answer ends with it, as far as tokens tell


class Answer:
    """Takes what rounds keep, gives what people see, and says when it is complete.

    Tokens are counted as soon as they come (`keep`); their text may be written later (`write`), while the device
    already runs the next round. A stop string can then end an answer some tokens back.
    """

    def __init__(
        self, request: Request, job: "Job", counts: Counts, decoder: "Decoder", eos: Collection[int], since: float
    ) -> None:
        """`since`: when it was asked for, by the monotonic clock."""
        self.request = request
        self.job = job
        self.counts = counts
        self.finish_reason: str | None = None  # once all is written
        self.complete = False  # no more tokens are wanted
        self.error = ""
        self._decoder = decoder
        self._stops = StopStrings(request.stop)
        self.eos = frozenset(() if request.ignore_eos else eos)
        self.waits_since = since
        self.expires = math.inf if request.deadline_s is None else self.waits_since + request.deadline_s
        self._waiting: list[Waiting] = []
        self._round: tuple[Window, RoundResult] | None = None  # the round they came from
        self._kept = 0
        self._tokens: list[int] = []
        self._logprobs: list[Logprob] = []
        self._pieces: list[str] = []

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def keep(self, kept: Kept, window: Window, result: RoundResult) -> tuple[int, ...]:
        """Count a round's tokens, up to the one that ends the answer; those that count."""
        self._round = (window, result)
        counted = []
        for place, token in enumerate(kept.tokens):
            if self.complete:
                break
            last = self._last(token)
            position = place + 1 if place < len(kept.tokens) - 1 else 0
            logprob = kept.logprobs[place] if kept.logprobs else None
            self._waiting.append(Waiting(token, position, logprob, last))
            self.complete = last is not None
            counted.append(token)
        return tuple(counted)

    def _last(self, token: int) -> str | None:
        if token in self.eos:
            return "stop"
        self._kept += 1
        return "length" if self._kept == self.request.max_tokens else None

    def end_here(self) -> None:
        """The constraint's text is whole: the newest token is the last."""
        if not self.complete:
            self._waiting[-1] = self._waiting[-1]._replace(last="stop")
            self.complete = True

    def write(self) -> list[Emitted]:
        """The text of the tokens that wait, up to a stop string."""
        waiting, self._waiting = self._waiting, []
        emitted = []
        for each in waiting:
            if self.finish_reason is None:
                emitted.append(self._write_token(each))
        if self._round:
            self.counts.record_round(*self._round, accepted=sum(one.drafted for one in emitted))
            self._round = None
        return emitted

    def _write_token(self, waiting: Waiting) -> Emitted:
        if waiting.token in self.eos:
            self.finish_reason, piece = "stop", self._rest()
        else:
            self._tokens.append(waiting.token)
            if waiting.logprob:
                self._logprobs.append(waiting.logprob)
            piece = self._stopped(self._decoder.push(waiting.token))
            if self._stops.complete:
                self.finish_reason = "stop"
            elif waiting.last:
                piece += self._rest()
                self.finish_reason = waiting.last
        self.complete = self.complete or self.finish_reason is not None
        self._pieces.append(piece)
        return Emitted(self.job.index, waiting.token, piece, waiting.position, self.finish_reason, waiting.logprob)

    def _stopped(self, piece: str) -> str:
        """What may be shown of a piece: stop strings count once there are enough tokens."""
        return piece if len(self._tokens) < self.request.min_tokens else self._stops.push(piece)

    def _rest(self) -> str:
        return self._stops.push(self._decoder.flush()) + self._stops.flush()

    def end(self, reason: str, error: str = "") -> list[Emitted]:
        """End it where it is; nothing if it had ended."""
        if self.finish_reason is not None:
            return []
        self.finish_reason, self.error, self.complete = reason, error, True
        piece = self._stops.flush()  # it might have become a stop string, and now it cannot
        self._pieces.append(piece)
        return [Emitted(self.job.index, None, piece, position=0, finish_reason=reason)]

    def output(self) -> Output:
        """What there is so far; while more may come, there is no reason why it ended."""
        return Output(
            text="".join(self._pieces),
            tokens=self.tokens,
            finish_reason=self.finish_reason or "",
            prompt_tokens=len(self.job.prompt),
            speculative=self.counts.speculative(),
            timings=self.counts.timings(len(self.job.prompt), len(self._tokens)),
            logprobs=tuple(self._logprobs),
            stopped_by=self._stops.found,
            error=self.error,
        )
