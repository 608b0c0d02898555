"""Anthropic's own client against the real server: messages, streams, tools, tokens counted, errors."""

import json

import anthropic
import pytest

from tests.server.test_completions import ASK
from tests.server.test_openai_client import SAID
from tests.server.test_tools import SAVE

TOOL = {"name": "save", "description": "Saves.", "input_schema": SAVE["function"]["parameters"]}


def client_of(server, key="any"):
    return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0)


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made


def test_messages(client, server):
    asked = {"model": server.engine.name, "messages": ASK, "max_tokens": 40, "system": "Be brief."}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        folded = stream.get_final_message()
    assert whole.content[0].type == "text"
    assert text == folded.content[0].text == whole.content[0].text
    assert folded.stop_reason == whole.stop_reason
    assert folded.usage.output_tokens == whole.usage.output_tokens
    assert whole.speculative["used"] in ("mtp", "mtp+ngram")  # as it happens to go
    counted = client.messages.count_tokens(model=server.engine.name, messages=ASK, system="Be brief.")
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


def test_a_stop_sequence_is_named(client, server):
    asked = {"model": server.engine.name, "messages": ASK, "max_tokens": 60}
    text = client.messages.create(**asked).content[0].text
    stop = text[15:20]
    cut = client.messages.create(**asked, stop_sequences=["never this", stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)
    assert cut.content[0].text == text[: text.index(stop)]
    short = client.messages.create(**{**asked, "max_tokens": 3})
    assert (short.stop_reason, short.stop_sequence) == ("max_tokens", None)


def test_an_answer_that_is_begun_goes_on(client, server):
    asked = {"model": server.engine.name, "max_tokens": 20}
    whole = client.messages.create(**asked, messages=ASK).content[0].text
    begun = [*ASK, {"role": "assistant", "content": whole[:10]}]
    text = client.messages.create(**asked, messages=begun).content[0].text
    assert not text.startswith(whole[:10])
    chat = server.engine.text.chat_template.render(ASK) + whole[:10]
    alone = server.engine.generate(server.engine.text.encode_rendered(chat), max_tokens=20)
    assert text == alone.text


def test_thinking_and_tools(spoken):
    server = spoken(SAID)
    asked = {"model": "spoken", "max_tokens": 2000, "tools": [TOOL]}
    with client_of(server) as client:
        whole = client.messages.create(messages=ASK, **asked)
        with client.messages.stream(messages=ASK, **asked) as stream:
            kinds = [event.type for event in stream]
            folded = stream.get_final_message()
        result = {
            "type": "tool_result",
            "tool_use_id": whole.content[2].id,
            "content": [{"type": "text", "text": "ok"}],
        }
        turns = [*ASK, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        again = client.messages.create(messages=turns, **asked)
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[0].thinking == "Which?"
    assert whole.content[1].text == "I save ☃.\n\n"
    assert whole.content[2].input == {"name": "é", "arity": 1}
    assert whole.stop_reason == folded.stop_reason == "tool_use"
    assert [block.type for block in folded.content] == [block.type for block in whole.content]
    assert folded.content[2].input == whole.content[2].input
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert again.content[1].text == whole.content[1].text


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "save"}])
def test_a_tool_that_must_be_called_is(client, server, choice):
    chosen = {**choice, "disable_parallel_tool_use": True}
    got = client.messages.create(
        model=server.engine.name, messages=ASK, max_tokens=200, tools=[TOOL], tool_choice=chosen
    )
    (call,) = got.content
    assert call.input["name"] in ("add", "sub")
    assert got.stop_reason == "tool_use"


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        ({"container": "x"}, anthropic.BadRequestError, "container is not supported by this server; leave it out."),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            anthropic.BadRequestError,
            "thinking.budget_tokens is not supported",
        ),
        ({"thinking": {"type": "enabled"}}, anthropic.BadRequestError, "cannot turn reasoning on"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            anthropic.BadRequestError,
            "holds a block of type 'image'",
        ),
        ({"model": "claude"}, anthropic.NotFoundError, "there is no model 'claude' here"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens is 0; it should be greater than or equal to 1."),
    ],
)
def test_errors_are_the_clients_own(client, server, more, error, says):
    asked = {"model": server.engine.name, "messages": ASK, "max_tokens": 5}
    with pytest.raises(error, match=says) as caught:
        client.messages.create(**{**asked, **more})
    assert caught.value.body["type"] == "error"
    assert set(caught.value.body["error"]) == {"type", "message"}


def test_a_key_is_asked_for(serve):
    server = serve(api_key="secret")
    with pytest.raises(anthropic.AuthenticationError, match="the API key is wrong"), client_of(server) as client:
        client.messages.create(model="nano", messages=ASK, max_tokens=5)
    with client_of(server, "secret") as client:
        assert client.messages.create(model="nano", messages=ASK, max_tokens=5).content


def test_events_have_names(server):
    body = {"messages": ASK, "max_tokens": 5, "stream": True}
    got = server.post("/v1/messages", body)
    for event in filter(None, got.text.split("\n\n")):
        name, data = event.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")
