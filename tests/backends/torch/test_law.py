"""Sampling draws from the distribution it promises: counts against exact probabilities, by chi-square.

Most tests run a language model that is a table: the next token's logits are a row of it, chosen by the last token.
Its head is another table. They go through the real rounds, chain, drafter and rules, thousands of rows at a time.
"""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from headlong.backends.torch import accept
from headlong.backends.torch.accept import Verdict
from headlong.backends.torch.cache import Cache, CacheShape
from headlong.backends.torch.chain import Chain
from headlong.backends.torch.drafters import HeadDrafter, Proposal, Right
from headlong.backends.torch.kernels import noise
from headlong.backends.torch.native.library import references_only
from headlong.backends.torch.round import Rounds
from headlong.engine.request import Limits, RowPlan, Sampling, Start
from tests import tiny
from tests.backends.torch.driver import Driver, Job, fixed, open_tiny

DRAWS = 20_000
LEAST = 1e-4  # p-value; seeds are fixed, so a test that passes once passes always
FIRST = 2  # the one token of the prompt


@pytest.fixture(autouse=True, params=[contextlib.nullcontext, references_only], ids=["native", "reference"])
def kernels(request):
    with request.param():
        yield


# --- the table model ---------------------------------------------------------------------------------------------


class Table:
    """Target or head: a hidden state is the last token, and its logits a row of the table."""

    cache_shape = CacheShape(attention_layers=0, kv_heads=1, head_dim=1)
    words = None

    def __init__(self, logits, head=None):
        self.table, self.head = logits, head

    def __call__(self, hidden, tokens, step):
        return tokens.float()[:, None]

    def by_layer(self, tokens, step):
        yield from ()
        return tokens.float()[:, None]

    def logits(self, hidden, step=None):
        return self.table[hidden[:, 0].long()]

    def learn(self, tokens):
        pass


def tables(vocab, kind):
    """Logits [vocab, vocab] of a target and of a head that stands in this relation to it."""
    generator = torch.Generator().manual_seed(vocab)
    target = 1.5 * torch.randn(vocab, vocab, generator=generator)
    other = 1.5 * torch.randn(vocab, vocab, generator=generator)
    even = torch.arange(vocab) % 2 == 0
    return {
        "near": (target, target + 0.5 * other),
        "other": (target, other),
        "same": (target, target),
        "disjoint": (target.masked_fill(even, -torch.inf), other.masked_fill(~even, -torch.inf)),
        "certain": (target, None),  # a drafter without probabilities
    }[kind]


def draw(target, head, sampling, depth, count, draws=DRAWS, first_seed=0):
    """[draws, count]: the first tokens after the prompt, through as many rounds as that takes."""
    with torch.inference_mode():
        rounds = table_rounds(target, head, sampling, draws, first_seed)
        texts, left = [[] for _ in range(draws)], 0
        while min(len(text) for text in texts) < count:
            for kept in rounds.run([RowPlan(row, left, depth) for row in range(draws)]).result().kept:
                texts[kept.row] += kept.tokens
            left = depth
    return np.array([text[:count] for text in texts])


def table_rounds(target, head, sampling, rows, first_seed=0, masked=False):
    """Rounds of the table model, every row with the prompt in and a seed of its own."""
    vocab, cpu = len(target), torch.device("cpu")
    limits = Limits(rows, 64, 64, 64, 1, vocab, 8, "mtp", "")
    model = Table(target, None if head is None else Table(head))
    cache = Cache(model.cache_shape, limits, torch.float32, cpu)
    chain = _same_for_all(Chain(1, vocab, cpu), sampling, rows, first_seed, masked)
    drafter = HeadDrafter(model.head, cache, chain) if model.head else Guess({}, vocab)
    rounds = Rounds(model, cache, chain, drafter)
    rounds.windows[:, 0] = FIRST
    return rounds


def _same_for_all(chain, sampling, rows, first_seed, masked):
    """One row's parameters given to every row, each with a seed of its own."""
    chain.start(Start(0, [FIRST], sampling, 0, masked=masked))
    chain.rows, chain.needs, chain.rules = rows, chain.needs * rows, chain.rules * rows
    _repeat(chain, rows)
    chain.seed[:] = torch.arange(first_seed, first_seed + rows)
    for part in (chain.cuts, chain.from_logits, chain.from_scores):
        _repeat(part, rows, seed=chain.seed, seeds=chain.seed, probs=chain.draft_probs)
    return chain


