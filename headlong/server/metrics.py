"""Metrics in Prometheus's text form: vLLM's names where it has them, under our prefix."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from headlong.engine.engine import Engine
from headlong.server.events import Finish

PREFIX = "headlong:"
FIRST_TOKEN_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
PER_TOKEN_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
REQUEST_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)

Labels = Mapping[str, str | int]


class Histogram:
    """How many of some seconds lie below each bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = (*bounds, math.inf)
        self.counts = [0] * len(self.bounds)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds


class Metrics:
    """What a server sees of its requests, and what it tells of itself and its engine."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.per_token = Histogram(PER_TOKEN_S)
        self.queue = Histogram(FIRST_TOKEN_S)
        self.request = Histogram(REQUEST_S)
        self.statuses: Counter[int] = Counter()

    def record_finish(self, finish: Finish) -> None:
        timings = finish.output.timings
        self.queue.observe(timings.queue_s)
        if timings.tokens:
            self.per_token.observe(timings.decode_s / timings.tokens)

    def text(self, engine: Engine, name: str) -> str:
        return "".join(f"{line}\n" for line in self._lines(Page(name), engine))

    def _lines(self, page: "Page", engine: Engine) -> Iterator[str]:
        yield from _of_load(page, engine)
        yield from _of_drafting(page, engine)
        yield from _of_work(page, engine)
        yield from page.histogram("time_to_first_token_seconds", "From a request to its first text.", self.first_token)
        yield from page.histogram("time_per_output_token_seconds", "Of one answer, on average.", self.per_token)
        yield from page.histogram("request_queue_time_seconds", "Waiting for a row.", self.queue)
        yield from page.histogram("e2e_request_latency_seconds", "From a request to its end.", self.request)
        statuses = [({"status": status}, count) for status, count in sorted(self.statuses.items())]
        yield from page.counter("http_responses_total", "HTTP requests, by what they were answered.", statuses)


def _of_load(page: "Page", engine: Engine) -> Iterator[str]:
    load = engine.load
    yield from page.gauge("num_requests_running", "Requests that have a row.", load.running)
    yield from page.gauge("num_requests_waiting", "Requests that wait for a row.", load.waiting)
    yield from page.gauge("rows", "Rows that there are.", load.rows)
    held = load.pages_held / load.pages if load.pages else 0.0
    yield from page.gauge("kv_cache_usage_perc", "Share of pages that rows or prefixes hold; 1 is all.", held)
    pages = [
        ({"state": "row"}, load.pages_held - load.pages_cached),
        ({"state": "prefix"}, load.pages_cached),
        ({"state": "free"}, load.pages - load.pages_held),
    ]
    yield from page.samples("kv_cache_pages", "gauge", "Pages, by who holds them; shared ones count as prefix.", pages)
    yield from page.one("prefix_cache_queries_total", "Prompts looked up in the prefix cache.", load.prefix_lookups)
    yield from page.one("prefix_cache_hits_total", "Prompts of which a beginning was cached.", load.prefix_hits)
    cached = engine.totals.cached_tokens
    yield from page.one("prefix_cache_hit_tokens_total", "Prompt tokens that were cached.", cached)


def _of_drafting(page: "Page", engine: Engine) -> Iterator[str]:
    totals = engine.totals
    windows, drafted, accepted = dict(totals.windows), dict(totals.drafted), dict(totals.accepted)
    drafts = sum(count for depth, count in windows.items() if depth)
    yield from page.one("spec_decode_num_drafts_total", "Windows with drafts.", drafts)
    yield from page.one("spec_decode_num_draft_tokens_total", "Drafted tokens.", sum(drafted.values()))
    yield from page.one("spec_decode_num_accepted_tokens_total", "Accepted drafts.", sum(accepted.values()))
    for name, counts in (("accepted", accepted), ("draft", drafted)):
        by_position = [({"position": position - 1}, counts.get(position, 0)) for position in sorted(drafted)]
        told = "Of the draft at a position, the first being 0."
        yield from page.counter(f"spec_decode_num_{name}_tokens_per_pos_total", told, by_position)
    depths = [({"depth": depth}, count) for depth, count in sorted(windows.items())]
    yield from page.counter("spec_decode_windows_total", "Windows of rows in rounds, by their drafts.", depths)
    reasons = [({"reason": reason}, count) for reason, count in sorted(totals.undrafted.copy().items())]
    yield from page.counter("spec_decode_undrafted_requests_total", "Requests without a draft, by why.", reasons)


def _of_work(page: "Page", engine: Engine) -> Iterator[str]:
    totals = engine.totals
    yield from page.one("prompt_tokens_total", "Tokens of prompts, of requests that ended.", totals.prompt_tokens)
    yield from page.one("generation_tokens_total", "Tokens of answers.", totals.tokens)
    ends = [({"finished_reason": reason}, count) for reason, count in sorted(totals.requests.copy().items())]
    yield from page.counter("request_success_total", "Requests that ended, by why they did.", ends)
    yield from page.one("rounds_total", "Rounds of the batch.", totals.rounds)
    yield from page.one("prefill_chunks_total", "Pieces of prompts.", totals.chunks)
    stages = [({"stage": stage}, seconds) for stage, seconds in totals.seconds.items()]
    told = "Seconds of rounds by stage, and of prompts; over rounds_total, a round's."
    yield from page.counter("round_seconds_total", told, stages)


class Page:
    """Writes series, each with the model's name."""

    def __init__(self, model: str) -> None:
        self._model = model

    def gauge(self, name: str, told: str, value: float) -> Iterator[str]:
        return self.samples(name, "gauge", told, [({}, value)])

    def one(self, name: str, told: str, value: float) -> Iterator[str]:
        return self.counter(name, told, [({}, value)])

    def counter(self, name: str, told: str, values: Iterable[tuple[Labels, float]]) -> Iterator[str]:
        return self.samples(name, "counter", told, values)

    def samples(self, name: str, kind: str, told: str, values: Iterable[tuple[Labels, float]]) -> Iterator[str]:
        yield f"# HELP {PREFIX}{name} {told}"
        yield f"# TYPE {PREFIX}{name} {kind}"
        for labels, value in values:
            yield f"{PREFIX}{name}{self._labels(labels)} {value}"

    def histogram(self, name: str, told: str, histogram: Histogram) -> Iterator[str]:
        yield f"# HELP {PREFIX}{name} {told}"
        yield f"# TYPE {PREFIX}{name} histogram"
        below = 0
        for bound, count in zip(histogram.bounds, histogram.counts, strict=True):
            below += count
            label = "+Inf" if bound == math.inf else f"{bound:g}"
            yield f"{PREFIX}{name}_bucket{self._labels({'le': label})} {below}"
        yield f"{PREFIX}{name}_sum{self._labels({})} {histogram.sum}"
        yield f"{PREFIX}{name}_count{self._labels({})} {below}"

    def _labels(self, labels: Labels) -> str:
        given = {"model_name": self._model, **labels}
        return "{" + ",".join(f'{key}="{_escaped(str(value))}"' for key, value in given.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
