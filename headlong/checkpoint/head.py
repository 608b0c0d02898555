"""Is a whole MTP head there? If not, why not."""

import math
from dataclasses import dataclass
from pathlib import Path

from headlong.checkpoint.config import ModelConfig
from headlong.checkpoint.weights import HEAD, Weights


@dataclass(frozen=True)
class HeadFacts:
    """What there is of a head. Only a whole one is `found`."""

    found: bool
    where: str  # the files that hold it
    tensors: int
    parameters: int
    missing: tuple[str, ...]
    convention: str  # how its norms are stored, and by what that was told
    reason: str  # why it is not found, in one sentence; empty when it is


def head_facts(config: ModelConfig, weights: Weights, folder: Path) -> HeadFacts:
    names = [name for name in weights if name.startswith(HEAD)]
    wanted = config.expected_head()
    files = {piece.stored.path for name in names for piece in weights.tensor(name).pieces}
    reason = _reason(config, weights, names)
    return HeadFacts(
        found=not reason,
        where=", ".join(sorted(path.relative_to(folder).as_posix() for path in files)),
        tensors=len(names),
        parameters=sum(math.prod(shape) for name, shape in wanted.items() if name in weights),
        missing=tuple(name for name in wanted if name not in weights) if names else (),
        convention=weights.head_norms,
        reason=reason,
    )


def _reason(config: ModelConfig, weights: Weights, names: list[str]) -> str:
    if not names:
        if config.promises_head:
            return "config.json promises an MTP head, but the model's files hold no mtp.* tensors."
        return "the model has no MTP head: config.json names none and its files hold no mtp.* tensors."
    if config.no_head_reason():
        return config.no_head_reason()
    wanted = config.expected_head()
    missing = [name for name in wanted if name not in weights]
    if missing:
        return f"{len(missing)} of the MTP head's {len(wanted)} tensors are missing, {missing[0]} among them."
    for name, shape in wanted.items():
        if weights.fault(name, shape):
            return weights.fault(name, shape)
    unknown = [name for name in names if name not in wanted]
    if unknown:
        return f"the MTP head has {len(unknown)} tensors this version does not know, {unknown[0]} among them."
    return ""
