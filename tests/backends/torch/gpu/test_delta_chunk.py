from dataclasses import replace

import pytest
import torch

from headlong.backends.torch.kernels.gated_delta import BLOCK, Memory
from tests.backends.torch.gpu.test_delta import LARGE, TENSORS, assert_near, inputs_for, make_layer, make_memory, on_cpu
from tests.backends.torch.kernels.test_gated_delta import Slow

chunk = pytest.importorskip("headlong.backends.torch.gpu.delta_chunk", reason="no Triton").chunk

# value heads, key heads, key dim, value dim, taps
SHAPES = {"ratio2": (2, 1, 8, 24, 4), "ratio3": (3, 1, 16, 16, 2), "odd": (1, 1, 7, 72, 4)}
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies bfloat16 as integers


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Tensors made without values hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def layer(request, normal, device):
    return make_layer(normal, device, SHAPES[getattr(request, "param", "ratio2")])


def run(layer, memory, projected, row=0, count=None):
    counted = None if count is None else torch.tensor([count], device=projected.device)
    return chunk(layer, memory, projected, torch.tensor([row], device=projected.device), counted)


def slow(layer):
    return Slow(on_cpu(layer))


def bits(memory, name, row):
    return getattr(memory, name)[row].contiguous().view(torch.int32 if name != "inputs" else torch.int16)


LENGTHS = {"ratio2": (1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 2), "ratio3": (1, BLOCK + 1), "odd": (5, BLOCK)}


@pytest.mark.parametrize(
    ("layer", "tokens"), [(shape, tokens) for shape in SHAPES for tokens in LENGTHS[shape]], indirect=["layer"]
)
def test_chunks_are_near_the_recurrence(layer, tokens, normal):
    """A chunk of one block, then one of so many tokens; a very short one hands on inputs of the one before."""
    memory, wanted = make_memory(layer, 2), slow(layer)
    for count in (BLOCK, tokens):
        projected = inputs_for(layer, normal, count)
        assert_near(run(layer, memory, projected, 1), wanted.run(projected.cpu()))
        assert_near(memory.states[1], wanted.state)
        assert torch.equal(memory.inputs[1, : len(layer.conv) - 1].cpu().double(), wanted.past)


def test_chunks_of_whole_blocks_are_one_sequence(layer, normal):
    projected = inputs_for(layer, normal, 2 * BLOCK + 7)
    whole, parts = make_memory(layer, 1), make_memory(layer, 1)
    found = run(layer, whole, projected)
    assert torch.equal(torch.cat([run(layer, parts, part) for part in projected.split(BLOCK)]), found)
    for name in TENSORS:
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name


@pytest.mark.parametrize("decays", [(-1e-5, -1e-3), (-0.5, -4.0), (-40.0, -1e4)], ids=["weak", "strong", "at once"])
@pytest.mark.parametrize("alike", [0.0, 3.0], ids=["keys apart", "keys alike"])
def test_decays_and_keys_of_all_kinds(layer, decays, alike, normal, device):
    layer = replace(layer, decay=torch.tensor(decays, device=device))
    memory, wanted, projected = make_memory(layer, 1), slow(layer), inputs_for(layer, normal, 2 * BLOCK + 9)
    projected[:, : 2 * layer.key_dim] += alike
    projected[:, -2 * layer.heads : -layer.heads] += alike  # and written strongly
    assert_near(run(layer, memory, projected), wanted.run(projected.cpu()), 5e-5)
    assert_near(memory.states[0], wanted.state, 5e-5)


@pytest.mark.parametrize("layer", ["ratio3"], indirect=True)
@pytest.mark.parametrize("dtype", sorted({HALF, torch.float16}, key=str))
def test_half_types_are_as_near_as_their_rounding(layer, dtype, normal):
    memory, wanted = make_memory(layer, 1, dtype), slow(layer)
    for count in (BLOCK + 3, 40):
        projected = inputs_for(layer, normal, count, dtype)
        found, tolerance = run(layer, memory, projected), 8 * torch.finfo(dtype).eps
        assert found.dtype == dtype
        assert_near(found, wanted.run(projected.cpu()), tolerance)
        assert_near(memory.states[0], wanted.state, tolerance)


@pytest.mark.parametrize("layer", ["odd"], indirect=True)
def test_nothing_else_is_read_or_written(layer, normal):
    """Other rows, what waits, and inputs past those of the convolution hold NaN."""
    past = len(layer.conv) - 1
    memory = Memory(*(torch.full_like(getattr(make_memory(layer, 3, HALF), name), torch.nan) for name in TENSORS))
    memory.states[1], memory.inputs[1, :past] = 0, 0
    before = Memory(*(getattr(memory, name).clone() for name in TENSORS))
    projected = inputs_for(layer, normal, BLOCK + 1, HALF)
    alone = make_memory(layer, 1, HALF)
    assert torch.equal(run(layer, memory, projected, 1), run(layer, alone, projected))
    assert torch.equal(memory.states[1], alone.states[0])
    for name in TENSORS:
        for row in (0, 2):
            assert torch.equal(bits(memory, name, row), bits(before, name, row)), name
    assert torch.equal(bits(memory, "waiting", 1), bits(before, "waiting", 1))
    assert torch.equal(bits(memory, "inputs", 1)[past:], bits(before, "inputs", 1)[past:])


def test_projections_may_be_columns_of_a_wider_tensor(layer, normal):
    projected = inputs_for(layer, normal, BLOCK + 4)
    wide = torch.full((len(projected), projected.shape[1] + 5), torch.nan, device=projected.device)
    wide[:, 3:-2] = projected
    found, wanted = (run(layer, make_memory(layer, 1), x) for x in (wide[:, 3:-2], projected))
    assert_near(found, wanted.cpu())


@pytest.mark.parametrize("count", [0, 2, BLOCK, BLOCK + 9])
def test_padding_changes_nothing(layer, count, normal):
    """Nor does what it brings break: its outputs are numbers."""
    before, projected = inputs_for(layer, normal, 7), inputs_for(layer, normal, 2 * BLOCK)
    memory, wanted = make_memory(layer, 1), make_memory(layer, 1)
    for each in (memory, wanted):
        run(layer, each, before)
    found = run(layer, memory, projected, count=count)
    assert found.isfinite().all()
    if count:
        assert torch.equal(found[:count], run(layer, wanted, projected[:count]))
    for name in TENSORS:
        assert torch.equal(getattr(memory, name), getattr(wanted, name)), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_large_heads_are_near_the_recurrence(normal, device):
    layer = make_layer(normal, device, LARGE)
    memory, wanted = make_memory(layer, 1, torch.bfloat16), slow(layer)
    for count in (4 * BLOCK, 7):
        projected = inputs_for(layer, normal, count, torch.bfloat16)
        assert_near(run(layer, memory, projected), wanted.run(projected.cpu()), 3e-2)
        assert_near(memory.states[0], wanted.state, 3e-2)
