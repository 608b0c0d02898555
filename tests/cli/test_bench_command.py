"""`headlong bench` on the real engine over the scripted backend."""

import json
import re

import pytest

from tests.cli import fake_model
from tests.cli.conftest import on_terminal

BRIEF = ["--limit", "1", "-n", "16", "--depths", "0-3"]


@pytest.fixture
def engines(command, monkeypatch):
    """The engines that commands have loaded."""
    loaded = []

    def load(name=None, **options):
        loaded.append(fake_model.load(name, **options))
        loaded[-1].backend = loaded[-1]._loop.backend
        return loaded[-1]

    monkeypatch.setattr("headlong.load", load)
    return loaded


@pytest.fixture
def bench(command, engines):
    def run(*argv):
        return command("bench", *argv)

    return run


@pytest.fixture
def record(bench):
    """What the JSON line of a run that went well says."""

    def run(*argv, code=0):
        ran = bench(*argv, "--json")
        assert ran.code == code
        assert ran.out.count("\n") == 1
        return json.loads(ran.out)

    return run


def test_tables_then_one_line_of_json(bench):
    ran = bench("fine", *BRIEF)
    assert (ran.code, ran.err) == (0, "")
    *shown, last = ran.out.splitlines()
    assert json.loads(last)["model"] == "fine"
    assert max(map(len, shown)) <= 100
    text = "\n".join(shown)
    for title in (
        "greedy, all sets",
        "greedy: speed-up by set and depth",
        "greedy: drafts kept by position, at depth 3",
        "temperature 0.8, seeded, all sets",
    ):
        assert f"\n{title}\n" in text
    assert "Prompts: code 1 of 8, prose 1 of 6, chat 1 of 6, rewrite 1 of 4; once, up to 16 tokens" in text
    assert "Same text: all 32 texts, at every depth, are those of plain decoding" in text
    assert "peak memory of the process" in text
    assert "\x1b" not in ran.out


def test_json_is_all_there_is_on_request(record):
    got = record("fine", *BRIEF)
    assert got["settings"] == {
        "depths": [0, 1, 2, 3],
        "max_tokens": 16,
        "repeat": 1,
        "seed": 0,
        "prompts": {"code": 1, "prose": 1, "chat": 1, "rewrite": 1},
    }
    assert (got["same_text"], got["compared"], got["differences"], got["interrupted"]) == (True, 32, [], False)
    assert {"cpu", "cores", "platform", "python", "headlong"} == set(got["machine"])
    assert got["peak_memory"] > 2**20
    greedy, seeded = got["samplings"]
    assert (greedy["name"], greedy["temperature"]) == ("greedy", 0.0)
    assert (seeded["name"], seeded["temperature"]) == ("temperature 0.8, seeded", 0.8)
    assert list(greedy["sets"]) == ["code", "prose", "chat", "rewrite"]


def test_the_figures_are_those_of_the_runs(record):
    """The scripted drafter is right twice, then wrong: at depth 3 two drafts of every round are kept."""
    [greedy] = record("fine", *BRIEF, "--temp", "0")["samplings"]
    plain, _, _, third = greedy["all"]
    assert (plain["tokens"], plain["rounds"], plain["tokens_a_round"], plain["accepted"]) == (64, 64, 1.0, [])
    assert (third["tokens"], third["rounds"]) == (64, 24)
    assert third["accepted"] == [1.0, 1.0, 0.0]
    assert third["tokens_a_round"] == pytest.approx(64 / 24, rel=1e-4)
    assert third["speed"]["value"] == pytest.approx(64 / third["decode_s"], rel=1e-3)
    assert third["overall"] == pytest.approx(plain["decode_s"] / third["decode_s"], rel=1e-3)
    assert third["speedup"]["low"] <= third["speedup"]["value"] <= third["speedup"]["high"]
    costs = greedy["costs"]
    assert third["predicted"] == pytest.approx(64 / 24 / (costs["verify"]["3"] + costs["draft"]["3"]), rel=1e-3)


