"""The depth controller on recorded texts: what auto depth gives of the best fixed one, in seconds instead of minutes.

    PYTHONPATH=. python benchmarks/depths.py [--rows 1 2 4 8] [--seeds 8] [--noise 0.08]
    PYTHONPATH=. python benchmarks/depths.py --record 80 >benchmarks/kept.txt

`kept.txt` has a line for each of 80 texts of the default model, which --record makes anew in minutes, and in it a digit
for each of 96 tokens: how many of eight drafts made before that token are kept. What a round keeps depends on where it
begins alone, so every sequence of depths can be played on them. Rounds cost what they do on two cores of an AMD EPYC
with AVX-512, with noise of a slowly wandering machine in what the controller is told, not in what is counted.
Considering depths costs too.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import headlong
from benchmarks.batch import prompts_of
from headlong.engine.depth import DepthController, RowDepth
from headlong.engine.engine import Engine
from headlong.engine.request import Request
from headlong.engine.roundcost import RoundCosts
from headlong.engine.scene import HEAD, Scene

TEXTS = [[int(digit) for digit in line] for line in Path(__file__).with_name("kept.txt").read_text().split()]
TOKENS, DEEPEST, ROWS = 96, 8, 16
PASSES = ((1, 3.3), (4, 3.85), (8, 4.15), (12, 4.45), (16, 4.8), (20, 5.4), (24, 5.98), (28, 6.75), (32, 7.4),
          (36, 8.2), (72, 14.5), (144, 28.0))  # fmt: skip  # ms of passes over so many tokens
FIRST_STEP, STEP = 0.45, 0.15  # ms
HOST = {True: 0.6, False: 0.72}  # ms beside the backend, without drafts and with them
CONSIDERED = 0.2  # ms that one consideration of depths takes
WARM = 300  # rounds that are not counted


def passes(tokens: int) -> float:
    (less, before), (more, after) = next(pair for pair in pairwise(PASSES) if tokens <= pair[1][0])
    return before + (after - before) * (tokens - less) / (more - less)


class Counted(DepthController):
    """Tells how often it has considered depths."""

    considered = 0

    def _settle(self, scene: Scene) -> list[int]:
        self.considered += 1
        return super()._settle(scene)


class Row:
    """A text under way."""

    def __init__(self, controller: DepthController, asked: int | None, kept: list[int], tokens: int) -> None:
        self.depth: RowDepth = controller.row(asked)
        self.kept, self.tokens = kept, tokens
        self.at = self.window = 0

    @property
    def left(self) -> int:
        return self.tokens - self.at

    def cap(self) -> None:
        self.depth.cap = max(0, min(DEEPEST, self.left - self.window - 2))

    def step(self, leave: int) -> int:
        """A round: the tokens it gives."""
        kept = min(self.kept[self.at], self.window)
        if self.window:
            self.depth.record(HEAD, self.window, kept)
        self.at += kept + 1
        self.window = max(0, min(leave, self.left - 1))
        self.depth.late = 0 if leave else self.depth.late + 1 + kept
        return kept + 1


class Machine:
    """All places taken, each by one text after the other."""

    def __init__(self, rows: int, asked: int | None, seed: int, noise: float) -> None:
        self.controller = Counted(RoundCosts(), DEEPEST)
        self.random, self.noise, self.asked = random.Random(seed), noise, asked
        self.order = self.random.sample(range(len(TEXTS)), len(TEXTS))
        self.begun, self.wanders = 0, 0.0
        self.rows = [self._begin(TOKENS * (place + 1) // rows) for place in range(rows)]

    def _begin(self, tokens: int = TOKENS) -> Row:
        text = TEXTS[self.order[self.begun % len(TEXTS)]]
        self.begun += 1
        return Row(self.controller, self.asked, text, tokens)

    def round(self) -> tuple[int, float]:
        """Its tokens and milliseconds."""
        for row in self.rows:
            row.cap()
        leave = self.controller.plan([row.depth for row in self.rows], "plain")
        windows = [row.window for row in self.rows]
        size, bare = len(windows) + sum(windows), not any(windows)
        steps = [sum(count > step for count in leave) for step in range(max(leave))]
        verify, draft = passes(size), FIRST_STEP + STEP * (len(steps) - 1) if steps else 0.0
        self.wanders += self.random.gauss(0, self.noise * math.sqrt(2 / 30)) - self.wanders / 30
        costs, told = self.controller.costs, [part * self._slow() / 1e3 for part in (verify, draft, HOST[bare])]
        costs.record("plain", size, told[0], steps, told[1], bare, len(windows))
        costs.record_host("plain", told[2], bare)
        tokens = sum(row.step(count) for row, count in zip(self.rows, leave, strict=True))
        self.controller.record("plain", len(windows), size, steps, bare)
        self.rows = [row if row.left > 0 else self._begin() for row in self.rows]
        return tokens, verify + draft + HOST[bare]

    def _slow(self) -> float:
        spike = self.random.uniform(1.2, 3.0) if self.random.random() < 0.015 else 1.0
        return spike * math.exp(self.wanders + self.random.gauss(0, self.noise))


def rate(rows: int, asked: int | None, seed: int, noise: float, rounds: int = 2500) -> float:
    """Tokens a millisecond."""
    machine, gave, took = Machine(rows, asked, seed, noise), 0, 0.0
    for number in range(rounds):
        if number == WARM:
            gave, took, machine.controller.considered = 0, 0.0, 0
        tokens, spent = machine.round()
        gave, took = gave + tokens, took + spent
    return gave / (took + CONSIDERED * machine.controller.considered)


def record(texts: int) -> Iterator[str]:
    """Lines of `kept.txt`. A first round begins behind the prompt, with all its drafts, and gives one token more."""
    with headlong.load(rows=ROWS) as engine:
        for prompt in prompts_of(engine, texts):
            text = engine.generate(prompt, max_tokens=TOKENS + DEEPEST, ignore_eos=True, depth=0).tokens
            requests = [
                Request((*prompt, *text[:place]), DEEPEST + 2, depth=DEEPEST, draft_kind=HEAD, ignore_eos=True)
                for place in range(TOKENS + 1)
            ]
            together = [requests[place : place + ROWS] for place in range(0, TOKENS + 1, ROWS)]
            kept = [drafts for some in together for drafts in first_rounds(engine, some)]
            # Right behind a whole chunk nothing is drafted yet: the next place stands in for it.
            behind = [(len(prompt) + place) % engine.limits.chunk == 1 for place in range(TOKENS)]
            yield "".join(str(kept[place + late]) for place, late in enumerate(behind))


def first_rounds(engine: Engine, requests: Sequence[Request]) -> list[int]:
    """Drafts that the first round of each keeps."""
    indices = [engine.submit(request) for request in requests]
    given: dict[int, int] = {}
    while engine.busy:
        step = Counter(one.index for one in engine.step() if one.token is not None)
        given = dict(step) | given
    return [given[index] - 1 for index in indices]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--noise", type=float, default=0.08, help="spread of the log of what rounds seem to take")
    parser.add_argument("--record", type=int, metavar="TEXTS", help="print what the default model's drafts keep")
    args = parser.parse_args()
    if args.record:
        print(*record(args.record), sep="\n")
        return
    for rows in args.rows:
        fixed = {depth: rate(rows, depth, 0, 0.0, 6000) for depth in range(DEEPEST + 1)}
        best = max(fixed, key=fixed.__getitem__)
        shares = [rate(rows, None, seed, args.noise) / fixed[best] for seed in range(args.seeds)]
        others = " ".join(f"{depth}:{share / fixed[best]:.3f}" for depth, share in fixed.items())
        print(f"{rows} rows: auto {mean(shares):.4f} ({pstdev(shares):.4f}) of depth {best}; fixed {others}")


if __name__ == "__main__":
    main()
