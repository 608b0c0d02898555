"""An answer as a row of blocks, as some APIs have it: reasoning, text and calls one after the other."""

from collections.abc import Iterator
from dataclasses import dataclass

from headlong.server.events import Call, Event, Finish

CALL = "call"
OPENED, GREW, CLOSED = "opened", "grew", "closed"


@dataclass
class Block:
    """One of them; a call's text is its arguments."""

    kind: str  # CONTENT, REASONING or CALL
    place: int
    text: str = ""
    call: Call | None = None


@dataclass(frozen=True)
class Change:
    what: str  # OPENED, GREW or CLOSED
    block: Block
    text: str = ""  # by which it grew


class Blocks:
    """Puts events together. What changed is told as it happens; `all` is what came of it."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None

    def take(self, event: Event) -> Iterator[Change]:
        if isinstance(event, Finish):
            yield from self._close()
        elif isinstance(event, Call):
            yield from self._add(CALL, event.arguments, event)
            yield from self._close()
        elif event.text:
            yield from self._add(event.channel, event.text)

    def _add(self, kind: str, text: str, call: Call | None = None) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._close()
            self._open = Block(kind, len(self.all), call=call)
            self.all.append(self._open)
            yield Change(OPENED, self._open)
        self._open.text += text
        yield Change(GREW, self._open, text)

    def _close(self) -> Iterator[Change]:
        if self._open is not None:
            block, self._open = self._open, None
            yield Change(CLOSED, block)
