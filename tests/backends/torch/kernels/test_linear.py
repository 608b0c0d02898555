import subprocess
import sys

import pytest
import torch

from headlong.backends.torch.kernels.linear import FIXED_TILE, Int8Weight, Weight, linear
from headlong.backends.torch.kernels.pick import embed
from headlong.backends.torch.native.library import library, references_only

SHAPES = [(1, 1), (3, 5), (4, 32), (7, 33), (16, 64), (17, 31), (50, 37), (66, 96), (130, 257)]
PATHS = ("native", "onednn", "onednn-tiles", "plain-tiles")
ROWS = 40


def weight_of(matrix, path, monkeypatch):
    """A weight that multiplies in one of the four ways a machine may have."""
    if path == "native":
        if library() is None:
            pytest.skip("no C compiler")
        return Weight(matrix)
    if path == "plain-tiles":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN")
    with references_only():
        weight = Weight(matrix)
    assert (weight.native, weight.packed) == (None, path != "plain-tiles")
    if path == "onednn-tiles":
        weight.rows_agree = False
    elif path == "onednn" and not weight.rows_agree:
        pytest.skip("oneDNN's bits depend on the number of rows here, so tiles are used")
    return weight


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_near_float64_and_rows_do_not_see_each_other(shape, dtype, path, normal, monkeypatch):
    matrix, x = normal(*shape).to(dtype), normal(ROWS, shape[1])
    weight = weight_of(matrix, path, monkeypatch)
    y = linear(x, weight)
    bound = 1e-6 * (x.abs().double() @ matrix.abs().double().T)
    assert ((y - x.double() @ matrix.double().T).abs() <= bound).all()
    for rows in range(1, ROWS):
        assert torch.equal(linear(x[:rows], weight), y[:rows])
    for shift in (1, 3, FIXED_TILE, 29):  # another place in the call, and in its tile
        assert torch.equal(linear(x.roll(shift, 0), weight).roll(-shift, 0), y)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_a_packed_weight_are_found_again(shape, dtype, normal):
    matrix = normal(*shape).to(dtype)
    rows = torch.arange(shape[0]).flip(0)
    weight = Weight(matrix)
    assert torch.equal(embed(weight, rows, torch.float32), matrix[rows].float())
    assert torch.equal(embed(weight, rows, torch.bfloat16), matrix[rows].bfloat16())
    with references_only():  # it stays packed
        assert torch.equal(embed(weight, rows, torch.float32), matrix[rows].float())


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_prompt_has_the_bits_of_a_few_tokens(shape, dtype, normal):
    """Many rows go through the matrix in another order, but each product is the same sum."""
    weight, x = Weight(normal(*shape).to(dtype)), normal(131, shape[1])
    few = torch.cat([linear(part, weight) for part in x.split(5)])
    for rows in (47, 48, 49, 64, 128, 131):
        assert torch.equal(weight.multiply(x[:rows]), few[:rows])


@pytest.mark.parametrize("path", PATHS)
def test_a_bad_row_spoils_itself_alone(path, normal, monkeypatch):
    weight, x = weight_of(normal(20, 40), path, monkeypatch), normal(9, 40)
    y = linear(x, weight)
    x[4] = torch.nan
    spoilt = linear(x, weight)
    assert spoilt[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(spoilt[others], y[others])


def test_columns_of_a_wider_tensor(kernels, normal):
    weight, wide = Weight(normal(12, 33)), normal(5, 50)
    assert torch.equal(linear(wide[:, 7:40], weight), linear(wide[:, 7:40].contiguous(), weight))


def test_prefill_multiplies_the_same_matrix(kernels, normal):
    matrix, x = normal(40, 48), normal(33, 48)
    weight = Weight(matrix)
    torch.testing.assert_close(weight.multiply(x), linear(x, weight))


def in_8_bits(block):
    """Rows of a block as whole numbers of their 127th parts."""
    step = block.abs().amax(1, keepdim=True) / 127
    return (block / step).round() * step


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("shape", [(5, 3), (16, 64), (70, 100), (131, 37)], ids=str)
def test_int8(shape, normal):
    matrix, x = normal(*shape), normal(11, shape[1])
    matrix[1] = 0  # a row without a largest element
    weight = Int8Weight(library(), len(matrix), [matrix])
    codes = weight.packed.transpose(1, 2).contiguous().view(torch.uint8).flatten(0, 1)
    scales = weight.scales.flatten()[: shape[0], None]
    stored = (codes[: shape[0], : shape[1]].double() - 128) * scales
    assert ((stored - matrix).abs() <= 0.501 * scales).all()
    assert (codes[shape[0] :] == 128).all()
    assert (codes[:, shape[1] :] == 128).all()
    y = weight.multiply(x)
    rounded = torch.cat([in_8_bits(block) for block in x.double().split(64, 1)], 1)
    torch.testing.assert_close(y.double(), rounded @ stored.T, atol=1e-5, rtol=1e-5)
    for rows in range(1, 11):
        assert torch.equal(weight.multiply(x[:rows]), y[:rows])
    halved = Int8Weight(library(), len(matrix), [matrix[:2].bfloat16(), matrix[2:].bfloat16()])
    torch.testing.assert_close(halved.multiply(x), y, atol=0.05 * shape[1] ** 0.5, rtol=0)
    zeros = torch.zeros(1, shape[1])
    assert torch.equal(weight.multiply(zeros), torch.zeros(1, shape[0]))


THREADS = """
import hashlib, torch
from headlong.backends.torch.kernels.linear import Int8Weight, Weight, linear
from headlong.backends.torch.native.library import library
matrix, x = torch.randn(301, 257), torch.randn(69, 257)
weights = [Weight(matrix), Weight(matrix.bfloat16())]
for _ in range(2):
    found = [linear(part, weight) for weight in weights for part in (x, x[:9])]
    found.append(Int8Weight(library(), len(matrix), [matrix]).multiply(x))
    print(hashlib.sha256(torch.cat(found).numpy().tobytes()).hexdigest())
    library().use_threads(3)
"""


@pytest.mark.skipif(library() is None, reason="no C compiler")
def test_the_number_of_threads_changes_no_bit(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    one, three = done.stdout.split()
    assert one == three
