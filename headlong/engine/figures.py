"""What a bench comes to: speed, spread, speed-up, acceptance, and the speed-up its costs would predict."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from headlong.engine.bench import Bench, Difference, Mode, Run, differences
from headlong.engine.costs import Costs, costs_from

FEWEST_TOKENS = 2  # a shorter text says nothing about speed


@dataclass(frozen=True)
class Spread:
    """A figure, and the quartiles of what it was made of."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Figures:
    """One depth over some prompts. None: no run that counts."""

    depth: int
    runs: int
    tokens: int
    decode_s: float
    rounds: int
    speed: Spread | None  # tokens a second: all tokens over all seconds; quartiles over runs
    speedup: Spread | None  # over plain decoding of the same prompt in the same turn: median and quartiles
    overall: float | None  # all tokens over all seconds, as a multiple of plain decoding's
    predicted: float | None  # tokens a round over the cost of such a round
    tokens_a_round: float
    accepted: tuple[float, ...]  # by position: the share of rounds with a draft there that kept it

    @property
    def gain(self) -> float:
        """The speed-up as a number to order by; 0 where none was measured."""
        return self.speedup.value if self.speedup else 0.0


@dataclass(frozen=True)
class Section:
    """One mode; figures are in the order of depths."""

    mode: Mode
    costs: Costs | None
    all: tuple[Figures, ...]
    sets: Mapping[str, tuple[Figures, ...]]

    @property
    def plain_tps(self) -> float | None:
        return next((one.speed.value for one in self.all if not one.depth and one.speed), None)

    @property
    def fastest(self) -> Figures | None:
        """The depth with the highest speed-up; plain decoding when none is above it."""
        return max((one for one in self.all if one.speedup), key=lambda one: one.gain, default=None)


@dataclass(frozen=True)
class Report:
    """All that was measured."""

    sections: tuple[Section, ...]
    prompts: Mapping[str, int]  # by set, those that were run at every depth
    prefill_tps: float
    compared: int  # texts that had to be the same as another
    differences: tuple[Difference, ...]


def report_of(bench: Bench) -> Report:
    """Figures of the turns that were run at every depth; texts of all runs are compared."""
    runs = complete(bench.runs, bench.plan.depths)
    modes = [mode for mode in bench.plan.modes if any(run.mode == mode for run in runs)]
    prefill_s = sum(run.output.timings.prefill_s for run in runs)
    prompts: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        prompts[run.case.set].add(run.case.place)
    return Report(
        sections=tuple(
            section_of(mode, [run for run in runs if run.mode == mode], costs_from(bench.samples[mode]))
            for mode in modes
        ),
        prompts={name: len(places) for name, places in prompts.items()},
        prefill_tps=sum(run.output.prompt_tokens for run in runs) / prefill_s if prefill_s else 0.0,
        compared=sum(run.mode.seeded for run in bench.runs),
        differences=tuple(differences(bench.runs)),
    )


def complete(runs: Sequence[Run], depths: Sequence[int]) -> list[Run]:
    """The runs of turns that have every depth."""
    seen: dict[object, set[int]] = defaultdict(set)
    for run in runs:
        seen[_turn_of(run)].add(run.depth)
    return [run for run in runs if seen[_turn_of(run)] == set(depths)]


def _turn_of(run: Run) -> tuple[str, Mode, int]:
    return run.case.name, run.mode, run.repetition


def section_of(mode: Mode, runs: Sequence[Run], costs: Costs | None) -> Section:
    sets = dict.fromkeys(run.case.set for run in runs)
    return Section(
        mode,
        costs,
        all=_by_depth(runs, costs),
        sets={name: _by_depth([run for run in runs if run.case.set == name], costs) for name in sets},
    )


def _by_depth(runs: Sequence[Run], costs: Costs | None) -> tuple[Figures, ...]:
    return tuple(figures_of(runs, depth, costs) for depth in sorted({run.depth for run in runs}))


def figures_of(runs: Sequence[Run], depth: int, costs: Costs | None) -> Figures:
    """Figures of one depth; the runs hold plain ones of the same turns too."""
    mine = {_turn_of(run): run for run in runs if run.depth == depth and _counts(run)}
    plain = {_turn_of(run): run for run in runs if run.depth == 0 and _counts(run)}
    ratios = [_tps(run) / _tps(plain[turn]) for turn, run in mine.items() if turn in plain]
    total, base = _total_tps(mine.values()), _total_tps(plain.values())
    rounds = sum(run.output.speculative.rounds for run in mine.values())
    each = 1 + sum(run.output.speculative.accepted for run in mine.values()) / rounds if rounds else 0.0
    return Figures(
        depth=depth,
        runs=len(mine),
        tokens=sum(run.output.timings.tokens for run in mine.values()),
        decode_s=sum(run.output.timings.decode_s for run in mine.values()),
        rounds=rounds,
        speed=Spread(total, *quartiles([_tps(run) for run in mine.values()])) if mine else None,
        speedup=Spread(statistics.median(ratios), *quartiles(ratios)) if ratios else None,
        overall=total / base if mine and plain else None,
        predicted=costs.predict(depth, each) if costs and mine else None,
        tokens_a_round=each,
        accepted=accepted_by_position(mine.values()),
    )


def _counts(run: Run) -> bool:
    return run.output.timings.tokens >= FEWEST_TOKENS and run.output.timings.decode_s > 0


def _tps(run: Run) -> float:
    return run.output.timings.decode_tps


def _total_tps(runs: Iterable[Run]) -> float:
    timings = [run.output.timings for run in runs]
    seconds = sum(each.decode_s for each in timings)
    return sum(each.tokens for each in timings) / seconds if seconds else 0.0


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper one; of a single value, the value itself."""
    if len(values) == 1:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def accepted_by_position(runs: Iterable[Run]) -> tuple[float, ...]:
    counts = [run.output.speculative for run in runs]
    drafted = [sum(column) for column in zip_longest(*(one.drafted_by_position for one in counts), fillvalue=0)]
    accepted = [sum(column) for column in zip_longest(*(one.accepted_by_position for one in counts), fillvalue=0)]
    return tuple(kept / made for kept, made in zip(accepted, drafted, strict=True) if made)
