"""Decode speed of nano, or of a random Qwen3.5 of 55M parameters, on this machine, as ratios of one run.

    python benchmarks/decode.py [--shape 55m|nano] [--stored bfloat16|float32] [--rounds 12] [--tokens 48] [--threads N]

Every contender takes its turn in each repetition; medians of all of them:
  plain decoding against transformers' generate on the same weights,
  rounds of widths 2 to 6 against a plain step (the drafts are wrong, so all commit one token),
  the first draft of a round (feeding one pair, and picking) and each further one against a plain step.
Before any time is taken, the text is checked to be the same. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.drafters import HeadDrafter, Wrong
from headlong.backends.torch.native.library import torch_threads
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.checkpoint.families import model_config
from headlong.checkpoint.find import find
from headlong.checkpoint.packed import pair
from headlong.checkpoint.shards import gather
from headlong.checkpoint.tensor import as_float32, whole
from headlong.cli.machine import cpu_name
from headlong.engine.costs import Row
from headlong.engine.request import Sampling
from headlong.settings import Settings

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 16384,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "full_attention_interval": 4,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(12)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "dtype": "float32",
    "eos_token_id": 0,
}
WIDTHS = range(2, 7)
PROMPT = [(i * 7919 + 13) % 16384 for i in range(64)]


def write_checkpoint(folder: Path, stored: torch.dtype) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes().items():
        value = torch.randn(shape, generator=generator) * (0.02 if len(shape) > 1 else 0.1)
        tensors[name] = (value.unsqueeze(1) if "conv1d" in name else value).to(stored)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_nano(folder: Path, stored: torch.dtype) -> None:
    """The embedded model unquantised, so that transformers can read it too."""
    source = find("nano")
    config = json.loads((source / "config.json").read_text())
    unquantised = {name: value for name, value in config.items() if not name.startswith("quantization")}
    (folder / "config.json").write_text(json.dumps(unquantised))
    tensors, _ = gather(source, config)
    plain = {
        name: torch.from_numpy(as_float32(whole(item).read())).to(stored)
        for name, item in pair(tensors, config).items()
    }
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})


def shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by its Hugging Face name."""
    config = model_config(CONFIG, (0,))
    names = {**config.expected(), **config.expected_head()}
    return {name if name.startswith("mtp.") else f"model.{name}": shape for name, shape in names.items()}


def started(backend: TorchBackend, depth: int) -> Row:
    """A row with the prompt and its first drafts."""
    row = Row(backend)
    row.start(PROMPT, Sampling(), 0)
    row.round(0, depth)
    return row


def timed(action: Callable[[], object], times: int) -> float:
    """Seconds for one of `times` calls."""
    start = time.perf_counter()
    for _ in range(times):
        action()
    return (time.perf_counter() - start) / times


def drafts_of(backend: TorchBackend) -> Callable[[], tuple[float, float]]:
    """Seconds of the first draft, and of one more: drafting five less drafting one, over four."""
    drafter = backend.rounds.drafter
    assert isinstance(drafter, HeadDrafter)
    feeds = []
    original = drafter.draft

    def keep(feed, depths):  # type: ignore[no-untyped-def]
        feeds.append(feed)
        return original(feed, depths)

    drafter.draft = keep  # type: ignore[method-assign]
    started(backend, 1)
    feed = feeds[0]

    def measure() -> tuple[float, float]:
        with torch.inference_mode(), torch_threads(backend.round_threads):
            five, one = timed(lambda: original(feed, [5]), 8), timed(lambda: original(feed, [1]), 8)
        return one, (five - one) / 4

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("55m", "nano"), default="55m", help="nano: the embedded model")
    parser.add_argument("--stored", choices=("bfloat16", "float32"), default="bfloat16", help="the checkpoint's type")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    write = write_nano if args.shape == "nano" else write_checkpoint
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, getattr(torch, args.stored))
        result = measure_all(folder, args.rounds, args.tokens)
    ratios = {
        "plain_over_transformers": result["transformers_s"] / result["plain_s"],
        **{f"width_{width}_over_plain": result[f"width_{width}_s"] / result["plain_s"] for width in WIDTHS},
        "first_draft_over_plain": result["first_draft_s"] / result["plain_s"],
        "head_step_over_plain": result["head_step_s"] / result["plain_s"],
    }
    bars = {"plain_over_transformers": ">= 2", "width_4_over_plain": "<= 1.5", "head_step_over_plain": "<= 0.2"}
    for key, value in ratios.items():
        print(f"{key:26} {value:6.2f}" + (f"   wanted {bars[key]}" if key in bars else ""))
    print(f"plain step {result['plain_s'] * 1e3:.2f} ms, transformers {result['transformers_s'] * 1e3:.2f} ms")
    machine = {"cpu": cpu_name(), "threads": args.threads, "torch": torch.__version__, "shape": args.shape}
    machine["stored"] = args.stored
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    print(json.dumps({**ratios, **result, **machine}))


def measure_all(folder: Path, rounds: int, tokens: int) -> dict[str, float]:
    settings = Settings(rows=1, context=2048)
    plain_backend, head_backend = (TorchBackend(open_checkpoint(str(folder)), settings) for _ in range(2))
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plain, text = Row(plain_backend), list(PROMPT)
    plain.start(PROMPT, Sampling(), 0)

    def peer_generate(count: int) -> list[int]:
        out = peer.generate(
            torch.tensor([PROMPT]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0].tolist()

    while len(text) < len(PROMPT) + 32:
        text += plain.round(0, 0)
    assert peer_generate(32) == text[: len(PROMPT) + 32], "transformers gives other text"
    drafts = drafts_of(head_backend)
    plain_backend.rounds.drafter = Wrong({0: [0] * 10000}, CONFIG["vocab_size"])
    times: defaultdict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        # Every width anew from the prompt, so that all have as many tokens behind them.
        for width in (1, *WIDTHS):
            name = "plain_s" if width == 1 else f"width_{width}_s"
            depth, row = width - 1, started(plain_backend, width - 1)
            times[name].append(statistics.fmean(row.time(depth, depth) for _ in range(tokens)))
        first, further = drafts()
        times["first_draft_s"].append(first)
        times["head_step_s"].append(further)
        # The prompt is in both runs, so the difference is decoding alone.
        short, long = timed(lambda: peer_generate(2), 1), timed(lambda: peer_generate(2 + tokens), 1)
        times["transformers_s"].append((long - short) / tokens)
    return {key: statistics.median(values) for key, values in times.items()}


if __name__ == "__main__":
    main()
