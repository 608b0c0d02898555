"""Answers of the OpenAI endpoints: whole, streamed, and the same either way."""

import json
from itertools import chain

import pytest

from headlong.server.openai.common import Speculative

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASK = [{"role": "user", "content": "Write a function that adds two numbers."}]


def chunks(response):
    """The objects of a stream, which ends with its mark."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def deltas(found, place=0):
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == place]


def folded(found, place=0, field="content"):
    return "".join(choice["delta"].get(field) or "" for choice in deltas(found, place))


def test_a_whole_answer(server):
    got = server.post(CHAT, {"messages": ASK, "max_tokens": 40}).json()
    (choice,) = got["choices"]
    alone = server.engine.generate(server.engine.text.encode_chat(ASK), max_tokens=40)
    assert got["object"] == "chat.completion"
    assert got["model"] == server.engine.name
    assert choice["message"] == {"role": "assistant", "content": alone.text}
    assert choice["finish_reason"] == alone.finish_reason
    assert got["usage"]["prompt_tokens"] == alone.prompt_tokens
    assert got["usage"]["completion_tokens"] == len(alone.tokens)
    spent = got["speculative"]
    assert spent["used"] == "mtp"
    assert spent["accepted"] == sum(spent["accepted_by_position"]) == got["timings"]["draft_n_accepted"]
    assert spent["mean_length"] == 1 + spent["accepted"] / spent["rounds"]
    assert got["timings"]["predicted_n"] == len(alone.tokens)


@pytest.mark.parametrize("speculative", [None, {"kind": "none"}, {"kind": "mtp", "depth": 3}, {"kind": "ngram"}])
def test_a_stream_folds_into_the_whole_answer(server, speculative):
    body = {"messages": ASK, "max_tokens": 60, "temperature": 0.8, "seed": 5, "speculative": speculative}
    whole = server.post(CHAT, body).json()
    told = {"include_usage": True, "include_origins": True}
    found = chunks(server.post(CHAT, {**body, "stream": True, "stream_options": told}))
    assert folded(found) == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in deltas(found) if choice["finish_reason"]] == [
        whole["choices"][0]["finish_reason"]
    ]
    last = found[-1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert last["speculative"]["requested"] == whole["speculative"]["requested"]
    for choice in deltas(found):
        assert "".join(origin["text"] for origin in choice["origins"]) == choice["delta"].get("content", "")


def test_origins_say_which_drafts_were_accepted(server):
    told = {"include_usage": True, "include_origins": True}
    body = {"messages": ASK, "max_tokens": 60, "stream": True, "stream_options": told}
    found = chunks(server.post(CHAT, {**body, "speculative": {"kind": "mtp", "depth": 3}}))
    positions = [origin["position"] for choice in deltas(found) for origin in choice["origins"]]
    spent = found[-1]["speculative"]
    for position, accepted in enumerate(spent["accepted_by_position"], 1):
        assert positions.count(position) <= accepted
    assert max(positions) == 3
    plain = chunks(server.post(CHAT, {**body, "speculative": {"kind": "none"}}))
    assert {origin["position"] for choice in deltas(plain) for origin in choice["origins"]} == {0}
    assert folded(plain) == folded(found)
    assert plain[-1]["speculative"]["reason"] == "the request asked for plain decoding"


def test_the_servers_depth_is_for_those_who_do_not_say(serve):
    server = serve(depth=2)
    body = {"messages": ASK, "max_tokens": 20}

    def depth(**speculative):
        return server.post(CHAT, {**body, "speculative": speculative}).json()["speculative"]["depth"]

    assert server.post(CHAT, body).json()["speculative"]["depth"] == depth(kind="mtp") == 2
    assert depth(depth=4) == 4
    assert depth(depth=0) == 0
    assert Speculative(depth="auto").options() == {"draft_kind": "auto", "depth": None}  # said, so not the server's


def test_several_answers_have_seeds_of_their_own(server):
    body = {
        "messages": ASK,
        "max_tokens": 30,
        "temperature": 1.0,
        "seed": 7,
        "speculative": {"kind": "mtp", "depth": 2},
    }
    several = server.post(CHAT, {**body, "n": 3}).json()
    found = chunks(server.post(CHAT, {**body, "n": 3, "stream": True}))
    for place, choice in enumerate(several["choices"]):
        alone = server.post(CHAT, {**body, "seed": 7 + place}).json()
        assert choice["index"] == place
        assert choice["message"] == alone["choices"][0]["message"]
        assert folded(found, place) == choice["message"]["content"]
    assert several["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert found[-1]["speculative"]["rounds"] == several["speculative"]["rounds"]


def test_logprobs_are_told_for_every_token(server):
    body = {"messages": ASK, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    whole = server.post(CHAT, body).json()
    told = whole["choices"][0]["logprobs"]["content"]
    found = chunks(server.post(CHAT, {**body, "stream": True}))
    streamed = list(chain.from_iterable((choice["logprobs"] or {"content": []})["content"] for choice in deltas(found)))
    assert streamed == told
    assert len(told) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(one["bytes"]) for one in told).decode() == whole["choices"][0]["message"]["content"]
    assert all(len(one["top_logprobs"]) == 3 for one in told)
    assert all(one["logprob"] == max(top["logprob"] for top in one["top_logprobs"]) for one in told)  # greedy


def test_text_is_continued_as_it_is(server):
    body = {"prompt": ["def add(a, b):\n", "import "], "max_tokens": 12, "logprobs": 2}
    whole = server.post(TEXT, body).json()
    alone = server.engine.generate(body["prompt"], max_tokens=12)
    assert [choice["text"] for choice in whole["choices"]] == [output.text for output in alone]
    assert whole["usage"]["prompt_tokens"] == sum(output.prompt_tokens for output in alone)
    found = chunks(server.post(TEXT, {**body, "stream": True}))
    for place, choice in enumerate(whole["choices"]):
        mine = deltas(found, place)
        assert "".join(one["text"] for one in mine) == choice["text"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            told = list(chain.from_iterable(one["logprobs"][name] for one in mine if one["logprobs"]))
            assert told == choice["logprobs"][name]


def test_prompts_may_be_token_ids(server):
    ids = server.engine.text.encode("def add(a, b):\n")
    one = server.post(TEXT, {"prompt": ids}).json()
    assert one["choices"] == server.post(TEXT, {"prompt": "def add(a, b):\n"}).json()["choices"]
    two = server.post(TEXT, {"prompt": [ids, ids]}).json()
    assert [choice["text"] for choice in two["choices"]] == [one["choices"][0]["text"]] * 2
    assert one["usage"]["completion_tokens"] == 16


def test_an_answer_must_be_json(server):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["add", "sub"]}, "arity": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["name", "arity"],
        "additionalProperties": False,
    }
    shape = {"type": "json_schema", "json_schema": {"name": "function", "schema": schema, "strict": True}}
    whole = server.post(CHAT, {"messages": ASK, "response_format": shape}).json()
    given = json.loads(whole["choices"][0]["message"]["content"])
    assert given["name"] in ("add", "sub")
    assert 0 <= given["arity"] <= 9
    found = chunks(server.post(CHAT, {"messages": ASK, "response_format": shape, "stream": True}))
    assert folded(found) == whole["choices"][0]["message"]["content"]


def test_a_prediction_is_drafted_and_counted(server):
    body = {"messages": ASK, "max_tokens": 40}
    expected = server.post(CHAT, body).json()["choices"][0]["message"]["content"]
    kind = {"kind": "prediction", "depth": 4}
    told = server.post(
        CHAT, {**body, "prediction": {"type": "content", "content": expected}, "speculative": kind}
    ).json()
    assert told["choices"][0]["message"]["content"] == expected
    details = told["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == told["speculative"]["accepted"] > 0
    assert (
        details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] == told["speculative"]["drafted"]
    )


def test_stop_strings_end_an_answer(server):
    whole = server.post(CHAT, {"messages": ASK, "max_tokens": 60}).json()["choices"][0]["message"]["content"]
    stop = whole[20:26]
    body = {"messages": ASK, "max_tokens": 60, "stop": stop}
    cut = server.post(CHAT, body).json()["choices"][0]
    assert cut["message"]["content"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"
    assert folded(chunks(server.post(CHAT, {**body, "stream": True}))) == cut["message"]["content"]
