"""`headlong chat` without a terminal: turns, commands and mistakes."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest

import headlong
from headlong.cli.commands import COMMANDS
from headlong.cli.lines import Lines, Said
from headlong.cli.main import entrypoint
from headlong.errors import UserError
from tests.cli import fake_model
from tests.cli.conftest import ROOT, plain_environment

FIGURES = r"\d+ tokens? in \d+ rounds? \(.* a round\), .* tok/s, .*"


@pytest.fixture
def engines(monkeypatch):
    """Every engine that is loaded; each remembers the requests it was given."""
    loaded = []

    def load(*named, **settings):
        engine = fake_model.load(*named, **settings)
        submit, engine.requests = engine.submit, []
        monkeypatch.setattr(engine, "submit", lambda request: engine.requests.append(request) or submit(request))
        loaded.append(engine)
        return engine

    monkeypatch.setattr(headlong, "load", load)
    return loaded


@pytest.fixture
def chat(command, engines):
    """Chat with the model that tells what it was told; every line is a turn."""

    def run(*lines, model="parrot", argv=()):
        return command("chat", model, *argv, stdin="".join(f"{line}\n" for line in lines).encode())

    return run


# --- turns -------------------------------------------------------------------------------------------------------


def test_every_turn_knows_those_before(chat):
    ran = chat("one", "two")
    assert (ran.code, ran.out) == (0, "u:one\nu:one a:u:one u:two\n")


def test_figures_come_after_every_answer_and_not_among_them(chat):
    lines = chat("one", "two").err.splitlines()
    assert len(lines) == 2
    assert all(re.fullmatch(FIGURES, line) for line in lines)
    assert chat("one", argv=["-q"]).err == ""
    assert "prefill" in chat("one", argv=["-v"]).err


def test_nothing_is_asked_by_an_empty_line(chat, engines):
    assert chat("", "  ").out == ""
    assert not engines[0].requests


def test_a_system_message_comes_first(chat):
    assert chat("one", argv=["--system", "be brief"]).out == "s:be brief u:one\n"


def test_the_flags_reach_every_request(chat, engines):
    sampling = ["--temperature", "0.5", "--seed", "3", "--top-k", "9"]
    chat("one", "two", argv=["-n", "7", "--stop", "x", "--depth", "2", "--threads", "5", *sampling])
    assert engines[0].settings.threads == 5
    for asked in engines[0].requests:
        assert (asked.max_tokens, asked.stop, asked.depth) == (7, ("x",), 2)
        assert (asked.sampling.temperature, asked.sampling.seed, asked.sampling.top_k) == (0.5, 3, 9)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--temperature", "-1"], "temperature is -1.0; it must be between 0 and 100."),
        (["-n", "0"], "max_tokens is 0; it must be at least 1."),
        (["--completions", "2"], "'--completions' is not an option of headlong chat"),
        (["--no-mtp", "--require-draft"], "--require-draft was given and drafting is turned off"),
    ],
)
def test_what_cannot_be_is_refused_before_the_model_is_loaded(chat, engines, argv, sentence):
    ran = chat("one", argv=argv)
    assert ran.code in (2, 3)
    assert ran.err.startswith(f"headlong: {sentence}")
    assert not engines


def test_a_model_without_a_template_cannot_chat(chat):
    ran = chat("one", model="templateless")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "headlong: templateless has no chat template, so it cannot chat; use headlong generate.\n"


def test_reasoning_stands_apart(chat, tmp_path):
    ran = chat("one", f"/save {tmp_path}/kept", model="thinker")
    assert ran.out == "<think>\nhm\n</think>\nyes\n"
    answer = json.loads((tmp_path / "kept").read_text())[-1]
    assert answer == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_an_answer_that_breaks_off_is_a_fault_and_leaves_no_trace(chat):
    ran = chat("one", "two", model="faulty", argv=["--depth", "0"])
    assert (ran.code, ran.out) == (1, "abc\n")
    assert ran.err.endswith(
        "headlong: the answer broke off: RuntimeError: a cable was cut; run it again with -v to see where.\n"
    )


def test_a_silent_model_is_no_mistake(chat):
    ran = chat("one", "two", model="silent")
    assert (ran.code, ran.out) == (0, "\n\n")


# --- the context -------------------------------------------------------------------------------------------------


def test_an_answer_is_as_long_as_fits(chat, engines):
    ran = chat("one", model="letters", argv=["--context", "40"])
    assert ran.code == 0
    assert len(ran.out) == 40 - len("<user>one<assistant>") + 1
    assert "the context of 40 tokens is full; /undo takes the last turn back, /reset begins anew\n" in ran.err


def test_a_turn_that_does_not_fit_is_refused_with_what_to_do(chat):
    ran = chat("one", "two", argv=["--context", "40"])
    assert (ran.code, ran.out) == (2, "u:one\n")
    assert ran.err.endswith(
        "headlong: with this the conversation has 45 tokens and 40 fit; "
        "/undo takes the last turn back, /reset begins anew.\n"
    )


def test_an_answer_that_was_cut_says_what_allows_more(chat):
    ran = chat("one", argv=["-n", "2"])
    assert ran.out == "u:\n"
    assert ran.err.endswith("\nended at 2 tokens; /max N allows more\n")


# --- commands ----------------------------------------------------------------------------------------------------


def test_help_names_every_command(chat):
    told = chat("/help").err
    assert all(f"{name} " in told and command.does in told for name, command in COMMANDS.items())


def test_quit_leaves(chat):
    ran = chat("one", "/quit", "two")
    assert (ran.code, ran.out) == (0, "u:one\n")


def test_reset_forgets_all_but_the_system_message(chat):
    assert chat("one", "/reset", "two").out == "u:one\nu:two\n"
    ran = chat("one", "/reset", "two", argv=["--system", "be brief"])
    assert ran.out.endswith("\ns:be brief u:two\n")
    assert "a new conversation; the system message stays\n" in ran.err


def test_the_system_message_can_be_changed_told_and_taken_away(chat):
    ran = chat("/system", "/system be  kind", "one", "/reset", "/system none", "one", argv=["--system", "be brief"])
    assert ran.out == "s:be  kind u:one\nu:one\n"
    told = [line for line in ran.err.splitlines() if "system message" in line]
    assert told == [
        "system message: be brief",
        "system message: be  kind",
        "a new conversation; the system message stays",
        "no system message",
    ]


@pytest.mark.parametrize(
    ("line", "told", "field", "value"),
    [
        ("/depth 3", "depth: 3", "depth", 3),
        ("/depth auto", "depth: auto", "depth", None),
        ("/depth off", "depth: off", "depth", 0),
        ("/temperature 0.5", "temperature: 0.5", "temperature", 0.5),
        ("/seed 7", "seed: 7", "seed", 7),
        ("/seed none", "seed: none", "seed", None),
        ("/max 5", "an answer has at most 5 tokens", "max_tokens", 5),
    ],
)
def test_what_is_asked_of_answers_can_be_changed_and_told(chat, engines, line, told, field, value):
    name = line.split()[0]
    ran = chat(line, name, "one", argv=["--depth", "2", "--seed", "1"])
    assert ran.err.startswith(f"{told}\n{told}\n")
    [asked] = engines[0].requests
    assert getattr(asked if hasattr(asked, field) else asked.sampling, field) == value


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/bogus 1", "/bogus is not a command; /help lists them, and a space before the / says it to the model."),
        ("/etc/passwd", "/etc/passwd is not a command; /help lists them, and a space before the / says it"),
        ("/undo 2", "/undo takes no value; leave '2' out."),
        ("/depth many", "'many' is not a whole number; give /depth 1..8|auto|off."),
        ("/depth 99", "depth is 99; it must be auto or between 0 and 8."),
        ("/temperature hot", "'hot' is not a number; give /temperature X."),
        ("/temperature -1", "temperature is -1.0; it must be between 0 and 100."),
        ("/seed -1", "seed is -1; it must be between 0 and"),
        ("/max 0", "max_tokens is 0; it must be at least 1."),
        ("/save", "no file was named; give /save FILE."),
        ("/load /nowhere/at/all", "/nowhere/at/all cannot be read (No such file or directory); name a file that"),
        ("/save /nowhere/at/all", "/nowhere/at/all cannot be written (No such file or directory); choose another"),
        ("/retry", "nothing was asked yet; say something first."),
        ("/undo", "nothing was asked yet; say something first."),
        ("/race", "nothing was asked yet; say something first."),
    ],
)
def test_a_mistake_is_one_sentence_and_ends_a_pipe(chat, line, sentence):
    ran = chat(line, "one")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"headlong: {sentence}")


def test_a_space_says_a_command_to_the_model(chat):
    assert chat(" /help").out == "u: /help\n"


def test_undo_takes_the_last_turn_back(chat):
    ran = chat("one", "two", "/undo", "three")
    assert ran.out.splitlines()[-1] == "u:one a:u:one u:three"
    assert "taken back: two\n" in ran.err


def test_retry_answers_again_with_what_has_changed_since(chat, engines):
    ran = chat("one", "/max 3", "/retry", "/max 99", "two")
    assert ran.out.splitlines() == ["u:one", "u:o", "u:one a:u:o u:two"]
    assert [asked.max_tokens for asked in engines[0].requests] == [1024, 3, 99]


def test_a_retry_that_gives_the_same_says_why(chat):
    hint = "the same answer again; with /temperature 0.8 and /seed none others are drawn\n"
    assert chat("one", "/retry").err.endswith(hint)
    assert hint not in chat("one", "/max 3", "/retry").err
    assert hint not in chat("one", "/temperature 0.8", "/retry").err


def test_stats_are_those_of_the_whole_session(chat):
    ran = chat("/stats", "one", "two", "/reset", "/depth off", "three", "/stats")
    assert ran.err.startswith("the conversation: 0 messages, 0 of 4096 tokens\n")
    auto, plain, prompts, spent, conversation = ran.err.splitlines()[-5:]
    assert re.fullmatch(rf"2 prompts, {FIGURES}", auto)
    assert auto.startswith("2 prompts, 24 tokens in ")
    assert plain.startswith("7 tokens in 8 rounds")
    assert prompts.startswith("prompt 87 tokens")
    assert spent.startswith("an answer on average: ")
    assert conversation == "the conversation: 2 messages, 40 of 4096 tokens"


# --- files -------------------------------------------------------------------------------------------------------


def test_a_conversation_can_be_saved_and_gone_on_with(chat, tmp_path):
    kept = tmp_path / "a talk.json"
    chat("one", f"/save {kept}", argv=["--system", "be brief"])
    assert json.loads(kept.read_text()) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "s:be brief u:one"},
    ]
    ran = chat(f"/load {kept}", "two", f"/save {kept}")
    assert ran.out == "s:be brief u:one a:s:be brief u:one u:two\n"
    assert ran.err.startswith(f"loaded 3 messages from {kept}\n")
    assert ran.err.endswith(f"saved 5 messages in {kept}\n")
    assert len(json.loads(kept.read_text())) == 5


def test_a_file_that_holds_something_else_is_not_written_over(chat, tmp_path):
    notes = tmp_path / "notes"
    notes.write_text("dear diary")
    ran = chat("one", f"/save {notes}")
    assert ran.code == 2
    assert f"{notes} is there and holds no conversation; choose another name." in ran.err
    assert notes.read_text() == "dear diary"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("dear diary", "is not JSON (Expecting value); a JSON list of"),
        ('{"model": "m"}', "holds no messages; a JSON list of"),
        ("[1]", "has no text as its content; a JSON list of"),
        ('[{"role": "user", "content": ["x"]}]', "has no text as its content"),
        ('[{"role": "tool", "content": "x"}]', "is of 'tool'; user or assistant is wanted, or system in the first."),
        ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "is of 'system'; user or"),
    ],
)
def test_files_that_hold_no_conversation_are_refused(chat, tmp_path, content, sentence):
    (tmp_path / "file").write_text(content)
    ran = chat(f"/load {tmp_path / 'file'}")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert sentence in ran.err


def test_a_request_for_an_api_can_be_loaded_and_answered(chat, tmp_path):
    (tmp_path / "file").write_text('{"model": "m", "messages": [{"role": "user", "content": "one"}]}')
    assert chat(f"/load {tmp_path / 'file'}", "/retry").out == "u:one\n"


# --- the race ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8"], ["--temperature", "0.8", "--seed", "3"]])
def test_a_race_compares_the_last_prompt_plain_and_with_drafts(chat, engines, sampling):
    ran = chat("one", "two", "/race", "three", argv=["-n", "30", "--depth", "2", *sampling], model="clocked")
    assert ran.code == 0
    first, second, plain, drafted, third = engines[0].requests
    assert list(plain.prompt) == list(drafted.prompt) == list(second.prompt)
    assert (plain.draft_kind, drafted.draft_kind, drafted.depth) == ("none", "auto", 2)
    assert plain.sampling == drafted.sampling
    assert plain.sampling.seed is not None
    assert third.sampling == first.sampling
    begin, verdict = ran.err.index("plain:\n"), ran.err.index(" times as fast with drafts, identical text\n")
    assert "no drafts: the request asked for plain decoding\nwith drafts:\n" in ran.err[begin:verdict]


def test_a_race_after_depth_off_drafts_as_many_as_pay(chat, engines):
    chat("one", "/depth off", "/race")
    assert [asked.depth for asked in engines[0].requests] == [None, 0, None]


def test_a_race_says_where_texts_differ(chat):
    ran = chat("one", "/race", model="careless", argv=["--depth", "3", "-n", "20"])
    assert re.search(r"times as fast with drafts, but the texts differ from character 3 on\n$", ran.err)


def test_a_race_that_is_cut_short_compares_nothing(chat):
    ran = chat("one", "/race", model="slow", argv=["--deadline", "0.05", "-n", "2000"])
    assert ran.code == 2
    assert ran.err.endswith("headlong: the race was cut short, so there is nothing to compare; /race runs it again.\n")


def test_there_is_no_race_without_drafts(chat):
    ran = chat("one", "/race", argv=["--no-mtp"])
    assert ran.code == 2
    assert ran.err.endswith("headlong: drafting is turned off in this chat; start it without --no-mtp to race.\n")


# --- lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a\\\nb\\\nc\nd\n", ["a\nb\nc", "d"]),
        ('"""a\n  b\n"""\nc\n', ["a\n  b", "c"]),
        ('"""\n  a\n/help\n"""\n', ["  a\n/help"]),
        ('"""a"""\nb\n', ["a", "b"]),
        ('"""a\nb', ["a\nb"]),
        ("a\\", ["a\n"]),
        ("a\r\nb", ["a", "b"]),
    ],
)
def test_several_lines_can_be_one_message(command, engines, typed, messages):
    command("chat", "parrot", stdin=typed.encode())
    prompts = [engines[0].text.decode(asked.prompt) for asked in engines[0].requests]
    assert [re.findall(r"<user>([^<]*)<assistant>", prompt)[-1] for prompt in prompts] == messages


