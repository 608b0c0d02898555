"""The pages of the K/V cache: who holds them, and which are free."""

from collections import Counter
from collections.abc import Iterable

from headlong.errors import Fault


class PagePool:
    """Hands out page ids and counts their holders. A page is free again when its last holder gives it back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))  # a stack: page 0 goes out first
        self._holders: dict[int, int] = {}  # of the pages that are not free

    @property
    def free(self) -> int:
        return len(self._free)

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def take(self, count: int) -> tuple[int, ...]:
        """So many free pages, each held once."""
        if count > self.free:
            raise Fault(f"{count} pages were taken and {self.free} are free; admission promised too much.")
        pages = tuple(self._free.pop() for _ in range(count))
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each of these pages, which somebody holds already."""
        for page in pages:
            if page not in self._holders:
                raise Fault(f"page {page} was shared and nobody holds it.")
            self._holders[page] += 1

    def give(self, pages: Iterable[int]) -> tuple[int, ...]:
        """Take a holder from each of these pages; returns those that became free."""
        freed = []
        for page in pages:
            if page not in self._holders:
                raise Fault(f"page {page} was given back and nobody holds it.")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)
                freed.append(page)
        return tuple(freed)

    def check(self, held: Iterable[int] | None = None) -> None:
        """Every page is either free or held; with `held`, all holders' pages together, as often as they say."""
        if sorted([*self._free, *self._holders]) != list(range(self.count)):
            raise Fault(
                f"pages {sorted(self._free)} are free and {sorted(self._holders)} held; together they must be each of "
                f"{self.count} pages once."
            )
        if held is None:
            return
        claimed = Counter(held)
        wrong = sorted(page for page in {*claimed, *self._holders} if claimed[page] != self.holders(page))
        if wrong:
            told = ", ".join(f"{page} ({claimed[page]}, counted {self.holders(page)})" for page in wrong[:8])
            raise Fault(f"pages are held more or less often than counted: {told}.")
