from math import inf
from statistics import mean

import pytest

from headlong.engine.loan import DEAREST, LENT, LENT_PADDED, LONGEST, MOST, MOST_LENT, Loan
from tests.engine.simulated import Simulation


def lending(rounds=0.0, drafting=1, bystanders=1):
    """A loan of so many rounds; a round more adds LENT."""
    loan = Loan()
    loan.meet(drafting, bystanders, padded=False)
    while loan.purse < rounds:
        loan.pass_round()
    return loan


def test_no_more_is_spent_than_was_lent():
    loan, spent = lending(), 0.0
    for now in range(1, 2001):
        loan.pass_round()
        if not loan.runs(now) and loan.spend(now, 2, 0.3, 0.1):
            spent += LONGEST * 0.3 + 0.1
        assert spent <= LENT * now + 1e-9
    assert spent > 0.9 * LENT * 2000


def test_drafts_go_on_for_some_rounds():
    loan = lending(MOST)
    assert not loan.runs(1)
    assert loan.spend(1, 3, 0.2, 0.0)
    assert loan.depth == 3
    assert [loan.runs(now) for now in (1, LONGEST, LONGEST + 1)] == [True, True, False]


def test_dear_drafts_are_made_for_fewer_rounds():
    loan = lending(MOST)
    assert loan.spend(1, 1, DEAREST / 2, 0.0)
    assert [loan.runs(now) for now in (2, 3)] == [True, False]
    assert loan.spend(3, 1, DEAREST, 0.0)
    assert not loan.spend(4, 1, DEAREST, 0.0)
    assert loan.wait == pytest.approx(DEAREST / LENT)


def test_what_can_never_be_paid_is_looked_at_instead():
    loan = lending(MOST)
    assert loan.spend(1, 4, MOST + 1, 0.0)
    assert (loan.depth, loan.runs(1), loan.runs(2), loan.purse) == (1, True, False, 0.0)


def test_a_look_takes_all_that_was_saved():
    loan = lending(MOST - 0.1)
    assert not loan.look(1)
    for _ in range(int(loan.wait) + 1):
        loan.pass_round()
    assert loan.look(2)
    assert (loan.depth, loan.runs(2), loan.runs(3), loan.look(3)) == (1, True, False, False)


def test_single_rounds_are_paid_too():
    loan = lending(1.0)
    assert [loan.pay(0.4), loan.pay(0.4), loan.pay(0.4), loan.pay(0.1)] == [True, True, False, True]
    assert lending().pay(0.0)


def test_what_the_standing_plan_takes_is_not_saved():
    loan = lending(0.2)
    loan.taken = 2 * LENT
    before = loan.purse
    loan.pass_round()
    assert loan.purse == pytest.approx(before - LENT)
    for _ in range(99):
        loan.pass_round()
    assert loan.purse == 0.0


@pytest.mark.parametrize(
    ("drafting", "bystanders", "padded", "lent"),
    [
        (4, 4, False, LENT),
        (1, 7, False, LENT / 7),
        (4, 4, True, LENT_PADDED),
        (31, 1, True, MOST_LENT),
        (3, 0, True, inf),
    ],
)
def test_each_row_that_may_draft_is_lent_as_much(drafting, bystanders, padded, lent):
    loan = Loan()
    assert loan.meet(drafting, bystanders, padded) == (bystanders > 0)
    assert loan.lent == pytest.approx(lent)
    assert not loan.meet(drafting, bystanders, padded)


def test_nothing_is_kept_for_others_who_come_later():
    loan = lending(MOST)
    assert not loan.meet(1, 2, padded=False)
    assert loan.purse > 0.0
    assert loan.meet(1, 0, padded=False)
    assert loan.pay(99.0)
    for _ in range(9):
        loan.pass_round()
    assert loan.meet(1, 1, padded=False)
    assert (loan.purse, loan.pay(0.1)) == (0.0, False)


