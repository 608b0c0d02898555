"""The door: help, version, mistakes, faults and exit codes."""

import subprocess
import sys
import time

import pytest

from headlong.cli import main
from headlong.version import __version__

HEAVY = ("torch", "numpy", "rich", "tokenizers", "jinja2", "huggingface_hub")
LIMIT_S = 0.3
CHOICES = "give one of generate, chat, serve, bench, tune, check, inspect, or run 'headlong --help'."
SLACK = 2  # the machine may be busy


def test_version(command):
    ran = command("--version")
    assert (ran.code, ran.out, ran.err) == (0, f"headlong {__version__}\n", "")


def test_help_names_every_command(command):
    ran = command("--help")
    assert ran.code == 0
    assert all(name in ran.out for name in main.COMMANDS)


def test_help_of_generate_gives_the_defaults(command):
    ran = command("generate", "--help")
    assert ran.code == 0
    assert "--max-tokens N" in ran.out
    assert "default: 256" in ran.out


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["--version"], ["generate", "--help"], ["chat", "--help"], ["tune", "--help"], ["inspect", "--help"]],
)
def test_help_is_quick(argv):
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-m", "headlong", *argv], check=True, capture_output=True)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < LIMIT_S * SLACK


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["generate", "--help"], ["generate"], ["chat", "--help"], ["tune", "--help"], ["inspect", "--help"]],
)
def test_help_and_mistakes_load_nothing_heavy(argv):
    script = f"""
import sys
from headlong.cli.main import entrypoint
entrypoint({argv!r})
sys.stderr.write("LOADED " + " ".join(sorted(set({HEAVY!r}) & set(sys.modules))))
"""
    ran = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert ran.stderr.rpartition("LOADED ")[2] == ""


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], f"no command was given; {CHOICES}"),
        (["sing"], f"'sing' is not a command; {CHOICES}"),
        (["--sing"], "'--sing' is not an option of headlong; run 'headlong --help' for those it has."),
    ],
)
def test_a_mistake_is_one_sentence(command, argv, sentence):
    ran = command(*argv)
    assert (ran.code, ran.out, ran.err) == (2, "", f"headlong: {sentence}\n")


def test_a_fault_is_one_line_and_exit_code_1(command):
    ran = command("generate", "-m", "broken", "-p", "x")
    assert (ran.code, ran.out, ran.err) == (1, "", "headlong: a page was handed out twice.\n")


def test_verbose_shows_where_a_fault_came_from(command):
    ran = command("generate", "-m", "broken", "-p", "x", "-v")
    assert ran.code == 1
    assert ran.err.startswith("Traceback")
    assert ran.err.endswith("headlong: a page was handed out twice.\n")


def test_an_unforeseen_error_says_how_to_see_more(command):
    ran = command("generate", "-m", "surprising", "-p", "x")
    assert ran.code == 1
    assert ran.err == (
        "headlong: internal error: ZeroDivisionError: division by zero; run it again with -v to see where\n"
    )


def test_a_mistake_has_no_traceback_even_when_verbose(command):
    ran = command("generate", "-m", "headless", "-p", "x", "-v", "--require-draft")
    assert ran.code == 3
    assert ran.err == "headlong: headless has no MTP head; name a model with one or leave --require-draft out.\n"


def test_a_warning_is_shown_once_for_each_run(command):
    for _ in range(2):
        ran = command("generate", "-m", "headless", "-p", "x")
        assert ran.err.count("headlong: warning: the promised head is absent\n") == 1


def test_quiet_hides_warnings(command):
    assert command("generate", "-m", "headless", "-p", "x", "-q").err == ""


def test_interrupting_the_load_exits_130(command, monkeypatch):
    def interrupted(name, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("headlong.load", interrupted)
    ran = command("generate", "-m", "x", "-p", "x")
    assert (ran.code, ran.out, ran.err) == (130, "", "")
