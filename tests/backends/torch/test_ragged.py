"""Rows of a round pay for their own windows and their own wishes, and neighbours change nothing in them."""

import contextlib
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from headlong.backends.torch.accept import Trial, accept
from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.chain import Chain, Rule
from headlong.backends.torch.native.library import references_only
from headlong.backends.torch.ragged import Layout
from headlong.engine.request import Sampling, Start
from tests.backends.torch.driver import PLAIN, Driver, Job, Mixture, fixed, whole

CPU = torch.device("cpu")
COUNT = 16
BENCHES = ("dense-native-1", "dense-reference-1", "moe-native-1")
ASKING = {
    "seeded": Sampling(temperature=0.9, top_p=0.9, seed=4),
    "penalised": Sampling(repetition_penalty=1.3, frequency_penalty=0.2),
    "biased": Sampling(logit_bias={7: 3.0}),
    "unseeded": Sampling(temperature=1.1, top_k=30, xtc_probability=0.3),
}


# --- layouts -----------------------------------------------------------------------------------------------------


def test_padding_and_back():
    layout = Layout.of((5, 2, 7), (1, 4, 2), CPU)
    assert (layout.tokens, layout.widest, layout.offsets.tolist()) == (7, 4, [0, 1, 5, 7])
    flat = torch.arange(14).view(7, 2)
    padded = layout.pad(flat)
    assert padded[:, :, 0].tolist() == [[0, 0, 0, 0], [2, 4, 6, 8], [10, 12, 12, 12]]
    assert torch.equal(layout.unpad(padded), flat)
    assert layout.token_rows.tolist() == [5, 2, 2, 2, 2, 7, 7]
    assert layout.steps.tolist() == [0, 0, 1, 2, 3, 0, 1]


def test_parts_keep_their_order():
    part = Layout.of((5, 2, 7), (1, 4, 2), CPU).part((2, 0))
    assert (part.layout.rows, part.layout.widths) == ((7, 5), (2, 1))
    assert part.which.tolist() == [2, 0]
    assert part.flat.tolist() == [5, 6, 0]


def test_even_windows_are_not_copied():
    layout, flat = Layout.of((0, 1), (3, 3), CPU), torch.zeros(6, 2)
    assert layout.pad(flat).data_ptr() == layout.unpad(layout.pad(flat)).data_ptr() == flat.data_ptr()


# --- acceptance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", [contextlib.nullcontext, references_only], ids=["native", "reference"])
def test_greedy_acceptance_row_by_row(kernels):
    """Drafts that are right for a while, in windows of every width."""
    coin, vocab = random.Random(0), 19
    widths = tuple(coin.randint(1, 9) for _ in range(40))
    layout = Layout.of(tuple(range(40)), widths, CPU)
    logits = torch.randn(layout.tokens, vocab, generator=torch.Generator().manual_seed(0))
    best, window, wanted = logits.argmax(-1).tolist(), [], []
    for width in widths:
        right, first = coin.randint(0, width - 1), len(window)
        drafts = [best[first + j] if j < right else (best[first + j] + 1) % vocab for j in range(width - 1)]
        window += [0, *drafts]
        wanted.append(best[first : first + right + 1])
    starts, allowed = torch.zeros(40, dtype=torch.long), Allowed(40, vocab, CPU)
    trial = Trial(layout, starts, torch.tensor(window), logits, allowed)
    with kernels():
        verdict = accept(trial, Chain(40, vocab, CPU))
    found = zip(verdict.tokens.split(widths), verdict.kept.tolist(), strict=True)
    assert [tokens[:kept].tolist() for tokens, kept in found] == wanted


