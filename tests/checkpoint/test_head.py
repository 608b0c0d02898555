"""A head that is whole, and each reason it may not be."""

import pytest
import torch

from headlong.checkpoint.checkpoint import open_checkpoint
from tests import tiny


def head(folder):
    facts = open_checkpoint(str(folder)).head
    assert facts.found == (facts.reason == "")
    assert facts.found or (facts.reason.endswith(".") and "\n" not in facts.reason)
    return facts


@pytest.mark.parametrize(("kind", "tensors"), [("dense", 15), ("moe", 19), ("next", 19)])
def test_whole(tmp_path, kind, tensors):
    facts = head(tiny.write(tmp_path, kind))
    assert (facts.found, facts.tensors, facts.where, facts.missing) == (True, tensors, "model.safetensors", ())
    assert facts.convention.startswith("delta")
    assert facts.parameters == sum(
        value.numel()
        for name, value in tiny.values(tiny.text_config(kind, tiny.Options(), {}), 0).items()
        if "mtp." in name
    )


def test_promised_and_absent(tmp_path):
    assert "promises" in head(tiny.write(tmp_path, head="none")).reason


def test_neither_promised_nor_there(tmp_path):
    assert "has no MTP head" in head(tiny.write(tmp_path, "next", head="none")).reason


def test_incomplete(tmp_path, edit_tensors):
    tiny.write(tmp_path, head="sidecar")
    gone = ("mtp.layers.0.self_attn.k_proj.weight", "mtp.layers.0.self_attn.v_proj.weight")
    edit_tensors(tmp_path / "mtp.safetensors", lambda tensors: [tensors.pop(name) for name in gone])
    facts = head(tmp_path)
    assert facts.reason.startswith("2 of the MTP head's 15 tensors are missing")
    assert facts.missing == gone


def test_one_expert_missing(tmp_path, edit_tensors):
    tiny.write(tmp_path, "next", head="sidecar")
    name = "mtp.layers.0.mlp.experts.5.down_proj.weight"
    edit_tensors(tmp_path / "mtp.safetensors", lambda tensors: tensors.pop(name))
    assert name in head(tmp_path).reason


def test_wrong_shape(tmp_path, edit_tensors):
    tiny.write(tmp_path, head="sidecar")
    edit_tensors(tmp_path / "mtp.safetensors", lambda tensors: tensors.update({"mtp.fc.weight": torch.zeros(32, 32)}))
    assert "mtp.fc.weight has shape [32, 32]" in head(tmp_path).reason


def test_dense_head_on_experts(tmp_path):
    sparse, dense = tiny.write(tmp_path / "a", "moe", head="none"), tiny.write(tmp_path / "b", head="sidecar")
    (dense / "mtp.safetensors").rename(sparse / "mtp.safetensors")
    assert "missing" in head(sparse).reason


@pytest.mark.parametrize(
    ("change", "said"),
    [({"mtp_num_hidden_layers": 2}, "2 layers"), ({"mtp_use_dedicated_embeddings": True}, "embeddings of its own")],
)
def test_kinds_that_cannot_run(tmp_path, edit_config, change, said):
    tiny.write(tmp_path)
    edit_config(tmp_path, **change)
    assert said in head(tmp_path).reason


def test_unknown_tensor(tmp_path, edit_tensors):
    tiny.write(tmp_path, head="sidecar")
    edit_tensors(tmp_path / "mtp.safetensors", lambda tensors: tensors.update({"mtp.main_proj.weight": torch.zeros(2)}))
    assert "mtp.main_proj.weight" in head(tmp_path).reason
