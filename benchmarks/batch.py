"""Batches of the default model on this machine: what auto depth, mixes, grammars, prompts and prefixes cost.

    python benchmarks/batch.py [rows] [mix] [grammar] [stall] [prefix] [bad] [--seconds 12] [--engines 2] [--rows 8 16]
        [--depths 1 2]

rows     tok/s while 1 to 16 rows are taken: auto against plain and every fixed depth
mix      half of 8 rows draft, half are plain, against 8 plain ones
grammar  7 rows beside a constrained one, against 7 beside a free one
stall    the longest wait for a token while a prompt of 4,096 tokens comes in, in chunk times
prefix   the first token after a repeated beginning of 1,024 tokens, against a cold one
bad      random tokens at temperature 2: auto against plain

Contenders take turns of a fifth of a second, so that the machine's moods are everybody's; ratios are made within an
eighth of the turns and their medians told, with their doubt (the standard error of their mean) and beside those the
ratio of all tokens. One engine may be a percent or two faster than another of its kind, by where its memory lies, so
every contender has several. The texts of a section must agree where the promise says so. The last line is one JSON
object.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
BAD_ROWS = (1, 4, 8)
DEPTHS = (1, 2, 3, 4, 6, 8)
PROMPTS = 48  # of few, the texts happen to suit one depth, whichever it is
TURN_S = 0.2
GROUPS, WARM_GROUPS = 8, 2  # of turns
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


class Lane:
    """One engine of a contender, all of whose places are taken, each by one prompt after the other."""

    def __init__(self, places: Sequence[Options], prompts: Sequence[Sequence[int]]) -> None:
        self.engine = headlong.load(rows=16)
        self.places, self.prompts = places, prompts
        self.running: dict[int, tuple[int, int]] = {}  # by index: its place, and the number of its prompt
        self.free = list(range(len(places)))
        self.texts: list[tuple[int, ...] | None] = []  # by the number of the prompt
        self.groups: list[tuple[list[int], float]] = []  # tokens of every place, and seconds

    def begin_group(self) -> None:
        self.groups.append(([0] * len(self.places), 0.0))

    def turn(self) -> None:
        tokens, seconds = self.groups[-1]
        started = time.perf_counter()
        while time.perf_counter() - started < TURN_S:
            while self.free:
                place, number = self.free.pop(), len(self.texts)
                self.texts.append(None)
                request = requests_from(self.prompts[number % len(self.prompts)], self._options(place, number))[0]
                self.running[self.engine.submit(request)] = place, number
            for one in self.engine.step():
                place, number = self.running[one.index]
                tokens[place] += one.token is not None
                if one.finish_reason:
                    self.texts[number] = self.engine.output(one.index).tokens
                    self.free.append(place)
        self.groups[-1] = tokens, seconds + time.perf_counter() - started

    def _options(self, place: int, number: int) -> dict[str, Any]:
        """The first texts are of all lengths, or rows would end together, and wait together for all new prompts."""
        options, count = dict(self.places[place]), len(self.places)
        return options | {"max_tokens": -(-options["max_tokens"] * min(number + 1, count) // count)}

    def close(self) -> None:
        self.groups = self.groups[WARM_GROUPS:]
        self.engine.close()


class Contender:
    """Some engines that are told the same."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self.lanes = lanes

    def rates(self, places: slice = slice(None)) -> list[float]:
        """Tokens a second, by group."""
        return [
            sum(sum(tokens[places]) for tokens, _ in group) / sum(seconds for _, seconds in group)
            for group in zip(*(lane.groups for lane in self.lanes), strict=True)
        ]

    def rate(self, places: slice = slice(None)) -> float:
        """The same, of all groups together."""
        groups = [group for lane in self.lanes for group in lane.groups]
        return sum(sum(tokens[places]) for tokens, _ in groups) / sum(seconds for _, seconds in groups)


