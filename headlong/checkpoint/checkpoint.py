"""A model on disk: its config, its weights and what is known of its head."""

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from headlong.checkpoint.config import ModelConfig, eos_token_ids, read_config
from headlong.checkpoint.families import model_config
from headlong.checkpoint.find import find
from headlong.checkpoint.head import HeadFacts, head_facts
from headlong.checkpoint.packed import pair
from headlong.checkpoint.shards import gather
from headlong.checkpoint.weights import Weights


@dataclass(frozen=True)
class Checkpoint:
    """Everything a backend needs to load a model."""

    name: str  # as it was asked for
    folder: Path
    config: ModelConfig
    weights: Weights
    head: HeadFacts


def open_checkpoint(name: str | PathLike[str]) -> Checkpoint:
    """Find a model and read its headers; the weights themselves are read when asked for."""
    folder = find(name)
    raw = read_config(folder)
    config = model_config(raw, eos_token_ids(folder, raw))
    stored, skipped = gather(folder, raw)
    layout = config.layout(pair(stored, raw))
    weights = Weights(replace(layout, skipped={**layout.skipped, **skipped}))
    return Checkpoint(str(name), folder, config, weights, head_facts(config, weights, folder))
