"""Stop strings: text that ends a request and is not shown."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through, holding back what may be the start of a stop string; cuts where one is complete.

    The cut does not depend on how the text was split into pushes: the stop string that ends first wins.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = ""  # the one that is complete

    @property
    def complete(self) -> bool:
        return bool(self.found)

    def push(self, text: str) -> str:
        """The text that is now certain to be shown."""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, cut, self.found = min(found)
            shown, self._held = self._held[:cut], ""
            return shown
        cut = len(self._held) - self._possible_start()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        shown, self._held = self._held, ""
        return shown

    def _possible_start(self) -> int:
        """Length of the longest ending of the held text that begins a stop string."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
