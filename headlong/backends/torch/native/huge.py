"""Memory for weights in huge pages: every round reads it from end to end, and small pages cost it time in look-ups."""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref

import torch
from torch import Tensor

SLAB = 1 << 26
LINE = 64
LITTER = 1 << 22  # bytes handed out after which the C library is asked for what it holds

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None

_lock = threading.Lock()  # models may be loaded in several threads
_slab: "weakref.ref[mmap.mmap] | None" = None
_used = _since = 0  # bytes: of the slab, and handed out since the C library was asked


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A CPU tensor side by side with others in few large mappings, whose pages the system may join."""
    global _slab, _used, _since
    count = torch.Size(shape).numel()
    size = -(-count * dtype.itemsize // LINE) * LINE
    with _lock:
        _since += size
        if _since >= LITTER and _trim:
            _since = 0
            _trim(0)  # what was read and copied before would else stay with the C library, up to 64 MB of it
        slab = _slab() if _slab else None
        if slab is None or _used + size > len(slab):
            slab, _used = _map(max(size, SLAB)), 0
            _slab = weakref.ref(slab)
        tensor = torch.frombuffer(slab, dtype=dtype, count=count, offset=_used).view(shape)
        _used += size
    return tensor


def _map(size: int) -> mmap.mmap:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return mmap.mmap(-1, size)
    slab = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without them
        slab.madvise(mmap.MADV_HUGEPAGE)
    return slab
