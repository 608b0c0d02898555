"""The depth controller against simulated machines and texts: what it chooses gives what the best fixed depth gives."""

import json
import random
from itertools import product
from math import inf
from statistics import mean

import pytest

from headlong.engine import depth as depth_module
from headlong.engine.acceptance import Acceptance
from headlong.engine.depth import BUDGET, TOLL, VACANT, DepthController, RowDepth
from headlong.engine.loan import LENT
from headlong.engine.request import Sizes
from headlong.engine.roundcost import RoundCosts
from headlong.engine.scene import HEAD, LATE, PARKED, Scene
from tests.engine.simulated import H200, MACHINES, WIDTHS, Simulation, cpu

CHANCES = (0.9, 0.7, 0.5, 0.2, 0.0)


# --- what it gives -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_finds_the_best_depth(machine, rows):
    shares = {}
    for chance in CHANCES:
        learning, learnt = [], []
        for seed in range(9):
            simulation = Simulation(machine, [chance] * rows, seed)
            learning.append(simulation.run(200) / simulation.best())
            simulation.run(200)
            learnt.append(simulation.run(300) / simulation.best())
        shares[chance] = mean(learning), mean(learnt)
    assert min(learning for learning, _ in shares.values()) >= 0.93, shares
    assert min(learnt for _, learnt in shares.values()) >= 0.97, shares
    assert sum(learnt for _, learnt in shares.values()) / len(shares) >= 0.985, shares


