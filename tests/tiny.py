"""Tiny random checkpoints: one set of values a seed, saved in any of the ways such models are found on disk."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")  # what a layer adds to the stream
SHIFTED_NORMS = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "pre_fc_norm_hidden.weight")


@dataclass(frozen=True)
class Options:
    """How a model is saved. Only `agreeable` and the sizes in the config change the values."""

    tied: bool = False
    storage: str = "hf"  # "hf", or "mlx": norms with 1 added, convolutions [C, K, 1], MLX key names
    head_storage: str = ""  # empty: like the storage
    prefix: str = "text"  # "text", or "vl": nested text_config, longer key names, a few vision tensors
    experts: str = ""  # "packed", "per_expert", "stacked"; empty: what the kind and storage usually have
    head_experts: str = ""  # empty: like the experts
    head: str = "main"  # "main", "sidecar" (mtp.safetensors), "bare" (mtp/weights.safetensors, keys unprefixed), "none"
    sharded: bool = False  # three shards and an index
    dtype: str = "float32"  # "float32", "bfloat16" or "float16"
    metadata: bool = True  # say "pt" or "mlx" in the files
    agreeable: bool = False  # values made so that the head's drafts are often right
    with_tokenizer: bool = False  # 256 bytes and three special tokens; the vocabulary becomes 384


def write(folder: Path, kind: str = "dense", seed: int = 0, **options: Any) -> Path:
    """Save a model. `kind` is dense, moe or next; options are those of `Options` and fields of config.json."""
    known = {field.name for field in fields(Options)}
    how = Options(**{name: value for name, value in options.items() if name in known})
    overrides = {name: value for name, value in options.items() if name not in known}
    config = text_config(kind, how, overrides)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", _whole_config(config, kind, how))
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"], "do_sample": False})
    if how.with_tokenizer:
        _write_tokenizer(folder)
    _save(folder, values(config, seed, how.agreeable), config, how)
    return folder


# --- config ------------------------------------------------------------------------------------------------------


def text_config(kind: str, how: Options, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The flat config of the language model."""
    config: dict[str, Any] = {
        "model_type": {"dense": "qwen3_5_text", "moe": "qwen3_5_moe_text", "next": "qwen3_next"}[kind],
        "vocab_size": 384 if how.with_tokenizer else 128,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "tie_word_embeddings": how.tied,
        "dtype": how.dtype,
        "eos_token_id": [258, 256] if how.with_tokenizer else [0],
    }
    if kind == "next":
        config |= {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "norm_topk_prob": True}
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    else:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
        config["mtp_num_hidden_layers"] = 1
        config["attn_output_gate"] = True
    if kind != "dense":
        config |= {"num_experts": 6, "num_experts_per_tok": 2}
        config |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
    config |= overrides
    if kind != "next" and "layer_types" not in config:
        every = config["full_attention_interval"]
        kinds = ("full_attention", "linear_attention")
        config["layer_types"] = [kinds[bool((i + 1) % every)] for i in range(config["num_hidden_layers"])]
    return config


def _whole_config(config: dict[str, Any], kind: str, how: Options) -> dict[str, Any]:
    architecture = {"dense": "Qwen3_5", "moe": "Qwen3_5Moe", "next": "Qwen3Next"}[kind]
    if how.prefix == "text":
        return {"architectures": [f"{architecture}ForCausalLM"], **config}
    model_type = config["model_type"].removesuffix("_text")
    vision = {"model_type": model_type, "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
    vision |= {"out_hidden_size": config["hidden_size"], "num_position_embeddings": 16}
    return {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "model_type": model_type,
        "tie_word_embeddings": how.tied,
        "dtype": how.dtype,
        "text_config": config,
        "vision_config": vision,
    }


def layer_types(config: Mapping[str, Any]) -> list[str]:
    if "layer_types" in config:
        return list(config["layer_types"])
    every = config["full_attention_interval"]
    return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(config["num_hidden_layers"])]


# --- values ------------------------------------------------------------------------------------------------------


def values(config: Mapping[str, Any], seed: int, agreeable: bool = False) -> Tensors:
    """Every tensor in float32 under its canonical name; norms as the difference from 1, as Hugging Face stores them."""
    tensors = {name: _value(name, shape, seed) for name, shape in _shapes(config).items()}
    _make_steady(tensors, config["linear_num_key_heads"] * config["linear_key_head_dim"])
    if agreeable:
        _make_agreeable(tensors, config)
    return tensors


def _make_steady(tensors: Tensors, keys: int) -> None:
    """Linear layers norm their output: where a query is nearly orthogonal to its key that blows rounding up a hundred
    times. So keys are much like queries, and large enough for silu to leave them mostly positive."""
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            tensor[keys : 2 * keys] = 0.97 * tensor[:keys] + 0.25 * tensor[keys : 2 * keys]
        elif name.endswith("conv1d.weight"):
            tensor[keys : 2 * keys] = tensor[:keys]


