"""config.json, good and bad."""

import json

import pytest

from headlong.checkpoint.config import eos_token_ids, read_config
from headlong.checkpoint.families import model_config
from tests import tiny


def load(folder):
    raw = read_config(folder)
    return model_config(raw, eos_token_ids(folder, raw))


def test_no_folder(tmp_path, refused):
    assert "is not a folder" in refused(read_config, tmp_path / "nothing")


def test_no_config(tmp_path, refused):
    assert "no config.json" in refused(read_config, tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_bad_json(tmp_path, refused, content):
    (tmp_path / "config.json").write_bytes(content)
    assert "config.json" in refused(read_config, tmp_path)


def test_unknown_family_lists_the_known(tmp_path, refused, edit_config):
    tiny.write(tmp_path)
    edit_config(tmp_path, model_type="llama")
    sentence = refused(load, tmp_path)
    assert "'llama'" in sentence
    assert "qwen3_5_moe_text" in sentence
    edit_config(tmp_path, model_type=None)
    assert "no model_type" in refused(load, tmp_path)


def test_end_tokens_come_from_the_generation_config_first(tmp_path, edit_config):
    tiny.write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert load(tmp_path).eos_token_ids == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load(tmp_path).eos_token_ids == (7, 8)
    (tmp_path / "generation_config.json").unlink()
    edit_config(tmp_path, eos_token_id=9)
    assert load(tmp_path).eos_token_ids == (9,)
    edit_config(tmp_path, eos_token_id=None)
    assert load(tmp_path).eos_token_ids == ()