def test_a_depth_that_gives_another_text_is_an_error_after_the_table(bench):
    ran = bench("careless", *BRIEF, "--temp", "0")
    assert ran.code == 1
    assert "NOT the same text: 4 of 16 texts differ from plain decoding's" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["same_text"] is False
    assert ran.err == (
        "headlong: prompt code 1, greedy, depth 3 gave another text than plain decoding after 2 equal tokens (3 more), "
        "and they must be the same; report it with this command and the model's name.\n"
    )


def test_the_difference_is_in_the_record(record):
    got = record("careless", *BRIEF, "--temp", "0", "--sets", "prose", code=1)
    assert got["differences"] == [{"case": "prose 1", "mode": "greedy", "repetition": 0, "depth": 3, "equal_tokens": 2}]


def test_a_run_that_breaks_off_is_a_fault_and_no_text(bench):
    ran = bench("faulty", *BRIEF)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == "headlong: a request broke off: RuntimeError: a cable was cut.\n"


def test_no_run_finds_its_prompt_cached(bench, engines):
    """Rounds are timed in pages that cached prompts would lie in, and the speed of prefill would be none."""
    bench("fine", *BRIEF, "--sets", "rewrite")
    assert engines[0].settings.prefix_bytes == 0


def test_unseeded_texts_are_measured_and_not_compared(record):
    got = record("careless", *BRIEF, "--temp", "0.8", "--unseeded", "--depths", "0,3", "--sets", "code", code=1)
    assert [one["name"] for one in got["samplings"]] == ["temperature 0.8, seeded", "temperature 0.8, unseeded"]
    assert (got["compared"], len(got["differences"])) == (2, 1)
    assert got["samplings"][1]["all"][1]["accepted"] == [1.0, 1.0, 0.0]


def test_a_model_without_a_head_is_measured_plain_and_says_why(bench):
    ran = bench("headless", *BRIEF)
    assert (ran.code, ran.err) == (0, "")
    assert "\nPlain decoding alone: the fake model has no head\n" in ran.out
    assert re.search(r"\n plain +\d", ran.out)
    *shown, last = ran.out.splitlines()
    assert "speed-up" not in "".join(shown)
    got = json.loads(last)
    assert got["settings"]["depths"] == [0]
    assert got["no_draft_reason"] == "the fake model has no head"
    assert [one["costs"] for one in got["samplings"]] == [None, None]


def test_plain_decoding_alone_on_request(bench):
    ran = bench("fine", *BRIEF, "--depths", "0")
    assert ran.code == 0
    assert "\nPlain decoding alone: no other depth was asked for\n" in ran.out


def test_texts_too_short_for_a_speed_are_compared_all_the_same(bench):
    ran = bench("silent", *BRIEF, "--temp", "0")
    assert (ran.code, ran.err) == (0, "")
    assert "No speed: every text had fewer than two tokens" in ran.out
    assert "Same text: all 16 texts" in ran.out


def test_ctrl_c_shows_what_there_is(bench):
    ran = bench("interrupted", *BRIEF, "--temp", "0")
    assert (ran.code, ran.err) == (130, "")
    assert "Prompts: code 1 of 8" in ran.out
    assert "rewrite" not in ran.out
    assert re.search(r"\n 3 +\d+ ", ran.out)
    assert "(interrupted)" in ran.out
    assert json.loads(ran.out.splitlines()[-1])["interrupted"] is True


def test_ctrl_c_before_anything_is_complete(bench, tmp_path):
    ran = bench("impatient", *BRIEF, "--html", str(tmp_path / "page.html"))
    assert (ran.code, ran.err) == (130, "")
    assert "No prompt was run at every depth" in ran.out
    assert "Same text" not in ran.out


def test_verbose_adds_a_table_for_each_set(bench):
    ran = bench("fine", *BRIEF, "-v", "--sets", "code,chat")
    assert "\ngreedy, code\n" in ran.out
    assert "\ngreedy, chat\n" in ran.out


# --- prompts -----------------------------------------------------------------------------------------------------


def test_files_take_the_place_of_the_sets(record, tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "def f():"}\n{"text": "x"}\n')
    (tmp_path / "asked.txt").write_text("one?\ntwo?\nthree?\n")
    files = ["--prompts", str(tmp_path / "mine.jsonl"), "--prompts", str(tmp_path / "asked.txt")]
    assert record("fine", *BRIEF, *files)["settings"]["prompts"] == {"mine": 1, "asked": 1}
    assert record("fine", *BRIEF, *files, "--limit", "0")["settings"]["prompts"] == {"mine": 2, "asked": 3}
    assert record("fine", *BRIEF, *files, "--sets", "code")["settings"]["prompts"] == {"code": 1, "mine": 1, "asked": 1}


