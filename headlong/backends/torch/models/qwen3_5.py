"""Qwen3.5, Qwen3.6 and Qwen3-Next, dense and mixture of experts, with their head.

Shapes: N tokens, H hidden, A query heads, K key/value heads of D, C convolution channels.
"""

import torch
from torch import Tensor

from headlong.backends.torch.cache import CacheShape
from headlong.backends.torch.kernels.experts import Experts, Mixture
from headlong.backends.torch.kernels.gated_delta import Delta
from headlong.backends.torch.kernels.linear import Weight, logits
from headlong.backends.torch.kernels.norm import add_norm, gated, pair_norm
from headlong.backends.torch.kernels.pick import embed
from headlong.backends.torch.kernels.rope import Rope
from headlong.backends.torch.lm_head import DraftHead
from headlong.backends.torch.loader import Loader
from headlong.backends.torch.models.base import Layers
from headlong.backends.torch.step import Step
from headlong.checkpoint.families.qwen3_5 import Qwen35Config


class Attention:
    """Full attention with an output gate: o_proj(attention * sigmoid(gate))."""

    def __init__(self, config: Qwen35Config, loader: Loader, layer: int, rope: Rope) -> None:
        self.layer, self.rope, self.eps = layer, rope, config.rms_norm_eps
        h, d = config.hidden_size, config.head_dim
        self.queries, self.keys, self.dim = config.num_attention_heads, config.num_key_value_heads, d
        # Stored as query, gate for each head in turn; kept as all queries, keys, values, then all gates.
        query_gate = loader.matrix("q_proj.weight", 2 * self.queries * d, h).view(self.queries, 2, d, h)
        key = loader.matrix("k_proj.weight", self.keys * d, h)
        value = loader.matrix("v_proj.weight", self.keys * d, h)
        parts = (query_gate[:, 0].reshape(-1, h), key, value, query_gate[:, 1].reshape(-1, h))
        self.qkvg = loader.weight(2 * (self.queries + self.keys) * d, parts)
        self.o_proj = loader.linear(self.queries * d, o_proj=h)
        q_norm, k_norm = loader.norm("q_norm", d), loader.norm("k_norm", d)
        self.qk_norm = torch.cat([q_norm.expand(self.queries, d), k_norm.expand(self.keys, d)])  # [A + K, D]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        queries, both = self.queries * self.dim, (self.queries + self.keys) * self.dim
        qkvg = step.linear(x, self.qkvg)
        qk, v, gate = qkvg.split([both, self.keys * self.dim, queries], -1)
        qk = self.rope.normed(qk, self.qk_norm, self.eps, step.positions)
        mixed = step.attend(self.layer, qk[:, : self.queries], qk[:, self.queries :], v.unflatten(-1, (-1, self.dim)))
        return step.linear(gated(mixed.flatten(1), gate), self.o_proj)

    def remember(self, key_value: Tensor, step: Step) -> None:
        """Keys and values [N, 2 K D] as projected, for tokens whose own attention nobody asks for."""
        k, v = key_value.chunk(2, -1)
        k = self.rope.normed(k, self.qk_norm[self.queries :], self.eps, step.positions)
        step.remember(self.layer, k, v.unflatten(-1, (-1, self.dim)))


class GatedDeltaNet:
    """Linear attention with a recurrent state."""

    def __init__(self, config: Qwen35Config, loader: Loader, layer: int) -> None:
        self.layer = layer
        h, heads, values = config.hidden_size, config.value_heads, config.value_heads * config.value_dim
        channels = config.conv_channels
        self.in_proj = loader.linear(h, in_proj_qkv=channels, in_proj_z=values, in_proj_b=heads, in_proj_a=heads)
        self.delta = Delta(
            conv=loader.tensor("conv1d.weight", channels, config.conv_kernel, dtype=torch.float32).T.contiguous(),
            decay=-loader.tensor("A_log", heads, dtype=torch.float32).exp(),
            dt_bias=loader.tensor("dt_bias", heads, dtype=torch.float32),
            norm=loader.norm("norm", config.value_dim),
            key_heads=config.key_heads,
            key_dim=config.key_dim,
            eps=config.rms_norm_eps,
        )
        self.out_proj = loader.linear(values, out_proj=h)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return step.linear(step.recur(self.layer, step.linear(x, self.in_proj), self.delta), self.out_proj)


class MLP:
    """down(silu(gate x) * up x)."""

    def __init__(self, hidden: int, inner: int, loader: Loader) -> None:
        self.gate_up = loader.linear(hidden, gate_proj=inner, up_proj=inner)
        self.down_proj = loader.linear(inner, down_proj=hidden)

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return step.linear(step.swiglu(x, self.gate_up), self.down_proj)


class SparseMLP:
    """Routed experts and one shared expert with a gate of its own."""

    def __init__(self, config: Qwen35Config, loader: Loader) -> None:
        h, inner, count = config.hidden_size, config.moe_intermediate_size, config.num_experts
        shared = MLP(h, config.shared_expert_intermediate_size, loader.under("shared_expert"))
        self.mixture = Mixture(
            routers=loader.linear(h, gate=count, shared_expert_gate=1),
            gate_up=Experts(loader.matrix("experts.gate_up_proj", count, 2 * inner, h)),
            down=Experts(loader.matrix("experts.down_proj", count, h, inner)),
            shared_gate_up=shared.gate_up,
            shared_down=shared.down_proj,
            chosen=config.experts_per_token,
            renormalise=config.norm_topk_prob,
        )

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        return step.mix_experts(x, self.mixture)


