"""What loading a model costs in memory, measured in a process of its own."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from headlong.backends.torch.native.library import library
from tests import tiny

MOST = 1.2  # peak while loading, in bytes of weights: as held afterwards, or as stored where a head in 8 bits is less
SIZES = {"hidden_size": 768, "num_hidden_layers": 4, "head_dim": 64}
EXPERTS = {"num_experts": 24, "moe_intermediate_size": 192, "vocab_size": 8000}
MODELS = {
    "dense-bfloat16": ("dense", {"dtype": "bfloat16", "vocab_size": 40000, "intermediate_size": 3072}),
    "dense-float32": ("dense", {"dtype": "float32", "vocab_size": 16000, "intermediate_size": 3072}),
    "tied-bfloat16": ("dense", {"dtype": "bfloat16", "vocab_size": 60000, "intermediate_size": 2048, "tied": True}),
    "packed-bfloat16": ("moe", {"dtype": "bfloat16", **EXPERTS}),
    "per-expert-float32": ("moe", {"dtype": "float32", "experts": "per_expert", **EXPERTS}),
    "next-bfloat16": ("next", {"dtype": "bfloat16", **EXPERTS}),
}

MEASURE = """
import json, sys, types, torch
from pathlib import Path
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.native.library import library
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.settings import Settings

def peak():
    "Of this program alone: ru_maxrss starts from what the parent had."
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

def walk(thing):
    "Bytes by type of all tensors that can be reached, each piece of memory once."
    if id(thing) in seen:
        return
    seen[id(thing)] = thing
    if isinstance(thing, torch.Tensor):
        packed = thing.is_mkldnn  # memory of oneDNN's own, which torch cannot look into
        at = id(thing) if packed else thing.untyped_storage().data_ptr()
        size = thing.numel() * thing.element_size() if packed else thing.untyped_storage().nbytes()
        if at not in memory:
            memory.add(at)
            sizes[str(thing.dtype)] = sizes.get(str(thing.dtype), 0) + size
    elif isinstance(thing, types.MethodType):
        walk(thing.__self__)
    elif isinstance(thing, (list, tuple)):
        for part in thing:
            walk(part)
    elif type(thing).__module__.startswith("headlong"):
        for part in vars(thing).values():
            walk(part)

library()
before = peak()
backend = TorchBackend(open_checkpoint(sys.argv[1]), Settings(device="cpu", rows=1, context=64, page=16, chunk=32))
after = peak()
seen, memory, sizes = {}, set(), {}
walk(backend.rounds.model)
print(json.dumps({"grown": after - before, "held": sum(sizes.values()), "sizes": sizes}))
"""


@dataclass(frozen=True)
class Cost:
    stored: int  # bytes on disk
    grown: int
    held: int
    sizes: dict[str, int]  # by type


@pytest.fixture(scope="module")
def cost_of(tmp_path_factory):
    costs: dict[str, Cost] = {}

    def get(name: str) -> Cost:
        if name not in costs:
            kind, options = MODELS[name]
            folder = tiny.write(tmp_path_factory.mktemp(name), kind, **SIZES, **options)
            command = [sys.executable, "-c", MEASURE, str(folder)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            file = folder / "model.safetensors"
            costs[name] = Cost(stored=file.stat().st_size, **found)
            file.unlink()
        return costs[name]

    return get


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
@pytest.mark.parametrize("name", MODELS)
def test_peak_memory(cost_of, name):
    cost = cost_of(name)
    assert cost.stored > 80e6, "too small to measure"
    assert cost.held >= cost.stored * 0.85  # the head may be kept in 8 bits
    assert cost.grown >= cost.held * 0.99, "that cannot be all"
    weights = max(cost.held, cost.stored)
    assert cost.grown <= MOST * weights, f"{cost.grown / weights:.2f} times the weights"


@pytest.mark.skipif(library() is None, reason="no C compiler")
@pytest.mark.parametrize("name", ["dense-bfloat16", "tied-bfloat16", "packed-bfloat16", "next-bfloat16"])
def test_bfloat16_stays_bfloat16(cost_of, name):
    cost = cost_of(name)
    assert cost.sizes["torch.bfloat16"] > 0.85 * cost.stored  # all but the head
    assert cost.sizes["torch.float32"] < 0.02 * cost.stored
