"""One request's answer as it grows: tokens, text, and why it ended."""

from collections.abc import Collection
from typing import TYPE_CHECKING

from headlong.engine.request import Emitted, Kept, Output, Request
from headlong.engine.scheduler import Job
from headlong.engine.stats import Counts
from headlong.engine.stops import StopStrings
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.text import Decoder


class Answer:
    """Takes what rounds keep, gives what people see, and says when it is complete."""

    def __init__(self, request: Request, job: Job, counts: Counts, decoder: "Decoder", eos: Collection[int]) -> None:
        self.request = request
        self.job = job
        self.counts = counts
        self.finish_reason: str | None = None
        self._decoder = decoder
        self._stops = StopStrings(request.stop)
        self._eos = () if request.ignore_eos else eos
        self._tokens: list[int] = []
        self._pieces: list[str] = []

    def take(self, kept: Kept, seconds: float) -> list[Emitted]:
        """A round's tokens, up to the one that ends the answer."""
        emitted: list[Emitted] = []
        for place, token in enumerate(kept.tokens):
            if self.finish_reason is None:
                emitted.append(self._take_token(token, drafted=place < len(kept.tokens) - 1))
        self.counts.record_round(kept.verified, sum(one.drafted for one in emitted), seconds)
        return emitted

    def _take_token(self, token: int, drafted: bool) -> Emitted:
        if token in self._eos:
            self.finish_reason = "stop"
            piece = self._rest()
        else:
            self._tokens.append(token)
            piece = self._stops.push(self._decoder.push(token))
            if self._stops.complete:
                self.finish_reason = "stop"
            elif len(self._tokens) == self.request.max_tokens:
                self.finish_reason = "length"
                piece += self._rest()
        self._pieces.append(piece)
        return Emitted(self.job.index, token, piece, drafted, self.finish_reason)

    def _rest(self) -> str:
        return self._stops.push(self._decoder.flush()) + self._stops.flush()

    def output(self, settings: Settings) -> Output:
        """What there is so far; an answer that is not complete counts as cancelled."""
        return Output(
            text="".join(self._pieces),
            tokens=tuple(self._tokens),
            finish_reason=self.finish_reason or "cancelled",
            prompt_tokens=len(self.job.prompt),
            speculative=self.counts.speculative(settings),
            timings=self.counts.timings(len(self.job.prompt), len(self._tokens)),
        )
