"""What a backend runs a round as: windows one behind another, or padded to known sizes."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """Without buckets every row costs what it brings. With them all windows are as wide as the widest, all rows draft
    as often as the deepest, and there are as many as the next bucket has."""

    buckets: tuple[int, ...] = ()  # of rows

    @property
    def padded(self) -> bool:
        return bool(self.buckets)

    def rows(self, count: int) -> int:
        """That so many rows are run as."""
        return next((size for size in self.buckets if count <= size), count)

    def tokens(self, verify: Sequence[int]) -> int:
        """In all windows together, by the drafts that each row has."""
        if self.padded:
            return self.rows(len(verify)) * (1 + max(verify))
        return len(verify) + sum(verify)

    def growing(self, verify: Sequence[int], places: Sequence[int]) -> list[int]:
        """The same, and again after each of these places got one more draft."""
        first = self.tokens(verify)
        if not self.padded:
            return list(range(first, first + len(places) + 1))
        counts, sizes = list(verify), [first]
        for place in places:
            counts[place] += 1
            sizes.append(max(sizes[-1], self.rows(len(verify)) * (1 + counts[place])))
        return sizes

    def steps(self, draft: Sequence[int]) -> list[int]:
        """Rows in each of the head's steps, by the drafts that each row is to have next."""
        depth = max(draft)
        if self.padded:
            return [self.rows(len(draft))] * depth
        return [sum(each > step for each in draft) for step in range(depth)]


RAGGED = Sizes()
