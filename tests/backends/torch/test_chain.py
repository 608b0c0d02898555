"""The sampling chain against a slow one in plain Python, step by step and all together."""

import math

import pytest
import torch

from headlong.backends.torch.chain import Chain, Needs, Seen
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.ragged import Layout
from headlong.engine.request import Sampling, Start

VOCAB, WIDTH = 50, 4
PROMPT = [3, 3, 7, 20, 41]
OUTPUT = [7, 9, 9, 30]  # tokens already kept
DRAFTS = [9, 11, 11]
SEED = 77

STEPS = {
    "greedy": Sampling(),
    "repetition": Sampling(repetition_penalty=1.4),
    "repetition-below-1": Sampling(repetition_penalty=0.7),
    "presence": Sampling(presence_penalty=0.9),
    "frequency": Sampling(frequency_penalty=0.6),
    "frequency-below-0": Sampling(frequency_penalty=-0.5, presence_penalty=-0.1),
    "bias": Sampling(logit_bias={0: 5.0, 9: -3.0, 49: 0.25}),
    "temperature": Sampling(temperature=0.6, seed=SEED),
    "top-k": Sampling(temperature=1.0, top_k=7, seed=SEED),
    "top-k-1": Sampling(temperature=1.0, top_k=1, seed=SEED),
    "top-k-all": Sampling(temperature=1.0, top_k=1000, seed=SEED),
    "top-p": Sampling(temperature=1.0, top_p=0.7, seed=SEED),
    "top-p-tiny": Sampling(temperature=1.0, top_p=1e-6, seed=SEED),
    "min-p": Sampling(temperature=1.0, min_p=0.2, seed=SEED),
    "min-p-1": Sampling(temperature=1.0, min_p=1.0, seed=SEED),
    "xtc": Sampling(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.06, seed=SEED),
    "xtc-always": Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=0.02, seed=SEED),
    "xtc-nothing-viable": Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=1.0, seed=SEED),
    "truncation-of-a-greedy-row": Sampling(top_k=3, top_p=0.5),
    "unseeded": Sampling(temperature=1.3, top_k=30, top_p=0.9),
    "everything": Sampling(
        temperature=0.8,
        top_k=25,
        top_p=0.93,
        min_p=0.02,
        xtc_probability=0.5,
        xtc_threshold=0.05,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: 2.0, 7: -1.0},
        seed=SEED,
    ),
}


