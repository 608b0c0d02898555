"""What stands in windows and what is left for the next: never past what is wanted, allowed or inside the context."""

import random
from dataclasses import replace
from itertools import pairwise
from statistics import mean

import numpy as np
import pytest

from headlong.backends.fake import fake_limits
from headlong.engine.depth import DepthController
from headlong.engine.request import Kept, Sizes
from headlong.engine.roundcost import RoundCosts
from headlong.engine.scheduler import Job
from headlong.engine.windows import LONG_MATCH, MOST_UNASKED, Drafting, Window, Windows


class Says:
    """A proposer that always has the same to say."""

    def __init__(self, tokens, name="ngram", match=1):
        self.tokens, self.name, self.match, self.taken = tuple(tokens), name, match, []

    def matches(self, least):
        return self.match >= least

    def propose(self, most):
        return self.tokens[:most]

    def extend(self, tokens):
        self.taken += tokens


class Allows:
    """A grammar that allows the tokens below a number and forces some."""

    complete = False

    def __init__(self, below, forced=()):
        self.below, self._forced, self.taken = below, tuple(forced), []

    def valid(self, drafts):
        return next((place for place, token in enumerate(drafts) if token >= self.below), len(drafts))

    def forced(self, most):
        return self._forced[:most]

    def masks(self, drafts):
        return np.array([[len(drafts), *drafts]] * (len(drafts) + 1))

    def accept(self, tokens):
        self.taken += tokens


def make(depth=2, prompt=5, max_tokens=10, head=True, proposers=(), guide=None, left=0, known=(), limits=None):
    """One row whose prompt is in, and who plans for it."""
    limits = fake_limits(**limits or {})
    controller = DepthController(RoundCosts(), limits.depth)
    drafting = Drafting(controller.row(depth), head, proposers, guide, left=left, known=known)
    return Windows(limits, controller), Job(0, (1,) * prompt, max_tokens, drafting, length=prompt - 1)


def plan(windows, job):
    ((planned, window),) = windows.plan([(job, windows.offer(job))], "plain")
    assert planned is job
    return window


def play(windows, job, accepted):
    """One round with this many drafts kept; what was planned."""
    window = plan(windows, job)
    tokens = tuple(range(min(accepted, window.verify) + 1))
    job.length += len(tokens)
    job.drafting.take(Kept(0, tokens, window.verify, (7,) * window.draft), window, tokens)
    return window


def sizes(window):
    return window.verify, window.draft


def test_a_round_verifies_what_the_last_one_left():
    windows, job = make(depth=3, max_tokens=20, left=3)
    assert [sizes(play(windows, job, 1)) for _ in range(3)] == [(3, 3)] * 3


def test_a_row_that_nothing_was_left_for_verifies_nothing():
    windows, job = make(prompt=1)
    assert sizes(plan(windows, job)) == (0, 2)


@pytest.mark.parametrize(
    ("accepted", "expected"), [(0, [(2, 2), (2, 2), (2, 1), (1, 0), (0, 0)]), (9, [(2, 2), (1, 0)])]
)
def test_nothing_is_drafted_past_max_tokens(accepted, expected):
    windows, job = make(max_tokens=5, left=2)
    planned = []
    while job.remaining > 0:
        planned.append(play(windows, job, accepted))
    assert [sizes(window) for window in planned] == expected


@pytest.mark.parametrize(("max_tokens", "drafts"), [(1, 0), (2, 1), (4, 3), (9, 4)])
def test_the_first_round_gets_no_more_drafts_than_it_can_use(max_tokens, drafts):
    windows, job = make(depth=4, max_tokens=max_tokens)
    assert windows.first(job, [], "plain") == drafts


def test_where_rounds_are_captured_no_drafts_come_with_a_prompt():
    windows, job = make(depth=2)
    windows.limits = replace(windows.limits, sizes=Sizes((1, 2, 4)))
    assert windows.first(job, [], "plain") == 0


@pytest.mark.parametrize("accepted", [0, 1, 8])
def test_drafts_stay_inside_the_context(accepted):
    windows, job = make(depth=8, prompt=4, max_tokens=12, left=8, limits={"context": 16})
    while job.remaining > 0:
        start = job.length
        window = play(windows, job, accepted)
        assert start + window.verify + window.draft + 1 <= 16


