"""The sampling chain, draws, what is accepted and what is committed on a GPU, against their references."""

from dataclasses import replace

import pytest
import torch
from scipy import stats

pytest.importorskip("triton")

import triton
import triton.language as tl

from headlong.backends.torch import accept
from headlong.backends.torch import chain as chain_module
from headlong.backends.torch import round as round_module
from headlong.backends.torch.chain import Chain, Seen
from headlong.backends.torch.gpu import noise as gpu_noise
from headlong.backends.torch.gpu import sampling, verdict
from headlong.backends.torch.gpu import truncate as gpu_truncate
from headlong.backends.torch.kernels import noise, pick
from headlong.backends.torch.kernels import truncate as truncate_module
from headlong.backends.torch.kernels.truncate import truncate
from headlong.backends.torch.native.library import references_only
from headlong.backends.torch.ragged import Grid, Layout
from headlong.engine.request import Sampling, Start
from tests import tiny
from tests.backends.torch.gpu.test_rounds import SAMPLINGS, make, play, start
from tests.backends.torch.kernels.test_noise import GOLDEN
from tests.backends.torch.kernels.test_truncate import ASKED, SHAPES, cuts_of, scores_of

SOME = ("top-k-50", "top-p-nearly-1", "everything")


@pytest.fixture(autouse=True)
def references():
    with references_only():
        yield


# --- what is kept ------------------------------------------------------------------------------------------------


def both(scores, rows, positions, cuts):
    """What the reference keeps, and what the kernels do."""
    return truncate(scores.clone(), rows, positions, cuts), gpu_truncate.truncate(scores.clone(), rows, positions, cuts)


@pytest.mark.parametrize(("vocab", "names"), [(1000, tuple(ASKED)), (1, SOME), (7, SOME), (4099, SOME)])
def test_every_cut(device, vocab, names):
    """All that rows may ask for side by side, in another order than the engine's."""
    cuts = cuts_of([ASKED[name] for name in names], vocab, device)
    rows = torch.arange(len(names), device=device).flip(0)
    positions = torch.tensor([[3], [70], [2**20]], device=device)[rows % 3]
    wanted, found = both(scores_of("normal", len(names), 1, vocab).to(device), rows, positions, cuts)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_scores_of_every_shape(device, shape):
    cuts = cuts_of([ASKED["top-p-half"], ASKED["xtc-of-few"]], 1000, device)
    rows, positions = torch.arange(2, device=device), torch.tensor([[4], [4]], device=device)
    wanted, found = both(scores_of(shape, 2, 1, 1000).to(device), rows, positions, cuts)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("shape", ["normal", "ties"])
def test_more_tokens_than_there_is_room_for(device, shape, monkeypatch):
    """The search then reads the whole vocabulary."""
    monkeypatch.setattr(gpu_truncate, "ROOM", 16)
    cuts = cuts_of([ASKED["xtc-of-few"], ASKED["min-p"]], 1100, device)
    rows, positions = torch.arange(2, device=device), torch.tensor([[4], [4]], device=device)
    wanted, found = both(scores_of(shape, 2, 1, 1100).to(device), rows, positions, cuts)
    assert torch.equal(found, wanted)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_position_keeps_the_same_alone_and_beside_poison(device):
    cuts = cuts_of([ASKED["everything"], ASKED["top-k-and-top-p"]], 2100, device)
    scores, rows = scores_of("normal", 2, 2, 2100).to(device), torch.arange(2, device=device)
    scores[0] = torch.nan
    together = gpu_truncate.truncate(scores.clone(), rows, torch.tensor([[5, 6]] * 2, device=device), cuts)
    alone = gpu_truncate.truncate(scores[1:, 1:].clone(), rows[1:], torch.tensor([[6]], device=device), cuts)
    assert torch.equal(alone[0, 0], together[1, 1])


# --- noise -------------------------------------------------------------------------------------------------------


@triton.jit
def _words(found, seeds, positions, STREAM: tl.constexpr):
    n = tl.program_id(0)
    seed, position = tl.load(seeds + n), tl.load(positions + n)
    low, high = gpu_noise.keys(seed, STREAM, position)
    tl.store(found + 2 * n, gpu_noise.uniform_word(seed, STREAM, position).to(tl.int64))
    tl.store(found + 2 * n + 1, gpu_noise.token_word(tl.full([], 1000, tl.int32), low, high).to(tl.int64))


