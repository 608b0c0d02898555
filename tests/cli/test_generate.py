"""`headlong generate`, in this process on the scripted engine."""

import dataclasses
import json

import pytest

from headlong.engine.request import Request, Sampling
from headlong.settings import Settings
from tests.cli import stub

TEXT = "".join(stub.ANSWER)
FIGURES = "7 tokens in 3 rounds (2.33 a round), 3.5 tok/s, mtp at depth 2, accepted by position: 100% 100%\n"


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
    first, second = ran.err.splitlines()
    assert first + "\n" == FIGURES
    assert second.startswith("m on cpu, loaded in 0.")
    assert second.endswith(" s, prompt 5 tokens at 10.0 tok/s")


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
        "--draft-kind mtp --device cpu --dtype float32 --context 64 --ignore-eos"
    )
    assert generate(*argv.split()).code == 0
    sampling = Sampling(0.5, 3, 0.9, 0.1, 0.2, 0.3, 1.1, 0.4, 0.6, seed=7)
    assert engines[0].requests == [Request("hi", 5, sampling, ("a", "b"), 3, ignore_eos=True)]
    assert engines[0].settings == Settings(device="cpu", dtype="float32", context=64, draft_kind="mtp")


def test_every_sampling_field_but_the_bias_has_a_flag():
    from headlong.cli.generate import SAMPLING

    assert set(SAMPLING) == {field.name for field in dataclasses.fields(Sampling)} - {"logit_bias"}


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
        "mean_length": pytest.approx(7 / 3),
    }
    assert answer["timings"].pop("load_s") >= 0
    assert answer["timings"] == {
        "prefill_s": 0.5,
        "decode_s": 2.0,
        "prompt_tps": 10.0,
        "decode_tps": 3.5,
        "draft_n": 6,
        "draft_n_accepted": 4,
    }