def test_the_head_leaves_nothing_for_a_row_it_does_not_follow():
    windows, job = make(head=False)
    assert windows.first(job, [], "plain") == 0
    assert sizes(plan(windows, job)) == (0, 0)


# --- others' drafts ----------------------------------------------------------------------------------------------


def test_the_drafts_that_promise_most_stand_in_the_window():
    proposers = (Says([1, 2, 7], match=LONG_MATCH), Says([8], "prediction"))
    windows, job = make(depth=4, max_tokens=30, left=2, known=(1, 2), proposers=proposers)
    window = plan(windows, job)
    assert (window.drafter, window.verify, window.given) == ("ngram", 3, (1, 2, 7))


@pytest.mark.parametrize(("left", "known"), [(2, (1, 3)), (2, (9, 2)), (4, (1, 2, 7, 8)), (2, ())])
def test_n_grams_that_differ_from_the_head_or_add_nothing_are_left_out(left, known):
    """Nor are they heard where the head's first drafts are not known yet."""
    proposer = Says([1, 2, 7, 8], match=LONG_MATCH)
    windows, job = make(depth=4, max_tokens=30, left=left, known=known, proposers=(proposer,))
    window = plan(windows, job)
    assert (window.drafter, window.verify, window.given) == ("mtp", left, None)


@pytest.mark.parametrize("known", [(1, 3), (1, 2), (30, 2)])
def test_what_was_drawn_does_not_decide_who_drafts(known):
    """Neither whether the head's draws agree with an n-gram, nor whether a grammar allows them."""
    proposer = Says([1, 2, 7], match=LONG_MATCH)
    windows, job = make(depth=4, max_tokens=30, left=2, known=known, proposers=(proposer,), guide=Allows(20))
    job.drafting.drawn = True
    assert plan(windows, job).given == (1, 2, 7)
    job.drafting.proposers = ()
    window = plan(windows, job)
    assert (window.drafter, window.verify) == ("mtp", 2)


def test_drafts_that_the_head_has_too_tell_of_both():
    proposer = Says([1, 2, 7], match=LONG_MATCH)
    windows, job = make(depth=4, max_tokens=30, left=2, known=(1, 2), proposers=(proposer,))
    before = {source: job.drafting.depth.reach(source, 3) for source in ("mtp", "ngram, long match")}
    play(windows, job, 2)
    after = {source: job.drafting.depth.reach(source, 3) for source in before}
    assert after["mtp"] > before["mtp"]
    assert after["ngram, long match"][1] > before["ngram, long match"][1]
    assert after["ngram, long match"][2] / after["ngram, long match"][1] < 0.7 < after["mtp"][2] / after["mtp"][1]


@pytest.mark.parametrize(("slope", "given"), [(0.0, (1, 2, 7)), (0.9, None)])
def test_what_n_grams_add_to_the_head_is_verified_if_it_pays(slope, given):
    """What the head has left is, in any case; and tells of them too."""
    proposer = Says([1, 2, 7], match=LONG_MATCH)
    windows, job = make(depth=None, max_tokens=30, left=2, known=(1, 2), proposers=(proposer,), limits={"depth": 4})
    window = plan(costing(windows, slope), job)
    assert (window.given, window.verify) == (given, 3 if given else 2)
    assert (window.drafter, window.source, window.left) == ("ngram" if given else "mtp", "ngram, long match", 2)


def test_a_drafter_that_is_mostly_wrong_loses_its_place():
    windows, job = make(
        depth=4, max_tokens=200, left=4, limits={"context": 300}, proposers=(Says([5, 6, 7, 8], "prediction"),)
    )
    for _ in range(20):
        job.drafting.depth.record("prediction", 4, 0)
    window = plan(windows, job)
    assert (window.drafter, window.verify, window.given) == ("mtp", 4, None)


def test_a_short_match_does_not_stand_in_for_the_head():
    windows, job = make(depth=4, max_tokens=30, left=1, proposers=(Says([5, 6, 7], match=LONG_MATCH - 1),))
    assert plan(windows, job).drafter == "mtp"
    windows, job = make(depth=4, max_tokens=30, head=False, proposers=(Says([5, 6, 7], match=LONG_MATCH - 1),))
    assert plan(windows, job).drafter == "ngram"


