"""What is in a checkpoint, whether it is whole, and what running it takes."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.config import ModelConfig, Shapes
from headlong.checkpoint.head import HeadFacts
from headlong.checkpoint.weights import HEAD

ITEM_BYTES = {"cpu": 4, "cuda": 2}  # float32, bfloat16


@dataclass(frozen=True)
class Parameters:
    """How many numbers there are, by part. A tied LM head counts as embedding alone."""

    embedding: int
    layers: int  # without experts
    experts: int
    lm_head: int
    mtp_head: int
    active: int  # what one token is multiplied with: the layers, its experts and the LM head, tied or not

    @property
    def total(self) -> int:
        return self.embedding + self.layers + self.experts + self.lm_head + self.mtp_head


@dataclass(frozen=True)
class Memory:
    """Bytes it takes to run on one kind of device."""

    weights: int
    state_per_sequence: int
    kv_per_token: int


@dataclass(frozen=True)
class Report:
    name: str
    folder: str
    family: str
    model_type: str
    context: int
    vocab: int
    tied: bool
    layers: Mapping[str, int]  # type → count
    experts: int
    experts_per_token: int
    parameters: Parameters
    head: HeadFacts
    norms: str  # how the trunk's are stored
    missing: tuple[str, ...]
    faulty: tuple[str, ...]  # a sentence for each tensor that is there and cannot be read
    leftover: tuple[str, ...]
    skipped: Mapping[str, int]
    storage: Mapping[str, int]  # how numbers are stored → how many of the parameters are, most first
    disk_bytes: int
    memory: Mapping[str, Memory]  # by device: cpu, cuda

    @property
    def whole(self) -> bool:
        """The trunk can be loaded as it is."""
        return not (self.missing or self.faulty or self.leftover)


def inspect(checkpoint: Checkpoint) -> Report:
    config, weights = checkpoint.config, checkpoint.weights
    wanted = config.expected()
    known = wanted.keys() | config.expected_head().keys()
    faults = [weights.fault(name, shape) for name, shape in wanted.items() if name in weights]
    used, experts = config.experts_used()
    return Report(
        name=checkpoint.name,
        folder=str(checkpoint.folder),
        family=config.family,
        model_type=config.model_type,
        context=config.max_position_embeddings,
        vocab=config.vocab_size,
        tied=config.tie_word_embeddings,
        layers=config.layer_counts(),
        experts=experts,
        experts_per_token=used,
        parameters=_parameters(config, checkpoint.head),
        head=checkpoint.head,
        norms=weights.trunk_norms,
        missing=tuple(name for name in wanted if name not in weights),
        faulty=tuple(filter(None, faults)),
        leftover=tuple(name for name in weights if name not in known and not name.startswith(HEAD)),
        skipped=weights.skipped,
        storage=_storage(checkpoint),
        disk_bytes=sum(path.stat().st_size for path in checkpoint.folder.rglob("*.safetensors")),
        memory={device: _memory(checkpoint, device) for device in ITEM_BYTES},
    )


def _parameters(config: ModelConfig, head: HeadFacts) -> Parameters:
    shapes = config.expected()
    embedding, lm_head = _count(shapes, "embed_tokens."), _count(shapes, "lm_head.")
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    layers = _count(shapes, "") - embedding - lm_head - experts
    used, held = config.experts_used()
    active = layers + (experts * used // held if held else 0) + (lm_head or embedding)
    return Parameters(embedding, layers, experts, lm_head, head.parameters, active)


def _count(shapes: Shapes, prefix: str) -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def _storage(checkpoint: Checkpoint) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, shape in {**checkpoint.config.expected(), **checkpoint.config.expected_head()}.items():
        if name in checkpoint.weights and not checkpoint.weights.fault(name, shape):
            for piece in checkpoint.weights.tensor(name).pieces:
                counts[piece.stored.kind] += piece.count
    return dict(counts.most_common())


def _memory(checkpoint: Checkpoint, device: str) -> Memory:
    """A CPU computes in float32 and keeps bfloat16 matrices as they are, with the LM head in 8 bits for drafting."""
    config, head = checkpoint.config, checkpoint.head
    shapes = config.expected() | (config.expected_head() if head.found else {})
    itemsize = ITEM_BYTES[device]
    if device == "cpu":
        weights = sum(math.prod(shape) * _cpu_itemsize(checkpoint, name) for name, shape in shapes.items())
        weights += config.vocab_size * config.hidden_size if head.found else 0
    else:
        weights = itemsize * sum(math.prod(shape) for shape in shapes.values())
    return Memory(
        weights=weights,
        state_per_sequence=config.state_bytes(itemsize),
        kv_per_token=config.kv_elements(with_head=head.found) * itemsize,
    )


def _cpu_itemsize(checkpoint: Checkpoint, name: str) -> int:
    matrix = name in checkpoint.weights and len(checkpoint.weights.shape(name)) > 1 and "conv1d" not in name
    halves = matrix and checkpoint.weights.tensor(name).pieces[0].stored.dtype == "BF16"
    return 2 if halves else 4
