"""How kernels follow each other: on newer GPUs one is set up, and its weights are on their way, while the one before it
ends."""

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
    """Wait until all that earlier kernels wrote is there. The next kernel may be set up from now on, and not before:
    or a whole chain of them would stand waiting in the way of the one that works."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def slip_in(EARLY: tl.constexpr):
    """`follow`, for a kernel so small that the next may be set up beside it while both wait."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def ahead(pointers, BYTES: tl.constexpr, EARLY: tl.constexpr):
    """Have so many bytes at each pointer brought near. Only what no kernel of a round writes may be fetched so, and it
    pays before `follow`: memory would be idle while the kernel before ends."""
    if EARLY and BYTES > 0:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [pointers.to(tl.int64), tl.full(pointers.shape, BYTES, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
