"""Batches of the default model on this machine: what auto depth, mixes, grammars, prompts and prefixes cost.

    python benchmarks/batch.py [rows] [mix] [grammar] [stall] [prefix] [bad] [--repeat 5] [--tokens 96]

rows     tok/s while 1 to 16 rows are taken: auto against plain and every fixed depth
mix      half of 8 rows draft, half are plain, against 8 plain ones
grammar  7 rows beside a constrained one, against 7 beside a free one
stall    the longest wait for a token while a prompt of 4,096 tokens comes in, in chunk times
prefix   the first token after a repeated beginning of 1,024 tokens, against a cold one
bad      random tokens at temperature 2: auto against plain

In each repetition every contender takes its turn, in an order that rotates; ratios are made within a repetition and
their medians told. The texts of a section must agree where the promise says so. The last line is one JSON object.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import headlong
from headlong.checkpoint.find import DEFAULT, find
from headlong.cli.machine import cpu_name
from headlong.cli.prompts import built_in
from headlong.engine.engine import Engine
from headlong.engine.intake import requests_from
from headlong.engine.request import Output

ROWS = (1, 2, 4, 8, 16)
DEPTHS = (0, 1, 2, 3, 4, 6, 8)
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 40,
}

Options = Mapping[str, Any]
Ran = tuple[list[Output], list[float]]
Steady = tuple[float, list[tuple[int, ...]]]


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Beginnings of code, of different lengths."""
    texts = [str(text) for text in built_in("code").prompts]
    ids = [engine.text.encode(text) for text in texts]
    return [ids[place % len(ids)][: 40 + 7 * (place // len(ids))] for place in range(count)]


def run(
    engine: Engine, prompts: Sequence[Sequence[int]], options: Sequence[Options]
) -> tuple[list[Output], list[float]]:
    """All together; the outputs, and when each was complete, in seconds."""
    requests = [requests_from(prompt, dict(each))[0] for prompt, each in zip(prompts, options, strict=True)]
    indices = [engine.submit(request) for request in requests]
    started, ends = time.perf_counter(), {}
    while engine.busy:
        for emitted in engine.step():
            if emitted.finish_reason:
                ends[emitted.index] = time.perf_counter() - started
    return [engine.output(index) for index in indices], [ends[index] for index in indices]


def steady(engine: Engine, prompts: Sequence[Sequence[int]], rows: int, options: Options) -> Steady:
    """So many rows at a time, each followed by the next prompt; tokens a second while all rows are taken."""
    coming = [requests_from(prompt, dict(options))[0] for prompt in prompts]
    places: dict[int, int] = {}
    texts: dict[int, tuple[int, ...]] = {}
    tokens, started, seconds = 0, time.perf_counter(), 0.0
    running = 0
    while coming or engine.busy:
        while coming and running < rows:
            places[engine.submit(coming.pop(0))] = len(places)
            running += 1
        emitted = engine.step()
        if running == rows:
            tokens += len(emitted)
            seconds = time.perf_counter() - started
        for one in emitted:
            if one.finish_reason:
                running -= 1
                texts[places[one.index]] = engine.output(one.index).tokens
    return tokens / seconds, [texts[place] for place in range(len(texts))]


def interleave(contenders: Mapping[str, Callable[[], float]], repeat: int) -> dict[str, list[float]]:
    """What each contender gives in each repetition; a first round warms up and does not count."""
    found: dict[str, list[float]] = defaultdict(list)
    names = list(contenders)
    for number in range(repeat + 1):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            value = contenders[name]()
            if number:
                found[name].append(value)
    return found


def ratio(values: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(values[one], values[other], strict=True))


def to_best(values: Mapping[str, Sequence[float]], one: str) -> float:
    """Against the best of the others. Which that is, the other repetitions say: whoever is picked in the same one for
    being fastest was also lucky in it."""
    others, ratios = [name for name in values if name != one], []
    for number in range(len(values[one])):
        rest = {name: [*each[:number], *each[number + 1 :]] for name, each in values.items()}
        best = max(others, key=lambda name, rest=rest: ratio(rest, name, "plain"))  # type: ignore[misc]
        ratios.append(values[one][number] / values[best][number])
    return statistics.median(ratios)


def rows(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count in ROWS:
        prompts = prompts_of(engine, max(4, 3 * count))
        texts: dict[str, list[tuple[int, ...]]] = {}

        def speed(name: str, options: Options, count: int = count, prompts: Any = prompts, texts: Any = texts) -> float:
            found, texts[name] = steady(engine, prompts, count, options)
            return found

        base = {"max_tokens": args.tokens, "ignore_eos": True}
        named: dict[str, Options] = {"plain": {**base, "draft_kind": "none"}, "auto": base}
        named |= {f"depth {depth}": {**base, "draft_kind": "mtp", "depth": depth} for depth in DEPTHS if depth}
        contenders = {
            name: (lambda name=name, options=options: speed(name, options)) for name, options in named.items()
        }
        values = interleave(contenders, args.repeat)
        assert all(mine == texts["plain"] for mine in texts.values()), "a text differs from plain decoding's"
        against = {name: round(ratio(values, name, "plain"), 3) for name in values}
        luckiest = max((name for name in values if name != "auto"), key=lambda name: against[name])
        mine = {"to_best": to_best(values, "auto"), f"to {luckiest}, the luckiest": ratio(values, "auto", luckiest)}
        found[str(count)] = {name: round(value, 3) for name, value in mine.items()} | {"to_plain": against}
        print(f"{count:2} rows, auto: {found[str(count)]}", flush=True)
    return found


def mix(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(engine, 8)
    plain = {"max_tokens": args.tokens, "ignore_eos": True, "draft_kind": "none"}
    auto = {"max_tokens": args.tokens, "ignore_eos": True}
    sides: dict[str, dict[str, list[float]]] = {"mixed": defaultdict(list), "plain": defaultdict(list)}

    def go(name: str, options: list[Options]) -> float:
        _, ends = run(engine, prompts, options)
        for side, part in (("plain rows", ends[::2]), ("other rows", ends[1::2])):
            sides[name][side].append(args.tokens / statistics.fmean(part))
        return max(ends)

    interleave(
        {"mixed": lambda: go("mixed", [plain, auto] * 4), "plain": lambda: go("plain", [plain] * 8)}, args.repeat
    )
    found = {}
    for side in ("plain rows", "other rows"):
        pairs = zip(sides["mixed"][side], sides["plain"][side], strict=True)
        found[side] = round(statistics.median(mine / theirs for mine, theirs in pairs), 3)
    print(f"mix: speed against 8 plain rows: {found}", flush=True)
    return found


def grammar(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    prompts = prompts_of(engine, 8)
    free = {"max_tokens": args.tokens, "ignore_eos": True}
    bound = {"max_tokens": args.tokens, "json_schema": SCHEMA}
    found = {}
    for kind in ("none", "auto"):
        base = {**free, "draft_kind": kind}

        def neighbours(last: Options, base: Options = base) -> float:
            _, ends = run(engine, prompts, [base] * 7 + [last])
            return args.tokens / statistics.fmean(ends[:7])

        values = interleave(
            {
                "grammar": partial(neighbours, {**bound, "draft_kind": kind}),
                "free": partial(neighbours, base),
            },
            args.repeat,
        )
        found[kind] = round(ratio(values, "grammar", "free"), 3)
    print(f"grammar: neighbours' speed against those of a free row: {found}", flush=True)
    return found


def stall(args: argparse.Namespace) -> dict[str, Any]:
    """With a copy of the model that allows longer texts; what it says there does not matter."""
    with tempfile.TemporaryDirectory() as folder, longer(Path(folder)) as engine:
        rng = random.Random(0)
        prompts = prompts_of(engine, 4)
        gaps, chunks = [], []
        for _ in range(args.repeat):
            prompt = [rng.randrange(16000) for _ in range(4096)]
            indices = [
                engine.submit(requests_from(each, {"max_tokens": 400, "ignore_eos": True})[0]) for each in prompts
            ]
            for _ in range(20):
                engine.step()
            long = engine.submit(requests_from(prompt, {"max_tokens": 1})[0])
            last, longest, done = dict.fromkeys(indices, time.perf_counter()), 0.0, False
            while not done:
                emitted, now = engine.step(), time.perf_counter()
                done = any(one.index == long for one in emitted)
                for index in {one.index for one in emitted} - {long}:
                    longest, last[index] = max(longest, now - last[index]), now
            gaps.append(longest)
            chunks.append(engine.output(long).timings.prefill_s / (4096 / engine.limits.chunk))
            for index in indices:
                engine.cancel(index)
        worst = [gap / chunk for gap, chunk in zip(gaps, chunks, strict=True)]
    found = {"chunk_ms": round(1000 * statistics.median(chunks), 1), "longest_wait_in_chunks": round(max(worst), 2)}
    found["median_wait_in_chunks"] = round(statistics.median(worst), 2)
    print(f"stall: {found}", flush=True)
    return found


def longer(folder: Path) -> Engine:
    source = find(DEFAULT)
    for path in source.iterdir():
        if path.name not in ("config.json", "sums.json"):
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    return headlong.load(folder, rows=8)


def prefix(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(1)
    found: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.repeat + 1):
        beginning = [rng.randrange(16000) for _ in range(1024)]
        answers = {}
        for name in ("cold", "repeated"):
            ending = engine.text.encode("\n\ndef main():\n")
            started = time.perf_counter()
            (output,), _ = run(engine, [[*beginning, *ending]], [{"max_tokens": 1}])
            found[name].append(time.perf_counter() - started)
            answers[name] = output.tokens
        assert answers["cold"] == answers["repeated"]
    times = {name: round(1000 * statistics.median(values[1:]), 1) for name, values in found.items()}
    result = {"ms": times, "sooner": round(ratio({k: v[1:] for k, v in found.items()}, "cold", "repeated"), 2)}
    print(f"prefix: {result}", flush=True)
    return result


def bad(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for count in (1, 4, 8):
        rng = random.Random(2)
        prompts = [[rng.randrange(16000) for _ in range(64)] for _ in range(count)]
        for seed in (7, None):

            def speed(kind: str, prompts: list[list[int]] = prompts, seed: int | None = seed) -> float:
                options = {"max_tokens": 4 * args.tokens, "ignore_eos": True, "temperature": 2.0, "seed": seed}
                outputs, ends = run(engine, prompts, [{**options, "draft_kind": kind}] * len(prompts))
                return sum(len(output.tokens) for output in outputs) / max(ends)

            values = interleave({"auto": lambda: speed("auto"), "plain": lambda: speed("none")}, args.repeat)
            name = f"{count} rows, {'unseeded' if seed is None else 'seeded'}"
            found[name] = round(ratio(values, "auto", "plain"), 3)
            print(f"bad: {name}: auto {found[name]} x plain", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections: dict[str, Callable[..., dict[str, Any]]] = {
        "rows": rows,
        "mix": mix,
        "grammar": grammar,
        "stall": stall,
        "prefix": prefix,
        "bad": bad,
    }
    parser.add_argument("sections", nargs="*", choices=[*sections, []], help="default: all")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": cpu_name()}
    with headlong.load(rows=16) as engine:
        for name in args.sections or sections:
            found[name] = sections[name](args) if name == "stall" else sections[name](engine, args)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