def slow(logits: list[float], sampling: Sampling, output: list[int], position: int) -> list[float]:
    """The scores of one position, from the definition of each step. `output` includes the drafts before it."""
    scores = list(logits)
    for token in range(VOCAB):
        count = output.count(token)
        if count or token in PROMPT:
            penalty = sampling.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty * (count > 0)
        scores[token] += sampling.logit_bias.get(token, 0.0)
    if sampling.greedy:
        return scores
    scores = [score / sampling.temperature for score in scores]
    order = sorted(range(VOCAB), key=lambda token: -scores[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    shares = softmax(scores, order)
    before, kept = 0.0, []
    for token in order:  # the smallest set that reaches top_p: each token whose better ones have not reached it
        if sampling.top_p == 1.0 or before < sampling.top_p:
            kept.append(token)
        before += shares[token]
    order = [token for token in kept if shares[token] >= sampling.min_p * shares[order[0]]]
    shares = softmax(scores, order)
    viable = [token for token in order if shares[token] >= sampling.xtc_threshold]
    coin = noise.uniform(torch.tensor([SEED]), noise.XTC, torch.tensor([[position]])).item()
    if coin < sampling.xtc_probability:
        order = [token for token in order if token not in viable[:-1]]
    return [score if token in order else -math.inf for token, score in enumerate(scores)]


def softmax(scores: list[float], order: list[int]) -> dict[int, float]:
    most = max(scores[token] for token in order)
    weights = {token: math.exp(scores[token] - most) for token in order}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def windows(rows: int):
    """Logits [rows, WIDTH, VOCAB], the positions they are for, and the drafts each position has before it."""
    logits = 2 * torch.randn(rows, WIDTH, VOCAB, generator=torch.Generator().manual_seed(1))
    positions = len(PROMPT) + len(OUTPUT) + torch.arange(WIDTH).expand(rows, -1)
    before = torch.arange(1, WIDTH) <= torch.arange(WIDTH)[:, None]
    return logits, positions, Seen(torch.tensor(DRAFTS).expand(rows, -1), before.expand(rows, -1, -1))


def chain_with(samplings) -> Chain:
    """One row for each, with OUTPUT counted in two rounds."""
    chain = Chain(len(samplings), VOCAB, torch.device("cpu"))
    for row, sampling in enumerate(samplings):
        chain.start(Start(row, PROMPT, sampling, SEED))
    for tokens in ([7, 9, 44], [9, 30, 2, 2]):  # what follows the two kept ones is padding
        count(chain, range(len(samplings)), tokens, kept=2)
    return chain


def count(chain: Chain, rows, tokens: list[int], kept: int) -> None:
    """The same tokens for each of these rows."""
    layout = Layout.of(tuple(rows), (len(tokens),) * len(rows), torch.device("cpu"))
    chain.count(layout, torch.tensor(tokens * len(rows)), torch.full((len(rows),), kept))


def apply(chain: Chain, rows: list[int], logits, positions, seen):
    index = torch.tensor(rows)
    return chain.apply(logits, index, chain.needs_of(rows), positions, seen)


@pytest.mark.parametrize("name", STEPS)
def test_each_step(name):
    sampling = STEPS[name]
    logits, positions, seen = windows(1)
    found = apply(chain_with([sampling]), [0], logits, positions, seen)
    for j in range(WIDTH):
        wanted = slow(logits[0, j].tolist(), sampling, OUTPUT + DRAFTS[:j], int(positions[0, j]))
        torch.testing.assert_close(found[0, j], torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_a_row_keeps_its_bits_beside_rows_that_ask_for_more():
    chain = chain_with(list(STEPS.values()))
    logits, positions, seen = windows(len(STEPS))
    logits[:] = logits[0]
    together = apply(chain, list(range(len(STEPS))), logits, positions, seen)
    for row in range(len(STEPS)):
        one = slice(row, row + 1)
        alone = apply(chain, [row], logits[one], positions[one], Seen(seen.tokens[one], seen.visible[one]))
        assert torch.equal(together[row], alone[0]), list(STEPS)[row]
    greedy = list(STEPS).index("greedy")
    assert torch.equal(together[greedy], logits[greedy])


def test_a_row_forgets_who_had_it_before():
    chain, fresh = chain_with([STEPS["everything"]] * 2), Chain(2, VOCAB, torch.device("cpu"))
    logits, positions, seen = windows(1)
    for name in ("repetition", "bias", "top-k", "greedy"):
        for each in (chain, fresh):
            each.start(Start(1, PROMPT, STEPS[name], SEED))
        assert torch.equal(*(apply(each, [1], logits, positions, seen) for each in (chain, fresh)))


def test_widths_do_not_matter():
    """A position sees the same whether its drafts stand in one window or were counted before."""
    sampling = STEPS["everything"]
    logits, positions, seen = windows(1)
    chain = chain_with([sampling])
    whole = apply(chain, [0], logits, positions, seen)
    none = Seen(torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 1, 0, dtype=torch.bool))
    for j in range(WIDTH):
        alone = apply(chain, [0], logits[:, j : j + 1], positions[:, j : j + 1], none)
        assert torch.equal(alone[0, 0], whole[0, j])
        if j < len(DRAFTS):
            count(chain, [0], [DRAFTS[j]], kept=1)


def test_a_batch_asks_for_what_some_row_asks_for():
    chain = chain_with([STEPS["greedy"], STEPS["bias"], STEPS["unseeded"]])
    assert chain.needs_of([0]) == Needs()
    assert chain.needs_of([0, 1]) == Needs(bias=True)
    assert chain.needs_of([1, 2]) == Needs(bias=True, noise=True, truncation=True, rejection=True)
