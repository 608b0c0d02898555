"""The text that an answer must be: JSON, calls of tools, or thoughts before either."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headlong.engine.channels import CLOSES
from headlong.server.tools import CALL_CLOSE, CALL_OPEN, Tool, Tools, choices_of, is_text, properties_of

if TYPE_CHECKING:
    from headlong.engine.text import Text

MOST_CALLS = 8  # in one answer
# As models write JSON in their calls; for answers, spaces and new lines as the engine's schemas have them.
IN_CALLS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
IN_ANSWERS = {"whitespace_pattern": r" |\n[ \t]{0,32}"}
ANYTHING = r"(.|\n)*"


def constraint_of(schema: Mapping[str, Any] | None, tools: Tools | None, thinks: bool, text: "Text") -> dict[str, Any]:
    """The engine's option that holds an answer to its schema and its tools; none where nothing must hold.

    `thinks`: the prompt has opened the model's reasoning, which comes first and is free.
    """
    if schema is not None and tools is None and not thinks:
        return {"json_schema": schema}
    if tools is not None and tools.must_call:
        rules = [f"answer: call{_more_calls(tools)}"]
    elif schema is not None:
        calls = f" | call{_more_calls(tools)}" if tools else ""
        rules = [f"answer: json{calls}", f"json: {_json(schema, IN_ANSWERS)}"]
    elif tools is not None and any(tool.strict for tool in tools.known):
        rules = list(_free_until_a_call(tools, text))
    else:
        return {}
    if thinks:
        rules += [*_thoughts(text), "start: thoughts answer"]
    else:
        rules.append("start: answer")
    if tools is not None:
        rules += _calls(tools, text)
    return {"grammar": "\n".join(rules)}


def _more_calls(tools: Tools) -> str:
    single = tools.named is not None or not tools.parallel
    return "" if single else f' ("\\n" call){{0,{MOST_CALLS - 1}}}'


def _thoughts(text: "Text") -> Iterator[str]:
    """Any text up to the tag that ends it, and an empty line."""
    if text.has_token(CLOSES):
        yield f'thoughts: /{ANYTHING}/ {CLOSES} "\\n\\n"'
    else:
        yield f"thoughts[lazy]: /{ANYTHING}{_escaped(CLOSES)}\\n\\n/"


def _free_until_a_call(tools: Tools, text: "Text") -> Iterator[str]:
    """Any text; once it opens a call, that one must fit its tool."""
    more = "" if not tools.parallel else f' ("\\n"? call){{0,{MOST_CALLS - 1}}}'
    if text.has_token(CALL_OPEN):
        yield f"answer: /{ANYTHING}/ (call{more})?"
    else:
        yield f"answer: WORDS | words_and_tag call_rest{more}"
        yield f"WORDS: /{ANYTHING}/ & ~/{ANYTHING}{_escaped(CALL_OPEN)}{ANYTHING}/"
        yield f"words_and_tag[lazy]: /{ANYTHING}{_escaped(CALL_OPEN)}/"


def _calls(tools: Tools, text: "Text") -> Iterator[str]:
    opens, closes = (tag if text.has_token(tag) else _literal(tag) for tag in (CALL_OPEN, CALL_CLOSE))
    yield f"call: {opens} call_rest"
    yield f"call_rest: ({' | '.join(f'call_{place}' for place in range(len(tools.callable)))}) {closes}"
    for place, tool in enumerate(tools.callable):
        yield from (_xml_call if tools.as_xml else _json_call)(tool, f"call_{place}")


def _json_call(tool: Tool, rule: str) -> Iterator[str]:
    begins = _literal('\n{"name": ' + json.dumps(tool.name) + ', "arguments": ')
    yield f"{rule}: {begins} {rule}_given {_literal('}' + chr(10))}"
    yield f"{rule}_given: {_json(tool.parameters, IN_CALLS)}"


def _xml_call(tool: Tool, rule: str) -> Iterator[str]:
    """Parameters in the order of the schema; those that need not be there may be left out."""
    schemas, required = properties_of(tool.parameters), tool.parameters.get("required", ())
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    parts = []
    for place, (name, schema) in enumerate(schemas.items()):
        part = f"{rule}_{place}"
        parts.append(part if isinstance(required, list) and name in required else f"{part}?")
        yield from _xml_parameter(name, {**shared, **(schema if isinstance(schema, dict) else {})}, part)
    opens, closes = _literal(f"\n<function={tool.name}>\n"), _literal("</function>\n")
    yield f"{rule}: {' '.join([opens, *parts, closes])}"


def _xml_parameter(name: str, schema: Mapping[str, Any], rule: str) -> Iterator[str]:
    opens, closes = _literal(f"<parameter={name}>\n"), "\n</parameter>\n"
    if not is_text(schema):
        yield f"{rule}: {opens} {rule}_given {_literal(closes)}"
        yield f"{rule}_given: {_json(schema, IN_CALLS)}"
    elif choices_of(schema):
        yield f"{rule}: {opens} ({' | '.join(map(_literal, choices_of(schema)))}) {_literal(closes)}"
    else:
        yield f"{rule}: {opens} {rule}_given"
        yield f"{rule}_given[lazy]: /{ANYTHING}{_escaped(closes)}/"


def _json(schema: Mapping[str, Any], spacing: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': spacing})}"


def _literal(text: str) -> str:
    """A text in a grammar, whose strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    return text.replace("/", r"\/").replace("\n", r"\n")
