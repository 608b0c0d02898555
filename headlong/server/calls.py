"""Tool calls told apart from the text around them, as it comes."""

from collections import deque
from dataclasses import dataclass

from headlong.server.events import Origin
from headlong.server.tools import CALL_CLOSE, CALL_OPEN, Tools


@dataclass(frozen=True)
class Made:
    """A call that the model made."""

    name: str
    arguments: str  # a JSON object


Part = tuple[Origin, ...] | Made


class Calls:
    """Takes a text with its origins, gives what is certain of it: text, and calls once they are whole.

    What may be the beginning of a call waits. A call that is none, or of no known tool, stays text.
    """

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._held = ""
        self._origins: deque[Origin] = deque()
        self._inside = False  # after the tag that opens a call
        self._after = False  # after a call: spaces are left out

    def push(self, text: str, position: int) -> list[Part]:
        self._held += text
        self._origins.append(Origin(text, position))
        parts: list[Part] = []
        while (part := self._next()) is not None:
            parts.append(part)
        return [part for part in parts if part]

    def flush(self) -> list[Part]:
        """What was held back, once no more text can come; a call may lack its closing tag."""
        part = self._call(len(self._held), "") if self._inside else self._take(len(self._held))
        return [part] if part else []

    def _next(self) -> Part | None:
        """The next part that is certain; an empty one where only tags and spaces were passed; None if there is none."""
        if self._inside:
            end = self._held.find(CALL_CLOSE)
            return None if end < 0 else self._call(end, CALL_CLOSE)
        if self._after:
            self._take(len(self._held) - len(self._held.lstrip()))
            self._after = not self._held
        if self._held.startswith(CALL_OPEN):
            self._take(len(CALL_OPEN))
            self._inside = True
            return ()
        certain = self._certain()
        return self._take(certain) if certain else None

    def _certain(self) -> int:
        """Characters before anything that is, or may become, the tag that opens a call."""
        at = self._held.find(CALL_OPEN)
        if at >= 0:
            return at
        longest = min(len(CALL_OPEN) - 1, len(self._held))
        tail = next((size for size in range(longest, 0, -1) if CALL_OPEN.startswith(self._held[-size:])), 0)
        return len(self._held) - tail

    def _call(self, size: int, close: str) -> Part:
        made = self._tools.parse(self._held[:size])
        inside = self._take(size + len(close))
        self._inside, self._after = False, made is not None
        return (Origin(CALL_OPEN, 0), *inside) if made is None else Made(*made)

    def _take(self, count: int) -> tuple[Origin, ...]:
        """The first so many characters."""
        taken = []
        self._held = self._held[count:]
        while count > 0:
            first = self._origins.popleft()
            if len(first.text) > count:
                self._origins.appendleft(Origin(first.text[count:], first.position))
                first = Origin(first.text[:count], first.position)
            taken.append(first)
            count -= len(first.text)
        return tuple(origin for origin in taken if origin.text)
