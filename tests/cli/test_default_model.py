"""The commands and `load` when no model is named."""

import json

import pytest

import headlong
from headlong.checkpoint.find import DEFAULT
from headlong.cli.main import entrypoint
from tests.cli.conftest import Ran
from tests.embedded import install


@pytest.fixture
def folder(tmp_path, monkeypatch):
    return install(tmp_path / "nano", monkeypatch)


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = entrypoint(argv)
        caught = capsys.readouterr()
        return Ran(code, caught.out, caught.err)

    return run


@pytest.mark.parametrize("named", [[], ["-m", DEFAULT]])
def test_generate(folder, run, named):
    argv = ["generate", "-p", "Hello", "-n", "8", "--ignore-eos", "--json", "--device", "cpu"]
    ran = run(*argv, *named)
    assert (ran.code, ran.err) == (0, "")
    answer = json.loads(ran.out)
    assert answer["model"] == DEFAULT
    assert answer["speculative"]["used"] == "mtp"
    named_by_path = json.loads(run(*argv, "-m", str(folder)).out)
    assert answer["tokens"] == named_by_path["tokens"]


@pytest.mark.parametrize("named", [[], [DEFAULT]])
def test_inspect(folder, run, named):
    ran = run("inspect", "--json", *named)
    assert (ran.code, ran.err) == (0, "")
    report = json.loads(ran.out)
    assert (report["name"], report["folder"], report["whole"]) == (DEFAULT, str(folder), True)
    assert "8-bit affine, groups of 8" in report["storage"]


@pytest.mark.parametrize("named", [[], [None], [DEFAULT]])
def test_load(folder, named):
    engine = headlong.load(*named, device="cpu")
    assert engine.name == DEFAULT
    assert len(engine.generate("Hello", max_tokens=4, ignore_eos=True).tokens) == 4


def test_a_local_folder_of_that_name(folder, run, monkeypatch, tmp_path):
    (tmp_path / "elsewhere" / DEFAULT).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("inspect", DEFAULT).code == 0
    ran = run("inspect", f"./{DEFAULT}")
    assert ran.code == 2
    assert "has no config.json" in ran.err


@pytest.mark.parametrize("argv", [["generate", "-p", "Hello"], ["inspect"]])
@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_damage_is_one_sentence_and_exit_code_2(folder, run, argv, name):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-100])
    ran = run(*argv)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"headlong: {path} is damaged (")
    assert ran.err.endswith(": reinstall headlong, which it is a part of.\n")


@pytest.mark.parametrize("command", ["generate", "inspect"])
def test_the_help_names_it(run, command):
    assert f"default: {DEFAULT}, the small model that comes with headlong" in " ".join(
        run(command, "--help").out.split()
    )