def test_constrained_rows_take_what_the_whole_chain_would_give_them():
    """Greedy ones by themselves, and others beside them, in windows of every width."""
    coin, vocab, kinds = random.Random(1), 70, ("free", "bound", "bound and seeded", "seeded")
    widths = tuple(coin.randint(1, 9) for _ in range(40))
    layout, chain = Layout.of(tuple(range(40)), widths, CPU), Chain(40, vocab, CPU)
    noise = torch.Generator().manual_seed(1)
    logits = torch.randn(layout.tokens, vocab, generator=noise)
    allowed = Allowed(40, vocab, CPU)
    for row, width in enumerate(widths):
        kind = kinds[row % len(kinds)]
        sampling = Sampling(temperature=0.8, seed=row) if "seeded" in kind else Sampling()
        chain.start(Start(row, (1, 2), sampling, seed=row, masked="bound" in kind))
        if "bound" in kind:
            allowed.start(row, chain.rules[row] is Rule.ALLOWED)
            allowed.put(row, torch.randint(-(2**31), 2**31, (width, 3), generator=noise).int().numpy())
    window = torch.randint(0, vocab, (layout.tokens,), generator=noise)
    trial = Trial(layout, torch.full((40,), 5), window, logits, allowed)
    with references_only():
        wanted = accept(trial, chain)
    found = accept(trial, chain)
    assert found.kept.tolist() == wanted.kept.tolist()
    for mine, theirs, kept in zip(found.tokens.split(widths), wanted.tokens.split(widths), wanted.kept, strict=True):
        assert mine[:kept].tolist() == theirs[:kept].tolist()


# --- what a round costs ------------------------------------------------------------------------------------------


def passes(taped):
    """The number of tokens, then of rows, of every pass from here on."""
    seen = []
    call = taped.__call__

    def counted(layout, *tensors):
        seen.append((len(tensors[-1]), len(layout.rows)))
        return call(layout, *tensors)

    counted.once_s = 0.0
    return counted, seen


def chain_passes(chains, seen):
    """The same of chains, which are all their steps at once."""

    def counted(depth, layout, *tensors):
        rows = len(layout.rows)
        seen.extend([(len(tensors[-1]), rows), *[(rows, rows)] * (depth - 1)])
        return chains[depth](layout, *tensors)

    for depth in chains:
        call = partial(counted, depth)
        call.once_s, call.plays = 0.0, False
        yield depth, call


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_a_plain_row_beside_a_deep_one_costs_one_token(bench):
    driver = Driver(bench.open(rows=3))
    rounds = driver.backend.rounds
    for row, depth in enumerate((0, 8, 3)):
        driver.start(row, Job(bench.prompt(20 + row), depth=fixed(depth)))
        while driver.waiting(row):
            driver.prefill(row)
    rounds.verify, verified = passes(rounds.verify)
    rounds.drafter.feed, fed = passes(rounds.drafter.feed)
    rounds.drafter.chains = dict(chain_passes(rounds.drafter.chains, fed))
    driver.round([0, 1])
    assert verified == [(10, 2)]
    assert fed == [(9, 1), *[(1, 1)] * 7]  # the plain row is not fed, let alone asked
    driver.round([0, 1, 2])
    assert verified[1:] == [(1 + 9 + 4, 3)]
    assert fed[8:] == [(13, 2), (2, 2), (2, 2), *[(1, 1)] * 5]


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_rows_of_few_drafts_do_not_make_all_steps_of_one_that_has_many(bench):
    driver = Driver(bench.open(rows=3))
    jobs = {row: Job(bench.prompt(20 + row), depth=fixed(depth)) for row, depth in enumerate((8, 1, 1))}
    driver.run(jobs, 4, keep=True)
    rounds = driver.backend.rounds
    rounds.drafter.feed, fed = passes(rounds.drafter.feed)
    driver.round([0, 1, 2])
    assert [rows for _, rows in fed] == [3, *[1] * 7]


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_only_rows_that_ask_go_through_the_chain(bench, depth):
    driver, seen = Driver(bench.open(rows=6)), set()
    chain = driver.backend.rounds.chain
    apply = chain.apply

    def noted(logits, rows, *rest):
        seen.update(rows.tolist())
        assert logits.shape[1] <= depth + 1
        return apply(logits, rows, *rest)

    chain.apply = noted
    jobs = {row: Job(bench.prompt(9), sampling, fixed(depth)) for row, sampling in enumerate(ASKING.values(), 1)}
    driver.run({0: Job(bench.prompt(9), depth=fixed(8)), **jobs}, COUNT)
    assert seen == set(jobs)


