"""Qwen3.5 and Qwen3-Next on disk: how each canonical tensor is made of what Hugging Face or MLX files hold."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headlong.checkpoint.convention import Norms, head_norms, trunk_norms
from headlong.checkpoint.safetensors import Stored
from headlong.checkpoint.tensor import Piece, Tensor, joined, whole
from headlong.checkpoint.weights import HEAD, Layout
from headlong.errors import UserError

PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")
VISION = ("visual.", "vision_tower.", "vision_model.")
SHIFTED = re.compile(
    r"(.*\.)?(input_layernorm|post_attention_layernorm|q_norm|k_norm|pre_fc_norm_embedding|pre_fc_norm_hidden)\.weight"
    r"|(mtp\.)?norm\.weight"  # linear_attn.norm is a plain weight
)
EXPERTS = re.compile(
    r"(?P<mlp>(mtp\.)?layers\.\d+\.mlp)\."
    r"(experts\.\d+\.(gate|up|down)_proj\.weight|experts\.(gate_up|down)_proj|switch_mlp\.(gate|up|down)_proj\.weight)"
)
COMPANIONS = (".weight_scale_inv", ".weight_scale", ".scales", ".biases", ".scale")


@dataclass(frozen=True)
class Dims:
    """The sizes that decide a layout."""

    hidden: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    experts: int
    expert_width: int
    tied: bool


def layout(stored: Mapping[str, Stored], dims: Dims) -> Layout:
    """Canonical tensors by name, and what was left aside."""
    kept: dict[str, Stored] = {}
    skipped: Counter[str] = Counter()
    named = _by_bare_name(stored)
    for name, item in named.items():
        kind = _unneeded(name, named, dims)
        if kind:
            skipped[kind] += 1
        else:
            kept[name] = item
    trunk = trunk_norms({name: item for name, item in kept.items() if not name.startswith(HEAD)})
    head = head_norms({name: item for name, item in kept.items() if name.startswith(HEAD)})
    tensors: dict[str, Tensor] = {}
    experts: dict[str, list[str]] = {}
    for name, item in kept.items():
        expert = EXPERTS.fullmatch(name)
        if expert:
            experts.setdefault(expert["mlp"], []).append(name)
        else:
            tensors.update(_canonical(name, item, dims, head if name.startswith(HEAD) else trunk))
    for mlp, names in experts.items():
        tensors.update(_experts(mlp, names, kept, dims))
    return Layout(tensors, dict(skipped), str(trunk), str(head))


def bare(name: str) -> str:
    """A stored name without what precedes the language model's own."""
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _by_bare_name(stored: Mapping[str, Stored]) -> dict[str, Stored]:
    named: dict[str, Stored] = {}
    for name, item in stored.items():
        other = named.setdefault(bare(name), item)
        if other is not item:
            raise UserError(
                f"the model has both {other.name} and {item.name}, which are one tensor: remove one of them."
            )
    return named


def _unneeded(name: str, names: Mapping[str, Stored], dims: Dims) -> str:
    """The kind of a tensor that is rightly not read; empty for one that is needed."""
    if name.startswith(VISION):
        return "vision"
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary buffers"
    if dims.tied and name.startswith("lm_head."):
        return "tied lm_head"
    for ending in COMPANIONS:
        if name.endswith(ending):
            module = name.removesuffix(ending)
            weight = names.get(f"{module}.weight") or names.get(module)
            if weight is not None and weight.fault:
                return "quantisation scales"
    return ""


