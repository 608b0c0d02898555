import pytest
import torch

from headlong.backends.torch.kernels.attention import Pages, Places, _reference
from headlong.backends.torch.ragged import Layout

attention = pytest.importorskip("headlong.backends.torch.gpu.attention", reason="no Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16  # the interpreter multiplies bfloat16 as integers
SPARE = 1
ODD = 3  # columns beside q, k and v, so that none of them is aligned
TOLERANCES = {torch.float32: (2e-6, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2)}


@pytest.fixture(params=[64, 256], ids=["splits64", "splits256"])
def split(request, monkeypatch):
    """Short splits too: a long past is slow in the interpreter."""
    monkeypatch.setattr(attention, "SPLIT", request.param)
    return request.param


class Rows:
    """Rows with a past, each in pages of its own; what is not written holds NaN, but page 0 zeros."""

    def __init__(self, lengths, heads=(4, 2), dim=16, page=16, dtype=torch.float32, widest=9):
        self.lengths, (self.queries, self.kv), self.dim, self.page, self.dtype = lengths, heads, dim, page, dtype
        self.generator = torch.Generator().manual_seed(0)
        counts = [(length + widest - 1) // page + 1 for length in lengths]
        order = torch.randperm(sum(counts), generator=self.generator) + 2
        self.tables = order.split(counts)
        self.pages = Pages(*(torch.full((len(order) + 3, self.kv, page, dim), torch.nan, dtype=dtype) for _ in "kv"))
        self.past = [[self.normal(length, self.kv, dim) for _ in "kv"] for length in lengths]
        self.windows = [self.normal(widest, (self.queries + 2 * self.kv) * dim + ODD) for _ in lengths]
        for x, which in ((self.pages.keys, 0), (self.pages.values, 1)):
            x[0] = 0
            for row, table in enumerate(self.tables):
                positions = torch.arange(lengths[row])
                x[table[positions // page], :, positions % page] = self.past[row][which]

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def places(self, rows, widths, counts=None, spare=0):
        """Of these rows, so wide each, through tables with so many pages too many."""
        layout = Layout.of(tuple(rows), tuple(widths), torch.device("cpu"))
        table = torch.zeros(len(rows), max(len(self.tables[row]) for row in rows) + spare, dtype=torch.long)
        for b, row in enumerate(rows):
            table[b, : len(self.tables[row])] = self.tables[row]
        positions = torch.tensor([self.lengths[row] for row in rows])[layout.owners] + layout.steps
        write_pages = table[layout.owners, (positions // self.page).clamp(max=table.shape[1] - 1)]
        if counts is not None:
            write_pages[layout.steps >= torch.tensor(counts)[layout.owners]] = SPARE
        return Places(layout, positions, write_pages, table)

    def attend(self, rows, widths, counts=None, spare=0, attend=attention.window_attention, change=lambda x: x):
        """The outputs of each row, and the pages after it."""
        places = self.places(rows, widths, counts, spare)
        layout = Layout.of(tuple(rows), tuple(widths), DEVICE)
        where = (x.to(DEVICE) for x in (places.positions, places.write_pages, places.read_pages))
        pages = Pages(self.pages.keys.to(DEVICE, copy=True), self.pages.values.to(DEVICE, copy=True))
        wide = torch.cat([self.windows[row][:width] for row, width in zip(rows, widths, strict=True)]).to(DEVICE)
        out = attend(pages, Places(layout, *where), *(change(x) for x in self.split(wide)))
        return out.cpu().split(layout.widths), Pages(pages.keys.cpu(), pages.values.cpu())

    def split(self, wide):
        sizes = [self.queries * self.dim, self.kv * self.dim, self.kv * self.dim, ODD]
        return [x.unflatten(-1, (-1, self.dim)) for x in wide.split(sizes, -1)[:3]]

    def slow(self, row, width):
        """Float64, a query at a time."""
        q, k, v = (x.double() for x in self.split(self.windows[row][:width]))
        keys, values = (torch.cat([past.double(), x]) for past, x in zip(self.past[row], (k, v), strict=True))
        group, out = self.queries // self.kv, torch.empty_like(q)
        for j in range(width):
            seen = slice(0, self.lengths[row] + j + 1)
            near, far = (x[seen].repeat_interleave(group, 1) for x in (keys, values))
            shares = (torch.einsum("tad,ad->at", near, q[j]) / self.dim**0.5).softmax(-1)
            out[j] = torch.einsum("at,tad->ad", shares, far)
        return out

    def check(self, found, row, width):
        atol, rtol = TOLERANCES[self.dtype]
        torch.testing.assert_close(found.double(), self.slow(row, width), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("heads", "dim", "page"),
    [((2, 2), 24, 4), ((4, 1), 16, 16), ((8, 1), 64, 128), ((6, 2), 5, 16), ((3, 3), 72, 12)],
    ids=["group1", "group4", "group8", "group3", "page12"],
)
def test_near_float64_around_page_and_split_edges(split, heads, dim, page):
    edges = [0, page - 1, page, 60, 64, 2 * page + 63]
    lengths = edges if split == 64 else [3, 250, 256, 520]
    rows = Rows(lengths, heads, dim, page)
    widths = [1 + 4 * row % 9 for row in range(len(lengths))]
    found, _ = rows.attend(range(len(lengths)), widths)
    for row, width in enumerate(widths):
        rows.check(found[row], row, width)


@pytest.mark.parametrize("dtype", sorted({HALF, torch.float16}, key=str))
def test_dtypes(dtype):
    rows = Rows([20, 290], (8, 2), 64, 32, dtype)
    found, _ = rows.attend([0, 1], [9, 5])
    rows.check(found[0], 0, 9)
    rows.check(found[1], 1, 5)
    assert found[0].dtype == dtype


def test_near_the_reference():
    rows = Rows([0, 7, 30, 280], (8, 2), 24)
    zeroed = Pages(rows.pages.keys.nan_to_num_(0), rows.pages.values.nan_to_num_(0))  # as it asks for
    assert rows.pages.keys is zeroed.keys
    found, pages = rows.attend(range(4), [3, 9, 1, 4])
    wanted, theirs = rows.attend(range(4), [3, 9, 1, 4], attend=_reference)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=1e-5)
    assert torch.equal(pages.keys, theirs.keys)
    assert torch.equal(pages.values, theirs.values)


@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["group1", "group8"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_query_is_the_same_alone_in_a_crowd_and_in_any_width_or_table(split, heads, dtype):
    rows = Rows([3, 61, 258], heads, 24, 16, dtype)
    order, widths = [2, 0, 1], [9, 1, 7]
    crowd, _ = rows.attend(order, widths)
    for row, width, found in zip(order, widths, crowd, strict=True):
        assert torch.equal(rows.attend([row], [width])[0][0], found)
        assert torch.equal(rows.attend([row], [1])[0][0], found[:1])
        assert torch.equal(rows.attend([row], [width], spare=40)[0][0], found)


def test_a_token_is_the_same_wherever_its_window_begins(split):
    """A window's last token, and the same one after the others were written in a window before."""
    rows = Rows([58], (8, 1), 24)
    whole, pages = rows.attend([0], [9])
    rows.pages, rows.lengths, rows.windows = pages, [66], [rows.windows[0][8:]]
    assert torch.equal(rows.attend([0], [1])[0][0], whole[0][8:])


def test_few_programs_take_many_splits_each(monkeypatch):
    rows = Rows([270, 3], (4, 2))
    monkeypatch.setattr(attention, "SPLIT", 64)
    wanted, _ = rows.attend([0, 1], [4, 9])
    monkeypatch.setattr(attention, "PROGRAMS", 8)
    for found, want in zip(rows.attend([0, 1], [4, 9])[0], wanted, strict=True):
        assert torch.equal(found, want)


def test_strides_change_no_bit():
    rows = Rows([30, 5], (4, 2), 16)
    strided, _ = rows.attend([0, 1], [4, 2])
    packed, _ = rows.attend([0, 1], [4, 2], change=torch.Tensor.contiguous)
    for a, b in zip(strided, packed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)], ids=["group1", "group8"])
def test_padding_harms_nobody(split, heads):
    """It may be anything, past the end of its table too; what stands in the row's pages at its positions as well."""
    rows = Rows([63, 15, 28], heads, widest=4)
    rows.windows = [torch.cat([window, rows.normal(5, window.shape[1])]) for window in rows.windows]
    whole, _ = rows.attend(range(3), [4, 2, 1])
    for row, count in enumerate([4, 2, 0]):
        rows.windows[row][count:] = torch.nan
    rows.pages.keys[SPARE] = rows.pages.values[SPARE] = torch.nan
    found, pages = rows.attend(range(3), [9, 9, 3], counts=[4, 2, 0])
    for row, count in enumerate([4, 2, 0]):
        assert torch.equal(found[row][:count], whole[row][:count])
    others = torch.arange(len(pages.keys)) != SPARE
    wrote = ~pages.keys[others].isnan() & rows.pages.keys[others].isnan()
    assert wrote.sum() == 6 * rows.kv * rows.dim


def test_writes_go_to_their_places_and_nowhere_else():
    rows = Rows([14, 2, 20], dim=24)
    places = rows.places([0, 2], [4, 2])
    _, k, v = rows.split(torch.cat([rows.windows[0][:4], rows.windows[2][:2]]).to(DEVICE))
    pages = Pages(rows.pages.keys.to(DEVICE, copy=True), rows.pages.values.to(DEVICE, copy=True))
    attention.write(pages, places.write_pages.to(DEVICE), places.positions.to(DEVICE), k, v)
    for found, before, new in ((pages.keys, rows.pages.keys, k), (pages.values, rows.pages.values, v)):
        before[places.write_pages, :, places.positions % rows.page] = new.cpu()
        torch.testing.assert_close(found.cpu(), before, atol=0, rtol=0, equal_nan=True)


def test_large_scores_do_not_overflow(split):
    rows = Rows([30])
    rows.windows[0][:, : rows.queries * rows.dim] *= 200
    found, _ = rows.attend([0], [2])
    torch.testing.assert_close(found[0].double(), rows.slow(0, 2), atol=2e-4, rtol=1e-3)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_a_graph_replays_other_lengths_and_counts():
    """Captured once, with everything but shapes changed in place."""
    rows = Rows([300, 40], (8, 2), 64, 16, torch.bfloat16)
    width = len(rows.tables[0])
    held = [torch.zeros(18, dtype=torch.long), torch.zeros(18, dtype=torch.long), torch.zeros(2, width).long()]
    held = [x.to(DEVICE) for x in held]
    pages = Pages(rows.pages.keys.to(DEVICE), rows.pages.values.to(DEVICE))
    q, k, v = rows.split(torch.cat(rows.windows).to(DEVICE))
    places = Places(Layout.of((0, 1), (9, 9), DEVICE), *held)
    attention.window_attention(pages, places, q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.window_attention(pages, places, q, k, v)
    now = rows.places([0, 1], [9, 9], [9, 3])
    for x, y in zip(held, (now.positions, now.write_pages, now.read_pages), strict=True):
        x.copy_(y)
    graph.replay()
    wanted, _ = rows.attend([0, 1], [9, 9], [9, 3])
    assert torch.equal(out[:9].cpu(), wanted[0])
    assert torch.equal(out[9:12].cpu(), wanted[1][:3])
