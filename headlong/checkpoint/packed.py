"""Quantised tensors on disk: the words of a tensor with their scales and biases, expanded when they are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headlong.checkpoint.fields import Fields
from headlong.checkpoint.floats import NUMPY_DTYPES, Data
from headlong.checkpoint.quant import BITS, WORD_BITS, expand
from headlong.checkpoint.safetensors import Files, Stored

SETTINGS = ("quantization", "quantization_config")  # fields of config.json; MLX writes both
MODEL_PREFIX = re.compile(r"^((language_)?model\.)+")
BLOCK = 1 << 18  # weights expanded at a time: few enough to stay in the processor's cache
OTHERWISE = "use an unquantised copy of the model"
SAME_MODEL = "check that the config and the weights are of the same model"


@dataclass(frozen=True, kw_only=True)
class Packed(Stored):
    """Shape and elements are those of the weights, offset and bytes those of their words."""

    scales: Stored
    biases: Stored
    bits: int
    group_size: int

    @property
    def reads_as(self) -> str:
        return "float32"

    @property
    def kind(self) -> str:
        return f"{self.bits}-bit affine, groups of {self.group_size}"

    def fill(self, files: Files, start: int, out: Data) -> None:
        """As for any tensor; but pieces of a packed one begin and end with a row."""
        width = self.shape[-1]
        rows, first = out.reshape(-1, width), start // width
        height = max(1, BLOCK // width)
        for begin in range(0, len(rows), height):
            self._expand(files, first + begin, rows[begin : begin + height])

    def _expand(self, files: Files, row: int, out: Data) -> None:
        height, width = out.shape
        row_bytes, groups = width * self.bits // 8, width // self.group_size
        words = np.empty((height, row_bytes // 4), np.uint32)
        files.fill(self.path, self.offset + row * row_bytes, words)
        scales, biases = (
            np.empty((height, groups), NUMPY_DTYPES[stored.reads_as]) for stored in (self.scales, self.biases)
        )
        self.scales.fill(files, row * groups, scales)
        self.biases.fill(files, row * groups, biases)
        expand(words, scales, biases, self.bits, out)


def pair(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Words joined with their scales and biases into one tensor each; all others as they are."""
    paired = dict(stored)
    settings = _settings(config)
    for name, scales in stored.items():
        module = name.removesuffix(".scales")
        key = next((key for key in (f"{module}.weight", module) if key in stored), "")
        if module == name or not key or stored[key].dtype != "U32":
            continue
        biases = f"{module}.biases"
        paired[key] = _packed(stored[key], scales, stored.get(biases), _of_module(settings, module))
        if not paired[key].fault:
            del paired[name], paired[biases]
    return paired


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json says of quantisation: for all modules, and by path for some."""
    for field in SETTINGS:
        found = config.get(field)
        if isinstance(found, dict) and "group_size" in found:
            return {_bare(key): value for key, value in found.items()}
    return {}


def _bare(path: str) -> str:
    """A module's path without what precedes the language model's own, which files and configs write differently."""
    return MODEL_PREFIX.sub("", path)


def _of_module(settings: Mapping[str, Any], module: str) -> Fields | None:
    """The settings that hold for one module; None when it should not be quantised at all."""
    own = settings.get(_bare(module), True)
    if own is False:
        return None
    return Fields({**settings, **own} if isinstance(own, dict) else settings)


def _packed(words: Stored, scales: Stored, biases: Stored | None, settings: Fields | None) -> Stored:
    """The weights, or the words with the reason why they are none."""
    if settings is None:
        return _faulty(words, "has scales, and config.json says that it is not quantised", SAME_MODEL)
    if not settings.has("group_size"):
        return _faulty(words, "has scales, and config.json gives no group size for them", "fetch config.json again")
    mode = settings.text("mode", "affine")
    if mode != "affine":
        return _faulty(words, f"is quantised as {mode}, and this version reads affine", OTHERWISE)
    bits, group_size = settings.whole("bits"), settings.whole("group_size")
    if bits not in BITS:
        return _faulty(words, f"is quantised to {bits} bits, and this version reads 2, 4 and 8", OTHERWISE)
    if biases is None:
        return _faulty(words, "has scales and no biases, which affine quantisation needs", OTHERWISE)
    if scales.fault or biases.fault:
        return replace(words, fault=scales.fault or biases.fault)
    width = _width(words, scales, biases, bits, group_size)
    if not width:
        found = f"has shape {list(words.shape)}, its scales {list(scales.shape)} and its biases {list(biases.shape)}"
        return _faulty(words, f"{found}, which do not fit {bits} bits in groups of {group_size}", SAME_MODEL)
    weights = vars(words) | {"shape": (*words.shape[:-1], width), "fault": ""}
    return Packed(**weights, scales=scales, biases=biases, bits=bits, group_size=group_size)


def _width(words: Stored, scales: Stored, biases: Stored, bits: int, group_size: int) -> int:
    """Weights in a row; 0 when the shapes do not agree on it."""
    *rows, groups = scales.shape or (0,)
    width = groups * group_size
    count, rest = divmod(width * bits, WORD_BITS)
    return 0 if rest or words.shape != (*rows, count) or biases.shape != scales.shape else width


def _faulty(words: Stored, found: str, advice: str) -> Stored:
    return replace(words, fault=f"{words.name} {found}: {advice}.")
