"""How many tokens to draft for every row: what makes rows fastest, found while rounds run.

Rows share every round, so one row's drafts cost all of them time. The best plan is the one with the greatest product of
the rows' speeds: nobody is slowed for a neighbour who gains less than they lose, in proportion.
"""

from collections.abc import Sequence
from math import exp
from operator import is_
from statistics import mode
from typing import Any

from headlong.engine.acceptance import Acceptance, Leaving
from headlong.engine.loan import ENOUGH, Loan
from headlong.engine.probe import FIRST_WAIT, REST, Probe
from headlong.engine.request import RAGGED, Sizes
from headlong.engine.roundcost import STRETCH, RoundCosts
from headlong.engine.scene import HEAD, SHALLOW, WORTH, Scene

# When depths change
YOUNG = 16  # rounds after a change of rows in which depths are considered often, ever less; fewer with more rows
FEW = 2  # rows, of which one more or less changes much
VACANT = 4  # rounds for which the place of a row that is gone may stay empty: mostly another comes
IDLE = 16  # rounds of rest for every four rows, or fewer, while the best plan stands and nothing is to be tried
CROWD = 3  # one row in so many that comes or goes makes another crowd
DRAG = 0.15  # rounds lost by standing still after which depths change: 2 % a round for 8 rounds
DEAD_ZONE = 0.01  # gains that cannot be told from nothing
UNSURE = 1.15  # times what drafts that nobody planned seem to cost, and must pay: such sizes are seldom seen
ROUND_GAIN = 0.1  # share of the newest round in what rounds take
# What is tried though it looks worse
BUDGET = 0.003  # share of time for it
FIRST_CREDIT, CREDIT = 3.0, 2.0  # rounds of it that a new engine starts with, and most that are saved up later
DEBT = 1.0  # rounds that a promising series of probes may run ahead of the budget
TOLL = 0.05  # rounds that a trial of other depths takes beside what it verifies: depths are considered twice more
FULL_HOPE, MOST_HOPE = 0.2, 0.25  # gains, if all drafts were kept, for which the budget is spent on them, and more
SOON = 4  # rounds to one without drafts, while hardly any was seen
FIRST_ANCHOR, ANCHOR_WAIT = 64, 4  # the same after a change; later, for each that is remembered
FAR = 0.2  # share by which rounds without drafts are so much worse that none is looked at
LONGEST_LOOK = 64  # rounds from one look for something worth trying to the next


def other_crowd(now: int, before: int) -> bool:
    """Whether so many rows came or went that drafts cost something else: more than some of many."""
    return CROWD * abs(now - before) > before


class RowDepth:
    """One row's drafting: what was asked, what is allowed now, what was chosen and why."""

    def __init__(
        self,
        asked: int | None = None,
        deepest: int = 0,
        engine_wide: Acceptance | None = None,
        leaving: Leaving | None = None,
    ) -> None:
        self.asked = asked
        self.most = deepest if asked is None else asked
        self.cap = self.most  # most drafts now; the engine lowers it near the end of a text
        self.acceptance = Acceptance(engine_wide)
        self.sifted = leaving is not None  # only its likely drafts are left
        self.leaving = leaving or Leaving()  # of all such rows
        self.depth: int | None = None  # chosen last; None: not yet
        self.late = 0  # tokens that the head takes in before it drafts again
        self.probe = Probe()
        self.note: tuple[float, float] | None = None  # one draft more: its reach, and from which on it pays
        self.beside = False  # such as never draft, who would lose by it

    def reach(self, drafter: str, depth: int) -> list[float]:
        return self.acceptance.reach(drafter, depth)

    def left(self, count: int) -> list[float]:
        """The same of the head's drafts that stand ready, given that they were left."""
        reach = self.acceptance.reach(HEAD, count)
        return [min(1.0, kept / left) for kept, left in zip(reach, self.leaving.reach(count), strict=True)]

    def record(self, drafter: str, verified: int, accepted: int) -> None:
        """Take what a round kept of this row's window."""
        self.acceptance.record(drafter, verified, accepted)
        if self.probe.launched and verified and drafter == HEAD:
            self.probe.outcome = accepted

    @property
    def now(self) -> int:
        """Drafts a round, as chosen last."""
        wanted = self.depth if self.asked is None else self.asked
        return min(wanted or 0, self.cap)

    @property
    def why(self) -> str:
        """The reason of the last decision, for people."""
        if self.asked is not None:
            return f"depth {self.asked} was asked for"
        if self.note is None or self.depth is None:
            return "no drafts stood ready that were worth it"
        if self.now < self.depth or not self.cap:
            return f"at most {self.cap} drafts are allowed now"
        if self.depth >= self.most:
            return f"{self.depth} drafts a round pay, the most there can be"
        which = f"{self.depth} drafts a round pay; one more" if self.depth else "a draft"
        if self.beside and not self.depth:
            which = f"beside rows that never draft only some rounds have drafts; {which}"
        return f"{which} is kept {100 * self.note[0]:.0f} % of the time and pays from {100 * self.note[1]:.0f} %"


