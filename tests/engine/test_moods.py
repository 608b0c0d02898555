"""The depth controller on a machine that it shares with others: nothing that was learnt in a bad moment is for good."""

from statistics import mean

import pytest

from headlong.engine.depth import DepthController
from headlong.engine.roundcost import VERSION, RoundCosts
from tests.engine.simulated import Shared, Simulation, Told, cpu


def best(machine, chances):
    """Of all depths, with the same rows coming and going."""
    return max(Shared(machine, chances, seed=100, controller=Told(depth)).run(2000) for depth in range(9))


@pytest.mark.parametrize(("machine", "rows"), [("cpu", 1), ("cpu", 2), ("cpu", 8), ("h200", 8)])
def test_a_shared_machine(machine, rows):
    chances, shares = [0.8] * rows, []
    wanted = best(machine, chances)
    for seed in range(24):
        simulation = Shared(machine, chances, seed)
        simulation.run(1000)
        shares.append(simulation.run(1500) / wanted)
    assert mean(shares) >= 0.975, shares
    assert min(shares) >= 0.92, shares


@pytest.mark.parametrize(("rows", "cheap"), [(1, 2), (2, 4), (8, 8)])
def test_sizes_that_seemed_dear_are_looked_at_again(rows, cheap):
    """What is larger than `cheap` tokens was learnt while the machine took twice as long, and is well known."""
    known = {str(size): [cpu(size) * (1.0 if size <= cheap else 2.0), 32.0] for size in (1, 2, 4, 8, 16, 32)}
    steps = {"1": [0.0005, 32.0], "8": [0.0008, 32.0]}
    curves = {"verify": known, "first": steps, "further": steps, "idle": 0.0, "rows": {(rows - 1).bit_length(): known}}
    empty = {"verify": {}, "first": {}, "further": {}, "idle": 0.0, "rows": {}}
    costs = RoundCosts.from_json({"version": VERSION, "kinds": {"plain": curves, "sampled": empty}})
    simulation = Simulation("cpu", [0.8] * rows, controller=DepthController(costs, 8))
    simulation.run(2500)
    assert simulation.run(500) >= 0.975 * simulation.best()


def test_a_slow_beginning_is_not_what_rest_costs():
    """The first round without drafts makes room for pairs set aside, and takes many times as long as all others."""
    costs = RoundCosts()
    for seconds in (0.003, 0.00005, 0.00006):
        costs.record("plain", 8, 0.009, [], seconds)
    assert costs.draft("plain", []) == pytest.approx(0.00005, rel=0.1)


def test_a_slow_moment_ends_with_its_first_fast_round():
    """A fresh size that was set against the slow moment for longer would seem half as dear as it is."""
    costs = RoundCosts()
    for seconds in (*[0.005] * 30, *[0.010] * 3):
        costs.record("plain", 4, seconds, [], 0.0, rows=4)
    assert costs.verify("plain", 4, 4) == pytest.approx(0.010, rel=0.1)
    costs.record("plain", 4, 0.005, [], 0.0, rows=4)
    for _ in range(2):
        costs.record("plain", 16, 0.012, [], 0.0, rows=4)
    assert costs.verify("plain", 16, 4) == pytest.approx(0.012, rel=0.1)
