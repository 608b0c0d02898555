"""What rounds cost in seconds: learnt while they run, by rows and tokens verified, and by rows that draft."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

VERSION = 3
KINDS = ("plain", "sampled")
NOWHERE = ("", 0, 0)
TILE = 16  # kernels cost a step more past a whole number of tiles, so knots stand on both sides of its edge
FIRST = 8  # rounds after which a size may tell the machine's speed
STRETCH = 3.0  # what those count as
MOST_WEIGHT = 32.0  # rounds that a knot remembers
FADING = 1024.0  # rounds; what was visited so long ago counts for one, in half the time for two, and so on
OLD = 1.5  # rounds; what counts for less
WRONG = 0.4  # and is by this log dearer than now is learnt anew
GAIN = 0.05  # share of its error by which a well-known knot moves
CLIP_UP, CLIP_DOWN = 0.15, 0.2  # most of a log error that counts: rounds are slow by accident, never fast
IDLE_GAIN = 0.1
HICCUP = 0.05  # seconds beside the backend that planning and writing never take: kernels are built then
SPEED_ROUNDS = 5  # the median of so many follows a slowdown at the third round and ignores two spikes
STEADY_ROUNDS = 15  # the median of so many is taken while it differs
STEADY = 0.05  # by less than this log
OVER = 0.15  # log by which a round is faster than the median, once a slow moment is over: none is fast by accident
FALL = 1.1  # most that a size may seem to cost over a larger one
REDRAW = 0.01  # log change after which a table is drawn again
SLOPE = 0.03  # one more token, in rounds of no tokens, before anything is known: little, so that drafting is tried
STEP = 0.1  # a draft step of one row, in rounds of one token, before anything is known
STEP_SLOPE = 0.05  # one more row in it
DOUBT = 0.3  # by which a size seen once, or never, may be cheaper than it seems
LEAST_TRUST = 0.75  # rounds that count, when nothing was seen for long: more may have changed since
NOISE = 0.08  # the same for the noise of one round
MANY = 16  # tokens that the head takes in late and that tell what one of them costs


def knots_to(most: int) -> list[int]:
    """Sizes whose seconds are kept: dense where windows are small, then at both sides of every tile's edge."""
    places = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16]
    while places[-1] < most:
        edge = places[-1]
        inside = (4, 8, 12) if edge == TILE else (8,)
        places += [edge + 1, *(edge + further for further in inside), edge + TILE]
    return places


def class_of(rows: int) -> int:
    """Rows that cost alike: 1, 2, 3 or 4, 5 to 8, and so on."""
    return (rows - 1).bit_length()


