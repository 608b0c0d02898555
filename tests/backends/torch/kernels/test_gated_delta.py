import random

import pytest
import torch

from headlong.backends.torch.kernels import gated_delta
from headlong.backends.torch.kernels.gated_delta import BLOCK, Delta, Kept, Memory, settled_state
from headlong.backends.torch.native.library import library, references_only
from headlong.backends.torch.ragged import Layout

MAX_WIDTH = 9
# value heads, key heads, key dim, value dim, taps
SHAPES = {"ratio1": (2, 2, 16, 16, 4), "ratio2": (4, 2, 8, 24, 4), "ratio4": (4, 1, 12, 5, 2), "odd": (3, 3, 7, 17, 4)}
LARGE = (4, 2, 64, 128, 4)
STALE = 1e4  # what rejected tokens left behind


@pytest.fixture(params=SHAPES)
def layer(request, normal):
    return make_layer(normal, *SHAPES[request.param])


def make_layer(normal, heads, key_heads, key_dim, value_dim, taps):
    channels = 2 * key_heads * key_dim + heads * value_dim
    conv, norm = normal(taps, channels), 1 + 0.1 * normal(value_dim)
    return Delta(conv, -normal(heads).exp(), normal(heads) - 1, norm, key_heads, key_dim, 1e-6)


def make_memory(delta, rows=1):
    """An empty memory: states and the inputs before the window are zero, everything else is stale."""
    taps, channels = delta.conv.shape
    memory = Memory(
        torch.zeros(rows, delta.heads, delta.key_dim, delta.value_dim),
        torch.full((rows, MAX_WIDTH, delta.heads, delta.key_dim + delta.value_dim + 1), STALE),
        torch.full((rows, taps - 1 + MAX_WIDTH, channels), STALE),
    )
    memory.inputs[:, : taps - 1] = 0
    return memory


def inputs_for(delta, normal, tokens):
    return normal(tokens, delta.conv.shape[1] + delta.heads * delta.value_dim + 2 * delta.heads)


class Slow:
    """The layer in float64, one token at a time, straight from its definition."""

    def __init__(self, delta):
        self.delta, (taps, channels) = delta, delta.conv.shape
        self.state = torch.zeros(delta.heads, delta.key_dim, delta.value_dim, dtype=torch.float64)
        self.past = torch.zeros(taps - 1, channels, dtype=torch.float64)

    def copy(self):
        other = Slow(self.delta)
        other.state, other.past = self.state.clone(), self.past.clone()
        return other

    def run(self, projected):
        return torch.stack([self.step(token.double()) for token in projected])

    def step(self, token):
        d = self.delta
        values, keys = d.heads * d.value_dim, d.key_heads * d.key_dim
        qkv, z, b, a = token.split([d.conv.shape[1], values, d.heads, d.heads])
        self.past = torch.cat([self.past, qkv[None]])
        mixed = (self.past * d.conv.double()).sum(0)
        self.past = self.past[1:]
        mixed = mixed * mixed.sigmoid()
        q, k = (part.view(d.key_heads, d.key_dim) for part in mixed[: 2 * keys].split(keys))
        v, z = mixed[2 * keys :].view(d.heads, -1), z.view(d.heads, -1)
        out = []
        for head in range(d.heads):
            query, key = (x[head * d.key_heads // d.heads] for x in (q, k))
            query = query / (query @ query + 1e-6).sqrt() * d.key_dim**-0.5
            key = key / (key @ key + 1e-6).sqrt()
            step = a[head] + d.dt_bias[head].double()
            state = self.state[head] * (d.decay[head].double() * torch.logaddexp(step, torch.zeros_like(step))).exp()
            state = state + torch.outer(key, b[head].sigmoid() * (v[head] - state.T @ key))
            self.state[head] = state
            o = state.T @ query
            out.append(o / (o.square().mean() + d.eps).sqrt() * d.norm.double() * z[head] * z[head].sigmoid())
        return torch.cat(out)


class Fast:
    """One row of a memory, run in windows; `kept` of the last window are folded in by the next."""

    def __init__(self, delta, memory=None, row=0):
        self.delta, self.memory, self.row = delta, memory or make_memory(delta), row
        self.kept = self.width = 0

    def window(self, projected, kept):
        layout = layout_of([self.row], [len(projected)])
        out = gated_delta.window(self.delta, self.memory, projected, self.folded, layout)
        self.kept, self.width = kept, len(projected)
        return out

    @property
    def folded(self):
        return Kept(torch.tensor([self.row]), torch.tensor([self.kept]), self.width)

    @property
    def state(self):
        return settled_state(self.delta, self.memory, self.folded)[0]


def layout_of(rows, widths):
    return Layout.of(tuple(rows), tuple(widths), torch.device("cpu"))


def patterns(tokens, salt):
    """Windows of every width over so many tokens: (start, width, kept)."""
    coin, start = random.Random(salt), 0
    while start < tokens:
        width = coin.randint(1, MAX_WIDTH)
        kept = coin.randint(1, min(width, tokens - start))
        yield start, width, kept
        start += kept


def assert_near(found, wanted, tolerance=2e-5):
    """As a share of the largest value: a norm of a small output enlarges its rounding."""
    assert ((found.double() - wanted).abs().max() / wanted.abs().max()) < tolerance


@pytest.mark.parametrize("salt", range(3))
def test_windows_with_any_number_kept(kernels, layer, salt, normal):
    projected, wrong = inputs_for(layer, normal, 40), inputs_for(layer, normal, MAX_WIDTH)
    slow, fast, single = Slow(layer), Fast(layer), Fast(layer)
    for start, width, kept in patterns(40, salt):
        window = torch.cat([projected[start : start + kept], wrong[: width - kept]])
        found = fast.window(window, kept)
        assert_near(found, slow.copy().run(window))
        slow.run(window[:kept])
        for j in range(kept):  # to the last bit as if decoded one by one
            assert torch.equal(single.window(window[j : j + 1], 1)[0], found[j])
            assert j or torch.equal(single.memory.states, fast.memory.states)
        assert_near(fast.state, slow.state)


def test_rows_do_not_see_each_other(kernels, layer, normal):
    """A batch of rows out of order gives each what it has alone; a row that sits out keeps every bit."""
    memory, alone = make_memory(layer, 4), make_memory(layer, 4)
    kept = torch.tensor([0, 0, 0, 0])
    last = dict.fromkeys(range(4), 0)
    for widths in ((3, 3, 3), (1, 1, 1), (1, 5, 2), (MAX_WIDTH, 1, 4), (2, 3, 1), (1, MAX_WIDTH, 1)):
        layout = layout_of([3, 0, 2], widths)
        projected = inputs_for(layer, normal, layout.tokens)
        before = Kept(layout.index, kept[layout.index], max(last[row] for row in layout.rows))
        found = gated_delta.window(layer, memory, projected, before, layout)
        parts = zip(layout.rows, widths, projected.split(widths), found.split(widths), strict=True)
        for row, width, mine, wanted in parts:
            folded = Kept(torch.tensor([row]), kept[row : row + 1], last[row])
            assert torch.equal(gated_delta.window(layer, alone, mine, folded, layout_of([row], [width])), wanted), row
            kept[row], last[row] = (width + 1) // 2 if row else width, width
    assert torch.equal(memory.states, alone.states)
    fresh = make_memory(layer)
    for name in ("states", "waiting", "inputs"):
        assert torch.equal(getattr(memory, name)[1], getattr(fresh, name)[0])


def test_native_and_reference_share_a_memory(normal):
    """Either may go on where the other stopped."""
    layer = make_layer(normal, *SHAPES["ratio2"])
    projected, fast, slow = inputs_for(layer, normal, 30), Fast(layer), Slow(layer)
    for turn, start in enumerate(range(0, 30, 3)):
        window = projected[start : start + 3]
        if turn % 2:
            found = fast.window(window, 3)
        else:
            with references_only():
                found = fast.window(window, 3)
        assert_near(found, slow.run(window))


def test_no_drift_in_2000_tokens(kernels, normal):
    layer = make_layer(normal, *SHAPES["ratio2"])
    layer.decay.copy_(torch.tensor([-0.001, -0.01, -0.1, -1.0]))  # the first hardly forgets
    projected, slow, fast = inputs_for(layer, normal, 2000), Slow(layer), Fast(layer)
    for start, _, kept in patterns(2000, 0):
        wanted = slow.run(projected[start : start + kept])
        found = fast.window(projected[start : start + kept], kept)
    assert_near(found, wanted)
    for head in range(4):
        assert_near(fast.state[head], slow.state[head])


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3])
def test_prompt_chunks(kernels, layer, tokens, normal):
    """Two chunks, then a window: outputs and states as token by token."""
    projected, fast, slow = (
        inputs_for(layer, normal, BLOCK + tokens + 4),
        Fast(layer, make_memory(layer, 3), 1),
        Slow(layer),
    )
    for start, count in ((0, BLOCK), (BLOCK, tokens)):
        part = projected[start : start + count]
        assert_near(gated_delta.chunk(layer, fast.memory, part, torch.tensor([1])), slow.run(part))
        assert_near(fast.memory.states[1], slow.state)
    assert_near(fast.window(projected[-4:], 4), slow.run(projected[-4:]))
    assert not fast.memory.states[[0, 2]].any()


