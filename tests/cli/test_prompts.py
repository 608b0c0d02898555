"""Where the prompts of a bench come from: the sets that are built in, and files of every kind."""

import gzip
import json
from pathlib import Path

import pytest

from headlong.cli import prompts
from headlong.errors import UserError


def user(text):
    return ({"role": "user", "content": text},)


@pytest.fixture
def file(tmp_path):
    def write(name, content):
        path = tmp_path / name
        data = content if isinstance(content, bytes) else content.encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") and isinstance(content, str) else data)
        return path

    return write


@pytest.mark.parametrize(
    ("name", "count", "chat"), [("code", 8, 0), ("prose", 6, 0), ("chat", 6, 1), ("rewrite", 4, 1)]
)
def test_the_sets_that_are_built_in(name, count, chat):
    built = prompts.built_in(name)
    assert (built.name, len(set(map(str, built.prompts)))) == (name, count)
    for prompt in built.prompts:
        assert isinstance(prompt, tuple) == bool(chat)
        text = prompt[0]["content"] if chat else prompt
        assert 20 < len(text) < 1200
        assert text == text.rstrip() + "\n" * (name == "code")


def test_every_set_is_known():
    assert [prompts.built_in(name).name for name in prompts.SETS] == list(prompts.SETS)


def test_files_to_rewrite_are_whole_python():
    for prompt in prompts.built_in("rewrite").prompts:
        source = prompt[0]["content"].split("```python\n")[1].split("```")[0]
        compile(source, "prompt", "exec")
        assert 15 <= len(source.splitlines()) <= 25


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "x"}, "def f():\n"),
        ({"text": "Once upon"}, "Once upon"),
        ({"question_id": 81, "turns": ["first?", "second?"]}, user("first?")),
        ({"question": "How many?", "answer": "4"}, user("How many?")),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]},
            ({"role": "system", "content": "Be brief."}, *user("Hi")),
        ),
        ({"messages": [{"role": "user", "content": "no"}], "prompt": "yes"}, "yes"),
    ],
)
@pytest.mark.parametrize("name", ["some.jsonl", "some.jsonl.gz"])
def test_lines_of_json(file, line, wanted, name):
    got = prompts.read_set(file(name, json.dumps(line) + "\n\n" + json.dumps({"text": "two"}) + "\n"))
    assert got == prompts.PromptSet("some", (wanted, "two"))


@pytest.mark.parametrize("name", ["my.questions.txt", "my.questions", "my.questions.txt.gz"])
def test_other_files_have_one_message_a_line(file, name):
    got = prompts.read_set(file(name, "one two\r\n\n{three\n"))
    assert got.prompts == (user("one two"), user("{three"))
    assert got.name in ("my.questions", "my")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", "\n \n", "a.jsonl holds no prompt; write one on each line."),
        ("a.jsonl", '{"text": "x"}\n{"text": ', "a.jsonl, line 2 is not JSON (Expecting value); a line is one JSON"),
        (
            "a.jsonl",
            '"text"',
            "a.jsonl, line 1 holds no prompt; a line is one JSON object with the field prompt, text,",
        ),
        ("a.jsonl", '{"id": 1}', "a.jsonl, line 1 holds no prompt;"),
        ("a.jsonl", '{"prompt": ["x"]}', "a.jsonl, line 1: prompt holds no text;"),
        ("a.jsonl", '{"text": " "}', "a.jsonl, line 1: text holds no text;"),
        ("a.jsonl", '{"turns": []}', "a.jsonl, line 1: turns holds no text;"),
        ("a.jsonl", '{"turns": "x"}', "a.jsonl, line 1: turns holds no text;"),
        ("a.jsonl", '{"messages": []}', "a.jsonl, line 1: messages must be a list of objects with role and content"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}', "a.jsonl, line 1: messages must be a list of objects"),
        ("a.jsonl", '{"messages": {"role": "user"}}', "a.jsonl, line 1: messages must be a list of objects"),
        ("a.txt", b"\xff\xfe", "a.txt is not UTF-8 (byte 0); save it as UTF-8."),
        ("a.jsonl.gz", b"plain", "a.jsonl.gz is not a whole gzip file (Not a gzipped file (b'pl')); download it again"),
        ("a.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-4], "a.jsonl.gz is not a whole gzip file ("),
    ],
)
def test_broken_files_are_told(file, name, content, sentence):
    with pytest.raises(UserError) as told:
        prompts.read_set(file(name, content))
    assert sentence in str(told.value)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.jsonl cannot be read \(No such file"):
        prompts.read_set(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("limit", "wanted"), [(0, "abcdefgh"), (1, "a"), (3, "acf"), (4, "aceg"), (8, "abcdefgh"), (9, "abcdefgh")]
)
def test_prompts_are_picked_evenly_and_keep_their_places(limit, wanted):
    picked = prompts.PromptSet("x", tuple("abcdefgh")).pick(limit)
    assert picked == [("abcdefgh".index(letter) + 1, letter) for letter in wanted]


def test_names_of_sets_are_different():
    with pytest.raises(UserError, match="two sets are called a; rename a file or leave one out"):
        prompts.check_names(
            [prompts.PromptSet("a", ("x",)), prompts.PromptSet("b", ("x",)), prompts.PromptSet("a", ("y",))]
        )


def test_the_sets_are_packed_with_the_code():
    assert (Path(prompts.__file__).parent / "prompts.toml").is_file()
