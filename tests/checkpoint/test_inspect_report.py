"""The report, and the command that shows it."""

import argparse
import json

import pytest
import torch

from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.checkpoint.inspect import inspect
from headlong.cli import inspect as command
from headlong.errors import UserError
from tests import tiny
from tests.quantised import quantise


def report(folder):
    return inspect(open_checkpoint(str(folder)))


def shown(capsys, folder, *flags):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args([str(folder), *flags])) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["dense", "moe", "next"])
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_add_up(tmp_path, kind, tied):
    found = report(tiny.write(tmp_path, kind, tied=tied))
    values = tiny.values(tiny.text_config(kind, tiny.Options(tied=tied), {}), 0)
    if tied:
        del values["lm_head.weight"]
    assert found.parameters.total == sum(value.numel() for value in values.values())
    assert found.whole
    assert found.layers == {"linear_attention": 3, "full_attention": 1}
    inactive = sum(value.numel() for name, value in values.items() if name.startswith("layers") and ".experts." in name)
    trunk = found.parameters.total - found.parameters.mtp_head - inactive * 4 // 6
    assert found.parameters.active == trunk - (0 if tied else 128 * 32)


@pytest.mark.parametrize("tied", [True, False])
def test_memory(tmp_path, tied):
    found = report(tiny.write(tmp_path, tied=tied, dtype="bfloat16"))
    numbers, table = found.parameters.total, 128 * 32
    assert found.memory["cuda"].weights == 2 * numbers
    # On a CPU matrices keep their two bytes, everything else has four, and the LM head has a copy in one.
    small = sum(
        value.numel()
        for name, value in tiny.values(tiny.text_config("dense", tiny.Options(), {}), seed=0).items()
        if value.dim() == 1 or "conv1d" in name
    )
    assert found.memory["cpu"].weights == 2 * (numbers - small) + 4 * small + table
    assert found.memory["cuda"].kv_per_token == 2 * 2 * (2 * 2 * 16)  # one layer and the head
    assert found.memory["cpu"].state_per_sequence == 3 * 4 * (4 * 16 * 16 + 9 * 4 * (16 + 16 + 1) + 128 * (3 + 9))


def test_a_quantised_model_is_counted_by_its_weights(tmp_path, capsys):
    plain = report(tiny.write(tmp_path / "plain", "moe", dtype="bfloat16"))
    folder = tiny.write(tmp_path / "packed", "moe", dtype="bfloat16")
    packed = report(quantise(folder, others={"mlp.gate": 4, "lm_head": False}))
    assert packed.whole
    assert packed.parameters == plain.parameters
    assert packed.head.parameters == plain.head.parameters
    assert packed.disk_bytes < plain.disk_bytes
    assert packed.memory["cuda"] == plain.memory["cuda"]
    # On a CPU what was quantised has four bytes; the LM head still has two.
    quantised = packed.storage["8-bit affine, groups of 8"] + packed.storage["4-bit affine, groups of 8"]
    assert packed.memory["cpu"].weights == plain.memory["cpu"].weights + 2 * quantised
    assert sum(packed.storage.values()) == packed.parameters.total
    assert packed.storage["4-bit affine, groups of 8"] == 5 * 6 * 32
    assert list(packed.storage) == sorted(packed.storage, key=packed.storage.get, reverse=True)
    text = " ".join(shown(capsys, folder).split())
    assert "8-bit affine, groups of 8: 9" in text
    assert "%; bfloat16: " in text


def test_how_plain_models_are_stored(tmp_path, capsys):
    folder = tiny.write(tmp_path)
    assert list(report(folder).storage) == ["float32"]
    assert "stored as float32 on disk" in " ".join(shown(capsys, folder).split())


def test_broken_model_is_still_described(tmp_path, edit_tensors, capsys):
    tiny.write(tmp_path)

    def spoil(tensors):
        tensors.pop("model.norm.weight")
        tensors["model.odd"] = torch.zeros(3)
        tensors["lm_head.weight"] = torch.zeros(3, 3)

    edit_tensors(tmp_path / "model.safetensors", spoil)
    found = report(tmp_path)
    assert (found.missing, found.leftover, found.whole) == (("norm.weight",), ("odd",), False)
    assert found.faulty[0].startswith("lm_head.weight has shape [3, 3]")
    text = shown(capsys, tmp_path)
    assert "cannot be run as it is" in text
    assert "odd" in text


def test_plain_output(tmp_path, capsys):
    text = shown(capsys, tiny.write(tmp_path, "moe", prefix="vl", head="sidecar"))
    for part in ("qwen3_5_moe", "3 linear attention", "6 experts, 2 a token", "mtp.safetensors", "can run", "3 vision"):
        assert part in text


def test_reason_is_shown(tmp_path, capsys):
    text = " ".join(shown(capsys, tiny.write(tmp_path, head="none")).split())
    assert "cannot run: config.json promises an MTP head" in text


def test_json_output(tmp_path, capsys):
    content = json.loads(shown(capsys, tiny.write(tmp_path), "--json"))
    assert content["head"]["found"] is True
    assert content["parameters"]["total"] > content["parameters"]["active"]
    assert content["whole"] is True
    assert content["memory"].keys() == {"cpu", "cuda"}


def test_unreadable_model_is_an_error(tmp_path):
    with pytest.raises(UserError):
        command.run(argparse.Namespace(model=str(tmp_path), json=False))
