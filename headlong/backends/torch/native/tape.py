"""Passes whose kernel calls are kept, so that the next one like it is a single call.

On a small model the Python between kernels would take as long as some of them.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headlong.backends.torch.native.library import Calls, Kernels, library, recorded
from headlong.backends.torch.ragged import Layout

MOST_BYTES = 1 << 27  # of one pass; one with more is long, and its Python a small part of it
MOST_TAPES = 512
WORTH_IT = 6  # calls of a shape; recording one costs as much as ten replays save

Pass = Callable[..., tuple[Tensor, ...]]


class Taped:
    """A function of a layout and tensors. Called often with the same shapes, it repeats its kernels on the same memory.

    What it returns is overwritten by the next call. It may make tensors, view them and call kernels; if it does
    anything else, or there are no kernels, every call is an ordinary one. Where there are kernels, it must not depend
    on the layout's rows and widths but through tensors.
    """

    def __init__(self, function: Pass) -> None:
        self.function = function
        self.tapes: dict[tuple[torch.Size, ...], Tape | None] = {}
        self.calls: dict[tuple[torch.Size, ...], int] = {}  # of shapes without a tape
        self.cold = False  # whether the last call took longer than others of its shape will
        self.given, self.work = Arena(), Arena()  # apart: what a pass is given may be what the one before it returned

    def __call__(self, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        lib = library() if tensors[0].is_cpu else None
        if lib is None:
            return self.function(layout, *tensors)
        key = tuple(tensor.shape for tensor in tensors)
        self.cold = False
        if key not in self.tapes:
            self.calls[key] = self.calls.get(key, 0) + 1
            self.cold = self.calls[key] in (1, WORTH_IT)  # the memory is new, or it is recorded
            if self.calls[key] < WORTH_IT:
                return self.function(layout, *tensors)
            return self._record(key, lib, layout, tensors)
        tape = self.tapes[key] = self.tapes.pop(key)  # the newest last
        return self.function(layout, *tensors) if tape is None else tape.play(tensors)

    def _record(
        self, key: tuple[torch.Size, ...], lib: Kernels, layout: Layout, tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        self.given.used = self.work.used = 0
        inputs = [self.given.empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
        with recorded() as calls, _Watch(self.work) as watch:
            outputs = self.function(layout, *inputs)
        del self.calls[key]
        tape = Tape(lib, calls, inputs, outputs, watch.made)
        while len(self.tapes) >= MOST_TAPES:
            del self.tapes[next(iter(self.tapes))]  # used longest ago
        self.tapes[key] = tape if watch.only_kernels and tape.nbytes <= MOST_BYTES else None
        return outputs


class Arena:
    """Memory that all tapes of a function share, since one plays at a time; a pass takes it from the front."""

    def __init__(self) -> None:
        self.slab = torch.empty(0, dtype=torch.uint8)
        self.used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nbytes = math.prod(shape) * dtype.itemsize
        if self.used + nbytes > len(self.slab):  # tapes that have the old slab keep it
            self.slab, self.used = torch.empty(max(2 * len(self.slab), nbytes, 1 << 20), dtype=torch.uint8), 0
        first, self.used = self.used, self.used + -(-nbytes // 64) * 64
        return self.slab[first : first + nbytes].view(dtype).view(shape)


class Tape:
    """Kernel calls, and all the memory they use."""

    def __init__(
        self,
        lib: Kernels,
        calls: Calls,
        inputs: list[Tensor],
        outputs: tuple[Tensor, ...],
        made: list[Tensor],
    ) -> None:
        self.lib, self.inputs, self.outputs, self.kept_alive = lib, inputs, outputs, (made, calls)
        self.nbytes = sum(tensor.nbytes for tensor in (*inputs, *made))
        words = [word for address, arguments in calls for word in (address, ctypes.addressof(arguments))]
        self.calls, self.count = (ctypes.c_void_p * len(words))(*words), len(calls)

    def play(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given)
        self.lib.replay(ctypes.addressof(self.calls), self.count)
        return self.outputs


class _Watch(TorchFunctionMode):
    """Makes the tensors that are asked for in an arena, and notices every operation that a tape would not repeat.

    It looks at calls from Python: a mode below those would see more, but importing it takes longer than a load.
    """

    MAKERS = frozenset(("empty", "new_empty", "empty_like"))
    VIEWS = frozenset(("view", "flatten", "unflatten", "split", "__getitem__", "contiguous", "float", "__get__"))
    QUESTIONS = frozenset(("data_ptr", "stride", "numel", "__len__"))

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena = arena
        self.made: list[Tensor] = []
        self.only_kernels = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if name in self.MAKERS:
            like = func(*args, **{**(kwargs or {}), "device": "meta"})
            self.made.append(self.arena.empty(like.shape, like.dtype))
            return self.made[-1]
        out = func(*args, **(kwargs or {}))
        if not (name in self.QUESTIONS or (name in self.VIEWS and _is_part(out, args[0]))):
            self.only_kernels = False
        return out


def _is_part(found: Any, whole: Tensor) -> bool:
    """Whether all tensors in it are the same memory as another; what is no tensor is no memory at all."""
    if isinstance(found, Tensor):
        return found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return all(_is_part(part, whole) for part in found) if isinstance(found, tuple | list) else True
