"""Builds the CPU kernels once with the machine's own C compiler and loads them; without one the references run."""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-pthread", "-fPIC", "-shared")
COMPILERS = ("cc", "gcc", "clang")
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "f": ctypes.c_float}
# The arguments of each kernel: the members of its struct.
SIGNATURES = {
    "linear": "pppllll",
    "pack_linear": "pplll",
    "linear_int8": "ppppllll",
    "add_norm": "ppppllf",
    "pair_norm": "ppppllf",
    "swiglu": "ppll",
    "gate": "ppplll",
    "norm_rope": "pppppplllllf",
    "attend": "ppppplllppppll",
    "remember": "ppppplllppppll",
    "delta_window": "ppppppll",
    "delta_chunk": "ppppll",
    "delta_fold": "pppplllll",
    "read_windows": "ppppppll",
    "place": "ppppppppppllll",
    "embed": "ppllpll",
    "last_kept": "ppppll",
    "best": "pppll",
    "best_allowed": "ppppppllll",
    "accept_coupled": "ppppppl",
    "commit": "ppppppppllppl",
    "leave_drafts": "ppplllll",
    "go_on": "ppppppl",
    "set_aside": "ppppppppppplll",
    "gumbel": "pppplll",
    "draw_coupled": "ppppppppplll",
    "reject": "pppppppppppplll",
    "draw_drafts": "ppppppppppllll",
    "leave": "pppppppppplll",
    "learn": "ppppppppppll",
    "truncate_scores": "ppppppll",
    "replay": "pl",
}

# Taken before anything lowers it: a thread that starts while another holds torch at one thread would see one.
DEFAULT_THREADS = torch.get_num_threads()

Calls = list[tuple[int, ctypes.Structure]]  # a kernel's address, and its arguments

_allowed = True
_local = threading.local()


class Kernel:
    """A C function that takes the address of its arguments."""

    def __init__(self, function: Any, signature: str) -> None:
        fields = [(f"argument_{i}", TYPES[letter]) for i, letter in enumerate(signature)]
        self.arguments = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
        self.function, self.address = function, ctypes.cast(function, ctypes.c_void_p).value

    def __call__(self, *values: float | None) -> None:
        arguments = self.arguments(*values)
        self.function(ctypes.byref(arguments))
        calls = getattr(_local, "calls", None)
        if calls is not None:
            calls.append((self.address, arguments))


class Kernels(SimpleNamespace):
    """Every kernel by its name."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        for name in SIGNATURES:
            getattr(loaded, name).restype = None
        super().__init__(**{name: Kernel(getattr(loaded, name), letters) for name, letters in SIGNATURES.items()})
        self.use_threads = loaded.use_threads
        self.strip_rows = ctypes.c_long.in_dll(loaded, "strip_rows").value
        self.band_rows = ctypes.c_long.in_dll(loaded, "band_rows").value


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    """The kernel calls that this thread makes within it."""
    calls: Calls = []
    _local.calls = calls
    try:
        yield calls
    finally:
        _local.calls = None


def recording() -> bool:
    """Whether this thread's kernel calls are being kept."""
    return getattr(_local, "calls", None) is not None


def library(*tensors: Tensor) -> Kernels | None:
    """The kernels, when there are any and all these tensors are float32 on the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype != torch.float32:
            return None
    return _load() if _allowed else None


def references_alone() -> bool:
    """Whether no kernels of ours are to be used."""
    return not _allowed


@contextlib.contextmanager
def references_only() -> Iterator[None]:
    """Within it every kernel takes its PyTorch reference."""
    global _allowed
    before, _allowed = _allowed, False
    try:
        yield
    finally:
        _allowed = before


@contextlib.contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Within it torch uses this many threads in the calling one. The number decides the last bits of its products."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def _load() -> Kernels | None:
    log = logging.getLogger("headlong")
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        log.info("no C compiler was found, so CPU rounds run in plain PyTorch; install gcc or clang for faster ones.")
        return None
    target = _cache_folder() / f"kernels-{_fingerprint(compiler)}.so"
    if not target.exists():
        fault = _build(compiler, target)
        if fault:
            log.info("the CPU kernels did not build with %s (%s), so CPU rounds run in plain PyTorch.", compiler, fault)
            return None
    try:
        loaded = ctypes.CDLL(str(target))
    except OSError as error:
        log.warning("the CPU kernels at %s do not load (%s), so rounds run in plain PyTorch; delete it.", target, error)
        return None
    return Kernels(loaded)


def _fingerprint(compiler: str) -> str:
    """Of the source, the flags, the compiler and the processor: a home folder may be shared by several machines."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    text = "\n".join([*sources, *FLAGS, compiler, platform.machine(), cpu])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headlong"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="headlong-"))


def _build(compiler: str, target: Path) -> str:
    """Compile beside the target and move it there whole. Returns what went wrong, empty when nothing did."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCE), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"exit code {done.returncode}"
        made.replace(target)
    return ""