def race(
    named: Mapping[str, Sequence[Options]], prompts: Sequence[Sequence[int]], args: argparse.Namespace
) -> dict[str, Contender]:
    """Contenders take turns of a fraction of a second, in ever new orders, so that the machine's moods are everybody's.
    What comes before the first of GROUPS groups of turns does not count."""
    found = {name: Contender([Lane(places, prompts) for _ in range(args.engines)]) for name, places in named.items()}
    lanes = [lane for contender in found.values() for lane in contender.lanes]
    order, turns = random.Random(0), max(1, round(args.seconds / GROUPS / TURN_S))
    for _ in range(WARM_GROUPS + GROUPS):
        for lane in lanes:
            lane.begin_group()
        for _ in range(turns):
            for lane in order.sample(lanes, len(lanes)):
                lane.turn()
    for lane in lanes:
        lane.close()
    return found


def assert_same_texts(contenders: Mapping[str, Contender]) -> None:
    """Of the prompts that two engines have both answered."""
    first, *others = (lane for contender in contenders.values() for lane in contender.lanes)
    for lane in others:
        pairs = [pair for pair in zip(first.texts, lane.texts, strict=False) if None not in pair]
        assert pairs, "nothing was answered; give more seconds"
        assert all(mine == theirs for mine, theirs in pairs), "a text differs from plain decoding's"


def ratio(values: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(values[one], values[other], strict=True))


def doubt(values: Mapping[str, Sequence[float]], one: str, other: str) -> float:
    """The standard error of a mean of their ratios."""
    ratios = [mine / theirs for mine, theirs in zip(values[one], values[other], strict=True)]
    return statistics.stdev(ratios) / len(ratios) ** 0.5


def compare(lanes: Mapping[str, Contender], one: str, other: str, places: slice = slice(None)) -> dict[str, float]:
    values = {name: lanes[name].rates(places) for name in (one, other)}
    found = {"median": ratio(values, one, other), "doubt": doubt(values, one, other)}
    found["all"] = lanes[one].rate(places) / lanes[other].rate(places)
    return {name: round(value, 3) for name, value in found.items()}


def to_best(values: Mapping[str, Sequence[float]], one: str) -> float:
    """Against the best of the others. Which that is, the other groups say: whoever is picked in the same one for being
    fastest was also lucky in it."""
    others, ratios = [name for name in values if name != one], []
    for number in range(len(values[one])):
        rest = {name: [*each[:number], *each[number + 1 :]] for name, each in values.items()}
        best = max(others, key=lambda name, rest=rest: ratio(rest, name, "plain"))  # type: ignore[misc]
        ratios.append(values[one][number] / values[best][number])
    return statistics.median(ratios)


