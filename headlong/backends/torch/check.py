"""What a machine has, which path every operation takes on it, and how fast its memory is."""

from time import perf_counter
from typing import Any

import torch

from headlong.backends.torch.backend import device_of, dtype_of
from headlong.backends.torch.gpu.paths import reason_against
from headlong.backends.torch.native.library import DEFAULT_THREADS, library
from headlong.settings import Settings

COPIED = {"cpu": 1 << 28, "cuda": 1 << 31}  # bytes: more than caches hold
COPIES = 5


def examine(settings: Settings) -> dict[str, Any]:
    device = device_of(settings.device)
    dtype = dtype_of(settings.dtype, device)
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": str(device),
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "dtype": str(dtype).removeprefix("torch."),
        "threads": settings.threads or DEFAULT_THREADS,
    }
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        found["memory"] = {"free_bytes": free, "total_bytes": total}
    return found | {"paths": _paths(device), "copy_bytes_per_s": _copy(device)}


def _paths(device: torch.device) -> dict[str, str]:
    """Of the operations of rounds and prompts."""
    if device.type == "cuda":
        against = reason_against(device)
        mine = f"plain PyTorch: {against}" if against else "Triton"
        prompts = f"cuBLAS and {mine}" if against else "cuBLAS and Triton, captured graphs"
        rounds = "call by call" if against else "captured graphs"
    else:
        mine = prompts = "compiled C" if library() else "plain PyTorch: no C compiler was found"
        rounds = "recorded calls" if library() else "call by call"
    names = ("linear layers", "attention", "Gated DeltaNet", "experts", "norms", "sampling")
    return {"rounds": rounds, **dict.fromkeys(names, mine), "prompts": prompts}


def _copy(device: torch.device) -> float:
    """Bytes read and written a second, the best of a few copies."""
    source = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    to, seconds = torch.empty_like(source), []
    for _ in range(COPIES):
        _synchronise(device)
        started = perf_counter()
        to.copy_(source)
        _synchronise(device)
        seconds.append(perf_counter() - started)
    return 2 * len(source) / min(seconds)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
