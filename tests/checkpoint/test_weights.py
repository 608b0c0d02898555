"""One model saved in every way comes out as one set of arrays; anything amiss is one sentence."""

import itertools
import json
import tracemalloc

import numpy as np
import pytest
import torch

from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.checkpoint.tensor import as_float32
from tests import tiny


def arrays(folder):
    """Everything the model needs, read in float32."""
    checkpoint = open_checkpoint(str(folder))
    wanted = checkpoint.config.expected()
    if checkpoint.head.found:
        wanted |= checkpoint.config.expected_head()
    read = {name: as_float32(checkpoint.weights.read(name, shape)) for name, shape in wanted.items()}
    checkpoint.weights.check_all_used(ignore_head=False)
    return read


def truth(folder, seed=0, tied=False):
    """The canonical arrays straight from the values the folder was written with."""
    config = json.loads((folder / "config.json").read_text())
    values = tiny.values(config.get("text_config", config), seed)
    if tied:
        del values["lm_head.weight"]
    plain = "linear_attn."  # its norm is a weight as it stands
    return {
        name: (value + 1 if "norm" in name and plain not in name else value).numpy() for name, value in values.items()
    }


def same(found, wanted, tolerance=0.0):
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
@pytest.mark.parametrize("storage", ["hf", "mlx"])
@pytest.mark.parametrize("head", ["main", "sidecar", "bare"])
def test_every_storage_is_the_same_model(tmp_path, kind, storage, head):
    for sharded, prefix in itertools.product((False, True), ("text", "vl")):
        folder = tmp_path / f"{sharded}{prefix}"
        tiny.write(
            folder, kind, storage=storage, head=head, sharded=sharded, prefix="text" if kind == "next" else prefix
        )
        same(arrays(folder), truth(folder))


@pytest.mark.parametrize("trunk", ["packed", "per_expert", "stacked"])
@pytest.mark.parametrize("head", ["packed", "per_expert", "stacked"])
def test_experts_of_trunk_and_head_are_told_apart(tmp_path, trunk, head):
    tiny.write(tmp_path, "moe", experts=trunk, head_experts=head)
    same(arrays(tmp_path), truth(tmp_path))


@pytest.mark.parametrize(("trunk", "head"), [("hf", "mlx"), ("mlx", "hf")])
@pytest.mark.parametrize("place", ["main", "sidecar"])
@pytest.mark.parametrize("metadata", [True, False])
def test_norms_of_trunk_and_head_are_told_apart(tmp_path, trunk, head, place, metadata):
    """In one file the label is the trunk's, and wrong for the head."""
    tiny.write(tmp_path, storage=trunk, head_storage=head, head=place, metadata=metadata)
    same(arrays(tmp_path), truth(tmp_path))


@pytest.mark.parametrize(("key_heads", "value_heads"), [(4, 4), (2, 4), (1, 4), (3, 9)])
def test_fused_projections_of_every_ratio(tmp_path, key_heads, value_heads):
    sizes = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "linear_value_head_dim": 5}
    tiny.write(tmp_path, "next", hidden_size=20, **sizes)
    same(arrays(tmp_path), truth(tmp_path))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_types_are_kept_and_norms_are_float32(tmp_path, dtype):
    tiny.write(tmp_path, dtype=dtype, tied=True)
    weights = open_checkpoint(str(tmp_path)).weights
    assert weights.read("embed_tokens.weight", (128, 32)).dtype == dtype
    assert weights.read("norm.weight", (32,)).dtype == "float32"
    assert weights.read("layers.0.linear_attn.A_log", (4,)).dtype == "float32"
    same(arrays(tmp_path), truth(tmp_path, tied=True), tolerance=0.01)


def test_bfloat16_bits(tmp_path):
    tiny.write(tmp_path, dtype="bfloat16")
    array = open_checkpoint(str(tmp_path)).weights.read("lm_head.weight", (128, 32))
    wanted = tiny.values(json.loads((tmp_path / "config.json").read_text()), 0)["lm_head.weight"].to(torch.bfloat16)
    assert array.data.dtype == np.uint16
    np.testing.assert_array_equal(array.data, wanted.view(torch.uint16).numpy())


def test_some_layers_without_experts(tmp_path):
    tiny.write(tmp_path, "next", mlp_only_layers=[1], decoder_sparse_step=1)
    same(arrays(tmp_path), truth(tmp_path))


