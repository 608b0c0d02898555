"""Plays mixes for as long as one likes: python -m tests.engine.long_mix --requests 20000 [--model NAME]."""

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from random import Random
from time import perf_counter

import headlong
from tests.engine import fake_mix
from tests.engine.mix import CONSTRAINTS, Mixer, Played, Taste, alone, play

A_MIX = 12  # requests


def fake_mixes(seed: int) -> Iterator[Played]:
    """Each on an engine of its own, over the scripted backend; every fourth has constrained requests too."""
    for number in count():
        taste = fake_mix.TASTE if number % 4 else fake_mix.CONSTRAINED
        yield fake_mix.play_one(Random(f"{seed} {number}"), A_MIX, taste)


def model_mixes(seed: int, engine: headlong.Engine, taste: Taste) -> Iterator[Played]:
    """On one engine with a real model, whose own plain texts are the measure."""
    plain = alone(engine)
    for number in count():
        mixer = Mixer(Random(f"{seed} {number}"), engine.limits, taste, plain)
        asks = mixer.draw(A_MIX)
        for ask in asks:
            mixer.plain(ask.request)  # while nothing else runs
        yield play(engine, asks, mixer.plain)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="a folder or a name, or 'nano'; without one the scripted backend plays")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--cache-tokens", type=int, default=768, help="few, so that rows make room")
    parser.add_argument("--prefix-bytes", type=int, default=1 << 26)
    parser.add_argument("--device", default="auto")
    asked = parser.parse_args(given)
    if asked.model:
        names = ("rows", "page", "chunk", "context", "cache_tokens", "prefix_bytes", "device")
        name = None if asked.model == "nano" else asked.model
        engine = headlong.load(name, **{name: getattr(asked, name) for name in names})
        taste = Taste(
            prompt_tokens=range(32, engine.limits.vocab - 32),
            longest_answer=48,
            longest_prompt=160,
            constraints=CONSTRAINTS,
        )
        mixes = model_mixes(asked.seed, engine, taste)
    else:
        mixes = fake_mixes(asked.seed)
    sys.stdout.write(f"{play_until(mixes, asked.requests)}\n")


def play_until(mixes: Iterator[Played], requests: int) -> str:
    """Play mixes until there were so many requests; what happened."""
    started, told, played = perf_counter(), perf_counter(), Played()
    while played.counts["requests"] < requests:
        played += next(mixes)
        if perf_counter() - told > 20:
            told = perf_counter()
            sys.stderr.write(f"{played.counts['requests']} requests in {told - started:.0f} s\n")
    return f"{played}, faults {played.counts['faults']}, seconds {perf_counter() - started:.1f}"


if __name__ == "__main__":
    logging.basicConfig()
    main()
