"""What rounds cost, as rounds tell it: by size, by draft steps, on a machine that is at times slow."""

import json
import math

import pytest

from headlong.engine.depth import DepthController, RowDepth
from headlong.engine.roundcost import RoundCosts
from tests.engine.simulated import Simulation, cpu, gpu


def told(sizes, seconds=cpu, rounds=10):
    costs = RoundCosts()
    for _ in range(rounds):
        for size in sizes:
            costs.record("plain", size, seconds(size), [], 0.0)
    return costs


def test_costs_lie_on_lines_between_those_seen():
    costs = told([1, 4, 8, 16])
    for size in (1, 2, 4, 6, 8, 12, 16):
        assert costs.verify("plain", size) == pytest.approx(cpu(size), rel=0.01)
    assert cpu(16) < costs.verify("plain", 40) < 2 * cpu(40)


def test_costs_never_fall():
    costs = told([1, 4, 8, 16, 20, 32], lambda size: 0.01 if size != 8 else 0.013)
    values = [costs.verify("plain", size) for size in range(1, 80)]
    assert values == sorted(values)


def test_the_edge_of_a_tile_is_seen():
    costs = told([8, 16, 17, 32, 33], gpu)
    assert costs.verify("plain", 17) > 1.2 * costs.verify("plain", 16)


def test_before_anything_is_known_drafting_is_tried():
    costs = RoundCosts()
    assert 1.0 < costs.verify("plain", 4) / costs.verify("plain", 1) < 1.2
    assert any(DepthController(costs, 8).plan([RowDepth(deepest=8)], "plain"))


@pytest.mark.parametrize("spiked", [0, 1, 5, 20])
def test_a_spike_tells_nothing(spiked):
    costs = RoundCosts()
    for number in range(30):
        for size in (1, 4):
            costs.record("plain", size, cpu(size) * (10.0 if number == spiked and size == 4 else 1.0), [], 0.0)
    assert costs.verify("plain", 4) / costs.verify("plain", 1) == pytest.approx(cpu(4) / cpu(1), rel=0.03)


def test_a_slowdown_is_the_machines_not_a_sizes():
    costs = told([1, 4])
    for _ in range(100):
        costs.record("plain", 4, 2 * cpu(4), [], 0.0)
    assert costs.verify("plain", 4) == pytest.approx(2 * cpu(4), rel=0.02)
    assert costs.verify("plain", 1) == pytest.approx(2 * cpu(1), rel=0.03)


def test_building_kernels_is_not_the_hosts_usual_work():
    costs = RoundCosts()
    for seconds in (12.0, 0.001, 2.0, 0.001):
        costs.record_host("plain", seconds, bare=True)
    assert costs.of("plain").host(bare=True) == pytest.approx(0.001)
    assert costs.of("plain").host(bare=False) == pytest.approx(0.001)  # nothing else is known


def test_what_waiting_costs_is_known_once_rounds_with_and_without_it_were_seen():
    costs = RoundCosts()
    costs.record_wait("plain", 0.003, waited=True)
    assert costs.of("plain").wait == 0.0
    costs.record_wait("plain", 0.001, waited=False)
    assert costs.of("plain").wait == pytest.approx(0.002)
    for _ in range(100):
        costs.record_wait("plain", 0.004, waited=False)
    assert costs.of("plain").wait == 0.0  # never less


@pytest.mark.parametrize(("wait", "better", "worth"), [(0.0, 1.0, True), (0.5, 1.4, False), (0.5, 1.6, True)])
def test_a_round_waits_for_the_text_where_that_gives_more_than_it_takes(wait, better, worth):
    """Shares of a round, all of whose sizes take as long."""
    costs = RoundCosts()
    for size in (1, 4, 9) * 20:
        costs.record("plain", size, 0.01, [], 0.0)
    costs.record_wait("plain", 1e-9 + 0.01 * wait, waited=True)
    costs.record_wait("plain", 1e-9, waited=False)
    controller = DepthController(costs, 8)
    assert controller.worth_waiting("plain", 2, (2, 9), 2 * math.log(better)) == worth


def test_first_and_further_steps_are_told_apart():
    costs = RoundCosts()
    for depth in (1, 2, 4) * 60:
        costs.record("plain", 8, 0.009, [8] * depth, 0.002 + 0.001 * (depth - 1))
    assert costs.draft("plain", [8]) == pytest.approx(0.002, rel=0.1)
    assert costs.draft("plain", [8, 8, 8]) == pytest.approx(0.004, rel=0.05)
    assert costs.draft("plain", []) == 0.0


def test_another_kind_is_taken_for_the_one_that_is_known():
    costs = told([1, 4, 8])
    assert costs.verify("sampled", 4) == costs.verify("plain", 4)
    for _ in range(10):
        costs.record("sampled", 1, 2 * cpu(1), [], 0.0)
    assert costs.verify("sampled", 8) == pytest.approx(2 * cpu(8), rel=0.05)
    assert costs.verify("plain", 8) == pytest.approx(cpu(8), rel=0.01)


def test_tokens_taken_in_late_tell_what_one_costs_if_they_are_many():
    costs = told([1, 4, 8])
    costs.record_late("plain", 2, 400e-6)
    assert costs.of("plain").pair == 0.0
    costs.record_late("plain", 500, 4e-3)
    assert costs.of("plain").pair == pytest.approx(8e-6, rel=0.01)


def test_costs_are_kept_as_json():
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(300)
    costs = simulation.controller.costs
    again = RoundCosts.from_json(json.loads(json.dumps(costs.to_json())))
    for size in (8, 16):  # how fast the machine is just now is not kept
        mine, kept = (each.verify("plain", size) / each.verify("plain", 4) for each in (costs, again))
        assert kept == pytest.approx(mine, rel=0.02)
    assert again.draft("plain", [4, 4]) == pytest.approx(costs.of("plain").draft([4, 4]), rel=0.02)
    newer = RoundCosts.from_json({"version": 99, "kinds": None})
    assert newer.verify("plain", 4) == RoundCosts().verify("plain", 4)


def test_what_is_known_beforehand_is_used_from_the_first_round():
    known = Simulation("cpu", [0.9] * 8)
    known.run(500)
    costs = RoundCosts.from_json(known.controller.costs.to_json())
    fresh = Simulation("cpu", [0.9] * 8, controller=DepthController(costs, 8))
    assert fresh.run(60) >= 0.9 * fresh.best()
