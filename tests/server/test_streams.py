"""A stream, folded, is the unstreamed answer: through split characters, split stop strings and rounds of any size."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.engine.request import Emitted, Output, Speculative, Timings
from headlong.server.events import CONTENT, REASONING, Call, Finish, Piece
from headlong.server.reader import Reader
from headlong.server.tools import Tool, Tools
from tests.server.test_completions import ASK, CHAT, TEXT, chunks, deltas, folded

TEXTS = [
    "plain words, and no more",
    "naïve café ☃ 日本語 👩‍👩‍👧‍👦 🇫🇷",
    "<think>\nè?\n</think>\n\n“yes” — ☃",
    "<think>never closed ☃",
    "a <b> </think> < STO STOP unseen",
    "\n\n  spaces first",
    "",
]
RIGHT = [(True,), (True, True, False), (False,)]


@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("answer", TEXTS)
def test_every_api_streams_what_it_answers(spoken, answer, right):
    server = spoken(answer, right=right)
    common = {"temperature": 0.0, "stop": ["STOP", "nowhere"], "speculative": {"kind": "mtp", "depth": 3}}
    whole = server.post(CHAT, {**common, "messages": ASK}).json()["choices"][0]
    found = chunks(server.post(CHAT, {**common, "messages": ASK, "stream": True}))
    message = whole["message"]
    assert folded(found) == message["content"]
    assert folded(found, field="reasoning_content") == message.get("reasoning_content", "")
    expected = answer.partition("STOP")[0]
    if not answer.lstrip().startswith("<think>"):
        assert message["content"] == expected

    raw = {**common, "prompt": "<assistant>", "max_tokens": 400}
    (choice,) = server.post(TEXT, raw).json()["choices"]
    assert choice["text"] == expected
    assert "".join(one["text"] for one in deltas(chunks(server.post(TEXT, {**raw, "stream": True})))) == expected

    del common["stop"]
    asked = {**common, "messages": ASK, "max_tokens": 400, "stop_sequences": ["STOP"]}
    blocks = server.post("/v1/messages", asked).json()["content"]
    assert blocks == blocks_of(server.post("/v1/messages", {**asked, "stream": True}))
    output = server.post("/v1/responses", {**common, "input": ASK}).json()["output"]
    assert texts(output) == texts(
        events(server.post("/v1/responses", {**common, "input": ASK, "stream": True}))[-1]["response"]["output"]
    )


def texts(output):
    return [(item["type"], item["content"]) for item in output]


def events(response):
    return [json.loads(event.partition("data: ")[2]) for event in response.text.split("\n\n") if event]


def blocks_of(response):
    """The content of a message, put together from its events alone."""
    blocks = []
    for event in events(response):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            field = {"text_delta": "text", "thinking_delta": "thinking"}[event["delta"]["type"]]
            blocks[-1][field] += event["delta"][field]
    return blocks


# --- the same without a server, for many more texts and rounds ------------------------------------------------------

TOOLS = Tools((Tool("f", "", {"type": "object"}),))
PARTS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "f", "arguments": {}}',
    "\n",
    "a",
    "☃",
    "<",
    " ",
]


def output_of(pieces):
    nothing = Speculative("auto", "none", "", 0, 1, 0, 0, (), ())
    return Output("".join(pieces), tuple(range(len(pieces))), "stop", 1, nothing, Timings(0.0, 0.0, 1, len(pieces)))


def told(pieces, sizes):
    """What a reader makes of a text in these pieces, in rounds of these sizes."""
    reader = Reader(0, "", TOOLS)
    tokens = [Emitted(0, place, piece, place % 3) for place, piece in enumerate(pieces)]
    tokens.append(Emitted(0, 9, "", 0, "stop", output=output_of(pieces)))
    shown = {CONTENT: "", REASONING: ""}
    calls, ends = [], []
    while tokens:
        size = sizes.pop(0) if sizes else 1
        batch, tokens = tokens[:size], tokens[size:]
        for event in reader.read(batch):
            if isinstance(event, Piece):
                shown[event.channel] += event.text
            elif isinstance(event, Call):
                calls.append((event.number, event.name, event.arguments, len(shown[CONTENT])))
            elif isinstance(event, Finish):
                ends.append(event.reason)
    return shown, calls, ends


@given(st.lists(st.sampled_from(PARTS), max_size=14), st.data())
@settings(max_examples=300, deadline=None)
def test_how_a_text_comes_changes_nothing(parts, data):
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    sizes = data.draw(st.lists(st.integers(1, 5), max_size=20))
    assert told(pieces, sizes) == told([text], [2])
    shown, calls, ends = told([text], [2])
    assert ends == ["tool_calls" if calls else "stop"]
    assert len(shown[CONTENT]) + len(shown[REASONING]) <= len(text)
