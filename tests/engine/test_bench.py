"""A bench on the scripted backend: who runs when, what is compared, and what stays after an interrupt."""

from collections import Counter
from dataclasses import replace

import pytest

from headlong.backends.fake import FakeBackend
from headlong.engine.bench import Bench, Case, Mode, Plan, differences
from headlong.engine.costs import Sample, time_rounds
from headlong.engine.request import Sampling
from headlong.errors import UserError

GREEDY, SEEDED, UNSEEDED = Mode(0.0), Mode(0.8), Mode(0.8, seeded=False)
LIMITS = {"rows": 1, "context": 256}


def count_up(history):
    return (history[-1] + 1) % 200


def cases(*sets, each=2):
    return tuple(Case(name, place, (place, 7, 8)) for name in sets for place in range(1, each + 1))


@pytest.fixture
def bench(build):
    def make(plan, **options):
        return Bench(build(count_up, **{**LIMITS, **options}), plan)

    return make


def test_every_prompt_runs_at_every_depth_in_every_mode(bench):
    made = bench(Plan(cases("a", "b"), (GREEDY, SEEDED), (0, 1, 3), repeat=2, max_tokens=5))
    names = list(made.go())
    assert len(names) == made.steps == 1 + 2 * 2 * 2 * 2 * (3 + 1)
    counts = Counter((run.case.name, run.mode, run.depth) for run in made.runs)
    assert len(counts) == 2 * 2 * 2 * 3
    assert set(counts.values()) == {2}
    assert {run.output.speculative.depth for run in made.runs if run.depth == 3} == {3}
    assert {run.output.speculative.used for run in made.runs if run.depth == 0} == {"none"}
    assert all(len(run.output.tokens) == 5 for run in made.runs)


def test_names_tell_what_comes_next(bench):
    made = bench(Plan(cases("a", each=1), (GREEDY, SEEDED), (0, 2), max_tokens=5))
    assert list(made.go()) == [
        "warming up",
        "a 1, greedy, plain",
        "a 1, greedy, depth 2",
        "a 1, greedy, cost of rounds",
        "a 1, temperature 0.8, seeded, plain",
        "a 1, temperature 0.8, seeded, depth 2",
        "a 1, temperature 0.8, seeded, cost of rounds",
    ]


def test_sets_take_turns():
    turns = Plan((*cases("a", each=3), Case("b", 1, (1,)), Case("b", 50, (1,))), (GREEDY,)).turns()
    assert [turn.case.name for turn in turns] == ["a 1", "b 1", "a 2", "b 50", "a 3"]


def test_no_depth_always_follows_another():
    orders = [turn.order for turn in Plan(cases("a", each=8), (GREEDY,), (0, 1, 2, 3), repeat=2).turns()]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
    for depth in (0, 1, 2, 3):
        assert len({order.index(depth) for order in orders}) == 4
        before = {order[order.index(depth) - 1] for order in orders if order[0] != depth}
        assert len(before) > 1
    assert orders[0] != orders[8]  # the same prompt, a repetition later


def test_each_mode_sees_every_order():
    turns = list(Plan(cases("a", each=4), (GREEDY, SEEDED), (0, 1)).turns())
    for mode in (GREEDY, SEEDED):
        assert {turn.order[0] for turn in turns if turn.mode == mode} == {0, 1}


def test_seeds_belong_to_prompts(bench):
    plan = Plan(cases("a"), (SEEDED, UNSEEDED), (0, 1), seed=2**63 - 2)
    first, second = plan.cases
    seeds = {plan.request(case, SEEDED, depth).sampling.seed for case in plan.cases for depth in (0, 1)}
    assert seeds == {plan.seed_of(first), plan.seed_of(second)} == {2**63 - 1, 0}
    assert plan.request(first, UNSEEDED, 0).sampling.seed is None
    assert plan.request(first, UNSEEDED, 0).sampling.temperature == 0.8


def test_requests_run_alone(bench):
    made = bench(Plan(cases("a", "b"), (GREEDY,), (0, 2), max_tokens=5), rows=4)
    list(made.go())
    assert {len(plan) for plan in made.engine.backend.rounds} == {1}
    assert made.engine.backend.rows == {}


def test_few_prompts_sample_every_cost(bench):
    made = bench(Plan(cases("a"), (GREEDY, SEEDED), (0, 1, 2), max_tokens=5))
    list(made.go())
    assert {mode: Counter(one.depth for one in got) for mode, got in made.samples.items()} == {
        GREEDY: {1: 2, 2: 2},
        SEEDED: {1: 2, 2: 2},
    }


def test_many_prompts_share_the_sampling_of_costs():
    turns = list(Plan(cases("a", each=8), (GREEDY,), tuple(range(9)), repeat=2).turns())
    assert {len(turn.timed) for turn in turns} == {2}
    counts = Counter(depth for turn in turns for depth in turn.timed)
    assert set(counts) == set(range(1, 9))
    assert min(counts.values()) >= 3


