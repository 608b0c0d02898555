"""`headlong tune` on the real engine over the scripted backend."""

import json
import re

import pytest

from headlong.engine import tuning
from tests.cli import fake_model
from tests.cli.conftest import on_terminal

ROWS = ["--rows", "4"]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headlong" / "tune"


@pytest.fixture
def engines(command, monkeypatch):
    """The engines that commands have loaded."""
    loaded = []

    def load(name=None, **options):
        loaded.append(fake_model.load(name, **options))
        loaded[-1].backend = loaded[-1]._loop.backend
        return loaded[-1]

    monkeypatch.setattr("headlong.load", load)
    monkeypatch.setattr(tuning, "folder_of", fake_model.folder_of)
    return loaded


@pytest.fixture
def tune(command, engines, cache):
    def run(*argv):
        return command("tune", *argv)

    return run


def test_tables_and_where_it_is_kept(tune, cache):
    ran = tune("clocked", *ROWS)
    assert (ran.code, ran.err) == (0, "")
    (path,) = cache.iterdir()
    lines = ran.out.splitlines()
    assert lines[0] == "clocked"
    assert lines[1].startswith("abacus with 2 beads; ")
    assert lines[-1] == f"Kept in {path}"
    assert max(map(len, lines[:-1])) <= 100
    assert re.search(r"\n 1 +2\.10 +2\.20 \(1\.05\) +2\.30 \(1\.10\) .* 0\.50 +0\.20 *\n", ran.out)
    assert re.search(r"\n 4 +4\.8\d +5\.\d\d \(1\.1\d\) ", ran.out)  # sampled
    assert re.search(r"\n rows +greedy 50% +greedy 70% +greedy 90% +sampled 50%", ran.out)
    assert "\x1b" not in ran.out


def test_the_record_has_every_figure(tune, cache):
    ran = tune("clocked", *ROWS, "--json")
    assert (ran.code, ran.err, ran.out.count("\n")) == (0, "", 1)
    got = json.loads(ran.out)
    (path,) = cache.iterdir()
    assert (got["model"], got["device"], got["path"]) == ("clocked", "abacus with 2 beads", str(path))
    assert {"cpu", "cores", "platform", "python", "headlong"} == set(got["machine"])
    assert len(got["rounds"]) == 2 * 3 * 5
    for one in got["rounds"]:
        pace = {"plain": 1, "sampled": 2}[one["kind"]]
        plain, wanted = (pace * (2e-3 + 1e-4 * tokens) for tokens in (one["rows"], one["rows"] * one["width"]))
        assert one["seconds"] == pytest.approx(wanted, rel=0.02)
        assert one["steps"] == pytest.approx(wanted / plain, rel=0.02)
    assert got["drafts"][0] == {
        "kind": "plain",
        "rows": 1,
        "first_s": pytest.approx(5e-4, rel=0.02),
        "further_s": pytest.approx(2e-4, rel=0.02),
    }
    assert got["costs"] == json.loads(path.read_text())["costs"]


def test_what_auto_would_choose_follows_from_the_costs(tune):
    """Of one row with half the drafts kept, two a round are best: 1.75 tokens in 2.3 + 0.7 ms, against one in 2.1."""
    choices = json.loads(tune("clocked", *ROWS, "--json").out)["choices"]
    assert len(choices) == 2 * 3 * 3
    depths = {(one["kind"], one["rows"], one["acceptance"]): one["depth"] for one in choices}
    assert depths["plain", 1, 0.5] == 2.0
    assert depths["plain", 1, 0.9] == 8.0
    for kind, rows in {(kind, rows) for kind, rows, _ in depths}:
        assert depths[kind, rows, 0.5] < depths[kind, rows, 0.7] < depths[kind, rows, 0.9]
    assert depths["plain", 4, 0.5] < depths["plain", 1, 0.5]
    first = next(one for one in choices if (one["kind"], one["rows"], one["acceptance"]) == ("plain", 1, 0.5))
    assert first["speedup"] == pytest.approx((1.75 / 3.0) / (1 / 2.1), rel=0.02)
    assert all(one["speedup"] > 1.0 for one in choices)


def test_the_next_load_starts_from_it(tune, command, engines):
    tune("clocked", *ROWS)
    command("generate", "-m", "clocked", "-p", "x", "-n", "1")
    assert engines[0].depths.costs.of("plain").verify.known is False
    assert engines[1].depths.costs.verify("plain", 12) == pytest.approx(3.2e-3, rel=0.02)