# --- neighbours --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["right", "wrong", "head"])
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_ragged_mixes_have_the_bits_of_rows_alone(bench, drafter):
    depths = (0, 8, 1, 0, 3, 8, 2)
    jobs = {row: Job(bench.prompt(13 + row), depth=fixed(depth)) for row, depth in enumerate(depths)}
    assert not bench.differences(jobs, COUNT, drafter)


@pytest.mark.parametrize("name", ASKING)
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_a_greedy_row_beside_rows_that_ask_for_more(bench, name):
    """Narrower and wider than they are, and in their middle."""
    for depth, other in ((0, 4), (4, 0)):
        asking = {row: Job(bench.prompt(30 + row), ASKING[name], fixed(other), seed=row) for row in (0, 2)}
        assert not bench.differences({1: Job(bench.prompt(21), depth=fixed(depth)), **asking}, COUNT)


# --- late pairs --------------------------------------------------------------------------------------------------


def head_memory(driver, row, length):
    """Keys and values of the head's layer, by position."""
    cache = driver.backend.rounds.cache
    table = cache.table[row, : cache.owned[row]]
    layer = cache.pages[-1]
    return [pages[table].transpose(1, 2).flatten(0, 1)[:length].clone() for pages in (layer.keys, layer.values)]


def sometimes(*turns):
    return lambda turn: 3 if turn in turns else 0


def often_right(driver, texts, vocab):
    """The head is fed and chains as ever, but what it proposes is right more often than a head of noise can be."""
    drafter, mixture = driver.backend.rounds.drafter, Mixture(texts, vocab, chance=0.8)
    draft = drafter.draft

    def drafted(feed, depths, least):
        draft(feed, depths, least)
        return mixture.draft(feed, depths, least)

    drafter.draft = drafted


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_rows_that_draft_seldom_have_the_same_head_cache(bench):
    """Drafts in every round, now and then, after more rounds than wait at once, and only in the last. All draft with
    the prompt, since that feeds its last pair once more, as a window."""
    now_and_then = (sometimes(-1, 0, 4, 5, 11), sometimes(-1, 40), lambda turn: (turn + 2) % 3 % 2 * 8, sometimes(-1))
    depths = (fixed(3), *now_and_then)
    jobs = {row: Job(bench.prompt(37), depth=depth) for row, depth in enumerate(depths)}
    driver = Driver(bench.open(rows=len(jobs), context=512))
    text = whole(jobs[0], bench.plain(jobs[0], 70))
    often_right(driver, dict.fromkeys(jobs, text), bench.vocab)
    traces = driver.run(jobs, 60, keep=True)
    assert max(traces[3].kept) > 4  # rounds whose pairs were set aside kept several at once
    for job in jobs.values():
        job.depth = fixed(1)
    driver.round(list(jobs))
    length = min(driver.length.values())
    wanted = head_memory(driver, 0, length)
    assert wanted[0].any(-1).all()
    for row in jobs:
        assert all(torch.equal(*pair) for pair in zip(head_memory(driver, row, length), wanted, strict=True)), row


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_rows_that_draft_seldom_draft_the_same(bench):
    """Side by side, since nothing is ever verified."""
    turns = (3, 4, 20, 56)
    jobs = {
        row: Job(bench.prompt(18), depth=depth, fewer=lambda turn, left: 0)
        for row, depth in enumerate((fixed(3), sometimes(*turns)))
    }
    driver = Driver(bench.open(rows=2))
    for row, job in jobs.items():
        driver.start(row, job)
        while driver.waiting(row):
            driver.prefill(row)
    for turn in range(58):
        driver.round([0, 1])
        drafts = driver.backend.rounds.windows[:, 1:4].tolist()
        assert turn not in turns or drafts[0] == drafts[1]


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_sampled_rows_that_all_draft_seldom_draft_the_same(bench):
    """Their tokens are known only after their pairs were set aside, while nobody drafts."""
    turns, drafts = (3, 4, 20, 56), []
    for depth in (fixed(3), sometimes(*turns)):
        driver = Driver(bench.open(rows=2))
        samplings = Sampling(temperature=1.0), Sampling(temperature=1.0, seed=5)
        for row, sampling in enumerate(samplings):
            driver.start(row, Job(bench.prompt(18), sampling, seed=5, depth=depth, fewer=lambda turn, left: 0))
            while driver.waiting(row):
                driver.prefill(row)
        for turn in range(58):
            driver.round([0, 1])
            if turn in turns:
                drafts.append(driver.backend.rounds.windows[:, :4].tolist())
    assert drafts[: len(turns)] == drafts[len(turns) :]