def test_costs_are_held_against_the_plain_run_of_the_turn(bench, monkeypatch):
    asked = []
    monkeypatch.setattr("headlong.engine.bench.time_rounds", lambda *given: asked.append(given[-2:]) or (7.0, 5.0))
    made = bench(Plan(cases("a", each=1), (GREEDY,), (0, 2), max_tokens=9))
    list(made.go())
    plain, drafted = made.runs
    step = plain.output.timings.decode_s / 9
    assert made.samples[GREEDY] == [Sample(2, pytest.approx(step), 7.0, 5.0)]
    assert asked == [(2, drafted.output.speculative.rounds)] == [(2, 3)]


def test_plain_decoding_alone_has_no_costs(bench):
    made = bench(Plan(cases("a"), (GREEDY,), (0,), max_tokens=5), head=False)
    assert len(list(made.go())) == made.steps == 3
    assert not any(made.samples.values())


def test_a_prompt_that_does_not_fit_is_named_before_any_run(bench):
    long = Case("b", 7, (1,) * 250)
    with pytest.raises(UserError, match=r"^prompt b 7: the prompt has 250 tokens and max_tokens is 10, together more"):
        bench(Plan((*cases("a"), long), (GREEDY,), (0, 1), max_tokens=10))


def test_what_is_complete_stays_after_an_interrupt(bench):
    made = bench(Plan(cases("a"), (GREEDY,), (0, 1, 2), max_tokens=5))
    for number, _ in enumerate(made.go()):
        if number == 3:
            break
    assert [run.depth for run in made.runs] == [0, 1]


class Careless(FakeBackend):
    """Windows with two drafts change the last token they give."""

    def _accept(self, row, drafts, masks):
        kept = super()._accept(row, drafts, masks)
        return (*kept[:-1], kept[-1] + 1) if len(drafts) == 2 else kept


def test_a_depth_that_gives_another_text_is_found(bench):
    made = bench(Plan(cases("a"), (GREEDY,), (0, 1, 2), max_tokens=9), backend=Careless)
    list(made.go())
    found = differences(made.runs)
    assert [(one.case, one.mode, one.depth) for one in found] == [("a 1", "greedy", 2), ("a 2", "greedy", 2)]
    assert {one.equal_tokens for one in found} == {2}


def test_the_same_texts_are_no_difference(bench):
    made = bench(Plan(cases("a"), (GREEDY, SEEDED), (0, 1, 2), repeat=2, max_tokens=9))
    list(made.go())
    assert differences(made.runs) == []


def test_texts_without_a_seed_may_differ(bench):
    made = bench(Plan(cases("a"), (UNSEEDED,), (0, 2), max_tokens=9), backend=Careless)
    list(made.go())
    assert made.runs[0].output.tokens != made.runs[1].output.tokens
    assert differences(made.runs) == []


def test_plain_decoding_is_held_against_its_first_text(bench):
    made = bench(Plan(cases("a", each=1), (GREEDY,), (0, 1), repeat=2, max_tokens=9))
    list(made.go())
    runs = [
        replace(run, output=_cut(run.output)) if (run.depth, run.repetition) == (0, 1) else run for run in made.runs
    ]
    [found] = differences(runs)
    assert (found.depth, found.repetition, found.equal_tokens) == (0, 1, 4)


def test_an_end_for_another_reason_is_a_difference(bench):
    made = bench(Plan(cases("a", each=1), (GREEDY,), (0, 1), max_tokens=9))
    list(made.go())
    plain, drafted = made.runs
    [found] = differences([plain, replace(drafted, output=replace(drafted.output, finish_reason="stop"))])
    assert (found.depth, found.equal_tokens) == (1, 9)


def _cut(output):
    return replace(output, tokens=output.tokens[:4])


def test_the_backend_is_lent_while_the_engine_is_idle(build):
    engine = build(count_up)
    with engine.idle_backend() as backend:
        assert backend is engine.backend
    index = engine.submit(Plan(cases("a"), max_tokens=5).request(Case("a", 1, (1, 2)), GREEDY, 0))
    with pytest.raises(UserError, match="while requests run"), engine.idle_backend():
        pass
    engine.cancel(index)
    with engine.idle_backend():
        pass
    engine.close()
    with pytest.raises(UserError, match="closed"), engine.idle_backend():
        pass


def test_prefixes_survive_while_the_backend_is_lent(build):
    engine = build(count_up)
    prompt = list(range(40, 60))
    first = engine.generate(prompt, max_tokens=5)
    with engine.idle_backend() as backend:
        time_rounds(backend, range(30), Sampling(), 0, depth=2, rounds=4)
    assert engine.generate(prompt, max_tokens=5).tokens == first.tokens


@pytest.mark.parametrize("repeat", [6, 12, 24])
def test_one_prompt_repeated_times_every_depth(repeat):
    plan = Plan((Case("a", 1, (1, 2)),), (Mode(0.0),), tuple(range(9)), repeat=repeat)
    counts = Counter(depth for turn in plan.turns() for depth in turn.timed)
    assert counts.keys() == set(range(1, 9))
    assert max(counts.values()) - min(counts.values()) <= 1
