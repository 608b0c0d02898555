"""The arithmetic of affine quantisation, both ways."""

import time

import numpy as np
import pytest

from headlong.checkpoint.floats import widen
from headlong.checkpoint.quant import expand, quantize
from tests.quantised import reference

TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
LIMIT_S, WEIGHTS = 0.5, 35_000_000  # of the model that comes with the package


def noise(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_layout_by_hand():
    """Value 0 in the lowest bits of word 0; a group of 4; the second group has a negative scale."""
    scales, biases = np.float32([[2, -1]]), np.float32([[10, 0.5]])
    packed = np.uint32([[0x87654321]])
    wanted = [[12, 14, 16, 18, -4.5, -5.5, -6.5, -7.5]]
    np.testing.assert_array_equal(expand(packed, scales, biases, 4), np.float32(wanted))
    np.testing.assert_array_equal(
        expand(np.uint32([[0x04030201]]), scales, biases, 8), np.float32([[12, 14, -2.5, -3.5]])
    )
    ones = np.float32([[1]])
    found = expand(np.uint32([[0b11100100]]), ones, 0 * ones, 2)
    np.testing.assert_array_equal(found, np.float32([[0, 1, 2, 3, *[0] * 12]]))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("shape", [(64,), (3, 96), (2, 5, 64)])
def test_expanding_is_what_the_layout_says(bits, shape):
    random = np.random.default_rng(1)
    words = random.integers(0, 2**32, (*shape[:-1], shape[-1] * bits // 32), dtype=np.uint32)
    scales, biases = (noise(*shape[:-1], shape[-1] // 16, seed=seed) for seed in (2, 3))
    found = expand(words, scales, biases, bits)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, reference(words, scales, biases, bits))


GROUPS = {
    "noise": noise(6, 64),
    "shifted": noise(6, 64) * 0.01 + 10,
    "shifted down": noise(6, 64) * 0.01 - 10,
    "one side": np.abs(noise(6, 64)),
    "tiny": noise(6, 64) * 1e-6,
    "outlier": np.where(noise(6, 64) > 2.3, 50, noise(6, 64)).astype(np.float32),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [16, 64])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("weights", GROUPS.values(), ids=GROUPS.keys())
def test_no_weight_is_further_off_than_half_a_step(bits, group_size, dtype, weights):
    packed, scales, biases = quantize(weights, bits, group_size, dtype)
    assert (packed.dtype, packed.shape) == (np.uint32, (6, 64 * bits // 32))
    assert (scales.dtype, scales.shape) == (biases.dtype, biases.shape) == (TYPES[dtype], (6, 64 // group_size))
    error = np.abs(expand(packed, scales, biases, bits) - weights)
    rounding = 4 * np.spacing(np.abs(weights))
    assert (error <= np.repeat(widen(scales), group_size, -1) / 2 * 1.00001 + rounding).all()


@pytest.mark.parametrize("dtype", TYPES)
def test_steps_are_no_longer_than_they_need_be(dtype):
    """Half a step of a range that is far too wide would satisfy the test above."""
    weights = noise(100, 64)
    _, scales, _ = quantize(weights, 8, 64, dtype)
    ranges = np.ptp(weights, axis=-1, keepdims=True)
    assert (widen(scales) <= ranges / 255 * 1.02).all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -2.5, 0.1, -0.1, 1e-9, 1e-30])
def test_groups_of_one_value(dtype, value):
    """Exact where the type can hold the value, and within half a step of what it can."""
    weights = np.full((2, 32), value, np.float32)
    packed, scales, biases = quantize(weights, 4, 16, dtype)
    found = expand(packed, scales, biases, 4)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, weights, rtol=2**-12, atol=np.float32(6e-8) if dtype == "float16" else 0)
    if value in (0.0, 1.0, -2.5):
        np.testing.assert_array_equal(found, weights)


def test_ranges_too_small_for_a_step():
    """Below the least normal float32 a step cannot be rounded up; what is beyond its range must not wrap around."""
    weights = (np.linspace(0, 357, 64).round() * np.float64(2**-149)).astype(np.float32)
    found = expand(*quantize(weights, 8, 64), 8)
    np.testing.assert_allclose(found, weights, rtol=0, atol=2e-43)


def test_what_is_quantised_already_comes_back_as_it_is():
    """Both ends of each group are on the grid, and scales and biases are numbers of the type."""
    values = np.random.default_rng(4).integers(0, 16, (5, 64), dtype=np.uint8)
    values[:, ::16], values[:, 15::16] = 0, 15
    weights = (values * np.float32(0.125) - 1).astype(np.float32)
    np.testing.assert_array_equal(expand(*quantize(weights, 4, 16, "bfloat16"), 4), weights)


@pytest.mark.parametrize(
    ("weights", "bits", "group_size", "dtype", "said"),
    [
        (np.zeros((2, 64), np.float32), 3, 64, "float32", "3 bits"),
        (np.zeros((2, 64), np.float32), 6, 64, "float32", "6 bits"),
        (np.zeros((2, 64), np.float32), 8, 48, "float32", "groups of 48"),
        (np.zeros((2, 64), np.float32), 8, 0, "float32", "groups of 0"),
        (np.zeros((2, 24), np.float32), 2, 8, "float32", "words of 16"),
        (np.full((2, 64), np.nan, np.float32), 8, 64, "float32", "not all finite"),
        (np.full((2, 64), -np.inf, np.float32), 8, 64, "bfloat16", "not all finite"),
        (np.full((2, 64), -1e5, np.float32), 8, 64, "float16", "too large for scales of float16"),
    ],
)
def test_what_cannot_be_quantised(refused, weights, bits, group_size, dtype, said):
    assert said in refused(quantize, weights, bits, group_size, dtype)


@pytest.mark.parametrize("bits", [4, 8])
def test_expanding_is_quick(bits):
    rows, width = 4096, 2048
    words = np.random.default_rng(5).integers(0, 2**32, (rows, width * bits // 32), dtype=np.uint32)
    scales = noise(rows, width // 64)
    out = np.empty((rows, width), np.float32)
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        expand(words, scales, scales, bits, out)
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < LIMIT_S * out.size / WEIGHTS
