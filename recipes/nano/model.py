"""The model as it is trained: Qwen3.5's layers with their Hugging Face names, and the head run as a chain.

Shapes: B sequences, S positions, D hidden, H heads, C positions of a block of the recurrence, N blocks.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64


@dataclass(frozen=True)
class Shape:
    """The default is the embedded model."""

    vocab: int = 16_384
    hidden: int = 384
    layers: int = 12
    inner: int = 1280
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    linear_heads: int = 6
    linear_dim: int = 64
    kernel: int = 4
    interval: int = 4  # every so many layers one has full attention
    context: int = 2048
    rope_theta: float = 100_000.0
    rotary_share: float = 0.5
    eps: float = 1e-6

    def full_attention(self, layer: int) -> bool:
        return layer % self.interval == self.interval - 1

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Norm(nn.Module):
    """RMS norm whose weight is what is added to one."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1 + self.weight)).to(x.dtype)


class GatedNorm(nn.Module):
    """The recurrence's output norm: a plain weight, then the gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight
        return (wide * F.silu(gate.float())).to(gate.dtype)


def rotate(x: Tensor, positions: Tensor, shape: Shape) -> Tensor:
    """Rotary positions over the first part of each head; x [B, H, S, head_dim], positions [S]."""
    size = int(shape.head_dim * shape.rotary_share)
    steps = torch.arange(0, size, 2, device=x.device, dtype=torch.float32) / size
    angles = positions.float()[:, None] * shape.rope_theta**-steps  # [S, size / 2]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split([size // 2, size // 2, shape.head_dim - size], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class Attention(nn.Module):
    """Full attention with an output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        d, h, k = shape.head_dim, shape.heads, shape.kv_heads
        self.q_proj = nn.Linear(shape.hidden, 2 * h * d, bias=False)  # query and gate of each head in turn
        self.k_proj = nn.Linear(shape.hidden, k * d, bias=False)
        self.v_proj = nn.Linear(shape.hidden, k * d, bias=False)
        self.o_proj = nn.Linear(h * d, shape.hidden, bias=False)
        self.q_norm, self.k_norm = Norm(d, shape.eps), Norm(d, shape.eps)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v [B, H, S, d], each key head repeated for its queries, and the gate [B, S, H d]."""
        shape, d = self.shape, self.shape.head_dim
        q, gate = self.q_proj(x).unflatten(-1, (shape.heads, 2 * d)).chunk(2, -1)
        k, v = self.k_proj(x).unflatten(-1, (-1, d)), self.v_proj(x).unflatten(-1, (-1, d))
        q = rotate(self.q_norm(q).transpose(1, 2), positions, shape)
        k = rotate(self.k_norm(k).transpose(1, 2), positions, shape)
        times = shape.heads // shape.kv_heads
        return q, k.repeat_interleave(times, 1), v.transpose(1, 2).repeat_interleave(times, 1), gate.flatten(2)

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        return self.o_proj(mixed.transpose(1, 2).flatten(2) * gate.sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, torch.arange(x.shape[1], device=x.device))
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True), gate)


# --- Gated DeltaNet ----------------------------------------------------------------------------------------------


class UnitInverse(torch.autograd.Function):
    """(I + A)^-1 for strictly lower triangular A [..., C, C]; blocks of 16 by products, then doubled."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        result = _unit_inverse(a)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        turned = inverse.mT
        return -(turned @ grad @ turned).tril(-1)


def _unit_inverse(a: Tensor) -> Tensor:
    size = a.shape[-1]
    if size <= 16:
        power, eye = a @ a, torch.eye(size, device=a.device, dtype=a.dtype)
        result = eye - a
        for _ in range(3):  # (I - A)(I + A^2)(I + A^4)(I + A^8)
            result, power = result + result @ power, power @ power
        return result
    half = size // 2
    top, bottom = _unit_inverse(a[..., :half, :half]), _unit_inverse(a[..., half:, half:])
    corner = -(bottom @ a[..., half:, :half] @ top)
    upper = torch.cat([top, torch.zeros_like(corner)], -1)
    return torch.cat([upper, torch.cat([corner, bottom], -1)], -2)


