"""Tool calls in a model's text: found whatever the pieces it comes in, and left alone where they are none."""

import json

import pytest

from headlong.server.calls import Calls, Made
from headlong.server.tools import Tool, Tools, told_in_words

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "zone": {"enum": ["1", "2"]}, "box": {}},
    "required": ["city"],
}
TOOLS = Tools((Tool("weather", "Tells the weather.", WEATHER), Tool("noop", "", {"type": "object"})))
AS_JSON = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
AS_XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "<parameter=zone>\n1\n</parameter>\n<parameter=box>\n[1, {}]\n</parameter>\n</function>\n</tool_call>"
)
PARIS = Made("weather", '{"city": "Paris", "days": 2}')


def read(pieces, tools=TOOLS):
    calls, parts = Calls(tools), []
    for position, piece in enumerate(pieces):
        parts += calls.push(piece, position)
    parts += calls.flush()
    text = "".join(origin.text for part in parts if not isinstance(part, Made) for origin in part)
    return text, [part for part in parts if isinstance(part, Made)]


@pytest.mark.parametrize(
    ("text", "shown", "made"),
    [
        ("no call at all", "no call at all", []),
        (AS_JSON, "", [PARIS]),
        (f"Let me see. {AS_JSON}\n{AS_JSON}\n", "Let me see. ", [PARIS, PARIS]),
        (f"{AS_JSON} and more", "and more", [PARIS]),
        ("a < b <tool_call", "a < b <tool_call", []),
        ("<tool_call>\nnot JSON\n</tool_call>!", "<tool_call>\nnot JSON\n</tool_call>!", []),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>',) * 2 + ([],),
        ('<tool_call>{"name": "weather", "arguments": [1]}</tool_call>',) * 2 + ([],),
        (AS_JSON.removesuffix("</tool_call>"), "", [PARIS]),
        ('<tool_call>{"name": "noop"}</tool_call>', "", [Made("noop", "{}")]),
        ('<tool_call>{"name": "weather", "arg', '<tool_call>{"name": "weather", "arg', []),
    ],
)
def test_calls_are_found_in_any_pieces(text, shown, made):
    assert read([text]) == (shown, made)
    assert read(text) == (shown, made)
    for size in (2, 3, 7):
        assert read([text[at : at + size] for at in range(0, len(text), size)]) == (shown, made)


def test_values_in_xml_are_what_their_schema_says():
    _, (made,) = read(AS_XML)
    assert json.loads(made.arguments) == {"city": "12", "days": 2, "zone": "1", "box": [1, {}]}
    assert read(AS_XML.replace("2\n</parameter>\n<parameter=zone", "soon\n</parameter>\n<parameter=zone"))[1] == [
        Made("weather", '{"city": "12", "days": "soon", "zone": "1", "box": [1, {}]}')
    ]


def test_text_keeps_where_it_came_from():
    calls = Calls(TOOLS)
    parts = [part for position, piece in enumerate(["ab", "c<", "d"]) for part in calls.push(piece, position)]
    assert [(origin.text, origin.position) for part in parts for origin in part] == [
        ("ab", 0),
        ("c", 1),
        ("<", 1),
        ("d", 2),
    ]


def test_a_template_without_tools_has_them_in_words():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
        },
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
    ]
    system, user, assistant, result = told_in_words(messages, TOOLS.known)
    assert system["content"].startswith("Be brief.\n\nYou can call functions.")
    assert '"name": "noop"' in system["content"]
    assert user == messages[1]
    assert assistant["content"] == '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\nyes\n</tool_response>"}
    assert told_in_words(messages[1:2], ()) == messages[1:2]
