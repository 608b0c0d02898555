"""What rounds cost: the arithmetic on hand-made seconds, and the rounds that are timed."""

import pytest

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.costs import Sample, costs_from, time_rounds
from headlong.engine.request import Sampling


def count_up(history):
    return (history[-1] + 1) % 100


def sample(depth, plain=2.0, whole=4.0, verify=3.0):
    return Sample(depth, plain, whole, verify)


def test_costs_are_in_plain_steps():
    costs = costs_from([sample(3, verify=3.0, whole=5.0), sample(1, verify=2.4, whole=3.0)])
    assert costs.plain_s == 2.0
    assert costs.verify == pytest.approx({1: 1.2, 3: 1.5})
    assert costs.draft == pytest.approx({1: 0.3, 3: 1.0})
    assert list(costs.verify) == list(costs.draft) == [1, 3]


def test_drafts_lie_on_a_line():
    costs = costs_from([sample(2, verify=3.0, whole=3.8), sample(3, verify=3.0, whole=4.2), sample(8, whole=6.2)])
    assert costs.next_draft == pytest.approx(0.2)
    assert costs.first_draft == pytest.approx(0.2)  # at 1 the line stands at 0.2, at 2 at 0.4


def test_a_machine_that_slows_down_shifts_no_ratio():
    costs = costs_from([sample(2, 2.0 * pace, 4.0 * pace, 3.0 * pace) for pace in (1, 1, 5, 9, 9)])
    assert costs.verify == pytest.approx({2: 1.5})
    assert costs.draft == pytest.approx({2: 0.5})
    assert costs.plain_s == 10.0


def test_one_bad_sample_does_not_count():
    costs = costs_from([sample(1), sample(1), sample(1, verify=90.0, whole=191.0)])
    assert (costs.verify, costs.draft) == (pytest.approx({1: 1.5}), pytest.approx({1: 0.5}))


@pytest.mark.parametrize(("depth", "first"), [(1, 0.5), (4, None)])
def test_one_depth_alone_has_no_slope(depth, first):
    costs = costs_from([sample(depth)])
    assert (costs.first_draft, costs.next_draft) == (first, None)


def test_without_samples_there_are_no_costs():
    assert costs_from([]) is None


def test_the_prediction_is_tokens_over_cost():
    costs = costs_from([sample(2)])
    assert costs.predict(2, tokens_a_round=2.4) == pytest.approx(2.4 / (1.5 + 0.5))
    assert costs.predict(3, tokens_a_round=2.4) is None


def test_the_rounds_that_are_timed():
    backend = FakeBackend(count_up, limits=fake_limits(rows=1, context=256))
    assert min(time_rounds(backend, range(20), Sampling(), 0, depth=2, rounds=6)) > 0
    windows = [(part.verify, part.draft) for (part,) in backend.rounds]
    first, rest = [(2, 2), (2, 0), (0, 2)], [(2, 2)]
    assert windows == [(0, 2), *first, *rest, *rest, *rest, *first, *rest]
    assert backend.rows == {}


class Clock(FakeBackend):
    """A second for each token of a round's window, ten for each draft it leaves, and fifty more for the first round."""

    now = 0.0

    def round(self, plan):
        (part,) = plan
        Clock.now += 1 + part.verify + 10 * part.draft + 50 * (not self.rounds)
        return super().round(plan)


def test_whole_rounds_and_those_without_drafts_are_told_apart(monkeypatch):
    monkeypatch.setattr("headlong.engine.costs.perf_counter", lambda: Clock.now)
    backend = Clock(count_up, limits=fake_limits(rows=1, context=256))
    assert time_rounds(backend, range(20), Sampling(), 0, depth=3, rounds=5) == (34.0, 4.0)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("prompt", [1, 2, 9, 40])
@pytest.mark.parametrize("depth", [1, 5])
def test_rounds_stay_inside_a_small_context(right, prompt, depth):
    """The fake refuses a plan that leaves the context or its pages."""
    backend = FakeBackend(count_up, right=(right,), limits=fake_limits(rows=1))
    assert time_rounds(backend, range(prompt), Sampling(), 0, depth, rounds=100)


def test_a_context_that_is_full_gives_no_times():
    backend = FakeBackend(count_up, limits=fake_limits(rows=1))
    assert time_rounds(backend, range(62), Sampling(), 0, depth=1, rounds=4) is None
    assert backend.rows == {}


def test_the_row_is_given_back_after_an_interrupt():
    class Broken(FakeBackend):
        def round(self, plan):
            raise KeyboardInterrupt

    backend = Broken(count_up, limits=fake_limits(rows=1))
    with pytest.raises(KeyboardInterrupt):
        time_rounds(backend, range(5), Sampling(), 0, depth=1, rounds=4)
    assert backend.rows == {}