def test_what_is_not_needed_is_counted(tmp_path, edit_tensors):
    tiny.write(tmp_path, prefix="vl", tied=True)

    def add(tensors):
        tensors["lm_head.weight"] = torch.zeros(128, 32)
        tensors["model.language_model.rotary_emb.inv_freq"] = torch.zeros(2)

    edit_tensors(tmp_path / "model.safetensors", add)
    checkpoint = open_checkpoint(str(tmp_path))
    assert checkpoint.weights.skipped == {"vision": 3, "tied lm_head": 1, "rotary buffers": 1}
    same(arrays(tmp_path), truth(tmp_path, tied=True))


def test_missing_tensor(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.pop("model.norm.weight"))
    weights = open_checkpoint(str(tmp_path)).weights
    assert "norm.weight" not in weights
    assert "no norm.weight" in refused(weights.read, "norm.weight", (32,))
    assert "no tensor norm.weight" in refused(weights.shape, "norm.weight")


def test_missing_expert_is_named(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path, "moe", experts="per_expert")
    name = "layers.1.mlp.experts.3.up_proj.weight"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.pop(f"model.{name}"))
    weights = open_checkpoint(str(tmp_path)).weights
    assert name in refused(weights.read, "layers.1.mlp.experts.gate_up_proj", (6, 48, 32))


@pytest.mark.parametrize(
    ("kind", "stored", "name", "shape"),
    [
        ("dense", "lm_head.weight", "lm_head.weight", (128, 32)),
        ("next", "model.layers.0.linear_attn.in_proj_qkvz.weight", "layers.0.linear_attn.in_proj_z.weight", (32, 32)),
        ("next", "model.layers.0.mlp.experts.2.down_proj.weight", "layers.0.mlp.experts.down_proj", (6, 32, 24)),
    ],
)
def test_wrong_shape(tmp_path, refused, edit_tensors, kind, stored, name, shape):
    tiny.write(tmp_path, kind)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({stored: torch.zeros(3, 7)}))
    sentence = refused(open_checkpoint(str(tmp_path)).weights.read, name, shape)
    assert "[3, 7]" in sentence
    assert "asks for [" in sentence


def test_leftover_tensor(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({"model.odd": torch.zeros(3)}))
    checkpoint = open_checkpoint(str(tmp_path))
    for name, shape in checkpoint.config.expected().items():
        checkpoint.weights.read(name, shape)
    assert "odd" in checkpoint.weights.unused()
    assert "(odd)" in refused(checkpoint.weights.check_all_used, True)
    assert "and 13 more" in refused(checkpoint.weights.check_all_used, False)


def test_spare_experts_are_leftover(tmp_path):
    tiny.write(tmp_path, "moe", experts="per_expert", num_experts=8)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_experts": 6}))
    assert "layers.0.mlp.experts.7.up_proj.weight" in open_checkpoint(str(tmp_path)).weights


def test_one_tensor_under_two_names(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path)
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({"norm.weight": torch.zeros(32)}))
    assert "model.norm.weight" in refused(open_checkpoint, str(tmp_path))


def test_fp8_quantised_experts(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path, "next")

    def quantise(tensors):
        for name in [name for name in tensors if ".experts." in name]:
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    edit_tensors(tmp_path / "model.safetensors", quantise)
    checkpoint = open_checkpoint(str(tmp_path))
    assert "FP8" in refused(checkpoint.weights.read, "layers.0.mlp.experts.down_proj", (6, 32, 24))
    assert "FP8" in checkpoint.head.reason


def test_mixed_types_of_experts(tmp_path, refused, edit_tensors):
    tiny.write(tmp_path, "next")
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    edit_tensors(tmp_path / "model.safetensors", lambda tensors: tensors.update({name: tensors[name].half()}))
    weights = open_checkpoint(str(tmp_path)).weights
    assert "one type is wanted" in refused(weights.read, "layers.0.mlp.experts.gate_up_proj", (6, 48, 32))


@pytest.mark.parametrize("experts", ["packed", "per_expert", "stacked"])
def test_reading_holds_one_tensor_at_most(tmp_path, experts):
    sizes = {"num_experts": 32, "moe_intermediate_size": 128, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    tiny.write(tmp_path, "moe", experts=experts, **sizes)
    weights = open_checkpoint(str(tmp_path)).weights
    tracemalloc.start()
    array = weights.read("layers.0.mlp.experts.gate_up_proj", (32, 256, 32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert array.data.nbytes <= peak < 1.2 * array.data.nbytes
