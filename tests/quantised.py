"""Tiny checkpoints quantised in place, and plain twins that hold the numbers these expand to."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headlong.checkpoint.quant import quantize

Tensors = dict[str, torch.Tensor]


def quantise(
    folder: Path,
    bits: int = 8,
    group_size: int = 8,
    scales: str = "bfloat16",
    others: Mapping[str, object] | None = None,
    parts: str = "",
) -> Path:
    """Quantise every matrix that fits. `others` says for parts of names how many bits else, or False; `parts` limits
    it all to names that hold this text."""
    overrides: dict[str, object] = {}

    def pack(tensors: Tensors) -> Tensors:
        packed: Tensors = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            special = next((value for part, value in (others or {}).items() if part in name), None)
            width = bits if special is None else special
            if parts not in name or width is False or not _fits(name, tensor, width, group_size):
                packed[name] = tensor
                overrides.update({module: False} if special is False else {})
                continue
            if special is not None:
                overrides[module] = {"bits": special, "group_size": group_size}
            words, *rest = quantize(tensor.float().numpy(), width, group_size, scales)
            packed[name] = torch.from_numpy(words)
            for ending, array in zip(("scales", "biases"), rest, strict=True):
                packed[f"{module}.{ending}"] = torch.from_numpy(array).view(getattr(torch, scales))
        return packed

    for path in sorted(folder.rglob("*.safetensors")):
        _rewrite(path, pack)
    _reindex(folder)
    settings = {"group_size": group_size, "bits": bits, **overrides}
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization": settings, "quantization_config": settings})
    )
    return folder


def expand_files(folder: Path) -> Path:
    """The plain twin: every quantised tensor in float32, by an arithmetic that shares nothing with the package's."""

    def flatten(tensors: Tensors) -> Tensors:
        plain: Tensors = {}
        for name, tensor in tensors.items():
            module = name.removesuffix(".weight")
            if tensor.dtype == torch.uint32:
                scales, biases = (tensors[f"{module}.{ending}"].float().numpy() for ending in ("scales", "biases"))
                plain[name] = torch.from_numpy(reference(tensor.numpy(), scales, biases, settings_of(module)))
            elif not name.endswith((".scales", ".biases")):
                plain[name] = tensor
        return plain

    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization")
    del config["quantization_config"]

    def settings_of(module: str) -> int:
        return int(quantization.get(module, quantization)["bits"])

    (folder / "config.json").write_text(json.dumps(config))
    for path in sorted(folder.rglob("*.safetensors")):
        _rewrite(path, flatten)
    _reindex(folder)
    return folder


def reference(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """One value after the other out of a row's bits, taken as one long number."""
    flat = words.reshape(-1, words.shape[-1])
    count = words.shape[-1] * 32 // bits
    rows = []
    for row in flat:
        stream = sum(int(word) << (32 * place) for place, word in enumerate(row))
        rows.append([(stream >> (bits * place)) % 2**bits for place in range(count)])
    values = np.array(rows, np.float32).reshape(*words.shape[:-1], count)
    group = count // scales.shape[-1]
    return values * np.repeat(scales, group, -1) + np.repeat(biases, group, -1)


def _fits(name: str, tensor: torch.Tensor, bits: int, group_size: int) -> bool:
    matrix = tensor.is_floating_point() and tensor.dim() > 1 and "conv1d" not in name
    return matrix and tensor.shape[-1] % group_size == 0 and tensor.shape[-1] * bits % 32 == 0


def _rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file({name: tensor.contiguous() for name, tensor in change(load_file(path)).items()}, path, metadata)


def _reindex(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    if not path.is_file():
        return
    index: dict[str, str] = {}
    for shard in sorted(set(json.loads(path.read_text())["weight_map"].values())):
        with safe_open(folder / shard, "pt") as file:
            index |= dict.fromkeys(file.keys(), shard)
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}))
