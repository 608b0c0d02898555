"""The head against another implementation of it, written here in NumPy and float64 from the tensors on disk."""

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from headlong.backends.torch.loader import Loader
from headlong.backends.torch.native.library import library, references_only
from headlong.backends.torch.step import Prefill, Window
from tests import tiny
from tests.backends.torch.driver import CHUNK, Driver, Job, fixed, open_tiny, prompt_of

TOLERANCE = 1e-4
# A gap in logits that the draft LM head's rounding cannot close: 8 bits in weights and tokens, 24.
CLEAR = {"native": 0.1, "reference": 1e-3}

MODELS = {
    "dense": ("dense", {}),
    "dense-tied": ("dense", {"tied": True, "num_key_value_heads": 4}),
    "moe": ("moe", {}),
    "next": ("next", {"num_key_value_heads": 1, "num_experts_per_tok": 3}),
}


class Head:
    """e = norm(embed t), g = norm(h), x = fc [e ; g], one gated attention layer, norm; keys and values by position."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.raw = {name: value.astype(np.float64) for name, value in load_file(folder / "model.safetensors").items()}
        self.keys: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}
        rope = self.config.get("rope_parameters", self.config)
        rotary = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        self.frequencies = rope["rope_theta"] ** (-2 * np.arange(rotary // 2) / rotary)

    def __call__(self, hidden: np.ndarray, token: int, position: int) -> np.ndarray:
        """The output for the pair (hidden at a position, the token after it); it replaces what was at the position."""
        pair = (self.raw["model.embed_tokens.weight"][token], hidden.astype(np.float64))
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden")
        normed = [self.norm(part, f"mtp.{name}") for part, name in zip(pair, names, strict=True)]
        x = self.raw["mtp.fc.weight"] @ np.concatenate(normed)
        x = x + self.attention(self.norm(x, "mtp.layers.0.input_layernorm"), position)
        x = x + self.mlp(self.norm(x, "mtp.layers.0.post_attention_layernorm"))
        return self.norm(x, "mtp.norm")

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        return self.raw.get("lm_head.weight", self.raw["model.embed_tokens.weight"]) @ hidden

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / scale * (1 + self.raw[f"{name}.weight"])

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        half = len(self.frequencies)
        cos, sin = np.cos(position * self.frequencies), np.sin(position * self.frequencies)
        a, b, rest = x[:, :half], x[:, half : 2 * half], x[:, 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=1)

    def attention(self, x: np.ndarray, position: int) -> np.ndarray:
        prefix, size = "mtp.layers.0.self_attn", self.config["head_dim"]
        query_gate, key, value = (self.raw[f"{prefix}.{name}_proj.weight"] @ x for name in "qkv")
        query, gate = query_gate.reshape(-1, 2, size).transpose(1, 0, 2)
        query = self.rotate(self.norm(query, f"{prefix}.q_norm"), position)
        self.keys[position] = self.rotate(self.norm(key.reshape(-1, size), f"{prefix}.k_norm"), position)
        self.values[position] = value.reshape(-1, size)
        seen = range(position + 1)
        keys, values = (np.stack([cache[p] for p in seen]) for cache in (self.keys, self.values))  # [P, K, D]
        group = len(query) // keys.shape[1]
        mixed = []
        for head, one in enumerate(query):
            scores = keys[:, head // group] @ one / np.sqrt(size)
            weights = np.exp(scores - scores.max())
            mixed.append(weights / weights.sum() @ values[:, head // group])
        return self.raw[f"{prefix}.o_proj.weight"] @ (np.stack(mixed) * sigmoid(gate)).ravel()

    def mlp(self, x: np.ndarray) -> np.ndarray:
        prefix = "mtp.layers.0.mlp"
        if "num_experts" not in self.config:
            return self.gated(x, prefix)
        scores = np.exp(self.raw[f"{prefix}.gate.weight"] @ x)
        shares = scores / scores.sum()
        chosen = np.argsort(-shares)[: self.config["num_experts_per_tok"]]
        routed = sum(shares[expert] * self.expert(x, expert) for expert in chosen) / shares[chosen].sum()
        shared = self.gated(x, f"{prefix}.shared_expert")
        return routed + sigmoid(self.raw[f"{prefix}.shared_expert_gate.weight"] @ x) * shared

    def expert(self, x: np.ndarray, expert: int) -> np.ndarray:
        prefix = "mtp.layers.0.mlp.experts"
        if f"{prefix}.gate_up_proj" not in self.raw:
            return self.gated(x, f"{prefix}.{expert}")
        gate, up = np.split(self.raw[f"{prefix}.gate_up_proj"][expert] @ x, 2)
        return self.raw[f"{prefix}.down_proj"][expert] @ (gate * sigmoid(gate) * up)

    def gated(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate, up = (self.raw[f"{prefix}.{name}_proj.weight"] @ x for name in ("gate", "up"))
        return self.raw[f"{prefix}.down_proj.weight"] @ (gate * sigmoid(gate) * up)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.fixture(params=MODELS)
def folder(request, tmp_path):
    kind, options = MODELS[request.param]
    return tiny.write(tmp_path, kind, seed=3, agreeable=True, **options)


@pytest.fixture(params=["native", "reference"])
def kernels(request):
    with contextlib.nullcontext() if request.param == "native" else references_only():
        yield request.param


@pytest.fixture
def exact_head(monkeypatch):
    """The head's own matrices as they are stored, where they would be rounded to 8 bits."""
    monkeypatch.setattr(Loader, "for_drafts", lambda self: self)


