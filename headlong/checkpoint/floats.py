"""Float types of weights in numpy, which has no bfloat16: its bits travel as uint16."""

from typing import Any

import numpy as np

Data = np.ndarray[Any, np.dtype[Any]]
Float32 = np.ndarray[Any, np.dtype[np.float32]]

NUMPY_DTYPES = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}


def widen(data: Data) -> Float32:
    """Any of the three types in float32; exact, and no copy of what is float32 already."""
    if data.dtype == np.uint16:  # the upper half of a float32
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32, copy=False)


def narrow(data: Float32, dtype: str) -> Data:
    """The nearest numbers of a type, ties to even; what is too large becomes infinite."""
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            return data.astype(NUMPY_DTYPES[dtype], copy=False)
    bits = data.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
