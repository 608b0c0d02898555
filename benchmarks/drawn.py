"""Checkpoints of real sizes that are drawn on the device, without files, and whose texts and acceptance are known."""

import math
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headlong.checkpoint.checkpoint import Checkpoint
from headlong.checkpoint.config import ModelConfig, Shapes
from headlong.checkpoint.families import model_config
from headlong.checkpoint.floats import NUMPY_DTYPES
from headlong.checkpoint.head import head_facts
from headlong.checkpoint.tensor import Array, Tensor
from headlong.checkpoint.weights import Layout, Weights

BRANCHES = ("o_proj", "out_proj", "down_proj")  # what a layer adds to the stream
RING = 4096  # tokens of a ring, at most: more than a prompt and its answer, so that no text repeats
STRETCH = 100  # tokens of a ring with the same share of wrong ones
LUCK = 315  # a seed whose first texts take as many rounds as the acceptance says, to a percent
WRONG = 3.0  # times the right token's logit that the head gives a wrong one, where it is to be wrong
LOGITS = 2.0  # how far apart logits are


@dataclass(frozen=True)
class Preset:
    """A model's sizes, and how it is run here."""

    hidden: int = 0  # 0: the model that comes with the package
    layers: int = 0
    ffn: int = 0  # of the dense layers, or of one expert and the shared one
    heads: tuple[int, int, int] = (0, 0, 0)  # queries, keys, their size
    linear: tuple[int, int, int] = (0, 0, 0)  # key heads, value heads, their size
    vocab: int = 248320
    tied: bool = False
    experts: tuple[int, int] = (0, 0)  # there are, a token uses
    rows: tuple[int, ...] = (1,)  # whose speed is told
    context: int = 3072
    prompt: int = 513  # tokens before a timed text
    contenders: tuple[tuple[int | None, float], ...] = ((3, 0.8), (None, 0.8))  # depth and acceptance

    @property
    def most_rows(self) -> int:
        return max(32, *self.rows)


FOUR = ((3, 0.8), (3, 0.9), (None, 0.8), (None, 0.9))
PRESETS = {
    "nano": Preset(rows=(1, 8, 32), context=2048),
    "tiny": Preset(64, 4, 96, (4, 2, 16), (2, 4, 16), 2048, True, rows=(1, 3), prompt=129, contenders=FOUR),
    "tiny-moe": Preset(64, 4, 32, (4, 2, 16), (2, 4, 16), 2048, experts=(8, 2), prompt=129),
    "4b": Preset(
        2560, 32, 9216, (16, 4, 256), (16, 32, 128), tied=True, rows=(1, 8, 32), context=9216, contenders=FOUR
    ),
    "27b": Preset(5120, 64, 17408, (24, 4, 256), (16, 48, 128)),
    "35b-a3b": Preset(2048, 40, 512, (16, 2, 256), (16, 32, 128), experts=(256, 8), contenders=((2, 0.85),)),
}
DEFAULT_PRESETS = ("4b", "nano", "35b-a3b", "27b")


