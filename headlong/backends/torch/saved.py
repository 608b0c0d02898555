"""What is kept of a row beside the row itself: a prompt's settled state, and a whole row set aside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from headlong.engine.request import Start


@dataclass(frozen=True)
class Settled:
    """The recurrent layers' memory after some full chunks of a prompt. Nothing waits to be folded in."""

    states: Sequence[Tensor]
    inputs: Sequence[Tensor]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.states, *self.inputs))


@dataclass(frozen=True)
class Aside:
    """A row in the middle of its text: copies of all it has, and what the host knew of it."""

    start: Start
    tensors: Mapping[str, Tensor]
    pages: Sequence[tuple[Tensor, Tensor]]  # keys and values of each layer
    width: int  # of its last window
    late: int  # pairs that its head has not been fed, at most
    left: int

    @property
    def nbytes(self) -> int:
        paged = (tensor for layer in self.pages for tensor in layer)
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *paged))
