"""Backends leave no draft that is too unlikely to be kept: what is learnt of that, what it costs, who is asked."""

from statistics import mean

import pytest

from headlong.engine.acceptance import Leaving
from headlong.engine.depth import DepthController
from headlong.engine.intake import requests_from
from headlong.engine.request import RAGGED, Kept, Sizes
from headlong.engine.roundcost import RoundCosts
from headlong.engine.scene import HEAD, SUREST, Scene
from headlong.engine.windows import Window
from tests.engine.scripted import run, walk
from tests.engine.simulated import Simulation
from tests.engine.test_windows import make


class Knowing(Simulation):
    """Rows whose head knows which of its drafts are likely; of the others it leaves none, where that is asked of it."""

    LIKELY, DOUBTFUL, SHARE = 0.98, 0.4, 0.65

    def __init__(self, machine, rows, seed=0, controller=None, leaves=True):
        super().__init__(machine, [self.LIKELY] * rows, seed, controller)
        self.leaves = leaves
        self.windows = [[] for _ in range(rows)]  # the chance of every draft left
        self.cut = [False] * rows

    def round(self):
        draft = self.controller.plan(self.rows, "plain")
        verify = [len(window) for window in self.windows]
        size, tokens = self.sizes.tokens(verify), 0
        for place, (row, window) in enumerate(zip(self.rows, self.windows, strict=True)):
            kept = next((at for at, chance in enumerate(window) if self.random.random() > chance), len(window))
            tokens += 1 + kept
            if window or self.cut[place]:
                row.record(HEAD, len(window) + self.cut[place], kept)
        made = self._leave(draft)
        steps, rows = [len(draft)] * made, len(self.rows)
        verify_s, draft_s = self._seconds(size, steps)
        noise = self._noisy(1.0)
        self.controller.costs.record("plain", size, self._noisy(verify_s), steps, draft_s * noise, False, rows)
        self.controller.record("plain", rows, size, steps, not any(verify))
        return tokens, verify_s + draft_s

    def _leave(self, draft):
        """Windows for the next round; how many steps the head makes."""
        made = 0
        for place, asked in enumerate(draft):
            chances = [self.LIKELY if self.random.random() < self.SHARE else self.DOUBTFUL for _ in range(asked)]
            left, chance = asked, 1.0
            for at, one in enumerate(chances):
                chance *= one
                if self.leaves and chance < self.controller.least:
                    left = at
                    break
            self.windows[place], self.cut[place] = chances[:left], left < asked
            if asked and self.controller.least:
                self.rows[place].leaving.record(asked, left)
            made = max(made, min(asked, left + 1))
        return made


class Always(DepthController):
    """One depth, all of whose drafts are verified."""

    def __init__(self, depth):
        super().__init__(RoundCosts(), 8)
        self.always = depth

    def plan(self, rows, kind):
        return [self.always] * len(rows)


# --- learnt ------------------------------------------------------------------------------------------------------


def test_all_are_left_while_nothing_is_known():
    assert Leaving().reach(4) == [1.0] * 4


def test_positions_never_asked_for_are_like_the_one_before():
    leaving = Leaving()
    for _ in range(400):
        leaving.record(2, 2)
        leaving.record(2, 1)
    first, second, third, fourth = leaving.reach(4)
    assert first == pytest.approx(1.0)
    assert second == pytest.approx(0.5, abs=0.01)
    assert third / second == pytest.approx(second / first, abs=0.01)
    assert fourth / third == pytest.approx(second / first, abs=0.01)


def test_what_was_left_long_ago_is_forgotten():
    leaving = Leaving()
    for left in [0] * 400 + [1] * 400:
        leaving.record(1, left)
    assert leaving.reach(1)[0] > 0.97


# --- rounds ------------------------------------------------------------------------------------------------------


def played(job, window, left, accepted=0):
    """A round of which so many drafts are left; tokens 7 are the head's."""
    tokens = (7,) * accepted + (1,)
    job.drafting.take(Kept(0, tokens, window.verify, (7,) * left), window, tokens)


def counted(job, position):
    return job.drafting.depth.acceptance._counts[HEAD][position]


