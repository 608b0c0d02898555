"""/v1/chat/completions: events as chunks, or folded into one completion."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headlong.engine.request import Logprob
from headlong.engine.text import Text
from headlong.server import accounts
from headlong.server.events import REASONING, Call, Event, Finish, Piece
from headlong.server.openai.common import StreamOptions
from headlong.server.refusal import Refusal
from headlong.server.respond import sse

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0  # for tokens that could not come at all: JSON has no infinity


class ChatWriter:
    """Tells of the answers to one request."""

    def __init__(self, model: str, text: Text, answers: int, told: StreamOptions) -> None:
        self._text, self._answers, self._told = text, answers, told
        self._head = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }
        self._finishes: list[Finish] = []

    # --- as chunks -----------------------------------------------------------------------------------------------

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        for choice in range(self._answers):
            yield self._chunk(choice, {"role": "assistant", "content": ""})

    def write(self, event: Event) -> Iterable[bytes]:
        if isinstance(event, Finish):
            self._finishes.append(event)
            last = len(self._finishes) == self._answers and not self._told.include_usage
            yield self._chunk(event.choice, {}, finish_reason=event.reason, **(self._accounts() if last else {}))
        elif isinstance(event, Call):
            yield self._chunk(event.choice, {"tool_calls": [_call_chunk(event)]}, event.logprobs)
        else:
            field = "reasoning_content" if event.channel == REASONING else "content"
            yield self._chunk(event.choice, {field: event.text}, event.logprobs, event)

    def end(self) -> Iterable[bytes]:
        if self._told.include_usage:
            yield sse(self._object("chat.completion.chunk", [], usage=self._usage(), **self._accounts()))
        yield DONE

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield sse(refusal.body(""))
        yield DONE

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[Logprob] = (),
        piece: Piece | None = None,
        finish_reason: str | None = None,
        **more: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": self._logprobs(logprobs), "finish_reason": finish_reason}
        if self._told.include_origins:
            origins = piece.origins if piece else ()
            choice["origins"] = [{"text": origin.text, "position": origin.position} for origin in origins]
        if self._told.include_usage:
            more["usage"] = None
        return sse(self._object("chat.completion.chunk", [choice], **more))

    # --- as one --------------------------------------------------------------------------------------------------

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        self._finishes += [event for event in events if isinstance(event, Finish)]
        choices = [self._choice([event for event in events if event.choice == place]) for place in range(self._answers)]
        return self._object("chat.completion", choices, usage=self._usage(), **self._accounts())

    def _choice(self, events: Sequence[Event]) -> dict[str, Any]:
        pieces = [event for event in events if isinstance(event, Piece)]
        calls = [event for event in events if isinstance(event, Call)]
        finish = next(event for event in events if isinstance(event, Finish))
        content = "".join(piece.text for piece in pieces if piece.channel != REASONING)
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not content else content}
        if any(piece.channel == REASONING for piece in pieces):
            message["reasoning_content"] = "".join(piece.text for piece in pieces if piece.channel == REASONING)
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = [one for event in events if not isinstance(event, Finish) for one in event.logprobs]
        return {
            "index": finish.choice,
            "message": message,
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish.reason,
        }

    # --- what both have ------------------------------------------------------------------------------------------

    def _object(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        return {"id": self._head["id"], "object": kind, **self._head, "choices": choices, **more}

    def _usage(self) -> dict[str, Any]:
        return accounts.usage(self._finishes, prompts=1)

    def _accounts(self) -> dict[str, Any]:
        return {"speculative": accounts.speculative(self._finishes), "timings": accounts.timings(self._finishes)}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any] | None:
        return {"content": [self._logprob(one) for one in logprobs], "refusal": None} if logprobs else None

    def _logprob(self, one: Logprob) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in one.top]
        return {**self._token(one.token, one.logprob), "top_logprobs": top}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._text.bytes_of(token)
        return {"token": spelled(raw), "logprob": max(logprob, LEAST_LOGPROB), "bytes": list(raw)}


def spelled(raw: bytes) -> str:
    """A token's text; bytes that are no characters are escaped."""
    return raw.decode(errors="backslashreplace")


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_chunk(call: Call) -> dict[str, Any]:
    return {"index": call.number, **_call(call)}
