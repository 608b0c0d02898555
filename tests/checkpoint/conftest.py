"""Helpers for bad and good folders."""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headlong.errors import UserError


@pytest.fixture
def refused() -> Callable[..., str]:
    """Call something that must raise a UserError of one sentence; give the sentence."""

    def call(function: Callable[..., object], *args: object) -> str:
        with pytest.raises(UserError) as caught:
            function(*args)
        sentence = str(caught.value)
        assert sentence.endswith(".")
        assert "\n" not in sentence
        return sentence

    return call


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Set fields of a folder's config.json; None removes one."""

    def edit(folder: Path, **changes: Any) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return edit


@pytest.fixture
def edit_tensors() -> Callable[..., None]:
    """Pass a file's tensors through a function."""

    def edit(path: Path, change: Callable[[dict[str, Any]], None], form: str = "pt") -> None:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path, {"format": form})

    return edit


@pytest.fixture
def write_header() -> Callable[..., Path]:
    """A safetensors file with any header and any number of bytes after it."""

    def write(path: Path, header: Mapping[str, Any] | bytes, data: int) -> Path:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(data))
        return path

    return write
