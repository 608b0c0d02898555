"""Models of real sizes on one GPU: their speed at 1 to 32 rows against the bars, and whether every text is the same.

    python benchmarks/gpu.py [copy] [start] [steps] [speed] [gap] [prefill] [identity]
        [--preset nano 4b 27b 35b-a3b tiny] [--accept 0.8 0.9] [--budget 450]

copy      bytes a second of a copy on the device, reads and writes: the limit for a step that reads every weight
start     seconds from opening a model whose weights lie in memory to its first token
steps     one row at the backend: a window of 4 tokens, and a draft, in plain steps
speed     tok/s from the moment all rows have a token to the last one, for plain, fixed and auto depth, interleaved
gap       microseconds that the device is idle between two rounds, by its own clock
prefill   tok/s of a prompt of 8,192 tokens, its first token included
identity  texts at all depths, batches, prompt lengths and prefix hits, with the head's drafts, right and wrong ones,
          against plain ones alone: how many differ

No files are needed: weights are drawn on the device. A preset's text goes round a ring of tokens, known in advance,
and its head is wrong about chosen tokens of the ring, so the acceptance is exact; the matrices are whole, so the time
is real. `identity` takes weights without such care, in which every layer decides. The last line is one JSON object.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from drawn import DEFAULT_PRESETS, PRESETS, Drawn, Preset, Rings, bytes_of_step, drawn_checkpoint

import headlong
from headlong.checkpoint.find import DEFAULT, find
from headlong.cli.prompts import built_in
from headlong.engine.backend import Backend, open_backend
from headlong.engine.costs import Row
from headlong.engine.engine import Engine
from headlong.engine.intake import requests_from
from headlong.engine.request import Output, Sampling
from headlong.engine.text import Text
from headlong.engine.tuning import Batch
from headlong.settings import Settings

STARTED = time.perf_counter()
DEPTHS = (0, 1, 2, 3, 5, 8)
BATCHES = (3, 8, 17, 32)
DRAFTERS = ("head", "right", "wrong")
MIXED = -1  # all depths side by side
SEEDED = {"temperature": 0.8, "top_k": 20, "seed": 11}
WARM_TOKENS = 96  # of a text that is not timed
MOST_WARM, CALM = 10, 2  # such texts, and those in a row without a new shape that are enough

Found = dict[str, Any]
Options = Mapping[str, Any]


def say(text: str) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f} s] {text}", flush=True)


# --- models ------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """An engine, and what is known of it."""

    name: str
    preset: Preset
    engine: Engine
    rings: Rings | None  # None: any prompt goes
    step_bytes: int = 0  # of weights that a plain step of one row reads
    opening: Found = field(default_factory=dict)

    def prompt(self, place: int, length: int, accept: float = 0.0) -> list[int]:
        """Prompts of different places are different."""
        if self.rings:
            return self.rings.walk(accept or self.rings.accepts[0], 197 * place, length)
        if self.preset.hidden:
            return [(7919 * (step + 1) + 104729 * place) % self.preset.vocab for step in range(length)]
        text = [token for one in built_in("code").prompts for token in self.engine.text.encode(str(one))]
        shift = 41 * place % len(text)
        return (text[shift:] + text[:shift] * (1 + length // len(text)))[:length]

    def strays(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """Tokens that are not those the ring says."""
        if not self.rings:
            return 0
        text = torch.tensor([prompt[-1], *tokens])
        return int((self.rings.next(text[:-1]) != text[1:]).sum())


@contextmanager
def opened(name: str, kind: str, args: argparse.Namespace) -> Iterator[Model]:
    """A model that has given its first token, and said how long that took."""
    preset = PRESETS[name]
    started, drawing = time.perf_counter(), 0.0
    settings = Settings(args.device, rows=preset.most_rows, context=preset.context, prefix_bytes=4 << 30)
    if not preset.hidden:
        engine = headlong.load(device=args.device, rows=preset.most_rows, prefix_bytes=4 << 30)
        model = Model(name, preset, engine, None)
    else:
        checkpoint, rings = drawn_checkpoint(name, kind, args.noise, args.device)
        backend, text = open_backend(checkpoint, settings), Text.from_folder(find(DEFAULT))
        engine = Engine(backend, text, checkpoint.name, checkpoint.config.eos_token_ids, settings)
        model = Model(name, preset, engine, rings if kind == "ring" else None, bytes_of_step(checkpoint.config))
        assert isinstance(checkpoint.weights, Drawn)
        drawing = checkpoint.weights.seconds
        del checkpoint, backend
    loaded = time.perf_counter()
    run(engine, [model.prompt(0, 16)], [{"max_tokens": 1}])
    whole = time.perf_counter() - started
    model.opening = {"start_s": whole - drawing, "drawing_s": drawing, "load_s": loaded - started - drawing}
    model.opening["first_token_s"] = time.perf_counter() - loaded
    say(f"{name} ({kind}) is open: {shown(model.opening)}; {engine.limits.device}")
    try:
        yield model
    finally:
        engine.close()


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        say(f"{torch.cuda.memory_allocated() / 1e9:.1f} GB are left allocated")


# --- running -----------------------------------------------------------------------------------------------------


@dataclass
class Ran:
    """What requests gave that ran together; seconds and tokens from the moment all had a token."""

    outputs: list[Output]
    seconds: float = 0.0  # to the last token
    tokens: int = 0
    full_seconds: float = 0.0  # to the first row's end: all rows are taken
    full_tokens: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def full_rate(self) -> float:
        return self.full_tokens / self.full_seconds if self.full_seconds else self.rate


def run(engine: Engine, prompts: Sequence[Sequence[int]], options: Sequence[Options]) -> Ran:
    pairs = zip(prompts, options, strict=True)
    indices = [engine.submit(requests_from(prompt, {"ignore_eos": True, **each})[0]) for prompt, each in pairs]
    waiting, ran, since, ended = set(indices), Ran([]), 0.0, False
    while engine.busy:
        emitted = engine.step()
        now = time.perf_counter()
        if waiting:
            waiting -= {one.index for one in emitted}
            since = now
            continue
        if emitted:
            ran.tokens, ran.seconds = ran.tokens + len(emitted), now - since
        ended |= any(one.finish_reason for one in emitted)
        if not ended:
            ran.full_tokens, ran.full_seconds = ran.tokens, ran.seconds
    ran.outputs = [engine.output(index) for index in indices]
    broken = [output.error for output in ran.outputs if output.finish_reason == "fault"]
    if broken:
        raise RuntimeError(f"{len(broken)} of {len(indices)} requests failed: {broken[0]}")
    return ran


def drafting(depth: int | None) -> dict[str, Any]:
    """0 is plain decoding, None the engine's own choice."""
    if depth is None:
        return {}
    return {"draft_kind": "mtp", "depth": depth} if depth else {"draft_kind": "none"}