def costing(windows, slope):
    """On a machine on which each further token of a round takes this share of the first."""
    for size in (1, 2, 3, 4, 5):
        for _ in range(40):
            windows.controller.costs.of("plain").record_verify(size, 1, 1.0 + slope * (size - 1))
    return windows


SAID = {"head": False, "max_tokens": 900, "proposers": (Says([5, 6, 7, 8], "prediction"),)}


@pytest.mark.parametrize(("slope", "verify"), [(0.0, 4), (0.1, 4), (0.2, 3), (0.3, 2), (0.45, 1), (0.8, 0)])
def test_no_more_is_verified_than_pays(slope, verify):
    """Drafts that are kept with a chance of 0.7 each give 1, 1.7, 2.19, 2.53 and 2.77 tokens. After a while rounds are
    those that give most tokens a second; a neighbour of the best may be as good."""
    rates = [tokens / (1 + slope * drafts) for drafts, tokens in enumerate((1, 1.7, 2.19, 2.533, 2.773))]
    assert rates[verify] == max(rates)
    windows, job = make(depth=None, limits={"depth": 4, "context": 1000}, **SAID)
    costing(windows, slope)
    job.drafting.reach = lambda offer: [0.7**position for position in range(1, 1 + offer.count)]
    chance, verified, rate = random.Random(0), [], 0.0
    for _ in range(200):
        window = plan(windows, job)
        kept = next((place for place in range(window.verify) if chance.random() > 0.7), window.verify)
        job.drafting.take(Kept(0, (0,) * (kept + 1), window.verify, ()), window, ())
        windows.controller.record("plain", 1, 1 + window.verify, [], not window.verify)
        verified.append(window.verify)
        rate += rates[window.verify] / 200
    assert abs(mean(verified[50:]) - verify) < 0.5, verified
    assert rate > 0.98 * max(rates)


def test_a_depth_that_was_asked_for_is_kept():
    windows, job = make(depth=4, limits={"depth": 4, "context": 1000}, **SAID)
    assert plan(costing(windows, 0.8), job).verify == 4


class Asked(Says):
    """Counts how often it is asked."""

    asked = 0

    def propose(self, most):
        self.asked += 1
        return super().propose(most)


def asking(depth, slope):
    proposer = Asked([5, 6, 7, 8], match=LONG_MATCH)
    windows, job = make(depth=depth, max_tokens=900, proposers=(proposer,), limits={"context": 1000})
    return proposer, costing(windows, slope), job


def rounds_asked(proposer, windows, job, rounds):
    found = []
    for number in range(rounds):
        before = proposer.asked
        window = plan(windows, job)
        windows.controller.record("plain", 1, 1 + window.verify, [], not window.verify)
        if proposer.asked > before:
            found.append(number)
    return found


def test_who_is_never_worth_it_is_asked_ever_less_often():
    asked = rounds_asked(*asking(None, 0.9), 80)
    waits = [after - before for before, after in pairwise(asked)]
    assert waits[:MOST_UNASKED] == [1 + unasked for unasked in range(1, 1 + MOST_UNASKED)]
    assert set(waits[MOST_UNASKED:]) == {1 + MOST_UNASKED}


@pytest.mark.parametrize(("rows", "more"), [(1, 0), (3, 0), (4, 1), (8, 2), (16, 4)])
@pytest.mark.parametrize("guide", [None, Allows(20)])
def test_n_grams_of_many_rows_are_asked_for_ever_less_often_while_there_are_none(rows, more, guide):
    """But not where a grammar may force tokens. Once there are some they are soon noticed."""
    windows, _ = make(limits={"rows": rows, "context": 1000})
    proposers, asked, now = [Says([], match=0) for _ in range(rows)], set(), [0]
    for proposer in proposers:
        proposer.matches = lambda least: asked.add(now[0])
    drafting = [Drafting(windows.controller.row(), True, (each,), guide) for each in proposers]
    jobs = [Job(place, (1,) * 5, 900, each, length=4) for place, each in enumerate(drafting)]
    for now[0] in range(60):
        windows.plan([(job, windows.offer(job)) for job in jobs], "plain")
    waits = [after - before for before, after in pairwise(sorted(asked))]
    assert len(waits) > 40 if guide else waits == [1 + min(more * (1 + k), MOST_UNASKED) for k in range(len(waits))]
    assert 60 - max(asked) <= 1 + MOST_UNASKED
    proposers[0].tokens, proposers[0].matches = (5, 6, 7, 8), lambda least: True
    costing(windows, 0.0)
    assert any(
        windows.plan([(job, windows.offer(job)) for job in jobs], "plain")[0][1].verify for _ in range(1 + MOST_UNASKED)
    )


