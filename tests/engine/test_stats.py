"""What an answer says about drafting and time."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.request import Request, RoundResult
from headlong.engine.stats import Counts
from headlong.engine.windows import Window
from headlong.settings import Settings


def count_up(history):
    return (history[-1] + 1) % 200


def test_right_drafts_are_counted_by_position(build):
    got = build(count_up).generate([1, 2], max_tokens=9, depth=2).speculative
    assert (got.requested, got.used, got.reason, got.depth) == ("auto", "mtp", "", 2)
    assert (got.rounds, got.drafted, got.accepted) == (3, 6, 6)
    assert (got.drafted_by_position, got.accepted_by_position) == ((3, 3), (3, 3))
    assert got.mean_length == 3.0


def test_a_wrong_draft_hides_those_after_it(build):
    got = build(count_up, right=(True, False, True)).generate([1, 2], max_tokens=10, depth=3).speculative
    assert got.accepted_by_position[1:] == (0, 0)
    assert got.drafted_by_position[0] >= got.drafted_by_position[1] >= got.drafted_by_position[2]
    assert got.accepted == sum(got.accepted_by_position)


@pytest.mark.parametrize("right", [(True,), (False,), (True, False)])
def test_every_token_is_a_round_or_an_accepted_draft(build, right):
    output = build(count_up, right=right).generate([1, 2], max_tokens=23, depth=3)
    assert len(output.tokens) == output.speculative.rounds + output.speculative.accepted


def test_drafts_after_the_end_token_are_not_accepted(build, says):
    output = build(says("ab")).generate("x", max_tokens=30, depth=4)
    got = output.speculative  # one round for "a", then a window of "b", the end token and two more
    assert (len(output.tokens), got.rounds, got.accepted_by_position) == (2, 2, (1, 1, 0, 0))


@pytest.mark.parametrize(
    ("options", "limits", "settings", "requested", "reason"),
    [
        ({"draft_kind": "none"}, {}, {}, "none", "the request asked for plain decoding"),
        ({"depth": 0}, {}, {}, "auto", "depth 0 was asked"),
        ({"draft_kind": "mtp"}, {"head": False}, {}, "mtp", "the fake model has no head"),
        ({}, {"head": False}, {"draft_kind": "mtp"}, "mtp", "the fake model has no head"),
        ({"depth": 3}, {}, {"draft_kind": "none"}, "none", "draft kind none was asked for"),
        ({"depth": 3}, {"head": False}, {"draft_kind": "none"}, "none", "draft kind none was asked for"),
    ],
)
def test_plain_decoding_says_why(build, options, limits, settings, requested, reason):
    engine = build(count_up, settings=Settings(**settings), **limits)
    got = engine.generate([1, 2], max_tokens=5, **options).speculative
    assert (got.requested, got.used, got.reason, got.depth) == (requested, "none", reason, 0)
    assert (got.rounds, got.drafted, got.accepted, got.drafted_by_position) == (5, 0, 0, ())
    assert got.mean_length == 1.0
    assert got.depths == ((0, 5),)


def windows(counts, *verify):
    for drafts in verify:
        counts.record_round(Window("mtp", "mtp", drafts, 0), RoundResult([]), accepted=0)
    return counts.speculative().reason


def test_a_row_that_drafts_no_more_says_why_once_it_rests():
    counts = Counts(None, "auto", "", lambda: "a draft does not pay")
    assert counts.speculative().reason == ""  # it never ran
    assert windows(counts, 0) == "a draft does not pay"  # it never drafted
    assert windows(counts, 2, 0, 0, 0, 0, 0, 0, 0) == ""  # seven windows without drafts may be chance
    assert windows(counts, 0) == "a draft does not pay"
    assert windows(counts, *[0] * 1000) == "a draft does not pay"
    assert windows(counts, 1) == ""
    assert (counts.speculative().used, counts.speculative().drafted) == ("mtp", 3)


def test_drafts_that_were_asked_for_and_never_stood_ready_are_told_so(build):
    got = build(lambda history: len(history) * 7 % 200, head=False).generate([1], max_tokens=20, depth=3).speculative
    assert (got.used, got.reason) == ("none", "depth 3 was asked for, and no drafts stood ready")


def test_a_row_that_rests_for_long_says_why(build):
    """The text repeats itself at first, and then never more."""
    engine = build(count_up, head=False, context=200)
    got = engine.generate([*range(9), *range(9)], max_tokens=150).speculative
    assert got.depths[-1][0] == 0
    assert got.depths[-1][1] >= 8
    assert got.drafted
    assert got.reason == "no drafts stood ready that were worth it"


def test_the_depth_is_the_one_that_ran(build):
    assert build(count_up, depth=3).generate([1], max_tokens=30, depth=8).speculative.depth == 3


def test_the_windows_of_an_answer_are_told_in_order(build):
    """A prompt of one token has no drafts yet; the last window is cut to what is wanted."""
    got = build(count_up).generate([1], max_tokens=9, depth=2).speculative
    assert got.depths == ((0, 1), (2, 2), (1, 1))
    assert sum(rounds for _, rounds in got.depths) == got.rounds
    assert sum(drafts * rounds for drafts, rounds in got.depths) == got.drafted


def test_every_drafter_that_stood_in_a_window_is_named(build):
    """The prediction is right for four tokens, then the head goes on."""
    got = build(count_up).generate([2], max_tokens=12, depth=2, prediction=[3, 4, 5, 6, 99, 99, 99]).speculative
    assert got.used == "mtp+prediction"
    assert got.drafters["prediction"] == (4, 3)
    assert sum(drafted for drafted, _ in got.drafters.values()) == got.drafted
    assert sum(accepted for _, accepted in got.drafters.values()) == got.accepted


@pytest.mark.parametrize(("kind", "used"), [("mtp", "mtp"), ("prediction", "prediction"), ("ngram", "none")])
def test_only_the_drafter_that_was_asked_for_drafts(build, kind, used):
    got = build(count_up).generate([1, 2], max_tokens=12, prediction=range(3, 60), draft_kind=kind).speculative
    assert (got.requested, got.used) == (kind, used)


def test_a_text_that_repeats_itself_drafts_from_itself(build):
    engine = build(lambda history: (history[-1] + 1) % 3, head=False)
    got = engine.generate([0, 1, 2] * 4, max_tokens=20, depth=4).speculative
    assert (got.used, got.accepted) == ("ngram", got.drafted)
    assert got.mean_length > 3


def test_times_and_tokens_are_counted(build):
    engine = build(count_up)
    long = engine.generate(list(range(30)), max_tokens=4)
    assert long.timings.prefill_s > 0
    assert long.timings.decode_s > 0
    assert (long.prompt_tokens, long.timings.prompt_tokens, long.timings.tokens) == (30, 30, 4)
    assert engine.generate([1], max_tokens=4).timings.prefill_s == 0


class Timed(FakeBackend):
    """Rounds whose halves take known times."""

    def round(self, plan):
        result = replace(super().round(plan).result(), verify_s=0.25, draft_s=0.125)
        return SimpleNamespace(result=lambda: result)


def test_times_of_rounds_are_of_those_a_request_was_in(build):
    outputs = build(count_up, backend=Timed).generate([[1], [2]], max_tokens=9, depth=2)
    outputs.append(build(count_up, backend=Timed).generate([1], max_tokens=4, depth=0))
    assert [output.speculative.rounds for output in outputs] == [4, 4, 4]
    for output in outputs:
        assert (output.timings.verify_s, output.timings.draft_s) == (1.0, 0.5)
    assert build(count_up).generate([1], max_tokens=4).timings.host_s > 0


def test_cached_tokens_and_waits_are_counted(build):
    engine = build(count_up, rows=1)
    first, second = engine.generate([list(range(30))] * 2, max_tokens=4)
    assert (first.timings.cached_tokens, second.timings.cached_tokens) == (0, 24)
    assert second.timings.queue_s > first.timings.queue_s > 0


def test_a_request_that_never_ran_has_no_figures(build):
    engine = build(count_up)
    output = engine.output(engine.submit(Request([1, 2], max_tokens=5)))
    assert (output.speculative.rounds, output.speculative.mean_length, output.timings.decode_tps) == (0, 0.0, 0.0)
