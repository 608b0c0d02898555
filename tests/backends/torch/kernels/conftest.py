"""Every kernel in two forms, over memory that is never zero by luck."""

import contextlib

import pytest
import torch

from headlong.backends.torch.native.library import library, references_only


@pytest.fixture(params=["native", "reference"])
def kernels(request):
    """The C kernels, or the PyTorch references beside them."""
    native = request.param == "native"
    if native and library() is None:
        pytest.skip("no C compiler")
    with contextlib.nullcontext() if native else references_only():
        yield request.param


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Tensors made without values hold NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def normal():
    """Normal noise of a shape; one stream a test."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)