def accepted(outputs: Sequence[Output]) -> float:
    """Of the drafts that stood first in a window: past a wrong one nobody looks."""
    first = [one.speculative for one in outputs if one.speculative.drafted_by_position]
    drafted = sum(one.drafted_by_position[0] for one in first)
    return sum(one.accepted_by_position[0] for one in first) / drafted if drafted else 0.0


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def shown(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in found.items()
    )


# --- sections ----------------------------------------------------------------------------------------------------


def copy(args: argparse.Namespace) -> Found:
    cuda = args.device.startswith("cuda")
    count = 4 << 30 if cuda else 64 << 20
    source = torch.ones(count, dtype=torch.uint8, device=args.device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(12):
        synchronise(args.device)
        started = time.perf_counter()
        target.copy_(source)
        synchronise(args.device)
        seconds.append(time.perf_counter() - started)
    del source, target
    free()
    return {"bytes_s": 2 * count / median(seconds[2:])}


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def start(model: Model, args: argparse.Namespace) -> Found:
    """Included: all after the weights lie in the host's memory, up to the first token of a prompt of 16 tokens."""
    return model.opening


def steps(model: Model, args: argparse.Namespace) -> Found:
    """Wall seconds of rounds that were waited for, and what the backend itself says of such rounds."""
    with model.engine.idle_backend() as backend:
        wall = wall_of_rounds(backend, model.prompt(0, model.preset.prompt), args.rounds)
        told = told_of_rounds(backend, args.rounds)
    found = {"plain_s": wall["plain"], "plain_tok_s": 1 / wall["plain"]}
    found["width_4"] = wall["verify"] / wall["plain"]
    found["draft"] = (wall["draft"] - wall["plain"]) / 3 / wall["plain"]
    found |= {"told_plain_s": told["plain"], "told_width_4": told["verify"] / told["plain"]}
    return {**found, "told_draft": told["draft"] / 3 / told["plain"]}


def wall_of_rounds(backend: Backend, prompt: Sequence[int], rounds: int) -> dict[str, float]:
    """plain: a token and no drafts; draft: a token, then three drafts; verify: a window of four, no drafts."""
    kinds = {"plain": (0, 0), "draft": (0, 3), "verify": (3, 0)}
    seconds: dict[str, list[float]] = defaultdict(list)
    row = Row(backend)
    row.start(prompt, Sampling(), 0)
    for _ in range(rounds):
        if not row.has_room(3):
            backend.release(row.number)
            row = Row(backend)
            row.start(prompt, Sampling(), 0)
            row.time(0, 0)  # which waits for the prompt
        for kind, (verify, draft) in kinds.items():
            seconds[kind].append(row.time(verify, draft))
    backend.release(row.number)
    return {kind: median(values[min(8, len(values) // 2) :]) for kind, values in seconds.items()}


def told_of_rounds(backend: Backend, rounds: int) -> dict[str, float]:
    batch, seconds = Batch(backend, Sampling()), defaultdict(list)
    for _ in range(rounds):
        one, four = batch.round(1, 1), batch.round(1, 4)
        for kind, value in (("plain", one.verify_s), ("verify", four.verify_s), ("draft", four.draft_s)):
            seconds[kind].append(value)
    batch.release()
    return {kind: median(values[min(8, len(values) // 2) :]) for kind, values in seconds.items()}


def contenders(model: Model) -> dict[str, tuple[float, Options]]:
    """Their acceptance and their options, by name."""
    base = model.rings.accepts[0] if model.rings else 0.0
    found: dict[str, tuple[float, Options]] = {"plain": (base, drafting(0))}
    for depth, accept in model.preset.contenders:
        name = "auto" if depth is None else f"depth {depth}"
        found[f"{name} at {accept}" if model.rings else name] = (accept, drafting(depth))
    return found


def speed(model: Model, args: argparse.Namespace) -> Found:
    found: Found = {}
    for rows in model.preset.rows:
        values: dict[str, list[Ran]] = defaultdict(list)
        strays, named = 0, contenders(model)
        started = time.perf_counter()
        tokens = {name: warmed(model, rows, *each, args) for name, each in named.items()}
        for number in range(args.repeat):
            if number and time.perf_counter() - started > 4 * args.seconds * len(named):
                break  # slower than expected
            names = list(named)
            shift = number % len(names)
            for name in names[shift:] + names[:shift]:
                ran, off = one_run(model, rows, *named[name], tokens[name], number)
                values[name].append(ran)
                strays += off
        found[str(rows)] = {name: summary(values[name], values["plain"]) for name in named}
        found[str(rows)]["strays"] = strays
        for name in named:
            say(f"{model.name}, {rows} rows, {name}: {shown(found[str(rows)][name])}")
        if strays:
            say(f"WRONG TEXT: {strays} tokens are not those of the ring")
    return found


def one_run(model: Model, rows: int, accept: float, options: Options, tokens: int, first: int = 0) -> tuple[Ran, int]:
    """With prompts from a place on; another one is a little more or less lucky with its drafts."""
    prompts = [model.prompt(first + place, model.preset.prompt, accept) for place in range(rows)]
    ran = run(model.engine, prompts, [{**options, "max_tokens": tokens}] * rows)
    pairs = zip(prompts, ran.outputs, strict=True)
    return ran, sum(model.strays(prompt, output.tokens) for prompt, output in pairs)


def warmed(model: Model, rows: int, accept: float, options: Options, args: argparse.Namespace) -> int:
    """Run until nothing is cold: prompts are cached and no new shape of a round was met. How many tokens a run may
    then have."""
    with model.engine.idle_backend() as backend:
        shapes = getattr(backend.rounds, "captured", ())
    calm = 0
    for _ in range(MOST_WARM):
        known = len(shapes)
        ran, _ = one_run(model, rows, accept, options, min(WARM_TOKENS, args.length))
        calm = calm + 1 if len(shapes) == known else 0
        if calm == CALM:
            break
    affordable = int(ran.rate / rows * args.seconds)
    return int(min(args.length, max(WARM_TOKENS, affordable)))


def summary(runs: Sequence[Ran], plain: Sequence[Ran]) -> Found:
    """Medians; ratios are made within a repetition."""
    outputs = [output for ran in runs for output in ran.outputs]
    told = [output.speculative for output in outputs]
    return {
        "tok_s": median([ran.rate for ran in runs]),
        "full_tok_s": median([ran.full_rate for ran in runs]),
        "to_plain": median([mine.rate / theirs.rate for mine, theirs in zip(runs, plain, strict=True)]),
        "accepted": accepted(outputs),
        "tokens_a_round": sum(len(one.tokens) for one in outputs) / max(1, sum(one.rounds for one in told)),
        "tokens": len(outputs[0].tokens),
    }


def gap(model: Model, args: argparse.Namespace) -> Found:
    """One row: how long the device is idle from the end of one round to the beginning of the next, by its own clock."""
    found: Found = {}
    for depth in (0, 3):
        accept = model.rings.accepts[0] if model.rings else 0.0
        tokens = warmed(model, 1, accept, drafting(depth), args)
        with clocked(model.engine) as stamps:
            for _ in range(args.repeat):
                ran, _ = one_run(model, 1, accept, drafting(depth), tokens)
                timings, rounds = ran.outputs[0].timings, ran.outputs[0].speculative.rounds
            idle = [after[0] - before[2] for before, after in pairwise(stamps())]
        found[f"gap_us_depth_{depth}"] = median(idle) / 1e3
        rest = timings.decode_s - timings.verify_s - timings.draft_s  # the first and the last rounds' included
        found[f"mean_us_depth_{depth}"] = 1e6 * rest / rounds
    return found


@contextmanager
def clocked(engine: Engine) -> Iterator[Callable[[], list[list[int]]]]:
    """When the rounds of a while began, were accepted and ended, in nanoseconds; asked for when all is done."""
    with engine.idle_backend() as backend:
        rounds, handles = backend.rounds, []
        run = rounds.run

    def kept(plan: Any) -> Any:
        handles.append(run(plan))
        return handles[-1]

    rounds.run = kept
    try:
        yield lambda: [handle.out.values()[-1][:3] for handle in handles]
    finally:
        rounds.run = run


def prefill(model: Model, args: argparse.Namespace) -> Found:
    length = min(args.prefill, model.engine.limits.context - 8)
    seconds = []
    for place in range(1 + args.repeat):
        with model.engine.idle_backend():
            pass  # which forgets all prefixes
        prompt = model.prompt(1000 + place, length)
        started = time.perf_counter()
        run(model.engine, [prompt], [{"max_tokens": 1}])
        seconds.append(time.perf_counter() - started)
    return {"tokens": length, "tok_s": length / median(seconds[1:]), "first_s": seconds[0]}


# --- identity ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    prompt: tuple[int, ...]
    options: tuple[tuple[str, Any], ...]

    def asked(self, depth: int | None, tokens: int) -> dict[str, Any]:
        return {**dict(self.options), **drafting(depth), "max_tokens": tokens}


def cases(model: Model, tokens: int) -> list[Case]:
    """Prompts of a part of a chunk, of chunks exactly, and of several and a part; greedy and seeded, in turn."""
    chunk = model.engine.limits.chunk
    most = model.engine.limits.context - tokens - 20
    lengths = [min(most, length) for length in (17, chunk + 1, 2 * chunk, 2 * chunk + 37)]
    found = []
    for place, length in enumerate(lengths):
        prompt = model.prompt(place, length)
        found += [Case(tuple(prompt), ()), Case(tuple(prompt), tuple(SEEDED.items()))]
    return found


class Checking:
    """Compares runs with what each case gives alone and plain, its prompt unknown."""

    def __init__(self, model: Model, tokens: int) -> None:
        self.model, self.tokens, self.cases = model, tokens, cases(model, tokens)
        self.compared = self.cached = 0
        self.different: list[str] = []
        self.outputs: list[Output] = []
        self.plain = [self._run([case], [case.asked(0, tokens)], fresh=True)[0].tokens for case in self.cases]

    def _run(self, chosen: Sequence[Case], asked: Sequence[Options], fresh: bool) -> list[Output]:
        if fresh:
            with self.model.engine.idle_backend():
                pass  # which forgets all prefixes
        return run(self.model.engine, [case.prompt for case in chosen], asked).outputs

    def _asked(self, place: int, depth: int | None, drafter: str) -> Options:
        """The head drafts, or a prediction does: the text itself, or another one at every token."""
        options = self.cases[place].asked(depth, self.tokens)
        if drafter == "head" or depth == 0:
            return options
        shift, vocab = DRAFTERS.index(drafter) - 1, self.model.engine.limits.vocab
        prediction = [(token + shift) % vocab for token in self.plain[place]]
        return {**options, "draft_kind": "prediction", "prediction": prediction}

    def check(self, rows: int, shift: int, fresh: bool, depth: int | None = MIXED) -> None:
        """Rows of all cases, depths and drafters side by side, which another shift pairs otherwise; or greedy ones of a
        depth."""
        places = [(row + shift) % len(self.cases) for row in range(rows)]
        depths = [(*DEPTHS, None)[(row + 3 * shift) % (1 + len(DEPTHS))] for row in range(rows)]
        drafters = [DRAFTERS[(row + shift) // 2 % 3] for row in range(rows)]
        if depth != MIXED:
            places, depths, drafters = [place // 2 * 2 for place in places], [depth] * rows, ["head"] * rows
        asked = [self._asked(*each) for each in zip(places, depths, drafters, strict=True)]
        outputs = self._run([self.cases[place] for place in places], asked, fresh)
        self.outputs += outputs
        for place, its, drafter, output in zip(places, depths, drafters, outputs, strict=True):
            self.compared += 1
            self.cached += output.timings.cached_tokens > 0
            if output.tokens != self.plain[place]:
                pairs = zip(output.tokens, self.plain[place], strict=False)
                where = next((spot for spot, (mine, other) in enumerate(pairs) if mine != other), -1)
                self.different.append(f"case {place}, depth {its} {drafter}, {rows} rows, {fresh=}, token {where}")


def identity(model: Model, args: argparse.Namespace) -> Found:
    started = time.perf_counter()
    checking = Checking(model, min(args.tokens, model.engine.limits.context // 2 - 20))
    say(f"{model.name}: {len(checking.plain)} texts alone and plain")
    # Alone: every depth on a greedy and a seeded case. Then batches, mixed and of one depth. First with prompts that
    # are not known, then with cached ones.
    alone = [(1, shift, MIXED) for shift in range(2 * len(DEPTHS) + 2)]
    mixed = [(rows, shift, MIXED) for rows in BATCHES for shift in (0, 1)]
    even = [(rows, 0, depth) for depth in (0, 3, None) for rows in (8, 32)]
    first = [*alone[::2], *mixed[::2], *even[::2]]
    order = [(*each, True) for each in first] + [(*each, False) for each in (*alone[1::2], *mixed[1::2], *even[1::2])]
    done = 0
    for rows, shift, depth, fresh in order:
        checking.check(rows, shift, fresh, depth)
        done += 1
        say(f"{model.name}: run {done} of {len(order)}: {len(checking.different)} of {checking.compared} texts differ")
        if time.perf_counter() - started > args.identity_seconds:
            break
    for line in checking.different[:10]:
        say(f"DIFFERENT TEXT: {line}")
    return {
        "different": len(checking.different),
        "compared": checking.compared,
        "with_prefix": checking.cached,
        "runs": f"{done} of {len(order)}",
        "tokens": checking.tokens,
        "distinct_tokens": len({token for text in checking.plain for token in text}),
        "accepted": accepted(checking.outputs),
        "where": checking.different[:10],
    }


# --- the table ---------------------------------------------------------------------------------------------------

BARS: tuple[tuple[str, str, float, str], ...] = (
    ("4B, 1 row, plain, tok/s", "4b/speed/1/plain/tok_s", 360, ">="),
    ("4B, a window of 4 in plain steps", "4b/steps/width_4", 1.10, "<="),
    ("4B, a draft in plain steps", "4b/steps/draft", 0.08, "<="),
    ("4B, 1 row, depth 3 at 0.8, x plain", "4b/speed/1/depth 3 at 0.8/to_plain", 2.0, ">="),
    ("4B, 1 row, depth 3 at 0.8, tok/s", "4b/speed/1/depth 3 at 0.8/tok_s", 720, ">="),
    ("4B, 1 row, depth 3 at 0.9, x plain", "4b/speed/1/depth 3 at 0.9/to_plain", 2.3, ">="),
    ("4B, 8 rows, plain, tok/s", "4b/speed/8/plain/tok_s", 2300, ">="),
    ("4B, 8 rows, auto at 0.8, tok/s", "4b/speed/8/auto at 0.8/tok_s", 4000, ">="),
    ("4B, 32 rows, plain, tok/s", "4b/speed/32/plain/tok_s", 7000, ">="),
    ("4B, 32 rows, auto at 0.8, tok/s", "4b/speed/32/auto at 0.8/tok_s", 11000, ">="),
    ("4B, a prompt of 8k, tok/s", "4b/prefill/tok_s", 40000, ">="),
    ("4B, host gap, us, plain", "4b/gap/gap_us_depth_0", 30, "<="),
    ("4B, host gap, us, depth 3", "4b/gap/gap_us_depth_3", 30, "<="),
    ("4B, start, s", "4b/start/start_s", 20, "<="),
    ("27B, 1 row, plain, of its limit", "27b/of_limit", 0.75, ">="),
    ("35B-A3B, 1 row, plain, tok/s", "35b-a3b/speed/1/plain/tok_s", 250, ">="),
    ("35B-A3B, depth 2 at 0.85, x plain", "35b-a3b/speed/1/depth 2 at 0.85/to_plain", 1.5, ">="),
    ("nano, 1 row, greedy, auto, tok/s", "nano/speed/1/auto/tok_s", 2000, ">="),
    ("nano, texts that differ", "nano/identity/different", 0, "<="),
    ("4B, texts that differ", "4b/identity/different", 0, "<="),
    ("35B-A3B, texts that differ", "35b-a3b/identity/different", 0, "<="),
)


def add_limits(found: Found) -> None:
    """A model's limit is the copy's bytes a second over those of a step."""
    rate = found.get("copy", {}).get("bytes_s", 0.0)
    for about in found.values():
        if isinstance(about, dict) and about.get("step_bytes") and rate:
            about["limit_tok_s"] = rate / about["step_bytes"]
            plain = value_at(about, "speed/1/plain/tok_s")
            if plain is not None:
                about["of_limit"] = plain / about["limit_tok_s"]


def value_at(found: Any, path: str) -> float | None:
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else float(found)


def table(found: Found) -> list[str]:
    lines = [f"{'':38}{'measured':>12}{'bar':>12}"]
    for name, path, bar, sign in BARS:
        value = value_at(found, path)
        if value is not None:
            met = value >= bar if sign == ">=" else value <= bar
            lines.append(f"{name:38}{value:12.4g}{sign:>4}{bar:8g}  {'met' if met else 'MISSED'}")
    for name, about in found.items():
        if isinstance(about, dict) and "limit_tok_s" in about:
            lines.append(f"{name + ', 1 row, the limit':38}{about['limit_tok_s']:12.4g}")
        for rows, each in (about.get("speed") or {}).items() if isinstance(about, dict) else ():
            for contender, values in each.items():
                if isinstance(values, dict):
                    label = f"{name}, {rows} rows, {contender}"
                    ratio = f"{values['to_plain']:.2f} x plain, {values['accepted']:.2f} accepted"
                    lines.append(f"{label:38}{values['tok_s']:12.4g}{'':12}  {ratio}")
    return lines


Section = Callable[[Model, argparse.Namespace], Found]
SECTIONS: dict[str, Section] = {"start": start, "steps": steps, "speed": speed, "gap": gap, "prefill": prefill}
OF_ALL = ("start", "steps", "speed")  # of the larger models nothing else is asked


def plan(args: argparse.Namespace) -> list[tuple[str, str, dict[str, Section]]]:
    """Model, kind of weights, sections: a model is opened once for all that can be asked of it."""
    asked = args.sections or ["copy", *SECTIONS, "identity"]
    planned: list[tuple[str, str, dict[str, Section]]] = []
    for name in args.preset:
        big = name in ("27b", "35b-a3b") and not args.sections
        chosen = {key: section for key, section in SECTIONS.items() if key in asked and (not big or key in OF_ALL)}
        if name == "nano":
            chosen.pop("prefill", None)  # its context is too short
        if "identity" in asked and name == "nano":
            chosen["identity"] = identity
        if chosen:
            planned.append((name, "ring", chosen))
        if "identity" in asked and name != "nano" and not big:
            planned.append((name, "random", {"identity": identity}))
    return planned


def guarded(name: str, action: Callable[[], Found], args: argparse.Namespace, failed: list[str]) -> Found | None:
    """A section that breaks says so, and the others go on."""
    if time.perf_counter() - STARTED > args.budget:
        say(f"{name}: left out, the budget of {args.budget:.0f} s is spent")
        failed.append(f"{name}: left out")
        return None
    say(f"{name} ...")
    try:
        found = action()
    except Exception as error:  # noqa: BLE001
        traceback.print_exc(file=sys.stdout)
        say(f"{name}: FAILED ({type(error).__name__}: {error})")
        failed.append(f"{name}: {type(error).__name__}: {error}")
        return None
    told = shown({key: value for key, value in found.items() if not isinstance(value, dict)})
    say(f"{name}: {told or 'done'}")
    return found


def measure(name: str, kind: str, sections: Mapping[str, Section], found: Found, args: argparse.Namespace) -> Found:
    with opened(name, kind, args) as model:
        about = found.setdefault(name, {})
        if kind == "ring" and model.step_bytes:
            about["step_bytes"] = model.step_bytes
        for key, section in sections.items():
            about[key] = guarded(f"{name} {key}", partial(section, model, args), args, found["failed"])
    return {}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", choices=["copy", *SECTIONS, "identity", []], help="default: all")
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=list(DEFAULT_PRESETS))
    parser.add_argument("--accept", nargs="+", type=float, help="shares of right drafts, in place of a preset's own")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=450, help="seconds after which no section starts")
    parser.add_argument("--length", type=int, default=512, help="tokens of a timed text")
    parser.add_argument("--seconds", type=float, default=4, help="of a timed text; a slow one has fewer tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100, help="of each kind, for steps")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--tokens", type=int, default=300, help="of a text that is compared")
    parser.add_argument(
        "--noise", type=float, default=2.7, help="of compared texts: the more, the fewer drafts are right"
    )
    parser.add_argument("--identity-seconds", type=float, default=60, help="after which no more texts are compared")
    args = parser.parse_args()
    if args.accept:
        for name, preset in PRESETS.items():
            depths = dict.fromkeys(depth for depth, _ in preset.contenders)
            own = tuple((depth, accept) for depth in depths for accept in args.accept)
            PRESETS[name] = replace(preset, contenders=own if preset.hidden else preset.contenders)
    return args


def main() -> None:
    args = arguments()
    cuda = args.device.startswith("cuda")
    device = torch.cuda.get_device_name() if cuda else "cpu"
    found: Found = {"device": device, "torch": torch.__version__, "failed": []}
    say(f"{device}, torch {torch.__version__}")
    if not args.sections or "copy" in args.sections:
        found["copy"] = guarded("copy", partial(copy, args), args, found["failed"])
    for name, kind, sections in plan(args):
        guarded(f"{name} ({kind})", partial(measure, name, kind, sections, found, args), args, found["failed"])
        free()
    add_limits(found)
    found["seconds"] = time.perf_counter() - STARTED
    print("\n".join(table(found)), flush=True)
    print(json.dumps(found, default=str), flush=True)


if __name__ == "__main__":
    main()