def test_a_row_that_must_be_asked_makes_no_other_be_asked():
    windows, _ = make(limits={"rows": 8, "context": 1000})
    proposers, asked = [Says([], match=0) for _ in range(8)], []
    for place, proposer in enumerate(proposers):
        proposer.matches = lambda least, place=place: asked.append(place)
    guides = [Allows(20)] + [None] * 7
    drafting = [Drafting(windows.controller.row(), True, (p,), g) for p, g in zip(proposers, guides, strict=True)]
    jobs = [Job(place, (1,) * 5, 900, each, length=4) for place, each in enumerate(drafting)]
    for _ in range(60):
        windows.plan([(job, windows.offer(job)) for job in jobs], "plain")
    assert asked.count(0) > 40
    assert all(0 < asked.count(place) < 15 for place in range(1, 8))


def test_who_is_worth_it_or_was_asked_for_is_asked_every_round():
    assert rounds_asked(*asking(None, 0.0), 40) == [*range(40)]
    assert rounds_asked(*asking(4, 0.9), 40) == [*range(40)]


def test_other_rows_are_a_reason_to_ask_anew():
    proposer, windows, job = asking(None, 0.9)
    assert rounds_asked(proposer, windows, job, 30)[-1] == 27  # the next time would be in round 35
    _, other = make(depth=1, limits={"context": 1000})
    windows.plan([(each, windows.offer(each)) for each in (job, other)], "plain")
    assert rounds_asked(proposer, windows, job, 6) == [0, 2, 5]


@pytest.mark.parametrize(("other", "head", "spared"), [(0, True, True), (1, True, False), (0, False, False)])
def test_n_grams_are_not_asked_for_beside_rows_that_never_draft(other, head, spared):
    """Which the first round finds out. But where there is no head to draft for what they lend."""
    proposer = Asked([5, 6, 7, 8], match=LONG_MATCH)
    windows, job = make(depth=None, max_tokens=900, head=head, proposers=(proposer,), limits={"context": 1000})
    _, beside = make(depth=other, limits={"context": 1000})
    asked = 0
    for _ in range(9):
        asked += not windows._bare  # a round that is to have no drafts asks nobody
        windows.plan([(each, windows.offer(each)) for each in (job, beside)], "plain")
    assert proposer.asked == (1 if spared else asked)
    assert asked > 5


@pytest.mark.parametrize(("depth", "drafts"), [(None, 0), (4, 4)])
def test_a_round_that_is_to_tell_what_plain_ones_cost_has_no_drafts(depth, drafts):
    """But those that were asked for."""
    _, windows, job = asking(depth, 0.0)
    windows.controller.plan = lambda rows, kind: [0] * len(rows)
    windows.controller.anchors = True
    window = plan(windows, job)
    assert window.verify == 4
    assert windows.foreseeable([(job, window)], "plain") or depth
    windows.controller.anchors = False
    assert plan(windows, job).verify == drafts
    assert plan(windows, job).verify == 4


@pytest.mark.parametrize(("match", "source"), [(LONG_MATCH - 1, "ngram"), (LONG_MATCH, "ngram, long match")])
def test_drafts_that_much_speaks_for_are_judged_apart(match, source):
    windows, job = make(depth=4, head=False, proposers=(Says([5, 6], match=match),))
    before = job.drafting.depth.reach(source, 2)
    window = play(windows, job, 0)
    assert (window.drafter, window.source) == ("ngram", source)
    assert job.drafting.depth.reach(source, 2) < before


