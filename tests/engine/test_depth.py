"""The depth controller against simulated machines and texts: what it chooses gives what the best fixed depth gives."""

import json
import math
import random
from itertools import pairwise

import pytest

from headlong.engine.depth import DepthController
from headlong.engine.roundcost import RoundCosts

CPU = ((1, 5.8), (4, 7.1), (8, 8.9), (16, 14.0), (32, 25.0), (72, 43.5))  # ms of passes over so many tokens


def cpu(tokens):
    lines = list(pairwise(CPU))
    (least, before), (most, after) = next((line for line in lines if tokens <= line[1][0]), lines[-1])
    return (before + (after - before) * (tokens - least) / (most - least)) / 1e3


def gpu(tokens):
    return (2.0 + 0.005 * tokens + 0.5 * ((tokens - 1) // 16)) / 1e3


MACHINES = {
    "cpu": (cpu, lambda rows: (0.5 + 0.3 * (rows - 1) / 7) / 1e3),
    "gpu": (gpu, lambda rows: (0.1 + 0.001 * rows) / 1e3),
}


class Simulation:
    """Rows whose drafts are kept with a chance of their own, on a machine that is noisy and at times slow."""

    def __init__(self, machine, chances, seed=0, controller=None):
        self.verify, self.step = MACHINES[machine]
        self.controller = controller or DepthController(RoundCosts(), 8)
        self.chances = list(chances)
        self.rows = [self.controller.row() for _ in chances]
        self.left = [0] * len(self.rows)
        self.random, self.slowness, self.changes = random.Random(seed), 1.0, 0

    def run(self, rounds):
        """Expected tokens a second, on the machine as it is without noise."""
        tokens = seconds = 0.0
        for _ in range(rounds):
            gave, took = self.round()
            tokens, seconds = tokens + gave, seconds + took
        return tokens / seconds

    def round(self):
        reaches = [row.reach("mtp", left) for row, left in zip(self.rows, self.left, strict=True)]
        verify = self.controller.trim(self.rows, "plain", reaches)
        draft = self.controller.plan(self.rows, "plain")
        size = len(self.rows) + sum(verify)
        steps = [sum(each > depth for each in draft) for depth in range(max(draft))]
        verify_s, draft_s = self.verify(size), sum(map(self.step, steps))
        self.controller.costs.record("plain", size, self._noisy(verify_s), steps, self._noisy(draft_s))
        gave = 0.0
        for row, chance, count in zip(self.rows, self.chances, verify, strict=True):
            kept = 0
            while kept < count and self.random.random() < chance:
                kept += 1
            if count:
                row.record("mtp", count, kept)
            gave += sum(chance**depth for depth in range(count + 1))
        self.changes += sum(before != after for before, after in zip(self.left, draft, strict=True))
        self.left = draft
        return gave, verify_s + draft_s

    def _noisy(self, seconds):
        spike = self.random.uniform(2, 10) if self.random.random() < 0.015 else 1.0
        return seconds * self.slowness * spike * math.exp(self.random.gauss(0, 0.03))

    def fixed(self, depth):
        gives = sum(sum(chance**place for place in range(depth + 1)) for chance in self.chances)
        return gives / (self.verify(len(self.rows) * (1 + depth)) + depth * self.step(len(self.rows)))

    def best(self):
        return max(self.fixed(depth) for depth in range(9))


@pytest.mark.parametrize("chance", [0.9, 0.7, 0.5, 0.2, 0.0])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_finds_the_best_depth(machine, rows, chance):
    simulation = Simulation(machine, [chance] * rows)
    simulation.run(400)
    assert simulation.run(400) >= 0.97 * simulation.best()


@pytest.mark.parametrize("rows", [2, 8])
def test_rows_of_different_luck_have_different_depths(rows):
    simulation = Simulation("cpu", [0.95, 0.1] * (rows // 2))
    simulation.run(500)
    assert simulation.run(300) >= simulation.best()
    assert min(simulation.left[::2]) > max(simulation.left[1::2])


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_hopeless_drafts_cost_next_to_nothing(machine, rows):
    """From an engine that knows nothing, learning and trying included."""
    simulation = Simulation(machine, [0.05] * rows)
    assert simulation.run(2000) >= 0.98 * simulation.fixed(0)


def test_a_text_that_turns_good_is_noticed():
    simulation = Simulation("cpu", [0.05])
    simulation.run(1000)
    simulation.chances = [0.9]
    simulation.run(600)
    assert simulation.run(200) >= 0.9 * simulation.best()


def test_a_slow_moment_of_the_machine_changes_little():
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(500)
    simulation.slowness = 2.0
    assert simulation.run(200) >= 0.95 * simulation.best()
    simulation.slowness = 1.0
    assert simulation.run(200) >= 0.95 * simulation.best()


def test_depths_do_not_thrash():
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(500)
    simulation.changes = 0
    simulation.run(400)
    assert simulation.changes / 4 / 4 <= 12  # a row and 100 rounds


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


def test_costs_are_kept_as_json():
    simulation = Simulation("cpu", [0.8] * 4)
    simulation.run(300)
    costs = simulation.controller.costs
    again = RoundCosts.from_json(json.loads(json.dumps(costs.to_json())))
    for size in (8, 16):  # how fast the machine is just now is not kept
        mine, kept = (each.verify("plain", size) / each.verify("plain", 4) for each in (costs, again))
        assert kept == pytest.approx(mine, rel=0.02)


def test_what_is_known_beforehand_is_used_from_the_first_round():
    known = Simulation("cpu", [0.9] * 8)
    known.run(500)
    costs = RoundCosts.from_json(known.controller.costs.to_json())
    fresh = Simulation("cpu", [0.9] * 8, controller=DepthController(costs, 8))
    assert fresh.run(60) >= 0.9 * fresh.best()


def test_it_says_why():
    simulation = Simulation("cpu", [0.05])
    simulation.run(200)
    assert simulation.rows[0].why
    assert simulation.controller.explain()["plain_step_s"] == pytest.approx(cpu(1), rel=0.3)
