"""A pass that is played again gives what an ordinary call gives, and passes of dense models are played."""

import itertools
import math
import mmap
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from headlong.backends.torch.kernels.linear import Weight, linear
from headlong.backends.torch.kernels.norm import add_norm, swiglu
from headlong.backends.torch.native import huge, tape
from headlong.backends.torch.native.library import library, references_only
from headlong.backends.torch.native.tape import Taped
from headlong.engine.request import Sampling
from tests import tiny
from tests.backends.torch.driver import Driver, Job, fixed, open_tiny, prompt_of

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(library() is None, reason="no C compiler")


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch):
    monkeypatch.setattr(tape, "WORTH_IT", 1)


@pytest.fixture
def kernels_only():
    """Products, views and norms over a row's tensors."""
    generator = torch.Generator().manual_seed(0)
    up, down = (Weight(torch.randn(shape, generator=generator)) for shape in ((80, 24), (24, 40)))
    norm = torch.randn(24, generator=generator)

    def function(rows, x):
        x, y = add_norm(x, linear(swiglu(linear(x, up)), down), norm, 1e-6)
        return x[:, 3:], y.view(-1)

    return function


def check(function, taped, shapes):
    for turn, shape in enumerate(shapes):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(turn))
        wanted, found = function([0], x.clone()), taped([0], x)
        assert all(torch.equal(*pair) for pair in zip(wanted, found, strict=True))


SHAPES = [(1, 24), (5, 24), (1, 24), (1, 24), (5, 24)]


@torch.inference_mode()
def test_played_again(kernels_only):
    taped = Taped(kernels_only)
    check(kernels_only, taped, SHAPES)
    assert len(taped.tapes) == 2
    assert all(taped.tapes.values())
    played, called = taped.tapes[(torch.Size([1, 24]),)], []
    taped.function = lambda *inputs: called.append(inputs)
    assert taped([0], torch.zeros(1, 24))[1] is played.outputs[1]
    assert not called


@torch.inference_mode()
@pytest.mark.parametrize(
    "extra",
    [
        lambda x: x * 2,
        lambda x: x.sort()[0],
        lambda x: x.add_(1),
        lambda x: torch.cat([x]),
        lambda x: x.double().float(),
        lambda x: x.repeat(2, 1).mT.contiguous() if x.dim() == 2 else x.clone(),
        lambda x: x.new_empty(x.shape).copy_(x),
        lambda x: x[torch.tensor([0])],
    ],
)
def test_other_operations_are_never_played(kernels_only, extra):
    def function(rows, x):
        return tuple(extra(part) for part in kernels_only(rows, x))

    taped = Taped(function)
    check(function, taped, SHAPES)
    assert set(taped.tapes.values()) == {None}


@torch.inference_mode()
def test_large_passes_and_many_shapes(kernels_only, monkeypatch):
    taped = Taped(kernels_only)
    monkeypatch.setattr(tape, "MOST_TAPES", 2)
    check(kernels_only, taped, [(rows, 24) for rows in (1, 2, 3, 2, 1)])
    assert len(taped.tapes) == 2
    monkeypatch.setattr(tape, "MOST_BYTES", 1000)
    check(kernels_only, taped, [(7, 24), (7, 24)])
    assert taped.tapes[(torch.Size([7, 24]),)] is None


@torch.inference_mode()
def test_what_was_used_longest_ago_makes_room(kernels_only, monkeypatch):
    taped = Taped(kernels_only)
    monkeypatch.setattr(tape, "MOST_TAPES", 3)
    check(kernels_only, taped, [(rows, 24) for rows in (1, 2, 3, 1, 4)])
    assert [key[0][0] for key in taped.tapes] == [3, 1, 4]


@torch.inference_mode()
def test_what_is_seldom_called_is_not_recorded(kernels_only, monkeypatch):
    """Where nothing follows from the first recordings."""
    monkeypatch.setattr(tape, "WORTH_IT", 3)

    def function(rows, x):
        return tuple(part * 1 for part in kernels_only(rows, x))

    taped = Taped(function)
    check(function, taped, [(4, 24)] + [(3, 24), (2, 24)] * 2)
    assert [key[0][0] for key in taped.tapes] == [4]
    check(function, taped, [(2, 24)] * 2)
    assert [key[0][0] for key in taped.tapes] == [4, 2]


