"""Work that a GPU does by itself: captured graphs, and copies that nobody waits for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import builds, places


class Replay(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class Fetched:
    """A copy on the host, once the device has passed the event."""

    copy: Tensor
    done: torch.cuda.Event

    def values(self) -> list[list[int]]:
        self.done.synchronize()
        found: list[list[int]] = self.copy.tolist()
        return found


class Stream:
    """The current stream of a GPU."""

    @cached_property
    def _pool(self) -> Any:
        """Memory that all graphs share: one runs at a time."""
        return torch.cuda.graph_pool_handle()

    def record(self, parts: Sequence[Callable[[], None]]) -> list[Replay]:
        """Graphs of these parts, none of which may touch the host. They run once beforehand."""

        def run() -> None:
            for part in parts:
                part()

        builds().run_built(run)
        torch.cuda.synchronize()
        graphs: list[Replay] = []
        for part in parts:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                part()
            graphs.append(graph)
        return graphs

    def stamp(self, to: Tensor) -> None:
        """Write the device's time in nanoseconds, when it gets there, to a tensor of one."""
        places().stamp(to)

    def send(self, to: Tensor, values: Sequence[Sequence[int]]) -> None:
        to.copy_(torch.tensor(values).pin_memory(), non_blocking=True)

    def fetch(self, tensor: Tensor) -> Fetched:
        """Into memory of its own: the next round may begin before this one's figures are read."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return Fetched(copy, done)
