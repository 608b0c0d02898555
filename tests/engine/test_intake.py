"""Everything that is refused, each with one sentence that says what to do."""

import numpy as np
import pytest

from headlong.engine.intake import (
    CONSTRAINTS,
    REQUEST_NAMES,
    SAMPLING_NAMES,
    longest_answer,
    one_answer,
    requests_from,
)
from headlong.engine.request import Constraint, Request, Sampling
from headlong.errors import QueueFull, UserError
from headlong.settings import LEAST, Settings


def one(history):
    return 1


def assert_one_sentence(message):
    assert message.endswith(".")
    assert ". " not in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("prompts", "options", "says"),
    [
        ("", {}, "the prompt has no tokens; give at least one"),
        (["x", ""], {"max_tokens": 5}, "the prompt has no tokens"),
        ([1, 300], {}, "the prompt holds token 300; the model's tokens are 0 to 299"),
        ([1, -1], {}, "the prompt holds token -1"),
        ([1, "a"], {}, "the prompt holds 'a'; it must be text or a sequence of token ids"),
        ([1] * 64, {}, "the prompt has 64 tokens and the context 64, which must also hold the answer"),
        ([1] * 60, {"max_tokens": 5}, "together more than the context of 64; ask for at most 4"),
        ([1] * 60, {}, "max_tokens is 256"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias holds token 300"),
        ([1], {"depth": 9}, "depth is 9"),
        ([1], {"stop": ["a", ""]}, "a stop string is empty"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": 1e-46}, "temperature is 1e-46; it must be 0"),
        ([1], {"repetition_penalty": 0.0}, "repetition_penalty is 0.0; it must be between"),
        ([1], {"repetition_penalty": -1.0}, "repetition_penalty is -1.0; it must be between"),
        ([1], {"presence_penalty": -100.5}, "presence_penalty is -100.5; it must be between"),
        ([1], {"frequency_penalty": -100.5}, "frequency_penalty is -100.5; it must be between"),
        ([1], {"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ([1], {"seed": 2**63}, "seed is 9223372036854775808; it must be between 0 and 9223372036854775807"),
        ([1], {"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ([1], {"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ([1], {"depth": 1.5}, "depth is 1.5; it must be a whole number"),
        ([1], {"logit_bias": {"5": 1.0}}, "a token of logit_bias is '5'; it must be a whole number"),
        ([1], {"temprature": 1.0, "topk": 2}, "temprature, topk is not an option of a request; those are max_tokens"),
        ([1], {"sampling": None}, "sampling is not an option"),
        ([1], {"constraint": None}, "constraint is not an option"),
        ([1], {"draft": False}, "draft is not an option"),
        ([1], {"n": 0}, "n is 0; it must be a whole number between 1 and 128"),
        ([1], {"n": 129}, "n is 129"),
        ([1], {"n": 1.0}, "n is 1.0"),
        ([1], {"n": True}, "n is True"),
        ([1], {"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; it must be between 0 and max_tokens, 4"),
        ([1], {"min_tokens": -1}, "min_tokens is -1"),
        ([1], {"priority": 0.5}, "priority is 0.5; it must be a whole number"),
        ([1], {"deadline_s": -1.0}, "deadline_s is -1.0; it must be at least 0"),
        ([1], {"deadline_s": float("nan")}, "deadline_s is nan; it must be at least 0"),
        ([1], {"logprobs": 21}, "logprobs is 21; it must be between 0 and 20"),
        ([1], {"draft_kind": "medusa"}, "draft_kind is 'medusa'; it must be one of auto, mtp, ngram, prediction, none"),
        ([1], {"draft_kind": "prediction"}, "no prediction was given"),
        ([1], {"prediction": [1, "a"], "max_tokens": 5}, "the prediction holds 'a'; it must be text"),
        (
            [1],
            {"prediction": b"ab", "max_tokens": 5},
            "prediction is b'ab'; it must be text or a sequence of token ids",
        ),
        ([1], {"prediction": [10**6] * 6, "max_tokens": 5}, "the prediction holds token 1000000; the model's tokens"),
        ([1], {"prediction": [2, 2**70], "max_tokens": 5}, f"the prediction holds token {2**70}"),
        ([1], {"prediction": [-5], "max_tokens": 5}, "the prediction holds token -5"),
        ([1], {"prediction": [300], "max_tokens": 5, "draft_kind": "none"}, "the prediction holds token 300"),
        ([1], {"regex": "a", "choice": ["b"]}, "regex and choice were given; a text can have one constraint"),
        ([1], {"choice": "abc"}, "choice is 'abc'; it must be a list of texts"),
        ([1], {"choice": ["a", 1]}, "it must be a list of texts"),
        ([1], {"choice": 5}, "choice is 5; it must be a list of texts"),
        ([1], {"choice": b"ab"}, "choice is b'ab'; it must be a list of texts"),
        ([1], {"json_schema": {"a": {1}}}, "json_schema is not JSON .Object of type set is not JSON serializable.; it"),
        ([1], {"json_schema": 5, "max_tokens": 5}, "it is not a JSON object"),
        (None, {}, "prompt is None; it must be text or a sequence of token ids"),
        (5, {}, "prompt is 5; it must be text"),
        (b"abc", {}, "prompt is b'abc'; it must be text"),
        (bytearray(b"a"), {}, "it must be text or a sequence of token ids"),
        ({1: 2}, {}, "prompt is {1: 2}; it must be text"),
        (np.int64(5), {}, "it must be text or a sequence of token ids"),
        (["a", None], {}, "prompt is None; it must be text"),
        ([True], {}, "prompt is True; it must be text"),
        ([1, True], {}, "the prompt holds True; it must be text"),
        ([1], {"regex": 5}, "regex is 5; it must be a text"),
        ([1], {"regex": "a", "ignore_eos": True}, "ignore_eos was given with a constraint"),
    ],
)
def test_refused(build, prompts, options, says):
    engine = build(one)
    with pytest.raises(UserError, match=says) as refusal:
        engine.generate(prompts, **options)
    assert_one_sentence(str(refusal.value))
    with pytest.raises(UserError, match=says):
        engine.stream(prompts, **options)  # before the first token is asked for
    assert not engine.busy


@pytest.mark.parametrize("given", ["hi", {"prompt": "hi"}, None])
def test_what_is_no_request_is_not_submitted(build, given):
    engine = build(one)
    with pytest.raises(UserError, match="it must be a Request") as refusal:
        engine.submit(given)
    assert_one_sentence(str(refusal.value))
    assert not engine.busy


def test_a_request_that_could_never_have_its_pages_is_refused(build):
    """A sequence and the drafts that a round may leave past its end."""
    engine = build(one, pages=4, page=4, depth=8)
    with pytest.raises(UserError, match="may need 5 pages of 4 tokens and the cache has 4") as refusal:
        engine.submit(Request([1, 2], max_tokens=7))
    assert_one_sentence(str(refusal.value))
    assert engine.generate([1, 2], max_tokens=6).tokens == (1,) * 6


def test_a_refusal_leaves_the_other_prompts_of_the_call_unqueued(build):
    engine = build(one)
    with pytest.raises(UserError):
        engine.generate([[1], []], max_tokens=5)
    assert not engine.busy


WHOLE, NUMBER, PROMPT = "a whole number", "a number", "text or a sequence of token ids"
BIASES = "a mapping of token ids to numbers"


def assert_refused(kind, name, value, wanted):
    with pytest.raises(UserError, match=f"it must be {wanted}") as refusal:
        kind(**{name: value})
    assert str(refusal.value).startswith(f"{name} is {value!r}")
    assert_one_sentence(str(refusal.value))


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("prompt", None, PROMPT),
        ("prompt", b"abc", PROMPT),
        ("prompt", {1, 2}, PROMPT),
        ("max_tokens", None, WHOLE),
        ("max_tokens", True, WHOLE),
        ("max_tokens", "5", WHOLE),
        ("sampling", None, "a Sampling"),
        ("sampling", {"seed": 1}, "a Sampling"),
        ("stop", "END", "a tuple of strings"),
        ("stop", None, "a tuple of strings"),
        ("stop", ("a", 1), "a tuple of strings"),
        ("min_tokens", 1.0, WHOLE),
        ("ignore_eos", "no", "True or False"),
        ("ignore_eos", 1, "True or False"),
        ("ignore_eos", None, "True or False"),
        ("constraint", "a+", "a Constraint"),
        ("logprobs", True, WHOLE),
        ("depth", "2", WHOLE),
        ("draft_kind", None, "a text"),
        ("prediction", 5, PROMPT),
        ("priority", None, WHOLE),
        ("deadline_s", "5", NUMBER),
        ("deadline_s", True, NUMBER),
    ],
)
def test_the_kinds_of_a_requests_fields(name, value, wanted):
    assert_refused(lambda **field: Request(**{"prompt": "hi"} | field), name, value, wanted)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("temperature", None, NUMBER),
        ("temperature", "0.5", NUMBER),
        ("temperature", True, NUMBER),
        ("temperature", 1j, NUMBER),
        ("temperature", [0.5], NUMBER),
        ("top_k", 1.0, WHOLE),
        ("logit_bias", None, BIASES),
        ("logit_bias", [(5, 1.0)], BIASES),
        ("seed", False, WHOLE),
        ("seed", "1", WHOLE),
    ],
)
def test_the_kinds_of_samplings_fields(name, value, wanted):
    assert_refused(Sampling, name, value, wanted)


def test_the_kinds_within_logit_bias():
    with pytest.raises(UserError, match="a token of logit_bias is True; it must be a whole number"):
        Sampling(logit_bias={True: 1.0})
    with pytest.raises(UserError, match="logit_bias of token 5 is '1'; it must be a number"):
        Sampling(logit_bias={5: "1"})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", {"a"}),
        ("stop", b"a"),
        ("ignore_eos", "no"),
        ("temperature", "0.5"),
        ("logit_bias", "5"),
        ("deadline_s", "5"),
    ],
)
def test_the_kinds_of_options(name, value):
    assert_refused(lambda **options: requests_from("hi", options), name, value, "")


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["high", "low"])
def test_numbers_too_large_for_a_float(value):
    with pytest.raises(UserError, match=r"temperature is -?inf; it must be between"):
        Sampling(temperature=value)