@torch.inference_mode()
def test_a_pass_without_kernels_is_an_ordinary_call():
    taped = Taped(lambda rows, x: (x[:1],))
    for _ in range(3):
        assert torch.equal(taped([0], torch.ones(3, 2))[0], torch.ones(1, 2))
    assert set(taped.tapes.values()) == {None}


@torch.inference_mode()
def test_shapes_follow_from_others(kernels_only):
    taped = Taped(kernels_only)
    check(kernels_only, taped, [(rows, 24) for rows in (5, 2, 9)])  # a place, a direction, and what they foretell
    called = []
    taped.function = lambda rows, x: called.append(len(x)) or kernels_only(rows, x)
    check(kernels_only, taped, [(rows, 24) for rows in (3, 70, 5, 1, 70, 3)])
    assert called == [1]  # one may be another matter
    assert [key[0][0] for key in taped.tapes] == [2, 9, 5, 1, 70, 3]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("extra", "watches", "kept"), [(lambda x: x, 2, True), (lambda x: x.add_(1), 2, False), (torch.clone, 1, False)]
)
def test_each_row_of_kernels_is_watched_once(kernels_only, monkeypatch, extra, watches, kept):
    """A pass through kernels that were not watched is kept only when it comes again, and does nothing else."""
    watched, enter = [], tape._Watch.__enter__
    monkeypatch.setattr(tape._Watch, "__enter__", lambda self: watched.append(self) or enter(self))

    def function(rows, x):
        x, y = kernels_only(rows, x)
        return (x, extra(kernels_only(rows, y.view(1, 24))[1])) if len(x) == 1 else (x, y)

    taped = Taped(function)
    check(function, taped, [(rows, 24) for rows in (4, 7, 9, 12, 1)])
    assert len(watched) == 1
    check(function, taped, [(1, 24)] * 3)
    assert len(watched) == watches
    assert [key[0][0] for key, each in taped.tapes.items() if each] == [4, 7, 9, 12, 1][: 4 + kept]


@torch.inference_mode()
def test_what_is_taken_but_once_is_told(kernels_only):
    taped, found = Taped(kernels_only), []
    for rows in (5, 2, 9, 9, 3, 3):
        taped([0], torch.ones(rows, 24))
        found.append(taped.once_s)
    *recorded, played, foretold, again = found
    assert recorded == [math.inf] * 3
    assert played == again == 0.0
    assert 0.0 < foretold < math.inf