def test_the_name_of_a_file_is_not_read_as_markup(bench, tmp_path):
    (tmp_path / "[red]x.txt").write_text("one?\n")
    ran = bench("fine", *BRIEF, "--sets", "code", "--prompts", str(tmp_path / "[red]x.txt"))
    assert ran.out.count("\n [red]x ") == 4


def test_raw_prompts_and_messages(bench, engines, tmp_path):
    lines = [{"prompt": "raw"}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}]
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, lines)))
    for model in ("fine", "templateless"):
        bench(model, *BRIEF, "--prompts", str(tmp_path / "two.jsonl"), "--limit", "0")
    given = [
        {engine.text.decode((*chunk.tokens, chunk.after)) for chunk in engine.backend.chunks} for engine in engines
    ]
    assert given == [{"raw", "<system>s<user>u<assistant>"}, {"raw", "s\n\nu"}]


def test_a_prompt_beyond_the_context_is_named(bench, tmp_path):
    (tmp_path / "long.txt").write_text("short\n" + "x" * 5000)
    ran = bench("fine", *BRIEF, "--prompts", str(tmp_path / "long.txt"), "--limit", "0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("headlong: prompt long 2: the prompt has 5017 tokens and the context 4096")


# --- flags -------------------------------------------------------------------------------------------------------


def test_the_settings_reach_the_engine(bench, engines):
    bench(
        "fine", *BRIEF, "--sets", "code", "--device", "cpu", "--dtype", "float32", "--threads", "1", "--context", "99"
    )
    settings = engines[0].settings
    assert (settings.device, settings.dtype, settings.threads, settings.context) == ("cpu", "float32", 1, 99)
    assert settings.rows == 1


def test_without_a_name_the_default_model_runs(bench):
    assert bench(*BRIEF, "--sets", "code").out.startswith("nano\n")


@pytest.mark.parametrize(("depths", "wanted"), [("2", [0, 2]), ("0,4,1", [0, 1, 4]), ("1-2,8", [0, 1, 2, 8])])
def test_plain_decoding_always_runs(record, depths, wanted):
    assert (
        record("fine", "--limit", "1", "-n", "4", "--sets", "code", "--depths", depths)["settings"]["depths"] == wanted
    )


def test_repetitions_and_seeds(record, engines):
    got = record("fine", *BRIEF, "--sets", "code", "--repeat", "3", "--seed", "7", "--temp", "0.5")
    assert (got["settings"]["repeat"], got["settings"]["seed"], got["compared"]) == (3, 7, 12)
    assert got["samplings"][0]["all"][0]["runs"] == 3


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([""], "the model's name is empty; name a folder or a hub name, or leave it out."),
        (["--html", "/tmp"], "/tmp is a folder; name a file to write."),
        (
            ["--depths", "0-999999999999"],
            "--depths: '0-999999999999' is past the deepest, 8; run 'headlong bench --help' for what it takes.",
        ),
        (
            ["--depths", "3-1"],
            "--depths: '3-1' names no depth; give some such as 0,1,4 or 0-4; "
            "run 'headlong bench --help' for what it takes.",
        ),
        (
            ["--depths", "deep"],
            "--depths: 'deep' is not a whole number; run 'headlong bench --help' for what it takes.",
        ),
        (["--limit", "-1"], "limit is -1; it must be at least 0."),
        (["--repeat", "0"], "repeat is 0; it must be at least 1."),
        (["-n", "0"], "max_tokens is 0; it must be at least 1."),
        (["--seed", "-1"], f"seed is -1; it must be between 0 and {2**63 - 1}."),
        (["--temp", "0,-1"], "temperature is -1.0; it must be between 0 and 100."),
        (["--temp", "0", "--unseeded"], None),
        (
            ["--sets", "code,poems"],
            "'poems' is not a set; name some of code, prose, chat, rewrite, or a file with --prompts.",
        ),
        (["--sets", "code,code"], "two sets are called code; rename a file or leave one out."),
        (["--prompts", "/nowhere/x.jsonl"], None),
        (["--html", "/nowhere/page.html"], "/nowhere is not a folder; make it or write page.html elsewhere."),
        (["--device", "abacus"], None),
    ],
)
def test_mistakes_are_one_sentence_before_any_load(command, monkeypatch, argv, sentence):
    monkeypatch.setattr("headlong.load", None)
    ran = command("bench", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("headlong: ")
    if sentence:
        assert ran.err == f"headlong: {sentence}\n"


# --- pictures ----------------------------------------------------------------------------------------------------


def test_a_page_is_written_beside_the_tables(bench, tmp_path):
    ran = bench("fine", *BRIEF, "--html", str(tmp_path / "page.html"))
    got = json.loads(ran.out.splitlines()[-1])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for section in got["samplings"]:
        for figures in section["all"][1:]:
            assert f"<td>{figures['tokens_a_round']:.2f}</td>" in page
            told = re.findall(rf", depth {figures['depth']}: ([\d.]+)</title>", page)
            assert figures["speedup"]["value"] in [pytest.approx(float(value), abs=0.0051) for value in told]
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_page_that_cannot_be_written_costs_no_figures(bench, tmp_path):
    (link := tmp_path / "page.html").symlink_to(tmp_path / "no" / "where")
    ran = bench("fine", *BRIEF, "--html", str(link))
    assert ran.code == 2
    assert json.loads(ran.out.splitlines()[-1])["same_text"] is True
    assert ran.err == f"headlong: {link} cannot be written (No such file or directory); name another file.\n"


def test_a_picture_without_matplotlib_is_refused_before_any_load(command, monkeypatch, tmp_path):
    monkeypatch.setattr("headlong.load", None)
    monkeypatch.setattr("headlong.cli.plot.find_spec", lambda name: None)
    ran = command("bench", "--png", str(tmp_path / "x.png"))
    assert ran.code == 2
    assert ran.err == (
        "headlong: --png needs matplotlib, which is not installed; pip install matplotlib, or use --html.\n"
    )


def test_a_picture_of_plain_decoding_is_refused_before_any_run(bench, engines, monkeypatch, tmp_path):
    monkeypatch.setattr("headlong.cli.plot.find_spec", lambda name: object())
    ran = bench("headless", *BRIEF, "--png", str(tmp_path / "x.png"))
    assert (ran.code, engines[0].backend.rounds) == (2, [])
    assert "plain decoding is all there is to draw (the fake model has no head); leave it out." in ran.err


def test_a_picture_is_drawn(bench, tmp_path):
    pytest.importorskip("matplotlib")
    ran = bench("fine", *BRIEF, "--png", str(tmp_path / "x.png"))
    assert (ran.code, ran.err) == (0, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


# --- processes ---------------------------------------------------------------------------------------------------


def test_a_terminal_has_a_bar_and_json_in_brief():
    flags = (*BRIEF, "--sets", "code", "--temp", "0")
    code, shown = on_terminal(["tests.cli.fake_model", "bench", "slow", *flags], COLUMNS="120")
    assert code == 0
    assert re.search(r"0/6.*warming up", shown)
    assert re.search(r"2/6.*code 1, greedy, depth 1", shown)
    assert "Same text: all 4 texts" in shown
    last = json.loads(shown.splitlines()[-1])
    assert (last["model"], last["same_text"]) == ("slow", True)
    (greedy,) = last["samplings"]
    assert greedy["name"] == "greedy"
    assert greedy["plain_tps"] > 0
    assert greedy["speedup"].keys() == {"1", "2", "3"}
    assert len(shown.splitlines()[-1]) < 400


def test_a_log_has_neither_bar_nor_colours(process):
    ran = process("tests.cli.fake_model", "bench", "fine", *BRIEF, "--sets", "code", FORCE_COLOR="")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "\x1b" not in ran.stdout
    assert json.loads(ran.stdout.splitlines()[-1])["model"] == "fine"


def test_help_tells_what_files_may_hold(process):
    ran = process("headlong", "bench", "--help", COLUMNS="100")
    assert ran.returncode == 0
    told = " ".join(ran.stdout.split())
    assert "prompt or text, which are continued as they are; turns (its first), question or messages" in told
