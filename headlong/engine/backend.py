"""The seam between requests and tensors: a backend runs prefill chunks and rounds for numbered rows."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headlong.engine.request import Chunk, Limits, RoundResult, RowPlan, Saved, Start
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.checkpoint.checkpoint import Checkpoint


class Handle(Protocol):
    """A round under way. The device may still be working; `result` waits for it."""

    def result(self) -> RoundResult: ...


class Backend(Protocol):
    """Everything the engine knows of a device. Rows are numbered 0 .. limits.rows - 1, pages likewise.

    A row lives through start, prefill (its prompt but the last token, chunk by chunk), rounds, release. The last
    prompt token is the first round's window, so sampling happens in rounds alone.

    Rounds of other rows may come between the pieces of a chunk; the row itself does nothing but go on or be released.
    """

    @property
    def limits(self) -> Limits: ...

    def start(self, start: Start) -> None:
        """Take a row for a prompt, of which a cached beginning may be in already."""

    def fork(self, row: int, start: Start, pages: Sequence[int]) -> None:
        """Take another row for the prompt of this one, which is in, before its first round. `start.pages`, the
        full ones, are both's; what is in the last one is copied into `pages`."""

    def prefill(self, chunk: Chunk, pieces: int = 1) -> bool:
        """Run one chunk of a prompt, or the next of so many pieces of it, in whole layers; whether that was the last.
        With 1 all that is left is run. No more than `limits.pieces` are asked for."""

    def round(self, plan: Sequence[RowPlan]) -> Handle:
        """Verify, accept, draft: one pass of the target over every planned row's window. Of the drafts that a row is to
        leave there may be fewer, if its plan names the least chance they must have."""

    def save(self, row: int) -> Saved:
        """What a row that has had no round yet remembers beside its pages; rows may start from it."""

    def set_aside(self, row: int) -> Saved:
        """All of a row, its pages' contents included; the row is free then."""

    def bring_back(self, row: int, saved: Saved, pages: Sequence[int]) -> None:
        """A row as it was when it was set aside, in other pages."""

    def release(self, row: int) -> None:
        """Forget a row, started or not. Its pages belong to the engine again."""


def open_backend(checkpoint: "Checkpoint", settings: Settings) -> Backend:
    """The backend for this machine, with the checkpoint's weights loaded."""
    from headlong.backends.torch.backend import TorchBackend

    return TorchBackend(checkpoint, settings)


def examine_machine(settings: Settings) -> dict[str, Any]:
    """What the machine has and which path every operation takes on it."""
    from headlong.backends.torch.check import examine

    return examine(settings)
