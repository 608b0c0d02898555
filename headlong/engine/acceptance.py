"""How often drafts are kept: learnt row by row and over all rows, while rounds run."""

from collections import Counter
from itertools import accumulate
from operator import mul

FRESH_ACCEPTANCE = 0.7  # before anything was verified
SHRINK = 2.0  # drafts that the prior counts as
LEAN = 12.0  # drafts that the engine's rates count as in a row's: rows differ less than few drafts make them seem to
ROW_MEMORY, ENGINE_MEMORY = 0.985, 0.998  # counts are multiplied with it at every draft: 67 and 500 are remembered
EQUAL = 16.0  # windows of a row after which each counts for less in the engine's rates
FEW, PUBLISH = 64, 32  # drafts after each of which rows see the engine's counts, and after how many they do later
FAST = 0.15  # share of the newest draft in the average that tells when content has turned
TURNED = 1.2  # variances by which that average must be off: some four standard deviations
LEAST_VARIANCE = 0.05
SURPRISED = 4.0  # drafts that the average then counts as
HOPE = 0.4  # most by which a position never looked at may be better than it seems
MOST_RATE = 0.99  # that may be hoped for by analogy
LEFT_MEMORY = 0.99  # of how many drafts are left: 100 windows


class Leaving:
    """How many of the drafts that were asked for are left: backends leave none that is too unlikely to be kept."""

    def __init__(self) -> None:
        self._counts: list[list[float]] = []  # by position: [asked for, left], given that those before it were
        self._known: list[float] = []  # what they give

    def record(self, asked: int, left: int) -> None:
        self._known = []
        for position in range(min(asked, left + 1)):
            if position == len(self._counts):
                self._counts.append([0.0, 0.0])
            count = self._counts[position]
            count[0] = count[0] * LEFT_MEMORY + 1.0
            count[1] = count[1] * LEFT_MEMORY + (position < left)

    def reach(self, depth: int) -> list[float]:
        """How likely so many drafts are left, and each of fewer; a position that was never asked for is like the one
        before it, and all are left while nothing is known."""
        if len(self._known) < depth:
            rates, rate = [], 1.0
            for asked, left in self._counts[:depth]:
                rate = (left + SHRINK * rate) / (asked + SHRINK)
                rates.append(rate)
            self._known = list(accumulate([*rates, *[rate] * (depth - len(rates))], mul))
        return self._known[:depth]


class Acceptance:
    """How often drafts are kept, by drafter and position, given that those before them were."""

    def __init__(self, engine_wide: "Acceptance | None" = None) -> None:
        self._engine = engine_wide
        self._memory = ROW_MEMORY if engine_wide else ENGINE_MEMORY
        self._counts: dict[str, list[list[float]]] = {}  # by position: [verified, kept]
        self._fast: dict[str, float] = {}  # of the first position
        self._known: dict[str, tuple[int, list[float]]] = {}  # rates (engine-wide) or reach (row), and of which version
        self._turned: set[str] = set()  # drafters that do other than the engine's usual
        self._records = 0
        self._told: Counter[str] = Counter()  # windows of each drafter that the engine was told of

    def record(self, drafter: str, verified: int, accepted: int, weight: float = 1.0) -> None:
        """Take a window's outcome: its drafts, and how many of them were kept."""
        counts = self._counts.setdefault(drafter, [])
        memory = 1.0 - (1.0 - self._memory) * weight
        for position in range(min(verified, accepted + 1)):
            if position == len(counts):
                counts.append([0.0, 0.0])
            count = counts[position]
            count[0] = count[0] * memory + weight
            count[1] = count[1] * memory + weight * (position < accepted)
        if accepted == verified:  # nobody looked further, so what is known of it fades
            for count in counts[verified:]:
                count[0] *= memory
                count[1] *= memory
        self._records += 1
        if self._engine and verified:
            self._known.pop(drafter, None)
            self._told[drafter] += 1
            # Rows whose drafts are right have more of them: if all counted alike, new rows would be hoped too much of.
            self._engine.record(drafter, verified, accepted, min(1.0, EQUAL / self._told[drafter]))
            self._notice(drafter, float(accepted > 0))

    def reach(self, drafter: str, depth: int) -> list[float]:
        """How likely each of so many drafts is kept: running products, never rising."""
        version = self._engine.version if self._engine else self._records
        known = self._known.get(drafter)
        if known is None or known[0] != version or len(known[1]) < depth:
            known = self._known[drafter] = version, list(accumulate(self._rates(drafter, depth), mul))
        return known[1][:depth]

    def hopeful(self, drafter: str, depth: int, looked: int) -> list[float]:
        """What `reach` may be, if positions past `looked` are better than was seen of them."""
        rates = self._rates(drafter, depth)
        for position in range(max(1, looked), depth):
            seen = self._seen(drafter, position)
            hoped = min(rates[position - 1], rates[position] + HOPE * (1.0 + seen) ** -0.5)
            rates[position] = max(rates[position], hoped)
        return list(accumulate(rates, mul))

    def _seen(self, drafter: str, position: int) -> float:
        """Drafts that tell of a position: the row's, and those of others."""
        counts = self._counts.get(drafter, ())
        seen = counts[position][0] if position < len(counts) else 0.0
        return seen + (self._engine._seen(drafter, position) if self._engine else 0.0)

    def begin(self, drafter: str, verified: float, kept: float) -> None:
        """Forget what was before these drafts of the first position."""
        self._counts[drafter] = [[verified, kept]]
        self._known.pop(drafter, None)
        self._turned.add(drafter)

    @property
    def version(self) -> int:
        return self._records if self._records < FEW else FEW + self._records // PUBLISH

    def _shared(self, drafter: str, depth: int) -> list[float]:
        """The engine's rates, for rows to lean on."""
        known = self._known.get(drafter)
        if known is None or known[0] != self.version or len(known[1]) < depth:
            known = self._known[drafter] = self.version, self._rates(drafter, depth)
        return known[1]

    def _rates(self, drafter: str, depth: int) -> list[float]:
        """By position. A row's lean on the engine's, shifted by how the row does at the position before."""
        counts = self._counts.get(drafter, ())
        rates: list[float] = []
        if self._engine is None:
            rate = FRESH_ACCEPTANCE
            for verified, kept in counts[:depth]:
                rate = (kept + SHRINK * rate) / (verified + SHRINK)
                rates.append(rate)
            return rates + [rate] * (depth - len(rates))
        usual = self._engine._shared(drafter, depth)
        lean = SHRINK if drafter in self._turned else LEAN
        shift = 0.0
        for position in range(depth):
            rate = usual[position] + shift
            rate = 0.0 if rate < 0.0 else rate if rate < MOST_RATE else MOST_RATE
            if position < len(counts):
                verified, kept = counts[position]
                rate = (kept + lean * rate) / (verified + lean)
            shift = rate - usual[position]
            rates.append(rate)
        return rates

    def _notice(self, drafter: str, kept: float) -> None:
        """Begin anew once the first position does what it did not do before."""
        verified, held = self._counts[drafter][0]
        usual = held / verified
        before = self._fast.get(drafter, usual)
        fast = self._fast[drafter] = before + FAST * (kept - before)
        if verified > 2 * SURPRISED and (fast - usual) ** 2 > TURNED * max(usual * (1.0 - usual), LEAST_VARIANCE):
            self.begin(drafter, SURPRISED, SURPRISED * (fast + kept) / 2)
