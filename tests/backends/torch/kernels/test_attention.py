import pytest
import torch

from headlong.backends.torch.kernels.attention import Pages, Places, chunk_attention, window_attention, write

PAGE = 8
SPARE = 1
STALE = 1e4  # what rejected tokens left behind in a row's own pages


class Rows:
    """Rows with a past, each in pages of its own; every page that is nobody's holds NaN, page 0 zeros."""

    def __init__(self, normal, lengths, heads=(4, 2), dim=16):
        self.normal, self.lengths, (self.queries, self.kv), self.dim = normal, lengths, heads, dim
        counts = [(length + 9) // PAGE + 1 for length in lengths]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(len(lengths))) + 2
        self.tables = order.split(counts)
        shape = (sum(counts) + 7, self.kv, PAGE, dim)
        self.pages = Pages(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        self.keys, self.values = [], []
        for x in (self.pages.keys, self.pages.values):
            x[0] = 0
            x[order] = STALE
        for length, table in zip(lengths, self.tables, strict=True):
            k, v = normal(length, self.kv, dim), normal(length, self.kv, dim)
            positions = torch.arange(length)
            write(self.pages, table[positions // PAGE], positions, k, v)
            self.keys.append(k)
            self.values.append(v)

    def attend(self, rows, windows, width, widths=None):
        """Windows of these rows; q, k, v are columns of one wide tensor each [N, ...]."""
        table = torch.zeros(len(rows), max(len(self.tables[row]) for row in rows), dtype=torch.long)
        for b, row in enumerate(rows):
            table[b, : len(self.tables[row])] = self.tables[row]
        positions = torch.tensor([self.lengths[row] for row in rows])[:, None] + torch.arange(width)
        write_pages = table.gather(1, positions // PAGE)
        if widths is not None:
            write_pages[torch.arange(width) >= torch.tensor(widths)[:, None]] = SPARE
        places = Places(positions.flatten(), write_pages.flatten(), table, width)
        pages = Pages(self.pages.keys.clone(), self.pages.values.clone())
        out = window_attention(pages, places, *self.split(torch.cat([windows[row][:width] for row in rows])))
        return out.unflatten(0, (len(rows), width)), pages

    def split(self, wide):
        q, k, v, _ = wide.split([self.queries * self.dim, self.kv * self.dim, self.kv * self.dim, 3], -1)
        return q.unflatten(-1, (-1, self.dim)), k.unflatten(-1, (-1, self.dim)), v.unflatten(-1, (-1, self.dim))

    def windows(self, width):
        return [self.normal(width, (self.queries + 2 * self.kv) * self.dim + 3) for _ in self.lengths]

    def slow(self, row, window):
        """Float64, one query and head at a time."""
        q, k, v = (x.double() for x in self.split(window))
        keys, values = torch.cat([self.keys[row].double(), k]), torch.cat([self.values[row].double(), v])
        out = torch.empty_like(q)
        for j in range(len(q)):
            for head in range(self.queries):
                mine = head * self.kv // self.queries
                seen = slice(0, self.lengths[row] + j + 1)
                shares = (keys[seen, mine] @ q[j, head] / self.dim**0.5).softmax(0)
                out[j, head] = shares @ values[seen, mine]
        return out


def assert_near(found, wanted):
    torch.testing.assert_close(found.double(), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 9])
@pytest.mark.parametrize(
    ("heads", "dim"), [((4, 4), 16), ((4, 2), 24), ((4, 1), 5), ((6, 2), 33)], ids=["gqa1", "gqa2", "gqa4", "gqa3"]
)
def test_near_float64_around_page_edges(kernels, heads, dim, width, normal):
    rows = Rows(normal, [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE - 2, 40], heads, dim)
    windows = rows.windows(width)
    found, _ = rows.attend(range(7), windows, width)
    for row in range(7):
        assert_near(found[row], rows.slow(row, windows[row]))


def test_a_row_is_the_same_alone_in_a_crowd_and_in_any_width(kernels, normal):
    rows = Rows(normal, [3, 50, PAGE, 2 * PAGE - 1])
    windows = rows.windows(9)
    crowd, _ = rows.attend([2, 0, 3, 1], windows, 9)
    for b, row in enumerate([2, 0, 3, 1]):
        assert torch.equal(rows.attend([row], windows, 9)[0][0], crowd[b])
        assert torch.equal(rows.attend([row], windows, 2)[0][0], crowd[b, :2])
        assert torch.equal(rows.attend([row], windows, 1)[0][0], crowd[b, :1])


def test_writes_go_to_their_places_and_nowhere_else(kernels, normal):
    rows = Rows(normal, [PAGE - 1, 2, 20])
    windows = rows.windows(4)
    _, pages = rows.attend([0, 2], windows, 4, widths=[4, 2])
    before = rows.pages
    rows.pages = Pages(before.keys.clone(), before.values.clone())
    for row, width in ((0, 4), (2, 2)):
        _, k, v = rows.split(windows[row][:width])
        positions = rows.lengths[row] + torch.arange(width)
        write(rows.pages, rows.tables[row][positions // PAGE], positions, k, v)
    for found, wanted in ((pages.keys, rows.pages.keys), (pages.values, rows.pages.values)):
        others = [page for page in range(len(found)) if page != SPARE]
        torch.testing.assert_close(found[others], wanted[others], atol=0, rtol=0, equal_nan=True)


def test_padding_harms_nobody(kernels, normal):
    """What stands past a row's own width may be anything, even past the end of its pages."""
    rows = Rows(normal, [2 * PAGE - 1, 5])
    windows = rows.windows(9)
    whole, _ = rows.attend([0, 1], windows, 9)
    windows[1][2:] = torch.nan
    padded, _ = rows.attend([0, 1], windows, 9, widths=[9, 2])
    assert torch.equal(padded[0], whole[0])
    assert torch.equal(padded[1, :2], whole[1, :2])


def test_large_scores_do_not_overflow(kernels, normal):
    rows = Rows(normal, [30])
    windows = rows.windows(2)
    windows[0][:, : rows.queries * rows.dim] *= 200
    found, _ = rows.attend([0], windows, 2)
    torch.testing.assert_close(found[0].double(), rows.slow(0, windows[0]), atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("start", [0, PAGE, 4 * PAGE])
@pytest.mark.parametrize("count", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_prompt_chunks(start, count, normal):
    rows = Rows(normal, [start])
    window = rows.windows(count)[0]
    pages = -(-(start + count) // PAGE)
    positions = torch.arange(start, start + count)
    table = torch.arange(2, 2 + pages)
    for x, past in ((rows.pages.keys, rows.keys[0]), (rows.pages.values, rows.values[0])):
        x.fill_(torch.nan)
        x[table] = 0  # as given to a row
        x[table[: start // PAGE]] = past.unflatten(0, (-1, PAGE)).transpose(1, 2)
    found = chunk_attention(rows.pages, table, positions, *rows.split(window))
    assert_near(found, rows.slow(0, window))
