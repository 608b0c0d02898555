"""Rounds in captured parts: padded to buckets of rows and widths, and the same texts as rounds without.

Without a GPU the parts are run instead of replayed. What they read must come from the tensors that are filled each
time: a part that remembered the rows it was made with would give another row's tokens.
"""

from functools import partial
from time import perf_counter_ns

import numpy as np
import pytest
import torch

from headlong.backends.torch import backend as backend_module
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.gpu.rounds import OFTEN, SIZES, GraphRounds
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.engine.request import Chunk, RowPlan, Sampling, Start
from headlong.settings import Settings
from tests import tiny

PROMPTS = ([5, 9, 2, 7, 11, 3], [8, 8, 1], [4, 60, 33, 21, 2], [7, 7, 7, 7], [1, 2, 3, 4, 5, 6, 7])
SAMPLINGS = {
    "greedy": Sampling(),
    "seeded": Sampling(temperature=0.8, top_k=20, repetition_penalty=1.2, seed=3),
    "unseeded": Sampling(temperature=1.0, logit_bias={3: 1.0}),
}


class Ran:
    def __init__(self, part):
        self.replay = part


class Told:
    def __init__(self, tensor):
        self.copy = tensor.clone()

    def values(self):
        return self.copy.tolist()


class PlainStream:
    """Runs what a GPU would replay."""

    def __init__(self):
        self.recorded = 0

    def record(self, parts):
        self.recorded += 1
        for part in parts:
            part()
        return [Ran(part) for part in parts]

    def stamp(self, to):
        to.fill_(perf_counter_ns())

    def send(self, to, values):
        to.copy_(torch.tensor(values))

    def fetch(self, tensor):
        return Told(tensor)


def make(folder, monkeypatch, graphs, device="cpu"):
    def rounds(model, cache, chain, drafter):
        return GraphRounds(model, cache, chain, drafter, PlainStream())

    if graphs:
        monkeypatch.setattr(backend_module, "_rounds", lambda device: (rounds, True))
    settings = Settings(rows=5, context=128, page=16, chunk=32, device=str(device))
    made = TorchBackend(open_checkpoint(str(folder)), settings)
    monkeypatch.undo()
    return made


@pytest.fixture(params=["dense", "moe"])
def backends(request, tmp_path, monkeypatch):
    """With captured rounds, and without."""
    folder = tiny.write(tmp_path, request.param)
    return make(folder, monkeypatch, graphs=True), make(folder, monkeypatch, graphs=False)


def start(backend, samplings, bound=()):
    for row, sampling in enumerate(samplings):
        prompt = PROMPTS[row]
        backend.start(Start(row, prompt, sampling, seed=row, masked=row in bound))
        backend.prefill(Chunk(row, 0, prompt[:-1], prompt[-1], range(8 * row, 8 * row + 8), draft=2))


def play(backend, rounds):
    """Rounds of (row, verify, draft); what each row gave."""
    given = {}
    for plan in rounds:
        result = backend.round([RowPlan(*row, pages=()) for row in plan]).result()
        for kept in result.kept:
            given.setdefault(kept.row, []).append((kept.tokens, kept.left))
    return given


ROUNDS = (
    [(0, 2, 3), (1, 1, 3), (2, 0, 1)],
    [(2, 1, 2), (0, 3, 0), (1, 2, 1)],
    [(4, 2, 2)],
    [(1, 1, 0), (3, 0, 0), (4, 0, 0), (2, 0, 0), (0, 0, 0)],
    [(0, 0, 4), (1, 0, 4), (2, 0, 4), (3, 0, 4), (4, 0, 4)],
    [(0, 4, 1), (1, 4, 1), (2, 3, 1), (3, 4, 1), (4, 1, 1)],
)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_same_tokens_and_drafts(backends, name):
    graphs, plain = backends
    for backend in backends:
        start(backend, [SAMPLINGS[name]] * 5)
    assert play(graphs, ROUNDS) == play(plain, ROUNDS)


def test_rows_of_all_sorts(backends):
    graphs, plain = backends
    for backend in backends:
        start(backend, [*SAMPLINGS.values(), *SAMPLINGS.values()][:5])
    assert play(graphs, ROUNDS) == play(plain, ROUNDS)


