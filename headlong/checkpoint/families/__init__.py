"""Which model types are known, and the family that reads each."""

from collections.abc import Callable, Mapping
from typing import Any

from headlong.checkpoint.config import ModelConfig
from headlong.checkpoint.families import qwen3_5
from headlong.errors import UserError

Reader = Callable[[Mapping[str, Any], tuple[int, ...]], ModelConfig]

READERS: dict[str, Reader] = dict.fromkeys(qwen3_5.MODEL_TYPES, qwen3_5.read)


def model_config(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The config as its family understands it."""
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in READERS:
        found = f"model_type {model_type!r}" if model_type else "no model_type"
        raise UserError(f"config.json has {found}; this version runs {', '.join(sorted(READERS))}.")
    return READERS[model_type](raw, eos_token_ids)
