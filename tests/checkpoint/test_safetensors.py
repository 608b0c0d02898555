"""The reader of headers and tensors, and every way a file can be broken."""

import struct
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headlong.checkpoint.safetensors import read_header

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def test_reads_what_safetensors_writes(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(4).to(torch.bfloat16),
        "c": torch.randn(2, 1, 3).half(),
        "d": torch.tensor(1.5),
        "e": torch.empty(0, 4),
    }
    save_file(tensors, tmp_path / "x.safetensors", {"format": "pt"})
    found = {stored.name: stored for stored in read_header(tmp_path / "x.safetensors")}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].format == "pt"
        raw = tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
        np.testing.assert_array_equal(found[name].read(), raw.numpy())


def test_format_may_be_missing(tmp_path, write_header):
    (stored,) = read_header(write_header(tmp_path / "x.safetensors", {"a": F32}, 8))
    assert stored.format == ""


@pytest.mark.parametrize(
    ("header", "data", "said"),
    [
        (b"{not json", 8, "not JSON"),
        (b"[1]", 8, "not a JSON object"),
        ({"a": F32}, 5, "tensors want"),
        ({"a": {"dtype": "F32"}}, 8, "without a dtype"),
        ({"a": {**F32, "shape": [3]}}, 12, "8 bytes and its shape wants 12"),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, 8, "8 bytes"),
        ({"a": {**F32, "dtype": "Q3"}}, 8, "Q3"),
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, 12, "same bytes"),
    ],
)
def test_broken_header(tmp_path, refused, write_header, header, data, said):
    path = write_header(tmp_path / "x.safetensors", header, data)
    sentence = refused(read_header, path)
    assert said in sentence
    assert path.name in sentence


@pytest.mark.parametrize("content", [b"", b"123", struct.pack("<Q", 50) + b"{}", struct.pack("<Q", 2**60) + b"{}"])
def test_file_shorter_than_its_header(tmp_path, refused, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert f"has {len(content)} bytes" in refused(read_header, path)


def test_truncated_file_says_found_and_wanted(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    sentence = refused(read_header, path)
    assert f"{len(whole) - 1000:,}" in sentence
    assert f"{len(whole):,}" in sentence


def test_file_cut_after_it_was_opened(tmp_path, refused):
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(1000)}, path)
    (stored,) = read_header(path)
    path.write_bytes(path.read_bytes()[:-1000])
    assert "1,000 bytes before" in refused(stored.read)


@pytest.mark.parametrize(
    ("dtype", "said"), [("U32", "MLX-quantised"), ("F8_E4M3", "FP8-quantised"), ("I64", "quantised")]
)
def test_other_types_are_refused_when_read(tmp_path, refused, write_header, dtype, said):
    width = {"U32": 4, "F8_E4M3": 1, "I64": 8}[dtype]
    entry = {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * width]}
    (stored,) = read_header(write_header(tmp_path / "x.safetensors", {"a.weight": entry}, 2 * width))
    sentence = refused(stored.read)
    assert said in sentence
    assert "bfloat16, float16 and float32" in sentence


def test_reading_one_tensor_reads_no_other(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({name: torch.zeros(250_000) for name in "abcdefgh"}, path)
    found = {stored.name: stored for stored in read_header(path)}
    tracemalloc.start()
    array = found["d"].read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.nbytes <= peak < 1.2 * array.nbytes
