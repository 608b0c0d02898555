"""From a client's request to its answer: a stream of events, or the same events folded into one."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from headlong.errors import HeadlongError
from headlong.server.asked import Asked
from headlong.server.events import Event
from headlong.server.refusal import Refusal, refusal_of
from headlong.server.service import Service, Ticket, Visit

T = TypeVar("T")


class Writer(Protocol):
    """How one API tells of the events of a request."""

    def begin(self, prompt_tokens: int) -> Iterable[bytes]: ...

    def write(self, event: Event) -> Iterable[bytes]: ...

    def end(self) -> Iterable[bytes]: ...

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        """For a stream that breaks off."""
        ...

    def whole(self, events: Sequence[Event]) -> dict[str, Any]: ...


async def respond(request: Request, asked: Asked, writer: Writer, stream: bool) -> Response:
    service: Service = request.app.state.service
    visit: Visit = request.scope["visit"]
    visit.user = asked.user
    with service.enter(asked) as ticket:
        ready = await service.make_ready(asked)
        events = await service.start(ready, visit)
        if stream:
            return Stream(_stream(events, writer, visit), ticket.handed_on())
        return answer(writer.whole(await unless_gone(request, _all(events))))


def answer(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encoded(content), status, headers, media_type="application/json")


def encoded(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()


def sse(content: Any, event: str = "") -> bytes:
    """One event of a stream."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + encoded(content) + b"\n\n"


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """What the work gives, unless the client leaves before; then it is cancelled."""
    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            return doing.result()
        raise ClientDisconnect
    finally:
        doing.cancel()
        leaving.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all(events: AsyncGenerator[Event]) -> list[Event]:
    async with aclosing(events):
        return [event async for event in events]


async def _stream(events: AsyncGenerator[Event], writer: Writer, visit: Visit) -> AsyncGenerator[bytes]:
    async with aclosing(events):
        try:
            for chunk in writer.begin(visit.prompt_tokens):
                yield chunk
            async for event in events:
                for chunk in writer.write(event):
                    yield chunk
            for chunk in writer.end():
                yield chunk
        except (HeadlongError, Refusal) as error:
            refusal = error if isinstance(error, Refusal) else refusal_of(error)
            visit.refused = refusal.message
            for chunk in writer.fail(refusal):
                yield chunk


class Stream(StreamingResponse):
    """Server-sent events. When it is over, or its client has gone, whatever ran for it ends and its place is free."""

    def __init__(self, chunks: AsyncGenerator[bytes], ticket: Ticket) -> None:
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._chunks, self._ticket = chunks, ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._ticket:
            async with aclosing(self._chunks):
                await super().__call__(scope, receive, send)
        visit: Visit = scope["visit"]
        if not visit.finish and not visit.refused:
            visit.finish = "left early"