def _repeat(part, rows, **shared):
    for name, value in vars(part).items():
        if isinstance(value, torch.Tensor):
            repeated = value.repeat(rows, *[1] * (value.dim() - 1))
            object.__setattr__(part, name, shared.get(name, repeated))


class Guess(Right):
    """Certain of a token that the row's length chooses."""

    def draft(self, feed, depths, least):
        return Proposal((5 * feed.lengths[:, None] + 3 * torch.arange(max(depths))) % self.vocab, certain=True)


# --- exact probabilities -----------------------------------------------------------------------------------------


def chain_by_hand(logits, sampling, output, prompt=(FIRST,)):
    """The distribution after the chain, token by token in float64: what docs say, written a second time."""
    scores = logits.double().tolist()
    for token in {*prompt, *output}:
        factor = sampling.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(output):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    order = sorted(range(len(scores)), key=lambda token: -scores[token])
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {token: math.exp((scores[token] - scores[order[0]]) / sampling.temperature) for token in order}
    probabilities = _normal(weights)
    kept, total = {}, 0.0
    for token in order:
        if total < sampling.top_p and probabilities[token] >= sampling.min_p * probabilities[order[0]]:
            kept[token] = probabilities[token]
        total += probabilities[token]
    kept = _normal(kept)
    above = [token for token in kept if kept[token] >= sampling.xtc_threshold]
    without = _normal({token: share for token, share in kept.items() if token not in above[:-1]})
    coin = sampling.xtc_probability
    return np.array([(1 - coin) * kept.get(t, 0.0) + coin * without.get(t, 0.0) for t in range(len(scores))])


def _normal(weights):
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def joint(table, sampling, count):
    """Probabilities of every sequence of `count` tokens after the prompt, [vocab] * count."""

    def after(output):
        last = output[-1] if output else FIRST
        here = chain_by_hand(table[last], sampling, output)
        if len(output) + 1 == count:
            return here
        nothing = np.zeros([len(table)] * (count - len(output) - 1))
        return np.stack([p * after([*output, t]) if p > 0 else nothing for t, p in enumerate(here)])

    return after([])


def p_value(samples, probabilities):
    """Chi-square of sequences [draws, n] against their joint probabilities; rare cells are counted together."""
    observed = np.zeros(probabilities.shape)
    np.add.at(observed, tuple(samples.T), 1)
    expected = probabilities * len(samples)
    assert not observed[probabilities == 0].any(), "a token came that cannot"
    often = expected >= 8
    cells = [*zip(observed[often], expected[often], strict=True)]
    if expected[~often].sum() >= 8:
        cells.append((observed[~often].sum(), expected[~often].sum()))
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    return float(chi2.sf(statistic, len(cells) - 1))


# --- without a seed: the rejection rule --------------------------------------------------------------------------

CHAINS = {
    "plain": Sampling(temperature=1.0),
    "cold": Sampling(temperature=0.5),
    "hot": Sampling(temperature=1.8),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=0.9, top_p=0.8),
    "min-p": Sampling(temperature=1.2, min_p=0.15),
    "penalties": Sampling(temperature=0.8, repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.5),
    "xtc": Sampling(temperature=1.0, xtc_probability=0.4, xtc_threshold=0.12),
    "everything": Sampling(
        temperature=1.1,
        top_k=7,
        top_p=0.95,
        min_p=0.05,
        xtc_probability=0.3,
        repetition_penalty=1.3,
        presence_penalty=0.3,
        logit_bias={1: 1.5, 4: -1.0},
    ),
}


@pytest.mark.parametrize(
    ("chain", "depth"), [*((chain, 2) for chain in CHAINS), *((c, d) for c in ("plain", "everything") for d in (1, 3))]
)
def test_rejection_under_every_chain(chain, depth):
    target, head = tables(8, "near")
    samples = draw(target, head, CHAINS[chain], depth, count=3)
    assert p_value(samples, joint(target, CHAINS[chain], 3)) > LEAST


@pytest.mark.parametrize("kind", ["near", "other", "same", "disjoint", "certain"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3])
def test_rejection_with_every_drafter(kind, depth):
    target, head = tables(16, kind)
    sampling = Sampling(temperature=1.0)
    samples = draw(target, head, sampling, depth, count=2, first_seed=10**9)
    exact = joint(target, sampling, 2)
    assert p_value(samples, exact) > LEAST
    assert p_value(samples[:, 1:], exact.sum(0)) > LEAST


