"""The promise: a row's bits depend on its prompt, sampling and seed alone. Every test compares with the same prompt
decoded without drafts, alone: tokens, the target's logits and the chain's scores, to the last bit."""

import random
import threading
from dataclasses import replace

import pytest
import torch

import headlong
from headlong.backends.torch import accept
from headlong.backends.torch.accept import Verdict
from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.cache import Cache
from headlong.backends.torch.chain import Chain, Seen
from headlong.backends.torch.draws import Draws
from headlong.backends.torch.kernels import attention, gated_delta, linear, noise, norm
from headlong.backends.torch.native.library import torch_threads
from headlong.backends.torch.round import Rounds
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.engine.request import Chunk, Request, Sampling, Start
from headlong.settings import Settings
from tests import tiny
from tests.backends.torch.driver import CHUNK, PAGE, Driver, Job, changing, fixed, prompt_of

COUNT = 16
# Prefill takes all but the last token: chunks of 32 end before, at and after it, and so do pages of 16.
LENGTHS = (1, 2, 16, 17, 31, 32, 33, 34, 64, 65, 66, 97)
BENCHES = ("dense-native-1", "dense-reference-1", "moe-native-1", "moe-reference-1")
MORE_BENCHES = ("dense-native-2", "moe-reference-2", "next-native-1", "wide-native-2", "wide-reference-1")

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3}
BIAS = {"logit_bias": {3: 4.0, 5: -50.0, 77: 2.5}}
CUTS = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "xtc_probability": 0.5, "xtc_threshold": 0.08}
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy-penalties-bias": Sampling(**PENALTIES, **BIAS),
    "seeded": Sampling(temperature=0.9, seed=11),
    "seeded-everything": Sampling(temperature=1.3, seed=2**62 + 5, **PENALTIES, **BIAS, **CUTS),
    "seeded-top-k": Sampling(temperature=0.7, seed=3, top_k=5),
    "seeded-top-p": Sampling(temperature=1.1, seed=4, top_p=0.8),
    "seeded-min-p": Sampling(temperature=1.5, seed=5, min_p=0.1),
    "seeded-xtc": Sampling(temperature=1.0, seed=6, xtc_probability=0.6, xtc_threshold=0.05),
}
MAIN_SAMPLINGS = ("greedy", "greedy-penalties-bias", "seeded", "seeded-everything")
DEPTHS = {"0": fixed(0), "1": fixed(1), "2": fixed(2), "3": fixed(3), "8": fixed(8), "changing": None}


def any_of_them(turn, left):
    """Verify some of the drafts that are left, or none."""
    return random.Random(f"{turn} {left}").randint(0, left)


def row_depth(name, row):
    return DEPTHS[name] or changing(row)


def neighbours(bench, rows):
    """Greedy, seeded and unseeded company of other lengths and depths."""
    samplings = (
        Sampling(),
        Sampling(temperature=0.8, seed=99, top_p=0.9),
        Sampling(temperature=1.0, **PENALTIES),
        Sampling(temperature=1.2, top_k=9, xtc_probability=0.3),
    )
    lengths = (5, 40, 51, 120)
    return {
        row: Job(bench.prompt(length, salt=7), sampling, changing(50 + row), arrives=row % 3, seed=row)
        for row, length, sampling in zip(rows, lengths, samplings, strict=True)
    }


def crowd(bench, sampling, depth):
    """A row of every length, arriving over three steps, every other one chunk by chunk, in no order; and company."""
    rows = random.Random(1).sample(range(16), 16)
    jobs = {
        row: Job(
            bench.prompt(length),
            sampling,
            row_depth(depth, row),
            arrives=i % 3,
            at_once=i % 2 == 0,
            fewer=any_of_them if depth == "changing" else lambda turn, left: left,
        )
        for i, (row, length) in enumerate(zip(rows, LENGTHS, strict=False))
    }
    return jobs | neighbours(bench, rows[len(LENGTHS) :])