class BlockStates(torch.autograd.Function):
    """The recurrence over blocks: state[n + 1] = decay[n] state[n] + k[n]^T new[n], new[n] = u[n] - w[n] state[n].

    u, w, k [N, X, C, d], decay [N, X]; gives new [N, X, C, d] and the state before each block [N, X, d, d].
    Only what is truly serial is in the loops; it runs outside the compiler.
    """

    @staticmethod
    def forward(ctx: Any, u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.zeros(u.shape[0] + 1, u.shape[1], k.shape[-1], u.shape[-1], device=u.device, dtype=u.dtype)
        new = torch.empty_like(u)
        for n in range(len(u)):
            torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=new[n])
            torch.baddbmm(states[n] * decay[n, :, None, None], k[n].mT, new[n], out=states[n + 1])
        ctx.save_for_backward(w, k, decay, new, states)
        return new, states[:-1].clone()

    @staticmethod
    def backward(ctx: Any, grad_new: Tensor, grad_states: Tensor) -> tuple[Tensor, ...]:
        w, k, decay, new, states = ctx.saved_tensors
        after = torch.empty_like(states[:-1])  # gradient of the state after each block
        d_new = torch.empty_like(new)
        running = torch.zeros_like(states[0])
        for n in reversed(range(len(w))):
            after[n] = running
            torch.baddbmm(grad_new[n], k[n], running, out=d_new[n])
            running = torch.baddbmm(grad_states[n], w[n].mT, d_new[n], alpha=-1) + running * decay[n, :, None, None]
        d_w = -(d_new @ states[:-1].mT)
        d_k = new @ after.mT
        d_decay = (states[:-1] * after).sum((-1, -2))
        return d_new, d_w, d_k, d_decay


