"""Qwen3.5, Qwen3.6 and Qwen3-Next: the config, and every tensor it asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headlong.checkpoint.config import ModelConfig, Shapes
from headlong.checkpoint.families import qwen3_5_layout
from headlong.checkpoint.fields import Fields
from headlong.checkpoint.safetensors import Stored
from headlong.checkpoint.weights import Layout
from headlong.errors import UserError
from headlong.settings import MAX_DEPTH

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(ModelConfig):
    """Full attention with an output gate in every few layers, Gated DeltaNet in the others; dense or with experts."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int  # 0 when every layer has experts
    layer_types: tuple[str, ...]
    rms_norm_eps: float
    rope_theta: float
    rotary_dim: int
    conv_kernel: int
    key_heads: int  # of linear attention, as the next three
    value_heads: int
    key_dim: int
    value_dim: int
    num_experts: int  # 0: dense
    experts_per_token: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    sparse_layers: tuple[bool, ...]
    norm_topk_prob: bool
    head_layers: int
    dedicated_head_embeddings: bool

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def layer_counts(self) -> dict[str, int]:
        return {kind: self.layer_types.count(kind) for kind in (LINEAR, FULL) if kind in self.layer_types}

    def kv_elements(self, with_head: bool) -> int:
        return (self.layer_types.count(FULL) + with_head) * 2 * self.num_key_value_heads * self.head_dim

    def state_bytes(self, itemsize: int) -> int:
        """The state, and what the widest window leaves to be folded into it."""
        width = MAX_DEPTH + 1
        state = self.value_heads * self.key_dim * self.value_dim
        waiting = width * self.value_heads * (self.key_dim + self.value_dim + 1)
        inputs = itemsize * self.conv_channels * (self.conv_kernel - 1 + width)
        return self.layer_types.count(LINEAR) * (4 * (state + waiting) + inputs)  # 4: float32 on every device

    def experts_used(self) -> tuple[int, int]:
        return self.experts_per_token, self.num_experts

    def no_head_reason(self) -> str:
        if self.head_layers > 1:
            return f"its MTP head has {self.head_layers} layers, and this version runs heads of one layer."
        if self.dedicated_head_embeddings:
            return "its MTP head has embeddings of its own, and this version runs heads that share the model's."
        return ""

    def layout(self, stored: Mapping[str, Stored]) -> Layout:
        dims = qwen3_5_layout.Dims(
            hidden=self.hidden_size,
            key_heads=self.key_heads,
            key_dim=self.key_dim,
            value_heads=self.value_heads,
            value_dim=self.value_dim,
            experts=self.num_experts,
            expert_width=self.moe_intermediate_size,
            tied=self.tie_word_embeddings,
        )
        return qwen3_5_layout.layout(stored, dims)

    def expected(self) -> Shapes:
        shapes: Shapes = {"embed_tokens.weight": (self.vocab_size, self.hidden_size)}
        for index, kind in enumerate(self.layer_types):
            mixer = self._full_attention() if kind == FULL else self._linear_attention()
            shapes |= self._layer(f"layers.{index}", mixer, self.sparse_layers[index])
        shapes["norm.weight"] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def expected_head(self) -> Shapes:
        hidden = self.hidden_size
        shapes: Shapes = {"mtp.pre_fc_norm_embedding.weight": (hidden,), "mtp.pre_fc_norm_hidden.weight": (hidden,)}
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        # always full attention, and experts if the model has any, whatever its first layer is
        shapes |= self._layer("mtp.layers.0", self._full_attention(), self.num_experts > 0)
        shapes["mtp.norm.weight"] = (hidden,)
        return shapes

    def _layer(self, prefix: str, mixer: Shapes, sparse: bool) -> Shapes:
        norm = (self.hidden_size,)
        mlp = self._experts() if sparse else self._mlp("mlp", self.intermediate_size)
        layer = {"input_layernorm.weight": norm, **mixer, "post_attention_layernorm.weight": norm, **mlp}
        return {f"{prefix}.{name}": shape for name, shape in layer.items()}

    def _full_attention(self) -> Shapes:
        hidden = self.hidden_size
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (2 * queries, hidden),  # query and gate of a head side by side
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
        }

    def _linear_attention(self) -> Shapes:
        hidden, wide = self.hidden_size, self.value_heads * self.value_dim
        return {
            "linear_attn.in_proj_qkv.weight": (self.conv_channels, hidden),
            "linear_attn.in_proj_z.weight": (wide, hidden),
            "linear_attn.in_proj_b.weight": (self.value_heads, hidden),
            "linear_attn.in_proj_a.weight": (self.value_heads, hidden),
            "linear_attn.conv1d.weight": (self.conv_channels, self.conv_kernel),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden, wide),
        }

    def _mlp(self, prefix: str, width: int) -> Shapes:
        hidden = self.hidden_size
        return {
            f"{prefix}.gate_proj.weight": (width, hidden),
            f"{prefix}.up_proj.weight": (width, hidden),
            f"{prefix}.down_proj.weight": (hidden, width),
        }

    def _experts(self) -> Shapes:
        hidden, width = self.hidden_size, self.moe_intermediate_size
        return {
            "mlp.gate.weight": (self.num_experts, hidden),
            "mlp.experts.gate_up_proj": (self.num_experts, 2 * width, hidden),
            "mlp.experts.down_proj": (self.num_experts, hidden, width),
            **self._mlp("mlp.shared_expert", self.shared_expert_intermediate_size),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }


