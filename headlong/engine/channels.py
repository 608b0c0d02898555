"""Reasoning and answer told apart in a text as it comes."""

from collections import deque
from dataclasses import dataclass

OPENS, CLOSES = "<think>", "</think>"


@dataclass(frozen=True)
class Piece:
    """A part of one token's text."""

    text: str
    reasoning: bool = False
    position: int = 0  # as in `Emitted`


class Channels:
    """Takes the text of tokens, gives it back without the marks around the reasoning and the line ends beside them.

    Only a text that begins with the mark reasons. What may become a mark is held back; nothing else is. How the text
    is split into pushes changes the pieces, never what they join to.
    """

    def __init__(self, thinking: bool = False) -> None:
        self._reasons: bool | None = True if thinking else None  # None: the text may still open with the mark
        self._begun = not thinking  # otherwise line ends are left out
        self._held: deque[tuple[str, int]] = deque()  # texts and their positions

    @classmethod
    def after(cls, prompt: str) -> "Channels":
        """For what follows a prompt, whose template may have opened the reasoning itself."""
        return cls(thinking=prompt.rstrip().endswith(OPENS))

    def push(self, text: str, position: int = 0) -> list[Piece]:
        """The pieces that are now certain."""
        self._held.append((text, position))
        held = self._text
        if self._reasons is None:
            opening = held.lstrip()
            if len(opening) < len(OPENS) and OPENS.startswith(opening):
                return []
            self._reasons = opening.startswith(OPENS)
            if self._reasons:
                self._take(held.index(OPENS) + len(OPENS))
                self._begun = False
        return self._reasoning() if self._reasons else self._rest()

    def flush(self) -> list[Piece]:
        """What was held back, once no more text can come."""
        return self._rest()

    def _reasoning(self) -> list[Piece]:
        self._skip_line_ends()
        held = self._text
        end = held.find(CLOSES)
        if end < 0:
            return self._take(len(held[: len(held) - _possible_start(held)].rstrip("\n")))
        last = len(held[:end].rstrip("\n"))
        pieces = self._take(last)
        self._take(end + len(CLOSES) - last)
        self._reasons, self._begun = False, False
        return pieces + self._rest()

    def _rest(self) -> list[Piece]:
        self._skip_line_ends()
        return self._take(len(self._text))

    @property
    def _text(self) -> str:
        return "".join(text for text, _ in self._held)

    def _skip_line_ends(self) -> None:
        held = self._text
        if not self._begun:
            self._take(len(held) - len(held.lstrip("\n")))
            self._begun = bool(held.lstrip("\n"))

    def _take(self, count: int) -> list[Piece]:
        """The first so many characters, no longer held."""
        pieces = []
        while self._held and count >= 0:
            text, position = self._held.popleft()
            if text[count:]:
                self._held.appendleft((text[count:], position))
            if text[:count]:
                pieces.append(Piece(text[:count], bool(self._reasons), position))
            if text[count:]:
                break
            count -= len(text)
        return pieces


def _possible_start(held: str) -> int:
    """Length of the longest ending that begins the closing mark."""
    return next((size for size in range(len(CLOSES) - 1, 0, -1) if held.endswith(CLOSES[:size])), 0)