def rows(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    base = {"max_tokens": args.tokens, "ignore_eos": True}
    named: dict[str, Options] = {"plain": {**base, "draft_kind": "none"}, "auto": base}
    named |= {f"depth {depth}": {**base, "draft_kind": "mtp", "depth": depth} for depth in args.depths}
    for count in args.rows or ROWS:
        with headlong.load() as engine:
            prompts = prompts_of(engine, PROMPTS)
        lanes = race({name: [options] * count for name, options in named.items()}, prompts, args)
        assert_same_texts(lanes)
        values = {name: lane.rates() for name, lane in lanes.items()}
        against = {name: round(ratio(values, name, "plain"), 3) for name in values}
        best = max((name for name in values if name != "auto"), key=lambda name: against[name])
        mine = {"to_best": round(to_best(values, "auto"), 3), f"to {best}": compare(lanes, "auto", best)}
        found[str(count)] = mine | {"to_plain": against}
        print(f"{count:2} rows, auto: {found[str(count)]}", flush=True)
    return found


def mix(args: argparse.Namespace) -> dict[str, Any]:
    auto = {"max_tokens": args.tokens, "ignore_eos": True}
    plain = {**auto, "draft_kind": "none"}
    with headlong.load() as engine:
        prompts = prompts_of(engine, 24)
    lanes = race({"plain": [plain] * 8, "mixed": [plain, auto] * 4, "auto": [auto] * 8}, prompts, args)
    assert_same_texts(lanes)
    found = {}
    for side, places in (("plain rows", slice(0, None, 2)), ("other rows", slice(1, None, 2))):
        found[side] = compare(lanes, "mixed", "plain", places)
    found["all rows, where all are auto"] = compare(lanes, "auto", "plain")
    print(f"mix: speed against 8 plain rows: {found}", flush=True)
    return found


def grammar(args: argparse.Namespace) -> dict[str, Any]:
    free = {"max_tokens": args.tokens, "ignore_eos": True}
    bound = {"max_tokens": args.tokens, "json_schema": SCHEMA}
    with headlong.load() as engine:
        prompts = prompts_of(engine, 24)
    found = {}
    for kind in ("none", "auto"):
        one, other = ({**options, "draft_kind": kind} for options in (free, bound))
        lanes = race({"free": [one] * 8, "grammar": [one] * 7 + [other]}, prompts, args)
        found[kind] = compare(lanes, "grammar", "free", slice(7))
    print(f"grammar: neighbours' speed against those of a free row: {found}", flush=True)
    return found


def stall(args: argparse.Namespace) -> dict[str, Any]:
    """With a copy of the model that allows longer texts; what it says there does not matter."""
    with tempfile.TemporaryDirectory() as folder, longer(Path(folder)) as engine:
        gc.freeze()  # as `headlong serve` does
        rng = random.Random(0)
        prompts = prompts_of(engine, 4)
        gaps, chunks, firsts = [], [], []
        for _ in range(args.repeat):
            prompt = [rng.randrange(16000) for _ in range(4096)]
            options = {"max_tokens": 4000, "ignore_eos": True}  # more than they come to write meanwhile
            indices = [engine.submit(requests_from(each, options)[0]) for each in prompts]
            for _ in range(20):
                engine.step()
            long = engine.submit(requests_from(prompt, {"max_tokens": 1})[0])
            began = time.perf_counter()
            last, longest, done = dict.fromkeys(indices, began), 0.0, False
            while not done:
                emitted, now = engine.step(), time.perf_counter()
                done = any(one.index == long for one in emitted)
                for index in {one.index for one in emitted} - {long}:
                    longest, last[index] = max(longest, now - last[index]), now
            gaps.append(longest)
            chunks.append(engine.output(long).timings.prefill_s / (4096 / engine.limits.chunk))
            firsts.append(time.perf_counter() - began)
            for index in indices:
                engine.cancel(index)
                assert engine.output(index).finish_reason == "cancelled"
        worst = [gap / chunk for gap, chunk in zip(gaps, chunks, strict=True)]
    found = {"chunk_ms": round(1000 * statistics.median(chunks), 1), "longest_wait_in_chunks": round(max(worst), 2)}
    found["median_wait_in_chunks"] = round(statistics.median(worst), 2)
    found["first_token_s"] = round(statistics.median(firsts), 3)
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


def prefix(args: argparse.Namespace) -> dict[str, Any]:
    with headlong.load() as engine:
        return first_tokens(engine, args)


def first_tokens(engine: Engine, args: argparse.Namespace) -> dict[str, Any]:
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


def bad(args: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for count in args.rows or BAD_ROWS:
        rng = random.Random(2)
        prompts = [[rng.randrange(16000) for _ in range(64)] for _ in range(3 * count)]
        for seed in (7, None):
            auto = {"max_tokens": 4 * args.tokens, "ignore_eos": True, "temperature": 2.0, "seed": seed}
            plain = {**auto, "draft_kind": "none"}
            lanes = race({"plain": [plain] * count, "auto": [auto] * count}, prompts, args)
            name = f"{count} rows, {'unseeded' if seed is None else 'seeded'}"
            found[name] = compare(lanes, "auto", "plain")
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
    parser.add_argument("--seconds", type=float, default=12, help="of every engine; default: %(default)s")
    parser.add_argument("--engines", type=int, default=2, help="of every contender; default: %(default)s")
    parser.add_argument("--repeat", type=int, default=5, help="of prompts and prefixes; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="of a text; default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", help=f"default: {ROWS}, for bad {BAD_ROWS}")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="that are fixed; default: %(default)s")
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": cpu_name()}
    for name in args.sections or sections:
        found[name] = sections[name](args)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
