"""Which files make up a model."""

import json

import torch
from safetensors.torch import save_file

from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.checkpoint.shards import INDEX, gather
from tests import tiny


def names(folder, **config):
    return gather(folder, config)[0]


def test_index_and_no_index_give_the_same_tensors(tmp_path):
    one, many = tiny.write(tmp_path / "one"), tiny.write(tmp_path / "many", sharded=True)
    assert names(one).keys() == names(many).keys()


def test_any_file_name_will_do_without_an_index(tmp_path):
    tiny.write(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "layers-0.safetensors")
    assert "mtp.fc.weight" in names(tmp_path)


def test_missing_shard(tmp_path, refused):
    tiny.write(tmp_path, sharded=True)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(gather, tmp_path, {})


def test_index_names_a_tensor_its_shard_lacks(tmp_path, refused):
    tiny.write(tmp_path, sharded=True)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["model.ghost"] = "model-00001-of-00003.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert "model.ghost" in refused(gather, tmp_path, {})


def test_bad_index(tmp_path, refused):
    tiny.write(tmp_path, sharded=True)
    (tmp_path / INDEX).write_text("{")
    assert "not readable as JSON" in refused(gather, tmp_path, {})
    (tmp_path / INDEX).write_text("{}")
    assert "no weight_map" in refused(gather, tmp_path, {})


def test_no_weights(tmp_path, refused):
    assert "has no weights" in refused(gather, tmp_path, {})


def test_two_models_in_one_folder(tmp_path, refused):
    tiny.write(tmp_path)
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert "copy.safetensors and model.safetensors" in refused(gather, tmp_path, {})


def test_sidecars_under_every_name(tmp_path):
    for number, file in enumerate(
        (
            "mtp.safetensors",
            "mtp/weights.safetensors",
            "model-mtp.safetensors",
            "model-mtp-head.safetensors",
            "My-MTP.safetensors",
        )
    ):
        for sharded in (False, True):
            folder = tiny.write(tmp_path / f"{number}{sharded}", head="sidecar", sharded=sharded)
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / "mtp.safetensors").rename(folder / file)
            head = open_checkpoint(str(folder)).head
            assert (head.found, head.where) == (True, file)


def test_sidecar_named_in_the_config(tmp_path, edit_config):
    tiny.write(tmp_path, head="sidecar", sharded=True)
    (tmp_path / "mtp.safetensors").rename(tmp_path / "extra.safetensors")
    assert not open_checkpoint(str(tmp_path)).head.found
    edit_config(tmp_path, mlx_lm_extra_tensors={"mtp_file": "extra.safetensors"})
    assert open_checkpoint(str(tmp_path)).head.found


def test_config_cannot_name_a_file_outside(tmp_path):
    folder = tiny.write(tmp_path / "model", head="none")
    save_file({"fc.weight": torch.zeros(1)}, tmp_path / "outside.safetensors")
    for path in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        stored, _ = gather(folder, {"mlx_lm_extra_tensors": {"mtp_file": path}})
        assert "mtp.fc.weight" not in stored


def test_bare_keys_of_a_sidecar_are_the_head(tmp_path):
    tiny.write(tmp_path, head="bare")
    assert {"mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= names(tmp_path).keys()


def test_second_head_is_left_aside(tmp_path):
    folder, other = tiny.write(tmp_path / "a"), tiny.write(tmp_path / "b", head="sidecar")
    (other / "mtp.safetensors").rename(folder / "mtp.safetensors")
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.weights.skipped == {"second MTP head": 15}
    assert checkpoint.head.where == "model.safetensors"
