import pytest
import torch

from headlong.backends.torch.kernels.attention import Stretch
from tests.backends.torch.gpu.test_attention import HALF, Rows

attention = pytest.importorskip("headlong.backends.torch.gpu.prompt_attention", reason="no Triton")


@pytest.fixture(params=[(32, 16), (64, 64)], ids=str)
def _tiles(request, monkeypatch):
    """Small tiles too: a long past is slow in the interpreter."""
    for name in ("TILES", "FEW_TILES", "EXACT_TILES"):
        monkeypatch.setattr(attention, name, (*request.param, 4, 2))


def attend(rows, tokens, row=0, spare=0, count=None):
    """A chunk of so many tokens after the row's past, of which some count, and the pages after it."""

    def one_row(pages, places, q, k, v):
        counted = None if count is None else torch.tensor([count], device=q.device)
        stretch = Stretch(places.positions, places.write_pages, places.read_pages[0], counted)
        return attention.chunk_attention(pages, stretch, q, k, v)

    counts = None if count is None else [count]
    (found,), pages = rows.attend([row], [tokens], counts, attend=one_row, spare=spare)
    return found, pages


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize(
    ("heads", "dim", "page"),
    [((1, 1), 24, 4), ((4, 1), 16, 16), ((2, 1), 64, 128), ((6, 2), 5, 16), ((1, 1), 72, 12)],
    ids=["page4", "group4", "page128", "group3", "page12"],
)
def test_near_float64_around_edges(heads, dim, page):
    rows = Rows([0, 15, 64], heads, dim, page, widest=40)
    for row, tokens in enumerate((40, 1, 33)):
        rows.check(attend(rows, tokens, row)[0], row, tokens)


@pytest.mark.parametrize("dtype", sorted({HALF, torch.float16}, key=str))
@pytest.mark.parametrize("programs", [0, 1000], ids=["many", "few"])
def test_dtypes(dtype, programs, monkeypatch):
    monkeypatch.setattr(attention, "PROGRAMS", programs)
    rows = Rows([100], (4, 2), 64, 32, dtype, widest=150)
    found, _ = attend(rows, 150)
    rows.check(found, 0, 150)
    assert found.dtype == dtype


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_chunks_after_each_other_are_one_sequence(dtype):
    """Wherever the first ends, and whatever stands in the table behind."""
    rows = Rows([10], (2, 1), 24, 16, dtype, widest=50)
    whole, wanted = attend(rows, 50)
    for split in (22, 37):
        parts = Rows([10], (2, 1), 24, 16, dtype, widest=50)
        first, pages = attend(parts, split)
        parts.pages, parts.lengths, parts.windows = pages, [10 + split], [parts.windows[0][split:]]
        second, pages = attend(parts, 50 - split, spare=3)
        torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-3 if dtype == HALF else 1e-6, rtol=1e-3)
        for found, expected in ((pages.keys, wanted.keys), (pages.values, wanted.values)):
            assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.usefixtures("_tiles")
@pytest.mark.parametrize("count", [0, 1, 40])
def test_padding_changes_nothing(count):
    """Nor does what it sees break: its outputs are numbers."""
    rows = Rows([21], (2, 1), 16, 16, widest=140)
    padded, pages = attend(rows, 140, spare=2, count=count)
    assert padded.isfinite().all()
    if count:
        whole, wanted = attend(rows, count)
        assert torch.equal(padded[:count], whole)
        others = [page for page in range(len(wanted.keys)) if page != 1]  # which takes what padding writes
        assert torch.equal(pages.keys[others].nan_to_num(), wanted.keys[others].nan_to_num())