def test_what_is_kept_is_shown_and_nothing_is_measured(tune, engines, cache):
    measured = json.loads(tune("clocked", *ROWS, "--json").out)
    assert json.loads(tune("clocked", *ROWS, "--show", "--json").out) == measured
    assert engines[1].backend.rounds == []
    ran = tune("clocked", "--show")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith(f"\nKept in {next(cache.iterdir())}\n")
    assert re.search(r"\n 8 +2\.80 +- ", ran.out) or "\n 8 " not in ran.out  # nothing that was not measured


def test_nothing_to_show_is_one_sentence(tune, engines):
    ran = tune("clocked", "--show")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == (
        "headlong: nothing is kept for clocked on this machine; measure it with 'headlong tune', without --show.\n"
    )
    assert engines[0].backend.rounds == []


def test_another_number_of_threads_is_another_machine(tune):
    tune("clocked", *ROWS)
    assert tune("clocked", "--show", "--threads", "1").code == 2


def test_a_damaged_file_is_told_and_not_shown(tune, cache):
    tune("clocked", *ROWS)
    next(cache.iterdir()).write_text("{")
    ran = tune("clocked", "--show")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headlong: warning: ")
    assert ran.err.splitlines()[-1].startswith("headlong: nothing is kept for clocked on this machine;")
    assert tune("clocked", *ROWS).code == 0
    assert tune("clocked", "--show").code == 0


def test_forget(tune, engines, cache):
    tune("clocked", *ROWS)
    (path,) = cache.iterdir()
    ran = tune("clocked", "--forget")
    assert (ran.code, ran.out, ran.err) == (0, f"Deleted {path}\n", "")
    assert not path.exists()
    ran = tune("clocked", "--forget")
    assert (ran.code, ran.out) == (0, "Nothing was kept for clocked on this machine\n")
    assert json.loads(tune("clocked", "--forget", "--json").out) == {
        "model": "clocked",
        "path": str(path),
        "deleted": False,
    }
    assert engines[1].backend.rounds == []


def test_ctrl_c_leaves_what_was_kept(tune, cache):
    tune("clocked", *ROWS)
    (path,) = cache.iterdir()
    path.write_text("what was kept")
    ran = tune("interrupted", *ROWS)  # the scripted models have one folder's key
    assert (ran.code, ran.out) == (130, "")
    assert path.read_text() == "what was kept"
    assert list(cache.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_costs_no_figures(tune, tmp_path):
    (tmp_path / "headlong").write_text("")
    ran = tune("clocked", *ROWS)
    assert ran.code == 2
    assert "greedy: ms of a round" in ran.out
    assert "Kept in" not in ran.out
    assert ran.err.splitlines()[-1].endswith(
        " cannot be written (Not a directory); set XDG_CACHE_HOME to another folder."
    )


def test_a_model_without_a_head(tune):
    ran = tune("headless", *ROWS)
    assert ran.code == 0
    assert "\nNo depths to choose: the fake model has no head\n" in ran.out
    assert re.search(r"\n 1 +2\.10 +2\.20 \(1\.05\) .* - +- *\n", ran.out)
    assert json.loads(tune("headless", *ROWS, "--json").out)["choices"] == []


def test_the_settings_reach_the_engine(tune, engines):
    tune("clocked", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--context", "99", "--rows", "2")
    settings = engines[0].settings
    assert (settings.device, settings.dtype, settings.threads, settings.context) == ("cpu", "float32", 1, 99)
    assert (settings.rows, settings.prefix_bytes) == (2, 0)
    tune("clocked", "--forget")
    assert engines[1].settings.rows == 16


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([""], "the model's name is empty; name a folder or a hub name, or leave it out."),
        (["--rows", "0"], "rows is 0; it must be at least 1."),
        (["--rows", "-3"], "rows is -3; it must be at least 1."),
        (["--rows", "many"], "--rows: 'many' is not a whole number; run 'headlong tune --help' for what it takes."),
        (
            ["--show", "--forget"],
            "--forget: not allowed with argument --show; run 'headlong tune --help' for what it takes.",
        ),
        (
            ["--depths", "3"],
            "'--depths' is not an option of headlong tune; run 'headlong tune --help' for those it has.",
        ),
        (["--device", "abacus"], None),
    ],
)
def test_mistakes_are_one_sentence_before_any_load(command, monkeypatch, argv, sentence):
    monkeypatch.setattr("headlong.load", None)
    ran = command("tune", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("headlong: ")
    if sentence:
        assert ran.err == f"headlong: {sentence}\n"


def test_a_terminal_has_a_bar(cache):
    code, shown = on_terminal(["tests.cli.fake_model", "tune", "clocked", "--rows", "2"], COLUMNS="120")
    assert code == 0
    assert re.search(r"0/20.*pass 1 of 5, plain, rows: \d", shown)
    assert re.search(r"19/20.*pass 5 of 5, sampled, rows: \d", shown)
    assert "Kept in " in shown