@pytest.mark.parametrize(("rows", "wanted"), [(2, 0.985), (8, 0.97)])
def test_rows_of_different_luck_have_different_depths(rows, wanted):
    shares, told = [], []
    for seed in range(24):
        simulation = Simulation("cpu", [0.95, 0.1] * (rows // 2), seed)
        simulation.run(500)
        best = max(simulation.planned([*pair] * (rows // 2)) for pair in product(range(9), repeat=2))
        apart, gave, took = 0, 0.0, 0.0
        for _ in range(1200):
            tokens, seconds = simulation.round()
            gave, took = gave + tokens, took + seconds
            lucky, others = simulation.left[::2], simulation.left[1::2]
            apart += min(lucky) > max(others) if rows == 2 else sum(lucky) >= sum(others)
        shares.append(gave / took / best)
        told.append(apart)
    # In the other rounds something is tried, or a bad row's few drafts were all kept by luck.
    assert mean(told) >= 1120, told
    assert min(told) >= 960, told
    assert mean(shares) >= wanted, shares


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_plain_rounds_are_soon_seen(rows):
    """Or many rows that begin with drafts would never learn that they are faster without."""
    simulation = Simulation("cpu", [0.8] * rows)
    bare = 0
    for _ in range(40):
        simulation.round()
        bare += not any(simulation.left)
    assert bare >= 2
    knot = simulation.controller.costs.of("plain").verify_of(rows).knot(rows)
    assert knot.seconds == pytest.approx(cpu(rows), rel=0.1)


@pytest.mark.parametrize("bare", [True, False])
def test_rounds_that_others_draft_for_are_at_times_plain_too(bare):
    """Where the head rests because of what plain rounds seem to cost, but none is ever had."""
    simulation = Simulation("cpu", [0.05] * 4)
    simulation.run(200)
    asked = 0
    for _ in range(200):
        draft = simulation.controller.plan(simulation.rows, "plain")
        asked += simulation.controller.anchors
        simulation.controller.record("plain", 4, 4, simulation.sizes.steps(draft), bare)
    assert bool(asked) is not bare


@pytest.mark.parametrize("rows", [1, 8])
def test_only_depths_that_are_named_are_chosen(rows):
    """Where every other shape of a round is dear at first; an asked depth is another matter."""
    named = (1, 2, 5, 8)
    simulation = Simulation("gpu", [0.8] * rows, controller=DepthController(RoundCosts(), 8, named))
    seen = set()
    for _ in range(300):
        simulation.round()
        seen |= set(simulation.left)
    assert seen <= {0, *named}
    assert simulation.run(300) >= 0.97 * max(simulation.fixed(depth) for depth in named)


PADDED_DEPTHS = tuple(width - 1 for width in WIDTHS[1:])


def padded(chance, rows, seed):
    """Where rounds are padded, so that they cost by their shape."""
    controller = DepthController(RoundCosts(), 8, PADDED_DEPTHS, Sizes(tuple(H200)))
    return Simulation("h200", [chance] * rows, seed, controller)


@pytest.mark.parametrize("rows", [1, 8, 17, 32])
def test_the_best_depth_of_padded_rounds(rows):
    for chance in CHANCES:
        simulation = padded(chance, rows, seed=0)
        best = max(simulation.fixed(depth) for depth in (0, *PADDED_DEPTHS))
        assert simulation.run(200) >= 0.93 * best, chance
        assert simulation.run(300) >= 0.98 * best, chance


@pytest.mark.parametrize("chance", CHANCES)
def test_padded_rounds_while_rows_leave(chance):
    """Rounds of as many tokens are dearer with more rows; what is known of the ones serves the others well enough."""
    simulation = padded(chance, 32, seed=1)
    for cycle in range(2):
        needed = taken = 0.0
        for number in range(180):
            if number >= 60 and number % 4 == 0 and len(simulation.rows) > 1:
                simulation.go(0)
            gave, took = simulation.round()
            best = max(simulation.fixed(depth) for depth in (0, *PADDED_DEPTHS))
            needed, taken = needed + gave / best, taken + took
        assert needed >= (0.97 if cycle else 0.93) * taken
        while len(simulation.rows) < 32:
            simulation.come(chance)


def test_a_row_that_has_no_drafts_is_run_with_those_of_others():
    sizes = Sizes((1, 2, 4, 8))
    assert sizes.tokens([3, 0, 1]) == 4 * 4
    assert sizes.steps([2, 0, 1]) == [4, 4]
    assert sizes.rows(9) == 9
    assert sizes.growing([3, 0, 1], [1, 1, 2, 0, 2]) == [16, 16, 16, 16, 20, 20]
    ragged = Sizes()
    assert ragged.growing([3, 0, 1], [1, 1, 2]) == [7, 8, 9, 10]
    assert ragged.tokens([3, 0, 1]) == 3 + 4
    assert ragged.steps([2, 0, 1]) == [2, 1]


def test_rows_that_do_not_draft_lose_no_more_than_others_gain():
    """On a machine whose rounds cost by the token, drafts of half the rows are mostly paid by the other half."""
    simulation = Simulation("cpu", [0.8] * 8)
    for row in simulation.rows[::2]:
        row.asked = row.cap = 0
    simulation.run(300)
    assert simulation.run(300) >= 0.98 * max(simulation.planned([0, depth] * 4) for depth in range(9))


@pytest.mark.parametrize(("machine", "rows"), [("cpu", 1), ("cpu", 8), ("gpu", 4)])
@pytest.mark.parametrize("chance", [0.0, 0.05])
def test_hopeless_drafts_cost_next_to_nothing(machine, rows, chance):
    """From an engine that knows nothing, learning and trying included; later, trying alone."""
    first, later = [], []
    for seed in range(6):
        simulation = Simulation(machine, [chance] * rows, seed)
        plain = simulation.fixed(0)
        first.append(simulation.run(2000) / plain)
        later.append(simulation.run(500) / plain)
    assert min(first) >= 0.98, first
    assert mean(later) >= 0.99, later


@pytest.mark.parametrize(("machine", "rows"), [("cpu", 1), ("cpu", 4), ("gpu", 8)])
def test_a_text_that_turns_good_is_noticed(machine, rows):
    shares = []
    for seed in range(8):
        simulation = Simulation(machine, [0.05] * rows, seed)
        simulation.run(2000)
        simulation.chances = [0.9] * rows
        simulation.run(110)
        shares.append(simulation.run(100) / simulation.best())
    assert mean(shares) >= 0.95, shares


def test_texts_that_turn_again_and_again_are_followed():
    """Twelve machines, since in one turn or another each follows late."""
    turns = []
    simulations = [Simulation("cpu", [0.9], seed) for seed in range(12)]
    for turn in range(10):
        for simulation in simulations:
            simulation.chances = [(0.9, 0.1)[turn % 2]]
        turns.append(mean(simulation.run(200) / simulation.best() for simulation in simulations))
    assert min(turns) >= 0.88, turns
    assert mean(turns) >= 0.92, turns


@pytest.mark.parametrize("machine", MACHINES)
def test_rows_come_and_go(machine):
    simulation = Simulation(machine, [0.9])
    draw = random.Random(1)
    share = seconds = 0.0
    for number in range(1000):
        if len(simulation.rows) < 12 and draw.random() < 0.03:
            simulation.come(draw.choice([0.9, 0.9, 0.7, 0.2]))
        if len(simulation.rows) > 1 and draw.random() < 0.015:
            simulation.go(draw.randrange(len(simulation.rows)))
        gave, took = simulation.round()
        if number >= 200:
            share, seconds = share + gave / simulation.best(), seconds + took
    assert share / seconds >= 0.98  # of what one depth for all would give, chosen anew each round


def test_a_slow_moment_of_the_machine_changes_little():
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(500)
    before = [row.depth for row in simulation.rows]
    simulation.slowness = 2.0
    assert simulation.run(200) >= 0.97 * simulation.best()
    assert sum(abs(row.depth - depth) for row, depth in zip(simulation.rows, before, strict=True)) <= 4
    simulation.slowness = 1.0
    assert simulation.run(200) >= 0.97 * simulation.best()


@pytest.mark.parametrize(("rows", "chance"), [(1, 0.9), (4, 0.8), (8, 0.5), (16, 0.9)])
def test_depths_do_not_thrash(rows, chance):
    simulation = Simulation("cpu", [chance] * rows)
    simulation.run(400)
    simulation.changes = 0
    simulation.run(300)
    assert simulation.changes / rows / 3 <= 3  # a row and 100 rounds


@pytest.mark.parametrize(("rows", "chance"), [(1, 0.75), (4, 0.75), (4, 0.85), (8, 0.75)])
def test_rows_that_draft_seldom_try_other_depths(rows, chance):
    """A round's drafts may cost little more, but then depths are considered twice."""
    simulation = Simulation("cpu", [chance] * rows)
    simulation.run(500)
    tried = 0
    for _ in range(2000):
        simulation.round()
        tried += simulation.left != [row.depth for row in simulation.rows]
    assert 10 <= tried <= 2000 * BUDGET / TOLL * 1.25


# --- how it chooses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", MACHINES)
def test_no_other_depth_for_some_or_all_is_better(machine):
    verify, step = MACHINES[machine]
    costs = RoundCosts()
    for size in range(1, 20):
        for _ in range(8):
            costs.record("plain", size, verify(size, 4), [1 + size % 4] * 2, 2 * step(1 + size % 4))
    rows = [RowDepth(deepest=4) for _ in range(3)] + [RowDepth(asked=1)]
    for row, kept in zip(rows, (4, 2, 0, 1), strict=True):
        for _ in range(20):
            row.record(HEAD, 4, kept)
    scene = Scene(rows, costs, "plain", range(1, 5), Sizes())
    rate, depths = scene.search(scene.reach, scene.table)
    plans = [[depth * drafts for drafts in some] for depth in range(5) for some in product((0, 1), repeat=3)]
    best = max(scene.gives(plan) / scene.cost(plan) for plan in plans)
    assert best / (1 + PARKED) <= rate <= best * (1 + 1e-9)
    assert scene.gives(depths) / scene.cost(depths) == pytest.approx(rate)


def test_what_waits_for_the_head_is_charged_to_rows_that_begin_to_draft():
    costs = RoundCosts()
    costs.record("plain", 3, 0.008, [3], 0.001)
    costs.record_late("plain", 100, 100 * 8e-6)
    rows = [RowDepth(deepest=4) for _ in range(3)]
    rows[0].late, rows[1].late = 1000, 500
    scene = Scene(rows, costs, "plain", range(1, 5), Sizes())
    for depths, others, late in (((0, 0, 0), (1, 1, 0), 1500), ((1, 0, 0), (2, 2, 2), 500), ((1, 1, 0), (0, 0, 0), 0)):
        assert scene.waking(depths, others) == pytest.approx(LATE * costs.of("plain").pair * late)


def test_an_asked_depth_is_kept():
    controller = DepthController(RoundCosts(), 8)
    rows = [controller.row(3), controller.row(0), controller.row()]
    rows[0].cap = 8
    for _ in range(50):
        draft = controller.plan(rows, "plain")
        controller.costs.record("plain", 3 + sum(draft), 0.005, [1] * max(draft), 0.001 * max(draft))
        assert draft[:2] == [3, 0]
    rows[0].cap = 1
    assert controller.plan(rows, "plain")[0] == 1


def test_rows_beside_such_as_never_draft_leave_them_their_time():
    """Drafts of half the rows give 3.8 % by the product of speeds, and cost the others 25 %."""
    costs = RoundCosts()
    for size in (4, 6, 8) * 20:
        costs.record("plain", size, 0.010 * (size / 4) ** 0.7, [2], 1e-6, rows=4)

    def chosen(*asked, lent=inf):
        rows = [RowDepth(deepest=1, asked=each) for each in asked]
        for row in rows:
            row.record(HEAD, 100, 100)
        scene = Scene(rows, costs, "plain", range(1, 2), Sizes(), lent)
        return scene.search([[0.9]] * asked.count(None), scene.table)[1]

    assert chosen(None, None, None, None) == [1, 1, 1, 1]
    assert chosen(None, None, 0, 0, lent=LENT) == [0, 0]
    assert chosen(None, None, 0, 0, lent=0.4) == [1, 1]


def test_a_cap_holds_at_once_and_no_longer_than_it_stands():
    simulation = Simulation("cpu", [0.9])
    simulation.run(100)
    (row,) = simulation.rows
    chosen = row.depth
    row.cap = 1
    assert simulation.controller.plan([row], "plain") == [1]
    row.cap = 0
    assert simulation.controller.plan([row], "plain") == [0]
    row.cap = 8
    assert row.now == chosen > 1


def test_a_new_row_starts_as_the_engine_knows_texts():
    simulation = Simulation("cpu", [0.0])
    simulation.run(300)
    simulation.come(0.9)
    simulation.round()
    assert simulation.rows[1].depth == 0
    simulation.run(60)
    assert simulation.rows[1].depth > 0


@pytest.mark.parametrize(("rows", "gone", "considered"), [(1, 0, True), (1, 1, True), (3, 1, False), (8, 0, False)])
def test_who_comes_among_many_or_for_another_is_no_reason_to_consider_depths(rows, gone, considered):
    simulation = Simulation("cpu", [0.9] * rows)
    simulation.run(100)
    controller, row = simulation.controller, simulation.controller.row()
    clock = controller._clock
    controller.first(row, simulation.rows[gone:], "plain")
    assert row.depth > 0
    assert (controller._clock > clock) is considered


@pytest.mark.parametrize(("empty", "considered"), [(VACANT - 1, 0), (VACANT + 2, 1)])
def test_a_place_that_is_empty_for_a_moment_is_no_reason_to_consider_depths(empty, considered, monkeypatch):
    """A row that ends is mostly followed by another; one that is not is known soon."""
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(400)
    scenes = []
    monkeypatch.setattr(depth_module, "Scene", lambda *given: scenes.append(given) or Scene(*given))
    simulation.controller._wake = simulation.controller._clock + 1000
    simulation.go(0)
    simulation.go(0)
    simulation.run(empty)
    simulation.come(0.8)
    simulation.come(0.8)
    simulation.run(1)
    assert bool(scenes) is bool(considered)


def test_a_row_without_drafts_is_never_given_up():
    simulation = Simulation("cpu", [0.0])
    simulation.run(3000)
    tried = 0
    for _ in range(600):
        simulation.round()
        tried += simulation.left[0]
    assert 600 / 512 < tried <= 600 / 16


def test_the_best_of_some_rounds():
    """Drafts that are kept half of the time: all are worth it for one row, none where sixteen fill the machine."""
    simulation = Simulation("cpu", [0.5] * 16)
    simulation.run(300)
    gained = [0.0, 0.5, 1.0, 1.5]
    assert DepthController(RoundCosts(), 8).best_of("plain", 1, [1, 2, 3, 4], gained) == 3  # nothing is known yet
    assert simulation.controller.best_of("plain", 1, [1, 2, 3, 4], gained) == 3
    assert simulation.controller.best_of("plain", 16, [16, 17, 18, 19], gained) == 0


def test_rounds_that_rows_which_never_draft_cannot_bear_are_not_had():
    """What they lend pays for longer rounds while it lasts."""
    simulation = Simulation("cpu", [0.8] * 4)
    for row in simulation.rows[::2]:
        row.asked = row.cap = 0
    simulation.chances = [0.0] * 4  # so that the head has no use for it
    simulation.run(400)
    found = [simulation.controller.best_of("plain", 4, [4, 5, 6], (0.0, 0.9, 1.7)) for _ in range(99)]
    assert found[0] == 2
    assert found.count(0) > 10
    assert found == sorted(found, reverse=True)
    for row in simulation.rows[::2]:
        row.asked, row.cap = None, 8
    simulation.go(0)
    simulation.round()
    assert simulation.controller.best_of("plain", 3, [3, 4, 5], (0.0, 0.9, 1.7)) == 2


def test_it_says_why():
    assert RowDepth(asked=2).why == "depth 2 was asked for"
    assert RowDepth(deepest=8).why == "no drafts stood ready that were worth it"
    reasons = []
    for seed in range(5):
        simulation = Simulation("cpu", [0.05], seed)
        (row,) = simulation.rows
        simulation.run(300)
        while row.depth:  # a draft tried now was lucky
            simulation.round()
        reasons.append(row.why)
    assert all(reason.startswith("a draft is kept ") for reason in reasons)
    # A draft and its step cost about a sixth of a plain round.
    assert 15 <= sorted(int(reason.split()[-2]) for reason in reasons)[2] <= 22
    row.depth, row.cap = 3, 1
    assert row.why == "at most 1 drafts are allowed now"
    explained = simulation.controller.explain()
    assert explained["plain_step_s"] == pytest.approx(cpu(1), rel=0.3)
    assert explained["verify"][2] == pytest.approx(cpu(2) / cpu(1), rel=0.1)
    assert json.dumps(explained)


# --- what is known of drafts -------------------------------------------------------------------------------------


def test_reach_is_a_running_product():
    acceptance = Acceptance(Acceptance())
    for _ in range(300):
        acceptance.record(HEAD, 3, 3)
        acceptance.record(HEAD, 3, 1)
    reach = acceptance.reach(HEAD, 4)
    assert reach[:3] == pytest.approx([1.0, 0.5, 0.5], abs=0.06)
    assert reach == sorted(reach, reverse=True)
    assert acceptance.reach("ngram", 2) == pytest.approx([0.7, 0.49])


def test_a_fresh_row_leans_on_the_others():
    engine = Acceptance()
    for _ in range(200):
        Acceptance(engine).record(HEAD, 2, 0)
    fresh = Acceptance(engine)
    assert fresh.reach(HEAD, 1)[0] < 0.05
    for _ in range(12):
        fresh.record(HEAD, 2, 2)
    assert fresh.reach(HEAD, 2)[1] > 0.5
    for _ in range(12):
        fresh.record(HEAD, 2, 2)
    assert fresh.reach(HEAD, 2)[1] > 0.65


def test_content_that_turns_is_learnt_sooner_than_it_is_forgotten():
    acceptance = Acceptance(Acceptance())
    for _ in range(200):
        acceptance.record(HEAD, 1, 1)
    for _ in range(6):
        acceptance.record(HEAD, 1, 0)
    assert acceptance.reach(HEAD, 1)[0] < 0.4