def test_rejection_over_a_wider_vocabulary():
    target, head = tables(64, "near")
    sampling = Sampling(temperature=0.7, top_p=0.9)
    samples = draw(target, head, sampling, depth=3, count=2)
    assert p_value(samples, joint(target, sampling, 2)) > LEAST


@pytest.mark.parametrize("kind", ["near", "same", "disjoint"])
def test_drafts_are_kept_as_often_as_they_can_be(kind):
    """With chance sum(min(p, q)); the rule is exact also when it never accepts, so this has to be asked for."""
    target, head = tables(16, kind)
    p, q = target[FIRST].softmax(0), head[FIRST].softmax(0)
    kept = _first_draft_kept(target, head)
    best = float(torch.minimum(p, q).sum())
    assert abs(kept - best) < 4 * math.sqrt(0.25 / DRAWS)


def _first_draft_kept(target, head):
    """How often the draft after the prompt's token is kept. Its round comes second: the first cannot have drafts."""
    stays = torch.full_like(target, -torch.inf)
    stays[:, FIRST] = 0.0  # so the first round can only say the prompt's token again
    with torch.inference_mode():
        rounds = table_rounds(stays, head, Sampling(temperature=1.0), DRAWS)
        rounds.run([RowPlan(row, 0, 1) for row in range(DRAWS)])
        rounds.model.table = target
        results = rounds.run([RowPlan(row, 1, 0) for row in range(DRAWS)]).result().kept
    return sum(len(kept.tokens) == 2 for kept in results) / DRAWS


@pytest.mark.parametrize(("cut", "fair"), [(False, True), (True, False)])
def test_what_a_constraint_forbids_is_drafted_and_rejected(cut, fair):
    """Windows that end before the first forbidden draft would draw from p where the rule wants what p has above q."""
    target, head = tables(8, "near")
    allowed, sampling = np.array([[0b01101101]], np.int32), Sampling(temperature=1.0)
    masks, left, texts = np.repeat(allowed, 3, 0), [()] * DRAWS, [[] for _ in range(DRAWS)]
    with torch.inference_mode():
        rounds = table_rounds(target, head, sampling, DRAWS, masked=True)
        while min(len(text) for text in texts) < 2:
            counts = [_leading(drafts, allowed.item()) if cut else len(drafts) for drafts in left]
            plan = [RowPlan(row, count, 2, masks=lambda: masks) for row, count in enumerate(counts)]
            for kept in rounds.run(plan).result().kept:
                texts[kept.row] += kept.tokens
                left[kept.row] = kept.left
    forbidden = torch.tensor([not allowed.item() >> token & 1 for token in range(8)])
    exact = joint(target.masked_fill(forbidden, -torch.inf), sampling, 2)
    assert (p_value(np.array([text[:2] for text in texts]), exact) > LEAST) is fair


def _leading(drafts, allowed):
    return next((place for place, token in enumerate(drafts) if not allowed >> token & 1), len(drafts))


# --- rules that are wrong, which the test must catch -------------------------------------------------------------


def draft_shares_the_residual_noise(monkeypatch):
    monkeypatch.setattr(noise, "DRAFT", noise.RESIDUAL)


def draft_shares_the_test_noise(monkeypatch):
    """The test's number is made of the noise that chose the draft."""

    def shared(seed, stream, position):
        gumbel = noise.gumbel(seed, noise.DRAFT, position, 8).amax(-1)
        return torch.exp(-8 * torch.exp(-gumbel.double()))

    uniform = noise.uniform
    monkeypatch.setattr(
        noise, "uniform", lambda s, stream, p: (shared if stream == noise.ACCEPT else uniform)(s, stream, p)
    )


def redraw_from_p(monkeypatch):
    """After a rejection a fresh draw from p, as if the residual did not matter."""
    rejection = accept._judge_rejection

    def careless(scored, chain):
        kept, layout = rejection(scored, chain).kept, scored.layout
        positions = scored.positions.gather(1, kept[:, None] - 1)
        p = scored.scores.softmax(-1)[torch.arange(len(kept)), kept - 1]
        following = chain.draw(p.log()[:, None], layout.index, noise.RESIDUAL, positions)[:, 0]
        return Verdict(layout.unpad(accept._tokens(scored.window, kept - 1, following)), kept)

    monkeypatch.setattr(accept, "_judge_rejection", careless)


def every_draft_kept(monkeypatch):
    monkeypatch.setattr(accept, "_leading", lambda flags: torch.full((len(flags),), flags.shape[1]))


def same_noise_for_target_and_draft(monkeypatch):
    """The coupled rule's noise in the ratio test's draft and in its redraw."""
    monkeypatch.setattr(noise, "DRAFT", noise.TARGET)
    monkeypatch.setattr(noise, "RESIDUAL", noise.TARGET)