DEPTHS_AND_DRAFTERS = [
    pytest.param(depth, drafter, id=f"{depth}-{drafter}")
    for depth in DEPTHS
    for drafter in (("head",) if depth == "0" else ("right", "wrong", "head"))
]


@pytest.mark.parametrize(("depth", "drafter"), DEPTHS_AND_DRAFTERS)
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_crowd(bench, depth, drafter):
    """Every length; greedy and seeded rows turn by turn, so that each length meets each sampling at some depth."""
    jobs = crowd(bench, Sampling(), depth)
    for i, job in enumerate(list(jobs.values())[: len(LENGTHS)]):
        job.sampling = SAMPLINGS[MAIN_SAMPLINGS[(i + list(DEPTHS).index(depth)) % len(MAIN_SAMPLINGS)]]
    assert not bench.differences(jobs, COUNT, drafter)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_crowd_of_one_sampling(bench, sampling):
    """No other row asks for a part of the chain that these do not."""
    jobs = dict(list(crowd(bench, SAMPLINGS[sampling], "changing").items())[: len(LENGTHS)])
    assert not bench.differences(jobs, COUNT, "head" if bench.native else "right")


@pytest.mark.parametrize("drafter", ["right", "wrong", "head"])
@pytest.mark.parametrize("bench", BENCHES + MORE_BENCHES, indirect=True)
def test_crowd_of_all_sorts(bench, drafter):
    """Every row with a sampling and a depth of its own."""
    jobs = crowd(bench, Sampling(), "changing")
    depths = [*(fixed(depth) for depth in (0, 1, 2, 3, 8)), changing(3)]
    for i, job in enumerate(list(jobs.values())[: len(LENGTHS)]):
        job.sampling = list(SAMPLINGS.values())[i % len(SAMPLINGS)]
        job.depth = depths[i % len(depths)]
    assert not bench.differences(jobs, COUNT, drafter)


@pytest.mark.parametrize("drafter", ["right", "wrong", "head"])
@pytest.mark.parametrize("depth", ["8", "changing"])
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_alone(bench, depth, drafter):
    for i, length in enumerate((1, 2, 17, 33, 34, 66)):
        job = Job(bench.prompt(length), SAMPLINGS[MAIN_SAMPLINGS[i % 4]], row_depth(depth, i))
        assert not bench.differences({0: job}, COUNT, drafter), f"prompt of {length}"


@pytest.mark.parametrize("bench", ["dense-native-1", "moe-reference-1"], indirect=True)
def test_prompts_at_once_and_chunk_by_chunk(bench):
    """A long prompt goes in while others decode, a chunk between two rounds; the cache's bits cannot tell."""
    jobs = {row: Job(bench.prompt(3 + row), depth=fixed(2)) for row in range(3)}
    late = {3: Job(bench.prompt(161), SAMPLINGS["seeded"], fixed(3), arrives=1, at_once=False)}
    together = bench.run(jobs | late, COUNT)
    assert not together[3].difference(bench.plain(late[3], COUNT), COUNT)
    assert not bench.differences(jobs | late, COUNT)


@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_prompts_piece_by_piece(bench, pieces):
    """Rounds of other rows, and pieces of other prompts, come between the layers of a chunk."""
    jobs = {row: Job(bench.prompt(3 + row), depth=changing(row)) for row in range(3)}
    late = {
        row: Job(bench.prompt(length), sampling, fixed(3), arrives=row % 3, at_once=False, pieces=pieces)
        for row, length, sampling in zip((3, 4, 5), (161, 66, 40), list(SAMPLINGS.values())[:3], strict=True)
    }
    assert not bench.differences(jobs | late, COUNT)
    # The head has seen the same, so it drafts the same.
    whole = bench.run(jobs | {row: replace(job, pieces=1) for row, job in late.items()}, COUNT)
    cut = bench.run(jobs | late, COUNT)
    assert [trace.kept for trace in cut.values()] == [trace.kept for trace in whole.values()]


