"""The body of /v1/messages, and what it asks for."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue

from headlong.server.asked import Asked
from headlong.server.openai.common import Speculative
from headlong.server.refusal import Refusal
from headlong.server.tools import NAME, Message, Tool, Tools, chosen_tools
from headlong.server.wire import Wire

MOST_STOPS = 16
BLOCKS = ("text", "thinking", "tool_use", "tool_result")


class CacheControl(Wire):
    """Asks for what the prefix cache does anyway."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Wire):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: None = None


class Thinking(Wire):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(Wire):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, JsonValue]
    cache_control: CacheControl | None = None


class ToolResult(Wire):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


def _known_blocks(content: Any) -> Any:
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if kind not in BLOCKS:
            raise ValueError(f"holds a block of type {kind!r}; this server takes {', '.join(BLOCKS)}.")
    return content


Block = Annotated[TextBlock | Thinking | ToolUse | ToolResult, Field(discriminator="type")]


class Turn(Wire):
    role: Literal["user", "assistant"]
    content: Annotated[str | list[Block], BeforeValidator(_known_blocks)]


class ToolGiven(Wire):
    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingMode(Wire):
    """Whether the model may reason before it answers; for how long is its own matter here."""

    type: Literal["enabled", "disabled", "adaptive"]


class Metadata(Wire):
    user_id: str | None = None


class CountBody(Wire):
    """A conversation."""

    model_config = ConfigDict(title="CountTokensRequest")

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[ToolGiven] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingMode | None = None

    def asked(self) -> Asked:
        messages = [message for turn in self.messages for message in _messages(turn)]
        prefill = ""
        if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            prefill = messages.pop()["content"]
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        return Asked(messages=messages, prefill=prefill, tools=self._tools(), thinking=self._thinking())

    def _thinking(self) -> bool | None:
        return None if self.thinking is None or self.thinking.type == "adaptive" else self.thinking.type == "enabled"

    def _tools(self) -> Tools | None:
        choice = self.tool_choice or ToolChoice(type="auto")
        if not self.tools:
            if choice.type not in ("auto", "none"):
                raise Refusal(400, "tool_choice was given without tools; give some or leave it out.", "tool_choice")
            return None
        if (choice.type == "tool") is (choice.name is None):
            raise Refusal(400, "tool_choice names a tool if, and only if, its type is tool.", "tool_choice")
        tools = [Tool(each.name, each.description or "", each.input_schema, bool(each.strict)) for each in self.tools]
        said = {"any": "required", "tool": "auto"}.get(choice.type, choice.type)
        return chosen_tools(tools, said, choice.name, not choice.disable_parallel_tool_use)


class MessagesBody(CountBody):
    """A conversation to go on with."""

    model_config = ConfigDict(title="MessagesRequest")

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    metadata: Metadata | None = None
    seed: int | None = None
    speculative: Speculative | None = None

    def asked(self) -> Asked:
        names = ("temperature", "top_p", "top_k", "seed")
        options = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            options["stop"] = self.stop_sequences
        if self.speculative:
            options |= self.speculative.options()
        user = self.metadata.user_id if self.metadata else None
        return replace(super().asked(), max_tokens=self.max_tokens, options=options, user=user or "")


def _text(content: str | Sequence[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n\n".join(block.text for block in content or ())


def _messages(turn: Turn) -> Iterator[Message]:
    """A turn as chat templates take it: results of tools are messages of their own."""
    blocks = [TextBlock(type="text", text=turn.content)] if isinstance(turn.content, str) else turn.content
    text = _text([block for block in blocks if isinstance(block, TextBlock)])
    if turn.role == "assistant":
        yield _reply(blocks, text)
        return
    for block in blocks:
        if isinstance(block, ToolResult):
            said = _text(block.content)
            content = f"Error: {said}" if block.is_error else said
            yield {"role": "tool", "content": content, "tool_call_id": block.tool_use_id}
        elif not isinstance(block, TextBlock):
            raise Refusal(
                400, f"a user's message holds a block of type {block.type!r}; that is the model's.", "messages"
            )
    if text or not any(isinstance(block, ToolResult) for block in blocks):
        yield {"role": "user", "content": text}


def _reply(blocks: Sequence[TextBlock | Thinking | ToolUse | ToolResult], text: str) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    if any(isinstance(block, ToolResult) for block in blocks):
        raise Refusal(400, "an assistant's message holds a tool_result; that is the user's.", "messages")
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        functions = [{"name": call.name, "arguments": call.input} for call in calls]
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": function}
            for call, function in zip(calls, functions, strict=True)
        ]
    return message