@pytest.mark.parametrize("place", GOLDEN, ids=str)
def test_the_words_that_every_backend_gives(device, place):
    seed, stream, position = place
    found = torch.empty(2, dtype=torch.int64, device=device)
    _words[(1,)](found, *(torch.tensor([x], device=device) for x in (seed, position)), STREAM=stream)
    assert tuple(found.tolist()) == GOLDEN[place]


def test_uniform(device):
    seed, position = (
        torch.tensor([3, 2**62 + 9], device=device),
        torch.tensor([[0, 5, 9], [1, 2, 2**31]], device=device),
    )
    assert torch.equal(gpu_noise.uniform(seed, 3, position), noise.uniform(seed, 3, position))


@triton.jit
def _gumbel(found, words, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(found + at, gpu_noise.gumbel(tl.load(words + at).to(tl.uint32)))


def test_noise_is_what_its_words_say(device):
    """Both tails: u from 2^-33 to 1 - 2^-24."""
    words = torch.cat([torch.arange(512), 2**32 - 1 - torch.arange(512), torch.arange(1024) * 4191237]).to(device)
    found = torch.empty(len(words), dtype=torch.float32, device=device)
    _gumbel[(1,)](found, words, BLOCK=len(words))
    u = ((words.double() + 0.5) / 2**32).float().clamp(max=1 - 2**-24).double()
    torch.testing.assert_close(found.double(), -torch.log(-torch.log1p(-u)), rtol=2e-6, atol=1e-6)


# --- scores and draws --------------------------------------------------------------------------------------------

PROMPT = [3, 3, 7, 20, 41]
ROWS = {
    "greedy": Sampling(repetition_penalty=1.3),
    "bias": Sampling(logit_bias={0: 5.0, 9: -3.0}),
    "sampled": Sampling(temperature=0.6, seed=1),
    "everything": Sampling(
        temperature=1.7,
        top_k=30,
        top_p=0.9,
        repetition_penalty=0.8,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        seed=4,
    ),
}


def chain_of(vocab, device, samplings=ROWS):
    chain = Chain(len(samplings) + 1, vocab, device)
    for row, asked in enumerate(samplings.values()):
        chain.start(Start(row, PROMPT, asked, seed=row + 3, quiet=(5, 6), min_tokens=4, masked=row % 2 == 0))
    if chain.counts is not None:
        chain.counts[:, [7, 9]] += 2
    return chain


def windows(chain, width, normal):
    """Logits for all rows, their positions, and what stands before them: drafts, and masks that allow most tokens."""
    rows = torch.arange(len(ROWS), device=chain.device).flip(0)
    logits = (3 * normal(len(rows), width, chain.vocab)).to(chain.device)
    positions = len(PROMPT) + torch.arange(width, device=chain.device).expand(len(rows), -1) + rows[:, None]
    drafts = torch.tensor([9, 11, 11], device=chain.device)[: width - 1].expand(len(rows), -1)
    before = torch.arange(1, width) <= torch.arange(width)[:, None]
    words = torch.randint(-(2**31), 2**31, (len(rows), width, -(-chain.vocab // 32)), generator=torch.manual_seed(1))
    seen = Seen(drafts, before.to(chain.device).expand(len(rows), -1, -1), (words | 255).int().to(chain.device))
    return logits, rows, positions.contiguous(), seen


@pytest.mark.parametrize(("vocab", "width"), [(50, 4), (2100, 1)])
def test_scores(device, normal, vocab, width):
    chain = chain_of(vocab, device)
    logits, rows, positions, seen = windows(chain, width, normal)
    needs = chain.needs_of(range(len(ROWS)))
    found = sampling.score(chain, logits, rows, needs, positions, seen)
    torch.testing.assert_close(found, chain._score(logits, rows, needs, positions, seen), rtol=1e-6, atol=1e-6)


def test_what_a_row_does_not_ask_for_leaves_its_bits(device, normal):
    chain = chain_of(50, device, {"plain": Sampling(temperature=1.0, seed=1), **ROWS})
    logits = normal(1, 2, 50).to(device)
    rows, positions = torch.tensor([0], device=device), torch.tensor([[40, 41]], device=device)
    seen = Seen(torch.tensor([[9]], device=device), torch.ones(1, 2, 1, dtype=torch.bool, device=device))
    assert torch.equal(sampling.score(chain, logits, rows, chain.needs_of(range(5)), positions, seen), logits)


def test_draws(device, normal):
    """The reference's tokens; without noise where rows are greedy, and from the few that were not cut."""
    chain = chain_of(4500, device)
    rows, positions = torch.tensor([3, 0, 2], device=device), torch.tensor([[4, 2**21]] * 3, device=device)
    scores = normal(3, 2, 4500).to(device)
    scores[2, :, 10:4400] = -torch.inf
    for stream in (noise.TARGET, noise.RESIDUAL):
        assert torch.equal(
            sampling.draw(chain, scores, rows, stream, positions), chain.draw(scores, rows, stream, positions)
        )
    assert torch.equal(sampling.draw(chain, scores, rows, noise.TARGET, positions)[1], scores[1].argmax(-1))


def test_draws_follow_the_scores(device):
    chain, count = Chain(1, 3, device), 60
    chain.start(Start(0, [1], Sampling(temperature=1.0, seed=1), seed=1))
    scores = torch.tensor([0.0, -torch.inf, 1.0], device=device)
    rows, positions = torch.tensor([0], device=device), torch.arange(count, device=device)[None]
    found = sampling.draw(chain, scores.expand(1, count, -1), rows, noise.TARGET, positions)
    drawn, shares = found[0].bincount(minlength=3).cpu(), scores.softmax(0).cpu()
    assert drawn[1] == 0
    assert stats.binomtest(int(drawn[2]), count, float(shares[2])).pvalue > 1e-3


# --- rounds ------------------------------------------------------------------------------------------------------


def test_accepted_drafts(device):
    """Every number of drafts that stand, in windows of which some tokens do not count."""
    widths, counts = (4,) * 6, torch.tensor([4, 4, 4, 2, 4, 1], device=device)
    window = torch.tensor([1, 2, 3, 4] * 6, device=device)
    chosen = torch.tensor([[2, 3, 4, 5], [2, 3, 9, 5], [9, 3, 4, 5], [2, 3, 4, 5], [2, 9, 4, 5], [2, 3, 4, 5]])
    chosen = chosen.flatten().to(device)
    rows = torch.arange(6, device=device)
    layout = Layout(tuple(range(6)), Grid(widths, device), rows, counts)
    wanted = accept._keep_chosen(layout, window, chosen)
    tokens, kept = verdict.accept_coupled(chosen, window, layout.offsets, counts, 4)
    assert kept.tolist() == wanted.kept.tolist() == [4, 3, 1, 2, 2, 1]
    assert torch.equal(tokens, wanted.tokens)


def test_windows_and_commits(device):
    layout = Layout.of((4, 1), (1, 3), device)
    length, windows = torch.arange(5, device=device) * 10, torch.arange(45, device=device).view(5, 9)
    starts, window = verdict.look_up(layout.index, length, windows, layout.offsets, (4, 3))
    assert starts.tolist() == [40, 10]
    assert window.tolist() == [36, 9, 10, 11]
    kept_of, tokens = torch.zeros(5, dtype=torch.long, device=device), torch.tensor([70, 80, 81, 82], device=device)
    kept = torch.tensor([1, 2], device=device)
    verdict.commit(layout.index, starts, layout.offsets, tokens, kept, (length, windows, kept_of))
    assert length.tolist() == [0, 12, 20, 30, 41]
    assert windows[:, 0].tolist() == [0, 81, 18, 27, 70]
    assert kept_of.tolist() == [0, 2, 0, 0, 1]


def test_whole_rounds(tmp_path, monkeypatch, device):
    """Rows of all sorts: with these kernels around a model, and without."""
    folder, samplings = tiny.write(tmp_path, "dense"), [*SAMPLINGS.values()]
    samplings[1] = replace(samplings[1], top_p=0.9, xtc_probability=0.5)
    rounds = [[(0, 2, 1), (1, 2, 1), (2, 1, 1)]]
    given = []
    for kernels in (False, True):
        backend = make(folder, monkeypatch, graphs=True, device=device)
        for module in (accept, chain_module, noise, pick, round_module, truncate_module):
            monkeypatch.setattr(module, "fused", lambda *_, kernels=kernels: kernels)
        start(backend, samplings)
        given.append(play(backend, rounds))
    assert given[0] == given[1]