@pytest.mark.parametrize("length", [20, 2 * PAGE + 1, CHUNK + 1, CHUNK + 30])
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_rows_that_begin_behind_another_with_their_prompt(bench, length):
    """Whoever goes first: neither writes into what both have."""
    driver, prompt = Driver(bench.open()), bench.prompt(length)
    samplings = [*SAMPLINGS.values()][:4]
    jobs = {
        row: Job(prompt, sampling, depth=lambda turn, most=row: most if turn >= 0 else 0)
        for row, sampling in enumerate(samplings)
    }
    driver.start(0, jobs[0])
    while driver.waiting(0):
        driver.prefill(0)
    for row in (1, 2, 3):
        driver.fork(0, row, jobs[row])
    for rows in ([1], [0, 2], [3, 1, 0]):
        driver.round(rows)
    for row in jobs:
        while len(driver.traces[row].tokens) < COUNT:
            driver.round([row])
        assert not driver.traces[row].difference(bench.plain(jobs[row], COUNT), COUNT)
    for row in jobs:
        driver.release(row)
    assert driver.pool.free == driver.limits.pages


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("bench", ["dense-native-1", "dense-reference-1"], indirect=True)
def test_a_row_that_was_released_amidst_a_chunk_is_as_new(bench, interrupted):
    """Also if nothing came of the release."""
    driver = Driver(bench.open())
    job = Job(bench.prompt(66), depth=fixed(2))
    driver.start(0, Job(bench.prompt(80), pieces=2, at_once=False))
    driver.prefill(0)
    assert driver.chunks
    if interrupted:
        driver.backend.release = lambda row: None
    driver.release(0)
    assert not driver.run({0: job}, COUNT)[0].difference(bench.plain(job, COUNT), COUNT)


@pytest.mark.parametrize("drafter", ["right", "head"])
@pytest.mark.parametrize("bench", ["dense-native-1", "moe-native-1"], indirect=True)
def test_after_two_thousand_tokens(bench, drafter):
    count = 2000
    job = Job(bench.prompt(45), Sampling(temperature=0.8, seed=8), fixed(3))
    trace = bench.run({0: job}, count, drafter, context=2112)[0]
    assert not trace.difference(bench.plain(job, count), count)


# --- the drafters do what their names say ------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 3, 8])
@pytest.mark.parametrize("sampling", MAIN_SAMPLINGS)
@pytest.mark.parametrize("bench", ["dense-native-1"], indirect=True)
def test_right_is_right_and_wrong_wrong(bench, sampling, depth):
    jobs = {row: Job(bench.prompt(33 + row), SAMPLINGS[sampling], fixed(depth)) for row in range(3)}
    for trace in bench.run(jobs, COUNT, "right").values():
        assert set(trace.kept) == {depth + 1}
    for trace in bench.run(jobs, COUNT, "wrong").values():
        assert set(trace.kept) == {1}


# --- through the engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("engine") / "model", "dense", with_tokenizer=True)
    with_edges = headlong.load(str(folder), device="cpu", rows=5, page=16, chunk=32, context=256)
    yield with_edges
    with_edges.close()


@pytest.mark.parametrize("sampling", MAIN_SAMPLINGS)
def test_engine_texts_do_not_depend_on_company(engine, sampling):
    """More requests than rows, arriving one by one, each at its own depth, with strangers in between."""
    prompts = [list(range(n % 50, n % 50 + n)) for n in (1, 16, 17, 32, 33, 65)]
    how = SAMPLINGS[sampling]
    alone = [_answer(engine, Request(prompt, 24, how, draft_kind="none", ignore_eos=True)) for prompt in prompts]
    strangers = [Request([9] * n, 17, Sampling(temperature=1.0), depth=n % 4, ignore_eos=True) for n in (3, 70)]
    asked = [Request(p, 24, how, depth=d, ignore_eos=True) for p, d in zip(prompts, (3, 8, 1, 0, 2, 5), strict=True)]
    indices = []
    for request in [strangers[0], *asked[:3], strangers[1], *asked[3:]]:
        indices.append(engine.submit(request))
        engine.step()
    while engine.busy:
        engine.step()
    outputs = [engine.output(index) for index in indices]
    assert [output.tokens for output in [*outputs[1:4], *outputs[5:]]] == alone


