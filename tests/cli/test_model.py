"""The whole command on tiny checkpoints: flags in, a true model, text out."""

import json
import signal
import subprocess
import sys

import pytest

from headlong.cli.main import entrypoint
from tests import tiny
from tests.cli.conftest import ROOT, Ran, plain_environment

LONG = ["-n", "3000", "--ignore-eos", "-p", "Hello"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return str(tiny.write(folder, with_tokenizer=True, agreeable=True))


@pytest.fixture(scope="module")
def headless(tmp_path_factory):
    """A model whose config promises a head that is not there."""
    folder = tmp_path_factory.mktemp("models") / "headless"
    return str(tiny.write(folder, with_tokenizer=True, head="none"))


@pytest.fixture
def generate(capsys):
    def run(*argv):
        code = entrypoint(["generate", *argv])
        caught = capsys.readouterr()
        return Ran(code, caught.out, caught.err)

    return run


@pytest.fixture
def answer(generate, model):
    def run(*argv):
        ran = generate("-m", model, "--json", "-n", "24", "--ignore-eos", *argv)
        assert (ran.code, ran.err) == (0, "")
        return [json.loads(line) for line in ran.out.splitlines()]

    return run


def test_drafting_is_used_and_reported(answer):
    [got] = answer("-p", "Hello")
    assert got["speculative"]["used"] == "mtp"
    assert got["speculative"]["accepted"] > 0
    assert got["speculative"]["rounds"] + got["speculative"]["accepted"] == len(got["tokens"]) == 24
    assert got["finish_reason"] == "length"
    assert got["timings"]["load_s"] > 0


@pytest.mark.parametrize("sampling", [[], ["--temp", "0.9", "--seed", "5"]])
def test_the_text_does_not_depend_on_drafting(answer, sampling):
    [plain] = answer("-p", "Hello", "--no-mtp", *sampling)
    assert plain["speculative"]["used"] == "none"
    assert plain["speculative"]["reason"]
    for depth in ("0", "1", "3", "8", "auto"):
        [drafted] = answer("-p", "Hello", "--depth", depth, *sampling)
        assert drafted["tokens"] == plain["tokens"]
        assert drafted["text"] == plain["text"]


def test_prompts_together_answer_as_they_do_alone(answer, tmp_path):
    prompts = ["Hello", "a longer prompt than that", "x"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    together = answer("--prompts", str(tmp_path / "prompts.txt"))
    assert [one["tokens"] for one in together] == [answer("-p", prompt)[0]["tokens"] for prompt in prompts]


def test_the_chat_template_is_used_unless_raw(answer):
    assert answer("-p", "Hello", "--raw")[0]["prompt_tokens"] == 5
    assert answer("-p", "Hello")[0]["prompt_tokens"] > 5


def test_text_and_figures_of_a_process(process, model):
    ran = process("headlong", "generate", "-m", model, "-n", "24", "--raw", "-v", stdin="Hello")
    assert ran.returncode == 0
    figures, details, seconds = ran.stderr.splitlines()
    assert " drafts a window), accepted by position: " in figures
    assert ", loaded in " in details
    assert seconds.startswith("queue ")
    assert ", depths " in seconds


def test_a_head_that_is_absent_is_told(generate, headless):
    ran = generate("-m", headless, "-p", "Hello", "-n", "4")
    assert ran.code == 0
    warning, figures = ran.err.splitlines()
    assert warning.startswith("headlong: warning: ")
    assert ", no drafts: " in figures


@pytest.mark.parametrize("argv", [[], ["--mtp"]])
def test_a_head_that_is_required_and_absent_exits_3(generate, headless, argv):
    ran = generate("-m", headless, "-p", "Hello", "--require-draft", *argv)
    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("headlong: ")
    assert ran.err.count("\n") == 1


def test_a_folder_that_is_not_there_is_one_sentence(generate, tmp_path):
    ran = generate("-m", str(tmp_path / "nowhere"), "-p", "Hello")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "nowhere" in ran.err


def test_a_prompt_beyond_the_context_is_one_sentence(generate, model):
    ran = generate("-m", model, "-p", "Hello " * 100, "--context", "256")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "256" in ran.err


def test_ctrl_c_leaves_the_figures(model):
    child = subprocess.Popen(
        [sys.executable, "-m", "headlong", "generate", "-m", model, *LONG],
        cwd=ROOT,
        env=plain_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a runner may have it ignored
    )
    child.stdout.read(20)
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 130
    assert out.endswith(b"\n")
    assert err.count(b"\n") == 1
    assert b" drafts a window), accepted by position: " in err


@pytest.mark.parametrize("named", [True, False], ids=["named", "embedded"])
@pytest.mark.parametrize("argv", [["examples/generate.py"], ["examples/stream.py", "Hello"]])
def test_the_examples_run(model, argv, named):
    ran = subprocess.run(
        [sys.executable, *argv, *([model] if named else [])],
        cwd=ROOT,
        env=plain_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    assert ran.stdout
