"""The recipe's model: its arithmetic against plain forms, and the whole way from a few steps to an engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import headlong
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.drafters import Feed, Proposal
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.engine.request import Chunk, RowPlan, Sampling, Start
from headlong.settings import Settings
from model import Chain, Nano, UnitInverse, block_states, gather, prepare
from tokenizer import train as train_tokenizer
from tokenizer import write_model_files
from train import HELDOUT, MIX, TINY, Stream, rate

RECIPE = Path(__file__).parents[2] / "recipes" / "nano"


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Token by token, as the equations say."""
    batch, size, heads, dim = q.shape
    state, outputs = q.new_zeros(batch, heads, dim, dim), []
    for t in range(size):
        state = state * g[:, t].exp()[..., None, None]
        missing = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * missing)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    unit = [F.normalize(torch.randn(2, 192, 3, 16), dim=-1) for _ in range(2)]
    return [*unit, torch.randn(2, 192, 3, 16), -torch.rand(2, 192, 3) * 0.2, torch.rand(2, 192, 3)]


def test_blocks_give_the_recurrence_and_its_gradients() -> None:
    slow = [x.double().requires_grad_() for x in inputs()]
    fast = [x.requires_grad_() for x in inputs()]
    weight = torch.randn(2, 192, 3, 16)
    wanted = recurrence(*slow)
    (wanted * weight).sum().backward()
    u, w, k, decay, reach, inside = prepare(*fast)
    found = gather(*block_states(u, w, k, decay), reach, inside, 3)
    (found * weight).sum().backward()
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
    for a, b in zip(fast, slow, strict=True):
        assert (a.grad - b.grad).abs().max() < 2e-5 * b.grad.abs().max()


def test_inverse_holds_for_the_worst_keys() -> None:
    """All keys alike and all gates open: powers of A grow like binomials, blocks of 16 keep them small."""
    a = torch.ones(64, 64).tril(-1)
    found = UnitInverse.apply(a)
    torch.testing.assert_close((torch.eye(64) + a) @ found, torch.eye(64), atol=1e-3, rtol=0)


def shaken(seed: int = 0) -> Nano:
    torch.manual_seed(seed)
    model = Nano(TINY)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.1)
    return model


def write(model: Nano, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(model.config() | {"eos_token_id": 0}))
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_logits_are_those_of_transformers(tmp_path: Path) -> None:
    model = shaken()
    write(model, tmp_path)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, TINY.vocab, (2, 128))
    with torch.no_grad():
        found = F.linear(model.model(tokens), model.vocabulary)
        torch.testing.assert_close(found, oracle(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("length", [20, 37, 60])
def test_the_chain_trained_is_the_chain_the_engine_runs(tmp_path: Path, length: int) -> None:
    """Step by step: the same drafts from the training model's chain at one position as from a round."""
    model = shaken(length)
    write(model, tmp_path)
    backend = TorchBackend(open_checkpoint(str(tmp_path)), Settings(threads=1))
    drafter, drafts = backend.rounds.drafter, []
    assert drafter is not None
    draft = drafter.draft

    def keep(feed: Feed, depths: list[int], least: list[float]) -> Proposal:
        proposal = draft(feed, depths, least)
        drafts.append(proposal.tokens[0].tolist())
        return proposal

    drafter.draft = keep  # type: ignore[method-assign]
    prompt = torch.randint(0, TINY.vocab, (length,)).tolist()
    backend.start(Start(0, prompt, Sampling(), 0))
    backend.prefill(Chunk(0, 0, prompt[:-1], prompt[-1], [0], draft=4))
    (kept,) = backend.round([RowPlan(0, 0, 4)]).result().kept
    sequence = F.pad(torch.tensor([*prompt, *kept.tokens, *drafts[-1]]), (0, 128))[None, :128]
    state, memory, found = model.model(sequence)[:, :100], Chain(), []
    for depth in range(1, 5):
        state = model.mtp(state, model.model.embed_tokens(sequence[:, depth : depth + 100]), memory)
        found.append(int(F.linear(state, model.vocabulary)[0, length - 1].argmax()))
    assert found == drafts[-1]


def test_rate_rises_stays_and_falls_to_nothing() -> None:
    assert [round(rate(p), 2) for p in (0.0, 0.005, 0.3, 0.775, 1.0)] == [0.0, 0.5, 1.0, 0.5, 0.0]


def test_an_epoch_shows_every_block_once(tmp_path: Path) -> None:
    np.arange(64 * 8 + 1, dtype=np.uint16).tofile(tmp_path / "x.u16")
    stream = Stream(tmp_path / "x.u16", 64, "cpu", 0)
    firsts = stream.take(6)[:, 0]
    assert len(set(firsts.tolist())) == 6
    assert len(set((firsts % 64).tolist())) == 1


def test_a_few_steps_end_in_a_model_that_drafts(tmp_path: Path) -> None:
    """train.py and export.py as they are typed; the engine runs what they wrote."""
    tokens, dice = tmp_path / "tokens", np.random.default_rng(0)
    tokens.mkdir()
    for kind in (*MIX, *HELDOUT):
        (dice.zipf(1.3, 20_000) % TINY.vocab).astype(np.uint16).tofile(tokens / f"{kind}.u16")
    write_model_files(train_tokenizer(iter(["def f(x): return x\n" * 50]), TINY.vocab), tmp_path / "model")
    short = ("--tiny", "--device", "cpu", "--steps", 3, "--batch", 4, "--length", 128)
    run("train.py", "--tokens", tokens, "--out", tmp_path / "run", *short)
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 3
    assert log[-1]["heldout-code-loss"] < np.log(TINY.vocab) + 0.1
    run("export.py", "--run", tmp_path / "run", "--tokenizer", tmp_path / "model", "--out", tmp_path / "nano")
    engine = headlong.load(tmp_path / "nano")
    plain = engine.generate("def f(x):", max_tokens=12, draft_kind="none", ignore_eos=True)
    drafted = engine.generate("def f(x):", max_tokens=12, depth=3, ignore_eos=True)
    assert plain.tokens == drafted.tokens
    assert drafted.speculative.drafted > 0


def run(script: str, *arguments: object) -> None:
    command = [sys.executable, str(RECIPE / script), *map(str, arguments)]
    path = {**os.environ, "PYTHONPATH": str(RECIPE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path)
    assert done.returncode == 0, done.stderr
