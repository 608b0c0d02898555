"""Kernels for GPUs: on one where there is one, else on the CPU through Triton's interpreter."""

import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def normal():
    """Normal noise of a shape, on the CPU; one stream a test."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)
