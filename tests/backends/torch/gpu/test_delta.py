import random
from dataclasses import replace

import pytest
import torch

from headlong.backends.torch.kernels.gated_delta import Delta, Kept, Memory, _window_reference
from headlong.backends.torch.ragged import Layout

window = pytest.importorskip("headlong.backends.torch.gpu.delta", reason="no Triton").window

MAX_WIDTH = 5
# value heads, key heads, key dim, value dim, taps
SHAPES = {"ratio2": (2, 1, 8, 24, 4), "odd": (2, 2, 7, 17, 2)}
LARGE = (48, 16, 128, 128, 4)
STALE = 1e4  # what rejected tokens left behind
TENSORS = ("states", "waiting", "inputs")
PARAMETERS = ("conv", "decay", "dt_bias", "norm")


@pytest.fixture(autouse=True)
def _poisoned_memory():
    """Tensors made without values hold NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=SHAPES)
def layer(request, normal, device):
    return make_layer(normal, device, SHAPES[request.param])


def make_layer(normal, device, shape):
    heads, key_heads, key_dim, value_dim, taps = shape
    channels = 2 * key_heads * key_dim + heads * value_dim
    tensors = normal(taps, channels), -normal(heads).exp(), normal(heads) - 1, 1 + 0.1 * normal(value_dim)
    return Delta(*(x.to(device) for x in tensors), key_heads, key_dim, 1e-6)


def make_memory(layer, rows, dtype=torch.float32):
    """An empty memory: states and the inputs before the window are zero, everything else is stale."""
    (taps, channels), like = layer.conv.shape, layer.conv
    entry = layer.key_dim + layer.value_dim + 1
    memory = Memory(
        like.new_zeros(rows, layer.heads, layer.key_dim, layer.value_dim),
        like.new_full((rows, MAX_WIDTH, layer.heads, entry), STALE),
        like.new_full((rows, taps - 1 + MAX_WIDTH, channels), STALE, dtype=dtype),
    )
    memory.inputs[:, : taps - 1] = 0
    return memory


def inputs_for(layer, normal, tokens, dtype=torch.float32):
    width = layer.conv.shape[1] + layer.heads * layer.value_dim + 2 * layer.heads
    return normal(tokens, width).to(layer.conv.device, dtype)


def run(layer, memory, projected, rows, widths, counts):
    return window(layer, memory, projected, *windows_of(rows, widths, counts, projected.device))


def windows_of(rows, widths, counts, device):
    layout = Layout.of(tuple(rows), tuple(widths), device)
    return Kept(layout.index, torch.tensor(counts, device=device), MAX_WIDTH), layout


def on_cpu(layer):
    return replace(layer, **{name: getattr(layer, name).cpu() for name in PARAMETERS})


def assert_near(found, wanted, tolerance=1e-5):
    """As a share of the largest value: a norm of a small output enlarges its rounding."""
    found, wanted = found.cpu().double(), wanted.double()
    assert (found - wanted).abs().max() <= tolerance * wanted.abs().max()


def ragged(rows, rounds, salt):
    """Rounds of (widths, how many of each will be kept)."""
    coin = random.Random(salt)
    for _ in range(rounds):
        widths = [coin.randint(1, MAX_WIDTH) for _ in range(rows)]
        yield widths, [coin.randint(0, width) for width in widths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ragged_windows_are_near_the_reference(layer, dtype, normal):
    """Outputs, and all that may be read later."""
    rows, counts, plain = [3, 0, 2], [0, 0, 0], on_cpu(layer)
    memory, wanted = make_memory(layer, 4, dtype), make_memory(plain, 4, dtype)
    past = len(layer.conv) - 1
    for widths, kept in ragged(3, 4, salt=1):
        projected = inputs_for(layer, normal, sum(widths), dtype)
        found = run(layer, memory, projected, rows, widths, counts)
        reference = _window_reference(
            plain, wanted, projected.cpu(), *windows_of(rows, widths, counts, plain.conv.device)
        )
        assert found.dtype == dtype
        assert_near(found, reference, 1e-5 if dtype == torch.float32 else 1e-2)
        assert_near(memory.states, wanted.states)
        for row, width in zip(rows, widths, strict=True):
            assert torch.equal(memory.inputs[row, : past + width].cpu(), wanted.inputs[row, : past + width])
            assert_near(memory.waiting[row, :width], wanted.waiting[row, :width])
        counts = kept


def test_rows_do_not_see_each_other(layer, normal):
    """A batch of rows out of order gives each what it has alone; a row that sits out keeps every bit."""
    rows, counts = [3, 0, 2], [0, 0, 0]
    memory, alone = make_memory(layer, 4), make_memory(layer, 4)
    for widths, kept in ragged(3, 3, salt=2):
        projected = inputs_for(layer, normal, sum(widths))
        found = run(layer, memory, projected, rows, widths, counts).split(widths)
        for row, width, count, mine, wanted in zip(rows, widths, counts, projected.split(widths), found, strict=True):
            assert torch.equal(run(layer, alone, mine, [row], [width], [count]), wanted), row
        counts = kept
    for name in TENSORS:
        assert torch.equal(getattr(memory, name), getattr(alone, name)), name
        assert torch.equal(getattr(memory, name)[1], getattr(make_memory(layer, 1), name)[0]), name


@pytest.mark.parametrize("salt", range(2))
def test_kept_parts_of_windows_are_as_one_by_one(layer, salt, normal):
    memory, single, count, last = make_memory(layer, 1), make_memory(layer, 1), 0, 0
    for (width,), (kept,) in ragged(1, 6, salt):
        projected = inputs_for(layer, normal, width)
        found = run(layer, memory, projected, [0], [width], [count])
        for j in range(kept):
            assert torch.equal(run(layer, single, projected[j : j + 1], [0], [1], [last])[0], found[j])
            assert j or torch.equal(single.states, memory.states)
            last = 1
        count = kept


def test_projections_may_be_columns_of_a_wider_tensor(layer, normal):
    projected = inputs_for(layer, normal, 4)
    wide = torch.full((4, projected.shape[1] + 5), STALE, device=projected.device)
    wide[:, 3:-2] = projected
    runs = [run(layer, make_memory(layer, 2), x, [1, 0], [3, 1], [0, 0]) for x in (projected, wide[:, 3:-2])]
    assert torch.equal(*runs)


def test_no_drift(normal, device):
    """Against float64, over 10,000 tokens where a GPU makes them quick; one head hardly forgets."""
    layer = make_layer(normal, device, (2, 1, 4, 4, 2))
    layer.decay.copy_(torch.tensor([-0.0005, -0.1]))
    exact = replace(on_cpu(layer), **{name: getattr(on_cpu(layer), name).double() for name in PARAMETERS})
    memory, wanted = make_memory(layer, 1), make_memory(exact, 1)
    wanted = Memory(*(getattr(wanted, name).double() for name in TENSORS))
    count = 0
    for _ in range((10_000 if device.type == "cuda" else 50) // MAX_WIDTH):
        projected = inputs_for(layer, normal, MAX_WIDTH)
        found = run(layer, memory, projected, [0], [MAX_WIDTH], [count])
        places = windows_of([0], [MAX_WIDTH], [count], exact.conv.device)
        reference = _window_reference(exact, wanted, projected.cpu().double(), *places)
        count = MAX_WIDTH
    assert_near(found, reference, 2e-5)
    for head in range(2):
        assert_near(memory.states[0, head], wanted.states[0, head], 2e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("shape", [SHAPES["odd"], LARGE], ids=str)
def test_a_captured_graph_follows_its_inputs(shape, normal, device):
    """Replayed with other rows, counts and widths, it gives what a plain call gives; so do large heads."""
    layer = make_layer(normal, device, shape)
    memory, plain = make_memory(layer, 3, torch.bfloat16), make_memory(layer, 3, torch.bfloat16)
    held = inputs_for(layer, normal, 6, torch.bfloat16)
    kept, layout = windows_of([0, 1], [3, 3], [0, 0], device)
    window(layer, make_memory(layer, 3, torch.bfloat16), held, kept, layout)  # compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = window(layer, memory, held, kept, layout)
    for rows, widths, counts in (([2, 0], [5, 1], [0, 0]), ([0, 2], [2, 4], [1, 5]), ([1, 2], [3, 3], [0, 2])):
        now, there = windows_of(rows, widths, counts, device)
        for old, new in ((kept.rows, now.rows), (kept.counts, now.counts), (layout.offsets, there.offsets)):
            old.copy_(new)
        held.copy_(inputs_for(layer, normal, 6, torch.bfloat16))
        graph.replay()
        assert torch.equal(found, window(layer, plain, held, now, there))
        for name in TENSORS:
            assert torch.equal(getattr(memory, name), getattr(plain, name)), name
