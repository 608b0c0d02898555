"""`headlong generate`, in this process on the scripted engine."""

import dataclasses
import json
from argparse import Namespace

import pytest

from headlong.cli.generate import options_of
from headlong.cli.request import PLAIN, SAMPLING
from headlong.engine.intake import CONSTRAINTS, Options
from headlong.engine.request import Constraint, Request, Sampling
from headlong.settings import Settings
from tests.cli import fake_model, stub

TEXT = "".join(stub.ANSWER)
FIGURES = (
    "7 tokens in 3 rounds (2.33 a round), 3.5 tok/s, mtp at depth auto (2.0 drafts a window), "
    "accepted by position: 100% 100%\n"
)


@pytest.fixture
def engines(command, monkeypatch):
    """The engines that commands have loaded."""
    loaded = []

    def load(name, **options):
        loaded.append(stub.load(name, **options))
        return loaded[-1]

    monkeypatch.setattr("headlong.load", load)
    return loaded


@pytest.fixture
def generate(command, engines):
    def run(*argv, stdin=b""):
        return command("generate", "-m", "some/model", *argv, stdin=stdin)

    return run


def test_piped_output_is_the_text_and_figures_go_to_stderr(command):
    ran = command("generate", "-m", "m", "-p", "hello")
    assert (ran.code, ran.out, ran.err) == (0, TEXT + "\n", FIGURES)


def test_quiet_is_the_text_alone(command):
    ran = command("generate", "-m", "m", "-p", "hello", "-q")
    assert (ran.code, ran.out, ran.err) == (0, TEXT + "\n", "")


def test_verbose_adds_load_device_and_prompt_speed(command):
    ran = command("generate", "-m", "m", "-p", "hello", "-v", "--device", "cpu")
    first, second, third = ran.err.splitlines()
    assert first + "\n" == FIGURES
    assert second.startswith("m on cpu, loaded in 0.")
    assert second.endswith(" s, prompt 5 tokens at 10.0 tok/s")
    assert third == "queue 0.250 s, prefill 0.500 s, verify 1.000 s, draft 0.750 s, host 0.125 s, depths 2x3"


def test_a_depth_that_was_asked_for_is_told_as_such(command):
    ran = command("generate", "-m", "m", "-p", "hello", "--depth", "1")
    assert ran.err.endswith(" tok/s, mtp at depth 1, accepted by position: 100%\n")