def speeds(simulation, plain, rounds=1000):
    """How fast some rows are that never draft, and the others, in times of a batch in which nobody does."""
    for row in plain:
        row.asked = row.cap = 0
    simulation.run(150)
    places = [place for place, row in enumerate(simulation.rows) if row not in plain]
    seconds = bare = drafted = 0.0
    for _ in range(rounds):
        gave = [simulation.tokens(place, simulation.left[place]) for place in places]
        seconds += simulation.round()[1]
        usual = simulation.verify(simulation.sizes.tokens([0] * len(simulation.rows)), len(simulation.rows))
        bare, drafted = bare + usual, drafted + usual * mean(gave)
    return bare / seconds, drafted / seconds


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.8, 0.95])
def test_rows_that_never_draft_lose_little(machine, rows, chance):
    """However much the other half would gain: they draft as often as costs 2.5 %, and get what that gives."""
    found = []
    for seed in range(3):
        simulation = Simulation(machine, [chance] * rows, seed)
        found.append(speeds(simulation, simulation.rows[::2]))
    plain, drafting = map(mean, zip(*found, strict=True))
    assert plain >= 0.97
    assert drafting >= (1.005 if chance >= 0.8 else 0.985)


def test_who_is_many_gives_way_to_few_as_little_as_few_to_many():
    """Each row that may draft costs the others, all together, as much."""
    found = {}
    for plain in (1, 4, 7):
        simulation = Simulation("gpu", [0.8] * 8)
        found[plain] = speeds(simulation, simulation.rows[:plain])
    assert found[7][0] >= 0.995
    assert found[1][0] >= 0.92
    assert found[1][1] >= 1.5 > found[4][1] > found[7][1] >= 1.01


@pytest.mark.parametrize("rows", [2, 8])
def test_padded_rounds_are_drafted_for_all_the_time(rows):
    """There drafts cost next to nothing beside what they give."""
    simulation = Simulation("h200", [0.8] * rows)
    plain, drafting = speeds(simulation, simulation.rows[::2])
    assert plain >= 0.8
    assert drafting >= 2.0


def test_a_row_says_that_others_are_spared():
    simulation = Simulation("cpu", [0.8] * 8)
    for row in simulation.rows[::2]:
        row.asked = row.cap = 0
    simulation.run(300)
    assert all("beside rows that never draft" in row.why for row in simulation.rows[1::2])


@pytest.mark.parametrize("stays", [6, 30])
def test_drafts_end_when_a_plain_row_comes_and_go_on_when_it_has_gone(stays):
    gaps, bests = [], []
    for seed in range(3):
        simulation = Simulation("cpu", [0.8] * 3, seed)
        simulation.run(200)
        for _ in range(8):
            simulation.come(0.8)
            simulation.rows[3].asked = simulation.rows[3].cap = 0
            simulation.round()
            standing = [row.now for row in simulation.rows]
            simulation.run(stays - 1)
            assert not any(standing)
            simulation.go(3)
            bests.append(simulation.best())
            gaps.append(simulation.run(40))
    assert mean(gaps) / mean(bests) >= 0.95


def test_rows_without_the_head_draft_now_and_then_beside_plain_ones():
    """Only others' proposals stand in their windows; those are paid for from what is lent, too."""
    simulation = Simulation("cpu", [0.0] * 4)
    simulation.run(50)  # so that costs are known
    controller = simulation.controller
    rows = [controller.row(None if place % 2 else 0) for place in range(4)]
    for row in rows:
        row.cap = 0
    gained, longer = (0.0, 0.95, 1.85), 0
    for _ in range(400):
        controller.plan(rows, "plain")
        longer += controller.best_of("plain", 4, [4, 5, 6], gained) > 0
    usual = controller.costs.of("plain").verify_of(4).table(6)
    assert longer > 10
    assert longer * (usual[5] / usual[4] - 1.0) < 1.1 * LENT * 400
    assert controller.best_of("plain", 4, [4, 4, 4], gained) == 2  # for nothing


def test_the_best_that_can_be_paid_is_taken():
    simulation = Simulation("cpu", [0.0] * 4)
    simulation.run(50)
    controller = simulation.controller
    usual = controller.costs.of("plain").verify_of(4).table(12)
    costs = [usual[size] / usual[4] - 1.0 for size in (4, 6, 12)]
    controller._loan.meet(2, 2, padded=False)
    while controller._loan.purse < 1.1 * costs[1]:
        controller._loan.pass_round()
    assert controller._loan.purse < costs[2]
    assert controller.best_of("plain", 4, [4, 6, 12], (0.0, 2.0, 8.0)) == 1
