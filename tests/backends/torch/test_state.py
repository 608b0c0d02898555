"""What a row remembers after any pattern of accepted drafts has the bits that plain decoding leaves."""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.cache import NULL_PAGE, RESERVED_PAGES, SPARE_PAGE
from headlong.backends.torch.models.qwen3_5 import Attention
from headlong.engine.request import Sampling
from tests.backends.torch.driver import PLAIN, Driver, Job, Mixture, changing, fixed, whole

BENCHES = ("dense-native-1", "dense-reference-1", "moe-native-1", "moe-reference-1", "next-native-1")
COUNT = 40


@dataclass
class Memory:
    """A settled row: after a window of one token, everything before it is folded in and the token itself waits."""

    states: list[Tensor]
    inputs: list[Tensor]
    waiting: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]

    def differences(self, other: "Memory") -> list[str]:
        found = []
        for name, mine in vars(self).items():
            for layer, (a, b) in enumerate(zip(mine, getattr(other, name), strict=True)):
                if a.shape != b.shape or not torch.equal(a.view(torch.int32), b.view(torch.int32)):
                    found.append(f"{name} of layer {layer}")
        return found


def settle(driver: Driver, rows: list[int]) -> dict[int, Memory]:
    """One plain round for all of them, then what the cache holds of each."""
    for row in rows:
        driver.jobs[row].depth, driver.jobs[row].fewer = PLAIN, lambda turn, left: 0
    driver.round(rows)
    return {row: memory_of(driver.backend, row, driver.length[row]) for row in rows}


def memory_of(backend: TorchBackend, row: int, length: int) -> Memory:
    cache = backend.rounds.cache
    target = sum(isinstance(layer.mixer, Attention) for layer in backend.model.layers)  # the head's layer comes after
    table = cache.table[row, : cache.owned[row]]

    def by_position(pages: Tensor) -> Tensor:
        return pages[table].transpose(1, 2).flatten(0, 1)[:length].clone()

    taps = backend.model.layers[0].mixer.delta.conv.shape[0]
    return Memory(
        states=[memory.states[row].clone() for memory in cache.memories],
        inputs=[memory.inputs[row, :taps].clone() for memory in cache.memories],
        waiting=[memory.waiting[row, :1].clone() for memory in cache.memories],
        keys=[by_position(layer.keys) for layer in cache.pages[:target]],
        values=[by_position(layer.values) for layer in cache.pages[:target]],
    )


def plain_memory(bench, job: Job, count: int) -> Memory:
    """The memory of the job decoded one by one, alone in a fresh backend, after `count` tokens and one more."""
    driver = Driver(bench.open(rows=1))
    driver.run([Job(job.prompt, job.sampling)], count, keep=True)
    return settle(driver, [0])[0]


def check(bench, driver: Driver, jobs: dict[int, Job]) -> None:
    counts = {row: len(driver.traces[row].tokens) for row in jobs}
    for row, memory in settle(driver, list(jobs)).items():
        assert memory.differences(plain_memory(bench, jobs[row], counts[row])) == [], f"row {row}"


def open_mixture(bench, jobs: dict[int, Job], chance: float, salt: int = 0) -> Driver:
    texts = {row: whole(job, bench.plain(job, COUNT)) for row, job in jobs.items()}
    return Driver(bench.open(drafter=Mixture(texts, bench.vocab, chance, salt), rows=max(jobs) + 1))


@pytest.mark.parametrize("salt", range(3))
@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_any_pattern_of_accepted_drafts(bench, salt):
    jobs = {row: Job(bench.prompt(n), depth=changing(10 * salt + row)) for row, n in enumerate((1, 17, 32, 33, 50, 65))}
    jobs[0].depth = fixed(8)
    driver = open_mixture(bench, jobs, chance=0.7, salt=salt)
    traces = driver.run(jobs, COUNT, keep=True)
    kept = {count for trace in traces.values() for count in trace.kept}
    assert {1, 2, 3, 4} <= kept  # the pattern is one
    check(bench, driver, jobs)


@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("bench", ["dense-native-1", "moe-reference-1"], indirect=True)
def test_deep_windows(bench, chance):
    jobs = {row: Job(bench.prompt(30 + row), Sampling(temperature=0.8, seed=row), fixed(8)) for row in range(4)}
    driver = open_mixture(bench, jobs, chance)
    driver.run(jobs, COUNT, keep=True)
    check(bench, driver, jobs)


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_real_head(bench):
    jobs = {row: Job(bench.prompt(n), depth=fixed(d)) for row, (n, d) in enumerate([(3, 8), (33, 1), (66, 3)])}
    driver = Driver(bench.open(rows=3))
    driver.run(jobs, COUNT, keep=True)
    check(bench, driver, jobs)


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_rows_that_sit_out(bench):
    """Drafts and uncommitted windows wait with the row, whatever the others do meanwhile."""

    def resting(row):
        return lambda step: random.Random(f"{row} {step}").random() < 0.6

    jobs = {
        row: Job(bench.prompt(n), depth=changing(row), arrives=row, rests=resting(row), at_once=False)
        for row, n in enumerate((2, 34, 49, 70))
    }
    driver = open_mixture(bench, jobs, chance=0.8)
    driver.run(jobs, COUNT, keep=True)
    check(bench, driver, jobs)