def test_without_drafts_the_reason_is_given(command):
    ran = command("generate", "-m", "m", "-p", "hello", "--no-mtp")
    assert ran.err == "7 tokens in 7 rounds (1.00 a round), 3.5 tok/s, no drafts: drafting was turned off\n"


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "the prompt is empty; give some text with -p or on standard input."),
        (["-m", "", "-p", "x"], "the model's name is empty; name a folder or a hub name, or leave -m out."),
        (["-m", "m", "-p", ""], "the prompt is empty; give some text with -p or on standard input."),
        (["-m", "m"], "the prompt is empty; give some text with -p or on standard input."),
        (["-m", "m", "-p", "x", "--temp", "-1"], "temperature is -1.0; it must be between 0 and 100."),
        (["-m", "m", "-p", "x", "--temp", "nan"], "temperature is nan; it must be between 0 and 100."),
        (["-m", "m", "-p", "x", "--depth", "9"], "depth is 9; it must be auto or between 0 and 8."),
        (["-m", "m", "-p", "x", "-n", "0"], "max_tokens is 0; it must be at least 1."),
        (["-m", "m", "-p", "x", "--stop", ""], "a stop string is empty; give at least one character or leave it out."),
        (
            ["-m", "m", "-p", "x", "--min-tokens", "9", "-n", "8"],
            "min_tokens is 9; it must be between 0 and max_tokens, 8.",
        ),
        (["-m", "m", "-p", "x", "-N", "0"], "n is 0; it must be a whole number between 1 and 128."),
        (["-m", "m", "-p", "x", "--json", "--logprobs", "21"], "logprobs is 21; it must be between 0 and 20."),
        (
            ["-m", "m", "-p", "x", "--logprobs", "2"],
            "--logprobs was given without --json, which alone shows them; add it or leave them out.",
        ),
        (["-m", "m", "-p", "x", "--deadline", "-1"], "deadline_s is -1.0; it must be at least 0."),
        (["-m", "m", "-p", "x", "--deadline", "nan"], "deadline_s is nan; it must be at least 0."),
        (["-m", "m", "-p", "x", "--rows", "0"], "rows is 0; it must be at least 1."),
        (
            ["-m", "m", "-p", "x", "--json-schema", "{}", "--grammar", 'start: "a"'],
            "json_schema and grammar were given; a text can have one constraint: leave the others out.",
        ),
        (
            ["-m", "m", "-p", "x", "--regex", "a", "--choice", "a", "--choice", "b"],
            "regex and choice were given; a text can have one constraint: leave the others out.",
        ),
        (
            ["-m", "m", "-p", "x", "--regex", "a", "--ignore-eos"],
            "ignore_eos was given with a constraint, whose text must be able to end; leave one out.",
        ),
        (
            ["-m", "m", "-p", "x", "--json-schema", "@/nowhere/schema.json"],
            "/nowhere/schema.json cannot be read (No such file or directory); name a file after @, or give the text "
            "itself.",
        ),
        (
            ["-m", "m", "-p", "x", "--prediction", "@/"],
            "/ cannot be read (Is a directory); name a file after @, or give the text itself.",
        ),
        (["-m", "m", "-p", "x", "--grammar", "@"], None),
        (["-m", "m", "-p", "x", "--regex", "\udcff"], None),
        (
            ["-m", "m", "-p", "x", "--prediction", "y", "--no-mtp"],
            "--prediction was given and drafting is turned off; leave one of the two out.",
        ),
        (
            ["-m", "m", "-p", "x", "--prediction", "y", "--depth", "0"],
            "--prediction was given and drafting is turned off; leave one of the two out.",
        ),
        (["-m", "m", "-p", "x", "--draft-kind", "prediction"], None),
        (["-m", "m", "-p", "x", "--dtype", "int3"], None),
        (["-m", "m", "-p", "x", "--device", "abacus"], None),
        (["-m", "m", "-p", "x", "--draft-kind", "oracle"], None),
        (["-m", "m", "-p", "x", "--context", "-1"], None),
        (
            ["-m", "m", "-p", "x", "--depth", "deep"],
            "--depth: 'deep' is not a whole number; run 'headlong generate --help' for what it takes.",
        ),
        (
            ["-m", "m", "-p", "x", "--mtp", "--no-mtp"],
            "--no-mtp: not allowed with argument --mtp; run 'headlong generate --help' for what it takes.",
        ),
        (
            ["-m", "m", "-p", "x", "--prompts", "y"],
            "--prompts: not allowed with argument -p/--prompt; run 'headlong generate --help' for what it takes.",
        ),
        (
            ["-m", "m", "-p", "x", "--temperatur", "1"],
            "'--temperatur' is not an option of headlong generate; run 'headlong generate --help' for those it has.",
        ),
        (
            ["-m", "m", "-p", "x", "-n"],
            "-n/--max-tokens: expected one argument; run 'headlong generate --help' for what it takes.",
        ),
        (
            ["-m", "m", "-p", "x", "--raw", "--system", "y"],
            "--system was given with --raw; a system message needs the chat template, leave one out.",
        ),
    ],
)
def test_mistakes_are_one_sentence_before_any_load(command, monkeypatch, argv, sentence):
    monkeypatch.setattr("headlong.load", None)
    ran = command("generate", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("headlong: ")
    if sentence:
        assert ran.err == f"headlong: {sentence}\n"


@pytest.mark.parametrize("off", [["--no-mtp"], ["--depth", "0"]])
def test_requiring_drafts_and_turning_them_off_exits_3(command, off):
    ran = command("generate", "-m", "m", "-p", "x", "--require-draft", *off)
    assert ran.code == 3
    assert "drafting is turned off" in ran.err


def test_without_a_model_none_is_named(command, engines):
    assert command("generate", "-p", "hello").code == 0
    assert engines[0].name is None


def test_the_defaults_are_those_of_the_dataclasses(generate, engines):
    generate("-p", "hello", "--raw")
    assert engines[0].settings == Settings()
    assert engines[0].requests == [Request("hello")]
    assert engines[0].closed


def test_every_flag_arrives(generate, engines):
    argv = (
        "-p hi --raw -n 5 --temp 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --xtc-probability 0.2 --xtc-threshold 0.3 "
        "--repetition-penalty 1.1 --presence-penalty 0.4 --frequency-penalty 0.6 --seed 7 --stop a --stop b --depth 3 "
        "--draft-kind mtp --device cpu --dtype float32 --context 64 --ignore-eos --min-tokens 2 --deadline 1.5 "
        "--json --logprobs 4 --prediction ho --rows 3"
    )
    assert generate(*argv.split()).code == 0
    sampling = Sampling(0.5, 3, 0.9, 0.1, 0.2, 0.3, 1.1, 0.4, 0.6, seed=7)
    wanted = Request(
        "hi",
        max_tokens=5,
        sampling=sampling,
        stop=("a", "b"),
        min_tokens=2,
        ignore_eos=True,
        logprobs=4,
        depth=3,
        prediction="ho",
        deadline_s=1.5,
    )
    assert engines[0].requests == [wanted]
    assert engines[0].settings == Settings(device="cpu", dtype="float32", rows=3, context=64, draft_kind="mtp")


@pytest.mark.parametrize("kind", ["auto", "mtp", "ngram", "none"])
def test_the_kinds_of_drafting_are_settings(generate, engines, kind):
    assert generate("-p", "x", "--draft-kind", kind).code == 0
    assert engines[0].settings.draft_kind == kind
    assert engines[0].requests[0].draft_kind == "auto"


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["--json-schema", '{"type": "object"}'], Constraint("json_schema", '{"type": "object"}')),
        (["--json-schema", "@{file}"], Constraint("json_schema", "from a file: è\n")),
        (["--grammar", 'start: "a"'], Constraint("grammar", 'start: "a"')),
        (["--grammar", "@{file}"], Constraint("grammar", "from a file: è\n")),
        (["--regex", "@[a-z]+"], Constraint("regex", "@[a-z]+")),
        (["--choice", "yes"], Constraint("choice", ("yes",))),
        (["--choice", "yes", "--choice", "@no"], Constraint("choice", ("yes", "@no"))),
    ],
)
def test_constraints(generate, engines, tmp_path, argv, wanted):
    (tmp_path / "file").write_bytes("from a file: è\n".encode())
    ran = generate("-p", "x", *(text.replace("{file}", str(tmp_path / "file")) for text in argv))
    assert (ran.code, engines[0].requests[0].constraint) == (0, wanted)


