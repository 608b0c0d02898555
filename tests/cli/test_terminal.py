"""Processes of their own: terminals, pipes that close, colours and Ctrl-C."""

import json
import re
import signal
import subprocess
import sys

from tests.cli import stub
from tests.cli.conftest import ROOT, on_terminal, plain_environment

STUB = [sys.executable, "-m", "tests.cli.stub"]
TEXT = "".join(stub.ANSWER)


def generated(*argv, **environment):
    return on_terminal([*STUB[2:], "generate", "-m", "m", *argv], **environment)


def test_accepted_drafts_are_coloured_on_a_terminal():
    code, shown = generated("-p", "x", "--depth", "1")
    assert code == 0
    assert shown.startswith("One\x1b[32m two\x1b[0m three")
    assert "\x1b[2m7 tokens in 4 rounds" in shown


def test_no_color_is_plain_on_a_terminal():
    code, shown = generated("-p", "x", NO_COLOR="1")
    assert code == 0
    assert "\x1b" not in shown
    assert shown.startswith(f"{TEXT}\n7 tokens in 3 rounds")


def test_several_answers_stand_under_their_prompts_on_a_terminal(tmp_path):
    (tmp_path / "prompts.txt").write_text("one\n" + "long " * 30)
    code, shown = generated("--prompts", str(tmp_path / "prompts.txt"), NO_COLOR="1")
    assert code == 0
    assert shown.startswith(f"[1/2] one\n{TEXT}\n[2/2] long long")
    assert max(map(len, shown.splitlines()[:5])) <= 66


def test_several_answers_to_one_prompt_are_told_apart_on_a_terminal():
    code, shown = generated("-p", "one", "-N", "2", NO_COLOR="1")
    assert code == 0
    assert shown.startswith(f"[answer 1 of 2] one\n{TEXT}\n[answer 2 of 2] one\n{TEXT}\n1 prompt, 2 answers, 14 tokens")


def test_piped_output_is_plain_and_the_same_bytes(process):
    ran = process("tests.cli.stub", "generate", "-m", "m", stdin="hello")
    assert (ran.returncode, ran.stdout) == (0, f"{TEXT}\n")
    assert ran.stderr.startswith("7 tokens in 3 rounds")
    assert "\x1b" not in ran.stderr


def test_a_narrow_encoding_does_not_end_the_text(process):
    ran = process("tests.cli.stub", "generate", "-m", "m", "-p", "x", "-q", PYTHONIOENCODING="ascii")
    assert (ran.returncode, ran.stdout) == (0, TEXT.replace("è", "\\xe8") + "\n")


def start_long_answer(program, *argv):
    return subprocess.Popen(
        [*program, "generate", "-m", "m", "-p", "x", "-n", "1000000", "--ignore-eos", *argv],
        cwd=ROOT,
        env=plain_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner may have it ignored
    )


def test_a_reader_that_goes_away_ends_it_quietly():
    child = start_long_answer(STUB)
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait(timeout=60) == 141
    assert child.stderr.read() == ""
    child.stderr.close()


def test_ctrl_c_ends_the_text_and_shows_the_figures():
    child = start_long_answer(STUB)
    begun = child.stdout.read(40)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert begun.startswith(TEXT)
    assert out.endswith("\n")
    assert re.fullmatch(
        r"\d+ tokens in \d+ rounds \(.* a round\), .* tok/s, mtp at depth auto \(2\.0 drafts a window\), .*\n", err
    )


def test_ctrl_c_with_json_gives_the_object_so_far():
    child = start_long_answer([sys.executable, "-c", INTERRUPTS_ITSELF], "--json")
    out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")
    answer = json.loads(out)
    assert answer["finish_reason"] == "cancelled"
    assert len(answer["tokens"]) == 150


# Nothing is printed before the end with --json, so the command presses its own Ctrl-C.
INTERRUPTS_ITSELF = """
import os, signal, sys
import headlong
from headlong.cli.main import entrypoint
from tests.cli import stub

class Engine(stub.StubEngine):
    def step(self):
        emitted = super().step()
        if self.rounds[0] == 50:
            os.kill(os.getpid(), signal.SIGINT)
        return emitted

stub.StubEngine = Engine
headlong.load = stub.load
sys.exit(entrypoint())
"""


def test_the_package_is_the_command(process):
    ran = process("headlong", "nonsense")
    assert ran.returncode == 2
    assert ran.stderr.startswith("headlong: 'nonsense' is not a command")
