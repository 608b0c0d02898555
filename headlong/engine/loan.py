"""Time that rows which never draft lend to those that would: drafts now and then, where all the time costs too much."""

LENT = 0.02  # share of their time that they lend
ENOUGH = 1.5  # times what it costs in rounds, that it must give in tokens
LONGEST = 8  # rounds with drafts in a row: the head wakes once for all of them
DEAREST = 3.0  # rounds that they may cost together
MOST = 6.0  # rounds that are saved up; if nothing was worth them till then, they are spent on a look


class Loan:
    """What was lent and not spent, and how long drafts are still to be made with it."""

    def __init__(self) -> None:
        self._saved = 0.0  # rounds
        self._until = 0  # the last round that drafts are made in
        self.depth = 0  # of these rounds

    def earn(self, rounds: int) -> None:
        self._saved = min(self._saved + LENT * rounds, MOST)

    def runs(self, now: int) -> bool:
        return now <= self._until

    def spend(self, now: int, depth: int, price: float, waking: float) -> bool:
        """Draft so deep from now on, for as long as can be paid, if it can: every round costs others `price` rounds,
        and the first one `waking` besides."""
        rounds = max(1, min(LONGEST, int(DEAREST / price)))
        if rounds * price + waking > self._saved:
            return False
        self._saved -= rounds * price + waking
        self.depth, self._until = depth, now + rounds - 1
        return True

    def look(self, now: int) -> bool:
        """Draft once, though it seems not to be worth it, if nothing was for long: what is believed may be wrong."""
        if self._saved < MOST:
            return False
        self.depth, self._until, self._saved = 1, now, 0.0
        return True
