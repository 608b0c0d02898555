"""One answer's tokens as events: reasoning, content, tool calls and its end."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headlong.engine.channels import Channels
from headlong.engine.request import Emitted, Logprob
from headlong.server.calls import Calls, Made, Part
from headlong.server.events import CONTENT, REASONING, Call, Event, Finish, Origin, Piece
from headlong.server.refusal import broken, stopping, too_many
from headlong.server.tools import Tools, new_call_id


class Reader:
    """Takes what rounds gave one answer. Without a prompt it is raw text, in which nothing is told apart."""

    def __init__(self, choice: int, prompt: str | None = None, tools: Tools | None = None) -> None:
        self.choice = choice
        self._channels = None if prompt is None else Channels.after(prompt)
        self._calls = Calls(tools) if tools else None
        self._channel = CONTENT
        self._made = 0
        self._tokens = 0
        self._reasoning_tokens = 0

    def read(self, emitted: Sequence[Emitted]) -> list[Event]:
        """The events of one round."""
        logprobs: list[Logprob] = []
        events: list[Piece | Call] = []
        for one in emitted:
            self._tokens += one.token is not None
            is_end_token = one.output is not None and self._tokens > len(one.output.tokens)
            if one.logprob and not is_end_token:
                logprobs.append(one.logprob)
            events += self._token(one)
        events = _merged(events)
        if logprobs:
            first, *others = events or [Piece(self.choice, self._channel)]
            events = [replace(first, logprobs=tuple(logprobs)), *others]
        last = emitted[-1]
        return [*events, self._finish(last)] if last.finish_reason is not None else [*events]

    def _token(self, one: Emitted) -> Iterator[Piece | Call]:
        for text, position, channel in self._told_apart(one):
            self._channel = channel
            if channel == CONTENT and self._calls:
                yield from map(self._event, self._calls.push(text, position))
            else:
                yield Piece(self.choice, channel, (Origin(text, position),))
        if one.finish_reason is not None and self._calls:
            yield from map(self._event, self._calls.flush())
        self._reasoning_tokens += one.token is not None and self._channel == REASONING

    def _told_apart(self, one: Emitted) -> list[tuple[str, int, str]]:
        if self._channels is None:
            return [(one.text, one.position, CONTENT)] if one.text else []
        pieces = self._channels.push(one.text, one.position)
        if one.finish_reason is not None:
            pieces += self._channels.flush()
        return [(piece.text, piece.position, REASONING if piece.reasoning else CONTENT) for piece in pieces]

    def _event(self, part: Part) -> Piece | Call:
        if not isinstance(part, Made):
            return Piece(self.choice, CONTENT, part)
        self._made += 1
        return Call(self.choice, self._made - 1, new_call_id(), part.name, part.arguments)

    def _finish(self, last: Emitted) -> Finish:
        output = last.output
        if output is None or output.finish_reason == "fault":
            raise broken()
        if output.finish_reason == "cancelled":
            raise stopping()
        if output.finish_reason == "deadline" and not output.tokens:
            raise too_many("the request waited for as long as it may take, and no row became free; try again later.")
        reason = "stop" if output.finish_reason == "stop" else "length"
        if self._made and reason == "stop":
            reason = "tool_calls"
        return Finish(self.choice, reason, output, self._reasoning_tokens)


def _merged(events: Sequence[Piece | Call]) -> list[Piece | Call]:
    """Neighbouring pieces of one channel as one."""
    merged: list[Piece | Call] = []
    for event in events:
        before = merged[-1] if merged else None
        if isinstance(event, Piece) and isinstance(before, Piece) and event.channel == before.channel:
            merged[-1] = replace(before, origins=before.origins + event.origins)
        else:
            merged.append(event)
    return merged