def _make_agreeable(tensors: Tensors, config: Mapping[str, Any]) -> None:
    """Each token mostly names the next: little from the layers, and the head passes the token through."""
    hidden, tied = config["hidden_size"], config["tie_word_embeddings"]
    for name in tensors:
        if name.endswith(RESIDUAL):
            tensors[name] *= 0.2 if tied else 0.08
    tensors["mtp.fc.weight"] *= 0.05
    tensors["mtp.fc.weight"][:, :hidden] += torch.eye(hidden)
    if tied:  # as 1 + w: 1, -1, 1, ...; or a token would name itself
        tensors["norm.weight"] += torch.arange(hidden) % 2 * -2.0
    else:  # the tokens that do not end a text name each other in one long ring
        ring = torch.tensor([token for token in range(config["vocab_size"]) if token not in config["eos_token_id"]])
        tensors["lm_head.weight"][ring.roll(-1)] += 8 * tensors["embed_tokens.weight"][ring] / math.sqrt(hidden)
    tensors["mtp.norm.weight"] = tensors["norm.weight"].clone()


def _value(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.randn(shape, generator=generator)
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.1 * noise
    if name.endswith("norm.weight") or name.endswith(SHIFTED_NORMS) or "pre_fc_norm" in name:
        return 0.1 * noise
    if name.endswith("A_log"):
        return torch.rand(shape, generator=generator).mul(8).add(0.1).log()
    if name.endswith("dt_bias"):
        return 0.5 * noise - 1
    if name.endswith("embed_tokens.weight"):
        return 0.25 * noise
    if name.endswith("lm_head.weight"):
        return 1.5 * noise / math.sqrt(shape[-1])
    if name.endswith("conv1d.weight"):
        return 4 * noise / math.sqrt(shape[-1])
    return 1.2 * noise / math.sqrt(shape[-1])


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden), "norm.weight": (hidden,)}
    shapes["lm_head.weight"] = (vocab, hidden)
    for index, kind in enumerate(layer_types(config)):
        layer = _mixer_shapes(config, kind) | _mlp_shapes(config, _is_sparse(config, index))
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    head = _mixer_shapes(config, "full_attention") | _mlp_shapes(config, bool(config.get("num_experts")))
    shapes |= {f"mtp.layers.0.{name}": shape for name, shape in head.items()}
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        shapes[f"mtp.{name}.weight"] = (hidden,)
    return shapes


