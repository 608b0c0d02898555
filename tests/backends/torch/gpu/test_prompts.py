"""Prompts in captured passes: padded to few lengths, and the same rows as prompts that are not.

Without a GPU the passes are run instead of replayed, as in test_rounds.
"""

import pytest
import torch

from headlong.backends.torch.cache import RESERVED_PAGES
from headlong.backends.torch.gpu import prompts
from headlong.backends.torch.gpu.prompts import padded
from headlong.backends.torch.native.library import references_only
from headlong.engine.request import Chunk, Sampling, Start
from tests import tiny
from tests.backends.torch.gpu.test_rounds import make, play

CHUNK, PAGE, ROW_PAGES = 32, 16, 8
LENGTHS = (1, 6, 31, 32, 70)  # of prompts; a row each


@pytest.fixture(params=["dense", "moe"])
def backends(request, tmp_path, monkeypatch):
    """With captured passes, and without; in plain PyTorch, whose head does not round what it reads to 8 bits."""
    folder = tiny.write(tmp_path, request.param)
    with references_only():
        made = make(folder, monkeypatch, graphs=True), make(folder, monkeypatch, graphs=False)
        monkeypatch.setattr(prompts, "LENGTHS", (4, 8))
        yield made


def prompt_of(row):
    return [(31 * row + 7 * step + 3) % 128 for step in range(LENGTHS[row] + 1)]


def prefill(backend, rows, draft=0):
    """Chunk by chunk in turn, as prompts that come together are run."""
    for row in rows:
        backend.start(Start(row, prompt_of(row), Sampling(), seed=row))
    for start in range(0, max(LENGTHS), CHUNK):
        for row in rows:
            prompt, end = prompt_of(row), min(start + CHUNK, LENGTHS[row])
            if start < end:
                pages = range(ROW_PAGES * row, ROW_PAGES * (row + 1)) if not start else ()
                last = draft if end == LENGTHS[row] and end % CHUNK else 0
                backend.prefill(Chunk(row, start, prompt[start:end], prompt[end], pages, draft=last))


def remembered(backend, row):
    """What a row's prompt left behind: states, the convolution's inputs, keys and values, its length."""
    cache, length = backend.rounds.cache, LENGTHS[row]
    assert backend.rounds.length[row] == length
    for memory in cache.memories:
        yield memory.states[row]
        yield memory.inputs[row, : memory.inputs.shape[1] - memory.waiting.shape[1]]
    positions = torch.arange(length)
    pages = ROW_PAGES * row + positions // PAGE + RESERVED_PAGES
    for layer in cache.pages:
        yield layer.keys[pages, :, positions % PAGE]
        yield layer.values[pages, :, positions % PAGE]


def test_rows_remember_what_they_would_without_padding(backends):
    for backend in backends:
        prefill(backend, [3, 0, 4, 1, 2])
    captured, plain = backends
    for row in range(len(LENGTHS)):
        for found, wanted in zip(remembered(captured, row), remembered(plain, row), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_rounds_go_on_from_there(backends):
    rounds = [[(row, 2 if row in (1, 2) else 0, 2) for row in range(5)], [(row, 2, 1) for row in range(5)]]
    for backend in backends:
        prefill(backend, range(5), draft=2)
    captured, plain = backends
    assert play(captured, rounds) == play(plain, rounds)


def test_a_row_does_not_depend_on_those_before_it(backends):
    captured, _ = backends
    prefill(captured, [4])
    alone = [tensor.clone() for tensor in remembered(captured, 4)]
    prefill(captured, [0, 1, 2, 4, 3])
    for found, wanted in zip(remembered(captured, 4), alone, strict=True):
        assert torch.equal(found, wanted)


def test_a_length_is_captured_once(backends):
    captured, _ = backends
    prefill(captured, range(5))
    prefill(captured, [2, 1])
    assert sorted(captured.rounds.prompts.captured) == [4, 8, CHUNK]


@pytest.mark.parametrize(("tokens", "length"), [(1, 64), (64, 64), (65, 128), (500, 512), (513, 768), (2048, 2048)])
def test_lengths_are_few(tokens, length):
    assert padded(tokens, 2048) == length
    assert padded(min(tokens, 500), 500) == min(length, 500)
