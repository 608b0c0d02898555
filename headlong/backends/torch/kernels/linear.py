"""Linear layers whose rows do not see each other: a row's bits are the same whatever stands in the other rows."""

import ctypes

import torch
from torch import Tensor

from headlong.backends.torch.native.library import library

FIXED_TILE = 16  # rows in one call where a library's bits depend on how many rows there are
PROBED_ROWS = (3, 4, 9, 17)


class Weight:
    """A matrix [out, in] in the layout its device multiplies fastest.

    On a CPU with our own kernels it keeps its stored type, since bfloat16 widens to float32 exactly and half the
    bytes are half the time. Otherwise it is float32 packed by oneDNN there, and as it is everywhere else.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.out_features, self.in_features = matrix.shape
        cpu = matrix.device.type == "cpu"
        self.native = library() if cpu and matrix.dtype in (torch.float32, torch.bfloat16) else None
        self.packed = cpu and not self.native and torch.backends.mkldnn.is_available()
        if self.packed:
            matrix = torch.ops.mkldnn._reorder_linear_weight(matrix.float(), None)
        self.matrix = matrix if self.packed else matrix.contiguous()
        self.rows_agree = self.packed and _probe(self)

    def multiply(self, x: Tensor) -> Tensor:
        """Many rows in one call."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.matrix, None, "none", [], "")
        return torch.nn.functional.linear(x, self.matrix.to(x.dtype))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [N, in] -> [N, out], each row as if it were alone."""
    rows = x.shape[0]
    if weight.native:
        return _native(x.contiguous(), weight, weight.native)
    if weight.rows_agree:
        # One row takes a matrix-vector path with other bits, so it travels with a copy of itself.
        return weight.multiply(x) if rows > 1 else weight.multiply(torch.cat([x, x]))[:1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % FIXED_TILE))
    return torch.cat([weight.multiply(tile) for tile in padded.split(FIXED_TILE)])[:rows]


def _native(x: Tensor, weight: Weight, lib: ctypes.CDLL) -> Tensor:
    rows, size, out = x.shape[0], weight.in_features, weight.out_features
    y = x.new_empty(rows, out)
    half = weight.matrix.dtype == torch.bfloat16
    lib.linear(y.data_ptr(), x.data_ptr(), weight.matrix.data_ptr(), half, rows, size, out)
    return y


_probed: dict[tuple[int, int], bool] = {}


def _probe(weight: Weight) -> bool:
    """Whether oneDNN on this machine gives a row of this shape the same bits in every number of rows."""
    shape = (weight.out_features, weight.in_features)
    if shape not in _probed:
        x = torch.randn(max(PROBED_ROWS), weight.in_features, generator=torch.Generator().manual_seed(0))
        pair = weight.multiply(x[:2])
        _probed[shape] = all(torch.equal(weight.multiply(x[:rows])[:2], pair) for rows in PROBED_ROWS)
    return _probed[shape]


class Int8Weight:
    """A copy of a matrix in 8 bits with one scale a row, for products that need not be exact."""

    def __init__(self, matrix: Tensor, lib: ctypes.CDLL) -> None:
        self.lib, (self.out_features, size) = lib, matrix.shape
        self.in_features = -(-size // 64) * 64
        self.codes = torch.zeros(self.out_features, self.in_features, dtype=torch.int8)
        self.scales = torch.empty(self.out_features)
        # A few rows at a time, or the largest matrix of a model would be in memory twice.
        parts = (self.codes.split(4096), matrix.split(4096), self.scales.split(4096))
        for codes, rows, scales in zip(*parts, strict=True):
            torch.div(rows.abs().amax(1).float(), 127, out=scales).clamp_(min=1e-30)
            codes[:, :size] = (rows.float() / scales[:, None]).round_()

    def multiply(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], float32."""
        rows = x.shape[0]
        x = torch.nn.functional.pad(x, (0, self.in_features - x.shape[1])).contiguous()
        y = x.new_empty(rows, self.out_features)
        pointers = (t.data_ptr() for t in (y, x, self.codes, self.scales))
        self.lib.linear_int8(*pointers, rows, self.in_features, self.out_features)
        return y