def test_the_head_rests_while_a_proposer_has_more():
    windows, job = make(depth=3, max_tokens=30, proposers=(Says(range(20), "prediction"),))
    assert sizes(plan(windows, job)) == (3, 0)
    windows, job = make(depth=3, max_tokens=30, proposers=(Says(range(3), "prediction"),))
    assert sizes(plan(windows, job)) == (3, 3)


def test_the_head_does_not_rest_for_some_rows_alone():
    windows, job = make(depth=3, max_tokens=30, proposers=(Says(range(20), "prediction"),))
    _, other = make(depth=3, max_tokens=30)
    planned = windows.plan([(each, windows.offer(each)) for each in (job, other)], "plain")
    assert [sizes(window) for _, window in planned] == [(3, 3), (0, 3)]


def test_where_rest_saves_nothing_the_head_goes_on_beside_a_proposer():
    windows, job = make(depth=3, max_tokens=30, proposers=(Says(range(20), "prediction"),))
    windows.limits = replace(windows.limits, sizes=Sizes((1, 2, 4)))
    assert sizes(plan(windows, job)) == (3, 3)


def test_proposals_end_with_what_is_wanted():
    windows, job = make(depth=8, max_tokens=4, proposers=(Says(range(20), "prediction"),))
    assert sizes(plan(windows, job)) == (3, 0)


def test_what_became_text_is_told_to_all_who_guess():
    guide, proposer = Allows(99), Says([5, 6])
    windows, job = make(max_tokens=9, proposers=(proposer,), guide=guide)
    window = plan(windows, job)
    job.drafting.take(Kept(0, (5, 6, 7), 2, (8, 9)), window, (5, 6))  # an end token cut the last one off
    assert proposer.taken == guide.taken == [5, 6]
    assert (job.drafting.left, job.drafting.known) == (2, (8, 9))


# --- constraints -------------------------------------------------------------------------------------------------


def test_drafts_that_the_grammar_forbids_stay_out():
    windows, job = make(depth=4, left=3, known=(1, 2, 30), guide=Allows(20))
    window = plan(windows, job)
    assert (window.drafter, window.verify) == ("mtp", 2)
    windows, job = make(depth=4, proposers=(Says([1, 30, 2], match=LONG_MATCH),), guide=Allows(20))
    window = plan(windows, job)
    assert (window.drafter, window.given) == ("ngram", (1,))


def test_what_the_grammar_forces_is_drafted():
    windows, job = make(depth=4, head=False, guide=Allows(20, forced=(3, 4)))
    window = plan(windows, job)
    assert (window.drafter, window.given) == ("grammar", (3, 4))


def test_what_the_grammar_forces_past_the_round_under_way_is_worth_a_wait():
    _, job = make(depth=4, guide=Allows(20, forced=(3, 4, 5, 6, 7, 8)))
    job.drafting.depth.acceptance.record("mtp", 4, 0)
    lost = [job.drafting.lost(4, Window("mtp", "mtp", verify, 1)) for verify in (0, 3, 5)]
    assert lost[0] > lost[1] > lost[2] == 0.0
    assert job.drafting.lost(0, Window("mtp", "mtp", 0, 1)) == 0.0


@pytest.mark.parametrize(("left", "known", "proposers"), [(2, (4, 5), ()), (0, (), (Says([4, 5], match=LONG_MATCH),))])
def test_masks_are_those_of_the_drafts_in_the_window(left, known, proposers):
    windows, job = make(depth=2, left=left, known=known, proposers=proposers, guide=Allows(20))
    assert plan(windows, job).masks().tolist() == [[2, 4, 5]] * 3


def test_masks_are_those_of_drafts_that_were_not_known_yet_when_the_window_was_planned():
    windows, job = make(depth=2, guide=Allows(20))
    ((_, window),) = windows.plan([(job, windows.expected(job, Window("none", "none", 0, 2)))], "plain")
    job.drafting.known = (7, 8)
    assert window.masks().tolist() == [[2, 7, 8]] * 3


def test_a_constrained_row_has_no_drafts_that_the_host_does_not_know():
    windows, job = make(depth=4, guide=Allows(20))
    assert windows.first(job, [], "plain") == 0


def test_an_unconstrained_window_has_no_masks():
    windows, job = make()
    assert plan(windows, job).masks is None
