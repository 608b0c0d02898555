"""Time that rows which never draft lend to those that would: drafts now and then, where all the time costs too much."""

from math import inf

# Share of one row's time that they lend, all together, to each row that may draft. In padded rounds a draft costs a
# tenth of what it does elsewhere, and whoever drafts is twice as fast.
LENT, LENT_PADDED = 0.025, 0.25
MOST_LENT = 1 / 3  # of their own time, however many others there are
ENOUGH = 1.5  # times what it costs in rounds, that it must give in tokens
LONGEST = 8  # rounds with drafts in a row: the head wakes once for all of them
DEAREST = 3.0  # rounds that they may cost together
MOST = 6.0  # rounds that are saved up; if nothing was worth them till then, they are spent on a look


class Loan:
    """What was lent and not spent, and how long drafts are still to be made with it. In rounds without drafts."""

    def __init__(self) -> None:
        self.lent = inf  # in each round; nobody asks for anything back while there are no such rows
        self.taken = 0.0  # of it, by the plan that stands
        self._saved = 0.0
        self._missing = 0.0  # for what was refused last
        self._until = 0  # the last round that drafts are made in
        self.depth = 0  # of these rounds

    def meet(self, drafting: int, bystanders: int, padded: bool) -> bool:
        """Rows that may draft, and such as never do; whether there were none of these before, or are none now."""
        before = self.lent
        if bystanders:
            self.lent = min(MOST_LENT, (LENT_PADDED if padded else LENT) * drafting / bystanders)
        else:
            self.lent = inf
        changed = (before == inf) != (self.lent == inf)
        if changed:
            self.taken = self._saved = 0.0
            self._until = 0
        return changed

    def pass_round(self) -> None:
        self._saved = min(max(0.0, self._saved + self.lent - self.taken), MOST)

    def pay(self, price: float) -> bool:
        """For what takes so many rounds; whether there was enough."""
        self._missing = max(0.0, price - self.purse)
        if self._missing:
            return False
        self._saved -= price
        return True

    @property
    def purse(self) -> float:
        """What may be spent in one round."""
        return inf if self.lent == inf else self._saved

    @property
    def wait(self) -> float:
        """Rounds until what was refused last can be paid."""
        return self._missing / self.lent if self.lent else inf

    def runs(self, now: int) -> bool:
        return now <= self._until

    def spend(self, now: int, depth: int, price: float, waking: float) -> bool:
        """Draft so deep from now on, for as long as can be paid, if it can: every round costs others `price` rounds,
        and the first one `waking` besides."""
        rounds = max(1, min(LONGEST, int(DEAREST / price)))
        whole = rounds * price + waking
        return self._draft(depth, now + rounds - 1, whole) if whole <= MOST else self.look(now)

    def look(self, now: int) -> bool:
        """Draft once, though it seems not to be worth it, if nothing was for long: what is believed may be wrong."""
        return self._draft(1, now, MOST)

    def _draft(self, depth: int, until: int, price: float) -> bool:
        paid = self.pay(price)
        if paid:
            self.depth, self._until = depth, until
        return paid
