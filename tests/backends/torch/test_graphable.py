"""A round reads nothing back to the host and branches on no value, so that one captured graph can hold it."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from headlong.backends.torch import drafters
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.native.library import references_only
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.engine.request import Chunk, RowPlan, Sampling, Start
from headlong.settings import Settings
from tests import tiny

PROMPT = [5, 9, 2, 7, 11, 3]
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=3),
    "unseeded": Sampling(temperature=1.0, xtc_probability=0.5, logit_bias={3: 1.0}),
}


@pytest.fixture(params=["dense", "moe", "next"])
def backend(request, tmp_path, monkeypatch):
    """Six rows in plain PyTorch, the form that is captured."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with references_only():
        yield TorchBackend(
            open_checkpoint(str(tiny.write(tmp_path, request.param))), Settings(rows=6, context=128, page=16, chunk=32)
        )


def start(backend, samplings, masked=False):
    """A row for each, with drafts to verify."""
    for row, sampling in enumerate(samplings):
        backend.start(Start(row, PROMPT, sampling, seed=row, masked=masked))
        backend.prefill(Chunk(row, 0, PROMPT[:-1], PROMPT[-1], [row], draft=2))


def check(backend, *plans):
    """Rounds of tensors without values: whatever asks for one raises."""
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        for plan in plans:
            handle = backend.rounds.run(plan)
            assert handle.verdict.tokens.shape == (sum(1 + row.verify for row in plan),)
            with pytest.raises(DataDependentOutputException):
                handle.result()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_value_is_read(backend, sampling):
    start(backend, [sampling] * 2)
    check(backend, [RowPlan(0, verify=2, draft=3), RowPlan(1, verify=1, draft=1)])


def test_no_value_is_read_in_rounds_of_all_sorts(backend, monkeypatch):
    """Every sampling with and without drafts, and pairs that are set aside, fed late, and fed for being many."""
    start(backend, [*SAMPLINGS.values(), *SAMPLINGS.values()])
    first = [RowPlan(row, verify=row % 3, draft=row % 2 * row) for row in range(6)]
    later = [RowPlan(row, verify=0, draft=0) for row in range(6)]
    monkeypatch.setattr(drafters, "BACKLOG", 4)
    check(backend, first, *[later] * 3, [RowPlan(row, verify=0, draft=3) for row in range(6)])


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_no_value_is_read_of_constrained_rows(backend, sampling):
    words = -(-backend.limits.vocab // 32)
    start(backend, [sampling] * 2, masked=True)
    check(backend, [RowPlan(row, 2, 3, masks=lambda: np.full((3, words), 5, np.int32)) for row in range(2)])