@torch.inference_mode()
@pytest.mark.parametrize("odd", ["more calls from 7 on", "an argument that is no line"])
def test_what_does_not_follow_is_recorded(kernels_only, odd):
    def function(rows, x):
        if odd.startswith("more") and len(x) >= 7:
            x = kernels_only(rows, x)[1].view(x.shape)
        some = max(1, len(x) // 3) if odd.startswith("an") else len(x)
        return kernels_only(rows, x[:some])

    taped = Taped(function)
    check(function, taped, [(rows, 24) for rows in (2, 4, 8, 9, 8, 3, 10, 4)])
    (family,) = taped.families.values()
    assert family.broken
    assert all(taped.tapes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_recording_of_a_model_is_foretold(tmp_path, monkeypatch, dtype):
    """Rounds of random shapes: each is recorded, and its numbers are those that follow from the first ones."""
    monkeypatch.setattr(tape.Family, "foretell", lambda *_: None)
    foretold = []
    learn = tape.Family.learn

    def watched(self, sizes, notes):
        foretold.append(self._follow(sizes) is not None)
        learn(self, sizes, notes)
        assert not self.broken, sizes

    monkeypatch.setattr(tape.Family, "learn", watched)
    rows, coin = 12, random.Random(0)
    samplings = Sampling(), Sampling(temperature=0.8, seed=1), Sampling(temperature=0.8)
    backend = open_tiny(tiny.write(tmp_path, "dense", dtype=dtype), rows=rows)
    for start in (0, 3, 8, 9):
        jobs = [
            Job(prompt_of(5 + row, 128), samplings[row % 3], depth=lambda *_: coin.choice((0, 1, 2, 5, 8)))
            for row in range(rows - start)
        ]
        Driver(backend).run(jobs, 12)
        together = fixed(coin.choice((1, 2)))
        Driver(backend).run([replace(job, depth=together) for job in jobs], 6)
    assert sum(foretold) > 20


@torch.inference_mode()
def test_tapes_share_their_memory(kernels_only):
    """Also when a pass is given what the one before it returned, and when a larger one comes."""
    taped = Taped(kernels_only)
    x, y = (torch.randn(2, 24, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    for rows in (2, 1, 2, 1, 2):
        x, y = kernels_only([0], x[:rows].clone())[1].view(rows, 24), taped([0], y[:rows])[1].view(rows, 24)
        assert torch.equal(x, y)
        x, y = (torch.cat([each, each])[:2].clone() if rows == 1 else each for each in (x, y))
    check(kernels_only, taped, [(4000, 24), (2, 24), (4000, 24), (1, 24)])
    assert len({tape.inputs[0].data_ptr() for tape in taped.tapes.values()}) == 1


@torch.inference_mode()
def test_nothing_is_kept_without_kernels(kernels_only):
    taped = Taped(lambda rows, x: (x + 1,))
    with references_only():
        assert torch.equal(taped([0], torch.zeros(2))[0], torch.ones(2))
    assert not taped.tapes


def test_rounds_of_a_dense_model_are_played(tmp_path):
    """One torch operation among its kernels would make every pass an ordinary one."""
    backend = open_tiny(tiny.write(tmp_path, "dense"), rows=3)
    driver = Driver(backend)
    for depths in ((2, 0, 0), (8, 1, 1), (0, 0, 0)):
        driver.run([Job(prompt_of(9 - row, 128), depth=fixed(depth)) for row, depth in enumerate(depths)], 6)
    rounds = backend.rounds
    for taped in (rounds.verify, rounds.verify_and_rest, rounds.drafter.feed, rounds.drafter.chains[2]):
        assert taped.tapes
        assert all(taped.tapes.values())


def test_drafts_of_a_new_depth_tell_nothing_but_the_rest_of_the_round_does(tmp_path):
    """Their steps are recorded, which takes longer than they will."""
    backend = open_tiny(tiny.write(tmp_path, "dense"), rows=1)
    driver, told = Driver(backend), []
    run = backend.round

    def noted(plan):
        told.append(run(plan).result())
        return SimpleNamespace(result=lambda: told[-1])

    backend.round = noted
    driver.run([Job(prompt_of(9, 128), depth=lambda turn: 1 + (turn > 4), fewer=lambda turn, left: 0)], 8)
    assert [result.cold for result in told[4:]] == [False] * 4
    assert [result.cold_drafts for result in told[4:]] == [False, True, False, False]


def test_recording_imports_no_compiler(tmp_path):
    """torch's own compiler takes longer to import than a small model to load."""
    folder = tiny.write(tmp_path, "dense", with_tokenizer=True)
    code = f"import sys, headlong; headlong.load({str(folder)!r}).generate([3, 4, 5], max_tokens=4, ignore_eos=True)"
    code += "; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_huge_tensors_stand_apart(monkeypatch):
    monkeypatch.setattr(huge, "SLAB", 4096)
    shapes = [(3, 5), (100, 7), (1, 1), (50, 50), (2, 300)]
    tensors = [huge.empty(shape, dtype) for shape in shapes for dtype in (torch.float32, torch.bfloat16, torch.uint8)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
    assert all((tensor == i).all() and tensor.data_ptr() % 64 == 0 for i, tensor in enumerate(tensors))
    assert [tuple(tensor.shape) for tensor in tensors[::3]] == shapes


def test_huge_tensors_of_several_threads_stand_apart(monkeypatch):
    monkeypatch.setattr(huge, "SLAB", 1 << 22)
    made: list[torch.Tensor] = []

    def make(size):
        made.extend(huge.empty((size,), torch.uint8) for _ in range(200))

    threads = [threading.Thread(target=make, args=(size,)) for size in (1 << 20, 1 << 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in made)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_kernel_without_huge_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *arguments):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    monkeypatch.setattr(huge, "_slab", None)
    assert huge.empty((4, 4), torch.float32).shape == (4, 4)


def test_torchs_default_type_changes_nothing(tmp_path):
    folder = tiny.write(tmp_path, "dense")
    jobs = [Job(prompt_of(9, 128), depth=fixed(2)), Job(prompt_of(5, 128), sampling=Sampling(0.8, seed=1))]

    def tokens():
        traces = Driver(open_tiny(folder, rows=2)).run(jobs, 8)
        return [traces[row].tokens for row in range(2)]

    wanted = tokens()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = tokens()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found == wanted
