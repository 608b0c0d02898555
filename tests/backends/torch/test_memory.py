"""How many pages fit beside a model, and what is said where too few do."""

import pytest
import torch

from headlong.backends.fake import fake_limits
from headlong.backends.torch.cache import Cache, CacheShape
from headlong.backends.torch.memory import GIB, ROUNDS, Room, pages_that_fit
from headlong.errors import UserError
from headlong.settings import Settings

SETTINGS = Settings(page=128)


def test_what_is_left_for_pages():
    room = Room(free=100 * GIB, total=140 * GIB)
    assert room.for_pages(1.0, 0) == 100 * GIB - ROUNDS
    assert room.for_pages(0.9, 3 * GIB) == pytest.approx(100 * GIB - 14 * GIB - ROUNDS - 3 * GIB, abs=1)


def test_no_more_pages_than_wanted_and_no_more_than_fit():
    assert pages_that_fit(50, 10, 1000, 10**9, SETTINGS) == 50
    assert pages_that_fit(50, 10, 1000, 30_500, SETTINGS) == 30
    assert pages_that_fit(50, 10, 1000, 10_000, SETTINGS) == 10


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (9 * GIB, "^1.0 GiB of GPU memory are missing for one row's context .*; ask for --context 1152, "),
        (-GIB, "^11.0 GiB .* ask for fewer --rows, raise memory_fraction .0.9. or free memory that others hold.$"),
    ],
)
def test_what_is_missing_is_told(left, said):
    with pytest.raises(UserError, match=said):
        pages_that_fit(50, 10, GIB, left, SETTINGS)


def test_the_bytes_of_a_rows_states_are_those_of_its_tensors():
    shape = CacheShape(1, 2, 8, recurrent_layers=3, heads=4, key_dim=6, value_dim=10, conv_channels=88, conv_kernel=4)
    for dtype in (torch.float32, torch.bfloat16):
        cache = Cache(shape, fake_limits(rows=1), dtype, torch.device("cpu"))
        held = sum(t.nbytes for m in cache.memories for t in (m.states, m.waiting, m.inputs))
        assert shape.state_bytes(dtype) == held


@pytest.mark.parametrize("fraction", [0.0, 1.5, -1.0])
def test_a_fraction_is_one(fraction):
    with pytest.raises(UserError, match="memory_fraction"):
        Settings(memory_fraction=fraction)