def test_a_command_can_go_on_in_the_next_line(chat):
    assert chat("/system be\\", "brief", "one").out == "s:be\nbrief u:one\n"


def test_what_is_no_text_is_a_mistake(command, engines):
    ran = command("chat", "parrot", stdin=b"one\n\xff\n")
    assert (ran.code, ran.out) == (2, "u:one\n")
    assert ran.err.endswith("headlong: standard input is not UTF-8 (byte 0); save it as UTF-8.\n")


def test_without_standard_input_there_is_nothing_to_say(engines, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert entrypoint(["chat", "parrot"]) == 0


# --- idle time, pipes and Ctrl-C ---------------------------------------------------------------------------------


def test_what_was_said_is_prefilled_while_nobody_speaks(engines, monkeypatch, capsys):
    """The answer is longer than a chunk; decoding leaves it out of the cache."""
    said = iter(["one", "two", None])

    def read(lines):
        until = time.monotonic() + 30
        while engines[0]._loop.turns.busy and time.monotonic() < until:
            time.sleep(0.001)
        text = next(said)
        return text and Said(text, command=False)

    monkeypatch.setattr(Lines, "read", read)
    assert entrypoint(["chat", "letters", "-v", "-n", "600"]) == 0
    assert re.search(r"prompt \d+ tokens \(512 cached\)", capsys.readouterr().err)


def test_a_mistake_while_nobody_speaks_stops_the_rest(engines, monkeypatch, capsys):
    def read(lines):
        raise UserError("it cannot be.")

    monkeypatch.setattr(Lines, "read", read)
    assert entrypoint(["chat", "letters"]) == 2


def test_a_pipe_gets_answers_while_it_is_open_and_ctrl_c_ends_it():
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.cli.fake_model", "chat", "slow", "-n", "2000"],
        cwd=ROOT,
        env=plain_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a runner may have it ignored
    )
    child.stdin.write("one\ntwo\n")
    child.stdin.flush()
    assert child.stdout.read(26) == "abcdefghijklmnopqrstuvwxyz"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out.endswith("\n")
    assert re.fullmatch(rf"{FIGURES}, stopped\n", err)
