"""Norm weights on disk: the factor itself (absolute), or what is added to 1 (delta); told once a trunk, once a head.

A transposed convolution or the size of the weights is a fact; a file's own label is only a claim. A raw head is
often saved beside a converted trunk under the trunk's label, so a plain fact outweighs the label.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headlong.checkpoint.safetensors import Stored
from headlong.checkpoint.tensor import as_float32, whole

LOW_NORMS = ("layernorm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
QK_NORMS = ("q_norm.weight", "k_norm.weight")
# means seen in released heads: 0.30 to 0.39 as delta, from 0.87 as absolute; q and k up to 0.75, and from 1.73
LOW_LIMIT, SURE_LOW_LIMIT, QK_LIMIT = 0.5, 0.75, 1.25
LABELS = {"pt": "delta", "mlx": "absolute"}


@dataclass(frozen=True)
class Norms:
    """The decision, and what it rests on."""

    kind: str  # "delta", "absolute", or empty when there are none
    evidence: str = ""

    @property
    def shift(self) -> float:
        return 1.0 if self.kind == "delta" else 0.0

    def __str__(self) -> str:
        return f"{self.kind} ({self.evidence})" if self.kind else ""


def trunk_norms(stored: Mapping[str, Stored]) -> Norms:
    """By the convolution's shape, then the files' label, then key names, then the weights themselves."""
    verdict = _by_convolution(stored) or _by_label(stored) or _by_trunk_keys(stored) or _by_size(stored, sure=False)
    return verdict or Norms("")


def head_norms(stored: Mapping[str, Stored]) -> Norms:
    """By the weights themselves where they are clear, then the files' label, then key names, then the weights again."""
    clear = _by_size(stored, sure=True)
    return clear or _by_label(stored) or _by_head_keys(stored) or _by_size(stored, sure=False) or Norms("")


def _by_convolution(stored: Mapping[str, Stored]) -> Norms | None:
    for name, item in stored.items():
        if name.endswith("conv1d.weight") and len(item.shape) == 3 and max(item.shape[1:]) > 1:
            if item.shape[-1] == 1:
                return Norms("absolute", "convolutions are [C, K, 1]")
            return Norms("delta", "convolutions are [C, 1, K]")
    return None


def _by_label(stored: Mapping[str, Stored]) -> Norms | None:
    labels = {item.format for item in stored.values() if item.format}
    if len(labels) == 1 and labels <= LABELS.keys():
        label = labels.pop()
        return Norms(LABELS[label], f"files say {label}")
    return None


def _by_trunk_keys(stored: Mapping[str, Stored]) -> Norms | None:
    names = [item.name for item in stored.values()]
    if any(name.startswith("language_model.model.") or ".switch_mlp." in name for name in names):
        return Norms("absolute", "MLX key names")
    if any(name.startswith("model.language_model.") for name in names):
        return Norms("delta", "Hugging Face key names")
    return None


def _by_head_keys(stored: Mapping[str, Stored]) -> Norms | None:
    names = [item.name for item in stored.values()]
    if any(name.startswith(("fc.", "layers.")) or ".switch_mlp." in name for name in names):
        return Norms("absolute", "MLX key names")
    if any(name.endswith(".mlp.experts.gate_up_proj") for name in names):
        return Norms("delta", "Hugging Face key names")
    return None


def _by_size(stored: Mapping[str, Stored], sure: bool) -> Norms | None:
    """One decision from all the norms: single ones overlap between the two kinds."""
    low = min(_means(stored, LOW_NORMS), default=None)
    if low is None:
        return None
    high = max(_means(stored, QK_NORMS), default=0.0)
    evidence = f"lowest norm has mean {low:.2f}"
    if low < LOW_LIMIT and high < QK_LIMIT:
        return Norms("delta", evidence)
    if low >= SURE_LOW_LIMIT or not sure:
        return Norms("absolute", evidence)
    return None


def _means(stored: Mapping[str, Stored], endings: tuple[str, ...]) -> list[float]:
    found = [item for name, item in stored.items() if name.endswith(endings) and not item.fault]
    return [float(as_float32(whole(item).read()).mean()) for item in found]
