"""Which path a product, a norm or an attention takes: the GPU's own kernels where Triton can build them."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from headlong.backends.torch.native.library import references_alone

LEAST_CAPABILITY = (8, 0)  # bfloat16 products


def fused(*tensors: Tensor) -> bool:
    """Whether our GPU kernels take these."""
    return tensors[0].is_cuda and not references_alone() and reason_against(tensors[0].device) == ""


@cache
def reason_against(device: torch.device) -> str:
    """Why a GPU's kernels cannot be used; empty where they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < LEAST_CAPABILITY:
        return f"compute capability {found[0]}.{found[1]} is below {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}"
    return ""


@cache
def _kernels(name: str) -> ModuleType:
    """Imported when first used: Triton takes a while."""
    return import_module(f"headlong.backends.torch.gpu.{name}")


def builds() -> ModuleType:
    return _kernels("build")


def products() -> ModuleType:
    return _kernels("linear")


def norms() -> ModuleType:
    return _kernels("norms")


def paged_attention() -> ModuleType:
    return _kernels("attention")


def places() -> ModuleType:
    return _kernels("places")


def recurrence() -> ModuleType:
    return _kernels("delta")


def noises() -> ModuleType:
    return _kernels("noise")


def sampler() -> ModuleType:
    return _kernels("sampling")


def truncation() -> ModuleType:
    return _kernels("truncate")


def verdicts() -> ModuleType:
    return _kernels("verdict")


def mixtures() -> ModuleType:
    return _kernels("experts")


def prompt_attention() -> ModuleType:
    return _kernels("prompt_attention")


def prompt_recurrence() -> ModuleType:
    return _kernels("delta_chunk")


def draft_words() -> ModuleType:
    return _kernels("lexicon")