def _mixer_shapes(config: Mapping[str, Any], kind: str) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes["post_attention_layernorm.weight"] = (hidden,)
    if kind == "full_attention":
        size = config["head_dim"]
        queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
        rows = {"q_proj": (2 * queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        rows |= {"o_proj": (hidden, queries), "q_norm": (size,), "k_norm": (size,)}
        return shapes | {f"self_attn.{name}.weight": shape for name, shape in rows.items()}
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    wide = heads * config["linear_value_head_dim"]
    rows = {"in_proj_qkv": (2 * keys + wide, hidden), "in_proj_z": (wide, hidden), "in_proj_b": (heads, hidden)}
    rows |= {"in_proj_a": (heads, hidden), "conv1d": (2 * keys + wide, config["linear_conv_kernel_dim"])}
    rows |= {"norm": (config["linear_value_head_dim"],), "out_proj": (hidden, wide)}
    shapes |= {f"linear_attn.{name}.weight": shape for name, shape in rows.items()}
    return shapes | {"linear_attn.A_log": (heads,), "linear_attn.dt_bias": (heads,)}


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    on_the_step = (index + 1) % config.get("decoder_sparse_step", 1) == 0
    return bool(config.get("num_experts")) and on_the_step and index not in config.get("mlp_only_layers", ())


def _mlp_shapes(config: Mapping[str, Any], sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden = config["hidden_size"]

    def gated(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
        up = {f"{prefix}.{name}.weight": (width, hidden) for name in ("gate_proj", "up_proj")}
        return {**up, f"{prefix}.down_proj.weight": (hidden, width)}

    if not sparse:
        return gated("mlp", config["intermediate_size"])
    experts, width = config["num_experts"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts, hidden)}
    shapes["mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
    shapes["mlp.experts.down_proj"] = (experts, hidden, width)
    shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes | gated("mlp.shared_expert", config["shared_expert_intermediate_size"])


# --- storage -----------------------------------------------------------------------------------------------------


def _save(folder: Path, tensors: Tensors, config: Mapping[str, Any], how: Options) -> None:
    if how.tied:
        del tensors["lm_head.weight"]
    head = {name: tensors.pop(name) for name in list(tensors) if name.startswith("mtp.")}
    is_next = config["model_type"] == "qwen3_next"
    usual = "stacked" if how.storage == "mlx" else "per_expert" if is_next else "packed"
    experts = how.experts or usual
    trunk = _stored(tensors, how.storage, experts)
    if is_next:
        trunk = _fused(trunk, config)
    trunk = {_key(name, how): tensor for name, tensor in trunk.items()}
    if how.prefix == "vl":
        trunk |= _vision(config, "vision_tower." if how.storage == "mlx" else "model.visual.")
    head_storage = how.head_storage or how.storage
    head = _stored(head, head_storage, how.head_experts or experts)
    if how.head == "main":
        trunk |= head
    elif how.head == "sidecar":
        _save_file(head, folder / "mtp.safetensors", how, head_storage)
    elif how.head == "bare":
        bare = {name.removeprefix("mtp."): tensor for name, tensor in head.items()}
        _save_file(bare, folder / "mtp" / "weights.safetensors", how, head_storage)
    if how.sharded:
        _save_shards(trunk, folder, how)
    else:
        _save_file(trunk, folder / "model.safetensors", how, how.storage)


def _stored(tensors: Tensors, storage: str, experts: str) -> Tensors:
    """The tensors as a storage keeps them; keys still without a prefix."""
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv1d.weight"):
            stored[name] = tensor[:, :, None] if storage == "mlx" else tensor[:, None, :]
        elif storage == "mlx" and "linear_attn" not in name and "norm" in name:
            stored[name] = tensor + 1
        elif ".mlp.experts." in name:
            stored |= _stored_experts(name, tensor, experts)
        else:
            stored[name] = tensor
    return stored


def _stored_experts(name: str, tensor: torch.Tensor, experts: str) -> Tensors:
    layer, _, projection = name.rpartition(".experts.")
    halves = {"down_proj": tensor}
    if projection == "gate_up_proj":
        halves = dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, dim=1), strict=True))
    if experts == "stacked":
        return {f"{layer}.switch_mlp.{half}.weight": part for half, part in halves.items()}
    if experts == "per_expert":
        count = tensor.shape[0]
        return {f"{layer}.experts.{e}.{half}.weight": part[e] for half, part in halves.items() for e in range(count)}
    return {name: tensor}


def _fused(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Qwen3-Next's projections: q, k, v, z (and b, a) interleaved by key head."""
    groups = config["linear_num_key_heads"]
    keys = groups * config["linear_key_head_dim"]
    fused = dict(tensors)
    for name in tensors:
        if not name.endswith("in_proj_qkv.weight"):
            continue
        layer = name.removesuffix("in_proj_qkv.weight")
        qkv, z, b, a = (fused.pop(f"{layer}in_proj_{part}.weight") for part in ("qkv", "z", "b", "a"))
        parts = (qkv[:keys], qkv[keys : 2 * keys], qkv[2 * keys :], z)
        fused[f"{layer}in_proj_qkvz.weight"] = _interleaved(parts, groups)
        fused[f"{layer}in_proj_ba.weight"] = _interleaved((b, a), groups)
    return fused


def _interleaved(parts: tuple[torch.Tensor, ...], groups: int) -> torch.Tensor:
    chunks = [part.unflatten(0, (groups, -1)) for part in parts]
    return torch.cat(chunks, dim=1).flatten(0, 1)


def _key(name: str, how: Options) -> str:
    if how.storage == "mlx":
        return f"language_model.{name}" if name.startswith("lm_head") else f"language_model.model.{name}"
    if name.startswith("lm_head"):
        return name
    return f"model.language_model.{name}" if how.prefix == "vl" else f"model.{name}"


def _vision(config: Mapping[str, Any], prefix: str) -> Tensors:
    shapes = {"pos_embed.weight": (16, 16), "merger.linear_fc2.weight": (config["hidden_size"], 64)}
    shapes["blocks.0.norm1.bias"] = (16,)
    return {prefix + name: torch.zeros(shape) for name, shape in shapes.items()}


def _save_shards(tensors: Tensors, folder: Path, how: Options) -> None:
    names = sorted(tensors)
    index: dict[str, str] = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = {name: tensors[name] for name in names[number::3]}
        _save_file(part, folder / file, how, how.storage)
        index |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})


def _save_file(tensors: Tensors, path: Path, how: Options, storage: str) -> None:
    path.parent.mkdir(exist_ok=True)
    metadata = {"format": "mlx" if storage == "mlx" else "pt"} if how.metadata else None
    save_file({name: _cast(name, tensor, how.dtype) for name, tensor in tensors.items()}, path, metadata)


def _cast(name: str, tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Qwen3.5 keeps A_log and the linear attention's norm in float32 whatever the rest is."""
    kept = name.endswith(("A_log", "linear_attn.norm.weight"))
    return tensor.to(torch.float32 if kept else getattr(torch, dtype)).contiguous()


# --- tokenizer ---------------------------------------------------------------------------------------------------


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    about |= {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "clean_up_tokenization_spaces": False}
    _write_json(folder / "tokenizer_config.json", about)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1))
