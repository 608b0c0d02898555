"""How kernels follow each other: on newer GPUs one is set up while the one before it ends."""

from functools import cache

import torch
import triton
import triton.language as tl

LEAST_CAPABILITY = (9, 0)


@cache
def options(device: torch.device) -> dict[str, bool]:
    """For a launch of a kernel that begins with `follow`."""
    early = device.type == "cuda" and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait until all that earlier kernels wrote is there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def make_way(EARLY: tl.constexpr):
    """Let the next kernel be set up. A large kernel says so when it is nearly through, in all its programs alike: what
    is set up sooner takes its places where some end first, and lies unevenly. A small one says so at once."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
