"""How things look, as text of a fixed width."""

import io

import pytest
from rich.console import Console

from headlong.cli import show
from headlong.engine.request import Emitted, Output, Speculative, Timings


def speculative(**changes):
    facts = {
        "requested": "auto",
        "used": "mtp",
        "reason": "",
        "depth": 2,
        "rounds": 4,
        "drafted": 8,
        "accepted": 5,
        "drafted_by_position": (4, 4),
        "accepted_by_position": (3, 2),
    }
    return Speculative(**facts | changes)


def output(text="abc", tokens=9, **changes):
    return Output(text, tuple(range(tokens)), "stop", 10, speculative(**changes), Timings(0.5, 2.0, 10, tokens))


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


def test_figures_of_one():
    assert show.figures([output()], 9.0) == (
        "9 tokens in 4 rounds (2.25 a round), 4.5 tok/s, mtp at depth 2, accepted by position: 75% 50%"
    )


def test_figures_of_several_are_summed_and_timed_together():
    narrow = output(tokens=1, depth=1, rounds=1, accepted=0, drafted_by_position=(1,), accepted_by_position=(0,))
    assert show.figures([output(), narrow], 5.0) == (
        "2 prompts, 10 tokens in 5 rounds (2.00 a round), 2.0 tok/s, mtp at depth 2, accepted by position: 60% 50%"
    )


def test_figures_without_drafts_give_the_reason():
    plain = {"used": "none", "depth": 0, "accepted": 0, "drafted_by_position": (), "accepted_by_position": ()}
    line = show.figures([output(reason="the model has no head", **plain)], 1.0)
    assert line.endswith("tok/s, no drafts: the model has no head")


def test_figures_of_a_text_cut_before_its_first_round():
    nothing = output(tokens=0, rounds=0, accepted=0, drafted_by_position=(0, 0), accepted_by_position=(0, 0))
    assert show.figures([nothing], 1.0) == "0 tokens in 0 rounds (0.00 a round), 0.0 tok/s, mtp at depth 2"