def _canonical(name: str, item: Stored, dims: Dims, norms: Norms) -> dict[str, Tensor]:
    if name.endswith("linear_attn.conv1d.weight"):  # [C, 1, K] and [C, K, 1] are [C, K] in memory
        shape = tuple(size for axis, size in enumerate(item.shape) if axis == 0 or size > 1)
        return {name: whole(item, (*shape, 1) if len(shape) == 1 else shape)}
    if SHIFTED.fullmatch(name):
        return {name: whole(item, shift=norms.shift)}
    if name.endswith("linear_attn.in_proj_qkvz.weight"):
        return _split_qkvz(name.removesuffix("qkvz.weight"), item, dims)
    if name.endswith("linear_attn.in_proj_ba.weight"):
        return _split_ba(name.removesuffix("ba.weight"), item, dims)
    return {name: whole(item)}


# --- projections grouped by key head, as Qwen3-Next has them ------------------------------------------------------


def _split_qkvz(prefix: str, item: Stored, dims: Dims) -> dict[str, Tensor]:
    values = dims.value_heads // dims.key_heads * dims.value_dim
    widths = (dims.key_dim, dims.key_dim, values, values)  # rows of q, k, v, z in each group
    wanted = {"qkv": (0, 1, 2), "z": (3,)}
    return {f"{prefix}{name}.weight": _ungrouped(item, dims, widths, parts) for name, parts in wanted.items()}


def _split_ba(prefix: str, item: Stored, dims: Dims) -> dict[str, Tensor]:
    widths = (dims.value_heads // dims.key_heads,) * 2
    return {f"{prefix}{part}.weight": _ungrouped(item, dims, widths, (i,)) for i, part in enumerate("ba")}


def _ungrouped(item: Stored, dims: Dims, widths: tuple[int, ...], wanted: tuple[int, ...]) -> Tensor:
    """The wanted parts one after the other, each over all groups."""
    group = sum(widths)

    def cut(_: list[Stored]) -> Iterator[Piece]:
        for part in wanted:
            for head in range(dims.key_heads):
                row = head * group + sum(widths[:part])
                yield Piece(item, row * dims.hidden, widths[part] * dims.hidden)

    rows = dims.key_heads * sum(widths[part] for part in wanted)
    return joined((rows, dims.hidden), [(item.name, item, (dims.key_heads * group, dims.hidden))], cut)


# --- experts: packed, one by one, or stacked ----------------------------------------------------------------------


def _experts(mlp: str, names: list[str], kept: Mapping[str, Stored], dims: Dims) -> dict[str, Tensor]:
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I] of one layer, whichever way they are stored."""
    packed = f"{mlp}.experts.gate_up_proj" in kept or f"{mlp}.experts.down_proj" in kept
    if packed or not dims.experts:
        return {name: whole(kept[name]) for name in names}
    stacked = any(name.startswith(f"{mlp}.switch_mlp.") for name in names)
    made: dict[str, Tensor] = {}
    used: set[str] = set()
    for target, sides in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        if stacked:
            parts = [f"{mlp}.switch_mlp.{side}_proj.weight" for side in sides]
        else:
            parts = [f"{mlp}.experts.{e}.{side}_proj.weight" for e in range(dims.experts) for side in sides]
        used.update(parts)
        made[f"{mlp}.experts.{target}"] = _assembled(parts, kept, dims, stacked)
    return made | {name: whole(kept[name]) for name in names if name not in used}


def _assembled(names: list[str], kept: Mapping[str, Stored], dims: Dims, stacked: bool) -> Tensor:
    """Expert after expert, the parts of each one after the other."""
    down = "down_proj" in names[0]
    matrix = (dims.hidden, dims.expert_width) if down else (dims.expert_width, dims.hidden)
    rows = matrix[0] if down else 2 * matrix[0]
    size = matrix[0] * matrix[1]

    def cut(parts: list[Stored]) -> Iterator[Piece]:
        if not stacked:
            yield from (Piece(part, 0, size) for part in parts)
            return
        for expert in range(dims.experts):
            yield from (Piece(part, expert * size, size) for part in parts)

    wanted = (dims.experts, *matrix) if stacked else matrix
    return joined((dims.experts, rows, matrix[1]), [(name, kept.get(name), wanted) for name in names], cut)
