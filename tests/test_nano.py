"""The model that comes with the package: it drafts as well as its card says, and every depth gives the same text."""

import ast

import pytest

import headlong
from headlong.cli import prompts

CODE = [prompt for prompt in prompts.built_in("code").prompts if isinstance(prompt, str)]


@pytest.fixture(scope="module")
def engine():
    with_nano = headlong.load(rows=2)
    yield with_nano
    with_nano.close()


def outputs(engine, depth, **options):
    return [engine.generate(prompt, max_tokens=64, depth=depth, **options) for prompt in CODE]


def test_drafts_are_kept_as_the_card_says(engine):
    one = [output.speculative for output in outputs(engine, 1)]
    assert sum(spent.accepted for spent in one) >= 0.7 * sum(spent.drafted for spent in one)
    three = [output.speculative for output in outputs(engine, 3)]
    assert 1 + sum(spent.accepted for spent in three) / sum(spent.rounds for spent in three) >= 2.3


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
def test_every_depth_gives_plain_decodings_text(engine, options):
    plain = [output.tokens for output in outputs(engine, 0, **options)]
    for depth in (1, 4, 8):
        assert [output.tokens for output in outputs(engine, depth, **options)] == plain
    together = engine.generate(CODE, max_tokens=64, depth=3, **options)
    assert [output.tokens for output in together] == plain


def test_it_writes_python(engine):
    stub = 'import json\n\n\ndef read_json(path):\n    """Read a JSON file."""\n'
    body = engine.generate(stub, max_tokens=64, stop=("\n\n",)).text
    function = ast.parse(stub + body).body[-1]
    assert isinstance(function, ast.FunctionDef)
    assert len(function.body) > 1


def test_it_answers_a_chat_with_code(engine):
    question = [{"role": "user", "content": "Write a Python function that reads a file."}]
    answer = engine.generate(engine.text.encode_chat(question), max_tokens=160)
    assert answer.text.startswith("```python\ndef ")
    assert answer.finish_reason == "stop"