@pytest.mark.parametrize("bench", ["dense-native-1", "dense-reference-1"], indirect=True)
def test_a_round_tells_what_waits_for_the_head_and_what_was_taken_in(bench):
    driver, results = Driver(bench.open(rows=2)), []
    run = driver.backend.round

    def noted(plan):
        handle = run(plan)
        results.append(handle.result())
        return handle

    driver.backend.round = noted
    driver.run([Job(bench.prompt(18), depth=sometimes(5)), Job(bench.prompt(18))], 8)
    assert [result.late for result in results[:8]] == [0, 0, 0, 0, 0, 5, 0, 0]
    assert [result.late_s > 0.0 for result in results[:8]] == [False] * 5 + [True] + [False] * 2
    drafts, rests = ([kept.late for result in results[:7] for kept in result.kept if kept.row == row] for row in (0, 1))
    assert drafts == [1, 2, 3, 4, 5, 0, results[6].kept[0].late]
    assert rests == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("bench", ["dense-native-1", "dense-reference-1"], indirect=True)
def test_a_row_used_again_has_nothing_set_aside(bench):
    job, memories = Job(bench.prompt(25), depth=sometimes(3)), []
    for stranger in (False, True):
        driver = Driver(bench.open(rows=1))
        if stranger:
            driver.run({0: Job(bench.prompt(60, salt=1))}, 11)
            assert driver.backend.rounds.drafter.backlog.most[0]
        driver.run({0: job}, 5, keep=True)
        memories.append(head_memory(driver, 0, driver.length[0] - 1))
    assert all(torch.equal(*pair) for pair in zip(*memories, strict=True))


@pytest.mark.parametrize("bench", ["dense-native-1", "moe-reference-1"], indirect=True)
def test_nothing_is_done_for_rows_that_never_draft(bench):
    driver = Driver(bench.open(rows=2))
    rounds = driver.backend.rounds
    start = rounds.start
    rounds.start = lambda given: start(replace(given, follows=given.row != 1))
    jobs = {row: Job(bench.prompt(25), depth=PLAIN) for row in range(2)}
    driver.run(jobs, 40, keep=True)
    assert rounds.drafter.backlog.most[1] == 0
    assert rounds.drafter.backlog.counts[1] == 0 < rounds.drafter.backlog.counts[0]
    assert head_memory(driver, 0, 25)[0].any()
    assert all(not part[24:].any() for part in head_memory(driver, 1, 65))  # the prompt's pairs are in for others
    assert driver.traces[0].tokens == driver.traces[1].tokens


def test_windows_are_padded_nowhere_with_kernels(benches):
    """Neither rows that ask for nothing nor any pass over a model copies windows to a common width."""
    with benches("dense-native-1").ready() as bench, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Layout, "pad", lambda *_: pytest.fail("a window was padded"))
        Driver(bench.open(rows=2)).run([Job(bench.prompt(9), depth=fixed(4)), Job(bench.prompt(9))], COUNT)
