"""Linear layers whose rows do not see each other: a row's bits are the same whatever stands in the other rows."""

import torch
from torch import Tensor

FIXED_TILE = 16  # rows in one call where a library's bits depend on how many rows there are
PROBED_ROWS = (3, 4, 9, 17)


class Weight:
    """A matrix [out, in], in the layout its device multiplies fastest."""

    def __init__(self, matrix: Tensor) -> None:
        self.out_features, self.in_features = matrix.shape
        self.packed = _can_pack(matrix)
        self.matrix = torch.ops.mkldnn._reorder_linear_weight(matrix, None) if self.packed else matrix
        self.rows_agree = self.packed and _probe(self)

    def multiply(self, x: Tensor) -> Tensor:
        """All rows in one call."""
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.matrix, None, "none", [], "")
        return torch.nn.functional.linear(x, self.matrix)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [N, in] -> [N, out], each row as if it were alone."""
    rows = x.shape[0]
    if weight.rows_agree:
        # One row takes a matrix-vector path with other bits, so it travels with a copy of itself.
        return weight.multiply(x) if rows > 1 else weight.multiply(x.repeat(2, 1))[:1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % FIXED_TILE))
    return torch.cat([weight.multiply(tile) for tile in padded.split(FIXED_TILE)])[:rows]


def _can_pack(matrix: Tensor) -> bool:
    return matrix.device.type == "cpu" and matrix.dtype == torch.float32 and torch.backends.mkldnn.is_available()


_probed: dict[tuple[int, int], bool] = {}


def _probe(weight: Weight) -> bool:
    """Whether oneDNN on this machine gives a row of this shape the same bits in every number of rows."""
    shape = (weight.out_features, weight.in_features)
    if shape not in _probed:
        x = torch.randn(max(PROBED_ROWS), weight.in_features, generator=torch.Generator().manual_seed(0))
        pair = weight.multiply(x[:2])
        _probed[shape] = all(torch.equal(weight.multiply(x[:rows])[:2], pair) for rows in PROBED_ROWS)
    return _probed[shape]
