"""/v1/completions: events as chunks, or folded into one completion."""

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from headlong.engine.request import Logprob
from headlong.engine.text import Text
from headlong.server import accounts
from headlong.server.events import Event, Finish, Piece
from headlong.server.openai.chat import DONE, LEAST_LOGPROB, spelled
from headlong.server.openai.common import StreamOptions
from headlong.server.refusal import Refusal
from headlong.server.respond import sse


class CompletionWriter:
    """Tells of the answers to one request."""

    def __init__(self, model: str, text: Text, prompts: int, answers: int, told: StreamOptions) -> None:
        self._text, self._prompts, self._answers, self._told = text, prompts, answers, told
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._finishes: list[Finish] = []
        self._told_characters = [0] * answers

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        return ()

    def write(self, event: Event) -> Iterable[bytes]:
        more: dict[str, Any] = {}
        if isinstance(event, Finish):
            self._finishes.append(event)
            if len(self._finishes) == self._answers and not self._told.include_usage:
                more = self._accounts()
        if self._told.include_usage:
            more["usage"] = None
        choice = self._choice([event])
        if self._told.include_origins:
            origins = event.origins if isinstance(event, Piece) else ()
            choice["origins"] = [{"text": origin.text, "position": origin.position} for origin in origins]
        yield sse({**self._head, "choices": [choice], **more})

    def end(self) -> Iterable[bytes]:
        if self._told.include_usage:
            yield sse({**self._head, "choices": [], "usage": self._usage(), **self._accounts()})
        yield DONE

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield sse(refusal.body(""))
        yield DONE

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        self._finishes += [event for event in events if isinstance(event, Finish)]
        choices = [self._choice([event for event in events if event.choice == place]) for place in range(self._answers)]
        return {**self._head, "choices": choices, "usage": self._usage(), **self._accounts()}

    def _choice(self, events: Sequence[Event]) -> dict[str, Any]:
        finish = next((event.reason for event in events if isinstance(event, Finish)), None)
        pieces = [event for event in events if isinstance(event, Piece)]
        place = events[0].choice
        logprobs = self._logprobs([one for piece in pieces for one in piece.logprobs], place)
        text = "".join(piece.text for piece in pieces)
        return {"index": place, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, logprobs: Sequence[Logprob], place: int) -> dict[str, Any] | None:
        if not logprobs:
            return None
        tokens = [spelled(self._text.bytes_of(one.token)) for one in logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._told_characters[place])
            self._told_characters[place] += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, one: Logprob) -> dict[str, float]:
        return {spelled(self._text.bytes_of(token)): max(logprob, LEAST_LOGPROB) for token, logprob in one.top}

    def _usage(self) -> dict[str, Any]:
        return accounts.usage(self._finishes, self._prompts)

    def _accounts(self) -> dict[str, Any]:
        return {"speculative": accounts.speculative(self._finishes), "timings": accounts.timings(self._finishes)}
