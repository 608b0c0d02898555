"""Linear layers whose rows do not see each other: a row's bits are the same whatever stands in the other rows."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from headlong.backends.torch.gpu.paths import fused, products
from headlong.backends.torch.kernels.norm import swiglu
from headlong.backends.torch.native import huge
from headlong.backends.torch.native.arena import fresh
from headlong.backends.torch.native.library import Kernels, library

HALF = {torch.float32: False, torch.bfloat16: True}  # types of weights that our kernels take
BLOCK = 32  # elements that rows of packed weights are whole blocks of
FIXED_TILE = 16  # rows in one call where a library's bits depend on how many rows there are
PROBED_ROWS = (3, 4, 9, 17)


class Weight:
    """A matrix [out, in] in the layout its device multiplies fastest.

    On a CPU with our own kernels it is packed for them in its stored type, since bfloat16 widens to float32 exactly and
    half the bytes are half the time. Otherwise it is float32 packed by oneDNN there, and as it is everywhere else.
    """

    def __init__(self, matrix: Tensor) -> None:
        self.out_features, self.in_features = matrix.shape
        cpu = matrix.device.type == "cpu"
        self.native = library() if cpu and matrix.dtype in HALF else None
        self.packed = cpu and not self.native and torch.backends.mkldnn.is_available()
        if self.native:
            matrix = _packed(matrix.contiguous(), self.native)
        elif self.packed:
            matrix = torch.ops.mkldnn._reorder_linear_weight(matrix.float(), None)
        self.matrix = matrix if self.packed else matrix.contiguous()
        self.rows_agree = self.packed and _agrees(self, _any_number)
        self.tile = FIXED_TILE if _agrees(self, _any_place) else 1  # rows multiplied together where that matters

    def multiply(self, x: Tensor) -> Tensor:
        """Many rows in one call; with our own kernels each as if it were alone."""
        if self.native:
            x, rows = x.contiguous(), x.shape[0]
            y = fresh(x, rows, self.out_features)
            half, sizes = HALF[self.matrix.dtype], (rows, self.in_features, self.out_features)
            self.native.linear(y.data_ptr(), x.data_ptr(), self.matrix.data_ptr(), half, *sizes)
            return y
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.matrix, None, "none", [], "")
        return torch.nn.functional.linear(x, self.matrix.to(x.dtype))


def logits(x: Tensor, weight: "Weight | Int8Weight") -> Tensor:
    """x [N, in] -> [N, out] in float32, each row as if it were alone."""
    if isinstance(weight, Weight) and fused(x, weight.matrix):
        return products().linear(x, weight.matrix, dtype=torch.float32)
    return linear(x, weight).float()


def linear(x: Tensor, weight: "Weight | Int8Weight") -> Tensor:
    """x [N, in] -> [N, out], each row as if it were alone."""
    rows = x.shape[0]
    if isinstance(weight, Int8Weight) or weight.native:
        return weight.multiply(x)
    if fused(x, weight.matrix):
        return products().linear(x, weight.matrix)
    if weight.rows_agree:
        # One row takes a matrix-vector path with other bits, so it travels with a copy of itself.
        return weight.multiply(x) if rows > 1 else weight.multiply(torch.cat([x, x]))[:1]
    padded = torch.nn.functional.pad(x, (0, 0, 0, -rows % weight.tile))
    # A copy, because bits may depend on the address too.
    return torch.cat([weight.multiply(tile.clone()) for tile in padded.split(weight.tile)])[:rows]


def linear_swiglu(x: Tensor, weight: "Weight | Int8Weight") -> Tensor:
    """x [N, in], weight [2 I, in] with the gate first -> silu(gate) * up, [N, I]."""
    if isinstance(weight, Weight) and fused(x, weight.matrix):
        return products().linear_swiglu(x, weight.matrix)
    return swiglu(linear(x, weight))


def _packed(matrix: Tensor, lib: Kernels) -> Tensor:
    rows, size = matrix.shape
    packed = huge.empty((-(-rows // lib.strip_rows) * lib.strip_rows, -(-size // BLOCK) * BLOCK), matrix.dtype)
    lib.pack_linear(packed.data_ptr(), matrix.data_ptr(), HALF[matrix.dtype], size, rows)
    return packed


_probed: dict[tuple[object, ...], bool] = {}


def _agrees(weight: Weight, probe: Callable[[Weight, Tensor], bool]) -> bool:
    """What a probe finds on this machine; it is held once for all weights of a shape and a layout."""
    which = (weight.out_features, weight.in_features, weight.packed, probe)
    if weight.native or weight.matrix.device.type != "cpu":
        return True
    if which not in _probed:
        x = torch.randn(FIXED_TILE + 1, weight.in_features, generator=torch.Generator().manual_seed(0))
        _probed[which] = probe(weight, x)
    return _probed[which]


def _any_number(weight: Weight, x: Tensor) -> bool:
    """Whether a row has the same bits in every number of rows."""
    pair = weight.multiply(x[:2])
    return all(torch.equal(weight.multiply(x[:rows])[:2], pair) for rows in PROBED_ROWS)


def _any_place(weight: Weight, x: Tensor) -> bool:
    """Whether a row has the same bits wherever it stands in a tile."""
    tile = x[:FIXED_TILE]
    found = weight.multiply(tile)
    return all(torch.equal(weight.multiply(tile.roll(place, 0)).roll(-place, 0), found) for place in range(FIXED_TILE))


class Int8Weight:
    """A copy of a matrix in 8 bits with one scale a row, for products that need not be exact. The tokens are rounded to
    8 bits as well, with a scale for each 64 of them: then a product is as fast as its bytes arrive."""

    def __init__(self, lib: Kernels, rows: int, matrices: Iterable[Tensor]) -> None:
        """Of matrices that share their input, stacked: so many rows in all."""
        self.lib, self.out_features = lib, rows
        bands = -(-rows // lib.band_rows)
        self.scales = torch.zeros(bands, lib.band_rows, dtype=torch.float32)
        done = 0
        for matrix in matrices:
            if not done:
                self.in_features = -(-matrix.shape[1] // 64) * 64
                self.packed = huge.empty((bands, self.in_features // 4, lib.band_rows), torch.int32)
                self.packed.view(torch.uint8).fill_(128)  # stands for 0
            for part in matrix.split(64):  # or the largest matrix of a model would be in memory twice
                self._pack(part, torch.arange(done, done + len(part)))
                done += len(part)

    def _pack(self, part: Tensor, rows: Tensor) -> None:
        """Four codes of a row are a word; the words of a band's rows stand side by side."""
        scales = (part.abs().amax(1).float() / 127).clamp_(min=1e-30)
        codes = torch.full((len(part), self.in_features), 128, dtype=torch.uint8)
        codes[:, : part.shape[1]] = (part.float() / scales[:, None]).round_().add_(128)
        band, place = rows // self.lib.band_rows, rows % self.lib.band_rows
        self.packed[band, :, place] = codes.view(torch.int32)
        self.scales[band, place] = scales

    def multiply(self, x: Tensor) -> Tensor:
        """x [N, in] -> [N, out], float32."""
        x, (rows, size) = x.contiguous(), x.shape
        y = fresh(x, rows, self.out_features)
        pointers = (t.data_ptr() for t in (y, x, self.packed, self.scales))
        self.lib.linear_int8(*pointers, rows, size, self.in_features, self.out_features)
        return y