def test_a_prediction_can_be_a_file(generate, engines, tmp_path):
    (tmp_path / "old.py").write_text("x = 1\n")
    assert generate("-p", "x", "--prediction", f"@{tmp_path / 'old.py'}").code == 0
    assert engines[0].requests[0].prediction == "x = 1\n"


def test_a_file_that_is_not_utf8_is_refused(generate, tmp_path):
    (tmp_path / "old.py").write_bytes(b"\xff")
    ran = generate("-p", "x", "--prediction", f"@{tmp_path / 'old.py'}")
    assert (ran.code, ran.err) == (2, f"headlong: {tmp_path / 'old.py'} is not UTF-8 (byte 0); save it as UTF-8.\n")


def test_several_answers_to_each_prompt(generate, engines, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    ran = generate("--prompts", str(tmp_path / "prompts.txt"), "-N", "2", "--seed", "7", "--temp", "1")
    assert [(len(one.prompt), one.sampling.seed) for one in engines[0].requests] == [(3, 7), (3, 8), (3, 7), (3, 8)]
    assert (ran.code, ran.out) == (0, f"{TEXT}\n" * 4)
    assert ran.err.startswith("2 prompts, 4 answers, 28 tokens in ")


def test_more_prompts_than_the_queue_holds(generate, engines, tmp_path):
    (tmp_path / "prompts.txt").write_text("x\n" * 1500)
    ran = generate("--prompts", str(tmp_path / "prompts.txt"), "-n", "1")
    assert (ran.code, ran.out.count("\n")) == (0, 1500)
    assert engines[0].settings.queue == 1500


def test_every_sampling_field_but_the_bias_has_a_flag():
    assert set(SAMPLING) == {field.name for field in dataclasses.fields(Sampling)} - {"logit_bias"}


def test_every_option_of_a_request_has_a_flag():
    """But those that only matter among the requests of others, and what kind drafts, which is a setting here."""
    own = ("completions", "logprobs", "prediction", "deadline")
    args = Namespace(**dict.fromkeys((*PLAIN, *SAMPLING, *CONSTRAINTS, *own)))
    assert set(Options.__annotations__) - set(options_of(args)) == {"priority", "draft_kind", "logit_bias"}


def test_the_chat_template_is_used_when_there_is_one(generate, engines):
    generate("-p", "b", "--system", "a")
    assert engines[0].requests[0].prompt == [ord("A"), ord("B")]


def test_without_a_chat_template_the_prompt_is_raw(generate, engines, monkeypatch):
    monkeypatch.setattr(stub.StubText, "has_chat_template", False)
    assert generate("-p", "b").code == 0
    assert engines[0].requests[0].prompt == "b"
    ran = generate("-p", "b", "--system", "a")
    assert ran.code == 2
    assert "no chat template" in ran.err


@pytest.mark.parametrize("argv", [[], ["-p", "-"]])
def test_the_prompt_can_come_from_standard_input(generate, engines, argv):
    generate("--raw", *argv, stdin="è\nsecond line\n".encode())
    assert engines[0].requests[0].prompt == "è\nsecond line"


def test_a_prompt_that_is_not_utf8_is_refused(generate):
    ran = generate(stdin=b"\xff\xfe")
    assert (ran.code, ran.err) == (2, "headlong: standard input is not UTF-8 (byte 0); save it as UTF-8.\n")


def test_many_prompts_run_together_and_answer_in_order(generate, engines, tmp_path):
    (tmp_path / "prompts.txt").write_bytes(b"one\r\n\ntwo\nthree")
    ran = generate("--prompts", str(tmp_path / "prompts.txt"), "--raw")
    assert [request.prompt for request in engines[0].requests] == ["one", "two", "three"]
    assert (ran.code, ran.out) == (0, f"{TEXT}\n" * 3)
    assert ran.err.startswith("3 prompts, 21 tokens in 7 rounds (")


def test_many_prompts_as_json_are_one_object_a_line(generate, tmp_path):
    (tmp_path / "prompts.txt").write_text("one\nlonger\n")
    ran = generate("--prompts", str(tmp_path / "prompts.txt"), "--json")
    assert [json.loads(line)["prompt_tokens"] for line in ran.out.splitlines()] == [3, 6]


@pytest.mark.parametrize("content", [None, b"", b"\n \n"])
def test_a_prompts_file_must_hold_prompts(generate, tmp_path, content):
    path = tmp_path / "prompts.txt"
    if content is not None:
        path.write_bytes(content)
    ran = generate("--prompts", str(path))
    assert ran.code == 2
    assert ran.err.startswith(f"headlong: {path} ")


def test_json_is_one_object_and_nothing_else(generate):
    ran = generate("-p", "hello", "--json")
    answer = json.loads(ran.out)
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
    assert list(answer) == ["model", "prompt_tokens", "tokens", "text", "finish_reason", "speculative", "timings"]
    assert (answer["model"], answer["prompt_tokens"], answer["finish_reason"]) == ("some/model", 5, "stop")
    assert (answer["text"], answer["tokens"]) == (TEXT, list(range(7)))
    assert answer["speculative"] == {
        "requested": "auto",
        "used": "mtp",
        "reason": "",
        "depth": 2,
        "rounds": 3,
        "drafted": 6,
        "accepted": 4,
        "drafted_by_position": [3, 3],
        "accepted_by_position": [3, 3],
        "drafters": {"mtp": [6, 4]},
        "depths": [[2, 3]],
        "mean_length": pytest.approx(7 / 3),
    }
    assert answer["timings"].pop("load_s") >= 0
    assert answer["timings"] == {
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "prompt_tokens": 5,
        "tokens": 7,
        "queue_s": 0.25,
        "verify_s": 1.0,
        "draft_s": 0.75,
        "host_s": 0.125,
        "cached_tokens": 0,
        "prompt_tps": 10.0,
        "decode_tps": 3.5,
        "draft_n": 6,
        "draft_n_accepted": 4,
    }


def test_logprobs_are_in_the_record_when_asked_for(generate):
    got = json.loads(generate("-p", "hello", "-n", "2", "--json", "--logprobs", "1").out)
    assert got["logprobs"] == [{"token": token, "logprob": -0.5, "top": [[0, -1.0]]} for token in (0, 1)]
    assert [one["top"] for one in json.loads(generate("-p", "x", "--json", "--logprobs", "0").out)["logprobs"]] == [
        []
    ] * 7


# --- the real engine over the scripted backend -------------------------------------------------------------------


@pytest.fixture
def fake(command, monkeypatch):
    monkeypatch.setattr("headlong.load", fake_model.load)

    def run(model, *argv):
        return command("generate", "-m", model, "-p", "x", *argv)

    return run


def test_a_deadline_leaves_the_text_so_far(fake):
    ran = fake("slow", "-n", "3000", "--deadline", "0.2", "--depth", "1")
    assert ran.code == 0
    assert ran.out.startswith("abcdef")
    assert len(ran.out) < 3000
    assert ran.err.endswith(", ended at the deadline\n")
    record = json.loads(fake("slow", "-n", "3000", "--deadline", "0", "--json").out)
    assert (record["finish_reason"], record["text"]) == ("deadline", "")


def test_a_fault_is_one_sentence_after_the_text(fake):
    ran = fake("faulty", "--no-mtp", "-n", "20")
    assert (ran.code, ran.out) == (1, "abc\n")
    figures, sentence = ran.err.splitlines()
    assert figures.startswith("3 tokens in 3 rounds ")
    assert sentence == (
        "headlong: the answer broke off: RuntimeError: a cable was cut; run it again with -v to see where."
    )


def test_a_fault_of_several_answers(fake):
    ran = fake("faulty", "--no-mtp", "-n", "20", "-N", "3", "--json")
    assert ran.code == 1
    assert [json.loads(line)["error"] for line in ran.out.splitlines()] == ["RuntimeError: a cable\nwas cut."] * 3
    assert ran.err.startswith("headlong: 3 of 3 answers broke off: RuntimeError: a cable was cut; ")


def test_verbose_shows_where_a_fault_came_from(fake):
    ran = fake("faulty", "--no-mtp", "-n", "20", "-v")
    assert ran.code == 1
    assert 'raise RuntimeError("a cable' in ran.err
    assert ran.err.endswith("headlong: the answer broke off: RuntimeError: a cable was cut.\n")


def test_a_prediction_is_used_and_told(fake):
    expected = "yzabcdefghijklmnopqr"
    ran = fake("headless", "-n", "20", "--prediction", expected, "--depth", "4", "--raw")
    assert (ran.code, ran.out) == (0, f"{expected}\n")
    assert ran.err.endswith(" tok/s, prediction at depth 4, accepted by position: 100% 100% 100% 100%\n")


def test_answers_together_are_those_alone(fake):
    together = fake("fine", "-N", "3", "-n", "9", "--rows", "2", "--json").out.splitlines()
    alone = json.loads(fake("fine", "-n", "9", "--json").out)
    assert [json.loads(line)["tokens"] for line in together] == [alone["tokens"]] * 3
