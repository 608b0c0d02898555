"""Passes whose kernel calls are kept, so that the next one like it is a single call.

On a small model the Python between kernels would take as long as some of them.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headlong.backends.torch.native.library import Calls, Kernels, library, recorded

MOST_BYTES = 1 << 26  # of the tensors of all tapes; a pass with more is long, and its Python a small part of it
MOST_TAPES = 256

Pass = Callable[..., tuple[Tensor, ...]]


class Taped:
    """A function of rows and tensors. Called again with the same shapes, it repeats its kernels on the same memory.

    What it returns is overwritten by the next call. It may make tensors, view them and call kernels; if it does
    anything else, or there are no kernels, every call is an ordinary one. It must not depend on the rows' numbers but
    through tensors.
    """

    def __init__(self, function: Pass) -> None:
        self.function = function
        self.tapes: dict[tuple[torch.Size, ...], Tape | None] = {}

    def __call__(self, rows: list[int], *tensors: Tensor) -> tuple[Tensor, ...]:
        lib = library() if tensors[0].is_cpu else None
        if lib is None:
            return self.function(rows, *tensors)
        key = tuple(tensor.shape for tensor in tensors)
        if key not in self.tapes:
            return self._record(key, lib, rows, tensors)
        tape = self.tapes[key] = self.tapes.pop(key)  # the newest last
        return self.function(rows, *tensors) if tape is None else tape.play(tensors)

    def _record(
        self, key: tuple[torch.Size, ...], lib: Kernels, rows: list[int], tensors: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        inputs = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        with recorded() as calls, _Watch() as watch:
            outputs = self.function(rows, *inputs)
        tape = Tape(lib, calls, inputs, outputs, watch.made)
        keep = watch.only_kernels and tape.nbytes <= MOST_BYTES
        self._make_room(tape.nbytes if keep else 0)
        self.tapes[key] = tape if keep else None
        return outputs

    def _make_room(self, nbytes: int) -> None:
        """Let go of what was used longest ago."""
        held = sum(tape.nbytes for tape in self.tapes.values() if tape)
        while self.tapes and (held + nbytes > MOST_BYTES or len(self.tapes) >= MOST_TAPES):
            oldest = self.tapes.pop(next(iter(self.tapes)))
            held -= oldest.nbytes if oldest else 0


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
    """Keeps the tensors that are made, and notices every operation that a tape would not repeat.

    It looks at calls from Python: a mode below those would see more, but importing it takes longer than a load.
    """

    MAKERS = frozenset(("empty", "new_empty", "empty_like"))
    VIEWS = frozenset(("view", "flatten", "unflatten", "split", "__getitem__", "contiguous", "float", "__get__"))
    QUESTIONS = frozenset(("data_ptr", "stride", "numel", "__len__"))

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []
        self.only_kernels = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, name = func(*args, **(kwargs or {})), func.__name__
        if name in self.MAKERS:
            self.made.append(out)
        elif not (name in self.QUESTIONS or (name in self.VIEWS and _is_part(out, args[0]))):
            self.only_kernels = False
        return out


def _is_part(found: Any, whole: Tensor) -> bool:
    """Whether all tensors in it are the same memory as another; what is no tensor is no memory at all."""
    if isinstance(found, Tensor):
        return found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return all(_is_part(part, whole) for part in found) if isinstance(found, tuple | list) else True
