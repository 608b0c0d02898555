"""OpenAI's own client against the real server: every endpoint it knows of, streamed and whole."""

import json
import time

import openai
import pytest
from pydantic import BaseModel

from tests.server.test_completions import ASK
from tests.server.test_tools import AS_JSON, SAVE, TWO

SAID = f"<think>\nWhich?\n</think>\n\nI save ☃.\n\n{AS_JSON}"
FLAT = {"type": "function", "name": "save", "description": "Saves.", "parameters": SAVE["function"]["parameters"]}


def client_of(server, **options):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, **options)


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made


def test_models(client, server):
    (listed,) = client.models.list().data
    assert listed.id == server.engine.name
    assert listed.headlong["context"] == server.engine.limits.context
    assert client.models.retrieve(listed.id) == listed
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'"):
        client.models.retrieve("gpt")


def test_chat(client, server):
    asked = {"model": server.engine.name, "messages": ASK, "max_completion_tokens": 40}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        for _ in stream:
            pass
        folded = stream.current_completion_snapshot
    assert folded.choices[0].message.content == whole.choices[0].message.content
    assert folded.choices[0].finish_reason == whole.choices[0].finish_reason
    assert folded.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.speculative["used"] == "mtp"
    assert whole.timings["draft_n"] == whole.speculative["drafted"]


def test_chat_fields(client, server):
    got = client.chat.completions.create(
        model=server.engine.name,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        ],
        n=2,
        seed=3,
        temperature=0.9,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"100": -100},
        logprobs=True,
        top_logprobs=2,
        max_tokens=8,
        stop=["\n\n\n"],
        user="ann",
        prediction={"type": "content", "content": "Hi there"},
        extra_body={"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "speculative": {"kind": "mtp", "depth": 2}},
    )
    assert len(got.choices) == 2
    assert got.speculative["requested"] == "mtp"
    assert len(got.choices[0].logprobs.content) == len(got.choices[0].logprobs.content[0].top_logprobs) * 4


