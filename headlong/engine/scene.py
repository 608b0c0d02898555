"""One plan's numbers: what every choice of depths would give and cost, and which is best."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import ceil, exp, inf, log1p, prod
from typing import TYPE_CHECKING

from headlong.engine.request import Sizes
from headlong.engine.roundcost import KindCosts, RoundCosts

if TYPE_CHECKING:
    from headlong.engine.depth import RowDepth

HEAD = "mtp"
SHALLOW = 0.02  # gain for which more drafts are made: the best of many guesses is mostly a lucky one
PARKED = 0.05  # gain for which some rows rest while others draft
NEARBY = 2  # depths beyond the chosen one: far ones cost too much to try
LATE = 0.5  # share of what is taken in late that is charged to who needs it: in long texts it is taken in anyway
WORTH = 0.01  # share of a round that a size must promise to be tried
AROUND = 0.5  # of a plan's drafts, from so many less to as many more of which the cost of one is taken
SUREST = 0.9  # most that may be asked of a draft: none would ever prove to be likelier than was thought


class Scene:
    """One plan's numbers. A plan costs what it takes to verify the drafts that it is expected to leave, and steps[its
    deepest row], at the machine's usual speed; where rounds are padded, its drafts are those that it is run with."""

    def __init__(
        self,
        rows: "Sequence[RowDepth]",
        costs: RoundCosts,
        kind: str,
        depths: Sequence[int],
        sizes: Sizes,
        lent: float = inf,
    ) -> None:
        """`lent`: the share of a round that a plan may cost rows which never draft; without limit if there are none."""
        deepest = max(depths)
        self.depths = depths  # that may be chosen, the least first
        self.auto = [row for row in rows if row.asked is None and row.cap > 0]
        self.reach = [row.reach(HEAD, min(row.cap, deepest)) for row in self.auto]
        fixed = [row.reach(HEAD, row.now) for row in rows if row.asked]
        self.fixed_deepest = max(map(len, fixed), default=0)
        self.rows = len(rows)
        self.lent, self.bystanders = lent, lent < inf
        self.padded, self.run = sizes.padded, sizes.rows(len(rows))
        self.size = self.rows + sum(map(len, fixed))  # tokens verified without the auto rows' drafts
        self.logs = sum(log1p(sum(reach)) for reach in fixed)  # of the tokens that rows give without them
        self.rate = 0.0  # tokens a second of the best plan
        leaves = [row.leaving.reach(deepest) for row in self.auto]
        self.left = [list(accumulate(leave, initial=0.0)) for leave in leaves]  # drafts verified, by row and its depth
        # A step is made while any row is left its draft of the one before, or was told to have a deeper one.
        going = [1.0 - prod([1.0 - leave[step] for leave in leaves]) for step in range(deepest - 1)]
        sure = max(0, self.fixed_deepest - 1)
        going[:sure] = [1.0] * sure
        self.made = [0.0, *accumulate(going, initial=1.0)]  # steps, by the depth of the deepest row
        self._price(costs.of(kind), deepest)

    def _price(self, curves: KindCosts, deepest: int) -> None:
        """A step's cost is taken as a line over the rows in it, so that only the number of drafts counts."""
        self.curves = curves
        one, every = curves.first.value(1), curves.first.value(self.run)
        self.slope = 0.0 if self.padded or self.rows == 1 else (every - one) / (self.rows - 1)
        most = int(self._drafts(sum(map(len, self.reach)), deepest))
        self.verify = curves.verify_of(self.run)
        self.table = self.verify.table(self.size + most)[self.size : self.size + most + 1]
        self.steps = self._steps(curves.further.value(self.run))

    def _steps(self, further: float) -> list[float]:
        """By depth: what all steps to there cost without the slope, and with it for fixed rows; and the host."""
        curves = self.curves
        first = curves.host(bare=False) + curves.first.value(self.run) + self.slope * (self.size - 2 * self.rows)
        further = max(0.0, further - self.slope * self.rows)
        return [curves.host(bare=True) + curves.idle, *(first + further * (made - 1.0) for made in self.made[1:])]

    def _drafts(self, drafts: float, depth: int) -> float:
        """That a plan which leaves so many drafts is run with, by its deepest row."""
        return self.run * (1 + max(depth, self.fixed_deepest)) - self.size if self.padded else drafts

    def _verifying(self, table: Sequence[float], drafts: float) -> float:
        """Seconds, of a table by drafts."""
        whole = min(int(drafts), len(table) - 2)
        return table[whole] + (drafts - whole) * (table[whole + 1] - table[whole])

    def _left(self, depths: Sequence[int]) -> float:
        """Drafts that are expected to be verified, of all rows."""
        return sum([left[depth] for left, depth in zip(self.left, depths, strict=True)])

    def _sloping(self, depths: Sequence[int]) -> float:
        """Seconds that the rows in the steps add to these."""
        return self.slope * sum([self.made[depth] for depth in depths])

    # --- the best plan -------------------------------------------------------------------------------------------

    def search(
        self, reaches: Sequence[Sequence[float]], table: Sequence[float], depths: Sequence[int] | None = None
    ) -> tuple[float, list[int]]:
        """The rate of the best plan, and its depths: one for all, without the rows that would rather rest.

        A depth for every row would promise more and give less: what is known of one row is mostly luck, and rounds
        would come in many more sizes.
        """
        plain = self._verifying(table, self._drafts(0, 0)) + self.steps[self.fixed_deepest]
        best = self._tokens(0.0) / plain, [0] * len(reaches)
        gives = [list(accumulate(reach, initial=0.0)) for reach in reaches]
        fell = 0
        for depth in self.depths if depths is None else depths:
            shares = [
                (log1p(give[least]) / least, least, row)
                for row, give in enumerate(gives)
                if (least := min(depth, len(give) - 1))
            ]
            rate, some = self._share(shares, depth, table)
            fell = 0 if rate > best[0] else fell + 1
            plan = [min(depth, len(give) - 1) if row in some else 0 for row, give in enumerate(gives)]
            if rate > best[0] * (1.0 + SHALLOW) and self.price(plan) <= self.lent:
                best = rate, plan
            if fell > 1:
                break
        return best

    def _share(
        self, shares: list[tuple[float, int, int]], depth: int, table: Sequence[float]
    ) -> tuple[float, set[int]]:
        """The rate and the rows of one depth's plan: all of them, unless the likeliest alone do clearly better."""
        shares.sort(reverse=True)
        logs, left, seconds, rates = 0.0, 0.0, self.steps[max(depth, self.fixed_deepest)], [0.0]
        for likely, count, row in shares:
            logs, left = logs + likely * count, left + self.left[row][count]
            seconds += self.slope * self.made[count]
            rates.append(self._tokens(logs) / (self._verifying(table, self._drafts(left, depth)) + seconds))
        most = max(rates)
        count = len(shares) if most < rates[-1] * (1.0 + PARKED) else rates.index(most)
        return rates[count], {row for _, _, row in shares[:count]}

    def hopes(self) -> Iterator[tuple[float, list[int]]]:
        """The best plan if little-known sizes are cheap and positions good: its rate then, and its depths; and again if
        sizes never seen are hoped for too."""
        now = max(row.now for row in self.auto)
        depths = self.depths[: sum(depth <= now for depth in self.depths) + NEARBY]
        reaches = [
            row.acceptance.hopeful(HEAD, min(len(reach), depths[-1]), row.now)
            for row, reach in zip(self.auto, self.reach, strict=True)
        ]
        standing = self.size + round(self._drafts(self._left([row.now for row in self.auto]), now))
        most = ceil(self._drafts(self._left([len(reach) for reach in reaches]), depths[-1]))
        sizes = range(self.size, self.size + most + 1)
        for bold in (False,) if self.verify.all_seen(sizes) else (False, True):
            yield self.search(reaches, self.verify.optimistic(sizes, standing, bold), depths)

    def price(self, depths: Sequence[int]) -> float:
        """What a plan costs rows that never draft, in rounds."""
        return self.cost(depths) / self.cost([0] * len(depths)) - 1.0

    def abstains(self, depths: Sequence[int]) -> bool:
        """Whether nobody drafts for the sake of rows that never do, which lend some of their time instead."""
        return self.bystanders and not any(depths)

    def bargain(self) -> tuple[float, int, float]:
        """Of the depths that all could have, the one that gives most for what it costs: tokens more for each round that
        it takes longer, that depth, and the rounds. Nobody drafts yet but who was told to."""
        rows = len(self.auto)
        found = []
        for depth in self.depths:
            depths = [min(depth, len(reach)) for reach in self.reach]
            gives = exp(sum(log1p(sum(reach[:depth])) for reach in self.reach) / rows) - 1.0
            price = max(WORTH, self.price(depths))
            found.append((gives / price, depth, price))
        return max(found)

    # --- any plan ------------------------------------------------------------------------------------------------

    def _tokens(self, logs: float) -> float:
        """A round's tokens, as if all rows gave as many: their geometric mean. `logs` are those of the auto rows."""
        return self.rows * exp((self.logs + logs) / self.rows)

    def cost(self, depths: Sequence[int]) -> float:
        deepest = max(depths)
        steps = self.steps[max(self.fixed_deepest, deepest)] + self._sloping(depths)
        return self._verifying(self.table, self._drafts(self._left(depths), deepest)) + steps

    def gives(self, depths: Sequence[int]) -> float:
        return self._tokens(sum(log1p(sum(reach[:depth])) for reach, depth in zip(self.reach, depths, strict=True)))

    def more(self, depths: Sequence[int], rows: int) -> float:
        """Seconds that one draft of so many more rows adds."""
        left, deepest = self._left(depths), max(depths)
        each = self._left([1] * len(depths)) / len(depths)
        after = min(self._drafts(left + rows * each, max(1, deepest)), len(self.table) - 1)
        seconds = self._verifying(self.table, after) - self._verifying(self.table, self._drafts(left, deepest))
        seconds += self.slope * rows
        if any(depths) or self.fixed_deepest:
            return seconds
        return seconds + self.steps[1] - self.steps[0]

    def least(self, depths: Sequence[int]) -> float:
        """The chance to be kept from which on a draft pays for being verified; 0 where windows are padded, and it costs
        nothing."""
        if self.padded:
            return 0.0
        left = max(self._left(depths), float(len(depths)))
        low, high = left * (1.0 - AROUND), min(left * (1.0 + AROUND), len(self.table) - 1.0)
        seconds = self._verifying(self.table, high) - self._verifying(self.table, low)
        return min(SUREST, max(0.0, self.rate * seconds / (high - low))) if high > low else 0.0

    def waking(self, depths: Sequence[int], others: Sequence[int]) -> float:
        """Seconds that the first step takes longer, if these depths become others: some rows have rested."""
        late = sum(row.late for row, now, then in zip(self.auto, depths, others, strict=True) if then and not now)
        seconds = LATE * self.curves.pair * late
        if any(depths) or self.fixed_deepest or not any(others):
            return seconds
        rows = self.run if self.padded else len(others) - others.count(0)
        return seconds + max(0.0, self.curves.waking.value(rows) - self.curves.first.value(rows))

    def annotate(self, depths: Sequence[int]) -> None:
        """Leave every row the reason of its depth."""
        deepest = max(self.fixed_deepest, *depths)
        drafts = min(int(self._drafts(self._left(depths), deepest)), len(self.table) - 2)
        one = self.table[drafts + 1] - self.table[drafts]
        for row, reach, left, depth in zip(self.auto, self.reach, self.left, depths, strict=True):
            row.beside = self.bystanders
            if depth < len(reach):
                verifying = one * (left[depth + 1] - left[depth])
                verifying += self.slope * (self.made[depth + 1] - self.made[depth])
                step = self.rate * (self.steps[depth + 1] - self.steps[depth]) if depth >= deepest else 0.0
                row.note = reach[depth], self.rate * verifying * (self.run / self.rows) + step