def set_aside_and_back(driver: Driver, row: int, to: int) -> None:
    """In other pages, as another row, after all that a row's drafts were drawn from has been written over."""
    aside = driver.backend.set_aside(row)
    driver.pool.give(driver.pages.pop(row))
    with torch.inference_mode():
        driver.backend.rounds.chain.room_for_probs().fill_(torch.nan)
    for held in (driver.jobs, driver.length, driver.traces):
        held[to] = held.pop(row)
    driver.pages[to] = []
    driver.backend.bring_back(to, aside, driver._grow(to, driver.length[to] + 1 + aside.left))


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("bench", ["dense-native-1", "dense-reference-1"], indirect=True)
def test_an_unseeded_row_set_aside_goes_on_as_if_it_had_not_been(bench, top_p):
    """Its drafts wait with what they were drawn from, or the rejection rule would not hold for them."""

    def texts(moves):
        driver = Driver(bench.open(rows=4))
        driver.start(0, Job(bench.prompt(33), Sampling(temperature=0.9, top_p=top_p), fixed(3), seed=5))
        while driver.waiting(0):
            driver.prefill(0)
        row = 0
        for turn in range(12):
            if turn in moves:
                set_aside_and_back(driver, row, row + 1)
                row += 1
            driver.round([row])
        return driver.traces[row].tokens, driver.traces[row].kept

    stayed = texts(())
    assert max(stayed[1]) > 1  # some drafts were kept
    assert texts((2, 5, 9)) == stayed


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_a_row_used_again_remembers_nothing(bench):
    """Each row first serves a stranger of another length, sampling and depth, stopped in mid-window."""
    everything = Sampling(temperature=1.1, repetition_penalty=1.4, presence_penalty=1.0, logit_bias={4: 9.0}, top_p=0.9)
    jobs = {row: Job(bench.prompt(n), depth=changing(row)) for row, n in enumerate((1, 33, 48))}
    driver = open_mixture(bench, jobs, chance=0.8)
    driver.run({row: Job(bench.prompt(90 - 30 * row, salt=3), everything, fixed(8), seed=row) for row in jobs}, 25)
    traces = driver.run(jobs, COUNT, keep=True)
    for row, job in jobs.items():
        assert not traces[row].difference(bench.plain(job, COUNT), COUNT)
    check(bench, driver, jobs)


@pytest.mark.parametrize("bench", BENCHES, indirect=True)
def test_poisoned_pages_disturb_no_one(bench):
    """Free pages, and the page that takes padding's writes, are NaN from the start; freed ones become it."""
    jobs = {row: Job(bench.prompt(n), depth=changing(row)) for row, n in enumerate((16, 33, 64))}
    strangers = {row: Job(bench.prompt(40 + row, salt=5), depth=fixed(8)) for row in (3, 4)}
    driver = open_mixture(bench, jobs | strangers, chance=0.8)
    pages = driver.backend.rounds.cache.pages
    poison(pages, [SPARE_PAGE, *range(RESERVED_PAGES, len(pages[0].keys))])
    for row, job in (jobs | strangers).items():
        driver.start(row, job)
        while driver.waiting(row):
            driver.prefill(row)
    for turn in range(COUNT):
        driver.round([row for row in driver.jobs if len(driver.traces[row].tokens) < COUNT])
        if turn == 2:
            for row in strangers:
                poison(pages, [page + RESERVED_PAGES for page in driver.release(row)])
            poison(pages, [SPARE_PAGE])
        if all(len(driver.traces[row].tokens) >= COUNT for row in jobs):
            break
    for row, job in jobs.items():
        assert not driver.traces[row].difference(bench.plain(job, COUNT), COUNT)
    check(bench, driver, jobs)
    for layer in pages:
        assert not layer.keys[NULL_PAGE].any()
        assert not layer.values[NULL_PAGE].any()


def poison(pages, which: list[int]) -> None:
    with torch.inference_mode():
        for layer in pages:
            layer.keys[which] = torch.nan
            layer.values[which] = torch.nan


@pytest.mark.parametrize("bench", ["dense-native-1", "dense-reference-1"], indirect=True)
@pytest.mark.parametrize("careless", [-1, 1], ids=["one-too-few", "one-too-many"])
def test_the_check_notices(bench, careless):
    """A wrong count of kept tokens in one round, and states or inputs are no longer those of plain decoding."""
    jobs = {0: Job(bench.prompt(20), depth=fixed(3))}
    driver = open_mixture(bench, jobs, chance=0.0)
    driver.run(jobs, COUNT, keep=True)
    with torch.inference_mode():
        driver.backend.rounds.cache.kept[0] += careless
    memory = settle(driver, [0])[0]
    found = memory.differences(plain_memory(bench, jobs[0], COUNT))
    assert "states of layer 0" in found
    assert "inputs of layer 0" in found
