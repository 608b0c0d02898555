"""Constraints: which tokens the masks leave, on the embedded model's tokenizer."""

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

import headlong
from headlong.engine.constraint import NAMES, Grammars
from headlong.engine.request import Constraint
from headlong.engine.spelling import spellings
from headlong.errors import Fault, UserError
from tests.engine.conftest import byte_tokenizer

JSON = (Path(headlong.__file__).parent / "assets/nano/tokenizer.json").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_str(JSON)
SIZE, START, END, OTHER_END = 16384, 16382, 16383, 16381
ENDS = {END, OTHER_END}
REFERENCE = LLTokenizer(JSON, eos_token=END)
SPELLINGS = [REFERENCE.decode_bytes([token]) for token in range(SIZE)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pet": {"enum": ["cat", "dog", None]},
        "marks": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "pet", "marks"],
    "additionalProperties": False,
}
CALL = r'{"const": {"name": "get_weather", "arguments": {"city": "Seattle", "unit": "celsius"}}}'
DATE = r"\d{4}-\d\d-\d\d( [a-z]{1,12})?"
COLOURS = ("red", "reddish", "red and green", "blue", "blue", 'a "quoted" \\ one/', "日本語 é", "e\u0301 \x00\x7f\n|.*")
SUMS = """
start: sum
sum: part ("+" part){0,3}
part: NUMBER | "(" NUMBER "-" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
KINDS = {
    "json_schema": json.dumps(PERSON),
    "regex": DATE,
    "choice": COLOURS,
    "grammar": SUMS,
}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
SOURCES = [*KINDS.items(), ("json_schema", CALL), ("json_schema", "{}"), ("regex", ".*"), ("regex", "x{0,3}y|x{2}z")]
EVERY_SOURCE = pytest.mark.parametrize(("kind", "source"), SOURCES)


@cache
def embedded():
    return Grammars(JSON, SIZE, (END, OTHER_END))


@pytest.fixture
def grammars():
    return embedded()


def allowed(row):
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def now(guide):
    return set(allowed(guide.masks(())))


def walk(guide, seed, most=400):
    """Random allowed tokens up to an end token, or as many as are wanted."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < most and not ENDS & set(tokens[-1:]):
        (row,) = guide.masks(())
        tokens.append(rng.choice(allowed(row)))
        guide.accept(tokens[-1:])
    return tokens


def written(tokens):
    assert tokens[-1] in ENDS, "the text did not end"
    return b"".join(SPELLINGS[token] for token in tokens[:-1]).decode()


def write(guide, text):
    """Write a text with the longest tokens that the masks allow."""
    rest = text.encode()
    while rest:
        fitting = [token for token in now(guide) - ENDS if rest.startswith(SPELLINGS[token])]
        assert fitting, f"no token begins {rest!r}"
        token = max(fitting, key=lambda token: len(SPELLINGS[token]))
        guide.accept([token])
        rest = rest[len(SPELLINGS[token]) :]


def is_person(text):
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "pet", "marks"]
        and isinstance(found["name"], str)
        and len(found["name"]) <= 8
        and type(found["age"]) is int
        and 0 <= found["age"] <= 150
        and found["pet"] in ("cat", "dog", None)
        and len(found["marks"]) <= 3
        and all(type(mark) is bool for mark in found["marks"])
    )


FITS = {
    "json_schema": is_person,
    "regex": lambda text: re.fullmatch(DATE, text),
    "choice": lambda text: text in COLOURS,
    "grammar": lambda text: re.fullmatch(r"(N|\(N-N\))(\+(N|\(N-N\))){0,3}".replace("N", "[1-9][0-9]{0,2}"), text),
}


@EVERY_KIND
@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_picked_from_the_masks_fits(grammars, kind, seed):
    text = written(walk(grammars.compile(Constraint(kind, KINDS[kind])), seed))
    assert FITS[kind](text), text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"name":"Zoë \\n","age":7,"pet":null,"marks":[]}'),
        ("json_schema", json.dumps({"name": "Bo", "age": 150, "pet": "cat", "marks": [True, False]})),
        ("json_schema", json.dumps({"name": "Bo", "age": 0, "pet": "dog", "marks": [True]}, indent=4)),
        ("regex", "2024-01-31 midnight"),
        ("grammar", "12+(7-300)+1"),
        *(("choice", colour) for colour in COLOURS),
    ],
)
def test_what_fits_can_be_written(grammars, kind, text):
    guide = grammars.compile(Constraint(kind, KINDS[kind]))
    write(guide, text)
    assert now(guide) >= ENDS


