"""A whole model on a GPU against transformers there: logits of a prompt in chunks, then of windows of many widths."""

import pytest
import torch

from headlong.backends.torch.backend import TorchBackend
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.settings import Settings
from tests import tiny
from tests.backends.torch.driver import CHUNK, PAGE, prompt_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SIZES = {
    "hidden_size": 256,
    "vocab_size": 1024,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
DENSE = {**SIZES, "intermediate_size": 768}
SPARSE = {**SIZES, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
MODELS = {"dense": DENSE, "moe": SPARSE, "next": SPARSE}
LENGTH, PROMPT = 150, 97


def theirs(folder, tokens, dtype):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to("cuda").eval()
    with torch.inference_mode():
        return model(torch.tensor([tokens], device="cuda")).logits[0].double()


def ours(folder, tokens, dtype):
    from tests.backends.torch.test_oracle import Feeder

    settings = Settings(device="cuda", dtype=dtype, rows=4, page=PAGE, chunk=CHUNK, context=256)
    backend = TorchBackend(open_checkpoint(str(folder)), settings)
    with torch.inference_mode(), torch.device("cuda"):
        feeder = Feeder(backend)
        feeder.prefill(0, tokens[:PROMPT])
        feeder.windows({0: tokens}, salt="logits")
    return torch.stack(feeder.logits[0]).double()


def distances(found, wanted):
    """Of every position, against the size of its logits."""
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind, tmp_path):
    tokens = prompt_of(LENGTH, SIZES["vocab_size"])
    exact = tiny.write(tmp_path / "exact", kind, **MODELS[kind])
    wanted = theirs(exact, tokens, torch.float32)
    assert distances(ours(exact, tokens, "float32"), wanted).max() < 1e-3
    # The same numbers in all three, so that what differs is how each computes.
    half = tiny.write(tmp_path / "half", kind, dtype="bfloat16", **MODELS[kind])
    wanted = theirs(half, tokens, torch.float32)
    # By the median: where rounding makes a mixture choose another expert, how far off a position is says little.
    usual = distances(theirs(half, tokens, torch.bfloat16), wanted).median()
    found = distances(ours(half, tokens, "bfloat16"), wanted).median()
    assert found < 1.25 * usual, (found, usual)
