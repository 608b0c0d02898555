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
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-pthread", "-fPIC", "-shared")
COMPILERS = ("cc", "gcc", "clang")
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "i": ctypes.c_int, "f": ctypes.c_float}
SIGNATURES = {
    "use_threads": "i",
    "linear": "pppilll",
    "linear_int8": "pppplll",
    "add_norm": "ppppllf",
    "swiglu": "ppll",
    "gate": "ppplll",
    "norm_rope": "pppppplllllf",
    "attend": "ppppplllppplll",
    "delta_window": "ppppplll",
    "delta_fold": "pppplllll",
}

# Taken before anything lowers it: a thread that starts while another holds torch at one thread would see one.
DEFAULT_THREADS = torch.get_num_threads()

_allowed = True


def library(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernels, when there are any and all these tensors are float32 on the CPU."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype != torch.float32:
            return None
    return _load() if _allowed else None


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
def _load() -> ctypes.CDLL | None:
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
    for name, signature in SIGNATURES.items():
        getattr(loaded, name).argtypes = [TYPES[letter] for letter in signature]
        getattr(loaded, name).restype = None
    return loaded


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