def median(values: Sequence[float]) -> float:
    """The lower one."""
    return sorted(values)[(len(values) - 1) // 2]


class Knot:
    """Seconds of one size. Its first rounds are kept, so that a spike among them can be told."""

    def __init__(self, seconds: float, weight: float = 0.0, visited: int = 0) -> None:
        self.seconds = seconds
        self.weight = weight  # in rounds; those of the first stretch count little: the machine may have been slow then
        self._first = [seconds] * FIRST if weight >= STRETCH else []
        self.visited = visited  # the curve's round in which it last came

    @property
    def settled(self) -> bool:
        return len(self._first) >= FIRST

    def observe(self, seconds: float) -> float:
        """Take one round; how far the log of the seconds moved."""
        before, error = self.seconds, math.log(seconds / self.seconds)
        if self.weight < OLD and error < -WRONG:
            self.weight, self._first = 0.0, []
        if self.settled:
            error = max(-CLIP_DOWN, min(CLIP_UP, error))
            self.seconds *= math.exp(error * max(GAIN, 1.0 / (self.weight + 1.0)))
            self.weight = min(MOST_WEIGHT, self.weight + 1.0)
        else:
            self._first.append(seconds)
            self.seconds = self._settle(before)
            self.touch()
        return abs(math.log(self.seconds / before))

    def touch(self) -> None:
        self.weight = max(self.weight, min(STRETCH, self.weight + 1.0))

    def trust(self, now: int) -> float:
        """What its weight is still worth in a round of the curve."""
        return self.weight / (1.0 + self.weight * (now - self.visited) / FADING)

    def visit(self, now: int) -> None:
        self.weight, self.visited = self.trust(now), now

    def _settle(self, expected: float) -> float:
        """The lower third; a single round that is slower than expected is believed by half, and by twice at most."""
        if len(self._first) > 1:
            return sorted(self._first)[(len(self._first) - 1) // 3]
        return min(self._first[0], math.sqrt(expected * min(self._first[0], 2.0 * expected)))


class Curve:
    """Seconds by size: linear between known knots, never falling, shaped like the prior where nothing is known."""

    def __init__(self, prior: Callable[[int], float]) -> None:
        self._prior = prior
        self._knots: dict[int, Knot] = {}
        self._places: list[int] = []  # by size: the nearest place for a knot
        self._table: list[float] = []
        self._moved = 0.0  # since the table was drawn
        self._rounds = 0

    @property
    def known(self) -> bool:
        return bool(self._knots)

    @property
    def sizes(self) -> list[int]:
        """Those that were seen."""
        return sorted(self._knots)

    def knot(self, size: int) -> Knot | None:
        return self._knots.get(self.place(size))

    def value(self, size: int) -> float:
        return self.table(size)[size]

    def table(self, most: int) -> list[float]:
        """Seconds of every size to at least `most`; that of 0 is a filler."""
        if most >= len(self._table) or self._moved > REDRAW or not self._knots:
            self._table = self._draw(max(most, len(self._table) - 1))
            self._moved = 0.0
        return self._table

    def begin(self, size: int, seconds: float) -> None:
        """Take a first round whole, where the prior is not in seconds yet."""
        place = self.place(size)
        self._knots = {place: Knot(seconds * self._prior(place) / self._prior(size))}
        self._moved = math.inf

    def observe(self, size: int, seconds: float) -> None:
        """Take one round's seconds, freed of the machine's speed."""
        place = self.place(size)
        expected = self.value(place)
        if place not in self._knots:
            self._knots[place] = Knot(expected, visited=self._rounds)
            self._moved = math.inf
        self._moved += self._knots[place].observe(seconds * expected / self.value(size))

    def visit(self, size: int) -> Knot | None:
        """A round of this size has come: its knot, if there is one."""
        self._rounds += 1
        knot = self.knot(size)
        if knot:
            knot.visit(self._rounds)
        return knot

    def optimistic(self, sizes: range, standing: int, bold: bool) -> list[float]:
        """The least that each of these sizes may cost, set against the standing one; boldly, even sizes never seen."""
        table, known = self.table(sizes[-1]), self.knot(standing)
        least: list[float] = []
        floor = 0.0
        for size in sizes:
            seconds, knot = table[size], self.knot(size)
            if knot is None:
                least.append(max(floor, seconds * (1.0 - DOUBT)) if bold else seconds)
            elif knot is known:
                least.append(seconds)
            else:
                trust = max(LEAST_TRUST, knot.trust(self._rounds))
                least.append(seconds * (1.0 - DOUBT / trust**2 - NOISE / math.sqrt(trust)))
            if knot and size == self._places[size]:
                floor = max(floor, least[-1])
        return least

    def all_seen(self, sizes: range) -> bool:
        return all(self.knot(size) for size in sizes)

    def to_json(self) -> dict[str, list[float]]:
        return {str(place): [knot.seconds, knot.weight] for place, knot in sorted(self._knots.items())}

    def load(self, data: Mapping[str, Sequence[float]]) -> None:
        self._knots = {int(place): Knot(float(seconds), float(weight)) for place, (seconds, weight) in data.items()}
        self._moved = math.inf

    def place(self, size: int) -> int:
        if size >= len(self._places):
            self._places = [1]
            for left, right in pairwise(knots_to(2 * size)):
                self._places += [left if size - left <= right - size else right for size in range(left, right)]
        return self._places[size]

    def _draw(self, most: int) -> list[float]:
        prior = self._prior
        places = sorted(self._knots)
        if not places:
            return [prior(size) for size in range(most + 1)]
        knots = [self._knots[place] for place in places]
        levels = _never_falling([(knot.seconds, knot.trust(self._rounds)) for knot in knots])
        first, last = places[0], places[-1]
        table = [levels[0] * prior(size) / prior(first) for size in range(first)]
        for (left, right), (low, high) in zip(pairwise(places), pairwise(levels), strict=True):
            table += [low + (high - low) * step / (right - left) for step in range(right - left)]
        # Past the last knot: the slope of its octave, and the prior's as if that had been seen over one token.
        near = min(range(len(places)), key=lambda index: abs(places[index] - last / 2))
        span, rise = last - places[near], levels[-1] - levels[near]
        for size in range(last, most + 1):
            beyond = levels[-1] * (prior(size) / prior(last) - 1.0)
            table.append(levels[-1] + (rise * (size - last) + beyond) / (span + 1))
        return table


def _never_falling(knots: Sequence[tuple[float, float]]) -> list[float]:
    """Levels of seconds and their weights. Neighbours that fall are pooled, each counting as much as its weight; one
    far above a larger size that is known half as well was a spike."""
    levels = [seconds for seconds, _ in knots]
    if all(low <= high for low, high in pairwise(levels)):
        return levels
    pools: list[tuple[float, float, int]] = []
    for place, (seconds, weight) in enumerate(knots):
        ceiling = min((FALL * other for other, known in knots[place:] if 2.0 * known >= weight), default=math.inf)
        level, mass, count = min(seconds, ceiling), max(weight, 0.1), 1
        while pools and pools[-1][0] > level:
            other, other_mass, other_count = pools.pop()
            level = (level * mass + other * other_mass) / (mass + other_mass)
            mass, count = mass + other_mass, count + other_count
        pools.append((level, mass, count))
    return [level for level, _, count in pools for _ in range(count)]


class KindCosts:
    """The curves of one kind of batch, in seconds of the machine's usual speed. Those of `base` are their prior."""

    def __init__(self, base: "KindCosts | None" = None) -> None:
        self._base = base
        self.verify = Curve(self._verify_prior)  # of any rows
        self.by_rows: dict[int, Curve] = {}  # the same of some rows, by their class: more rows cost more than few
        self.first = Curve(self._first_prior)  # a first step may cost more: it takes the round's true pairs too
        self.further = Curve(lambda rows: self.first.value(rows))
        self.waking = Curve(lambda rows: self.first.value(rows))  # a first step after rest
        self.pair = 0.0  # a token that the head takes in later than in its own round
        self.idle = 0.0  # the drafting half of a round in which nobody drafts
        self.hosts: dict[bool, float] = {}  # what rounds with drafts, and without, take beside the backend
        self.waits: dict[bool, float] = {}  # that of rounds begun before the one before was known, and after it was

    def _verify_prior(self, size: int) -> float:
        if self._base and self._base.verify.known:
            return self._base.verify.value(size)
        return 1.0 + SLOPE * size

    def _first_prior(self, rows: int) -> float:
        if self._base and self._base.first.known:
            return self._base.first.value(rows)
        return STEP * self.verify.value(1) * (1.0 + STEP_SLOPE * (rows - 1))

    def verify_of(self, rows: int) -> Curve:
        """What is known of so many rows; where nothing is, of any."""
        which = class_of(rows)
        if which not in self.by_rows:
            self.by_rows[which] = Curve(lambda size: self.verify.value(size))
        return self.by_rows[which]

    @property
    def curves(self) -> dict[str, Curve]:
        return {"verify": self.verify, "first": self.first, "further": self.further}

    @property
    def wait(self) -> float:
        """What a round takes longer if it is begun when the one before it is known; 0 until both were seen."""
        return max(0.0, self.waits[True] - self.waits[False]) if len(self.waits) == 2 else 0.0

    def host(self, bare: bool) -> float:
        """What a round takes beside the backend: planning, and taking in what it gave. `bare`: without drafts."""
        return self.hosts.get(bare, self.hosts.get(not bare, 0.0))

    def draft(self, steps: Sequence[int]) -> float:
        if not steps:
            return self.idle
        further = self.further.table(steps[0])
        return self.first.value(steps[0]) + sum([further[rows] for rows in steps[1:]])

    def record_verify(self, tokens: int, rows: int, seconds: float) -> None:
        if not self.verify.known and not (self._base and self._base.verify.known):
            self.verify.begin(tokens, seconds)
        self.verify.observe(tokens, seconds)
        self.verify_of(rows).observe(tokens, seconds)

    def record_draft(self, steps: Sequence[int], seconds: float, woken: bool) -> None:
        """The error of the whole goes to all its steps alike. `woken`: none of the rows drafted the round before."""
        if not steps:
            self.idle = _followed(self.idle, seconds)
            return
        if not self.first.known:
            self.first.begin(steps[0], seconds / len(steps))
        if woken:
            usual = self.waking.value(steps[0])
            others = self.draft(steps) - self.first.value(steps[0])
            self.waking.observe(steps[0], usual * seconds / (usual + others))
            return
        share = seconds / self.draft(steps)
        rows = steps[0]
        further = [(rows, share * self.further.value(rows)) for rows in dict.fromkeys(steps[1:])]
        self.first.observe(rows, share * self.first.value(rows))
        for rows, part in further:
            self.further.observe(rows, part)


def _followed(usual: float, seconds: float) -> float:
    """An average that spikes move little, also one at its beginning: nothing is twice as fast by accident."""
    if not usual or 2.0 * seconds < usual:
        return seconds
    return usual + IDLE_GAIN * (min(seconds, 2.0 * usual) - usual)


class RoundCosts:
    """Seconds of rounds on two time scales: the machine's speed of the moment, and the slow shape by size.

    A round of a well-known size tells the speed; one of a fresh size is set against the speed of those before it.
    """

    def __init__(self) -> None:
        plain = KindCosts()
        self._kinds = {"plain": plain, "sampled": KindCosts(plain)}
        # Of rounds of well-known sizes: which, and the log of their seconds over the shape's. Some of the usual speed
        # stand before the first, so that a spike is no speed.
        self._errors: deque[tuple[tuple[str, int, int], float]] = deque([(NOWHERE, 0.0)] * SPEED_ROUNDS, STEADY_ROUNDS)
        self._speed = 1.0  # seconds now over those of the shape

    def of(self, kind: str) -> KindCosts:
        """What is known of a kind; of the other one, before this is met."""
        costs = self._kinds[kind]
        if costs.verify.known:
            return costs
        return next((other for other in self._kinds.values() if other.verify.known), costs)

    def verify(self, kind: str, tokens: int, rows: int = 0) -> float:
        """Seconds now; of any rows, if none are named."""
        curves = self.of(kind)
        return self._speed * (curves.verify_of(rows) if rows else curves.verify).value(tokens)

    def draft(self, kind: str, steps: Sequence[int]) -> float:
        return self._speed * self.of(kind).draft(steps)

    def record(
        self, kind: str, tokens: int, verify_s: float, steps: Sequence[int], draft_s: float, woken: bool = False,
        rows: int = 1,
    ) -> None:  # fmt: skip
        """`steps`: rows drafting at the first step, at the second, and so on; empty when nobody drafts. `woken`: none
        of them drafted the round before."""
        if verify_s <= 0.0 or tokens < 1:
            return
        costs = self._kinds[kind]
        curve = costs.verify_of(rows)
        knot = curve.visit(tokens)
        if knot is None or not knot.settled:
            costs.record_verify(tokens, rows, verify_s / self._speed)
        else:
            place = (kind, class_of(rows), curve.place(tokens))
            error = math.log(verify_s / curve.value(tokens))
            # Rounds of a size say nothing of that size's shape unless others stand beside them.
            others = [other for where, other in list(self._errors)[-SPEED_ROUNDS:] if where not in (place, NOWHERE)]
            if 2 * len(others) > SPEED_ROUNDS:
                costs.record_verify(tokens, rows, verify_s / math.exp(median(others)))
            knot.touch()
            self._errors.append((place, error))
            self._speed = self._measured()
        if draft_s > 0.0 or not steps:
            costs.record_draft(steps, draft_s / self._speed, woken)

    def record_late(self, kind: str, tokens: int, seconds: float) -> None:
        """Tokens that the head took in later than in their own rounds; few tell of the call, not of them."""
        if tokens >= MANY:
            costs = self._kinds[kind]
            costs.pair = _followed(costs.pair, seconds / tokens / self._speed)

    def record_host(self, kind: str, seconds: float, bare: bool) -> None:
        """What a round took beside the backend, and whether it had nothing to verify."""
        if seconds < HICCUP:
            hosts = self._kinds[kind].hosts
            hosts[bare] = _followed(hosts.get(bare, 0.0), max(0.0, seconds) / self._speed)

    def record_wait(self, kind: str, seconds: float, waited: bool) -> None:
        """The same where rounds may be begun before the one before is known, and whether this one was not."""
        if seconds < HICCUP:
            waits = self._kinds[kind].waits
            waits[waited] = _followed(waits.get(waited, 0.0), max(0.0, seconds) / self._speed)

    def _measured(self) -> float:
        """The speed of the last rounds; of more of them, while it is steady. The first fast round ends a slow moment:
        sizes that are set against that for longer would seem far too cheap."""
        errors = [error for _, error in self._errors]
        now, steady = median(errors[-SPEED_ROUNDS:]), median(errors)
        if errors[-1] < now - OVER:
            return math.exp(errors[-1])
        return math.exp(steady if abs(steady - now) < STEADY else now)

    def to_json(self) -> dict[str, Any]:
        """Seconds at the machine's usual speed, with the rounds behind each."""
        kinds: dict[str, Any] = {}
        for kind, costs in self._kinds.items():
            kinds[kind] = {name: curve.to_json() for name, curve in costs.curves.items()} | {"idle": costs.idle}
            kinds[kind]["rows"] = {str(rows): curve.to_json() for rows, curve in sorted(costs.by_rows.items())}
        return {"version": VERSION, "kinds": kinds}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "RoundCosts":
        """Costs as they were written; fresh ones if another version wrote them."""
        costs = cls()
        if data.get("version") == VERSION:
            for kind, curves in data["kinds"].items():
                for name, curve in costs._kinds[kind].curves.items():
                    curve.load(curves[name])
                for which, curve in curves["rows"].items():
                    costs._kinds[kind].verify_of(2 ** int(which)).load(curve)
                costs._kinds[kind].idle = float(curves["idle"])
        return costs