def raw_config(preset: Preset, tied: bool) -> dict[str, Any]:
    """config.json of such a model."""
    moe, (queries, keys, size), (key_heads, value_heads, linear) = preset.experts[0] > 0, preset.heads, preset.linear
    config = {
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
        "vocab_size": preset.vocab,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.ffn,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": queries,
        "num_key_value_heads": keys,
        "head_dim": size,
        "hidden_act": "silu",
        "max_position_embeddings": max(preset.context, 4096),
        "rms_norm_eps": 1e-6,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": linear,
        "linear_value_head_dim": linear,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    experts = {"num_experts": preset.experts[0], "num_experts_per_tok": preset.experts[1]}
    experts |= {"moe_intermediate_size": preset.ffn, "shared_expert_intermediate_size": preset.ffn}
    return config | experts if moe else config


@dataclass(frozen=True)
class Rings:
    """Rings of tokens, one for each acceptance, that begin at multiples of their size; a token leads to the next."""

    accepts: tuple[float, ...]
    size: int

    @property
    def end(self) -> int:
        """The first token of no ring: what the head says where it is wrong."""
        return self.size * len(self.accepts)

    def next(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens - tokens % self.size + (tokens + 1) % self.size

    def walk(self, accept: float, start: int, count: int) -> list[int]:
        base = self.size * self.accepts.index(accept)
        return [base + (start + step) % self.size for step in range(count)]

    def wrong(self) -> torch.Tensor:
        """Whether the head is to be wrong after each token [end]."""
        found = []
        for accept in self.accepts:  # as many in every stretch: texts differ little in their luck
            generator = torch.Generator().manual_seed(LUCK)
            orders = torch.rand(-(-self.size // STRETCH), STRETCH, generator=generator).argsort(1)
            found.append((orders >= round(accept * STRETCH)).flatten()[: self.size])
        return torch.cat(found)


class Drawn(Weights):
    """Weights that are drawn when they are read, each from its name: nothing is on disk, and little in memory.

    The stream carries a token's embedding. With branches of next to nothing the LM head, whose row for a token is the
    embedding of the one before, finds the next token of the ring. The last channel marks tokens the head is wrong
    about: its projection takes the embedding as it is, and the mark to a token of no ring.
    """

    def __init__(self, config: ModelConfig, rings: Rings, branch: float, device: torch.device) -> None:
        shapes: Shapes = {**config.expected(), **config.expected_head()}
        super().__init__(Layout({name: Tensor(shape, ()) for name, shape in shapes.items()}))
        self.rings, self.branch, self.device = rings, branch, device
        self.seconds = 0.0  # of drawing, and of bringing what was drawn to the host
        self._pinned: torch.Tensor | None = None

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        """Through one buffer of the host where the device has its own memory: what is read must be copied at once."""
        started = time.perf_counter()
        drawn = self.on_device(name, shape)
        kind = "bfloat16" if drawn.dtype == torch.bfloat16 else "float32"
        staged = self._staged(drawn.view(torch.int16) if kind == "bfloat16" else drawn).numpy()
        self.seconds += time.perf_counter() - started
        return Array(kind, staged.view(NUMPY_DTYPES[kind]))

    def on_device(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """For loaders that take tensors from where they are."""
        assert not self.fault(name, shape)
        self._used.add(name)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        return self._draw(name, shape, generator)

    def _staged(self, drawn: torch.Tensor) -> torch.Tensor:
        if drawn.device.type == "cpu":
            return drawn
        if self._pinned is None or len(self._pinned) < drawn.nbytes:
            self._pinned = None
            self._pinned = torch.empty(drawn.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[: drawn.nbytes].view(drawn.dtype).view(drawn.shape).copy_(drawn)

    def _draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            return torch.ones(shape, device=self.device)
        if name.endswith("A_log"):
            return torch.rand(shape, generator=generator, device=self.device).mul_(8).add_(0.1).log_()
        drawn = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        if name.endswith("dt_bias"):
            return drawn.mul_(0.5).sub_(1)
        if name == "embed_tokens.weight":
            drawn[: self.rings.end] = self._ring_rows(shape[1])
            return drawn
        if name == "lm_head.weight":
            return self._lm_head(drawn)
        if name == "mtp.fc.weight":
            return self._projection(drawn)
        inner = self.branch if any(branch in name for branch in BRANCHES) else 1.0
        return drawn.mul_(inner / math.sqrt(shape[-1]))

    def _ring_rows(self, hidden: int) -> torch.Tensor:
        """Embeddings of the rings' tokens, marks included."""
        generator = torch.Generator(self.device).manual_seed(1)
        shape = (self.rings.end, hidden)
        rows = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        rows[:, -1] = self.rings.wrong().to(self.device, torch.bfloat16)
        return rows

    def _wrong_row(self, hidden: int) -> torch.Tensor:
        """The LM head's row of the wrong token, which no ring token resembles."""
        generator = torch.Generator(self.device).manual_seed(2)
        row = torch.randn(hidden, generator=generator, device=self.device, dtype=torch.bfloat16)
        row[-1] = 0
        return row

    def _lm_head(self, drawn: torch.Tensor) -> torch.Tensor:
        hidden = drawn.shape[1]
        tokens = torch.arange(self.rings.end, device=self.device)
        drawn[self.rings.next(tokens)] = self._ring_rows(hidden)
        drawn[self.rings.end] = self._wrong_row(hidden)
        drawn[:, -1] = 0
        return drawn.mul_(LOGITS / math.sqrt(hidden))

    def _projection(self, drawn: torch.Tensor) -> torch.Tensor:
        """[hidden, 2 hidden]: of the embedding and the hidden state, of which it passes the first."""
        hidden = len(drawn)
        drawn.mul_(1e-6)
        drawn[:, :hidden].diagonal().add_(1)
        drawn[:, hidden - 1] += WRONG * self._wrong_row(hidden)
        return drawn


def bytes_of_step(config: ModelConfig) -> int:
    used, experts = config.experts_used()
    total = 0.0
    for name, shape in config.expected().items():
        if name != "embed_tokens.weight" or config.tie_word_embeddings:
            total += 2 * math.prod(shape) * (used / experts if ".experts." in name else 1)
    return round(total)


def drawn_checkpoint(name: str, kind: str, noise: float, device: str) -> tuple[Checkpoint, Rings]:
    """`ring`: the text is known. `random`: all layers have their say, and the head is right now and then."""
    ring, preset = kind == "ring", PRESETS[name]
    # A ring needs an LM head of its own; a step reads as many bytes as with a tied one.
    config = model_config(raw_config(preset, preset.tied and not ring), (preset.vocab - 1,))
    accepts = tuple(sorted({accept for _, accept in preset.contenders})) if ring else (1.0,)
    rings = Rings(accepts, min(RING, preset.vocab // (len(accepts) + 1)))
    even = math.sqrt(preset.hidden / (2 * math.log(preset.vocab)))  # the branches' part as loud as the embedding's
    branch = 1e-6 if ring else noise * even / math.sqrt(2 * preset.layers)
    weights = Drawn(config, rings, branch, torch.device(device))
    return Checkpoint(f"{name}, {kind}", Path(), config, weights, head_facts(config, weights, Path())), rings
