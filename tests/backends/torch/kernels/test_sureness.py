"""How sure the head is of a draft, and which drafts are left by that: kernels against the same by hand."""

import random
from types import SimpleNamespace

import pytest
import torch

from headlong.backends.torch.chain import Chain
from headlong.backends.torch.drafters import HeadDrafter
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.kernels.pick import best_word
from headlong.backends.torch.native.library import library
from headlong.backends.torch.ragged import Layout
from headlong.backends.torch.sureness import SURENESSES, Pick, Sureness
from headlong.engine.request import Sampling, Start
from headlong.settings import MAX_DEPTH

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")
CPU, ROWS = torch.device("cpu"), 6
EDGES = (0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8)


class Ledger:
    """The same as the kernels keep, written a second time: chances by sureness, and which drafts are left."""

    def __init__(self):
        self.counts = [[0.0, 0.0] for _ in range(SURENESSES)]

    def chance(self, sure):
        drafts, kept = self.counts[sum(sure >= edge for edge in EDGES)]
        return (kept + 1.9) / (drafts + 2.0)

    def left(self, sures, most, least):
        chance = 1.0
        for place, sure in enumerate(sures[:most]):
            chance *= self.chance(sure)
            if chance < least:
                return place
        return most

    def learn(self, windows):
        """Windows as the sureness of each draft, and how many were kept."""
        self.counts = [[0.995 * drafts, 0.995 * kept] for drafts, kept in self.counts]
        for sures, kept in windows:
            for place, sure in enumerate(sures[: kept + 1]):
                count = self.counts[sum(sure >= edge for edge in EDGES)]
                count[0] += 1
                count[1] += place < kept


@pytest.fixture
def sureness():
    chain = Chain(ROWS, 32, CPU)
    for row in range(ROWS):
        chain.start(Start(row, (0,), Sampling(), seed=0))
    return Sureness(chain)


def judge(sureness, rows, sures, most, least):
    """All steps of some rows; drafts left."""
    layout, goes_on = Layout.of(rows, (1,) * len(rows), CPU), torch.zeros(len(rows), dtype=torch.long)
    sureness.ask(rows, most, least)
    for step in range(max(most)):
        pick = Pick(torch.zeros(len(rows), dtype=torch.long), torch.tensor([each[step] for each in sures]))
        sureness.leave(layout, step, pick, goes_on)
    return sureness.found(rows)


@torch.inference_mode()
def test_what_is_left_and_learnt_is_as_it_would_be_by_hand(sureness):
    coin, ledger, seen = random.Random(0), Ledger(), set()
    for _ in range(400):
        rows = tuple(coin.sample(range(ROWS), coin.randint(1, ROWS)))
        sures = [[coin.expovariate(0.4) for _ in range(MAX_DEPTH)] for _ in rows]
        most = tuple(coin.randint(1, MAX_DEPTH) for _ in rows)
        least = tuple(coin.choice((0.05, 0.3, 0.6)) for _ in rows)
        left = judge(sureness, rows, sures, most, least)
        assert left == [ledger.left(*each) for each in zip(sures, most, least, strict=True)]
        seen.update(left)
        kept = [
            next((place for place in range(count) if coin.random() > min(0.99, 0.4 + 0.2 * each[place])), count)
            for each, count in zip(sures, left, strict=True)
        ]
        layout = Layout.of(rows, tuple(1 + count for count in left), CPU)
        sureness.learn(layout, torch.tensor([1 + count for count in kept]))
        ledger.learn([(each[:count], some) for each, count, some in zip(sures, left, kept, strict=True)])
        assert sureness.counts[0].tolist() == [pytest.approx(count, rel=1e-3, abs=1e-3) for count in ledger.counts]
    assert seen == set(range(MAX_DEPTH + 1))


@torch.inference_mode()
def test_rows_that_ask_for_nothing_are_left_all_and_teach_nothing(sureness):
    assert judge(sureness, (2, 4), [[0.0] * 8, [0.0] * 8], (5, 3), (0.0, 0.0)) == [5, 3]
    sureness.learn(Layout.of((2, 4), (6, 4), CPU), torch.tensor([1, 1]))
    assert not sureness.counts.any()


@torch.inference_mode()
def test_drafts_that_came_from_elsewhere_teach_nothing(sureness):
    assert judge(sureness, (1,), [[9.0] * 8], (4,), (0.1,)) == [4]
    sureness.forget(1)
    sureness.learn(Layout.of((1,), (5,), CPU), torch.tensor([3]))
    assert not sureness.counts.any()


@torch.inference_mode()
def test_what_was_ruled_out_is_tried_again(sureness):
    """A kind of draft that failed is not left; once that is long ago, it is."""
    layout = Layout.of((0,), (2,), CPU)
    while judge(sureness, (0,), [[0.1] * 8], (1,), (0.6,)) == [1]:
        sureness.learn(layout, torch.tensor([1]))
    others = 0
    while judge(sureness, (0,), [[0.1] * 8], (1,), (0.6,)) == [0]:
        judge(sureness, (1,), [[9.0] * 8], (1,), (0.6,))
        sureness.learn(Layout.of((1,), (2,), CPU), torch.tensor([2]))
        others += 1
        assert others < 2000
    assert others > 20


@torch.inference_mode()
@pytest.mark.parametrize("size", [2, 15, 16, 17, 100, 5000])
def test_the_best_token_tells_its_lead(size, normal):
    logits, tokens, leads = normal(7, size), torch.zeros(7, dtype=torch.long), torch.zeros(7)
    logits[0] = 1.0
    logits[1, -1] = logits[1].max() + 2.0
    best_word(logits, None, tokens, leads)
    top = logits.topk(2).values
    torch.testing.assert_close(leads, top[:, 0] - top[:, 1])
    assert torch.equal(tokens, logits.argmax(-1))


@torch.inference_mode()
def test_how_sure_a_draw_is(normal):
    """By how much it leads, noise included."""
    vocab, scores = 400, 3 * normal(1, 400).expand(ROWS, -1).contiguous()
    chain = Chain(ROWS, vocab, CPU)
    for row in range(ROWS):
        chain.start(Start(row, (0,), Sampling(temperature=0.9, seed=row), seed=row))
    drafter = HeadDrafter(SimpleNamespace(words=None), SimpleNamespace(rows=ROWS, device=CPU), chain)
    layout, zeros = Layout.of(tuple(range(ROWS)), (1,) * ROWS, CPU), torch.zeros(ROWS, dtype=torch.long)
    pick = Pick(torch.zeros_like(zeros), torch.zeros(ROWS))
    drafter._pick_by_logits(layout, scores, (zeros, zeros), 0, pick)
    gumbel = noise.gumbel(chain.seed, noise.TARGET, zeros[:, None] + 1, vocab)[:, 0]
    top = (scores / 0.9 + gumbel).topk(2)
    assert torch.equal(pick.tokens, top.indices[:, 0])
    # What cannot be the best is passed over, the second best too, so that a lead may seem larger.
    leads = top.values[:, 0] - top.values[:, 1]
    assert (pick.sure >= leads - 1e-4).all()
    assert (pick.sure <= leads + 1e-4).double().mean() >= 0.5


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.8), Sampling(temperature=0.8, seed=1, top_p=0.5)])
def test_rows_that_draw_otherwise_are_left_all(sureness, sampling):
    """What was drawn must not decide where their windows end, or nothing is known of their scores."""
    sureness.chain.start(Start(3, (0,), sampling, seed=0))
    assert judge(sureness, (2, 3), [[0.0] * 8, [0.0] * 8], (4, 4), (0.99, 0.99)) == [0, 4]