def test_chunks_with_strong_decay(normal):
    """Running products of decays underflow inside a block; nothing may become NaN."""
    layer = make_layer(normal, *SHAPES["ratio1"])
    layer.decay.fill_(-40.0)
    projected, memory = inputs_for(layer, normal, 150), make_memory(layer)
    assert_near(gated_delta.chunk(layer, memory, projected, torch.tensor([0])), Slow(layer).run(projected))


def chunked(delta, projected, counts):
    """Outputs, state and the convolution's inputs after chunks of so many tokens."""
    memory, row = make_memory(delta, 2), torch.tensor([1])
    out = [gated_delta.chunk(delta, memory, part, row) for part in projected.split(counts)]
    return torch.cat(out), memory.states, memory.inputs[:, : len(delta.conv) - 1]


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("shape", [*SHAPES.values(), LARGE], ids=str)
def test_where_a_chunk_ends_changes_no_bit(shape, normal):
    layer = make_layer(normal, *shape)
    projected = inputs_for(layer, normal, 128)
    whole = chunked(layer, projected, [128])
    for counts in ([64, 64], [40, 88], [1, 2, 125], [127, 1]):
        for found, wanted in zip(chunked(layer, projected, counts), whole, strict=True):
            assert torch.equal(found, wanted), counts
    assert torch.equal(chunked(layer, projected[:40], [40])[0], whole[0][:40])
    fast = Fast(layer)  # rounds that keep all of their tokens have the same bits
    windows = torch.cat([fast.window(part, len(part)) for part in projected.split(MAX_WIDTH)])
    assert torch.equal(windows, whole[0])
    assert torch.equal(fast.state, whole[1][1])


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("shape", [*SHAPES.values(), LARGE], ids=str)
def test_native_chunks_are_near_the_reference(shape, normal):
    layer = make_layer(normal, *shape)
    projected = inputs_for(layer, normal, 200)
    native = chunked(layer, projected, [128, 72])
    with references_only():
        reference = chunked(layer, projected, [128, 72])
    for found, wanted in zip(native, reference, strict=True):
        assert_near(found, wanted.double(), 1e-4)
