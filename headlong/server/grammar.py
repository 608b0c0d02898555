"""The text that an answer must be: JSON, calls of tools, or thoughts before either."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headlong.server.tools import CALL_CLOSE, CALL_OPEN, Tool, Tools, is_text

if TYPE_CHECKING:
    from headlong.engine.text import Text

MOST_CALLS = 8  # in one answer that must have some
# As models write JSON in their calls; for answers, spaces and new lines as the engine's schemas have them.
IN_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
IN_ANSWERS = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
ANY_TEXT = "/(.|\\n)*/"


def constraint_of(schema: Mapping[str, Any] | None, tools: Tools | None, thinks: bool, text: "Text") -> dict[str, Any]:
    """The engine's option that holds an answer to its schema and to its tools; none if nothing must hold."""
    must_call = tools is not None and tools.must_call
    strict = tools is not None and any(tool.strict for tool in tools.known)
    if schema is not None and tools is None and not thinks:
        return {"json_schema": schema}
    if schema is None and not must_call and not strict:
        return {}
    return {"grammar": "\n".join(_rules(schema, tools, thinks, text))}


def _rules(schema: Mapping[str, Any] | None, tools: Tools | None, thinks: bool, text: "Text") -> Iterator[str]:
    yield f"start: {'thoughts ' * thinks}answer"
    if thinks:
        yield from _until("thoughts", "</think>", text)
    calls = bool(tools and tools.known)
    if tools and tools.must_call:
        yield f"answer: call{_more(tools)}"
    elif schema is not None:
        yield "answer: json" + " | call_first" * calls
    else:
        yield f'answer: words (call "\\n"?){{0,{MOST_CALLS}}}'
        yield f"words: {ANY_TEXT if text.has_token(CALL_OPEN) else 'WORDS'}"
    if schema is not None and not (tools and tools.must_call):
        yield f"json: {_json(schema, IN_ANSWERS)}"
        yield f"call_first: call{_more(tools)}" if tools and calls else ""
    if tools and calls:
        yield from _call_rules(tools, text)


def _more(tools: Tools) -> str:
    single = tools.named is not None or not tools.parallel
    return "" if single else f' ("\\n" call){{0,{MOST_CALLS - 1}}}'


def _until(name: str, tag: str, text: "Text") -> Iterator[str]:
    """Any text, the tag, and an empty line."""
    if text.has_token(tag):
        yield f'{name}: {ANY_TEXT} {tag} "\\n\\n"'
    else:
        yield f"{name}: {name.upper()}"
        yield f"{name.upper()}[lazy]: /(.|\\n)*{_escaped(tag)}\\n\\n/"


def _call_rules(tools: Tools, text: "Text") -> Iterator[str]:
    opens, closes = (tag if text.has_token(tag) else _literal(tag) for tag in (CALL_OPEN, CALL_CLOSE))
    yield "call: " + " | ".join(f"call_{place}" for place in range(len(tools.callable)))
    for place, tool in enumerate(tools.callable):
        yield f"call_{place}: {opens} body_{place} {closes}"
        yield from (_xml if tools.as_xml else _as_json)(tool, f"body_{place}")


def _as_json(tool: Tool, rule: str) -> Iterator[str]:
    begins = _literal('\n{"name": ' + json.dumps(tool.name) + ', "arguments": ')
    yield f"{rule}: {begins} {rule}_given {_literal('}' + chr(10))}"
    yield f"{rule}_given: {_json(tool.parameters, IN_CALLS)}"


def _xml(tool: Tool, rule: str) -> Iterator[str]:
    """Parameters in the order of the schema; those that need not be there may be left out."""
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", ())
    names = {name: f"{rule}_{place}" for place, name in enumerate(properties)}
    given = " ".join(part if name in required else f"{part}?" for name, part in names.items())
    yield f"{rule}: {_literal(f'{chr(10)}<function={tool.name}>{chr(10)}')} {given} {_literal('</function>' + chr(10))}"
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    for name, part in names.items():
        yield from _parameter(name, {**shared, **properties[name]}, part)


def _parameter(name: str, schema: Mapping[str, Any], rule: str) -> Iterator[str]:
    opens, closes = _literal(f"<parameter={name}>\n"), "\n</parameter>\n"
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not is_text(schema):
        yield f"{rule}: {opens} {rule}_given {_literal(closes)}"
        yield f"{rule}_given: {_json(schema, IN_CALLS)}"
    elif values:
        yield f"{rule}: {opens} ({' | '.join(map(_literal, values))}) {_literal(closes)}"
    else:
        yield f"{rule}: {opens} {rule.upper()}"
        yield f"{rule.upper()}[lazy]: /(.|\\n)*{_escaped(closes)}/"


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def _literal(text: str) -> str:
    """A text in a grammar, whose strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return text.replace("/", "\\/").replace("\n", "\\n")
