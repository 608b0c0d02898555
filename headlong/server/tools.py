"""Tools: how a model is told of them, how its calls are read, and the text that a call must be."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from headlong.server.refusal import Refusal

NAME = r"^[a-zA-Z0-9_.:-]{1,64}$"  # of a tool
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
XML_MARK = "<function="  # in templates of models that write calls as XML
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

Message = Mapping[str, Any]  # as chat templates take it


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # a JSON schema
    strict: bool = False  # calls must fit the schema, even if the model may also not call

    def told(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools of one request, and which of them may or must be called."""

    known: tuple[Tool, ...]
    choice: str = "auto"  # or "required"; the name of a tool that must be called is in `named`
    named: str | None = None
    parallel: bool = True  # several calls in one answer
    as_xml: bool = False  # how this model writes its calls

    @property
    def must_call(self) -> bool:
        return self.choice == "required" or self.named is not None

    @property
    def callable(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.known if self.named in (None, tool.name))

    def parse(self, text: str) -> tuple[str, str] | None:
        """The name and the arguments, as JSON, of what stands between the tags of a call; None if it is no call."""
        call = _parse_json(text) if text.lstrip().startswith("{") else self._parse_xml(text)
        if call is None or call[0] not in {tool.name for tool in self.known}:
            return None
        name, arguments = call
        return name, json.dumps(arguments, ensure_ascii=False)

    def _parse_xml(self, text: str) -> tuple[str, dict[str, Any]] | None:
        found = FUNCTION.fullmatch(text)
        if found is None:
            return None
        name, inside = found.groups()
        schemas = next((properties_of(tool.parameters) for tool in self.known if tool.name == name), {})
        return name, {key: _typed(value, schemas.get(key, {})) for key, value in PARAMETER.findall(inside)}


def read_json(text: str) -> Any:
    """JSON that can be sent on as JSON in UTF-8: without NaN and halves of characters; else a ValueError."""
    return from_json(text, allow_inf_nan=False)


def _parse_json(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = read_json(text)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", {})
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def properties_of(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _typed(value: str, schema: Any) -> Any:
    """A parameter's text as what its schema asks for; text stays text."""
    if isinstance(schema, dict) and is_text(schema):
        return value
    try:
        return read_json(value)
    except ValueError:
        return value


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """The only values there are, where a schema names them."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def is_text(schema: Mapping[str, Any]) -> bool:
    values = choices_of(schema)
    return all(isinstance(value, str) for value in values) if values else schema.get("type") == "string"


def chosen_tools(tools: list[Tool], choice: str, named: str | None, parallel: bool) -> Tools | None:
    """The tools of a request, however its API said which to use; None if none may be."""
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise Refusal(400, f"two tools are called {twice!r}; give each a name of its own.", "tools")
    if named is not None and named not in names:
        raise Refusal(400, f"tool_choice names {named!r}; the tools are {', '.join(names)}.", "tool_choice")
    return None if choice == "none" else Tools(tuple(tools), choice, named, parallel)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


# --- models whose template knows no tools ---------------------------------------------------------------------------


def told_in_words(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
    """The conversation with its tools, calls and results as plain text."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    first = plain[0]["content"] if plain and plain[0]["role"] == "system" else ""
    rest = plain[1:] if first else plain
    return [{"role": "system", "content": f"{first}\n\n{_catalogue(tools)}".lstrip()}, *rest]


def _catalogue(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(tool.told(), ensure_ascii=False) for tool in tools)
    return (
        f"You can call functions. These are the functions, one a line:\n<tools>\n{lines}\n</tools>\n\n"
        "To call one, write its name and arguments as a JSON object between tags:\n"
        f'{CALL_OPEN}\n{{"name": "...", "arguments": {{...}}}}\n{CALL_CLOSE}'
    )


def _plain(message: Message) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    parts = [content] * bool(content) + [f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}" for call in calls]
    return {"role": message["role"], "content": "\n".join(parts)}