@EVERY_SOURCE
@pytest.mark.parametrize("seed", range(6))
def test_masks_along_drafts_are_those_step_by_step(grammars, kind, source, seed):
    constraint = Constraint(kind, source)
    tokens = walk(grammars.compile(constraint), seed, most=40)
    stepped, told = grammars.compile(constraint), []
    for token in tokens:
        told.append(stepped.masks(()))
        stepped.accept([token])
    steps = np.concatenate([*told, stepped.masks(())])
    assert np.array_equal(grammars.compile(constraint).masks(tokens), steps)
    guide, place, rng = grammars.compile(constraint), 0, random.Random(seed)
    while place < len(tokens):
        drafts = tokens[place : place + rng.randrange(6)]
        assert np.array_equal(guide.masks(drafts), steps[place : place + len(drafts) + 1])
        kept = rng.randint(1, len(drafts) + 1)
        guide.accept(tokens[place : place + kept])
        place += kept


@EVERY_SOURCE
@pytest.mark.parametrize("seed", range(6))
def test_valid_counts_what_the_masks_allow(grammars, kind, source, seed):
    guide, rng = grammars.compile(Constraint(kind, source)), random.Random(seed)
    tokens, cuts = walk(grammars.compile(Constraint(kind, source)), seed, most=30), 0
    for place in range(len(tokens)):
        drafts = [*tokens[place : place + 4], END][: rng.randrange(1, 6)]
        if rng.random() < 0.6:
            other = rng.choice([rng.randrange(SIZE), END, START, SIZE, SIZE + 7, -1, *TOKENIZER.encode('{ ["x').ids])
            drafts[rng.randrange(len(drafts))] = other
        count = guide.valid(drafts)
        masks = guide.masks(drafts[:count])
        assert all(draft in allowed(row) for draft, row in zip(drafts[:count], masks, strict=False))
        if count < len(drafts):
            cuts += 1
            assert drafts[count] not in allowed(masks[count])
        assert len(guide.masks(drafts)) == len(drafts) + 1
        assert np.array_equal(guide.masks(drafts)[: count + 1], masks)  # past a forbidden draft they mean nothing
        guide.forced(rng.randrange(4))  # what is then known of the next tokens changes nothing
        assert guide.valid(drafts) == count
        guide.accept([tokens[place]])
    assert cuts


@EVERY_SOURCE
def test_one_token_is_valid_where_its_bit_is_set(grammars, kind, source):
    guide, rng = grammars.compile(Constraint(kind, source)), random.Random(1)
    for token in walk(grammars.compile(Constraint(kind, source)), 1, most=8):
        found = now(guide)
        some = {*rng.sample(range(SIZE), 100), *rng.sample(sorted(found), min(50, len(found))), END, OTHER_END, START}
        assert {token for token in some if guide.valid([token])} == some & found
        guide.accept([token])


@EVERY_SOURCE
def test_asking_changes_nothing(grammars, kind, source):
    constraint, rng = Constraint(kind, source), random.Random(5)
    tokens = walk(grammars.compile(constraint), 5, most=30)
    asked, left = grammars.compile(constraint), grammars.compile(constraint)
    for place, token in enumerate(tokens):
        for drafts in (tokens[place : place + 4], [token, rng.randrange(SIZE)], [END, 5], [5, 6]):
            asked.forced(rng.randrange(6))
            asked.masks(drafts[: asked.valid(drafts)])
            asked.masks(drafts)
        assert np.array_equal(asked.masks(()), left.masks(()))
        assert asked.complete == left.complete
        asked.accept([token])
        left.accept([token])


@EVERY_SOURCE
def test_forced_tokens_are_the_only_choice(grammars, kind, source):
    guide = grammars.compile(Constraint(kind, source))
    for token in walk(grammars.compile(Constraint(kind, source)), 3, most=60):
        forced = guide.forced(4)
        assert guide.valid(forced) == len(forced) <= 4
        for draft, row in zip(forced, guide.masks(forced), strict=False):
            assert allowed(row) == [draft]
        guide.accept([token])


