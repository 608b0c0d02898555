"""The pages of the K/V cache that no row holds."""

from collections.abc import Iterable

from headlong.errors import Fault


class PagePool:
    """Hands out page ids and takes them back. A page has one owner: the pool, or whoever took it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(reversed(range(count)))  # a stack: page 0 goes out first

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[int, ...]:
        if count > self.free:
            raise Fault(f"{count} pages were taken and {self.free} are free; admission promised too much.")
        return tuple(self._free.pop() for _ in range(count))

    def give(self, pages: Iterable[int]) -> None:
        self._free.extend(pages)

    def check(self) -> None:
        """Every free page is a real one and is free once."""
        if len(set(self._free)) != len(self._free) or not set(self._free) <= set(range(self.count)):
            raise Fault(f"the free pages {sorted(self._free)} of {self.count} hold a double or an unknown id.")
