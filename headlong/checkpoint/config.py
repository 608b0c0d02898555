"""What config.json says: the file itself, and what every family takes from it."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headlong.checkpoint.fields import Fields
from headlong.checkpoint.safetensors import Stored
from headlong.checkpoint.weights import Layout
from headlong.errors import UserError

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The facts every family has, and the questions every family answers."""

    family: str
    model_type: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    promises_head: bool

    @abstractmethod
    def expected(self) -> Shapes:
        """Every tensor of the trunk, by canonical name."""

    @abstractmethod
    def expected_head(self) -> Shapes:
        """Every tensor of the MTP head."""

    @abstractmethod
    def layout(self, stored: Mapping[str, Stored]) -> Layout:
        """How the canonical tensors are made of the stored ones."""

    @abstractmethod
    def layer_counts(self) -> dict[str, int]:
        """How many layers there are of each type."""

    @abstractmethod
    def kv_elements(self, with_head: bool) -> int:
        """Keys and values one token leaves behind."""

    @abstractmethod
    def state_bytes(self, itemsize: int) -> int:
        """Recurrent state of one sequence, however long it is; `itemsize` is that of the weights' type."""

    @abstractmethod
    def experts_used(self) -> tuple[int, int]:
        """Experts a token passes through, and experts there are; 0 and 0 for a dense model."""

    def no_head_reason(self) -> str:
        """Why a head of this config cannot be run whatever its tensors; empty when it can."""
        return ""


def read_config(folder: Path) -> dict[str, Any]:
    """config.json as it is."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: give the folder of a model, or a Hugging Face id such as org/name.")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json: give the folder that holds the model's config and weights.")
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file that must hold one JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is not readable as JSON ({error}): mend it or fetch it again.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} holds a {type(content).__name__}; a JSON object is wanted.")
    return content


def eos_token_ids(folder: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a text: generation_config.json first, then the config and its text part."""
    sources: list[Mapping[str, Any]] = [raw, raw.get("text_config") or {}]
    path = folder / "generation_config.json"
    if path.is_file():
        sources.insert(0, read_json(path))
    for source in sources:
        value = source.get("eos_token_id")
        if value is not None:
            return Fields({"eos_token_id": value if isinstance(value, list) else [value]}).wholes("eos_token_id")
    return ()
