"""Passes whose kernel calls are kept, so that the next one like it is a single call.

On a small model the Python between kernels would take as long as some of them. Batches come in many sizes, but what the
calls are given follows from the sizes in a straight line: from a few passes that were recorded, those of other sizes
are known, once a recording has been foretold by others to the last bit.
"""

import contextlib
import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headlong.backends.torch.native.arena import MOST_BYTES, Arena, filling
from headlong.backends.torch.native.library import Calls, Kernels, library, recorded
from headlong.backends.torch.ragged import Layout

MOST_TAPES = 512
WORTH_IT = 6  # calls of a shape that does not follow from others; recording one costs as much as ten replays save

Pass = Callable[..., tuple[Tensor, ...]]
Key = tuple[torch.Size, ...]


class Taped:
    """A function of a layout and tensors. Called again with such shapes, it repeats its kernels on the same memory.

    What it returns is overwritten by the next call. It runs once in a call, recorded or not, and may end early. It may
    make fresh tensors, view them and call kernels; if it does anything else, or there are no kernels, every call is an
    ordinary one. Where there are kernels, it must not depend on the layout's rows and widths but through tensors, nor
    on sizes but by which of them are equal or one, and what else it does must follow from which kernels it calls: only
    the first pass through each row of kernels is watched, which takes several times as long.
    """

    def __init__(self, function: Pass, beside: "Taped | None" = None) -> None:
        """`beside`: another whose memory it shares; a call of either overwrites what the other returned."""
        self.function = function
        self.tapes: dict[Key, Tape | None] = {}
        self.families: dict[tuple[int, ...], Family] = defaultdict(Family)
        self.calls: dict[Key, int] = {}  # of shapes without a tape
        self.watched: list[list[tuple[int, int]]] = []  # the kernels of passes that do nothing else
        self.plays = False  # some shape is repeated so
        self.once_s = 0.0  # of the last call: what others of its shape will not take; infinite if that is not known
        # Apart: what a pass is given may be what the one before it returned.
        self.given: Arena = beside.given if beside else Arena()
        self.work: Arena = beside.work if beside else Arena()

    def __call__(self, layout: Layout, *tensors: Tensor) -> tuple[Tensor, ...]:
        lib = library() if tensors[0].is_cpu else None
        if lib is None:
            return self.function(layout, *tensors)
        key = tuple(tensor.shape for tensor in tensors)
        if key not in self.tapes:
            return self._first(key, lib, layout, tensors)
        self.once_s = 0.0
        tape = self.tapes[key] = self.tapes.pop(key)  # the newest last
        return self.function(layout, *tensors) if tape is None else tape.play(tensors)

    def _first(self, key: Key, lib: Kernels, layout: Layout, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """A shape without a tape: it follows from others', or is recorded, if it comes often or others may follow."""
        started = perf_counter()
        sizes = [size for shape in key for size in shape]
        family = self.families[_alike(sizes)]
        notes = family.foretell(sizes)
        if notes and notes.fits:
            tape = Tape(lib, notes, (self.given.slab, self.work.slab))
            self._keep(key, tape)
            self.once_s = perf_counter() - started
            return tape.play(tensors)
        calls = self.calls[key] = self.calls.get(key, 0) + 1
        if family.broken and calls < WORTH_IT:
            self.once_s = math.inf if calls == 1 else 0.0  # the memory is new
            return self.function(layout, *tensors)
        self.once_s = math.inf
        watch = family.broken or family.strange or not self.watched
        outputs, notes = self._record(layout, tensors, watch)
        if notes and notes.kernels not in self.watched:
            if not watch:
                family.strange = True
                return outputs
            self.watched.append(notes.kernels)
        family.strange = False
        del self.calls[key]
        family.learn(sizes, notes)
        self._keep(key, Tape(lib, notes, (self.given.slab, self.work.slab)) if notes and notes.fits else None)
        return outputs

    def _record(
        self, layout: Layout, tensors: tuple[Tensor, ...], watch: bool
    ) -> "tuple[tuple[Tensor, ...], Notes | None]":
        """Make a pass and take notes; none, if more than kernels were called."""
        self.given.used = self.work.used = 0
        inputs = [self.given.empty(tensor.shape, tensor.dtype).copy_(tensor) for tensor in tensors]
        watcher = _Watch()
        with filling(self.work), recorded() as calls, watcher if watch else contextlib.nullcontext():
            outputs = self.function(layout, *inputs)
        arenas = self.given, self.work
        places = [place for tensor in (*inputs, *outputs) if (place := Place.of(tensor, arenas))]
        if not calls or not watcher.only_kernels or len(places) < len(inputs) + len(outputs):
            return outputs, None
        return outputs, Notes.of(calls, places, len(inputs), [arena.used for arena in arenas])

    def _keep(self, key: Key, tape: "Tape | None") -> None:
        while len(self.tapes) >= MOST_TAPES:
            del self.tapes[next(iter(self.tapes))]  # used longest ago
        self.tapes[key] = tape
        self.plays = self.plays or tape is not None


def _alike(sizes: Sequence[int]) -> tuple[int, ...]:
    """The same for sizes of which the same ones are equal, and the same ones are 1."""
    return tuple(-1 if size == 1 else sizes.index(size) for size in sizes)


@dataclass(frozen=True)
class Place:
    """A tensor in one of the arenas."""

    arena: int
    dtype: torch.dtype
    numbers: list[int]  # its first element, its shape, its strides

    @staticmethod
    def of(tensor: Tensor, arenas: Sequence[Arena]) -> "Place | None":
        for number, arena in enumerate(arenas):
            first = tensor.data_ptr() - arena.first
            if 0 <= first < MOST_BYTES:
                numbers = [first // tensor.dtype.itemsize, *tensor.shape, *tensor.stride()]
                return Place(number, tensor.dtype, numbers)
        return None

    def tensor(self, slabs: Sequence[Tensor], numbers: list[int]) -> Tensor:
        first, dims = numbers[0], len(numbers) // 2
        return slabs[self.arena].view(self.dtype).as_strided(numbers[1 : 1 + dims], numbers[1 + dims :], first)


@dataclass(frozen=True)
class Notes:
    """A pass as numbers: its calls' arguments, where the tensors stand that it is given and gives, what it uses."""

    kernels: list[tuple[int, int]]  # by call: the kernel's address, and the words of its arguments
    places: list[Place]
    inputs: int  # of the places, the first ones
    numbers: Tensor  # [words of all arguments + numbers of all places + bytes of both arenas]

    @staticmethod
    def of(calls: Calls, places: list[Place], inputs: int, used: list[int]) -> "Notes":
        kernels = [(address, ctypes.sizeof(arguments) // 8) for address, arguments in calls]
        words = torch.frombuffer(bytearray(b"".join(bytes(each) for _, each in calls)), dtype=torch.int64)
        rest = [number for place in places for number in place.numbers] + used
        return Notes(kernels, places, inputs, torch.cat([words, torch.tensor(rest)]))

    @property
    def fits(self) -> bool:
        return int(self.numbers[-2:].max()) <= MOST_BYTES

    @property
    def words(self) -> int:
        return sum(count for _, count in self.kernels)

    def like(self, other: "Notes") -> bool:
        """Whether they differ in numbers alone."""
        mine, theirs = ([(place.arena, place.dtype) for place in notes.places] for notes in (self, other))
        return self.kernels == other.kernels and mine == theirs and self.numbers.shape == other.numbers.shape


@dataclass
class Family:
    """Passes of sizes that are alike, all of whose numbers follow from the sizes in a straight line; or not."""

    known: list[tuple[list[int], Notes]] = field(default_factory=list)  # recorded; none follows from the others
    trusted: bool = False  # a recording was foretold by them
    broken: bool = False  # one was not
    strange: bool = False  # its last recording called other kernels than passes that were watched

    def learn(self, sizes: list[int], notes: Notes | None) -> None:
        """Take a recording: it tells of sizes that did not follow from others, or whether they do."""
        if self.broken:
            return
        if notes is None or not all(notes.like(other) for _, other in self.known):
            self.broken = True
        elif (foretold := self._follow(sizes)) is None:
            self.known.append((sizes, notes))
            self.trusted = False
            vars(self).pop("_mixture", None)
        else:
            self.trusted = torch.equal(foretold, notes.numbers)
            self.broken = not self.trusted

    def foretell(self, sizes: list[int]) -> Notes | None:
        """What a recording would give; None where that does not follow."""
        numbers = self._follow(sizes) if self.trusted and not self.broken else None
        return None if numbers is None else replace(self.known[0][1], numbers=numbers)

    def _follow(self, sizes: list[int]) -> Tensor | None:
        """The numbers of these sizes, if they are a mixture of known ones."""
        if not self.known:
            return None
        first, across, inverse, rises = self._mixture
        target = torch.tensor(sizes, dtype=torch.float64) - first
        shares = inverse @ target
        if (across @ shares - target).abs().max() > 1e-6:
            return None
        return self.known[0][1].numbers + (shares @ rises).round().long()

    @cached_property
    def _mixture(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The first known sizes [S]; how the others differ from them, [S, K - 1], the inverse of that, and by how much
        their numbers do, [K - 1, numbers]."""
        points = torch.tensor([each for each, _ in self.known], dtype=torch.float64)
        values = torch.stack([notes.numbers for _, notes in self.known])
        across = (points[1:] - points[0]).T
        return points[0], across, torch.linalg.pinv(across), (values[1:] - values[0]).double()


class Tape:
    """A pass that can be played: kernel calls on memory of the arenas."""

    def __init__(self, lib: Kernels, notes: Notes, slabs: tuple[Tensor, Tensor]) -> None:
        self.lib, self.count = lib, len(notes.kernels)
        self.arguments = notes.numbers[: notes.words].clone()
        addresses, at = [], self.arguments.data_ptr()
        for kernel, words in notes.kernels:
            addresses += [kernel, at]
            at += 8 * words
        self.calls = (ctypes.c_void_p * len(addresses))(*addresses)
        rest, tensors = notes.numbers[notes.words :].tolist(), []
        for place in notes.places:
            numbers, rest = rest[: len(place.numbers)], rest[len(place.numbers) :]
            tensors.append(place.tensor(slabs, numbers))
        self.inputs, self.outputs = tensors[: notes.inputs], tuple(tensors[notes.inputs :])

    def play(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, given in zip(self.inputs, tensors, strict=True):
            mine.copy_(given)
        self.lib.replay(ctypes.addressof(self.calls), self.count)
        return self.outputs


class _Watch(TorchFunctionMode):
    """Notices every operation that a tape would not repeat.

    It looks at calls from Python: a mode below those would see more, but importing it takes longer than a load.
    """

    VIEWS = frozenset(("view", "flatten", "unflatten", "split", "__getitem__", "contiguous", "float", "to", "__get__"))
    QUESTIONS = frozenset(("data_ptr", "stride", "numel", "__len__"))

    def __init__(self) -> None:
        super().__init__()
        self.only_kernels = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        out = func(*args, **(kwargs or {}))
        if not (name in self.QUESTIONS or (name in self.VIEWS and _is_part(out, args[0]))):
            self.only_kernels = False
        return out


def _is_part(found: Any, whole: Tensor) -> bool:
    """Whether all tensors in it are the same memory as another; what is no tensor is no memory at all."""
    if isinstance(found, Tensor):
        return found.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    return all(_is_part(part, whole) for part in found) if isinstance(found, tuple | list) else True
