"""One engine behind a server: who may come in, and what runs for them."""

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import groupby
from time import monotonic, time
from types import TracebackType
from typing import Self

from headlong.engine.engine import Engine
from headlong.engine.request import Emitted
from headlong.errors import UserError
from headlong.server.asked import Asked, Ready, make_ready
from headlong.server.events import Event, Finish
from headlong.server.metrics import Metrics
from headlong.server.refusal import Refusal, stopping, too_many
from headlong.server.serving import Serving

OUR_GRAMMAR = re.compile(r"the Lark grammar does not compile \((.*)\); ")


@dataclass
class Visit:
    """One HTTP request, for the line that tells of it."""

    began: float = field(default_factory=monotonic)
    first: float | None = None  # when its first text was there
    prompt_tokens: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish: str = ""
    user: str = ""
    refused: str = ""


class Gate:
    """Lets so many answers in at once."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.inside = 0

    def enter(self, answers: int) -> "Ticket":
        if answers > self.most:
            message = f"{answers} answers were asked for and {self.most} may run or wait here; ask for fewer."
            raise Refusal(HTTPStatus.BAD_REQUEST, message, param="n")
        if self.inside + answers > self.most:
            raise too_many(f"{self.inside} answers run or wait and {self.most} may; try again later.")
        return Ticket(self, answers)


class Ticket:
    """A place inside, given back at the end of the block, unless it was handed on to another."""

    def __init__(self, gate: Gate, answers: int) -> None:
        self._gate, self._answers = gate, answers
        gate.inside += answers

    def handed_on(self) -> "Ticket":
        """The same place, for a block that ends later."""
        answers, self._answers = self._answers, 0
        self._gate.inside -= answers
        return Ticket(self._gate, answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.inside -= self._answers


class Service:
    """What the routes share."""

    def __init__(self, engine: Engine, serving: Serving) -> None:
        self.engine = engine
        self.serving = serving
        self.names = serving.names or (engine.name,)
        room = engine.limits.rows + engine.settings.queue
        self.gate = Gate(min(serving.max_concurrent or room, room))
        self.metrics = Metrics()
        self.stopping = False
        self.began = int(time())

    def check_model(self, name: str | None) -> str:
        """The name that an answer bears."""
        if name is not None and name not in self.names:
            message = f"there is no model {name!r} here; ask for {' or '.join(self.names)}, or name none."
            raise Refusal(HTTPStatus.NOT_FOUND, message, param="model", code="model_not_found")
        return name or self.names[0]

    def enter(self, asked: Asked) -> Ticket:
        if self.stopping:
            raise stopping()
        return self.gate.enter(asked.answers)

    async def make_ready(self, asked: Asked) -> Ready:
        """Aside from the event loop, which serves others meanwhile."""
        return await asyncio.to_thread(make_ready, asked, self.engine, self.serving)

    async def start(self, ready: Ready, visit: Visit) -> AsyncGenerator[Event]:
        """The events of all answers of a request, which the engine has accepted; it is queued with the first step."""
        try:
            rounds = await asyncio.to_thread(self.engine.rounds_async, ready.prompts, **ready.options)
        except UserError as error:
            raise _about_schemas(error) from error
        visit.prompt_tokens = sum(map(len, ready.prompts))
        return _events(rounds, ready, visit, self.metrics)


def _about_schemas(error: UserError) -> Exception:
    """Clients give schemas; the grammar that was made of them is ours, and means nothing to them."""
    found = OUR_GRAMMAR.match(str(error))
    if found is None:
        return error
    message = f"a schema of the answer or of a tool cannot be used ({found[1]}); leave out what is not supported."
    return Refusal(HTTPStatus.BAD_REQUEST, message, code="schema")


async def _events(
    rounds: AsyncGenerator[list[Emitted]], ready: Ready, visit: Visit, metrics: Metrics
) -> AsyncGenerator[Event]:
    readers = ready.readers()
    async with aclosing(rounds):
        async for emitted in rounds:
            for choice, ours in groupby(emitted, lambda one: one.index):
                for event in readers[choice].read(list(ours)):
                    _count(event, visit, metrics)
                    yield event


def _count(event: Event, visit: Visit, metrics: Metrics) -> None:
    if visit.first is None:
        visit.first = monotonic()
        metrics.first_token.observe(visit.first - visit.began)
    if isinstance(event, Finish):
        metrics.record_finish(event)
        spent = event.output.speculative
        visit.tokens += len(event.output.tokens)
        visit.drafted += spent.drafted
        visit.accepted += spent.accepted
        visit.finish = event.output.finish_reason
