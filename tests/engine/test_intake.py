"""Everything that is refused, each with one sentence that says what to do."""

import pytest

from headlong.engine.request import Request
from headlong.errors import UserError
from headlong.settings import Settings


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
        ([1, "a"], {}, "the prompt holds 'a'; a prompt is text or a sequence of token ids"),
        ([1] * 64, {}, "the prompt has 64 tokens and the context 64, which must also hold the answer"),
        ([1] * 60, {"max_tokens": 5}, "together more than the context of 64; ask for at most 4"),
        ([1] * 60, {}, "max_tokens is 256"),
        ([1], {"max_tokens": 0}, "max_tokens is 0"),
        ([1], {"logit_bias": {300: 1.0}}, "logit_bias holds token 300"),
        ([1], {"depth": 9}, "depth is 9"),
        ([1], {"stop": ["a", ""]}, "a stop string is empty"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": 1e-46}, "temperature is 1e-46; it must be 0"),
        ([1], {"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ([1], {"seed": 2**63}, "seed is 9223372036854775808; it must be between 0 and 9223372036854775807"),
        ([1], {"top_k": 1.5}, "top_k is 1.5; it must be a whole number"),
        ([1], {"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
        ([1], {"depth": 1.5}, "depth is 1.5; it must be a whole number"),
        ([1], {"logit_bias": {"5": 1.0}}, "a token of logit_bias is '5'; it must be a whole number"),
        ([1], {"temprature": 1.0, "topk": 2}, "temprature, topk is not an option of a request; those are max_tokens"),
        ([1], {"sampling": None}, "sampling is not an option"),
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


def test_a_request_that_could_never_have_its_pages_is_refused(build):
    engine = build(one, pages=2, page=4)
    with pytest.raises(UserError, match="may need 3 pages of 4 tokens and the cache has 2") as refusal:
        engine.submit(Request([1, 2], max_tokens=8, draft=False))
    assert_one_sentence(str(refusal.value))
    assert engine.generate([1, 2], max_tokens=6, draft=False).tokens == (1,) * 6


def test_a_refusal_leaves_the_other_prompts_of_the_call_unqueued(build):
    engine = build(one)
    with pytest.raises(UserError):
        engine.generate([[1], []], max_tokens=5)
    assert not engine.busy


@pytest.mark.parametrize("stop", ["END", None, ("a", 1)], ids=repr)
def test_stop_is_a_tuple_of_strings(stop):
    with pytest.raises(UserError, match="it must be a tuple of strings"):
        Request("hi", stop=stop)


@pytest.mark.parametrize("device", ["cpu:3", "cpu:abc", "auto:1", "gpu", "cuda:x", ""])
def test_devices_that_do_not_exist(device):
    with pytest.raises(UserError, match="it must be auto, cpu, cuda or cuda:N"):
        Settings(device=device)


@pytest.mark.parametrize("name", ["rows", "context", "page", "chunk", "threads"])
def test_settings_are_whole_numbers(name):
    with pytest.raises(UserError, match=f"{name} is 2.5; it must be a whole number"):
        Settings(**{name: 2.5})
