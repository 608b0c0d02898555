"""The body of /v1/chat/completions, and what it asks for."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, JsonValue

from headlong.server.asked import Asked
from headlong.server.openai.common import Content, Prediction, Sampled, text_of
from headlong.server.refusal import Refusal
from headlong.server.tools import NAME, Message, Tool, Tools, chosen_tools, read_json
from headlong.server.wire import Wire

ANY_OBJECT = {"type": "object"}


class Function(Wire):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(Wire):
    type: Literal["function"]
    function: Function


class Named(Wire):
    name: str


class NamedChoice(Wire):
    type: Literal["function"]
    function: Named


class JsonSchema(Wire):
    name: str
    description: str | None = None
    strict: bool | None = None
    shape: Annotated[dict[str, JsonValue] | None, Field(alias="schema")] = None


class TextFormat(Wire):
    type: Literal["text"]


class ObjectFormat(Wire):
    type: Literal["json_object"]


class SchemaFormat(Wire):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Called(Wire):
    name: str
    arguments: str


class ToolCall(Wire):
    id: str
    type: Literal["function"] = "function"
    function: Called


class Instruction(Wire):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class Question(Wire):
    role: Literal["user"]
    content: Content
    name: str | None = None


class Reply(Wire):
    """What the assistant said before. A field that can only be null may be sent back as it came."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None


class Result(Wire):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


Turn = Annotated[Instruction | Question | Reply | Result, Field(discriminator="role")]


class ChatBody(Sampled):
    """A conversation to go on with."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: Annotated[list[Turn], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: Format | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None

    def asked(self) -> Asked:
        return Asked(
            messages=[message_of(turn) for turn in self.messages],
            tools=self._tools(),
            schema=self._schema(),
            template=self.chat_template_kwargs or {},
            max_tokens=self._max_tokens(),
            options=self._options(),
            user=self.user or "",
        )

    def _max_tokens(self) -> int | None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens differ, and mean the same; leave one out."
            raise Refusal(400, message, "max_tokens")
        return self.max_completion_tokens or self.max_tokens

    def _options(self) -> dict[str, Any]:
        options = self.options()
        if self.top_logprobs is not None and not self.logprobs:
            raise Refusal(400, "top_logprobs was given without logprobs; set logprobs or leave it out.", "top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        if self.prediction is not None:
            options["prediction"] = text_of(self.prediction.content)
        return options

    def _schema(self) -> dict[str, Any] | None:
        if isinstance(self.response_format, ObjectFormat):
            return ANY_OBJECT
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.shape or ANY_OBJECT
        return None

    def _tools(self) -> Tools | None:
        if not self.tools:
            for name in ("tool_choice", "parallel_tool_calls"):
                if getattr(self, name) not in (None, "none", "auto"):
                    raise Refusal(400, f"{name} was given without tools; give some or leave it out.", name)
            return None
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedChoice) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else "auto"
        parallel = self.parallel_tool_calls is not False
        return chosen_tools([tool_of(each.function) for each in self.tools], choice, named, parallel)


def tool_of(function: Function) -> Tool:
    return Tool(function.name, function.description or "", function.parameters or ANY_OBJECT, bool(function.strict))


def message_of(turn: Turn) -> Message:
    """A turn as chat templates take it."""
    role = "system" if turn.role == "developer" else turn.role
    message: dict[str, Any] = {"role": role, "content": text_of(turn.content)}
    if turn.name is not None:
        message["name"] = turn.name
    if isinstance(turn, Result):
        message["tool_call_id"] = turn.tool_call_id
    if isinstance(turn, Reply):
        if turn.reasoning_content is not None:
            message["reasoning_content"] = turn.reasoning_content
        if turn.tool_calls:
            message["tool_calls"] = [
                called(call.id, call.function.name, call.function.arguments) for call in turn.tool_calls
            ]
    return message


def called(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call that was made, as chat templates take it: with its arguments as an object."""
    try:
        given = read_json(arguments or "{}")
    except ValueError:
        given = None
    if not isinstance(given, dict):
        message = f"the arguments of a call of {name!r} are not a JSON object; send those that came."
        raise Refusal(400, message, "messages")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
