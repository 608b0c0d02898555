"""Tools through the server: rendered by the template, called when they must be, and told in OpenAI's words."""

import json

import pytest

from tests.server.test_completions import ASK, CHAT, chunks, deltas, folded

PARAMETERS = {
    "type": "object",
    "properties": {"name": {"enum": ["add", "sub"]}, "arity": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["name", "arity"],
    "additionalProperties": False,
}
SAVE = {"type": "function", "function": {"name": "save", "description": "Saves.", "parameters": PARAMETERS}}
DROP = {"type": "function", "function": {"name": "drop"}}
TWO = [SAVE, DROP]


def calls_of(found):
    """Tool calls put together from the chunks of a stream."""
    calls = {}
    for choice in deltas(found):
        for piece in choice["delta"].get("tool_calls", ()):
            call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
            for name in call:
                call[name] += piece["function"].get(name) or ""
    return [calls[index] for index in sorted(calls)]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"save", "drop"}), ({"type": "function", "function": {"name": "save"}}, {"save"})],
)
def test_a_tool_that_must_be_called_is(server, choice, names):
    body = {"messages": ASK, "tools": TWO, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200}
    whole = server.post(CHAT, body).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] is None
    assert call["function"]["name"] in names
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "save":
        assert arguments["name"] in ("add", "sub")
        assert 1 <= arguments["arity"] <= 3
    found = chunks(server.post(CHAT, {**body, "stream": True}))
    assert calls_of(found) == [call["function"]]
    assert folded(found) == ""


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_tool_that_need_not_be_called(server, choice):
    got = server.post(CHAT, {"messages": ASK, "tools": TWO, "tool_choice": choice, "max_tokens": 20}).json()
    message = got["choices"][0]["message"]
    assert message["content"]
    if choice == "none":
        bare = server.post(CHAT, {"messages": ASK, "max_tokens": 20}).json()
        assert message == bare["choices"][0]["message"]


AS_JSON = '<tool_call>\n{"name": "save", "arguments": {"name": "é", "arity": 1}}\n</tool_call>'
AS_XML = (
    "<tool_call>\n<function=save>\n<parameter=name>\né\n</parameter>\n<parameter=arity>\n1\n</parameter>\n"
    "</function>\n</tool_call>"
)


@pytest.mark.parametrize("right", [(True,), (True, False), (False,)])
@pytest.mark.parametrize("call", [AS_JSON, AS_XML])
def test_calls_are_told_apart_from_thoughts_and_text(spoken, call, right):
    server = spoken(f"<think>\nWhich?\n</think>\n\nI save ☃.\n\n{call}\n{call}", right=right)
    body = {"messages": ASK, "tools": TWO}
    whole = server.post(CHAT, body).json()
    message = whole["choices"][0]["message"]
    assert message["reasoning_content"] == "Which?"
    assert message["content"] == "I save ☃.\n\n"
    assert [json.loads(each["function"]["arguments"]) for each in message["tool_calls"]] == [
        {"name": "é", "arity": 1}
    ] * 2
    assert len({each["id"] for each in message["tool_calls"]}) == 2
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    assert 0 < whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < whole["usage"]["completion_tokens"]
    told = {"include_usage": True, "include_origins": True}
    found = chunks(server.post(CHAT, {**body, "stream": True, "stream_options": told}))
    assert folded(found, field="reasoning_content") == message["reasoning_content"]
    assert folded(found) == message["content"]
    assert calls_of(found) == [each["function"] for each in message["tool_calls"]]
    for choice in deltas(found):
        shown = choice["delta"].get("content", "") + choice["delta"].get("reasoning_content", "")
        assert "".join(origin["text"] for origin in choice["origins"]) == shown


def test_without_tools_a_call_is_text(spoken):
    server = spoken(f"So: {AS_JSON}")
    assert server.post(CHAT, {"messages": ASK}).json()["choices"][0]["message"]["content"] == f"So: {AS_JSON}"


@pytest.mark.parametrize("value", [r'"\ud83d"', "NaN"])
def test_a_call_that_cannot_be_sent_as_json_is_text(spoken, value):
    said = f'<tool_call>\n{{"name": "drop", "arguments": {{"a": {value}}}}}\n</tool_call>'
    server = spoken(said)
    whole = server.post(CHAT, {"messages": ASK, "tools": TWO})
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["message"] == {"role": "assistant", "content": said}
    assert folded(chunks(server.post(CHAT, {"messages": ASK, "tools": TWO, "stream": True}))) == said


def test_one_call_where_only_one_may_be(spoken):
    server = spoken(f"{AS_JSON}\n{AS_JSON}")
    got = server.post(CHAT, {"messages": ASK, "tools": TWO, "parallel_tool_calls": False}).json()["choices"][0]
    assert len(got["message"]["tool_calls"]) == 1
    assert got["finish_reason"] == "tool_calls"


def test_thoughts_that_the_template_opens(spoken):
    server = spoken("Hm.\n</think>\n\nYes.")
    body = {"messages": ASK, "chat_template_kwargs": {"thinking": True}}
    message = server.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


def test_a_conversation_goes_on_after_a_call(server, spoken):
    asked = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "save", "arguments": '{"name": "add"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "saved"},
    ]
    for each in (server, spoken("Done.")):
        got = each.post(CHAT, {"messages": asked, "tools": TWO, "max_tokens": 8})
        assert got.status_code == 200, got.text
    rendered = each.engine.text.decode(max(each.engine._loop.backend.chunks, key=lambda one: one.start).tokens)
    assert '<function=save>{"name": "add"}<tool>saved' in rendered


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": [SAVE, SAVE]}, "two tools are called 'save'; give each a name of its own."),
        (
            {"tools": TWO, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice names 'x'; the tools are save, drop.",
        ),
        ({"tool_choice": "required"}, "tool_choice was given without tools; give some or leave it out."),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type is \"web_search\"; it should be 'function'."),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "strange"}}}],
                "tool_choice": "required",
            },
            "a schema of the answer or of a tool cannot be used",
        ),
    ],
)
def test_tools_that_are_refused(server, more, says):
    got = server.post(CHAT, {"messages": ASK, **more})
    assert got.status_code == 400
    assert got.json()["error"]["message"].startswith(says)
