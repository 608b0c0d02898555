import pytest

from headlong.engine.loan import DEAREST, LENT, LONGEST, MOST, Loan
from tests.engine.simulated import Simulation


def test_no_more_is_spent_than_was_lent():
    loan, spent = Loan(), 0.0
    for now in range(1, 2001):
        loan.earn(1)
        if not loan.runs(now) and loan.spend(now, 2, 0.3, 0.1):
            spent += LONGEST * 0.3 + 0.1
        assert spent <= LENT * now
    assert spent > 0.9 * LENT * 2000


def test_drafts_go_on_for_some_rounds():
    loan = Loan()
    loan.earn(1000)
    assert not loan.runs(1)
    assert loan.spend(1, 3, 0.2, 0.0)
    assert loan.depth == 3
    assert [loan.runs(now) for now in (1, LONGEST, LONGEST + 1)] == [True, True, False]


def test_dear_drafts_are_made_for_fewer_rounds():
    loan = Loan()
    loan.earn(1000)
    assert loan.spend(1, 1, DEAREST / 2, 0.0)
    assert [loan.runs(now) for now in (2, 3)] == [True, False]
    assert loan.spend(3, 1, DEAREST, 0.0)
    assert not loan.spend(4, 1, DEAREST, 0.0)


def test_a_look_takes_all_that_was_saved():
    loan = Loan()
    loan.earn(int(MOST / LENT) - 1)
    assert not loan.look(1)
    loan.earn(2)
    assert loan.look(2)
    assert (loan.depth, loan.runs(2), loan.runs(3), loan.look(3)) == (1, True, False, False)


@pytest.mark.parametrize(("rows", "chance"), [(4, 0.05), (4, 0.5), (8, 0.05), (8, 0.5), (8, 0.8), (16, 0.8)])
def test_rows_that_never_draft_lose_little(rows, chance):
    """Where drafts of the other half are no clear gain: they are made as often as costs 5 %, and give what they can."""
    plain = drafting = seconds = 0.0
    for seed in range(3):
        simulation = Simulation("cpu", [chance] * rows, seed)
        for row in simulation.rows[::2]:
            row.asked = row.cap = 0
        simulation.run(100)
        for _ in range(1000):
            windows = simulation.left[1::2]
            seconds += simulation.round()[1]
            plain += simulation.verify(rows)
            each = [sum(chance**place for place in range(depth + 1)) for depth in windows]
            drafting += simulation.verify(rows) * sum(each) / len(each)
    assert plain / seconds >= 0.95
    assert drafting / seconds >= (1.01 if chance == 0.8 else 0.985)


def test_a_row_says_that_others_are_spared():
    simulation = Simulation("cpu", [0.8] * 8)
    for row in simulation.rows[::2]:
        row.asked = row.cap = 0
    simulation.run(300)
    assert all("beside rows that never draft" in row.why for row in simulation.rows[1::2])
