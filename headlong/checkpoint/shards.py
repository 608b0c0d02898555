"""The files a model is made of: its shards, and the file that may hold its MTP head beside them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headlong.checkpoint.config import read_json
from headlong.checkpoint.safetensors import Stored, read_header
from headlong.checkpoint.weights import HEAD
from headlong.errors import UserError

INDEX = "model.safetensors.index.json"
HEAD_FILES = ("mtp.safetensors", "mtp/weights.safetensors", "model-mtp.safetensors", "model-mtp-head.safetensors")
HEAD_PREFIXES = ("language_model.", "model.")
SECOND_HEAD = "second MTP head"


def gather(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Stored], dict[str, int]]:
    """Every stored tensor by name, and how many were left aside by kind. Reads headers only."""
    shards = _indexed(folder) if (folder / INDEX).is_file() else _unindexed(folder)
    stored: dict[str, Stored] = {}
    for tensors in shards.values():
        _add(stored, {item.name: item for item in tensors})
    if not stored:
        raise UserError(f"{folder} has no weights: it needs *.safetensors files beside its config.json.")
    head = {_head_name(item.name): item for path in _head_files(folder, config, shards) for item in read_header(path)}
    if any(HEAD in name for name in stored):
        return stored, {SECOND_HEAD: len(head)} if head else {}
    _add(stored, head)
    return stored, {}


def _indexed(folder: Path) -> dict[Path, list[Stored]]:
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict):
        raise UserError(f"{folder / INDEX} has no weight_map: fetch it again.")
    shards: dict[Path, list[Stored]] = {}
    for file in sorted(set(map(str, named.values()))):
        path = folder / file
        if not path.is_file():
            raise UserError(f"{folder} has no {file}, which its {INDEX} names: fetch the file again.")
        shards[path] = read_header(path)
    held = {(path, item.name) for path, tensors in shards.items() for item in tensors}
    for name, file in named.items():
        if (folder / str(file), name) not in held:
            raise UserError(f"{file} has no tensor {name}, which {INDEX} says it holds: fetch the file again.")
    return shards


def _unindexed(folder: Path) -> dict[Path, list[Stored]]:
    shards = {path: read_header(path) for path in sorted(folder.glob("*.safetensors"))}
    return {path: tensors for path, tensors in shards.items() if not _holds_head_only(path, tensors)}


def _holds_head_only(path: Path, tensors: list[Stored]) -> bool:
    return "mtp" in path.name.lower() and not any(item.name.endswith("embed_tokens.weight") for item in tensors)


def _head_files(folder: Path, config: Mapping[str, Any], shards: Mapping[Path, object]) -> list[Path]:
    """The first file that looks like a head's and is not one of the shards, as a list of one or none."""
    extra = config.get("mlx_lm_extra_tensors")
    named = str(extra.get("mtp_file", "")) if isinstance(extra, dict) else ""
    likely = [folder / name for name in (named, *HEAD_FILES) if name and _is_inside(name)]
    likely += [path for path in sorted(folder.glob("*.safetensors")) if "mtp" in path.name.lower()]
    return [path for path in likely if path.is_file() and path not in shards][:1]


def _is_inside(name: str) -> bool:
    return not Path(name).is_absolute() and ".." not in Path(name).parts


def _head_name(name: str) -> str:
    """Some files of a head leave the `mtp.` out."""
    for prefix in HEAD_PREFIXES:
        name = name.removeprefix(prefix)
    return name if name.startswith(HEAD) else HEAD + name


def _add(stored: dict[str, Stored], more: Mapping[str, Stored]) -> None:
    for name, item in more.items():
        if name in stored:
            files = f"{stored[name].path.name} and {item.path.name}"
            raise UserError(f"{name} is in both {files}: keep the files of one model in the folder.")
        stored[name] = item
