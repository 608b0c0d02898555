"""Machines and texts for the depth controller: what rounds cost, and how often drafts are kept."""

import math
import random
from itertools import pairwise
from statistics import geometric_mean

from headlong.engine.depth import DepthController
from headlong.engine.request import Sizes
from headlong.engine.roundcost import RoundCosts
from headlong.engine.scene import HEAD

CPU = ((1, 5.8), (4, 7.1), (8, 8.9), (16, 14.0), (32, 25.0), (72, 43.5))  # ms of passes over so many tokens


def cpu(tokens, rows=1):
    lines = list(pairwise(CPU))
    (least, before), (most, after) = next((line for line in lines if tokens <= line[1][0]), lines[-1])
    return (before + (after - before) * (tokens - least) / (most - least)) / 1e3


def gpu(tokens, rows=1):
    return (2.0 + 0.005 * tokens + 0.5 * ((tokens - 1) // 16)) / 1e3


H200 = {  # ms of captured rounds of a 4B model, by rows and by tokens of each one's window, of which there are WIDTHS
    1: (2.72, 2.79, 2.86, 2.93, 2.97, 3.02),
    2: (2.84, 2.90, 2.97, 2.97, 3.05, 3.15),
    4: (2.94, 2.97, 3.05, 3.11, 3.16, 3.77),
    8: (3.11, 3.19, 3.26, 3.36, 3.97, 4.85),
    16: (3.31, 3.53, 4.15, 4.36, 5.24, 6.60),
    24: (3.84, 4.44, 5.23, 5.40, 8.60, 9.46),
    32: (4.20, 4.83, 5.59, 5.91, 9.26, 11.13),
}
WIDTHS = (1, 2, 3, 4, 6, 9)


def h200(tokens, rows):
    return H200[rows][next(place for place, width in enumerate(WIDTHS) if tokens <= rows * width)] / 1e3


WAKING = {"cpu": (0.8, 0.003)}  # ms that drafting takes longer after long rest, and for each pair set aside
LONG_REST = 8  # rounds
BACKLOG = 512  # pairs of a row that wait at most

MACHINES = {
    "cpu": (cpu, lambda rows: (0.5 + 0.3 * (rows - 1) / 7) / 1e3),
    "gpu": (gpu, lambda rows: (0.1 + 0.001 * rows) / 1e3),
}
PADDED = h200, lambda rows: (0.14 + 0.0016 * rows) / 1e3


class Simulation:
    """Rows whose drafts are kept with a chance of their own, on a machine that is noisy and at times slow."""

    def __init__(self, machine, chances, seed=0, controller=None):
        self.verify, self.step = MACHINES.get(machine, PADDED)
        self.waking = WAKING.get(machine, (0.0, 0.0))
        self.sizes = Sizes(tuple(H200)) if machine not in MACHINES else Sizes()
        self.controller = controller or DepthController(RoundCosts(), 8, sizes=self.sizes)
        self.chances = list(chances)
        self.rows = [self.controller.row() for _ in chances]
        self.left = [0] * len(self.rows)
        self.late = [0] * len(self.rows)  # pairs that the head has not seen yet
        self.random, self.slowness, self.changes = random.Random(seed), 1.0, 0

    def run(self, rounds):
        """Expected tokens a second, each round's by the rows' geometric mean, on the machine as it is without noise."""
        tokens = seconds = 0.0
        for _ in range(rounds):
            gave, took = self.round()
            tokens, seconds = tokens + gave, seconds + took
        return tokens / seconds

    def round(self):
        chosen = [row.depth for row in self.rows]
        verify = self.left
        draft = self.controller.plan(self.rows, "plain")
        size, steps = self.sizes.tokens(verify), self.sizes.steps(draft)
        verify_s, draft_s = self._seconds(size, steps)
        woken, rows = not any(verify), self.sizes.rows(len(self.rows))
        late = [pairs for pairs, drafts in zip(self.late, draft, strict=True) if drafts or pairs >= BACKLOG]
        draft_s += self.waking[0] * min(1.0, max(late, default=0) / LONG_REST) / 1e3 if woken and steps else 0.0
        late_s = self.waking[1] * sum(late) / 1e3
        costs, verified_s, noise = self.controller.costs, self._noisy(verify_s), self._noisy(1.0)
        costs.record_late("plain", sum(late), late_s * noise)
        costs.record("plain", size, verified_s, steps, draft_s * noise, woken, rows)
        for place, (row, chance, count) in enumerate(zip(self.rows, self.chances, verify, strict=True)):
            kept = 0
            while kept < count and self.random.random() < chance:
                kept += 1
            if count:
                row.record(HEAD, count, kept)
            row.late = self.late[place] = 0 if draft[place] else self.late[place] % BACKLOG + 1 + kept
        self.controller.record("plain", rows, size, steps, woken)
        self.changes += sum(before != row.depth for before, row in zip(chosen, self.rows, strict=True))
        self.left = draft
        return self.gives(verify), verify_s + draft_s + late_s

    def _seconds(self, size, steps):
        return self.verify(size, self.sizes.rows(len(self.rows))), sum(map(self.step, steps))

    def _noisy(self, seconds):
        spike = self.random.uniform(2, 10) if self.random.random() < 0.015 else 1.0
        return seconds * self.slowness * spike * math.exp(self.random.gauss(0, 0.03))

    def come(self, chance):
        self.rows.append(self.controller.row())
        self.chances.append(chance)
        self.left.append(0)
        self.late.append(0)

    def go(self, index):
        for held in (self.rows, self.chances, self.left, self.late):
            del held[index]

    def gives(self, depths):
        """A round's tokens, as if all rows gave as many."""
        return len(self.rows) * geometric_mean(self.tokens(row, depth) for row, depth in enumerate(depths))

    def tokens(self, row, depth):
        """That a row's window gives on average."""
        return sum(self.chances[row] ** place for place in range(depth + 1))

    def planned(self, depths):
        return self.gives(depths) / sum(self._seconds(self.sizes.tokens(depths), self.sizes.steps(depths)))

    def fixed(self, depth):
        return self.planned([depth] * len(self.rows))

    def best(self):
        return max(self.fixed(depth) for depth in range(9))


class Shared(Simulation):
    """A machine that others use too, as two cores of a server are: its rounds wander, many are slow for no reason, and
    it is at once slower or faster for a while. Texts are short, so rows come and go."""

    SPEEDS, STRETCHES = (1.0, 1.0, 1.3, 1.8), (30, 100, 300, 1000)
    WANDERS, FOR = 0.1, 30  # the spread of the log, and rounds after which it is forgotten
    SHORTEST, LONGEST = 40, 60  # rounds of a text

    def __init__(self, machine, chances, seed=0, controller=None):
        super().__init__(machine, chances, seed, controller)
        self.wandered, self.stretch = 0.0, 0
        self.lives = [self._life() for _ in self.rows]

    def _life(self):
        return self.random.randrange(self.SHORTEST, self.LONGEST)

    def _noisy(self, seconds):
        spike = self.random.uniform(0.25, 1.0) if self.random.random() < 0.08 else 0.0
        return seconds * self.slowness * math.exp(self.wandered + spike + abs(self.random.gauss(0, 0.1)))

    def round(self):
        step = self.WANDERS * math.sqrt(2 / self.FOR)
        self.wandered += self.random.gauss(0, step) - self.wandered / self.FOR
        self.stretch -= 1
        if self.stretch < 0:
            self.slowness, self.stretch = self.random.choice(self.SPEEDS), self.random.choice(self.STRETCHES)
        self.left = list(self.left)
        for place, life in enumerate(self.lives):
            self.lives[place] = life - 1 if life else self._life()
            if not life:
                self.rows[place], self.left[place], self.late[place] = self.controller.row(), 0, 0
        return super().round()


class Told:
    """Stands in for a controller: one depth, always."""

    def __init__(self, depth):
        self.depth, self.costs = depth, self

    def row(self):
        return self

    def record(self, *_):
        pass

    record_late = record

    def plan(self, rows, kind):
        return [self.depth] * len(rows)
