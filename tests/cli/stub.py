"""A scripted engine behind the real command line: `python -m tests.cli.stub generate ...` loads no model."""

import logging
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace

import headlong
from headlong.cli.main import entrypoint
from headlong.engine.request import Emitted, Logprob, Output, Request, Speculative, Timings
from headlong.errors import DraftError, Fault
from headlong.settings import Settings

ANSWER = ("One", " two", " three", "\n", " four", " è", " end")
AUTO_DEPTH = 2


class StubText:
    """Remembers what was asked of it; a chat becomes its contents in capitals, one id a character."""

    has_chat_template = True

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        return [ord(letter) for message in messages for letter in message["content"].upper()]


class StubEngine:
    """Answers every request with ANSWER over and over; a round gives the target's token and the drafts after it."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.name = name
        self.settings = settings
        self.text = StubText()
        self.limits = SimpleNamespace(drafter=settings.draft_kind, device=settings.device)
        self.requests: list[Request] = []
        self.given: list[int] = []
        self.rounds: list[int] = []
        self.cancelled: set[int] = set()
        self.closed = False

    def submit(self, request: Request) -> int:
        self.requests.append(request)
        self.given.append(0)
        self.rounds.append(0)
        return len(self.requests) - 1

    def step(self) -> list[Emitted]:
        time.sleep(0.002)
        emitted = []
        # later requests end first, so that the order of the answers is the command's own doing
        for index in reversed(range(len(self.requests))):
            if index in self.cancelled or self.given[index] >= self._last(index):
                continue
            self.rounds[index] += 1
            for place in range(self._depth(index) + 1 + index):
                if self.given[index] < self._last(index):
                    emitted.append(self._emit(index, position=place))
        return emitted

    def _emit(self, index: int, position: int) -> Emitted:
        token = self.given[index] % len(ANSWER)
        self.given[index] += 1
        finish = None
        if self.given[index] == self._last(index):
            finish = "length" if self.requests[index].max_tokens <= len(ANSWER) else "stop"
        return Emitted(index, token, ANSWER[token], position, finish)

    def _depth(self, index: int) -> int:
        if self.settings.draft_kind == "none":
            return 0
        asked = self.requests[index].depth
        return AUTO_DEPTH if asked is None else asked

    def _last(self, index: int) -> int:
        request = self.requests[index]
        return request.max_tokens if request.ignore_eos else min(request.max_tokens, len(ANSWER))

    def cancel(self, index: int) -> None:
        self.cancelled.add(index)

    def output(self, index: int) -> Output:
        request = self.requests[index]
        tokens = tuple(number % len(ANSWER) for number in range(self.given[index]))
        finish = "length" if request.max_tokens <= len(ANSWER) else "stop"
        top = () if request.logprobs is None else tuple((place, -1.0 - place) for place in range(request.logprobs))
        return Output(
            text="".join(ANSWER[token] for token in tokens),
            tokens=tokens,
            finish_reason="cancelled" if index in self.cancelled else finish,
            prompt_tokens=len(request.prompt),
            speculative=self._speculative(index, len(tokens)),
            timings=Timings(0.5, 2.0, len(request.prompt), len(tokens), 0.25, 1.0, 0.75, 0.125, cached_tokens=0),
            logprobs=() if request.logprobs is None else tuple(Logprob(token, -0.5, top) for token in tokens),
        )

    def _speculative(self, index: int, tokens: int) -> Speculative:
        depth, rounds = self._depth(index), self.rounds[index]
        drafted, accepted = depth * rounds, tokens - rounds
        return Speculative(
            requested=self.settings.draft_kind,
            used="mtp" if depth else "none",
            reason="" if depth else "drafting was turned off",
            depth=depth,
            rounds=rounds,
            drafted=drafted,
            accepted=accepted,
            drafted_by_position=(rounds,) * depth,
            accepted_by_position=(rounds,) * depth,
            drafters={"mtp": (drafted, accepted)} if depth else {},
            depths=((depth, rounds),) if rounds else (),
        )

    def close(self) -> None:
        self.closed = True


def load(name: str, require_draft: bool = False, **settings: object) -> StubEngine:
    """Some names make it do what a true model might."""
    if name == "headless":
        if require_draft:
            raise DraftError("headless has no MTP head; name a model with one or leave --require-draft out.")
        logging.getLogger("headlong").warning("the promised head is absent")
    if name == "broken":
        raise Fault("a page was handed out twice.")
    if name == "surprising":
        raise ZeroDivisionError("division by zero")
    return StubEngine(name, Settings(**settings))


if __name__ == "__main__":
    headlong.load = load
    sys.exit(entrypoint())