def test_a_text_without_choice_is_forced_whole(grammars):
    guide = grammars.compile(Constraint("choice", ("The quick brown fox jumps over the lazy dog.",)))
    forced = guide.forced(100)
    assert TOKENIZER.decode(list(forced)) == "The quick brown fox jumps over the lazy dog."
    assert (guide.forced(0), guide.forced(3)) == ((), forced[:3])
    guide.accept(forced[:2])
    assert guide.forced(3) == forced[2:5]
    guide.accept(forced[2:])
    assert guide.forced(3) == ()
    assert guide.complete


@pytest.mark.parametrize("asked", [0, 5])
def test_a_forced_text_has_its_usual_tokens_alone(grammars, asked):
    text = "import numpy as np"
    guide = grammars.compile(Constraint("choice", (text,)))
    assert list(guide.forced(asked)) == TOKENIZER.encode(text).ids[:asked]
    letters = [TOKENIZER.token_to_id(letter) for letter in "im"]
    assert guide.valid(letters) == 0
    guide.accept(letters)  # as nobody should
    forced = guide.forced(20)
    assert [allowed(row) for row in guide.masks(forced)[:-1]] == [[token] for token in forced]
    assert TOKENIZER.decode(letters + list(forced)) == text


@pytest.mark.parametrize("text", ["<|im_end|>", "say <|im_start|> now", "e\u0301", "\u212b and ﬁ", "a\n\n  b"])
@pytest.mark.parametrize("kind", ["choice", "regex", "json_schema", "grammar"])
def test_a_forced_text_is_never_changed(grammars, kind, text):
    """Special tokens spelled out stay text, and letters stay as they were composed."""
    quoted = json.dumps(text, ensure_ascii=False)
    source = {
        "choice": (text,),
        "regex": re.sub(r"([|.])", r"\\\1", text),
        "json_schema": json.dumps({"const": text}),
        "grammar": f"start: {quoted}",
    }[kind]
    found = written(walk(grammars.compile(Constraint(kind, source)), 1))
    assert (json.loads(found) if kind == "json_schema" else found) == text


def test_end_tokens_are_allowed_alike(grammars):
    guide = grammars.compile(Constraint("regex", "ab?"))
    assert not now(guide) & ENDS
    write(guide, "a")
    assert now(guide) == {*ENDS, TOKENIZER.token_to_id("b")}
    write(guide, "b")
    assert now(guide) == ENDS


@pytest.mark.parametrize("end", sorted(ENDS))
def test_an_end_token_may_be_a_draft(grammars, end):
    guide = grammars.compile(Constraint("regex", "ab?"))
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    assert [guide.valid(drafts) for drafts in ([end], [a, end], [a, end, b], [a, end, END])] == [0, 2, 2, 3]
    rows = [set(allowed(row)) for row in guide.masks([a, end, OTHER_END])]
    assert rows[1:] == [{b, *ENDS}, ENDS, ENDS]
    guide.accept([a, end])
    assert guide.complete
    assert now(guide) == ENDS
    assert (guide.valid([END, OTHER_END, a]), guide.valid([b])) == (2, 0)


def test_complete_means_that_only_an_end_token_may_follow(grammars):
    for kind, source, text, complete in [
        ("regex", "", "", True),
        ("regex", "a*", "", False),
        ("regex", "a*", "aa", False),
        ("regex", "a{1,2}", "a", False),
        ("regex", "a{1,2}", "aa", True),
        ("choice", ("red", "reddish"), "red", False),
        ("choice", ("red", "reddish"), "reddish", True),
        ("json_schema", '{"type": "boolean"}', "true", True),
    ]:
        guide = grammars.compile(Constraint(kind, source))
        write(guide, text)
        assert guide.complete is complete, (source, text)
        assert (now(guide) == ENDS) is complete


@pytest.mark.parametrize("source", [".*", r"(.|\n)*", r"[^a]*", r"(?s:.)*", r"\W*"])
def test_a_free_regex_allows_no_special_token(grammars, source):
    found = now(grammars.compile(Constraint("regex", source)))
    assert START not in found
    assert found > ENDS


def test_digits_are_those_of_ascii(grammars):
    found = now(grammars.compile(Constraint("regex", r"\d")))
    assert {SPELLINGS[token] for token in found} == {b"%d" % digit for digit in range(10)}


