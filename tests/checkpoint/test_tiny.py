"""The tiny checkpoints themselves: transformers loads them, and their text is alive."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import tiny

PROMPT = torch.tensor([[1, 2, 3, 4, 5]])


def load(folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    return model


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {}),
        ("dense", {"tied": True, "prefix": "vl", "sharded": True}),
        ("moe", {"dtype": "bfloat16"}),
        ("moe", {"experts": "per_expert"}),
        ("next", {"head": "sidecar"}),
        ("dense", {"agreeable": True}),
        ("dense", {"agreeable": True, "tied": True}),
    ],
)
def test_transformers_loads_it_and_its_text_is_alive(tmp_path, kind, options):
    model = load(tiny.write(tmp_path, kind, **options))
    model.generation_config.eos_token_id = None
    text = model.generate(PROMPT, max_new_tokens=32, do_sample=False)[0, PROMPT.shape[1] :].tolist()
    assert len(set(text)) > 10


def test_next_and_moe_of_one_seed_are_one_model(tmp_path):
    logits = [load(tiny.write(tmp_path / kind, kind))(PROMPT).logits for kind in ("moe", "next")]
    torch.testing.assert_close(*logits)


def test_tokenizer(tmp_path):
    tiny.write(tmp_path, with_tokenizer=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "héllo"}], add_generation_prompt=True)["input_ids"]
    assert tokenizer.decode(ids) == "<|im_start|>user\nhéllo<|im_end|>\n<|im_start|>assistant\n"
    assert max(ids) < 384
    assert tokenizer.eos_token_id == 258
