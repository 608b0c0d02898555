"""How things look, as text of a fixed width."""

import io

import pytest
from rich.console import Console

from headlong.cli import show
from headlong.cli.summary import Asked
from headlong.engine.request import Emitted, Output, Speculative, Timings


def output(text):
    return Output(
        text, (1, 2), "stop", 10, Speculative("auto", "none", "", 0, 2, 0, 0, (), ()), Timings(0.5, 2.0, 10, 2)
    )


@pytest.fixture
def terminal():
    """A terminal 20 wide, whose output can be read."""
    return Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=20, legacy_windows=False, no_color=False
    )


@pytest.fixture
def pipe():
    return Console(file=io.StringIO(), force_terminal=False, width=20)


def test_text_is_never_wrapped_or_read_as_markup(terminal, pipe):
    text = "[bold]" + "long word " * 10 + ":smile:\t1"
    for console in (terminal, pipe):
        show.write(console, text)
        assert console.file.getvalue() == text


def test_styled_text_is_never_wrapped_or_read_as_markup(terminal):
    text = "[bold]" + "long word " * 10 + ":smile:\t1"
    show.write(terminal, text, "green")
    assert terminal.file.getvalue() == f"\x1b[32m{text}\x1b[0m"


def test_a_text_cannot_steer_a_terminal(terminal, pipe):
    show.write(terminal, "\x1b[2J", "green")
    assert "\x1b[2J" not in terminal.file.getvalue()
    show.write(pipe, "\x1b[2J")
    assert pipe.file.getvalue() == "\x1b[2J"


def test_live_shows_what_was_held_back_when_the_text_is_cut(pipe):
    live = show.Live(pipe)
    live.piece(Emitted(0, 1, "ab", False))
    live.answer(0, output(text="abc"))
    assert pipe.file.getvalue() == "abc\n"


def test_a_text_that_ends_its_line_gets_no_second_end(pipe):
    show.Live(pipe).answer(0, output(text="abc\n"))
    assert pipe.file.getvalue() == "abc\n"


@pytest.mark.parametrize(
    ("number", "prompts", "completions", "wanted"),
    [
        (1, ["a", " b\n c "], 1, "[2/2] b c"),
        (1, ["a"], 3, "[answer 2 of 3] a"),
        (5, ["a", "b"], 3, "[2/2, answer 3 of 3] b"),
        (3, ["a", "b"], 3, "[2/2, answer 1 of 3] b"),
        (0, ["x" * 61, "b"], 1, f"[1/2] {'x' * 59}…"),
    ],
)
def test_a_header_says_which_prompt_and_which_answer(number, prompts, completions, wanted):
    assert show.header(number, Asked(prompts, completions)) == wanted


def test_an_end_without_a_token_shows_nothing(pipe):
    live = show.Live(pipe)
    live.piece(Emitted(0, None, "", False, "deadline"))
    assert pipe.file.getvalue() == ""
