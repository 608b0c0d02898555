"""The model in the package: its sums, and every way it can be damaged."""

import json
import random

import pytest

from headlong.checkpoint import embedded
from headlong.checkpoint.checkpoint import open_checkpoint
from tests.embedded import install

FILES = ["config.json", "model.safetensors", "sums.json", "tokenizer.json", "tokenizer_config.json"]
REAL = embedded.FOLDER


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return install(tmp_path / "nano", monkeypatch)


@pytest.fixture
def refusal(refused):
    """The sentence, which must name the file and say what to do."""

    def call(path):
        sentence = refused(open_checkpoint, "nano")
        assert sentence.startswith(f"{path} ")
        assert sentence.endswith(": reinstall headlong, which it is a part of.")
        return sentence

    return call


def test_a_whole_model_is_opened(folder):
    checkpoint = open_checkpoint("nano")
    assert (checkpoint.name, checkpoint.folder) == ("nano", folder)
    assert checkpoint.head.found


def test_the_sums_are_of_what_is_read(folder):
    sums = json.loads((folder / "sums.json").read_text())
    assert sums.keys() == {*FILES, "generation_config.json"} - {"sums.json"}
    before = (folder / "sums.json").read_text()
    assert embedded.write_sums(folder) == folder / "sums.json"
    assert (folder / "sums.json").read_text() == before


def test_the_card_may_change(folder):
    (folder / "README.md").write_text("Another card.\n")
    assert embedded.embedded() == folder


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_missing(folder, refusal, name):
    (folder / name).unlink()
    assert "is missing" in refusal(folder / name)


def test_all_is_missing(folder, refusal, monkeypatch):
    monkeypatch.setattr(embedded, "FOLDER", folder / "nowhere")
    assert "is missing" in refusal(folder / "nowhere" / "sums.json")


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_not_one(folder, refusal, name):
    (folder / name).unlink()
    (folder / name).mkdir()
    assert "cannot be read (Is a directory)" in refusal(folder / name)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 5, 0.5, -1])
def test_a_file_is_cut_short(folder, refusal, name, kept):
    path = folder / name
    content = path.read_bytes().rstrip()  # a newline at the end is not missed
    path.write_bytes(content[: int(kept * len(content)) if isinstance(kept, float) else kept])
    assert "is damaged (" in refusal(path)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"garbage", b"[]", b"{}", b'{"config.json": 3}'])
def test_a_file_is_something_else(folder, refusal, name, content):
    (folder / name).write_bytes(content)
    assert "is damaged (" in refusal(folder / name)


def test_a_header_of_garbage(folder, refusal):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:200] = bytes(192)
    path.write_bytes(content)
    assert "is damaged (its SHA-256 is " in refusal(path)


@pytest.mark.parametrize("seed", range(5))
def test_a_single_bit_is_flipped(folder, refusal, seed):
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    place = random.Random(seed).randrange(len(content))
    content[place] ^= 1 << seed
    path.write_bytes(content)
    refusal(path)


def test_a_chat_template_of_its_own_has_a_sum(folder, refusal):
    path = folder / "chat_template.jinja"
    path.write_text("{{ messages }}")
    embedded.write_sums(folder)
    path.write_text("{{ message }}")
    assert "is damaged (" in refusal(path)


def test_sums_that_are_none(folder, refusal):
    path = folder / "sums.json"
    path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_text()), 3)))
    assert "does not hold the sums" in refusal(path)


def test_sums_of_too_few_files(folder, refusal):
    path = folder / "sums.json"
    sums = json.loads(path.read_text())
    del sums["tokenizer.json"]
    path.write_text(json.dumps(sums))
    assert "tokenizer.json" in refusal(path)


@pytest.mark.skipif(not REAL.exists(), reason="the model is not in the tree yet")
def test_the_model_in_the_package_is_whole():
    assert embedded.embedded() == REAL
    checkpoint = open_checkpoint("nano")
    assert checkpoint.head.found
