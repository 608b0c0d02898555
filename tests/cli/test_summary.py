"""Answers in numbers: the line of figures, what -v adds, and the record."""

import json

from headlong.cli import summary
from headlong.cli.summary import Asked
from headlong.engine.request import Logprob, Output, Speculative, Timings


def speculative(**changes):
    facts = {
        "requested": "auto",
        "used": "mtp",
        "reason": "",
        "depth": 2,
        "rounds": 4,
        "drafted": 8,
        "accepted": 5,
        "drafted_by_position": (4, 4),
        "accepted_by_position": (3, 2),
        "drafters": {"mtp": (8, 5)},
        "depths": ((2, 4),),
    }
    return Speculative(**facts | changes)


def output(tokens=9, finish="stop", timings=None, **changes):
    seconds = Timings(**{"prefill_s": 0.5, "decode_s": 2.0, "prompt_tokens": 10, "tokens": tokens} | (timings or {}))
    return Output("abc", tuple(range(tokens)), finish, 10, speculative(**changes), seconds)


NOTHING = {
    "used": "none",
    "depth": 0,
    "drafted": 0,
    "accepted": 0,
    "drafted_by_position": (),
    "accepted_by_position": (),
    "drafters": {},
    "depths": ((0, 4),),
}
ONE = Asked(["x"], depth=2)
TWO = Asked(["x", "y"], depth=2)


def test_figures_of_one():
    assert summary.figures([output()], 9.0, ONE) == (
        "9 tokens in 4 rounds (2.25 a round), 4.5 tok/s, mtp at depth 2, accepted by position: 75% 50%"
    )


def test_figures_of_several_are_summed_and_timed_together():
    narrow = output(tokens=1, rounds=1, drafted=1, accepted=0, drafted_by_position=(1,), accepted_by_position=(0,))
    assert summary.figures([output(), narrow], 5.0, TWO) == (
        "2 prompts, 10 tokens in 5 rounds (2.00 a round), 2.0 tok/s, mtp at depth 2, accepted by position: 60% 50%"
    )


def test_figures_of_several_answers_to_a_prompt():
    line = summary.figures([output(), output(), output()], 9.0, Asked(["x"], completions=3, depth=2))
    assert line.startswith("1 prompt, 3 answers, 27 tokens in 12 rounds ")


def test_an_auto_depth_is_told_as_what_it_came_to():
    """Three windows of one draft, then one of three: what was asked is no number."""
    mixed = {"drafted": 6, "drafted_by_position": (4, 1, 1), "accepted_by_position": (3, 1, 0), "depth": 3}
    drafters = {"used": "mtp+ngram", "drafters": {"mtp": (3, 2), "ngram": (3, 2)}}
    line = summary.figures([output(**mixed, **drafters)], 1.0, Asked(["x"]))
    assert line.endswith("mtp+ngram at depth auto (1.5 drafts a window), accepted by position: 75% 100% 0%")


def test_figures_without_drafts_give_the_reason():
    line = summary.figures([output(reason="the model has no head", **NOTHING)], 1.0, ONE)
    assert line.endswith("tok/s, no drafts: the model has no head")
    assert summary.figures([output(**NOTHING)], 1.0, ONE).endswith("tok/s, no drafts")


def test_a_reason_of_one_is_no_reason_of_all():
    plain = output(reason="the request asked for plain decoding", **NOTHING)
    line = summary.figures([plain, output()], 1.0, Asked(["x", "y"]))
    assert line.endswith("mtp at depth auto (1.0 drafts a window), accepted by position: 75% 50%")


def test_figures_of_a_text_cut_before_its_first_round():
    nothing = output(tokens=0, finish="cancelled", **NOTHING | {"rounds": 0, "depths": ()})
    assert summary.figures([nothing], 1.0, ONE) == "0 tokens in 0 rounds (0.00 a round), 0.0 tok/s, no drafts"


def test_a_deadline_is_told():
    late = output(finish="deadline")
    assert summary.figures([late], 1.0, ONE).endswith(" 75% 50%, ended at the deadline")
    assert summary.figures([late, output()], 1.0, TWO).endswith(", 1 of them ended at the deadline")


def test_drafting_of_several_is_as_if_it_were_one():
    first = speculative(depths=((0, 1), (2, 3)), drafters={"ngram": (2, 1), "mtp": (6, 4)}, used="mtp+ngram")
    second = speculative(depths=((2, 2), (3, 1)), drafters={"prediction": (3, 3), "mtp": (4, 0)}, depth=3)
    total = summary.combine([first, second])
    assert total.used == "mtp+ngram+prediction"
    assert total.drafters == {"mtp": (10, 4), "ngram": (2, 1), "prediction": (3, 3)}
    assert total.depths == ((0, 1), (2, 5), (3, 1))
    assert (total.depth, total.rounds, total.drafted, total.accepted) == (3, 8, 16, 10)
    assert summary.combine([speculative(**NOTHING)]).used == "none"


def test_details_of_one():
    spent = {"queue_s": 0.001, "verify_s": 1.25, "draft_s": 0.3, "host_s": 0.05, "cached_tokens": 4}
    got = summary.details("m", 1.0, "abacus", [output(timings=spent, depths=((3, 2), (0, 1), (4, 5), (3, 10)))])
    assert got == [
        "m on abacus, loaded in 1.00 s, prompt 10 tokens (4 cached) at 12.0 tok/s",
        "queue 0.001 s, prefill 0.500 s, verify 1.250 s, draft 0.300 s, host 0.050 s, depths 0x1 3x12 4x5",
    ]


def test_details_of_several_do_not_add_up_seconds_that_they_shared():
    loads, seconds = summary.details("m", 1.0, "abacus", [output(timings={"verify_s": 1.0}), output()])
    assert loads.endswith("prompt 20 tokens at 20.0 tok/s")
    assert seconds.startswith("an answer on average: queue 0.000 s, prefill 0.500 s, verify 0.500 s, ")
    assert seconds.endswith(", depths 2x8")


def test_details_without_a_prefill():
    assert summary.details("m", 1.0, "d", [output(timings={"prefill_s": 0.0})])[0].endswith("10 tokens at 0.0 tok/s")


def test_a_record_has_logprobs_when_they_were_asked_for():
    told = Output("a", (5,), "stop", 1, speculative(), Timings(0, 0, 1, 1), (Logprob(5, -0.5, ((5, -0.5), (7, -2.0))),))
    assert "logprobs" not in summary.record("m", told, 0.0, logprobs=False)
    got = json.loads(json.dumps(summary.record("m", told, 0.0, logprobs=True)))
    assert got["logprobs"] == [{"token": 5, "logprob": -0.5, "top": [[5, -0.5], [7, -2.0]]}]
    assert summary.record("m", output(tokens=0), 0.0, logprobs=True)["logprobs"] == []


def test_a_record_of_a_fault_says_what_happened():
    broken = Output("", (), "fault", 1, speculative(), Timings(0, 0, 1, 0), error="RuntimeError: x")
    assert summary.record("m", broken, 0.0, False)["error"] == "RuntimeError: x"
    assert "error" not in summary.record("m", output(), 0.0, False)