@pytest.mark.parametrize("name", ["n", *REQUEST_NAMES, *SAMPLING_NAMES, *CONSTRAINTS])
def test_an_option_that_is_none_is_not_given(name):
    assert requests_from("hi", {name: None}) == [Request("hi")]
    assert one_answer("hi", {name: None})


def test_numbers_of_numpy_are_numbers():
    """Kept as Python's own, which have no end and go into JSON."""
    wholes, floats = ("max_tokens", "min_tokens", "priority", "depth", "logprobs"), ("temperature", "top_p")
    given = {name: np.int64(1) for name in (*wholes, "n")} | {name: np.float32(0.5) for name in floats}
    given |= {"seed": np.int64(2**63 - 1), "deadline_s": np.float64(1.5), "logit_bias": {np.int32(5): np.float32(0.5)}}
    (request,) = requests_from([np.int64(7)], given)
    sampling = Sampling(temperature=0.5, top_p=0.5, seed=2**63 - 1, logit_bias={5: 0.5})
    assert request == Request([7], 1, sampling, min_tokens=1, priority=1, depth=1, logprobs=1, deadline_s=1.5)
    assert {type(getattr(request, name)) for name in wholes} == {int}
    assert {type(getattr(request.sampling, name)) for name in floats} == {float}
    assert type(request.sampling.seed) is int
    assert [(type(token), type(bias)) for token, bias in request.sampling.logit_bias.items()] == [(int, float)]
    assert [one.sampling.seed for one in requests_from("x", {"n": 2, "seed": np.int64(2**63 - 1)})] == [2**63 - 1, 0]


