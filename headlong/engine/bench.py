"""A bench: the same prompts plain and at every depth, taking turns, and what rounds cost between them."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from headlong.engine.costs import Sample, time_rounds
from headlong.engine.intake import refuse_unfit
from headlong.engine.request import Output, Request, Sampling
from headlong.errors import Fault, UserError

if TYPE_CHECKING:
    from headlong.engine.engine import Engine

SEEDS = 2**63
WARM_UP_TOKENS = 8
COST_SAMPLES = 3  # of each depth in each mode, if there are as many turns


@dataclass(frozen=True)
class Case:
    """One prompt of a set."""

    set: str
    place: int  # in its set, from 1
    prompt: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"{self.set} {self.place}"


@dataclass(frozen=True)
class Mode:
    """A way to sample. All but sampling without a seed must give one text at every depth."""

    temperature: float
    seeded: bool = True  # greedy decoding has no use for a seed and counts as seeded

    @property
    def name(self) -> str:
        if not self.temperature:
            return "greedy"
        return f"temperature {self.temperature:g}, {'seeded' if self.seeded else 'unseeded'}"


@dataclass(frozen=True)
class Plan:
    """What is to be measured. Depth 0 is plain decoding, against which the others are held."""

    cases: tuple[Case, ...]
    modes: tuple[Mode, ...] = (Mode(0.0),)
    depths: tuple[int, ...] = (0,)
    repeat: int = 1
    max_tokens: int = 128
    seed: int = 0

    @property
    def drafting(self) -> tuple[int, ...]:
        return tuple(depth for depth in self.depths if depth)

    def request(self, case: Case, mode: Mode, depth: int) -> Request:
        sampling = Sampling(mode.temperature, seed=self.seed_of(case) if mode.seeded else None)
        kind = "mtp" if depth else "none"
        return Request(case.prompt, self.max_tokens, sampling, depth=depth or None, draft_kind=kind)

    def seed_of(self, case: Case) -> int:
        return (self.seed + case.place) % SEEDS

    def turns(self) -> Iterator["Turn"]:
        """Every prompt in every mode, over and over; the sets take turns, so that an early end leaves some of each."""
        sets: dict[str, list[Case]] = defaultdict(list)
        for case in self.cases:
            sets[case.set].append(case)
        cases = [case for row in zip_longest(*sets.values()) for case in row if case]
        for repetition in range(self.repeat):
            for place, case in enumerate(cases):
                number = repetition * len(cases) + place
                for mode in self.modes:
                    # Shifted by the repetition, or a prompt would meet the same order again.
                    yield Turn(case, mode, repetition, self._order(number + repetition), self._timed(number))

    def _order(self, number: int) -> tuple[int, ...]:
        """The depths, beginning one later each time, then the same backwards: none always follows another."""
        cycle, first = divmod(number, len(self.depths))
        order = self.depths[first:] + self.depths[:first]
        return order[::-1] if cycle % 2 else order

    def _timed(self, number: int) -> tuple[int, ...]:
        """The depths whose rounds are timed in a turn: a few in many turns, all of them where turns are few."""
        depths = self.drafting
        turns = len(self.cases) * self.repeat
        share = min(len(depths), -(-COST_SAMPLES * len(depths) // turns))
        return tuple(depths[(number * share + place) % len(depths)] for place in range(share))


@dataclass(frozen=True)
class Turn:
    """One prompt at all depths, close together in time, and what rounds of some of them cost."""

    case: Case
    mode: Mode
    repetition: int
    order: tuple[int, ...]
    timed: tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """One prompt at one depth."""

    case: Case
    mode: Mode
    repetition: int
    depth: int
    output: Output


@dataclass
class Bench:
    """Runs a plan on an engine and keeps what it gave; each request runs alone."""

    engine: "Engine"
    plan: Plan
    runs: list[Run] = field(default_factory=list)
    samples: dict[Mode, list[Sample]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for case in self.plan.cases:
            deepest = self.plan.request(case, self.plan.modes[0], max(self.plan.depths))
            try:
                refuse_unfit(deepest, case.prompt, self.engine.limits)
            except UserError as error:
                raise UserError(f"prompt {case.name}: {error}") from error

    @property
    def steps(self) -> int:
        """How often `go` hands something out."""
        parts = len(self.plan.depths) + bool(self.plan.drafting)
        return 1 + parts * len(self.plan.cases) * len(self.plan.modes) * self.plan.repeat

    def go(self) -> Iterator[str]:
        """Measure; what is measured next is named just before. All that is complete stays if it is left early."""
        yield "warming up"
        self._warm_up()
        for turn in self.plan.turns():
            name = f"{turn.case.name}, {turn.mode.name}"
            runs = {}
            for depth in turn.order:
                yield f"{name}, depth {depth}" if depth else f"{name}, plain"
                runs[depth] = self._run(turn, depth)
                self.runs.append(runs[depth])
            if turn.timed:
                yield f"{name}, cost of rounds"
                self.samples[turn.mode] += self._time_rounds(turn, runs)

    def _warm_up(self) -> None:
        case = min(self.plan.cases, key=lambda case: len(case.prompt))
        brief = Plan((case,), self.plan.modes, self.plan.depths, max_tokens=min(WARM_UP_TOKENS, self.plan.max_tokens))
        for turn in brief.turns():
            for depth in turn.order:
                self._answer(brief.request(case, turn.mode, depth))

    def _run(self, turn: Turn, depth: int) -> Run:
        output = self._answer(self.plan.request(turn.case, turn.mode, depth))
        return Run(turn.case, turn.mode, turn.repetition, depth, output)

    def _answer(self, request: Request) -> Output:
        index = self.engine.submit(request)
        while self.engine.busy:
            self.engine.step()
        output = self.engine.output(index)
        if output.finish_reason == "fault":
            raise Fault(f"a request broke off: {' '.join(output.error.split()).rstrip('.')}.")
        return output

    def _time_rounds(self, turn: Turn, runs: Mapping[int, Run]) -> list[Sample]:
        """As many rounds as the depth's own run took, held against the steps of the plain one."""
        request = self.plan.request(turn.case, turn.mode, 0)
        plain = runs[0].output
        samples = []
        with self.engine.idle_backend() as backend:
            for depth in turn.timed:
                rounds = runs[depth].output.speculative.rounds
                seed = self.plan.seed_of(turn.case)
                timed = time_rounds(backend, turn.case.prompt, request.sampling, seed, depth, rounds)
                if timed:
                    step = plain.timings.decode_s / plain.speculative.rounds
                    samples.append(Sample(depth, step, *timed))
        return samples


@dataclass(frozen=True)
class Difference:
    """A text that is not the one plain decoding gave."""

    case: str
    mode: str
    repetition: int
    depth: int
    equal_tokens: int  # tokens before the first that differs


def differences(runs: Sequence[Run]) -> list[Difference]:
    """Texts that differ from their prompt's first plain one, where the mode allows one text alone."""
    groups: dict[tuple[Case, Mode], list[Run]] = defaultdict(list)
    for run in runs:
        if run.mode.seeded:
            groups[run.case, run.mode].append(run)
    found = []
    for group in groups.values():
        reference = min(group, key=lambda run: (run.depth, run.repetition))
        found += [_difference(run, reference) for run in group if _answer_of(run) != _answer_of(reference)]
    return found


def _answer_of(run: Run) -> tuple[tuple[int, ...], str, str]:
    return run.output.tokens, run.output.text, run.output.finish_reason


def _difference(run: Run, reference: Run) -> Difference:
    pairs = zip(run.output.tokens, reference.output.tokens, strict=False)
    both = min(len(run.output.tokens), len(reference.output.tokens))
    equal = next((place for place, (mine, wanted) in enumerate(pairs) if mine != wanted), both)
    return Difference(run.case.name, run.mode.name, run.repetition, run.depth, equal)