class DepthController:
    """Chooses all rows' depths together. Each round: plan, the round, then costs.record, record and row.record."""

    def __init__(self, costs: RoundCosts, deepest: int, depths: Sequence[int] = (), sizes: Sizes = RAGGED) -> None:
        """`depths` are those to choose from; all to the deepest, if none are named."""
        self.costs = costs
        self.deepest = deepest
        self._depths = depths or range(1, deepest + 1)
        self._sizes = sizes
        self.acceptance = Acceptance()
        self.leaving = Leaving()
        self.least = 0.0  # chance to be kept from which on a draft pays for being verified, as of the last plan
        self._rows: list[RowDepth] = []  # of the last round
        self._crowd, self._same = 0, True  # how many they were when depths were last considered; whether they are those
        self._scene: Scene | None = None
        self._clock = self._planned = self._wake = self._born = self._young = self._gone = 0  # rounds
        self._drag = self._lags = 0.0  # rounds lost by standing still, and of late by each round
        self._credit = FIRST_CREDIT  # rounds that may be lost by trying
        self._solvent = 0  # when that is enough for the next probe
        self._wait, self._look = FIRST_WAIT, 0
        self.anchors = False  # the plan made last is for a round without any drafts
        self._anchored = self._changed = 0  # when such a round was last had, and other depths
        self._looked = False  # a size was tried last, not a draft
        self._rest_s = self._round_s = 0.0  # of the last rounds, beside verifying and all; at the machine's usual speed
        self._loan = Loan()

    def row(self, asked: int | None = None, sifted: bool = True) -> RowDepth:
        """`sifted`: unlikely drafts need not be left, unless a depth was asked for."""
        return RowDepth(asked, self.deepest, self.acceptance, self.leaving if sifted and asked is None else None)

    def first(self, row: RowDepth, others: Sequence[RowDepth], kind: str) -> int:
        """Drafts for a row's first round among others. Where these are many, depths are considered with that round."""
        rows = [*others, row]
        if not other_crowd(len(rows), self._crowd) and self._welcome([each for each in rows if each.asked is None]):
            return row.now
        return self.plan(rows, kind)[-1]

    def plan(self, rows: Sequence[RowDepth], kind: str) -> list[int]:
        """Drafts that the head is to leave for each row's next round."""
        self._clock += 1
        self.anchors = False
        self._loan.pass_round()
        same = len(rows) == len(self._rows) and all(map(is_, rows, self._rows))
        if same and self._clock < self._wake and not self._loan.runs(self._clock) and not self._other_crowd():
            return [row.now for row in rows]
        auto = [row for row in rows if row.asked is None]
        if not same:
            if len(rows) < len(self._rows):
                self._gone = self._clock
            self._rows, self._same = list(rows), False
            if self._loan.meet(len(auto), sum(row.asked == 0 for row in rows), self._sizes.padded):
                self._wake = self._clock  # whom drafts cost something has come, or is gone
        rests = self._clock < self._wake and not self._other_crowd() and self._welcome(auto)
        if not any(row.cap > 0 for row in auto):
            rests, self._planned = True, self._clock  # nothing is saved up while nobody could try
            self._loan.taken = 0.0
        if self._loan.runs(self._clock):
            return [row.now if row.asked is not None else min(self._loan.depth, row.cap) for row in rows]
        if rests:
            return [row.now for row in rows]
        scene = self._scene = Scene(rows, self.costs, kind, self._depths, self._sizes, self._loan.lent)
        depths = self._settle(scene)
        self.least = scene.least(depths)
        self._loan.taken = scene.price(depths)
        scene.annotate(depths)
        tried = self._borrow(scene, depths) or self._try(scene, depths)
        self._planned, self._crowd, self._same = self._clock, len(rows), True
        self._wake = self._clock + self._rest(scene, depths)
        if tried is None:
            return [row.now for row in rows]
        self._wake = self._clock + 2  # a trial is drafted now, verified next, known then
        trial = {id(row): depth for row, depth in zip(scene.auto, tried, strict=True)}
        return [trial.get(id(row), row.now) for row in rows]

    def _other_crowd(self) -> bool:
        """Whether the rows are so many more, or for so long so many fewer, that drafts cost something else."""
        now, before = len(self._rows), self._crowd
        return other_crowd(now, before) and (now > before or self._clock >= self._gone + VACANT)

    def _rest(self, scene: Scene, depths: Sequence[int]) -> int:
        """Rounds to the next consideration: more while the best plan stands, but to the next trial that is due."""
        if scene.abstains(depths):
            return int(max(REST, min(LONGEST_LOOK, self._loan.wait)))
        if self._clock < self._young:
            return 2 if self._drag or self._changed == self._clock else max(2, self._clock - self._born)
        usual = REST + (1 if scene.padded else 2) * (scene.rows // REST)
        if scene.padded or self._changed == self._clock:
            return usual
        # While nobody drafts nothing new is learnt, but by trials.
        learns = any(depths) or scene.rows < FEW
        longest = max(IDLE, REST + IDLE * (scene.rows // REST)) if learns else LONGEST_LOOK
        if self._drag:
            longest = min(longest, int((DRAG - self._drag) / max(self._lags, BUDGET)))
        due = [max(row.probe.due, self._solvent) for row, depth in zip(scene.auto, depths, strict=True) if not depth]
        return max(usual, min(longest, *(when - self._clock for when in (self._look, *due))))

    def _settle(self, scene: Scene) -> list[int]:
        """The standing depths, until what they lose against the best has added up."""
        scene.rate, depths = scene.search(scene.reach, scene.table)
        # Among many, one more or less changes little; unless rounds are padded, and it makes another shape.
        if not self._same and (scene.padded or scene.rows < FEW):
            self._born, self._young = self._clock, self._clock + YOUNG // scene.rows
        if self._welcome(scene.auto):
            standing = [row.now for row in scene.auto]
            gain = scene.rate * scene.cost(standing) / scene.gives(standing) - 1.0
            self._lags = gain - DEAD_ZONE
            self._drag = max(0.0, self._drag + self._lags * (self._clock - self._planned))
            patience = DRAG + scene.waking(standing, depths) / scene.cost(standing)
            if scene.price(standing) <= scene.lent and self._drag < patience:
                return standing
        self._drag, self._wait = 0.0, FIRST_WAIT
        self._look = min(self._look, self._clock + FIRST_WAIT)
        self._changed = self._clock
        self._credit += TOLL if self._looked else 0.0  # what a look has found pays for the next
        for row, depth in zip(scene.auto, depths, strict=True):
            if depth or row.depth is None:
                row.probe.rest(self._clock)
            elif row.depth:
                row.probe.due = self._clock + row.probe.wait
            row.depth = depth
        return depths

    def _welcome(self, rows: Sequence[RowDepth]) -> bool:
        """New rows begin as most of the others stand; whether there are others."""
        standing = [row.depth for row in rows if row.depth is not None]
        for row in rows if standing else ():
            if row.depth is None:
                row.depth = mode(standing)
                row.probe.rest(self._clock)
        return bool(standing)

    def _borrow(self, scene: Scene, depths: Sequence[int]) -> list[int] | None:
        """Depths for some rounds that rows which never draft can bear, where nobody drafts for their sake."""
        if not scene.abstains(depths) or any(row.probe.launched for row in scene.auto):
            return None
        yields, depth, price = scene.bargain()
        if yields >= ENOUGH:
            waking = scene.waking(depths, [depth] * len(depths)) / scene.cost(depths)
            paid = self._loan.spend(self._clock, depth, price, waking)
        else:
            paid = self._loan.look(self._clock)
        return [min(self._loan.depth, row.cap) for row in scene.auto] if paid else None

    # --- trying --------------------------------------------------------------------------------------------------

    def _try(self, scene: Scene, depths: list[int]) -> list[int] | None:
        """Depths for one round that tell more than the chosen ones; None: nothing is to be tried."""
        self._credit = max(self._credit, min(CREDIT, self._credit + BUDGET * (self._clock - self._planned)))
        cost, parked = scene.cost(depths), depths.count(0)
        needed = scene.rate * scene.more(depths, parked) / parked if parked else 1.0
        hoped = 2.0 / (1.0 + needed) - 1.0  # is gained if all drafts are kept
        turned = self._conclude(scene, depths, hoped)
        if any(row.probe.launched for row in scene.auto):
            return None
        if self._anchor(scene, depths, cost):
            return [0] * len(depths)
        if scene.abstains(depths):
            return None  # what is lent tells enough
        idle = [row for row, depth in zip(scene.auto, depths, strict=True) if not depth]
        due = [row for row in idle if turned or row.probe.due <= self._clock] if hoped > WORTH else []
        if self._look <= self._clock and not (due and self._looked):
            return self._look_around(scene, depths, cost)
        # Rows that draft together share the steps: what one has found is tried by all, and gone on with together.
        due.sort(key=lambda row: (not row.probe.tried, row.probe.due))
        alive = len(due) if turned else sum(row.probe.tried > 0 for row in due)
        for count in (alive, len(due) if scene.padded else 1) if due else ():
            trial = [1 if row in due[:count] else depth for row, depth in zip(scene.auto, depths, strict=True)]
            price = self._price(scene, depths, trial, hoped)
            self._solvent = self._clock + int((price - self._credit) / BUDGET)
            if count and self._credit >= (price - DEBT if alive else price):
                self._credit -= price
                self._looked = False
                for row in due[:count]:
                    row.probe.launch(self._clock, needed, row.reach(HEAD, 1)[0])
                return trial
        if due:
            self._look = max(self._look, self._solvent)  # whose turn it is not before
        elif hoped <= WORTH:
            self._solvent = self._clock + LONGEST_LOOK
        return None

    def _price(self, scene: Scene, depths: Sequence[int], trial: Sequence[int], hoped: float) -> float:
        """Rounds that a probe is charged with: what it takes, and the more the less can come of it."""
        takes = scene.more(depths, sum(trial) - sum(depths)) + scene.waking(depths, trial)
        return takes / scene.cost(depths) * FULL_HOPE / min(max(hoped, WORTH), MOST_HOPE)

    def _anchor(self, scene: Scene, depths: Sequence[int], cost: float) -> bool:
        """Whether a round without any drafts is due and can be paid: what others cost is judged by it, and a machine
        that was slow or fast when it was last seen would keep drafts, or keep them away, for good."""
        if scene.padded:  # such rounds are captured: their costs hardly change, and every new shape is dear
            return False
        plain, knot = [0] * len(depths), scene.verify.knot(scene.size)
        seen = knot.weight if knot else 0.0
        unseen = seen < STRETCH
        wait = SOON if unseen else max(FIRST_WAIT, int(ANCHOR_WAIT * seen))
        if self._clock < max(self._anchored + wait, 0 if unseen else self._changed + FIRST_ANCHOR):
            return False
        lost = max(0.0, scene.cost(plain) - scene.gives(plain) / scene.rate)
        price = lost / cost
        if price > self._credit or (lost > FAR * scene.cost(plain) and not unseen):
            return False
        self._credit -= price
        self._anchored, self.anchors = self._clock, True
        return True

    def _conclude(self, scene: Scene, depths: Sequence[int], hoped: float) -> bool:
        """Take the outcome of probes; whether one tells that content has turned for the better."""
        launched = [row for row in scene.auto if row.probe.launched]
        if not launched:
            return False
        alone = [place for place, depth in enumerate(depths) if not depth]
        trials = [[1 if place == one else depth for place, depth in enumerate(depths)] for one in alone]
        longest = sum(self._price(scene, depths, trial, hoped) for trial in trials) / BUDGET
        turned = False
        for row in launched:
            kept = row.probe.conclude(self._clock, longest)
            gained = kept / (scene.rate * scene.cost(depths))
            self._credit += 0.0 if scene.bystanders else gained  # who gain nothing by it
            if row.probe.surprised:
                row.acceptance.begin(HEAD, row.probe.tried, row.probe.kept)
                turned = True
        return turned

    def _look_around(self, scene: Scene, depths: list[int], cost: float) -> list[int] | None:
        """Depths whose cost or outcome is little known, and which would be best if it were good."""
        found, toll = [], TOLL if any(depths) else 0.0  # while nobody drafts nothing else tells anything
        for rate, other in scene.hopes():
            lost = max(0.0, scene.cost(other) - scene.gives(other) / scene.rate)
            price = (lost + scene.waking(depths, other)) / cost + toll
            if other != depths and rate > scene.rate * (1.0 + WORTH) and price <= max(CREDIT, self._credit):
                found.append(((rate / scene.rate - 1.0) / (price + WORTH), price, other))
        if not found:
            self._wait = min(2 * self._wait, LONGEST_LOOK)
            self._look = self._clock + self._wait
            return None
        affordable = [one for one in found if one[1] <= self._credit]
        if not affordable:
            soon = FIRST_WAIT if scene.padded else int((min(one[1] for one in found) - self._credit) / BUDGET)
            self._look = self._clock + max(FIRST_WAIT, min(soon, LONGEST_LOOK))
            return None
        _, price, other = max(affordable)
        self._credit -= price
        self._look, self._looked = self._clock + 2, True
        return other

    # --- windows -------------------------------------------------------------------------------------------------

    def best_of(self, kind: str, rows: int, sizes: Sequence[int], gained: Sequence[float]) -> int:
        """Which of some rounds is clearly better than the first, by the tokens each is run with and what its rows gain,
        all together, in rounds as theirs usually are; beside such as never draft, of those that what they lend pays.

        A row whose round gives more than usual is repaid by others that do: what counts is how fast rows are in the
        long run, so each further token is worth as much as the ones before it.
        """
        curves = self.costs.of(kind)
        if not curves.verify.known:
            return max(range(len(sizes)), key=gained.__getitem__)
        table = curves.verify_of(self._sizes.rows(rows)).table(max(sizes))
        usual = max(self._round_s, self._rest_s + table[sizes[0]])
        costs = [(table[size] - table[sizes[0]]) / usual for size in sizes]
        gains = [gain / rows for gain in gained]
        paid = [one for one, cost in enumerate(costs) if cost <= self._loan.purse]
        best = max(paid, key=lambda one: gains[one] - costs[one])
        return best if gains[best] > UNSURE * costs[best] + SHALLOW and self._loan.pay(costs[best]) else 0

    def worth_waiting(self, kind: str, rows: int, sizes: tuple[int, int], logs: float) -> bool:
        """Whether a round is better that begins when the text is known: by the tokens it is run with if it does not
        wait and if it does, and the log of what its rows then give more."""
        curves = self.costs.of(kind)
        verify = curves.verify_of(self._sizes.rows(rows))
        soon, late = (self._rest_s + verify.value(size) for size in sizes)
        return not curves.wait or exp(logs / rows) * soon > (late + curves.wait) * (1.0 + SHALLOW)

    def record(self, kind: str, rows: int, tokens: int, steps: Sequence[int], bare: bool) -> None:
        """Take the rows and tokens that a round was run with, its draft steps, and whether it had nothing to verify."""
        curves = self.costs.of(kind)
        if bare:
            self._anchored = self._clock
        gain = ROUND_GAIN if self._round_s else 1.0
        takes = curves.host(bare) + curves.draft(steps)
        self._rest_s += gain * (takes - self._rest_s)
        self._round_s += gain * (takes + curves.verify_of(rows).value(tokens) - self._round_s)

    def explain(self, kind: str = "plain") -> dict[str, Any]:
        """What is known and chosen now, for people: costs in plain steps of one row."""
        plain = self.costs.verify(kind, 1)
        return {
            "plain_step_s": plain,
            "verify": {size: self.costs.verify(kind, size) / plain for size in self.costs.of(kind).verify.sizes},
            "draft_step": self.costs.draft(kind, [1]) / plain,
            "tokens_a_step": self._scene.rate * self.costs.of(kind).verify.value(1) if self._scene else None,
            "depths": [row.now for row in self._rows],
            "why": [row.why for row in self._rows],
        }