def test_arrays_are_prompts_and_lists_of_them(build):
    engine = build(one)
    assert engine.generate(np.array([1, 2]), max_tokens=3).tokens == (1,) * 3
    assert len(engine.generate(np.array([[1, 2], [3, 4]]), max_tokens=3)) == 2
    assert engine.generate([1], prediction=np.array([1, 1, 1]), max_tokens=3).tokens == (1,) * 3


def test_a_list_is_taken_whole_or_refused_whole(build):
    engine = build(one, rows=2, settings=Settings(queue=3))
    assert len(engine.generate([[1]] * 6, max_tokens=5)) == 6  # longer than the queue
    for _ in range(5):
        engine.submit(Request([1], max_tokens=5))
    with pytest.raises(QueueFull, match="5 requests wait or run and 5 may; try again later") as refusal:
        engine.generate([[1]] * 2, max_tokens=5)
    assert_one_sentence(str(refusal.value))
    assert engine.load.waiting == 5


@pytest.mark.parametrize(
    ("options", "kind", "source"),
    [
        ({"json_schema": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"json_schema": True}, "json_schema", "true"),
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["a", "b"]}, "choice", ("a", "b")),
        ({"grammar": "start: x", "regex": None}, "grammar", "start: x"),
    ],
)
def test_a_constraint_is_one_of_four_kinds(options, kind, source):
    (request,) = requests_from("x", options)
    assert request.constraint == Constraint(kind, source)


