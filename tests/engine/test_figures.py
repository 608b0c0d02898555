"""The arithmetic of a bench on hand-made runs."""

import pytest

from headlong.engine.bench import Bench, Case, Mode, Plan, Run
from headlong.engine.costs import Sample, costs_from
from headlong.engine.figures import complete, figures_of, quartiles, report_of, section_of
from headlong.engine.request import Output, Speculative, Timings

GREEDY, SEEDED = Mode(0.0), Mode(0.8)


def run(depth, seconds, *, place=1, tokens=100, rounds=None, kept=(), drafted=(), mode=GREEDY, repetition=0, name="a"):
    """A run of so many tokens in so many seconds."""
    speculative = Speculative(
        requested="auto",
        used="mtp" if depth else "none",
        reason="",
        depth=depth,
        rounds=rounds or tokens,
        drafted=sum(drafted),
        accepted=sum(kept),
        drafted_by_position=drafted,
        accepted_by_position=kept,
    )
    output = Output("x", (1,) * tokens, "length", 10, speculative, Timings(0.5, seconds, 10, tokens))
    return Run(Case(name, place, (1,) * 10), mode, repetition, depth, output)


def test_speed_is_all_tokens_over_all_seconds():
    got = figures_of([run(0, 1.0, place=1), run(0, 3.0, place=2), run(0, 2.0, place=3)], 0, None)
    assert got.speed.value == pytest.approx(50.0)
    assert (got.speed.low, got.speed.high) == pytest.approx(quartiles([100.0, 100 / 3, 50.0]))
    assert (got.runs, got.tokens, got.decode_s) == (3, 300, 6.0)
    assert got.speedup.value == got.overall == 1.0


def test_the_speedup_is_the_median_of_pairs():
    plain = [run(0, 1.0, place=1), run(0, 4.0, place=2), run(0, 1.0, place=3)]
    drafted = [run(2, 0.5, place=1), run(2, 1.0, place=2), run(2, 0.8, place=3)]
    got = figures_of(plain + drafted, 2, None)
    assert got.speedup.value == pytest.approx(2.0)  # of 2, 4 and 1.25
    assert (got.speedup.low, got.speedup.high) == pytest.approx((1.625, 3.0))
    assert got.overall == pytest.approx(6.0 / 2.3)


def test_pairs_belong_to_a_repetition():
    runs = [run(0, 1.0), run(2, 0.5), run(0, 10.0, repetition=1), run(2, 5.0, repetition=1)]
    got = figures_of(runs, 2, None)
    assert (got.speedup.low, got.speedup.value, got.speedup.high) == (2.0, 2.0, 2.0)


def test_tokens_a_round_and_acceptance_are_over_all_rounds():
    runs = [
        run(2, 1.0, place=1, rounds=10, drafted=(10, 10), kept=(8, 4)),
        run(2, 1.0, place=2, rounds=30, drafted=(30, 20), kept=(12, 2)),
    ]
    got = figures_of(runs, 2, None)
    assert got.tokens_a_round == pytest.approx(1 + 26 / 40)
    assert got.accepted == pytest.approx((20 / 40, 6 / 30))


def test_the_prediction_uses_the_tokens_of_that_depth():
    costs = costs_from([Sample(2, 2.0, 4.0, 3.0)])  # verify 1.5, draft 0.5
    runs = [run(0, 1.0), run(2, 0.5, rounds=40, drafted=(40, 40), kept=(32, 28)), run(3, 0.5)]
    assert figures_of(runs, 2, costs).predicted == pytest.approx((1 + 60 / 40) / 2.0)
    assert figures_of(runs, 3, costs).predicted is None
    assert figures_of(runs, 0, costs).predicted is None
    assert figures_of(runs, 2, None).predicted is None


def test_very_short_texts_do_not_count():
    runs = [run(0, 1.0), run(2, 0.5), run(0, 9.0, place=2, tokens=1), run(2, 0.1, place=2, tokens=1)]
    got = figures_of(runs, 2, None)
    assert (got.runs, got.speedup.value, got.overall) == (1, 2.0, 2.0)


def test_nothing_that_counts_gives_no_figures():
    got = figures_of([run(0, 1.0, tokens=0), run(2, 1.0, tokens=0)], 2, costs_from([Sample(2, 2.0, 4.0, 3.0)]))
    assert (got.speed, got.speedup, got.overall, got.predicted, got.accepted) == (None, None, None, None, ())


def test_turns_that_lack_a_depth_are_left_out():
    whole = [run(0, 1.0), run(1, 1.0)]
    assert complete([*whole, run(1, 1.0, place=2), run(0, 1.0, mode=SEEDED)], (0, 1)) == whole


def test_a_section_has_sets_and_all_of_them():
    runs = [run(0, 1.0), run(1, 0.5), run(0, 1.0, name="b"), run(1, 0.25, name="b")]
    section = section_of(GREEDY, runs, None)
    assert [one.depth for one in section.all] == [0, 1]
    assert {name: figures[1].speedup.value for name, figures in section.sets.items()} == {"a": 2.0, "b": 4.0}
    assert section.all[1].speedup.value == 3.0
    assert section.fastest is section.all[1]


def test_plain_decoding_may_be_the_fastest():
    section = section_of(GREEDY, [run(0, 1.0), run(1, 2.0)], None)
    assert section.fastest.depth == 0


@pytest.mark.parametrize(
    ("values", "wanted"), [([3.0], (3.0, 3.0)), ([1.0, 2.0], (1.25, 1.75)), ([5.0, 1.0, 2.0, 3.0, 4.0], (2.0, 4.0))]
)
def test_quartiles(values, wanted):
    assert quartiles(values) == wanted


def test_a_report_has_a_section_for_each_mode_that_was_reached():
    bench = Bench.__new__(Bench)  # no engine: the runs are hand-made
    cases = (Case("a", 1, (1,)), Case("a", 2, (1,)))
    bench.plan = Plan(cases, (GREEDY, SEEDED), (0, 1))
    bench.runs = [run(0, 1.0), run(1, 0.5), run(0, 1.0, mode=SEEDED), run(0, 1.0, place=2)]
    bench.samples = {GREEDY: [Sample(1, 2.0, 4.0, 3.0)], SEEDED: []}
    report = report_of(bench)
    assert [section.mode for section in report.sections] == [GREEDY]
    assert report.sections[0].costs.verify == {1: 1.5}
    assert report.prompts == {"a": 1}
    assert report.prefill_tps == 20.0
    assert (report.compared, report.differences) == (4, ())
