"""Proposals from token ids: examples by hand, and a slow search that has to find the same places."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headlong.engine.proposals import LEAST, SIGN, SURE, Ngram, Prediction

TEXT = tuple(range(100, 200))  # no token twice, so that a place cannot be mistaken
TOKENS = st.lists(st.integers(0, 3), max_size=60)  # few kinds, so that nearly everything stood before
relaxed = settings(deadline=None)


def proposed(proposer, tokens, most=4):
    proposer.extend(tokens)
    return proposer.propose(most)


def ngram(tokens, most=4, least=LEAST):
    proposer = Ngram(tokens, least)
    return proposer.propose(most), proposer.match


def rounds(proposer, output, most=8):
    """Rounds that a target whose text is `output` takes with these drafts."""
    count = done = 0
    while done < len(output):
        drafts = proposer.propose(min(most, len(output) - done - 1))
        right = 0
        while right < len(drafts) and drafts[right] == output[done + right]:
            right += 1
        proposer.extend(output[done : done + right + 1])
        done += right + 1
        count += 1
    return count


def in_pieces(tokens, cuts):
    bounds = [0, *sorted(cut % (len(tokens) + 1) for cut in cuts), len(tokens)]
    return [tokens[start:end] for start, end in pairwise(bounds)]


# --- n-grams -----------------------------------------------------------------------------------------------------


def test_ngram_proposes_what_followed():
    assert ngram([1, 2, 3, 50, 51, 52, 53, 9, 1, 2, 3]) == ((50, 51, 52, 53), 3)


def test_ngram_proposes_nothing_before_enough_tokens_agree():
    assert ngram([]) == ((), 0)
    assert ngram([1, 2, 3]) == ((), 0)
    assert ngram([1, 2, 3, 50, 8, 2, 3]) == ((), 0)
    assert ngram([1, 2, 3, 50, 8, 2, 3], least=2) == ((50, 8, 2, 3), 2)


def test_ngram_takes_the_latest_place():
    assert ngram([1, 2, 3, 50, 1, 2, 3, 60, 9, 1, 2, 3], most=1) == ((60,), 3)


def test_ngram_takes_a_longer_match_before_a_later_one():
    shorter_but_later, wrong_at_first = [8, 1, 2, 3, 60], [7, 1, 2, 9]
    assert ngram([7, 1, 2, 3, 50, *shorter_but_later, *wrong_at_first, 7, 1, 2, 3], most=1) == ((50,), 4)


def test_ngram_stays_with_a_place_that_was_right():
    copied, elsewhere = [1, 2, 3, 4, 5, 6, 50, 51], [9, 3, 4, 5, 6, 60]
    proposer = Ngram([*copied, *elsewhere, 1, 2, 3])
    assert proposer.propose(2) == (4, 5)
    assert proposed(proposer, [4, 5, 6], most=2) == (50, 51)
    assert proposer.match == 6
    assert ngram([*copied, *elsewhere, 3, 4, 5, 6], most=1) == ((60,), 4)


def test_ngram_leaves_a_place_that_was_wrong():
    proposer = Ngram([1, 2, 3, 4, 5, 6, 1, 2, 3])
    assert proposed(proposer, [7]) == ()
    assert proposer.match == 0
    assert proposed(proposer, [4, 5, 6, 1], most=3) == (2, 3, 7)


def test_a_period_goes_on_past_the_text():
    assert ngram([1, 2, 1, 2, 1], most=7) == ((2, 1, 2, 1, 2, 1, 2), 3)
    assert ngram([5, 5, 5, 5], most=9) == ((5,) * 9, 3)
    assert ngram([1, 2, 3, 4, 1, 2, 3], most=6) == ((4, 1, 2, 3, 4, 1), 3)


def test_match_is_of_the_next_proposal():
    proposer = Ngram([1, 2, 3, 4, 5, 1, 2, 3])
    assert proposer.match == 3
    proposer.extend([4])
    assert proposer.match == 4
    proposer.extend([9])
    assert proposer.match == 0


def ended_before(text, size):
    """Where the last `size` tokens ended when they stood in the text before, the latest first."""
    return [end for end in range(len(text) - 1, size - 1, -1) if text[end - size : end] == text[len(text) - size :]]


def searched(tokens, most, least):
    """What an n-gram drafter has to propose: the whole text is searched for every token."""
    place = agreed = 0
    for end in range(1, len(tokens) + 1):
        if agreed and tokens[place] == tokens[end - 1]:
            place, agreed = place + 1, agreed + 1
            continue
        found = [(size, ends[0]) for size in (least + 1, least) if (ends := ended_before(tokens[:end], size))]
        agreed, place = found[0] if found else (0, 0)
    whole = list(tokens)
    if agreed:
        whole.extend(whole[place + step] for step in range(most))
    return tuple(whole[len(tokens) :]), agreed


@given(TOKENS, st.integers(0, 12), st.integers(1, 5))
@relaxed
def test_ngram_finds_what_a_search_finds(tokens, most, least):
    assert ngram(tokens, most, least) == searched(tokens, most, least)


@given(TOKENS, st.integers(1, 5))
@relaxed
def test_ngram_always_has_the_longest_match_of_its_sizes(tokens, least):
    drafts, match = ngram(tokens, 1, least)
    longest = next((size for size in (least + 1, least) if ended_before(tokens, size)), 0)
    assert min(match, least + 1) == longest
    assert [*drafts] in ([[tokens[end]] for end in ended_before(tokens, match)] if match else [[]])


@given(TOKENS, st.lists(st.integers(0, 60)), st.integers(0, 12))
@relaxed
def test_ngram_does_not_see_how_tokens_came(tokens, cuts, most):
    proposer = Ngram()
    for piece in in_pieces(tokens, cuts):
        proposer.extend(piece)
        assert len(proposer.propose(most)) in (0, most)
    assert (proposer.propose(most), proposer.match) == ngram(tokens, most)


@given(TOKENS, st.lists(st.integers(0, 60)), st.integers(2, 4), st.integers(1, 12))
@relaxed
def test_a_match_that_is_too_short_is_known_without_a_look(tokens, cuts, least, wanted):
    """Whether some is long enough is answered as if every token had been looked at."""
    proposer, looked = Ngram(least=least), Ngram(least=least)
    for piece in in_pieces(tokens, cuts):
        proposer.extend(piece)
        looked.extend(piece)
        assert proposer.matches(wanted) == (looked.match >= wanted)


# --- predictions -------------------------------------------------------------------------------------------------


def test_a_prediction_is_followed_from_its_start():
    proposer = Prediction(TEXT)
    assert proposer.propose(3) == TEXT[:3]
    assert proposed(proposer, TEXT[:5]) == TEXT[5:9]
    assert proposer.match == 5
    assert proposed(proposer, TEXT[5:98]) == TEXT[98:]
    assert proposed(proposer, TEXT[98:]) == ()
    assert proposed(proposer, [1]) == ()


def test_one_token_stands_for_another():
    proposer = Prediction(TEXT)
    assert proposed(proposer, [*TEXT[:20], 1]) == ()
    assert proposer.match == 0
    assert proposed(proposer, TEXT[21:22]) == TEXT[22:26]
    assert proposer.match == 1


def test_tokens_were_put_in():
    proposer = Prediction(TEXT)
    assert proposed(proposer, [*TEXT[:20], 1, 2, 3, 4, 5]) == ()
    assert proposed(proposer, TEXT[20:21]) == TEXT[21:25]


def test_tokens_were_put_before():
    assert proposed(Prediction(TEXT), [1, 2, 3]) == ()
    assert proposed(Prediction(TEXT), [1, 2, 3, TEXT[0]]) == TEXT[1:5]


@pytest.mark.parametrize(("gone", "needed"), [(1, 1), (7, 1), (8, 2), (30, 2), (31, 4), (60, 4)])
def test_the_more_is_left_out_the_more_tokens_must_agree(gone, needed):
    proposer = Prediction(TEXT)
    proposer.extend(TEXT[:20])
    for place in range(20 + gone, 20 + gone + needed):
        assert proposed(proposer, []) == () or place == 20 + gone
        proposer.extend(TEXT[place : place + 1])
    assert proposer.propose(4) == TEXT[20 + gone + needed :][:4]
    assert proposer.match == needed


def test_an_earlier_part_comes_again():
    proposer = Prediction(TEXT)
    assert proposed(proposer, [*TEXT[:60], *TEXT[5:8]]) == ()
    assert proposed(proposer, TEXT[8:9]) == TEXT[9:13]


def test_a_chance_meeting_does_not_lose_the_place():
    proposer = Prediction(TEXT)
    elsewhere = TEXT[70 : 70 + SURE - 1]
    assert proposed(proposer, [*TEXT[:20], *elsewhere]) == TEXT[70 + SURE - 1 :][:4]
    assert proposed(proposer, [1]) == ()
    assert proposed(proposer, TEXT[20:21]) == TEXT[21:25]


def test_a_long_meeting_moves_the_place():
    proposer = Prediction(TEXT)
    assert proposed(proposer, [*TEXT[:20], *TEXT[70 : 70 + SURE], 1]) == ()
    assert proposed(proposer, TEXT[20:21]) == ()
    assert proposed(proposer, TEXT[70 + SURE : 71 + SURE]) == TEXT[71 + SURE :][:4]


def test_the_next_of_several_places_is_taken_or_else_the_last():
    sign, filler = [1, 2, 3, 4], list(range(300, 340))
    text = [*sign, 51, *TEXT[:20], *filler, *sign, 52, *TEXT[20:60], *sign, 53, *TEXT[60:80]]
    assert proposed(Prediction(text), [*text[:25], 9, *sign], most=1) == (52,)
    assert proposed(Prediction(text), [*text[: text.index(53) - 4], 9, *sign], most=1) == (53,)
    assert proposed(Prediction(text), [*text, 9, *sign], most=1) == (53,)
    assert proposed(Prediction(text), [*text[: text.index(52)], *sign], most=1) == (53,)


def test_few_tokens_far_away_show_nothing():
    for count in range(1, SIGN):
        assert proposed(Prediction(TEXT), TEXT[50 : 50 + count]) == ()
    assert proposed(Prediction(TEXT), TEXT[50 : 50 + SIGN]) == TEXT[50 + SIGN :][:4]


@pytest.mark.parametrize("text", [(), (1,), (1, 2, 3)])
def test_short_predictions(text):
    proposer = Prediction(text)
    assert proposer.propose(8) == text
    for token in (9, 9, *text, 9):
        assert len(proposed(proposer, [token])) < max(1, len(text))


def test_what_edits_cost_in_rounds():
    edited = [*TEXT[:30], 1, *TEXT[31:50], 2, 3, *TEXT[50:70], *TEXT[74:]]
    assert rounds(Prediction(TEXT), TEXT) == 12  # nine tokens a round
    assert rounds(Prediction(TEXT), edited) == 16
    assert rounds(Ngram([*TEXT, 99]), edited) == 23  # it needs three tokens at the start and after each edit


@given(TOKENS, TOKENS, st.lists(st.integers(0, 60)), st.integers(0, 12))
@relaxed
def test_a_prediction_does_not_see_how_tokens_came(text, output, cuts, most):
    whole, split = Prediction(text), Prediction(text)
    whole.extend(output)
    for piece in in_pieces(output, cuts):
        split.extend(piece)
        assert len(split.propose(most)) <= most
    assert (whole.propose(most), whole.match) == (split.propose(most), split.match)


@given(TOKENS, TOKENS)
@relaxed
def test_what_a_prediction_says_agreed_did_agree(text, output):
    proposer = Prediction(text)
    drafts = proposed(proposer, output, most=len(text))
    place = len(text) - len(drafts)  # it proposes all that is left
    assert tuple(text[place:]) == drafts
    if proposer.match:
        assert text[place - proposer.match : place] == output[-proposer.match :]


@given(st.integers(0, 100), st.lists(st.integers(0, 50), max_size=10), st.integers(0, 100 - SIGN))
@relaxed
def test_a_sign_is_enough_after_any_edit(kept, added, place):
    output = [*TEXT[:kept], *added, *TEXT[place : place + SIGN]]
    assert proposed(Prediction(TEXT), output) == TEXT[place + SIGN :][:4]