def _answer(engine, request):
    index = engine.submit(request)
    while engine.busy:
        engine.step()
    return engine.output(index).tokens


def test_engine_draws_without_a_seed_or_drafts(engine):
    """The first unseeded request may be one that never drafts."""
    fresh = headlong.load(engine.name, device="cpu", rows=2, page=16, chunk=32, context=256)
    outputs = fresh.generate([[1], [2, 3]], max_tokens=5, temperature=1.0, draft_kind="none", ignore_eos=True)
    assert [len(output.tokens) for output in outputs] == [5, 5]


# --- the check itself --------------------------------------------------------------------------------------------
# Each of these loosens one thing, as a careless change might. The check must see it, or it checks nothing.


def uneven_gates(monkeypatch):
    """One bit more or less, by how many tokens share the pass."""
    silu = norm.silu
    for module in (norm, gated_delta):
        monkeypatch.setattr(module, "silu", lambda x: silu(x) * (1 + 2**-22 * (x.shape[0] % 3)))


def uneven_products(monkeypatch):
    """A product whose order of addition depends on the number of rows."""

    def product(x, weight):
        y = weight.multiply(torch.cat([x, x]))[: len(x)]
        half = x.shape[1] // 2
        left, right = (torch.where(torch.arange(x.shape[1]) < half, *pair) for pair in ((x, 0 * x), (0 * x, x)))
        return y if len(x) == 1 else weight.multiply(left) + weight.multiply(right)

    monkeypatch.setattr(linear, "linear", product)
    monkeypatch.setattr("headlong.backends.torch.step.linear", product)


def uneven_pages(monkeypatch):
    """A sum over pages that feels how many of them the longest neighbour has."""
    add = attention._add_in_order

    def careless(parts):
        return add(parts) * (1 + 2**-22 * (parts.shape[2] % 2)) if parts.shape[-1] > 1 else add(parts)

    monkeypatch.setattr(attention, "_add_in_order", careless)


def one_kept_too_few(monkeypatch):
    commit = Rounds._commit

    def careless(self, feed, *late):
        commit(self, feed, *late)
        self.cache.kept[feed.layout.index] = (feed.kept - 1).clamp(min=1)

    monkeypatch.setattr(Rounds, "_commit", careless)


def all_kept(monkeypatch):
    """Recurrent states take in the whole window, rejected drafts included."""
    commit = Rounds._commit

    def careless(self, feed, *late):
        commit(self, feed, *late)
        self.cache.kept[feed.layout.index] = feed.layout.sizes

    monkeypatch.setattr(Rounds, "_commit", careless)


def last_draft_trusted(monkeypatch):
    keep_chosen = accept._keep_chosen

    def trusting(layout, *rest):
        found = keep_chosen(layout, *rest)
        return Verdict(found.tokens, torch.minimum(found.kept + 1, layout.sizes))

    monkeypatch.setattr(accept, "_keep_chosen", trusting)


def noise_by_place(monkeypatch):
    gumbel = noise.gumbel
    monkeypatch.setattr(
        noise, "gumbel", lambda seed, *rest: gumbel(seed + torch.arange(len(seed), device=seed.device), *rest)
    )
    choose = Draws.choose

    def careless(self, layout, starts, *rest):
        choose(self, layout, starts + torch.arange(len(starts)), *rest)

    monkeypatch.setattr(Draws, "choose", careless)