def play_bound(backend, bound):
    """Rounds in which the masks of some rows change from one to the next; what each row gave."""
    words, given = -(-backend.limits.vocab // 32), {}
    for number, plan in enumerate(ROUNDS):
        noise = np.random.default_rng(number).integers(-(2**31), 2**31, (5, 9, words), np.int32)
        rows = [
            RowPlan(
                row, verify, draft, masks=partial(noise.__getitem__, (row, slice(1 + verify))) if row in bound else None
            )
            for row, verify, draft in plan
        ]
        for kept in backend.round(rows).result().kept:
            given.setdefault(kept.row, []).append((kept.tokens, kept.left))
    return given


@pytest.mark.parametrize("names", [["greedy"] * 5, ["greedy", "seeded", "unseeded", "greedy", "seeded"]])
def test_constrained_rows_beside_free_ones(backends, names):
    """Masks come between two captured parts, and no row takes another's or those of its last round."""
    graphs, plain = backends
    bound, samplings = (0, 2, 4), [SAMPLINGS[name] for name in names]
    for backend in backends:
        start(backend, samplings, bound)
    found = play_bound(graphs, bound)
    assert found == play_bound(plain, bound)
    start(graphs, samplings)
    free = play(graphs, ROUNDS)
    assert [found[row] == free[row] for row in range(5)] == [row not in bound for row in range(5)]


def shapes_of(backend):
    """Rows, tokens of each one's window, drafts."""
    return [(len(shape.needs), shape.width, shape.depth) for shape in backend.rounds.captured]


def test_a_batch_of_a_known_shape_is_captured_once(backends):
    graphs, _ = backends
    start(graphs, [Sampling()] * 5)
    play(graphs, [[(0, 1, 2), (1, 2, 2)], [(3, 2, 2), (2, 0, 2)], [(4, 2, 1), (0, 2, 2)]])
    assert shapes_of(graphs) == [(2, 3, 2)]
    play(graphs, [[(0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 2, 2), (4, 1, 2)]])
    assert shapes_of(graphs) == [(2, 3, 2), (8, 3, 2)]


def test_a_shape_that_does_not_last_is_run_in_one_that_holds_it(backends):
    graphs, plain = backends
    for backend in backends:
        start(backend, [Sampling()] * 5)
    first = [[(row, 2, 3) for row in range(5)]]  # as wide as the usual depth for its drafts
    assert play(graphs, first) == play(plain, first)
    assert shapes_of(graphs) == [(8, 4, 3)]
    fewer = [[(row, 3, 2) for row in range(4)], [(0, 2, 1), (3, 1, 2)], [(0, 1, 1)]]
    assert play(graphs, fewer) == play(plain, fewer)
    assert shapes_of(graphs) == [(8, 4, 3), (2, 3, 2)]  # two rows of three tokens would have been run as 32


def test_a_shape_that_lasts_is_captured(backends):
    graphs, plain = backends
    for backend in backends:
        start(backend, [Sampling()] * 5)
    first, often = [(row, 2, 3) for row in range(5)], [RowPlan(row, 1, 2, ()) for row in range(3)]
    play(plain, [first])
    play(graphs, [first])
    told = [(graphs.round(often).result(), plain.round(often).result().kept) for _ in range(OFTEN + 3)]
    assert all(sorted(mine.kept, key=lambda kept: kept.row) == theirs for mine, theirs in told)
    assert [mine.cold for mine, _ in told] == [True] * (OFTEN + 1) + [False] * 2
    assert shapes_of(graphs) == [(8, 4, 3), (4, 2, 2)]


def test_rows_of_two_sorts_are_one_shape_in_any_order(backends):
    graphs, plain = backends
    for backend in backends:
        start(backend, [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(), Sampling(temperature=0.8, seed=5)])
    orders = [[(row, 1, 1) for row in order] for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2))]
    assert play(graphs, orders) == play(plain, orders)
    assert len(graphs.rounds.captured) == 1
    few = [[(2, 1, 1), (3, 1, 1), (0, 0, 1)], [(1, 1, 1), (3, 1, 1)]]
    assert play(graphs, few) == play(plain, few)
    assert len(graphs.rounds.captured) == 2  # one sampled row is another shape; two, without the greedy ones, are not


def test_shapes_used_longest_ago_are_let_go(backends, monkeypatch):
    monkeypatch.setattr("headlong.backends.torch.gpu.rounds.MOST_SHAPES", 2)
    graphs, plain = backends
    rounds = [[(0, 0, depth)] for depth in (1, 2, 1, 3, 1, 5)]
    for backend in backends:
        start(backend, [Sampling()])
    assert play(graphs, rounds) == play(plain, rounds)
    assert [shape.depth for shape in graphs.rounds.captured] == [1, 5]
    assert graphs.rounds.stream.recorded == 4 + 1  # the prompt's


def test_logprobs(backends):
    told = []
    for backend in backends:
        for row in range(3):
            asked = 2 if row == 1 else None
            backend.start(Start(row, PROMPTS[row], Sampling(), seed=0, logprobs=asked))
            backend.prefill(Chunk(row, 0, PROMPTS[row][:-1], PROMPTS[row][-1], [row], draft=1))
        kept = backend.round([RowPlan(row, 1, 0, ()) for row in (2, 1, 0)]).result().kept
        told.append([each.logprobs for each in kept])
    assert [bool(each) for each in told[0]] == [False, True, False]
    for found, wanted in zip(told[0][1], told[1][1], strict=True):
        assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in wanted.top], abs=1e-5)


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (5, 8), (17, 24), (300, 300)])
def test_buckets(rows, size):
    assert SIZES.rows(rows) == size


class FewWords:
    """A head that knows every other token."""

    def __init__(self, weight):
        self.weight, self.words, self.learnt = weight, torch.arange(1, weight.out_features, 2), []

    def logits(self, hidden):
        return self.weight.multiply(hidden).float()[:, self.words]

    def learn(self, tokens):
        self.learnt += tokens.tolist()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_of_few_words_change_no_text(backends, name):
    graphs, plain = backends
    few = graphs.model.head.draft_head
    few.lexicon = FewWords(few.weight)
    for backend in backends:
        start(backend, [SAMPLINGS[name]] * 3)
    drafted = play(graphs, [[(row, 2, 2) for row in range(3)]] * 6)
    alone = play(plain, [[(row, 0, 0) for row in range(3)]] * 18)
    for row in range(3):
        assert all(token % 2 for _, left in drafted[row] for token in left)
        text = [token for tokens, _ in drafted[row] for token in tokens]
        assert set(text) | set(PROMPTS[row][1:]) <= set(few.lexicon.learnt)
        if SAMPLINGS[name].seed is not None or SAMPLINGS[name].greedy:
            assert text == [token for tokens, _ in alone[row] for token in tokens][: len(text)]
