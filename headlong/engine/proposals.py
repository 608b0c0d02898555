"""Proposals from token ids alone: what followed the same words before, and what a caller expects to come."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Protocol

LEAST = 3  # tokens that must have stood together before, for what followed them to be proposed
SIGN = 4  # tokens that show where a prediction goes on, wherever they stand in it
NEAR_SIGNS = ((2, 32), (1, 8))  # tokens that show it when they end at most so far after the sure place
SURE = 8  # tokens in a row after which a prediction is being followed, not met by chance


class Proposer(Protocol):
    """Guesses a row's next tokens. Its guesses depend on the tokens alone, not on how calls split them."""

    name: str

    def matches(self, least: int) -> bool:
        """Whether at least so many tokens speak for the next proposal: the more, the likelier it is right."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Take tokens that became part of the row's text."""

    def propose(self, most: int) -> tuple[int, ...]:
        """At most `most` tokens for what comes next; none when nothing promises."""


class Ngram:
    """What followed the text's last tokens when they stood in it before. It is told the prompt and the output.

    An earlier place is followed as long as it is right, so that a copied text is not left for a later place which
    shares only its last few tokens. Then the latest place of the longest n-gram is taken. Longer ones than `least` + 1
    need no index: once a place has been right, more than that agree. Tokens are looked at when it matters: many at once
    take less.
    """

    name = "ngram"

    def __init__(self, tokens: Sequence[int] = (), least: int = LEAST) -> None:
        self._least = least
        self._new: list[int] = []  # tokens that were not looked at yet
        self._text: list[int] = []
        self._tail: tuple[int, ...] = ()  # the text's last `least` tokens
        self._ends: dict[tuple[int, ...], int] = {}  # where an n-gram's latest occurrence ends
        self._next = 0  # place of the token that should come next
        self._agreed = 0  # tokens before that place that are also the text's last; 0: no place is followed
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._new += tokens

    def _catch_up(self) -> None:
        if not self._new:
            return
        # Names of its own instead of attributes: a prompt goes through here in one call.
        tokens, self._new = self._new, []
        text, ends, least = self._text, self._ends, self._least
        tail, place, agreed = self._tail, self._next, self._agreed
        for token in tokens:
            right = agreed and text[place] == token
            text.append(token)
            longer = (*tail, token)
            tail = longer[-least:]
            if right:
                place, agreed = place + 1, agreed + 1
            elif place := ends.get(longer, 0):
                agreed = least + 1
            else:
                place = ends.get(tail, 0)
                agreed = least if place else 0
            if len(tail) == least:
                ends[longer] = ends[tail] = len(text)
        self._tail, self._next, self._agreed = tail, place, agreed

    @property
    def match(self) -> int:
        self._catch_up()
        return self._agreed

    def matches(self, least: int) -> bool:
        # With each new token one more agrees at most, and a place that was just found has `least` + 1.
        return max(self._agreed, self._least) + len(self._new) >= least and self.match >= least

    def propose(self, most: int) -> tuple[int, ...]:
        self._catch_up()
        if not self._agreed:
            return ()
        period = len(self._text) - self._next  # past the text's end it goes on as its proposal began
        return tuple(self._text[self._next + step % period] for step in range(most))


class Prediction:
    """A text that the output is expected to resemble. It is told the output alone.

    Where the two part nothing is proposed until the output's last tokens show where the prediction goes on.
    """

    name = "prediction"

    def __init__(self, text: Sequence[int]) -> None:
        self._text = tuple(text)
        self._ends: dict[tuple[int, ...], list[int]] = {}  # where a sign's occurrences end, ascending
        for end in range(SIGN, len(self._text) + 1):
            self._ends.setdefault(self._text[end - SIGN : end], []).append(end)
        self._last: deque[int] = deque(maxlen=SIGN)  # of the output
        self._next = 0  # place of the token that should come next
        self._agreed = 0  # tokens before that place that are also the output's last
        self._sure = 0  # the last such place that SURE tokens led to
        self._parted = False

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._last.append(token)
            if not self._parted and self._text[self._next : self._next + 1] == (token,):
                self._follow(self._next + 1, self._agreed + 1)
            else:
                self._realign()

    @property
    def match(self) -> int:
        return 0 if self._parted else self._agreed

    def matches(self, least: int) -> bool:
        return self.match >= least

    def propose(self, most: int) -> tuple[int, ...]:
        return () if self._parted else self._text[self._next : self._next + most]

    def _follow(self, place: int, agreed: int) -> None:
        self._next, self._agreed, self._parted = place, agreed, False
        if agreed >= SURE:
            self._sure = place

    def _realign(self) -> None:
        """Go on where the output's last tokens stand in the prediction, if that can be told."""
        self._parted = True
        last = tuple(self._last)
        if ends := self._ends.get(last):
            after = bisect_right(ends, self._sure)
            self._follow(ends[min(after, len(ends) - 1)], SIGN)
            return
        for size, reach in NEAR_SIGNS:
            sign = last[-size:]
            for end in range(self._sure + 1, min(self._sure + reach, len(self._text)) + 1):
                if self._text[end - size : end] == sign:
                    self._follow(end, size)
                    return
