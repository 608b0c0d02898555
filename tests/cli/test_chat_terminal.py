"""`headlong chat` at a terminal: colours, keys, history, and the model that comes with headlong."""

import os
import re
import stat
import subprocess
import time

import pytest

from tests.cli.terminal import CTRL_C, CTRL_D, UP, Terminal

COLOUR = re.compile(r"\x1b\[[\d;]*m")
LEAVING = "Ctrl-D or /quit leaves; Ctrl-C stops an answer"


@pytest.fixture
def home(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def open_chat(home):
    def open_chat(*argv, module="tests.cli.fake_model", colour=False, **streams):
        environment = {"XDG_STATE_HOME": str(home)} | ({} if colour else {"NO_COLOR": "1"})
        return Terminal(module, "chat", *argv, environment=environment, **streams)

    return open_chat


def test_turns_at_a_prompt(open_chat):
    with open_chat("parrot") as terminal:
        terminal.wait_for("loading parrot")
        terminal.wait_for("parrot on abacus with 2 beads; /help lists the commands, Ctrl-D leaves\n> ")
        terminal.type("one\n")
        assert terminal.wait_for("\n> ").startswith("one\nu:one\n5 tokens in ")
        terminal.type("two\n")
        assert terminal.wait_for("\n> ").startswith("two\nu:one a:u:one u:two\n")
        terminal.type(CTRL_D)
        assert terminal.leave() == (0, "\n")


def test_no_color_means_none(open_chat):
    with open_chat("parrot") as terminal:
        terminal.type("one\n/help\n/bogus\n/quit\n")
        code, shown = terminal.leave()
        assert code == 0
        assert "/bogus is not a command" in shown
        assert not COLOUR.search(shown)


def test_drafts_are_coloured_by_their_position(open_chat):
    with open_chat("parrot", "--depth", "2", colour=True) as terminal:
        assert "\x1b[32m, draft 1\x1b[0m\x1b[36m, draft 2\x1b[0m" in terminal.wait_for("> ")
        terminal.type("one\n")
        assert "\n\x1b[32mu\x1b[0m\x1b[36m:\x1b[0mo" in terminal.wait_for("> ")


def test_reasoning_is_dim(open_chat):
    with open_chat("thinker", "--depth", "0", colour=True) as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("\x1b[2m<think>\n\x1b[0m\x1b[2mh\x1b[0m\x1b[2mm\x1b[0m\x1b[2m\n</think>\n\x1b[0myes\n")


def test_mistakes_are_told_and_the_chat_goes_on(open_chat):
    with open_chat("parrot", "--context", "40") as terminal:
        terminal.wait_for("> ")
        terminal.type("/bogus\n")
        terminal.wait_for(
            "\n/bogus is not a command; /help lists them, and a space before the / says it to the model.\n"
        )
        terminal.type("one\n")
        terminal.wait_for("\nu:one\n")
        terminal.type("two\n")
        terminal.wait_for("\nwith this the conversation has 45 tokens and 40 fit; /undo takes the last turn back")
        terminal.type("/undo\n")
        terminal.wait_for("\ntaken back: one\n")
        terminal.type("two\n")
        terminal.wait_for("\nu:two\n")
        terminal.type("/quit\n")
        assert terminal.leave()[0] == 0


def test_a_fault_ends_an_answer_and_not_the_chat(open_chat):
    with open_chat("faulty") as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("the answer broke off: RuntimeError: a cable was cut; run it again with -v to see where.\n")
        terminal.type("/stats\n")
        terminal.wait_for("the conversation: 0 messages")


# --- keys --------------------------------------------------------------------------------------------------------


def test_ctrl_c_stops_the_answer_and_not_the_chat(open_chat, tmp_path):
    with open_chat("slow", "-n", "4000") as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("abcdefghijklmnopqrstuvwxyz")
        terminal.type(CTRL_C)
        assert terminal.wait_for("\n> ").endswith(", stopped\n> ")
        terminal.type(f"/save {tmp_path}/kept\n")
        terminal.wait_for("saved 2 messages")
        terminal.type("/max 3\nagain\n")
        assert "\nabc\n" in terminal.wait_for("/max N allows more\n> ")
        terminal.type(CTRL_D)
        assert terminal.leave()[0] == 0
    kept = (tmp_path / "kept").read_text()
    assert "abcdefghijklmnopqrstuvwxyz" in kept
    assert '"stopped": true' in kept


def test_pressing_ctrl_c_again_stops_no_more_than_the_answer(open_chat):
    with open_chat("sluggish") as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("a")
        terminal.wait_for("b")
        for _ in range(3):
            terminal.type(CTRL_C)
        assert LEAVING not in terminal.wait_for(", stopped\n> ")
        terminal.type("/stats\n")
        terminal.wait_for("the conversation: 2 messages")


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(open_chat):
    with open_chat("parrot") as terminal:
        terminal.wait_for("> ")
        terminal.type("not this")
        terminal.wait_for("not this")
        terminal.type(CTRL_C)
        terminal.wait_for(f"{LEAVING}\n> ")
        for _ in range(3):
            terminal.type(CTRL_C)
            terminal.wait_for(f"{LEAVING}\n> ")
        terminal.type("one\n")
        terminal.wait_for("\nu:one\n")


def test_keys_pressed_during_an_answer_wait_for_the_prompt(open_chat):
    with open_chat("slow", "-n", "1500") as terminal:
        terminal.wait_for("> ")
        terminal.type("one\n")
        terminal.wait_for("abc")
        terminal.type("/quit")
        assert "/quit" not in terminal.wait_for(" tok/s")
        terminal.wait_for("> /quit")
        terminal.type("\n")
        assert terminal.leave()[0] == 0


def test_ctrl_c_ends_a_race(open_chat):
    with open_chat("slow", "-n", "4000") as terminal:
        terminal.wait_for("> ")
        terminal.type("/max 4\none\n")
        terminal.wait_for("allows more\n")
        terminal.type("/max 4000\n/race\n")
        terminal.wait_for("plain:\nabcdefghij")
        terminal.type(CTRL_C)
        terminal.wait_for("the race was cut short, so there is nothing to compare; /race runs it again.\n> ")


def test_ctrl_c_between_quotes_gives_the_message_up(open_chat):
    with open_chat("parrot") as terminal:
        terminal.wait_for("> ")
        terminal.type('"""one\n')
        terminal.wait_for("... ")
        terminal.type(CTRL_C)
        terminal.wait_for("> ")
        terminal.type("two\n")
        terminal.wait_for("\nu:two\n")


def test_lines_that_are_pasted_are_one_message(open_chat):
    with open_chat("parrot") as terminal:
        terminal.wait_for("> ")
        terminal.type("\x1b[200~one\n  two\x1b[201~\n")
        terminal.wait_for("\nu:one\n  two\n")


def test_tab_completes_commands(open_chat):
    with open_chat("parrot") as terminal:
        terminal.wait_for("> ")
        terminal.type("/sys\tbe brief\n")
        terminal.wait_for("system message: be brief\n")


# --- history -----------------------------------------------------------------------------------------------------


def test_lines_are_remembered_for_the_next_time(open_chat, home):
    for _ in range(2):
        with open_chat("parrot") as terminal:
            terminal.wait_for("> ")
            terminal.type("first\n")
            terminal.wait_for("\nu:first\n")
            terminal.type("\n/reset\n")
            terminal.wait_for("a new conversation\n")
            os.kill(terminal.child.pid, 9)  # what was typed is kept all the same
    file = home / "headlong" / "chat_history"
    assert file.read_text() == "first\n/reset\n" * 2
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with open_chat("parrot") as terminal:
        terminal.wait_for("> ")
        terminal.type(f"{UP}{UP}\n")
        terminal.wait_for("\nu:first\n")


def test_a_history_has_an_end(open_chat, home):
    (home / "headlong").mkdir(parents=True)
    file = home / "headlong" / "chat_history"
    file.write_text("".join(f"line {number}\n" for number in range(1500)))
    with open_chat("parrot") as terminal:
        terminal.type("/quit\n")
        assert terminal.leave()[0] == 0
    lines = file.read_text().splitlines()
    assert (len(lines), lines[-2:]) == (1001, ["line 1499", "/quit"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_without_a_place_for_it_there_is_no_history_and_no_complaint(open_chat, home):
    home.write_text("not a folder")
    with open_chat("parrot") as terminal:
        terminal.wait_for("parrot on abacus with 2 beads; /help lists the commands, Ctrl-D leaves\n> ")
        terminal.type("one\n")
        assert re.fullmatch(r"one\nu:one\n5 tokens in [^\n]*\n> ", terminal.wait_for("\n> "))
        terminal.type(CTRL_D)
        assert terminal.leave() == (0, "\n")


# --- half a terminal ---------------------------------------------------------------------------------------------


def test_answers_into_a_file_are_plain_and_without_prompts(open_chat, tmp_path, home):
    with (tmp_path / "out").open("w") as out, open_chat("parrot", colour=True, stdout=out) as terminal:
        terminal.type("one\ntwo\n" + CTRL_D)
        code, shown = terminal.leave()
    assert code == 0
    assert (tmp_path / "out").read_text() == "u:one\nu:one a:u:one u:two\n"
    assert "5 tokens in" in shown
    assert "> " not in shown
    assert not home.exists()


def test_a_piped_question_is_answered_on_a_terminal_without_prompts(open_chat):
    with open_chat("parrot", stdin=subprocess.PIPE) as terminal:
        terminal.child.stdin.write(b"one\n")
        terminal.child.stdin.close()
        code, shown = terminal.leave()
    assert code == 0
    assert re.fullmatch(r"u:one\n5 tokens in [^\n]*\n", shown)


# --- a true model ------------------------------------------------------------------------------------------------


def test_the_default_model_talks_remembers_and_races(open_chat):
    with open_chat("-v", "-n", "160", "--device", "cpu", module="headlong") as terminal:
        assert "nano on " in terminal.wait_for("\n> ")
        terminal.type("Write a Python function that adds two numbers.\n")
        first = terminal.wait_for("\n> ")
        assert re.search(r"\n\d+ tokens in \d+ rounds \(.* a round\), .* tok/s, .*accepted by position: \d+%", first)
        assert "cached" not in first
        time.sleep(0.5)  # somebody thinks; the engine does not wait
        terminal.type("Explain it.\n")
        second = terminal.wait_for("\n> ")
        assert re.search(r"\nprompt \d+ tokens \(128 cached\) at ", second)
        terminal.type("/max 40\n")
        terminal.wait_for("\n> ")
        terminal.type("/race\n")
        assert re.search(r"\d\.\d\d times as fast with drafts, identical text\n", terminal.wait_for("\n> "))
        terminal.type("/temperature 0.8\n")
        terminal.wait_for("\n> ")
        terminal.type("/race\n")
        assert re.search(r"\d\.\d\d times as fast with drafts, identical text\n", terminal.wait_for("\n> "))
        terminal.type(CTRL_D)
        assert terminal.leave()[0] == 0
