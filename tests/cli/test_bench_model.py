"""`headlong bench` on tiny checkpoints: true rounds, true costs, the same text."""

import json

import pytest

from headlong.cli.main import entrypoint
from tests import tiny

BRIEF = ["--json", "--sets", "code,chat", "--limit", "1", "-n", "12", "--depths", "0,1,3", "--threads", "1"]


@pytest.fixture
def record(capsys, tmp_path):
    def run(*argv, **model):
        folder = tiny.write(tmp_path / "tiny", with_tokenizer=True, **model)
        assert entrypoint(["bench", str(folder), *BRIEF, *argv]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_a_model_with_a_head(record):
    got = record("--unseeded", agreeable=True)
    assert (got["same_text"], got["compared"]) == (True, 2 * 2 * 3)
    assert [one["name"] for one in got["samplings"]] == [
        "greedy",
        "temperature 0.8, seeded",
        "temperature 0.8, unseeded",
    ]
    for section in got["samplings"]:
        assert section["costs"]["plain_s"] > 0
        assert set(section["costs"]["verify"]) == {"1", "3"}
        plain, one, three = section["all"]
        assert plain["tokens_a_round"] == 1.0
        assert (len(one["accepted"]), len(three["accepted"])) == (1, 3)
        assert three["predicted"] > 0
    assert got["samplings"][0]["all"][2]["tokens_a_round"] > 1.5
    assert got["device"].startswith("1 CPU thread")


def test_a_model_without_a_head(record, capsys):
    got = record(head="none")
    assert got["settings"]["depths"] == [0]
    assert got["no_draft_reason"]
    assert got["samplings"][0]["all"][0]["speed"]["value"] > 0
