"""/v1/messages: events as Anthropic streams them, or folded into one message."""

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headlong.server import accounts
from headlong.server.blocks import CLOSED, GREW, Block, Blocks, Change
from headlong.server.events import CONTENT, REASONING, Event, Finish
from headlong.server.refusal import ANTHROPIC_PATH, Refusal
from headlong.server.respond import sse
from headlong.server.tools import CALL_CLOSE

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
DELTAS = {CONTENT: ("text_delta", "text"), REASONING: ("thinking_delta", "thinking")}


class MessageWriter:
    """Tells of the answer to one request."""

    def __init__(self, model: str) -> None:
        self._head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}
        self._blocks = Blocks()
        self._finish: Finish | None = None

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _event("message_start", message=message)

    def write(self, event: Event) -> Iterable[bytes]:
        if isinstance(event, Finish):
            self._finish = event
        for change in self._blocks.take(event):
            yield from _changed(change)

    def end(self) -> Iterable[bytes]:
        yield _event("message_delta", delta=self._stop(), usage=self._usage(), **self._accounts())
        yield _event("message_stop")

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        yield sse(refusal.body(ANTHROPIC_PATH), "error")

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            if isinstance(event, Finish):
                self._finish = event
            for _ in self._blocks.take(event):
                pass
        content = [_block(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._stop(), "usage": self._usage(), **self._accounts()}

    @property
    def _finishes(self) -> list[Finish]:
        return [self._finish] if self._finish else []

    def _stop(self) -> dict[str, Any]:
        (finish,) = self._finishes
        stopped_by = finish.output.stopped_by
        if finish.reason == "stop" and stopped_by not in ("", CALL_CLOSE):  # that one is ours
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
        return {"stop_reason": STOP_REASONS[finish.reason], "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        told, cached = accounts.usage(self._finishes, 1), accounts.cached(self._finishes, 1)
        return {
            "input_tokens": told["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"],
        }

    def _accounts(self) -> dict[str, Any]:
        return {"speculative": accounts.speculative(self._finishes), "timings": accounts.timings(self._finishes)}


def _event(kind: str, **content: Any) -> bytes:
    return sse({"type": kind, **content}, kind)


def _changed(change: Change) -> Iterator[bytes]:
    block = change.block
    if change.what == CLOSED:
        yield _event("content_block_stop", index=block.place)
    elif change.what == GREW:
        kind, field = DELTAS.get(block.kind, ("input_json_delta", "partial_json"))
        yield _event("content_block_delta", index=block.place, delta={"type": kind, field: change.text})
    else:
        yield _event("content_block_start", index=block.place, content_block=_block(block))


def _block(block: Block) -> dict[str, Any]:
    if block.kind == REASONING:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is not None:
        given = json.loads(block.text) if block.text else {}
        return {"type": "tool_use", "id": block.call.id, "name": block.call.name, "input": given}
    return {"type": "text", "text": block.text}
