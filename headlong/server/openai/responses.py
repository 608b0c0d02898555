"""/v1/responses: events as OpenAI streams them, or folded into one response."""

import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headlong.server import accounts
from headlong.server.blocks import CALL, CLOSED, GREW, OPENED, Block, Blocks, Change
from headlong.server.events import REASONING, Event, Finish
from headlong.server.openai.responses_schema import ResponsesBody
from headlong.server.refusal import Refusal
from headlong.server.respond import sse

PREFIXES = {REASONING: "rs", CALL: "fc"}


class ResponseWriter:
    """Tells of the answer to one request."""

    def __init__(self, model: str, body: ResponsesBody) -> None:
        self._id, self._created, self._model, self._body = (
            f"resp_{secrets.token_hex(12)}",
            int(time.time()),
            model,
            body,
        )
        self._blocks = Blocks()
        self._finish: Finish | None = None
        self._numbers = itertools.count()

    def begin(self, prompt_tokens: int) -> Iterable[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response("in_progress"))

    def write(self, event: Event) -> Iterable[bytes]:
        if isinstance(event, Finish):
            self._finish = event
        for change in self._blocks.take(event):
            yield from self._changed(change)

    def end(self) -> Iterable[bytes]:
        yield self._event(f"response.{self._status}", response=self._ended())

    def fail(self, refusal: Refusal) -> Iterable[bytes]:
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        yield self._event("response.failed", response={**self._response("failed"), "error": error})

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        for event in events:
            if isinstance(event, Finish):
                self._finish = event
            for _ in self._blocks.take(event):
                pass
        return self._ended()

    # --- the stream ----------------------------------------------------------------------------------------------

    def _changed(self, change: Change) -> Iterator[bytes]:
        block = change.block
        item = self._item(block, self._status_of(block) if change.what == CLOSED else "in_progress")
        where = {"item_id": item["id"], "output_index": block.place}
        kind = "reasoning_text" if block.kind == REASONING else "output_text"
        part = {**where, "content_index": 0}
        if change.what == OPENED:
            yield self._event("response.output_item.added", output_index=block.place, item=item)
            if block.kind != CALL:
                yield self._event("response.content_part.added", **part, part=_part(kind, ""))
        elif change.what == GREW and block.kind == CALL:
            yield self._event("response.function_call_arguments.delta", **where, delta=change.text)
        elif change.what == GREW:
            yield self._event(f"response.{kind}.delta", **part, delta=change.text, **_logprobs(kind))
        elif block.kind == CALL:
            named = {"name": item["name"], "arguments": block.text}
            yield self._event("response.function_call_arguments.done", **where, **named)
            yield self._event("response.output_item.done", output_index=block.place, item=item)
        else:
            yield self._event(f"response.{kind}.done", **part, text=block.text, **_logprobs(kind))
            yield self._event("response.content_part.done", **part, part=_part(kind, block.text))
            yield self._event("response.output_item.done", output_index=block.place, item=item)

    def _event(self, kind: str, **content: Any) -> bytes:
        return sse({"type": kind, "sequence_number": next(self._numbers), **content}, kind)

    # --- the response --------------------------------------------------------------------------------------------

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish and self._finish.reason == "length" else "completed"

    def _status_of(self, block: Block) -> str:
        """What a block came to once it is closed: the last one has the end of the answer, and calls are whole."""
        return self._status if block is self._blocks.all[-1] and block.call is None else "completed"

    def _ended(self) -> dict[str, Any]:
        finishes = [self._finish] if self._finish else []
        told = accounts.usage(finishes, 1)
        usage = {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": told["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": told["total_tokens"],
        }
        return {
            **self._response(self._status),
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "output": [self._item(block, self._status_of(block)) for block in self._blocks.all],
            "usage": usage,
            "speculative": accounts.speculative(finishes),
            "timings": accounts.timings(finishes),
        }

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body.model_dump(by_alias=True)
        said = ("instructions", "max_output_tokens", "temperature", "top_p", "user")
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            **{name: body[name] for name in said},
            "metadata": body["metadata"] or {},
            "parallel_tool_calls": body["parallel_tool_calls"] is not False,
            "previous_response_id": None,
            "store": False,
            "text": body["text"] or {"format": {"type": "text"}},
            "tool_choice": body["tool_choice"] or "auto",
            "tools": body["tools"] or [],
            "truncation": "disabled",
            "usage": None,
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        identity = f"{PREFIXES.get(block.kind, 'msg')}_{self._id.removeprefix('resp_')}_{block.place}"
        done = status != "in_progress"
        if block.call is not None:
            call = {"call_id": block.call.id, "name": block.call.name, "arguments": block.text if done else ""}
            return {"type": "function_call", "id": identity, "status": status, **call}
        if block.kind == REASONING:
            content = [_part("reasoning_text", block.text)] if done else []
            return {"type": "reasoning", "id": identity, "status": status, "summary": [], "content": content}
        content = [_part("output_text", block.text)] if done else []
        return {"type": "message", "id": identity, "status": status, "role": "assistant", "content": content}


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {}), **_logprobs(kind)}


def _logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "output_text" else {}