def test_a_grammar_may_name_special_tokens(grammars):
    guide = grammars.compile(Constraint("grammar", 'start: "a" <|im_start|> "b" <|im_end|>'))
    write(guide, "a")
    assert now(guide) == {START}
    guide.accept([START])
    write(guide, "b")
    assert now(guide) == ENDS
    assert (guide.forced(3), guide.valid([OTHER_END]), guide.valid([END])) == ((), 1, 1)


def test_nothing_past_the_tokenizer_is_allowed_but_an_end_token():
    vocab, late_end = SIZE + 140, SIZE + 100
    grammars = Grammars(JSON, vocab, (END, OTHER_END, late_end, vocab + 3))
    for source in ('start: <[*]> "b"?', "start: /.*/", 'start: "a"'):
        guide = grammars.compile(Constraint("grammar", source))
        assert guide.masks((5, 6)).shape == (3, -(-vocab // 32))
        guide.accept([next(iter(now(guide) - ENDS - {late_end}))])
        assert {token for token in now(guide) if token >= SIZE} == {late_end}
        assert guide.valid([late_end]) == 1
        assert guide.valid([SIZE + 1]) == 0


@pytest.mark.parametrize(("vocab", "eos"), [(SIZE - 1, (5,)), (SIZE + 9, ()), (SIZE + 9, (SIZE + 3,))])
def test_a_tokenizer_that_does_not_fit_is_refused(vocab, eos):
    with pytest.raises(UserError, match=r"^the tokenizer [^\n]+\.$"):
        Grammars(JSON, vocab, eos)


def test_tokens_are_spelled_as_llguidance_does():
    for token, spelling in enumerate(spellings(TOKENIZER)):
        assert spelling.removeprefix(b"\xff") == SPELLINGS[token]
        assert spelling.startswith(b"\xff") == REFERENCE.is_special_token(token)


def gappy_tokenizer():
    base = byte_tokenizer([("a", "b")])
    vocab = {name: 2 * token for name, token in base.get_vocab(with_added_tokens=False).items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = base.pre_tokenizer, base.decoder
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer, tokenizer.token_to_id("<end>")


def fallback_tokenizer():
    names = ["<end>", "<unk>", "▁", "▁Hello", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer, 0


@pytest.mark.parametrize("make", [gappy_tokenizer, fallback_tokenizer])
def test_other_tokenizers_write_the_same_texts(make):
    tokenizer, end = make()
    choices = (" Hello world é", "abba", " Hello there")
    grammars, found = Grammars(tokenizer.to_str(), 1000, (end,)), set()
    for seed in range(20):
        guide, rng, tokens = grammars.compile(Constraint("choice", choices)), random.Random(seed), []
        while not guide.complete:
            tokens.append(rng.choice(sorted(now(guide))))
            guide.accept(tokens[-1:])
        found.add(tokenizer.decode(tokens))
    assert found == set(choices)


def test_a_tokenizer_without_bytes_is_refused():
    with pytest.raises(UserError, match=r"\.$"):
        Grammars(Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str(), 2, (1,))


def test_whitespace_has_an_end(grammars):
    guide, blanks = grammars.compile(Constraint("json_schema", '{"type": "object"}')), 0
    write(guide, "{")
    while blank := [token for token in now(guide) if not SPELLINGS[token].strip()]:
        guide.accept(blank[:1])
        blanks += len(SPELLINGS[blank[0]])
        assert blanks < 40
    assert blanks


def test_a_schema_may_choose_its_whitespace(grammars):
    compact = {"x-guidance": {"whitespace_flexible": False}, **PERSON}
    guide = grammars.compile(Constraint("json_schema", json.dumps(compact)))
    assert {SPELLINGS[token] for token in now(guide)} == {b'{"'}
    write(guide, '{"name":"x","age":7,')
    assert not [token for token in now(guide) if SPELLINGS[token].isspace()]


REFUSED = [
    ("json_schema", ["{", "", "[1]", "false", '{"minimum": NaN}', "[" * 100_000, '{"type": "frob"}']),
    ("json_schema", ['{"type": "integer", "minimum": 5, "maximum": 3}', '{"pattern": "a("}', '{"$ref": "#/nowhere"}']),
    ("regex", ["a(", "(?=a)b", r"(a)\1", "ab\\", "(" * 300 + ")" * 300, "\ud800"]),
    ("choice", [(), ("a", ""), ("a", "\ud800")]),
    ("grammar", ["", '{"grammars": []}', "start: foo bar", 'begin: "a"', 'start: "a', "start: start"]),
    ("grammar", ['start: t "b"\nt[stop="END"]: /[a-z]*/', 'start: t "b"\nt[max_tokens=3]: /[a-z]*/']),
]


@pytest.mark.parametrize(
    ("kind", "source"),
    [(kind, source) for kind, sources in REFUSED for source in sources],
    ids=lambda value: ascii(value)[:40],
)
def test_a_refusal_is_one_sentence(grammars, kind, source):
    with pytest.raises(UserError) as refusal:
        grammars.compile(Constraint(kind, source))
    told = str(refusal.value)
    assert re.fullmatch(rf"the {NAMES[kind]} does not compile \([^\n]{{5,200}}\); [^\n]+[^.]\.", told), told


def test_a_refusal_says_what_is_wrong(grammars):
    for kind, source, told in [
        ("regex", "a(", "unclosed group"),
        ("json_schema", '{"not": {}}', 'Unimplemented keys: ["not"]'),
        ("grammar", "start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("grammar", "start: start", "no token may come next"),
        ("choice", (), "it is empty"),
    ]:
        with pytest.raises(UserError, match=re.escape(told)):
            grammars.compile(Constraint(kind, source))


@pytest.mark.parametrize(
    ("kind", "source", "told"),
    [
        ("xml", "<a/>", "the constraint's kind is 'xml'; it must be one of json_schema, regex, choice, grammar."),
        (["a"], "a", "the constraint's kind is ['a']; it must be one of json_schema, regex, choice, grammar."),
        ("json_schema", ("{}",), "json_schema is ('{}',); it must be a text."),
        ("regex", None, "regex is None; it must be a text."),
        ("choice", "abc", "choice is 'abc'; it must be a list of texts."),
        ("choice", ("a", 5), "choice is ('a', 5); it must be a list of texts."),
    ],
)
def test_what_is_no_constraint_is_refused_where_it_is_made(kind, source, told):
    with pytest.raises(UserError) as refusal:
        Constraint(kind, source)
    assert str(refusal.value) == told


def test_what_is_not_allowed_cannot_be_accepted(grammars):
    a, b = TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")
    with pytest.raises(Fault):
        grammars.compile(Constraint("regex", "ab")).accept([b])
    over = grammars.compile(Constraint("regex", "a?"))
    over.accept([END])
    with pytest.raises(Fault, match="over"):
        over.accept([a])


def test_a_grammar_that_breaks_on_the_way_is_a_fault(grammars):
    guide = grammars.compile(Constraint("grammar", 'start: "a" | "a" more\nmore: "b" more'))
    guide.accept([TOKENIZER.token_to_id("a"), TOKENIZER.token_to_id("b")])
    (only,) = now(guide)
    with pytest.raises(Fault, match=r"^[^\n]+Too many items[^\n]+\.$"):
        guide.accept([only])
    with pytest.raises(Fault, match=r"^[^\n]+Too many items[^\n]+\.$"):
        guide.masks(())


def test_many_threads_may_compile(grammars):
    def text(seed):
        kind = list(KINDS)[seed % len(KINDS)]
        return kind, written(walk(grammars.compile(Constraint(kind, KINDS[kind])), seed))

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(text, range(64)))
    assert all(FITS[kind](told) for kind, told in found)
    assert found == [text(seed) for seed in range(64)]


def test_llguidance_is_not_imported_before_it_is_needed():
    code = "import sys, headlong, headlong.engine.constraint; sys.exit('llguidance' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=6), st.integers(0, 1000))
def test_any_list_of_choices(texts, seed):
    grammars = embedded()
    assert written(walk(grammars.compile(Constraint("choice", tuple(texts))), seed)) in texts
    for text in texts:
        guide = grammars.compile(Constraint("choice", tuple(texts)))
        write(guide, text)
        assert now(guide) >= ENDS
        others = {other for other in texts if other != text and other.startswith(text)}
        assert guide.complete is not bool(others)