def drafts_not_counted(monkeypatch):
    """Penalties that forget the drafts before a position."""
    apply = Chain.apply

    def careless(self, logits, rows, needs, positions, seen):
        return apply(self, logits, rows, needs, positions, Seen(seen.tokens, seen.visible & False))

    monkeypatch.setattr(Chain, "apply", careless)


def states_left_behind(monkeypatch):
    start = Cache.start

    def careless(self, row):
        start(self, row)
        for memory in self.memories:
            memory.states[row] = 1e-3

    def only_in_crowds(self, row):
        (careless if self.limits.rows > 1 else start)(self, row)

    monkeypatch.setattr(Cache, "start", only_in_crowds)


def chunks_by_size(monkeypatch):
    """Prompt chunks that attend in another order when others run too."""
    attend = attention.chunk_attention

    def careless(pages, stretch, q, k, v):
        out = attend(pages, stretch, q, k, v)
        return out * (1 + 2**-22) if len(pages.keys) > 100 else out

    monkeypatch.setattr("headlong.backends.torch.step.chunk_attention", careless)


NATIVE_TOO = (
    one_kept_too_few,
    all_kept,
    last_draft_trusted,
    noise_by_place,
    drafts_not_counted,
    states_left_behind,
    chunks_by_size,
)
LOOSENED = [
    *(pytest.param(name, "dense-reference-1", id=f"{name.__name__}-reference") for name in NATIVE_TOO),
    *(pytest.param(name, "dense-native-1", id=f"{name.__name__}-native") for name in NATIVE_TOO),
    *(
        pytest.param(name, "moe-reference-1", id=name.__name__)
        for name in (uneven_gates, uneven_products, uneven_pages)
    ),
]


@pytest.mark.parametrize(("loosen", "bench"), LOOSENED, indirect=["bench"])
def test_the_check_notices(bench, loosen, monkeypatch):
    jobs = crowd(bench, SAMPLINGS["seeded-everything"], "3")
    for row, job in jobs.items():
        job.depth = changing(row)
    assert not bench.differences(jobs, COUNT, "right")  # the plain texts are made before anything is loosened
    loosen(monkeypatch)
    found = bench.differences(jobs, COUNT, "right") or bench.differences(jobs, COUNT, "wrong")
    assert found


@pytest.mark.parametrize("bench", ["dense-native-1"], indirect=True)
def test_the_check_looks_at_bits(bench):
    """A logit one unit in the last place away is a difference, also when the token is the same."""
    job = Job(bench.prompt(17), depth=fixed(2))
    mine = Driver(bench.open()).run([job], COUNT)[0]
    assert not mine.difference(bench.plain(job, COUNT), COUNT)
    mine.logits[COUNT - 1] = mine.logits[COUNT - 1].clone()
    mine.logits[COUNT - 1][3] = torch.nextafter(mine.logits[COUNT - 1][3], torch.tensor(1e9))
    assert "logits of token 15" in mine.difference(bench.plain(job, COUNT), COUNT)


def test_another_engine_in_another_thread_changes_no_bit(tmp_path):
    """Rounds hold torch at one thread; prompts that run meanwhile, in threads of their own, must not notice."""
    folder = tiny.write(tmp_path, hidden_size=192, intermediate_size=704)
    prompt = prompt_of(100, 128)

    def states() -> list[bytes]:
        backend = TorchBackend(open_checkpoint(str(folder)), Settings(device="cpu", rows=1, context=256, threads=2))
        backend.start(Start(0, prompt, Sampling(), seed=0))
        backend.prefill(Chunk(0, 0, prompt[:-1], prompt[-1], [0]))
        return [memory.states[0].numpy().tobytes() for memory in backend.rounds.cache.memories]

    alone = states()
    found: list[list[bytes]] = []
    with torch_threads(1):  # as a round of another engine leaves torch's default
        threads = [threading.Thread(target=lambda: found.append(states())) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [alone] * 3
