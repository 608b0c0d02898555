import pytest
import torch

from tests.backends.torch.gpu.test_attention import HALF, Rows

attention = pytest.importorskip("headlong.backends.torch.gpu.prompt_attention", reason="no Triton")


@pytest.fixture(params=[(32, 16), (64, 64)], ids=str)
def _tiles(request, monkeypatch):
    """Small tiles too: a long past is slow in the interpreter."""
    for name in ("TILES", "EXACT_TILES"):
        monkeypatch.setattr(attention, name, (*request.param, 4, 2))


def attend(rows, tokens, row=0, spare=0):
    """A chunk of so many tokens after the row's past, and the pages after it."""

    def one_row(pages, places, q, k, v):
        return attention.chunk_attention(pages, places.read_pages[0], places.positions, q, k, v)

    (found,), pages = rows.attend([row], [tokens], attend=one_row, spare=spare)
    return found, pages


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("heads", "dim", "page"),
    [((2, 2), 24, 4), ((4, 1), 16, 16), ((2, 1), 64, 128), ((6, 2), 5, 16), ((3, 3), 72, 12)],
    ids=["group1", "group4", "page128", "group3", "page12"],
)
def test_near_float64_around_edges(heads, dim, page):
    lengths = [0, 15, 64, 70]
    rows = Rows(lengths, heads, dim, page, widest=80)
    for row, tokens in enumerate((80, 1, 33, 64)):
        rows.check(attend(rows, tokens, row)[0], row, tokens)


@pytest.mark.parametrize("dtype", sorted({HALF, torch.float16}, key=str))
def test_dtypes(dtype):
    rows = Rows([100], (4, 2), 64, 32, dtype, widest=150)
    found, _ = attend(rows, 150)
    rows.check(found, 0, 150)
    assert found.dtype == dtype


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_chunks_after_each_other_are_one_sequence(dtype):
    """Wherever the first ends, and whatever stands in the table behind."""
    rows = Rows([10], (4, 2), 24, 16, dtype, widest=100)
    whole, wanted = attend(rows, 100)
    for split in (32, 37):
        parts = Rows([10], (4, 2), 24, 16, dtype, widest=100)
        first, pages = attend(parts, split)
        parts.pages, parts.lengths, parts.windows = pages, [10 + split], [parts.windows[0][split:]]
        second, pages = attend(parts, 100 - split, spare=3)
        torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-3 if dtype == HALF else 1e-6, rtol=1e-3)
        for found, expected in ((pages.keys, wanted.keys), (pages.values, wanted.values)):
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())