class Layer:
    """Mix tokens, then channels, each on a normed copy added back."""

    def __init__(self, config: Qwen35Config, loader: Loader, mixer: Attention | GatedDeltaNet, sparse: bool) -> None:
        self.eps = config.rms_norm_eps
        self.input_layernorm = loader.norm("input_layernorm", config.hidden_size)
        self.post_attention_layernorm = loader.norm("post_attention_layernorm", config.hidden_size)
        self.mixer = mixer
        mlp = loader.under("mlp")
        self.mlp = SparseMLP(config, mlp) if sparse else MLP(config.hidden_size, config.intermediate_size, mlp)

    def __call__(self, x: Tensor, add: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """The stream x and what the layer before has yet to add to it; the same two after this layer."""
        x, y = add_norm(x, add, self.input_layernorm, self.eps)
        x, y = add_norm(x, self.mixer(y, step), self.post_attention_layernorm, self.eps)
        return x, self.mlp(y, step)


class Qwen35:
    """Embedding, layers of two kinds, final norm, LM head."""

    def __init__(self, config: Qwen35Config, loader: Loader, context: int, with_head: bool) -> None:
        self.config = config
        self.dtype, self.device = loader.dtype, loader.device
        v, h = config.vocab_size, config.hidden_size
        table, tied = loader.stored("embed_tokens.weight", v, h), config.tie_word_embeddings
        self.lm_head = Weight(loader.ready(table if tied else loader.stored("lm_head.weight", v, h)))
        # The table keeps its stored dtype: a looked-up row is widened exactly.
        self.embed_tokens: Tensor | Weight = self.lm_head if tied and self.lm_head.native else table
        del table
        draft_head = DraftHead(self.lm_head) if with_head else None
        rope = Rope(context, config.rotary_dim, config.rope_theta, loader.device)
        self.layers: list[Layer] = []
        attention = recurrent = 0
        for i, (kind, sparse) in enumerate(zip(config.layer_types, config.sparse_layers, strict=True)):
            inner = loader.under(f"layers.{i}")
            mixer: Attention | GatedDeltaNet
            if kind == "full_attention":
                mixer = Attention(config, inner.under("self_attn"), attention, rope)
                attention += 1
            else:
                mixer = GatedDeltaNet(config, inner.under("linear_attn"), recurrent)
                recurrent += 1
            self.layers.append(Layer(config, inner, mixer, sparse))
        self.layer_count = len(self.layers)
        self.norm = loader.norm("norm", h)
        self.head = Qwen35Head(self, loader.under("mtp"), attention, rope, draft_head) if draft_head else None
        self.cache_shape = _cache_shape(config, attention + with_head, recurrent)

    def embed(self, tokens: Tensor) -> Tensor:
        return embed(self.embed_tokens, tokens, self.dtype)

    def by_layer(self, tokens: Tensor, step: Step) -> Layers:
        x, add = self.layers[0](self.embed(tokens), None, step)
        for layer in self.layers[1:]:
            yield
            x, add = layer(x, add, step)
        return add_norm(x, add, self.norm, self.config.rms_norm_eps)[1]

    def logits(self, hidden: Tensor) -> Tensor:
        return logits(hidden, self.lm_head)


def _cache_shape(config: Qwen35Config, attention: int, recurrent: int) -> CacheShape:
    return CacheShape(
        attention_layers=attention,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        recurrent_layers=recurrent,
        heads=config.value_heads,
        key_dim=config.key_dim,
        value_dim=config.value_dim,
        conv_channels=config.conv_channels,
        conv_kernel=config.conv_kernel,
    )


class Qwen35Head:
    """fc([norm(embedding of token i + 1) ; norm(hidden i)]), one full-attention layer, norm.

    The hidden states are those after a final norm, the target's and this head's own alike.
    """

    def __init__(self, model: Qwen35, loader: Loader, layer: int, rope: Rope, draft_head: DraftHead) -> None:
        config = model.config
        # A mixture's few exact bytes choose which of its many are read, so there the head stays as it is.
        loader = loader if config.num_experts else loader.for_drafts()
        self.embed, self.eps, self.draft_head = model.embed, config.rms_norm_eps, draft_head
        h = config.hidden_size
        self.fc = loader.linear(2 * h, fc=h)
        self.pre_fc_norm = torch.stack([loader.norm(f"pre_fc_norm_{part}", h) for part in ("embedding", "hidden")])
        inner = loader.under("layers.0")
        self.attention = Attention(config, inner.under("self_attn"), layer, rope)
        keys = config.num_key_value_heads * config.head_dim
        self.key_value = inner.under("self_attn").linear(h, k_proj=keys, v_proj=keys)
        self.layer = Layer(config, inner, self.attention, sparse=config.num_experts > 0)
        self.norm = loader.norm("norm", h)

    @property
    def words(self) -> Tensor | None:
        return self.draft_head.words

    def learn(self, tokens: Tensor) -> None:
        self.draft_head.learn(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.draft_head.logits(hidden)

    def __call__(self, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        x, add = self.layer(self._join(hidden, tokens, step), None, step)
        return add_norm(x, add, self.norm, self.eps)[1]

    def remember(self, hidden: Tensor, tokens: Tensor, step: Step) -> None:
        _, x = add_norm(self._join(hidden, tokens, step), None, self.layer.input_layernorm, self.eps)
        self.attention.remember(step.linear(x, self.key_value), step)

    def _join(self, hidden: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return step.linear(pair_norm(self.embed(tokens), hidden, self.pre_fc_norm, self.eps), self.fc)
