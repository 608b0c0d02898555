"""What an answer may be when it must be something: with and without tokens for the tags, as JSON and as XML."""

from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

import headlong
from headlong.engine.constraint import Grammars
from headlong.engine.request import Constraint
from headlong.engine.text import Text
from headlong.server.grammar import constraint_of
from headlong.server.tools import Tool, Tools

NANO = (Path(headlong.__file__).parent / "assets/nano/tokenizer.json").read_text(encoding="utf-8")
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
END = 16383
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
}
TIME = {
    "type": "object",
    "properties": {"zone": {"$ref": "#/$defs/zone"}},
    "required": ["zone"],
    "$defs": {"zone": {"enum": [1, 2]}},
}
KNOWN = (Tool("weather", "", WEATHER), Tool("time", "", TIME))
JSON_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>'
JSON_TIME = '<tool_call>\n{"name": "time", "arguments": {"zone": 2}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nOslo <b>\n\nx\n</parameter>\n<parameter=unit>\n"
    "F\n</parameter>\n</function>\n</tool_call>"
)
XML_TIME = "<tool_call>\n<function=time>\n<parameter=zone>\n2\n</parameter>\n</function>\n</tool_call>"
SHAPE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@cache
def tokenizer(with_tags):
    made = Tokenizer.from_str(NANO)
    made.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS if with_tags])
    return made, Text(made), Grammars(made.to_str(), 16384 + 16, (END,))


def allows(text, with_tags, **asked):
    """Whether a text is allowed to its last token, and may end there."""
    made, words, grammars = tokenizer(with_tags)
    (kind, source), *_ = constraint_of(
        asked.get("schema"), asked.get("tools"), asked.get("thinks", False), words
    ).items()
    guide = grammars.compile(Constraint(kind, source))
    tokens = made.encode(text, add_special_tokens=False).ids
    return guide.valid([*tokens, END]) == len(tokens) + 1


both = pytest.mark.parametrize("with_tags", [True, False])


@both
@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("as_xml", "call", "time"), [(False, JSON_CALL, JSON_TIME), (True, XML_CALL, XML_TIME)])
def test_calls_that_must_come(with_tags, thinks, as_xml, call, time):
    tools = Tools(KNOWN, "required", as_xml=as_xml)
    thoughts = "well,\n<tool_cal\n</think>\n\n" if thinks else ""

    def fits(text, tools=tools):
        return allows(thoughts + text, with_tags, tools=tools, thinks=thinks)

    assert fits(call)
    assert fits(f"{call}\n{time}")
    assert not fits("hello")
    assert not fits("")
    assert not fits(call[:-14])
    assert not fits(call.replace("weather", "wether"))
    assert not fits(time.replace("2", "3"))
    named = Tools(KNOWN, named="time", as_xml=as_xml)
    assert fits(time, named)
    assert not fits(call, named)
    assert not fits(f"{time}\n{time}", named)
    alone = Tools(KNOWN, "required", parallel=False, as_xml=as_xml)
    assert fits(call, alone)
    assert not fits(f"{call}\n{call}", alone)


@both
def test_a_strict_tool_holds_once_it_is_called(with_tags):
    tools = Tools((Tool("weather", "", WEATHER, strict=True),))
    for text in ("Hello.", "", f"Let me see.\n{JSON_CALL}", JSON_CALL, f"{JSON_CALL}\n{JSON_CALL}", "a <tool_call b"):
        assert allows(text, with_tags, tools=tools), text
    for text in (f"x {JSON_TIME}", JSON_CALL.replace("3", "three"), "<tool_call>"):
        assert not allows(text, with_tags, tools=tools), text


@both
def test_an_answer_in_json_or_a_call(with_tags):
    tools = Tools(KNOWN)
    for text in ('{"a": 1}', '{\n  "a": 1\n}', JSON_CALL):
        assert allows(text, with_tags, schema=SHAPE, tools=tools)
    assert not allows("hello", with_tags, schema=SHAPE, tools=tools)
    assert not allows('{"b": 1}', with_tags, schema=SHAPE, tools=tools)


@both
def test_thoughts_come_before_json(with_tags):
    assert allows('hm\n</think>\n\n{"a": 1}', with_tags, schema=SHAPE, thinks=True)
    assert not allows('{"a": 1}', with_tags, schema=SHAPE, thinks=True)
    assert not allows("hm</think>\n\nhello", with_tags, schema=SHAPE, thinks=True)


def test_what_is_free_has_no_constraint():
    _, words, _ = tokenizer(False)
    assert constraint_of(None, None, True, words) == {}
    assert constraint_of(None, Tools(KNOWN), False, words) == {}
    assert constraint_of(SHAPE, None, False, words) == {"json_schema": SHAPE}


@pytest.mark.parametrize("parameters", [{}, {"properties": 5}, {"properties": {"a": True}, "required": 1}])
def test_odd_schemas_still_make_a_grammar(parameters):
    tools = Tools((Tool("f", "", parameters),), "required", as_xml=True)
    assert allows("<tool_call>\n<function=f>\n</function>\n</tool_call>", True, tools=tools)
