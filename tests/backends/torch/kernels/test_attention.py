import pytest
import torch

from headlong.backends.torch.kernels.attention import Pages, Places, Stretch, chunk_attention, window_attention, write
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout

PAGE = 8
SPARE = 1
STALE = 1e4  # what rejected tokens left behind in a row's own pages


class Rows:
    """Rows with a past, each in pages of its own; every page that is nobody's holds NaN, page 0 zeros."""

    def __init__(self, normal, lengths, heads=(4, 2), dim=16, ahead=9):
        self.normal, self.lengths, (self.queries, self.kv), self.dim = normal, lengths, heads, dim
        counts = [(length + ahead) // PAGE + 1 for length in lengths]
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

    def attend(self, rows, windows, widths, counts=None):
        """Windows of these rows, so wide each; q, k, v are columns of one wide tensor each [N, ...]."""
        layout = Layout.of(tuple(rows), tuple(widths), torch.device("cpu"))
        table = torch.zeros(len(rows), max(len(self.tables[row]) for row in rows), dtype=torch.long)
        for b, row in enumerate(rows):
            table[b, : len(self.tables[row])] = self.tables[row]
        positions = torch.tensor([self.lengths[row] for row in rows])[layout.owners] + layout.steps
        write_pages = table[layout.owners, positions // PAGE]
        if counts is not None:
            write_pages[layout.steps >= torch.tensor(counts)[layout.owners]] = SPARE
        places = Places(layout, positions, write_pages, table)
        pages = Pages(self.pages.keys.clone(), self.pages.values.clone())
        wide = torch.cat([windows[row][:width] for row, width in zip(rows, widths, strict=True)])
        return window_attention(pages, places, *self.split(wide)).split(layout.widths), pages

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
    found, _ = rows.attend(range(7), windows, [width] * 7)
    for row in range(7):
        assert_near(found[row], rows.slow(row, windows[row]))


@pytest.mark.parametrize("widths", [(9, 9, 9, 9), (1, 9, 4, 2), (9, 1, 1, 1), (2, 3, 40, 1)])
def test_a_row_is_the_same_alone_in_a_crowd_and_in_any_width(kernels, widths, normal):
    rows = Rows(normal, [3, 50, PAGE, 2 * PAGE - 1], ahead=40)
    windows, order = rows.windows(40), [2, 0, 3, 1]
    crowd, _ = rows.attend(order, windows, widths)
    for row, width, found in zip(order, widths, crowd, strict=True):
        assert_near(found, rows.slow(row, windows[row][:width]))
        assert torch.equal(rows.attend([row], windows, [width])[0][0], found)
        assert torch.equal(rows.attend([row], windows, [1])[0][0], found[:1])


def test_writes_go_to_their_places_and_nowhere_else(kernels, normal):
    rows = Rows(normal, [PAGE - 1, 2, 20, 5])
    windows = rows.windows(4)
    _, pages = rows.attend([0, 2, 3], windows, [4, 4, 2], counts=[4, 2, 1])
    before = rows.pages
    rows.pages = Pages(before.keys.clone(), before.values.clone())
    for row, width in ((0, 4), (2, 2), (3, 1)):
        _, k, v = rows.split(windows[row][:width])
        positions = rows.lengths[row] + torch.arange(width)
        write(rows.pages, rows.tables[row][positions // PAGE], positions, k, v)
    for found, wanted in ((pages.keys, rows.pages.keys), (pages.values, rows.pages.values)):
        others = [page for page in range(len(found)) if page != SPARE]
        torch.testing.assert_close(found[others], wanted[others], atol=0, rtol=0, equal_nan=True)


def test_padding_harms_nobody(kernels, normal):
    """What stands past a row's own count may be anything, even past the end of its pages."""
    rows = Rows(normal, [2 * PAGE - 1, 5])
    windows = rows.windows(9)
    whole, _ = rows.attend([0, 1], windows, [9, 7])
    windows[1][2:] = torch.nan
    padded, _ = rows.attend([0, 1], windows, [9, 7], counts=[9, 2])
    assert torch.equal(padded[0], whole[0])
    assert torch.equal(padded[1][:2], whole[1][:2])


def test_large_scores_do_not_overflow(kernels, normal):
    rows = Rows(normal, [30])
    windows = rows.windows(2)
    windows[0][:, : rows.queries * rows.dim] *= 200
    found, _ = rows.attend([0], windows, [2])
    torch.testing.assert_close(found[0].double(), rows.slow(0, windows[0]), atol=2e-4, rtol=1e-3)


class Prompt:
    """One row's prompt, attended in chunks over pages that are zero but where it was written."""

    def __init__(self, normal, heads=(4, 2), dim=16, page=PAGE, tokens=16 * PAGE):
        self.rows = Rows(normal, [0], heads, dim)
        self.tokens, self.page = self.rows.windows(tokens)[0], page
        self.table = torch.arange(2, 2 + -(-tokens // page)).flip(0)
        self.start()

    def start(self):
        shape = (len(self.table) + 2, self.rows.kv, self.page, self.rows.dim)
        self.pages = Pages(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        for x in (self.pages.keys, self.pages.values):
            x[self.table] = 0  # as given to a row

    def attend(self, start, count):
        positions = torch.arange(start, start + count)
        table = self.table[: -(-(start + count) // self.page)]
        stretch = Stretch(positions, table[positions // self.page], table)
        return chunk_attention(self.pages, stretch, *self.rows.split(self.tokens[start : start + count]))


@pytest.mark.parametrize("start", [0, PAGE, 4 * PAGE])
@pytest.mark.parametrize("count", [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE])
def test_prompt_chunks(kernels, start, count, normal):
    prompt = Prompt(normal)
    if start:
        prompt.attend(0, start)
    wanted = prompt.rows.slow(0, prompt.tokens[: start + count])[start:]
    assert_near(prompt.attend(start, count), wanted)


HEADS = [((4, 2), 16), ((6, 2), 64), ((8, 1), 128), ((3, 3), 33), ((30, 1), 20)]


@pytest.mark.parametrize(("heads", "dim"), HEADS, ids=str)
@pytest.mark.parametrize("page", [PAGE, 32, 128])
def test_long_prompts(kernels, heads, dim, page, normal):
    prompt = Prompt(normal, heads, dim, page, 300)
    found = torch.cat([prompt.attend(start, min(128, 300 - start)) for start in (0, 128, 256)])
    torch.testing.assert_close(found.double(), prompt.rows.slow(0, prompt.tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize(("heads", "dim"), HEADS, ids=str)
def test_where_a_chunk_ends_changes_no_bit(heads, dim, normal):
    """Nor does a round instead of a chunk, where a few queries go over the keys in another way."""
    prompt = Prompt(normal, heads, dim, tokens=150)
    whole = prompt.attend(0, 150)
    for counts in ([128, 22], [40, 110], [1] * 9 + [3] * 47):
        prompt.start()
        starts = [sum(counts[:i]) for i in range(len(counts))]
        assert torch.equal(torch.cat([prompt.attend(*pair) for pair in zip(starts, counts, strict=True)]), whole)


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_a_bad_token_spoils_none_before_it(normal):
    prompt = Prompt(normal, (6, 2), 64)
    whole = prompt.attend(0, 100)
    prompt.tokens[50] = torch.nan
    prompt.start()
    assert torch.equal(prompt.attend(0, 100)[:50], whole[:50])
