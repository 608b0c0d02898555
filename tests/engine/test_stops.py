"""Stop strings: what is held back, where the cut is."""

import itertools

import pytest

from headlong.engine.stops import StopStrings


def splits(text):
    """Every way to cut a text into pieces."""
    for cuts in itertools.product((False, True), repeat=len(text) - 1):
        pieces, piece = [], text[0]
        for letter, cut in zip(text[1:], cuts, strict=True):
            if cut:
                pieces.append(piece)
                piece = ""
            piece += letter
        yield [*pieces, piece]


def through(stops, pieces):
    """The text that gets through, and whether a stop string was complete."""
    strings, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += strings.push(piece)
        if strings.complete:
            return shown, True
    return shown + strings.flush(), False


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["cd"], "abcdef", "ab"),
        (["cd", "bcx"], "abcdef", "ab"),
        (["aab"], "aaabc", "a"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["bc", "abc"], "xabc", "x"),
        (["abab"], "abacabab", "abac"),
        (["\n\n"], "a\nb\n\nc", "a\nb"),
        (["a"], "abc", ""),
    ],
)
def test_the_cut_does_not_depend_on_the_pieces(stops, text, shown):
    assert {through(stops, pieces) for pieces in splits(text)} == {(shown, True)}


@pytest.mark.parametrize(("stops", "text"), [([], "abc"), (["xyz"], "abxy"), (["abcd"], "abcabc")])
def test_text_without_a_stop_string_gets_through_whole(stops, text):
    assert {through(stops, pieces) for pieces in splits(text)} == {(text, False)}


def test_only_a_possible_start_is_held_back():
    stops = StopStrings(["STOP"])
    assert [stops.push(piece) for piece in ("abc", "S", "T", "x", "ST", "OP")] == ["abc", "", "", "STx", "", ""]
    assert stops.complete


@pytest.mark.parametrize(
    ("stops", "text", "found"), [(("b", "cd"), "acd", "cd"), (("cd", "d"), "cd", "cd"), (("x",), "a", "")]
)
def test_the_stop_string_that_ended_it_is_known(stops, text, found):
    strings = StopStrings(stops)
    for letter in text:
        strings.push(letter)
    assert strings.found == found
