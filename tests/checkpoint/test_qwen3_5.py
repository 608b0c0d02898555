"""The Qwen3.5 config: where its fields may stand, and what is refused."""

import json

import pytest

from headlong.checkpoint.families.qwen3_5 import FULL, LINEAR, read
from tests import tiny


def raw(tmp_path, kind="dense", **options):
    return json.loads((tiny.write(tmp_path / "model", kind, **options) / "config.json").read_text())


def test_flat_and_nested_are_the_same(tmp_path):
    flat, nested = read(raw(tmp_path), ()), read(raw(tmp_path, prefix="vl"), ())
    assert (flat.model_type, nested.model_type) == ("qwen3_5_text", "qwen3_5")
    assert flat.expected() == nested.expected()
    assert (flat.rope_theta, flat.rotary_dim) == (nested.rope_theta, nested.rotary_dim) == (10000.0, 4)
    assert flat.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert flat.promises_head
    assert flat.num_experts == 0


def test_next(tmp_path):
    config = read(raw(tmp_path, "next", mlp_only_layers=[0], norm_topk_prob=False), ())
    assert config.layer_types == (LINEAR, LINEAR, LINEAR, FULL)
    assert config.sparse_layers == (False, True, True, True)
    assert not config.norm_topk_prob
    assert not config.promises_head


def test_sparse_step(tmp_path):
    assert read(raw(tmp_path, "next", decoder_sparse_step=2), ()).sparse_layers == (False, True, False, True)


def test_moe_always_renormalises(tmp_path):
    assert read(raw(tmp_path, "moe", norm_topk_prob=False), ()).norm_topk_prob


def test_top_level_tie_flag_wins(tmp_path):
    config = raw(tmp_path, prefix="vl", tied=True)
    config["text_config"]["tie_word_embeddings"] = False
    assert read(config, ()).tie_word_embeddings
    del config["tie_word_embeddings"]
    assert not read(config, ()).tie_word_embeddings


def test_rope_wherever_it_stands(tmp_path):
    config = raw(tmp_path)
    rope = config.pop("rope_parameters")
    assert read({**config, "rope_theta": 5e6, "partial_rotary_factor": 0.5}, ()).rotary_dim == 8
    assert read({**config, "rope_scaling": {**rope, "rope_theta": 7.0}}, ()).rope_theta == 7.0
    assert read({**config, "rope_theta": 9.0, "rope_scaling": {"type": "mrope"}}, ()).rope_theta == 9.0


REQUIRED = (
    "hidden_size num_hidden_layers vocab_size head_dim rms_norm_eps intermediate_size num_key_value_heads "
    "linear_num_value_heads linear_conv_kernel_dim max_position_embeddings"
)


@pytest.mark.parametrize("field", REQUIRED.split())
def test_missing_field_is_named(tmp_path, refused, field):
    config = raw(tmp_path)
    del config[field]
    assert f"no {field}" in refused(read, config, ())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "default"}}, "no rope_theta"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "even part"),
        ({"rope_parameters": 3}, "object is wanted"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"linear_num_key_heads": 3}, "must be a multiple"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"layer_types": [LINEAR]}, "4 entries"),
        ({"layer_types": ["sliding"] * 4}, "4 entries"),
        ({"hidden_size": "32"}, "whole number"),
        ({"hidden_size": 0}, "whole number"),
        ({"rms_norm_eps": "small"}, "number above 0"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
    ],
)
def test_refused_by_name(tmp_path, refused, change, said):
    assert said in refused(read, {**raw(tmp_path), **change}, ())


@pytest.mark.parametrize("field", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_experts_need_their_fields(tmp_path, refused, field):
    config = raw(tmp_path, "moe")
    del config[field]
    assert field in refused(read, config, ())
    assert "num_experts_per_tok = 7" in refused(read, {**raw(tmp_path, "moe"), "num_experts_per_tok": 7}, ())


def test_moe_needs_no_dense_width(tmp_path):
    config = raw(tmp_path, "moe")
    del config["intermediate_size"]
    assert read(config, ()).intermediate_size == 0