@torch.compiler.disable
def block_states(u: Tensor, w: Tensor, k: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    new, states = BlockStates.apply(u, w, k, decay)
    return new, states


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """All that blocks can do alone, in float32. q, k, v [B, S, H, d], g (log decay) and beta [B, S, H]."""

    def blocks(x: Tensor) -> Tensor:  # [B, S, H, ...] -> [N, B H, C, ...]
        x = x.float().unflatten(1, (-1, BLOCK)).movedim(1, 0)  # [N, B, C, H, ...]
        return x.movedim(3, 2).flatten(1, 2)

    q, k, v, g, beta = blocks(q), blocks(k), blocks(v), blocks(g), blocks(beta)
    total = g.cumsum(-1)  # [N, X, C]
    fade = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    inverse = UnitInverse.apply((beta[..., None] * (k @ k.mT) * fade).tril(-1))
    u = inverse @ (beta[..., None] * v)
    w = inverse @ (beta * total.exp())[..., None].mul(k)
    last = total[..., -1:]
    return u, w, k * (last - total).exp()[..., None], last[..., 0].exp(), q * total.exp()[..., None], (q @ k.mT) * fade


def gather(new: Tensor, states: Tensor, reach: Tensor, inside: Tensor, heads: int) -> Tensor:
    """The blocks' outputs, [B, S, H d]."""
    out = (reach @ states + inside @ new).unflatten(1, (-1, heads))  # [N, B, H, C, d]
    return out.permute(1, 0, 3, 2, 4).flatten(1, 2)


class GatedDeltaNet(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        size = shape.linear_heads * shape.linear_dim
        self.in_proj_qkv = nn.Linear(shape.hidden, 3 * size, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, size, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.linear_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.linear_heads, bias=False)
        self.conv1d = nn.Conv1d(3 * size, 3 * size, shape.kernel, groups=3 * size, bias=False)
        self.A_log = nn.Parameter(torch.empty(shape.linear_heads).uniform_(1, 16).log())
        step = torch.empty(shape.linear_heads).uniform_(-6.9, -2.3).exp()  # decays from 0.001 to 0.1 a token
        self.dt_bias = nn.Parameter(step.expm1().log())
        self.norm = GatedNorm(shape.linear_dim, shape.eps)
        self.out_proj = nn.Linear(size, shape.hidden, bias=False)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        shape = self.shape
        qkv = self.in_proj_qkv(x)
        taps = self.conv1d.weight[:, 0].to(qkv.dtype)  # [channels, kernel]
        padded = F.pad(qkv, (0, 0, shape.kernel - 1, 0))
        mixed = sum(padded[:, i : i + x.shape[1]] * taps[:, i] for i in range(shape.kernel))
        q, k, v = F.silu(mixed).unflatten(-1, (3, shape.linear_heads, shape.linear_dim)).unbind(2)
        q, k = _unit(q) * shape.linear_dim**-0.5, _unit(k)
        g = -self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        return q, k, v, g, self.in_proj_b(x).float().sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.inputs(x)
        with torch.autocast(x.device.type, enabled=False):
            u, w, k, decay, reach, inside = prepare(*inputs)
            new, states = block_states(u, w, k, decay)
            out = gather(new, states, reach, inside, self.shape.linear_heads)
        gate = self.in_proj_z(x).unflatten(-1, (self.shape.linear_heads, -1))
        return self.out_proj(self.norm(out, gate).flatten(2))


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# --- trunk and head ----------------------------------------------------------------------------------------------


class Layer(nn.Module):
    """Mix positions, then channels, each on a normed copy added back."""

    def __init__(self, shape: Shape, full_attention: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        if full_attention:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = GatedDeltaNet(shape)
        self.mlp = MLP(shape)
        self.full_attention = full_attention

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.self_attn if self.full_attention else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, shape.full_attention(i)) for i in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)

    def forward(self, tokens: Tensor) -> Tensor:
        """The hidden states that logits are made of, [B, S, D]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Chain:
    """What one sequence of head steps remembers: the first step's keys and values for every position, and those of
    each later step, which only the same position's chain sees."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []


class Head(nn.Module):
    """fc([norm(embedding of token i + 1); norm(hidden i)]), one full-attention layer, norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = Norm(shape.hidden, shape.eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden, shape.eps)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, full_attention=True)])
        self.norm = Norm(shape.hidden, shape.eps)

    def forward(self, hidden: Tensor, embedded: Tensor, chain: Chain) -> Tensor:
        """One step for the chains that start at every position of hidden [B, S, D].

        embedded [B, S, D] is the token each chain reads in this step. As in decoding, step k of the chain at i stands
        at position i + k, sees the true pairs up to i (the first step's keys) and its own k later entries.
        """
        layer = self.layers[0]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))
        positions = torch.arange(x.shape[1], device=x.device) + len(chain.keys)
        q, k, v, gate = layer.self_attn.project(layer.input_layernorm(x), positions)
        chain.keys.append(k)
        chain.values.append(v)
        x = x + layer.self_attn.finish(chain_attention(q, chain), gate)
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))


def chain_attention(q: Tensor, chain: Chain) -> Tensor:
    """q [B, H, S, d] over the first step's keys up to its own position and the later steps' keys at its position."""
    first, later = chain.keys[0], chain.keys[1:]
    if not later:
        return F.scaled_dot_product_attention(q, first, chain.values[0], is_causal=True)
    q = q * q.shape[-1] ** -0.5
    size = q.shape[-2]
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    scores = [(q @ first.mT).masked_fill(future, float("-inf")), *((q * k).sum(-1, keepdim=True) for k in later)]
    shares = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
    mixed = shares[..., :size] @ chain.values[0]
    for j, value in enumerate(chain.values[1:]):
        mixed = mixed + shares[..., size + j : size + j + 1] * value
    return mixed


class Nano(nn.Module):
    """Trunk and head; the embedding is the LM head of both."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.mtp = Head(shape)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 0.5 if "conv1d" in name else 0.02
                if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                    scale /= (2 * shape.layers) ** 0.5
                nn.init.normal_(parameter, std=scale)

    @property
    def vocabulary(self) -> Tensor:
        return self.model.embed_tokens.weight

    def config(self) -> dict[str, Any]:
        """config.json as Hugging Face's Qwen3.5 writes it."""
        shape = self.shape
        kinds = ["full_attention" if shape.full_attention(i) else "linear_attention" for i in range(shape.layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "vocab_size": shape.vocab,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.inner,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": shape.context,
            "rms_norm_eps": shape.eps,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "full_attention_interval": shape.interval,
            "layer_types": kinds,
            "linear_conv_kernel_dim": shape.kernel,
            "linear_key_head_dim": shape.linear_dim,
            "linear_value_head_dim": shape.linear_dim,
            "linear_num_key_heads": shape.linear_heads,
            "linear_num_value_heads": shape.linear_heads,
            "tie_word_embeddings": True,
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": shape.rope_theta,
                "partial_rotary_factor": shape.rotary_share,
            },
            "dtype": "float32",
        }
