"""The safetensors format: what a file holds, told by its header, and the bytes of one tensor at a time."""

import json
import math
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from headlong.checkpoint.floats import NUMPY_DTYPES, Data
from headlong.errors import UserError

PLAIN_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "I8", "U8", "BOOL"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the format's own limit
AGAIN = "fetch the file again"


class Files:
    """Files that tensors are read from; each is opened once and kept open until the end."""

    def __init__(self) -> None:
        self._open: dict[Path, FileIO] = {}

    def __enter__(self) -> "Files":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    def fill(self, path: Path, offset: int, out: Data) -> None:
        """Fill an array, which must be contiguous, with the bytes at the offset."""
        if path not in self._open:
            self._open[path] = path.open("rb", buffering=0)
        file, buffer = self._open[path], out.reshape(-1).view(np.uint8).data
        file.seek(offset)
        done = 0
        while done < len(buffer):
            count = file.readinto(buffer[done:])
            if not count:
                raise UserError(f"{path} ends {len(buffer) - done:,} bytes before its tensors do: {AGAIN}.")
            done += count


@dataclass(frozen=True)
class Stored:
    """One tensor in a file: where its bytes are."""

    name: str
    dtype: str  # the format's own name: BF16, F32, U32, F8_E4M3, ...
    shape: tuple[int, ...]
    path: Path
    offset: int  # from the start of the file
    nbytes: int
    format: str = ""  # the file's own word for who wrote it: "pt", "mlx" or nothing
    fault: str = ""  # why it cannot be read, in one sentence

    @property
    def reads_as(self) -> str:
        """The type of what is read: bfloat16, float16 or float32."""
        return PLAIN_DTYPES[self.dtype]

    @property
    def kind(self) -> str:
        """How its numbers are stored, in words."""
        return self.reads_as

    def fill(self, files: Files, start: int, out: Data) -> None:
        """Fill an array with the elements from `start` on."""
        files.fill(self.path, self.offset + start * out.itemsize, out)

    def read(self) -> Data:
        """The tensor alone. bfloat16 comes as uint16."""
        if self.fault:
            raise UserError(self.fault)
        array = np.empty(self.shape, NUMPY_DTYPES[self.reads_as])
        with Files() as files:
            self.fill(files, 0, array)
        return array


def read_header(path: Path) -> list[Stored]:
    """All tensors of a file, without reading any of them."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < LENGTH_BYTES or length > LONGEST_HEADER or LENGTH_BYTES + length > size:
            wanted = LENGTH_BYTES + length if len(start) == LENGTH_BYTES else LENGTH_BYTES
            raise UserError(f"{path} has {size:,} bytes and its header alone wants {wanted:,}: {AGAIN}.")
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} has a header that is not JSON ({error}): {AGAIN}.") from error
    if not isinstance(header, dict):
        raise UserError(f"{path} has a header that is not a JSON object: {AGAIN}.")
    metadata = header.pop("__metadata__", None)
    form = str(metadata.get("format", "")) if isinstance(metadata, dict) else ""
    data = LENGTH_BYTES + length
    found = [_entry(path, name, entry, data, form) for name, entry in header.items()]
    _check_bytes(path, size, data, found)
    return found


def _entry(path: Path, name: str, entry: Any, data: int, form: str) -> Stored:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
        first, last = (int(n) for n in entry["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} describes {name} without a dtype, a shape and two offsets: {AGAIN}.") from error
    if dtype not in BITS:
        raise UserError(
            f"{path} stores {name} as {dtype}, which is no known type: use an unquantised copy of the model."
        )
    wanted = math.prod(shape) * BITS[dtype] // 8
    if first < 0 or last - first != wanted:
        raise UserError(f"{path} gives {name} {last - first:,} bytes and its shape wants {wanted:,}: {AGAIN}.")
    fault = "" if dtype in PLAIN_DTYPES else _unreadable(path, name, dtype)
    return Stored(name, dtype, shape, path, data + first, wanted, form, fault)


def _unreadable(path: Path, name: str, dtype: str) -> str:
    """The sentence for a tensor that is not stored as plain floats."""
    kind = {"U32": "MLX-quantised", "F8_E4M3": "FP8-quantised"}.get(dtype, "probably quantised")
    return (
        f"{name} in {path.name} is stored as {dtype} ({kind}), and this version reads bfloat16, "
        f"float16 and float32: use an unquantised copy of the model."
    )


def _check_bytes(path: Path, size: int, data: int, found: list[Stored]) -> None:
    end = data
    for stored in sorted(found, key=lambda stored: (stored.offset, stored.nbytes)):
        if stored.offset < end:
            raise UserError(f"{path} gives the same bytes to {stored.name} and to another tensor: {AGAIN}.")
        end = stored.offset + stored.nbytes
    if end > size:
        raise UserError(f"{path} has {size:,} bytes and its tensors want {end:,}: {AGAIN}.")