def test_chat_reasons_and_calls_tools(spoken):
    server = spoken(SAID)
    asked = {"model": "spoken", "messages": ASK, "tools": TWO}
    with client_of(server) as client:
        whole = client.chat.completions.create(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            folded = stream.get_final_completion().choices[0]
        again = client.chat.completions.create(
            model="spoken",
            messages=[
                *ASK,
                whole.message,
                {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "ok"},
            ],
            tools=TWO,
        )
    assert whole.message.reasoning_content == "Which?"
    assert whole.finish_reason == folded.finish_reason == "tool_calls"
    assert json.loads(whole.message.tool_calls[0].function.arguments) == {"name": "é", "arity": 1}
    assert [call.function.arguments for call in folded.message.tool_calls] == [
        whole.message.tool_calls[0].function.arguments
    ]
    assert folded.message.content == whole.message.content == "I save ☃.\n\n"
    assert again.choices[0].message.content == whole.message.content


class Function(BaseModel):
    name: str
    arity: int


def test_structured_output(client, server):
    got = client.chat.completions.parse(
        model=server.engine.name, messages=ASK, response_format=Function, max_tokens=200, temperature=0.5, seed=1
    )
    if got.choices[0].finish_reason == "stop":
        assert isinstance(got.choices[0].message.parsed, Function)
    any_object = client.chat.completions.create(
        model=server.engine.name, messages=ASK, response_format={"type": "json_object"}, max_tokens=3
    )
    assert any_object.choices[0].message.content.startswith("{")


def test_completions(client, server):
    asked = {"model": server.engine.name, "prompt": ["def add(", "import "], "max_tokens": 10, "logprobs": 1}
    whole = client.completions.create(**asked)
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunk.usage == whole.usage
    assert whole.choices[0].logprobs.tokens


def test_responses(client, server):
    asked = {
        "model": server.engine.name,
        "input": ASK[0]["content"],
        "instructions": "Be brief.",
        "max_output_tokens": 30,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    folded = events[-1].response
    assert whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert folded.output_text == whole.output_text
    assert whole.status == folded.status == ("incomplete" if whole.usage.output_tokens == 30 else "completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert whole.speculative["used"] == "mtp"
    with pytest.raises(openai.BadRequestError, match="previous_response_id is not supported by this server"):
        client.responses.create(**asked, previous_response_id="resp_1")


def test_a_response_that_is_cut_off_says_so_of_its_last_item(spoken):
    body = {"input": ASK, "max_output_tokens": 28}
    server = spoken("<think>\nhm\n</think>\n\nAnd so it goes on.")
    whole = server.post("/v1/responses", body).json()
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    events = server.post("/v1/responses", {**body, "stream": True}).text.split("event: response.output_item.done\n")[1:]
    done = [json.loads(event.splitlines()[0].removeprefix("data: "))["item"] for event in events]
    assert [(item["status"], item["content"]) for item in done] == [
        (item["status"], item["content"]) for item in whole["output"]
    ]


def test_responses_reason_and_call_tools(spoken):
    server = spoken(SAID)
    asked = {"model": "spoken", "tools": [FLAT]}
    with client_of(server) as client:
        whole = client.responses.create(input=ASK, **asked)
        with client.responses.stream(input=ASK, **asked) as stream:
            folded = stream.get_final_response()
        result = {"type": "function_call_output", "call_id": whole.output[-1].call_id, "output": "ok"}
        again = client.responses.create(input=[*ASK, *whole.output, result], **asked)
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call"]
    assert whole.output[0].content[0].text == "Which?"
    assert json.loads(whole.output[2].arguments) == {"name": "é", "arity": 1}
    assert [item.type for item in folded.output] == [item.type for item in whole.output]
    assert folded.output_text == whole.output_text == again.output_text == "I save ☃.\n\n"
    assert folded.output[2].arguments == whole.output[2].arguments


def test_responses_hold_to_a_schema_and_a_tool(client, server):
    form = {
        "type": "json_schema",
        "name": "n",
        "schema": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    }
    got = client.responses.create(model=server.engine.name, input=ASK, text={"format": form})
    assert json.loads(got.output_text)["a"] in (1, 2)
    called = client.responses.create(
        model=server.engine.name, input=ASK, tools=[FLAT], tool_choice={"type": "function", "name": "save"}
    )
    assert json.loads(called.output[0].arguments)["arity"] in (1, 2, 3)


@pytest.mark.parametrize(
    ("more", "error", "says"),
    [
        (
            {"audio": {"voice": "alloy", "format": "mp3"}},
            openai.BadRequestError,
            "audio is not supported by this server; leave it out.",
        ),
        ({"temperature": -1}, openai.BadRequestError, "temperature is -1.0; it must be between 0 and 100."),
        ({"max_tokens": 5000}, openai.BadRequestError, "max_tokens is 5000, together more than the context of 2048"),
        ({"model": "gpt"}, openai.NotFoundError, "there is no model 'gpt' here"),
    ],
)
def test_errors_are_the_clients_own(client, server, more, error, says):
    with pytest.raises(error, match=says):
        client.chat.completions.create(**{"model": server.engine.name, "messages": ASK, **more})


def test_a_key_is_asked_for(serve):
    server = serve(api_key="secret")
    with pytest.raises(openai.AuthenticationError, match="the API key is wrong"), client_of(server) as client:
        client.models.list()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
        assert client.models.list().data


def test_leaving_a_stream_frees_its_row(client, server):
    """An answer of a thousand tokens ends soon after nobody reads it."""
    asked = {"model": server.engine.name, "messages": ASK, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with client.chat.completions.create(**asked, stream=True) as stream:
        next(chunk for chunk in stream if chunk.choices[0].delta.content)
        assert server.engine.load.running == 1
    until(lambda: not server.engine.busy)
    assert server.service.gate.inside == 0
    assert server.engine.load.running == 0


def until(true, patience=30.0):
    ends = time.monotonic() + patience
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)
