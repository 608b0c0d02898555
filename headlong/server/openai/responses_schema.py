"""The body of /v1/responses, and what it asks for."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from headlong.server.asked import Asked
from headlong.server.openai.chat_schema import ANY_OBJECT, ObjectFormat, TextFormat, called
from headlong.server.openai.common import Speculative
from headlong.server.refusal import Refusal
from headlong.server.tools import NAME, Message, Tool, Tools, chosen_tools
from headlong.server.wire import Wire

PARTS = ("input_text", "output_text")
ITEMS = ("message", "function_call", "function_call_output", "reasoning")
Status = Literal["in_progress", "completed", "incomplete"]


class Part(Wire):
    """Text. What came with an answer may be sent back as it came."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: Annotated[list[JsonValue], Field(max_length=0)] | None = None


def _only_text(content: Any) -> Any:
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PARTS:
            raise ValueError(f"holds a part of type {kind!r}; this server takes {' and '.join(PARTS)}.")
    return content


class MessageItem(Wire):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[Part], BeforeValidator(_only_text)]
    id: str | None = None
    status: Status | None = None


class CallItem(Wire):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None


class ResultItem(Wire):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: Status | None = None


class Thought(Wire):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Wire):
    type: Literal["reasoning"]
    summary: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    content: list[Thought] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: Status | None = None


def _kind(item: Any) -> Any:
    """A message need not say that it is one."""
    if isinstance(item, dict) and "type" not in item:
        return {"type": "message", **item}
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(item, dict) and kind not in ITEMS:
        raise ValueError(f"is of type {kind!r}; this server takes {', '.join(ITEMS)}.")
    return item


Item = Annotated[
    Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, Field(discriminator="type")], BeforeValidator(_kind)
]


class FunctionTool(Wire):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class NamedChoice(Wire):
    type: Literal["function"]
    name: str


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    name: str
    description: str | None = None
    strict: bool | None = None
    shape: Annotated[dict[str, JsonValue], Field(alias="schema")]


class TextOptions(Wire):
    format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class ResponsesBody(Wire):
    """A conversation to go on with."""

    model_config = ConfigDict(title="ResponsesRequest")

    input: str | Annotated[list[Item], Field(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None
    store: Literal[False] | None = None  # nothing is
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    seed: int | None = None
    speculative: Speculative | None = None

    def asked(self) -> Asked:
        options = {
            name: value for name in ("temperature", "top_p", "seed") if (value := getattr(self, name)) is not None
        }
        if self.speculative:
            options |= self.speculative.options()
        return Asked(
            messages=self._messages(),
            tools=self._tools(),
            schema=self._schema(),
            max_tokens=self.max_output_tokens,
            options=options,
            user=self.user or "",
        )

    def _messages(self) -> list[Message]:
        said = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        first: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*first, *_messages(said)]

    def _schema(self) -> dict[str, Any] | None:
        form = self.text.format if self.text else None
        if isinstance(form, SchemaFormat):
            return form.shape
        return ANY_OBJECT if isinstance(form, ObjectFormat) else None

    def _tools(self) -> Tools | None:
        if not self.tools:
            if self.tool_choice not in (None, "auto", "none"):
                raise Refusal(400, "tool_choice was given without tools; give some or leave it out.", "tool_choice")
            return None
        tools = [
            Tool(each.name, each.description or "", each.parameters or ANY_OBJECT, bool(each.strict))
            for each in self.tools
        ]
        named = self.tool_choice.name if isinstance(self.tool_choice, NamedChoice) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else "auto"
        return chosen_tools(tools, choice, named, self.parallel_tool_calls is not False)


def _messages(items: Sequence[MessageItem | CallItem | ResultItem | ReasoningItem]) -> Iterator[Message]:
    """Items as chat templates take them: what the assistant thought, said and called in a row is one message."""
    reply: dict[str, Any] = {}
    for item in items:
        is_reply = isinstance(item, CallItem | ReasoningItem) or getattr(item, "role", "") == "assistant"
        if reply and not is_reply:
            yield reply
            reply = {}
        if is_reply:
            reply = _grown(reply or {"role": "assistant", "content": ""}, item)
        elif isinstance(item, ResultItem):
            yield {"role": "tool", "content": item.output, "tool_call_id": item.call_id}
        elif isinstance(item, MessageItem):
            yield {"role": "system" if item.role == "developer" else item.role, "content": _text(item)}
    if reply:
        yield reply


def _grown(reply: dict[str, Any], item: object) -> dict[str, Any]:
    if isinstance(item, CallItem):
        call = called(item.call_id, item.name, item.arguments)
        return {**reply, "tool_calls": [*reply.get("tool_calls", ()), call]}
    if isinstance(item, ReasoningItem):
        thought = "".join(part.text for part in item.content or ())
        return {**reply, "reasoning_content": reply.get("reasoning_content", "") + thought}
    return {**reply, "content": reply["content"] + _text(item)} if isinstance(item, MessageItem) else reply


def _text(item: MessageItem) -> str:
    return item.content if isinstance(item.content, str) else "".join(part.text for part in item.content)
