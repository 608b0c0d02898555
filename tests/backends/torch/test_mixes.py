"""Random mixes of requests on real models: each gives what it gives alone, plain, on an engine that caches nothing."""

from collections import Counter
from random import Random

import pytest
import torch

import headlong
from headlong.backends.torch.cache import RESERVED_PAGES
from tests import tiny
from tests.engine.mix import CONSTRAINTS, Mixer, Taste, alone, play

LOAD = {"device": "cpu", "page": 16, "chunk": 32, "context": 192}


def poison(engine):
    """Whoever reads a page that is not its own gets no number."""
    scheduler, cache = engine._loop.scheduler, engine._loop.backend.rounds.cache

    def check():
        scheduler.check()
        free = [page + RESERVED_PAGES for page in scheduler.pool._free]
        for layer in cache.pages:
            layer.keys[free] = torch.nan
            layer.values[free] = torch.nan
        for job in scheduler.running:
            if job.started and job.aside is None:
                mine = cache.table[job.placed, : cache.owned[job.placed]]
                assert mine.tolist() == [page + RESERVED_PAGES for page in job.pages]
                assert int(engine._loop.backend.rounds.length[job.placed]) == job.length

    return check


def play_mixes(folder, mixes, constraints=(), **load):
    engine = headlong.load(folder, rows=4, cache_tokens=192, **LOAD, **load)
    lonely = headlong.load(folder, rows=1, prefix_bytes=0, **LOAD)
    seen = Counter()
    taste = Taste(range(32, 120), longest_answer=20, longest_prompt=100, constraints=constraints)
    for number in range(mixes):
        mixer = Mixer(Random(number), engine.limits, taste, alone(lonely))
        with torch.inference_mode():
            seen.update(play(engine, mixer.draw(10), mixer.plain, poison(engine)).counts)
    return seen


@pytest.mark.parametrize("family", ["dense", "moe"])
def test_together_is_as_alone(tmp_path, family):
    seen = play_mixes(tiny.write(tmp_path, family, with_tokenizer=True), 5)
    assert seen["requests"] >= 50
    assert seen["faults"] == 0
    for name in ("preemptions", "prefix_hits", "drafted", "accepted"):
        assert seen[name], name


def test_constrained_texts_are_as_alone_too(tmp_path):
    seen = play_mixes(tiny.write(tmp_path, with_tokenizer=True), 3, CONSTRAINTS)
    assert seen["requests"] >= 30
    assert seen["faults"] == 0


def test_prompts_layer_by_layer_change_nothing(tmp_path):
    seen = play_mixes(tiny.write(tmp_path, with_tokenizer=True), 3, budget=1)
    assert seen["requests"] >= 30
    assert seen["faults"] == 0
    assert seen["preempted_prompts"]


def test_a_model_without_a_head_drafts_by_n_grams(tmp_path):
    seen = play_mixes(tiny.write(tmp_path, with_tokenizer=True), 2, draft_kind="ngram")
    assert seen["drafted"]