def test_a_draft_that_was_too_unlikely_counts_as_one_that_was_not_kept():
    _, job = make(depth=None, max_tokens=50)
    played(job, Window("none", "none", 0, 4, least=0.3), left=2)
    played(job, Window("mtp", "mtp", 2, 4, left=2, least=0.3), left=4, accepted=2)
    assert [counted(job, position)[1] for position in range(3)] == [1.0, 1.0, 0.0]
    played(job, Window("mtp", "mtp", 4, 4, left=4, least=0.3), left=0, accepted=4)
    assert len(job.drafting.depth.acceptance._counts[HEAD]) == 4  # all that were asked for had been left
    before = counted(job, 0)[0]
    played(job, Window("none", "none", 0, 4, least=0.3), left=4)
    assert counted(job, 0)[0] > before  # none was likely enough
    assert job.drafting.depth.leaving.reach(1)[0] < 1.0


def test_a_window_that_ends_where_the_text_does_tells_nothing_of_drafts_behind_it():
    _, job = make(depth=None, max_tokens=50)
    played(job, Window("none", "none", 0, 4, least=0.3), left=2)
    played(job, Window("mtp", "mtp", 1, 0, left=1, least=0.3), left=0, accepted=1)
    assert len(job.drafting.depth.acceptance._counts[HEAD]) == 1


SEEDED = {"temperature": 0.8, "seed": 1}
SIFTED = ({}, SEEDED, {**SEEDED, "top_p": 0.9})
WHOLE = ({"depth": 3}, {"temperature": 0.8}, {"regex": "[a-z]+"})


@pytest.mark.parametrize(("options", "least"), [*((one, 0.4) for one in SIFTED), *((one, 0.0) for one in WHOLE)])
def test_who_is_left_likely_drafts_alone(build, options, least):
    """Neither who asked for a depth, nor rows under the rejection rule, nor constrained ones."""
    engine = build(walk)
    engine.depths.plan = lambda rows, kind: [2] * len(rows)
    engine.depths.least = 0.4
    engine.submit(requests_from((1, 2, 3), {"max_tokens": 9, **options})[0])
    run(engine)
    asked = [part.least for plan in engine.backend.rounds for part in plan if part.draft]
    assert set(asked) == {least}


# --- costs -------------------------------------------------------------------------------------------------------


def scene(leaving=None, sizes=RAGGED):
    """Two rows whose drafts are nearly always kept, 10 ms for no tokens and 1 ms for each, 1 ms for a step."""
    costs = RoundCosts()
    controller = DepthController(costs, 4, sizes=sizes)
    rows = [controller.row() for _ in range(2)]
    for row in rows:
        row.cap = 4
        for _ in range(60):
            row.record(HEAD, 4, 4)
        row.leaving = leaving or row.leaving
    for _ in range(40):
        for tokens in (2, 4, 6, 8, 10):
            costs.record("plain", tokens, 0.01 + 0.001 * tokens, [2, 2], 0.002, False, 2)
    made = Scene(rows, costs, "plain", range(1, 5), sizes)
    made.rate, _ = made.search(made.reach, made.table)
    return made


def test_a_draft_pays_from_the_tokens_that_all_rows_give_meanwhile():
    found = scene()
    assert found.least([4, 4]) == pytest.approx(0.001 * found.rate, rel=0.1)
    found.rate *= 100
    assert found.least([4, 4]) == SUREST
    assert scene(sizes=Sizes((1, 2, 4))).least([4, 4]) == 0.0


def test_a_plan_costs_the_drafts_it_is_expected_to_leave_and_the_steps_to_be_made():
    leaving = Leaving()
    for _ in range(600):
        leaving.record(4, 1)
    all_left, few_left = scene(), scene(leaving)
    assert few_left.cost([1, 1]) == pytest.approx(all_left.cost([1, 1]), rel=0.01)
    # One draft of each row is verified, and the head makes two steps: the second draft is not left.
    saved = 6 * 0.001 + 2 * 0.001
    assert all_left.cost([4, 4]) - few_left.cost([4, 4]) == pytest.approx(saved, rel=0.15)


@pytest.mark.parametrize("rows", [1, 4, 8])
def test_a_head_that_knows_its_likely_drafts_makes_rows_faster(rows):
    """Than any depth all of whose drafts are verified, and than the same controller with a head that does not know."""

    def rate(controller, leaves, seed):
        simulation = Knowing("cpu", rows, seed, controller, leaves)
        simulation.run(200)
        return simulation.run(600)

    knows = mean(rate(None, True, seed) for seed in range(6))
    does_not = mean(rate(None, False, seed) for seed in range(6))
    fixed = max(mean(rate(Always(depth), False, seed) for seed in range(2)) for depth in range(9))
    assert knows > 1.02 * does_not
    assert knows > 1.01 * fixed
