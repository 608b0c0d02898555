"""Kernels for GPUs: on one where there is one, else on the CPU through Triton's interpreter."""

import importlib.util
import os

import pytest
import torch


def interpret():
    """Before triton is first imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_bounds_too(tensor, scope):
        """Triton 3.6 holds a loaded number as an array of one, which NumPy 2.4 no longer takes as a loop's bound."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_bounds_too


if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    interpret()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def normal():
    """Normal noise of a shape, on the CPU; one stream a test."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)
