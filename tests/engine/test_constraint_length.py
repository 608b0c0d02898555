"""Constraints and `min_tokens`: a text that may end or go on goes on, one that is whole ends, whoever drafts."""

import json
import random
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

import headlong
from headlong.engine.request import Constraint, Request, Sampling
from tests import tiny
from tests.engine.mix import alone, fits
from tests.engine.scripted import MIXED, RIGHT, WRONG, assert_empty, run
from tests.engine.test_constraint import (
    END,
    ENDS,
    EVERY_SOURCE,
    OTHER_END,
    TOKENIZER,
    allowed,
    embedded,
    now,
    walk,
    write,
)

INTEGER = '{"type": "integer", "minimum": 0, "maximum": 9999}'
OBJECT = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "xyz"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


class Case(NamedTuple):
    constraint: Constraint
    said: str  # by the model
    least: int  # tokens
    text: str  # that comes of it


CASES = [
    Case(Constraint("choice", ("hello world foo bar baz",)), "hello world foo bar baz", 30, "hello world foo bar baz"),
    Case(Constraint("choice", ("no", "nobody")), "no", 4, "nobody"),
    Case(Constraint("regex", "ab(cd)?"), "ab", 10, "abcd"),
    Case(Constraint("regex", "ab(cd)?"), "ab", 2, "ab"),
    Case(Constraint("regex", "[a-c]{1,9}"), "abc", 6, "abcaaa"),
    Case(Constraint("json_schema", INTEGER), "12", 3, "120"),
    Case(Constraint("json_schema", OBJECT), '{"a":7}', 25, '{"a":7}'),
    Case(Constraint("json_schema", OBJECT), '{"a":7,"b":"x"}', 9, '{"a":7,"b":"x"}'),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.said} {case.least}")
DEPTHS = (None, 1, 3, 8)


# --- masks -------------------------------------------------------------------------------------------------------


def guide_of(kind, source, least):
    return embedded().compile(Constraint(kind, source), least)


def test_end_tokens_wait_while_there_is_something_else():
    guide = guide_of("regex", "ab?c?", 2)
    write(guide, "a")
    assert now(guide) == {TOKENIZER.token_to_id(text) for text in ("b", "c", "bc")} - {None}
    assert (guide.valid([END]), guide.valid([OTHER_END])) == (0, 0)
    write(guide, "b")
    assert now(guide) == {TOKENIZER.token_to_id("c"), *ENDS}
    assert guide.valid([END]) == 1
    write(guide, "c")
    assert guide.complete


def test_a_whole_text_may_end_at_once():
    guide = guide_of("regex", "ab?", 10)
    drafts = [TOKENIZER.token_to_id(letter) for letter in "ab"]
    assert [set(allowed(row)) for row in guide.masks([*drafts, END])][2:] == [ENDS, ENDS]
    assert guide.valid([*drafts, END]) == 3
    assert guide.valid([drafts[0], END]) == 1
    write(guide, "ab")
    assert now(guide) == ENDS


def test_an_end_token_that_a_grammar_names_may_come_at_once():
    guide = guide_of("grammar", 'start: "a" <|im_end|>', 10)
    write(guide, "a")
    assert now(guide) == ENDS


@EVERY_SOURCE
@pytest.mark.parametrize("least", [3, 12])
def test_masks_along_drafts_count_them(kind, source, least):
    tokens = walk(guide_of(kind, source, least), least, most=30)
    stepped, free = guide_of(kind, source, least), guide_of(kind, source, 0)
    steps, place, rng = [], 0, random.Random(least)
    for written, token in enumerate(tokens):
        here, otherwise = now(stepped), now(free)
        early = written < least and otherwise > ENDS
        assert here == (otherwise - ENDS if early else otherwise)
        assert {end for end in ENDS if stepped.valid([end])} == here & ENDS
        steps.append(stepped.masks(()))
        stepped.accept([token])
        free.accept([token])
    guide = guide_of(kind, source, least)
    while place < len(tokens):
        drafts = tokens[place : place + rng.randrange(6)]
        assert guide.valid(drafts) == len(drafts)
        for row, step in zip(guide.masks(drafts), steps[place:], strict=False):
            assert np.array_equal(row, step[0])
        kept = rng.randint(1, len(drafts) + 1)
        guide.accept(tokens[place : place + kept])
        place += kept


# --- texts -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("tiny"), with_tokenizer=True, agreeable=True)
    return headlong.load(folder, device="cpu", rows=1, page=16, chunk=32, context=192)


def told(output):
    return output.text, output.tokens, output.finish_reason


def ways(request, right):
    """The same request under every drafter."""
    begun, wrong = right[: len(right) // 2], right[::-1]
    predictions = [right, wrong, (*begun, *wrong), (*right, *right)]
    yield from (replace(request, draft_kind=kind, depth=depth) for kind in ("auto", "mtp", "ngram") for depth in DEPTHS)
    yield from (
        replace(request, draft_kind="prediction", prediction=each, depth=depth)
        for each in predictions
        for depth in DEPTHS
    )


@EVERY_CASE
@pytest.mark.parametrize("right", [RIGHT, WRONG, MIXED])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3), Sampling(1.0)])
def test_drafts_do_not_move_the_end(build, says, case, right, sampling):
    engine = build(says(case.said), right)
    ask = alone(engine)
    asked = Request("x", 40, sampling, min_tokens=case.least, constraint=case.constraint)
    plain = ask(replace(asked, draft_kind="none"))
    assert (plain.text, plain.finish_reason) == (case.text, "stop")
    accepted = 0
    for each in ways(asked, plain.tokens):
        output = ask(each)
        assert told(output) == told(plain), f"{output.error} in {each}"
        accepted += output.speculative.accepted
    assert accepted
    assert_empty(engine)


@EVERY_CASE
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, seed=3)])
def test_a_real_model_ends_alike_too(model, case, sampling):
    ask = alone(model)
    asked = Request("x", 40, sampling, min_tokens=case.least, constraint=case.constraint, logprobs=1)
    plain = ask(replace(asked, draft_kind="none"))
    assert plain.finish_reason == "length" or fits(case.constraint, plain.text)
    for each in ways(asked, plain.tokens):
        output = ask(each)
        assert told(output) == told(plain), f"{output.error} in {each}"


def test_a_request_without_a_constraint_keeps_its_quiet_tokens(build, says, end):
    """Beside one that has one."""
    engine = build(says("ab"), RIGHT, rows=2)
    regex = Constraint("regex", "ab(cd)?")
    indices = [engine.submit(Request("x", 20, min_tokens=6, constraint=each)) for each in (None, regex)]
    engine.step()
    quiet = [(row.start.quiet, row.start.min_tokens) for row in engine.backend.rows.values()]
    run(engine)
    assert quiet == [((end,), 6), ((), 0)]
    free, bound = (engine.output(index) for index in indices)
    assert (len(free.tokens), free.finish_reason) == (6, "stop")
    assert (bound.text, bound.finish_reason) == ("abcd", "stop")
