"""Reasoning and answer told apart, however the text is cut."""

import itertools

import pytest

from headlong.engine.channels import Channels, Piece

TEXTS = [
    ("plain text", "", "plain text"),
    ("\n a < b </think> <think>c</think>\n", "", "\n a < b </think> <think>c</think>\n"),
    ("<think>\nwhy\n\nnot\n</think>\n\nso\n", "why\n\nnot", "so\n"),
    (" \n<think>a </thin b</think>c</think>", "a </thin b", "c</think>"),
    ("<think>\n\n</think>\n\nso", "", "so"),
    ("<think>cut sho", "cut sho", ""),
    ("<think>cut sho\n</th", "cut sho\n</th", ""),
    ("<thin", "", "<thin"),
    ("<thinker>", "", "<thinker>"),
    ("", "", ""),
]


def told(pieces, reasoning):
    return "".join(piece.text for piece in pieces if piece.reasoning is reasoning)


def pushed(channels, parts):
    return [*itertools.chain.from_iterable(channels.push(part) for part in parts), *channels.flush()]


@pytest.mark.parametrize(("text", "reasoning", "content"), TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_the_same_however_it_is_cut(text, reasoning, content, size):
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    pieces = pushed(Channels(), parts)
    assert (told(pieces, True), told(pieces, False)) == (reasoning, content)
    assert all(piece.text for piece in pieces)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_template_may_have_opened_it(size):
    text = "\nwhy\n</think>\n\nso"
    channels = Channels.after("<|im_start|>assistant\n<think>\n")
    pieces = pushed(channels, [text[at : at + size] for at in range(0, len(text), size)])
    assert (told(pieces, True), told(pieces, False)) == ("why", "so")
    assert told(pushed(Channels.after("<think>\n\n</think>\n\n"), ["so"]), False) == "so"


def test_pieces_keep_their_positions():
    channels = Channels()
    assert channels.push("<thi", 0) == []
    assert channels.push("nk>a", 1) == [Piece("a", True, 1)]
    assert channels.push("b</", 2) == [Piece("b", True, 2)]
    assert channels.push("x", 3) == [Piece("</", True, 2), Piece("x", True, 3)]
    assert channels.push("</think>c", 4) == [Piece("c", False, 4)]
    assert channels.push("d", 0) == [Piece("d", False, 0)]


def test_text_that_cannot_become_a_mark_is_not_held_back():
    channels = Channels()
    assert channels.push("a") == [Piece("a")]
    assert channels.push("<") == [Piece("<")]
    thinking = Channels(thinking=True)
    assert thinking.push("a <b") == [Piece("a <b", True)]
    assert thinking.push("\n") == []
    assert thinking.push("c") == [Piece("\n", True), Piece("c", True)]
