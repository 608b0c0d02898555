"""The C kernels that draw give what the chain and the rules give in PyTorch, row by row."""

import random
from types import SimpleNamespace

import pytest
import torch

from headlong.backends.torch.accept import Trial, accept
from headlong.backends.torch.allowed import Allowed
from headlong.backends.torch.chain import Chain
from headlong.backends.torch.drafters import HeadDrafter
from headlong.backends.torch.kernels.pick import best
from headlong.backends.torch.native.library import library, references_only
from headlong.backends.torch.ragged import Layout
from headlong.backends.torch.sureness import Pick
from headlong.engine.request import Sampling, Start

pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")
CPU, ROWS = torch.device("cpu"), 24
SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7, seed=5),
    Sampling(temperature=1.3),
    Sampling(temperature=0.9, top_p=0.8, seed=6),
    Sampling(temperature=1.1, top_k=5, logit_bias={0: 2.0}),
    Sampling(presence_penalty=0.5),
)
VOCABS = (1, 7, 16, 127, 128, 129, 5000)


@pytest.fixture
def engine(vocab):
    """A chain with rows of all sorts, in another order than they were started in, and a layout of some of them."""
    coin, chain = random.Random(vocab), Chain(ROWS, vocab, CPU)
    for row in range(ROWS):
        sampling = SAMPLINGS[row % len(SAMPLINGS)]
        chain.start(Start(row, (0,), sampling, seed=row if sampling.seed is None else sampling.seed))
    rows = tuple(coin.sample(range(ROWS), ROWS - 3))
    layout = Layout.of(rows, tuple(coin.randint(1, 9) for _ in rows), CPU)
    return SimpleNamespace(chain=chain, layout=layout, starts=torch.arange(3, 3 + len(rows)))


def kept_of(verdict, layout):
    parts = verdict.tokens.split(layout.widths)
    return [tokens[:kept].tolist() for tokens, kept in zip(parts, verdict.kept.tolist(), strict=True)]


@torch.inference_mode()
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("likeness", [0.0, 0.3, 3.0])
def test_windows_are_judged_alike(engine, vocab, likeness, normal):
    """Drafts that were drawn from scores near the target's, or far from them; some tokens cannot come at all."""
    chain, layout = engine.chain, engine.layout
    logits = 3 * normal(layout.tokens, vocab)
    logits[:, 1::5] = -torch.inf
    near = (logits + likeness * normal(layout.tokens, vocab)).softmax(-1)
    steps = layout.steps.clamp(max=7)
    chain.room_for_probs().fill_(torch.nan)
    chain.room_for_probs()[layout.token_rows, steps] = near
    drafts = torch.multinomial(near, 1, generator=torch.Generator().manual_seed(vocab))[:, 0]
    window = torch.cat([drafts.new_zeros(1), drafts[:-1]])  # a draft stands behind the place it was drawn at
    trial = Trial(layout, engine.starts, window, logits, Allowed(ROWS, vocab, CPU))
    with references_only():
        wanted = accept(trial, chain)
    found = accept(trial, chain)
    assert kept_of(found, layout) == kept_of(wanted, layout)
    if vocab > 1 and likeness == 0.3:
        assert 1 < found.kept.double().mean() < layout.sizes.double().mean()


@torch.inference_mode()
@pytest.mark.parametrize("vocab", [129])
def test_what_does_not_count_of_a_window_is_not_looked_at(engine, vocab, normal):
    """Windows of captured rounds are padded, and their counts are tensors."""
    chain, layout = engine.chain, engine.layout
    logits, window = normal(layout.tokens, vocab), torch.zeros(layout.tokens, dtype=torch.long)
    chain.room_for_probs()[:] = torch.nn.functional.one_hot(torch.tensor(0), vocab).float()
    logits[:, 0] = 20.0  # so that all drafts are kept
    counts = (layout.sizes + 1) // 2
    padded = Layout(layout.rows, layout.grid, layout.index, counts)
    found = accept(Trial(padded, engine.starts, window, logits, Allowed(ROWS, vocab, CPU)), chain)
    assert torch.equal(found.kept, counts)


@torch.inference_mode()
@pytest.mark.parametrize("vocab", VOCABS)
def test_drafts_are_drawn_alike(engine, vocab, normal):
    chain, layout = engine.chain, engine.layout.ones(len(engine.layout.rows))
    head = SimpleNamespace(words=None)
    drafter, counts = HeadDrafter(head, SimpleNamespace(rows=ROWS, device=CPU), chain), layout.sizes
    found, probs = [], []
    logits = [3 * normal(len(layout.rows), vocab) for _ in range(3)]

    def draw():
        drafts = torch.zeros(3, len(layout.rows), dtype=torch.long)
        chain.room_for_probs().fill_(torch.nan)
        for step in range(3):
            fed = engine.starts + step, counts
            drafter._pick(layout, logits[step], fed, drafts[:step].T, Pick(drafts[step]))
        found.append(drafts)
        probs.append(chain.room_for_probs().clone())

    draw()
    with references_only():
        draw()
    assert torch.equal(*found)
    torch.testing.assert_close(*probs, equal_nan=True)
    drawn = [row for row in layout.rows if chain.needs[row].rejection]
    assert probs[0][drawn, :3].sum(-1).allclose(torch.ones(len(drawn), 3))
    assert probs[0][:, 3:].isnan().all()
    if vocab > 100:
        greedy = [b for b, row in enumerate(layout.rows) if SAMPLINGS[row % len(SAMPLINGS)] == Sampling()]
        assert torch.equal(found[0][0, greedy], best(logits[0])[greedy])
        assert not torch.equal(found[0][0], best(logits[0]))
