"""Logits and greedy texts against transformers, on tiny random checkpoints in float32."""

import contextlib
import random
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import headlong
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.cache import NULL_PAGE
from headlong.backends.torch.models.base import finish
from headlong.backends.torch.native.library import references_only
from headlong.backends.torch.step import Prefill, Window
from headlong.engine.pages import PagePool
from tests import tiny
from tests.backends.torch.driver import CHUNK, PAGE, open_tiny, prompt_of

TOLERANCE = 1e-4  # on logits with a standard deviation of about 1.5
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)  # around the edges of pages of 16 and chunks of 32
WIDTHS = (1, 2, 3, 5, 9)

ODD = {"hidden_size": 37, "vocab_size": 131, "head_dim": 24, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
MODELS = {
    "dense": ("dense", {}),
    "dense-tied": ("dense", {"tied": True, "prefix": "vl"}),
    "dense-8-layers": ("dense", {"num_hidden_layers": 8}),
    "dense-odd": ("dense", {**ODD, "intermediate_size": 51}),
    "dense-bfloat16": ("dense", {"dtype": "bfloat16"}),
    "moe-packed": ("moe", {"experts": "packed"}),
    "moe-per-expert": ("moe", {"experts": "per_expert", "num_experts": 5, "num_experts_per_tok": 3}),
    "moe-odd": ("moe", {**ODD, "moe_intermediate_size": 19, "shared_expert_intermediate_size": 27}),
    "moe-bfloat16": ("moe", {"dtype": "bfloat16", "tied": True}),
    "next": ("next", {}),
    # value heads to each key head, and query heads to each K/V head; elsewhere both are 2
    "ratios-1": ("dense", {"linear_num_key_heads": 4, "num_key_value_heads": 4}),
    "ratios-4": ("next", {"linear_num_key_heads": 1, "num_key_value_heads": 1}),
}
MAIN_MODELS = ("dense", "moe-packed", "next", "moe-odd")


def transformers_model(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model.generation_config.eos_token_id = None
    return model.eval()


@dataclass
class Oracle:
    """A checkpoint and what transformers says about one long sequence: row i of the logits follows i + 1 tokens."""

    folder: Path

    @cached_property
    def tokens(self) -> list[int]:
        return prompt_of(max(LENGTHS), self.backend.limits.vocab)

    @cached_property
    def logits(self) -> Tensor:
        with torch.inference_mode():
            return transformers_model(self.folder)(torch.tensor([self.tokens])).logits[0]

    @cached_property
    def backend(self) -> TorchBackend:
        return open_tiny(self.folder, rows=4)

    @cached_property
    def reference_backend(self) -> TorchBackend:
        with references_only():
            return open_tiny(self.folder, rows=4)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory):
    made: dict[str, Oracle] = {}

    def get(name: str) -> Oracle:
        if name not in made:
            kind, options = MODELS[name]
            made[name] = Oracle(tiny.write(tmp_path_factory.mktemp("models") / name, kind, **options))
        return made[name]

    return get


class Feeder:
    """Feeds rows given tokens, in prompt chunks or in windows, and keeps the logits of every position."""

    def __init__(self, backend: TorchBackend, rows: int = 1) -> None:
        self.model, self.cache = backend.rounds.model, backend.rounds.cache
        self.length = [0] * rows
        self.logits: list[list[Tensor]] = [[] for _ in range(rows)]
        self.pool = PagePool(backend.limits.pages)
        for row in range(rows):
            self.cache.start(row)

    def grow(self, row: int, positions: int) -> None:
        self.cache.grow(row, self.pool.take(max(0, -(-positions // PAGE) - self.cache.owned[row])))

    def prefill(self, row: int, tokens: list[int]) -> None:
        for start in range(0, len(tokens), CHUNK):
            chunk = tokens[start : start + CHUNK]
            self.grow(row, start + len(chunk))
            step = Prefill(self.cache, row, start, len(chunk))
            self.logits[row] += self.model.logits(finish(self.model.by_layer(torch.tensor(chunk), step)))
        self.length[row] = len(tokens)

    def window(self, tokens: dict[int, list[int]], kept: dict[int, int]) -> None:
        """One window for each of these rows, of which so many tokens turn out to be right."""
        rows, widths = tuple(tokens), tuple(map(len, tokens.values()))
        for row in rows:
            self.grow(row, self.length[row] + len(tokens[row]))
        starts = torch.tensor([self.length[row] for row in rows])
        step = Window(self.cache, self.cache.layout(rows, widths), starts)
        flat = torch.tensor([token for mine in tokens.values() for token in mine])
        logits = self.model.logits(finish(self.model.by_layer(flat, step)))
        for row, width, mine in zip(rows, widths, logits.split(widths), strict=True):
            self.logits[row] += mine[: kept[row]]
            self.length[row] += kept[row]
            self.cache.kept[row], self.cache.widths[row] = kept[row], width

    def windows(self, tokens: dict[int, list[int]], salt: str) -> None:
        """Each row's tokens to their end in windows of many widths. What a window holds past its kept ones is wrong."""
        coin = random.Random(salt)
        while rows := [row for row in tokens if self.length[row] < len(tokens[row])]:
            windows, kept = {}, {}
            for row in rows:
                left = tokens[row][self.length[row] :]
                width = coin.choice(WIDTHS)
                kept[row] = coin.randint(1, min(width, len(left)))
                windows[row] = left[: kept[row]] + [(left[0] + 1) % 100] * (width - kept[row])
            self.window(windows, kept)
        assert not any(pages.keys[NULL_PAGE].any() for pages in self.cache.pages)


def assert_near(found: list[Tensor], wanted: Tensor) -> None:
    assert len(found) == len(wanted)
    difference = (torch.stack(found) - wanted).abs().amax(-1)
    assert difference.max() <= TOLERANCE, f"{difference.max():.1e} at position {int(difference.argmax())}"


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_prompts(oracles, name, length):
    oracle = oracles(name)
    with torch.inference_mode():
        feeder = Feeder(oracle.backend)
        feeder.prefill(0, oracle.tokens[:length])
    assert_near(feeder.logits[0], oracle.logits[:length])


@pytest.mark.parametrize("prompt", [0, *LENGTHS[:-1]])
@pytest.mark.parametrize("name", MODELS)
def test_rounds_after_a_prompt(oracles, name, prompt):
    oracle = oracles(name)
    with torch.inference_mode():
        feeder = Feeder(oracle.backend)
        feeder.prefill(0, oracle.tokens[:prompt])
        feeder.windows({0: oracle.tokens}, salt=f"{name} {prompt}")
    assert_near(feeder.logits[0], oracle.logits)


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("name", MAIN_MODELS)
def test_unequal_rows_together(oracles, name, kernels):
    """Rows of four lengths that end at different times, each with windows of its own width."""
    oracle = oracles(name)
    prompts, ends = (0, 17, 32, 65), (50, 97, 64, 80)
    native = kernels == "native"
    backend = oracle.backend if native else oracle.reference_backend
    with torch.inference_mode(), contextlib.nullcontext() if native else references_only():
        feeder = Feeder(backend, len(prompts))
        for row, prompt in enumerate(prompts):
            feeder.prefill(row, oracle.tokens[:prompt])
        feeder.windows({row: oracle.tokens[:end] for row, end in enumerate(ends)}, salt=name)
    for row, end in enumerate(ends):
        assert_near(feeder.logits[row], oracle.logits[:end])


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mlx_way_of_saving_changes_no_bit(tmp_path, kind, dtype):
    tokens, found = prompt_of(49, 128), []
    for storage in ("hf", "mlx"):
        folder = tiny.write(tmp_path / storage, kind, storage=storage, dtype=dtype)
        if dtype == "bfloat16":
            fill_norms(folder / "model.safetensors", storage)
        with torch.inference_mode():
            feeder = Feeder(open_tiny(folder, rows=1))
            feeder.prefill(0, tokens[:33])
            feeder.windows({0: tokens}, salt="mlx")
        found.append(torch.stack(feeder.logits[0]))
    assert torch.equal(*found)


def fill_norms(path: Path, storage: str) -> None:
    """1 + w rounds in bfloat16, so norms that both ways hold exactly: a factor of 1.25."""
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if "norm" in name and "linear_attn" not in name:
            tensor.fill_(1.25 if storage == "mlx" else 0.25)
    save_file(tensors, path, {"format": "mlx" if storage == "mlx" else "pt"})


TEXTS = {
    "dense": ("dense", 0, {}),
    "dense-2": ("dense", 1, {"num_hidden_layers": 8}),
    "dense-tied": ("dense", 2, {"tied": True}),
    "dense-agreeable": ("dense", 0, {"agreeable": True}),
    "moe": ("moe", 0, {}),
    "moe-bfloat16": ("moe", 1, {"dtype": "bfloat16"}),
    "moe-agreeable": ("moe", 2, {"agreeable": True}),
    "next": ("next", 0, {}),
}


@pytest.mark.parametrize("name", TEXTS)
def test_greedy_texts(tmp_path, name):
    """200 tokens after a short and a long prompt, plain and with drafts."""
    kind, seed, options = TEXTS[name]
    folder = tiny.write(tmp_path, kind, seed, with_tokenizer=True, **options)
    prompts = [prompt_of(9, 384), prompt_of(70, 384)]
    model = transformers_model(folder)
    wanted = []
    for prompt in prompts:
        text = model.generate(torch.tensor([prompt]), max_new_tokens=200, do_sample=False)
        wanted.append(text[0, len(prompt) :].tolist())
        assert len(set(wanted[-1])) > 20, "a text that goes round in circles proves little"
    engine = headlong.load(str(folder), device="cpu", page=PAGE, chunk=CHUNK, rows=2, context=512)
    for depth in (0, 3):
        outputs = engine.generate(prompts, max_tokens=200, depth=depth, ignore_eos=True)
        assert [list(output.tokens) for output in outputs] == wanted
        assert all(bool(output.speculative.drafted) == bool(depth) for output in outputs)
        if depth and options.get("agreeable"):
            assert all(output.speculative.accepted > 40 for output in outputs)