@pytest.mark.usefixtures("exact_head")
@torch.inference_mode()
def test_prompt_then_true_pairs_then_a_chain(folder, kernels):
    backend, other = open_tiny(folder, rows=3), Head(folder)
    model, cache = backend.rounds.model, backend.rounds.cache
    row, prompt = 1, CHUNK + 14
    cache.grow(row, [5, 2, 7, 3])  # pages in no order, 64 positions
    hidden = torch.randn(prompt + 3, backend.rounds.model.norm.shape[0], generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor(prompt_of(len(hidden), backend.limits.vocab))

    def compare(found, pairs, first):
        """The head's outputs for pairs at consecutive positions, and their logits, with the other's."""
        for j, (hidden, token) in enumerate(pairs):
            wanted = other(hidden.numpy(), int(token), first + j)
            np.testing.assert_allclose(found[j].numpy(), wanted, atol=TOLERANCE, rtol=0)
            np.testing.assert_allclose(model.logits(found[j : j + 1])[0], other.logits(wanted), atol=TOLERANCE)

    for start in (0, CHUNK):
        count = min(CHUNK, prompt - start)
        step = Prefill(cache, row, start, count)
        here = slice(start, start + count)
        compare(model.head(hidden[here], tokens[here], step), zip(hidden[here], tokens[here], strict=True), start)

    def window(hidden, tokens, first, kept):
        layout = cache.layout((row,), (len(tokens),))
        return Window(cache, layout, torch.tensor([first]), torch.tensor([kept]))

    # Four drafts, guessed; then three pairs of which two are true, which replace the first two guesses; then four more.
    first, token, last = prompt, tokens[-1:], hidden[-1:]
    for turn in range(2):
        for _ in range(4):
            step = window(last, token, first, 1)
            found = model.head(last, token, step)
            compare(found, [(last[0], token[0])], first)
            last, token, first = found, model.logits(found).argmax(-1), first + 1
        if turn == 0:
            first = prompt
            step = window(hidden[-3:], tokens[-3:], first, 2)
            found = model.head(hidden[-3:], tokens[-3:], step)[:2]
            compare(found, zip(hidden[-3:-1], tokens[-3:-1], strict=True), first)
            last, token, first = found[-1:], model.logits(found[-1:]).argmax(-1), first + 2


@pytest.mark.usefixtures("exact_head")
@torch.inference_mode()
def test_drafts_of_real_rounds(folder, kernels):
    """Two rows at depth 4: every draft is the other chain's best, wherever that is clear."""
    backend = open_tiny(folder, rows=2)
    others = [Head(folder), Head(folder)]
    drafter = backend.rounds.drafter
    prime, draft = drafter.prime, drafter.draft
    clear: list[bool] = []

    def primed(hidden, tokens, step):
        for pair in zip(hidden, tokens, step.positions, strict=True):
            others[step.row](pair[0].numpy(), int(pair[1]), int(pair[2]))
        prime(hidden, tokens, step)

    def drafted(feed, depths, least):
        proposal = draft(feed, depths, least)
        for b, row in enumerate(feed.layout.rows):
            head, start, first = others[row], int(feed.starts[b]), int(feed.layout.offsets[b])
            for j in range(int(feed.kept[b])):
                out = head(feed.hidden[first + j].numpy(), int(feed.tokens[first + j]), start + j)
            for j in range(depths[b]):
                token = int(proposal.tokens[b, j])
                second, best = np.sort(head.logits(out))[-2:]
                clear.append(best - second > CLEAR[kernels])
                assert not clear[-1] or token == head.logits(out).argmax()
                out = head(out, token, start + int(feed.kept[b]) + j)
        return proposal

    drafter.prime, drafter.draft = primed, drafted
    jobs = [Job(prompt_of(40, 128), depth=fixed(4)), Job(prompt_of(3, 128), depth=fixed(4), arrives=2)]
    traces = Driver(backend).run(jobs, 24)
    assert max(traces[0].kept + traces[1].kept) > 1, "no draft was ever right"
    assert len(clear) >= 60
    assert np.mean(clear) > (0.8 if kernels == "native" else 0.98)


@pytest.mark.skipif(library() is None, reason="no C compiler")
@torch.inference_mode()
def test_a_dense_head_in_8_bits_stays_near_the_exact_one(tmp_path, monkeypatch):
    folder = tiny.write(tmp_path, "dense", seed=3, agreeable=True)
    hidden = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for _ in range(2):
        backend = open_tiny(folder, rows=1)
        backend.rounds.cache.grow(0, [0, 1])
        hidden = hidden[:, : backend.rounds.model.norm.shape[0]]
        tokens = torch.tensor(prompt_of(len(hidden), backend.limits.vocab))
        outputs.append(backend.rounds.model.head(hidden, tokens, Prefill(backend.rounds.cache, 0, 0, len(hidden))))
        monkeypatch.setattr(Loader, "for_drafts", lambda self: self)
    rounded, exact = outputs
    off = (rounded - exact).norm(dim=1) / exact.norm(dim=1)
    assert off.min() > 0
    assert off.max() < 0.05