def read(raw: Mapping[str, Any], eos_token_ids: tuple[int, ...]) -> Qwen35Config:
    """The config, flat or with the language model under text_config."""
    top = Fields(raw)
    text = top.inner("text_config") if top.has("text_config") else top
    _refuse_unsupported(text)
    layers = text.whole("num_hidden_layers")
    model_type = top.text("model_type")
    head_dim = text.whole("head_dim")
    theta, rotary_dim = _rope(text, head_dim)
    head_layers = (text if text.has("mtp_num_hidden_layers") else top).whole("mtp_num_hidden_layers", 0, least=0)
    config = Qwen35Config(
        family="qwen3_5",
        model_type=model_type,
        hidden_size=text.whole("hidden_size"),
        num_hidden_layers=layers,
        vocab_size=text.whole("vocab_size"),
        max_position_embeddings=text.whole("max_position_embeddings"),
        tie_word_embeddings=(top if top.has("tie_word_embeddings") else text).flag("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids,
        promises_head=head_layers > 0 or top.inner("mlx_lm_extra_tensors").has("mtp_file"),
        num_attention_heads=text.whole("num_attention_heads"),
        num_key_value_heads=text.whole("num_key_value_heads"),
        head_dim=head_dim,
        layer_types=_layer_types(text, layers),
        rms_norm_eps=text.number("rms_norm_eps"),
        rope_theta=theta,
        rotary_dim=rotary_dim,
        conv_kernel=text.whole("linear_conv_kernel_dim"),
        key_heads=text.whole("linear_num_key_heads"),
        value_heads=text.whole("linear_num_value_heads"),
        key_dim=text.whole("linear_key_head_dim"),
        value_dim=text.whole("linear_value_head_dim"),
        head_layers=head_layers,
        dedicated_head_embeddings=text.flag("mtp_use_dedicated_embeddings", False),
        **_mlp_fields(text, model_type, layers),
    )
    _check_ratios(config)
    return config


def _mlp_fields(text: Fields, model_type: str, layers: int) -> dict[str, Any]:
    moe = "moe" in model_type or model_type == "qwen3_next"
    experts = text.whole("num_experts") if moe else 0
    step = text.whole("decoder_sparse_step", 1)
    dense = text.wholes("mlp_only_layers", ())
    sparse = tuple(moe and index not in dense and (index + 1) % step == 0 for index in range(layers))
    chosen = text.whole("num_experts_per_tok") if moe else 0
    if chosen > experts:
        raise UserError(
            f"config.json has num_experts_per_tok = {chosen} and num_experts = {experts}: mend one of them."
        )
    return {
        "intermediate_size": 0 if all(sparse) else text.whole("intermediate_size"),
        "num_experts": experts,
        "experts_per_token": chosen,
        "moe_intermediate_size": text.whole("moe_intermediate_size") if moe else 0,
        "shared_expert_intermediate_size": text.whole("shared_expert_intermediate_size") if moe else 0,
        "sparse_layers": sparse,
        # Qwen3.5 renormalises whatever its config says
        "norm_topk_prob": moe and (model_type != "qwen3_next" or text.flag("norm_topk_prob", True)),
    }


def _layer_types(text: Fields, layers: int) -> tuple[str, ...]:
    if not text.has("layer_types"):
        every = text.whole("full_attention_interval", 4)
        return tuple(LINEAR if (index + 1) % every else FULL for index in range(layers))
    kinds = text.any("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (LINEAR, FULL) for kind in kinds):
        raise UserError(f"config.json has layer_types = {kinds!r}; {layers} entries of {LINEAR} or {FULL} are wanted.")
    return tuple(kinds)


def _rope(text: Fields, head_dim: int) -> tuple[float, int]:
    """Theta and the number of rotated dimensions, from rope_parameters, rope_scaling or the flat fields."""
    nested = text.inner("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    kind = nested.text("rope_type", nested.text("type", "default"))
    if kind not in ("default", "mrope"):  # mrope is the default for text
        raise UserError(f"config.json has rope type {kind!r}; this version runs models with 'default' only.")
    theta = (nested if nested.has("rope_theta") else text).number("rope_theta")
    part = (nested if nested.has("partial_rotary_factor") else text).number("partial_rotary_factor", 0.25)
    rotary_dim = int(head_dim * part)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UserError(f"config.json rotates {rotary_dim} of {head_dim} dimensions of a head; an even part is wanted.")
    return theta, rotary_dim


def _refuse_unsupported(text: Fields) -> None:
    text.only("hidden_act", "silu")
    text.only("attention_bias", False)
    text.only("attn_output_gate", True)


def _check_ratios(config: Qwen35Config) -> None:
    pairs = (
        ("num_attention_heads", config.num_attention_heads, "num_key_value_heads", config.num_key_value_heads),
        ("linear_num_value_heads", config.value_heads, "linear_num_key_heads", config.key_heads),
    )
    for many, count, few, divisor in pairs:
        if count % divisor:
            raise UserError(f"config.json has {many} = {count} and {few} = {divisor}; the first must be a multiple.")