@pytest.mark.parametrize("kernels", [references_only], indirect=True)
@pytest.mark.parametrize(
    "bias",
    [
        draft_shares_the_residual_noise,
        draft_shares_the_test_noise,
        redraw_from_p,
        every_draft_kept,
        same_noise_for_target_and_draft,
    ],
    ids=lambda rule: rule.__name__,
)
def test_biased_rules_are_caught(bias, monkeypatch):
    target, head = tables(8, "near")
    sampling = Sampling(temperature=1.0)
    exact = joint(target, sampling, 3)
    assert p_value(draw(target, head, sampling, 2, count=3), exact) > LEAST
    bias(monkeypatch)
    assert p_value(draw(target, head, sampling, 2, count=3), exact) < LEAST


# --- with a seed: Gumbel noise -----------------------------------------------------------------------------------


@pytest.mark.parametrize("chain", CHAINS)
def test_seeded_texts_over_seeds(chain):
    """The text of a seed is fixed, at every depth; over many seeds it has the same law."""
    target, head = tables(8, "near")
    seeded = replace(CHAINS[chain], seed=0)
    samples = draw(target, head, seeded, depth=2, count=3)
    assert p_value(samples, joint(target, seeded, 3)) > LEAST
    assert (samples[:2000] == draw(target, head, seeded, depth=0, count=3, draws=2000)).all()


@pytest.mark.parametrize("first_seed", [0, 2**31 - 500, 2**62])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_xtc_coin(probability, first_seed):
    seeds = torch.arange(first_seed, first_seed + DRAWS)
    positions = torch.arange(1, 6).expand(DRAWS, -1)
    coins = noise.uniform(seeds, noise.XTC, positions) < probability
    spread = math.sqrt(probability * (1 - probability) / DRAWS)
    assert ((coins.double().mean(0) - probability).abs() < 4 * spread).all()
    # Two positions of a seed, and two neighbouring seeds, are independent.
    both = probability**2
    spread = math.sqrt(both * (1 - both) / DRAWS)
    assert abs(float((coins[:, 0] & coins[:, 1]).double().mean()) - both) < 4 * spread
    assert abs(float((coins[1:, 0] & coins[:-1, 0]).double().mean()) - both) < 5 * spread


# --- the whole backend -------------------------------------------------------------------------------------------

VOCAB = 64
CUT = Sampling(temperature=1.3, top_k=9, repetition_penalty=1.2, frequency_penalty=0.5)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two layers and 64 tokens."""
    folder = tmp_path_factory.mktemp("law") / "model"
    layers = {"num_hidden_layers": 2, "full_attention_interval": 2}
    return tiny.write(folder, "dense", vocab_size=VOCAB, **layers)


def logits_after(backend, prompts):
    driver = Driver(backend)
    traces = driver.run([Job(prompt) for prompt in prompts], 1)
    return torch.stack([traces[row].logits[0] for row in range(len(prompts))])


@pytest.mark.parametrize(
    ("prompt", "sampling", "depth", "draws"),
    [
        # The first drafts are made while a prompt goes in, so that both tokens come with some.
        pytest.param([7, 50, 3], Sampling(temperature=1.0), 2, 3_000, id="drafts-from-the-prompt"),
        # Nothing is prefilled of a prompt of one token: its first round has no drafts, the second has.
        pytest.param([9], CUT, 3, DRAWS, id="cut"),
    ],
)
def test_first_two_tokens_of_a_model(small, prompt, sampling, depth, draws):
    ahead = logits_after(open_tiny(small, rows=1), [prompt])[0]
    further = logits_after(open_tiny(small, rows=VOCAB), [[*prompt, token] for token in range(VOCAB)])
    first = chain_by_hand(ahead, sampling, [], prompt)
    exact = np.stack([p * chain_by_hand(further[t], sampling, [t], prompt) for t, p in enumerate(first)])

    driver, samples, drafted = Driver(open_tiny(small, rows=64)), [], 0
    for start in range(0, draws, 64):
        jobs = [Job(prompt, sampling, fixed(depth), seed=10**6 + start + row) for row in range(64)]
        for trace in driver.run(jobs, 2).values():
            samples.append(trace.tokens[:2])
            drafted += max(trace.kept) > 1
    assert 0.05 < drafted / len(samples) < 0.95  # drafts were kept, and were not
    assert p_value(np.array(samples), exact) > LEAST
