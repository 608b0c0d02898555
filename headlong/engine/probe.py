"""A row's trials of one draft while it has none."""

from headlong.engine.acceptance import LEAST_VARIANCE

REST = 4  # rounds from one consideration of depths to the next; more where more rows make it dearer
FIRST_WAIT, LAST_WAIT = 16, 512  # rounds between two probes
SERIES = 8  # most probes in a row


class Probe:
    """When the next trial is due, and how the present series of them goes."""

    def __init__(self) -> None:
        self.launched = 0  # in which round; 0: none is under way
        self.outcome: int | None = None
        self.wait = FIRST_WAIT
        self.due = 0
        self.tried = self.kept = 0
        self.needed = 0.0  # share of drafts that must be kept for drafting to pay
        self.believed = 0.0  # share that was thought to be, before the series

    def rest(self, now: int) -> None:
        """The row drafts, or has just come."""
        self.wait, self.due, self.tried, self.kept = FIRST_WAIT, now + FIRST_WAIT, 0, 0

    def launch(self, now: int, needed: float, believed: float) -> None:
        self.launched, self.needed, self.outcome = now, needed, None
        if not self.tried:
            self.believed = believed

    def conclude(self, now: int, longest: float) -> int:
        """Drafts kept by the one under way, if it has come back. A series ends when it no longer pays."""
        if self.outcome is None and now - self.launched <= REST:
            return 0
        kept = self.outcome or 0
        self.launched = 0
        self.tried += self.outcome is not None  # else other drafters' drafts stood in its window
        self.kept += kept
        if self.outcome is None or self.kept < self.needed * self.tried or self.tried >= SERIES:
            self.tried = self.kept = 0
            self.wait = int(min(2 * self.wait, max(FIRST_WAIT, min(LAST_WAIT, longest))))
            self.due = now + self.wait
        return kept

    @property
    def surprised(self) -> bool:
        """Whether this series keeps far more than was believed: two standard deviations."""
        more = self.kept - self.believed * self.tried
        variance = max(self.believed * (1.0 - self.believed), LEAST_VARIANCE)
        return self.tried > 1 and more > 0.0 and more**2 > 4.0 * self.tried * variance