def test_without_a_constraint_there_is_none():
    (request,) = requests_from("x", {"json_schema": None, "choice": None})
    assert request.constraint is None


def test_several_answers_to_a_prompt_have_seeds_of_their_own():
    requests = requests_from(["x", "y"], {"n": 3, "seed": 2**63 - 2, "temperature": 1.0, "max_tokens": 5})
    assert [request.prompt for request in requests] == ["x"] * 3 + ["y"] * 3
    assert [request.sampling.seed for request in requests] == [2**63 - 2, 2**63 - 1, 0] * 2
    assert {request.sampling.seed for request in requests_from("x", {"n": 2})} == {None}


@pytest.mark.parametrize(
    ("prompts", "n", "one"), [("x", 1, True), ([1, 2], 1, True), ("x", 2, False), (["x"], 1, False), ([], 1, False)]
)
def test_one_answer_or_a_list_of_them(prompts, n, one):
    assert one_answer(prompts, {"n": n}) is one


@pytest.mark.parametrize("device", ["cpu:3", "cpu:abc", "auto:1", "gpu", "cuda:x", ""])
def test_devices_that_do_not_exist(device):
    with pytest.raises(UserError, match="it must be auto, cpu, cuda or cuda:N"):
        Settings(device=device)


@pytest.mark.parametrize("name", LEAST)
def test_settings_are_whole_numbers(name):
    with pytest.raises(UserError, match=f"{name} is 2.5; it must be a whole number"):
        Settings(**{name: 2.5})


@pytest.mark.parametrize(("prompt", "pages", "room"), [(10, 8, 54), (64, 8, 0), (10, 6, 34), (1, 1, 3)])
def test_the_longest_answer_is_the_longest_that_is_taken(build, prompt, pages, room):
    engine = build(one, context=64, page=8, pages=pages, depth=4)
    assert longest_answer(prompt, engine.limits) == room
    with pytest.raises(UserError):
        engine.submit(Request([1] * prompt, max_tokens=room + 1))
    if room:
        engine.submit(Request([1] * prompt, max_tokens=room))
