"""Answers in numbers: the line of figures, what -v adds to it, and the record that --json prints."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, groupby, zip_longest
from operator import itemgetter
from typing import Any

from headlong.engine.request import Output, Speculative

SECONDS = ("queue_s", "prefill_s", "verify_s", "draft_s", "host_s")


@dataclass(frozen=True)
class Asked:
    """What the answers answer, as far as showing them needs it."""

    prompts: Sequence[str]
    completions: int = 1  # answers to each prompt, one after the other
    depth: int | None = None  # None: auto
    logprobs: bool = False

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.completions


def record(model: str, output: Output, load_s: float, logprobs: bool) -> dict[str, Any]:
    """What --json prints for one answer."""
    speculative, timings = output.speculative, output.timings
    content = {
        "model": model,
        "prompt_tokens": output.prompt_tokens,
        "tokens": output.tokens,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "speculative": {**asdict(speculative), "mean_length": speculative.mean_length},
        "timings": {
            "load_s": load_s,
            **asdict(timings),
            "prompt_tps": timings.prompt_tps,
            "decode_tps": timings.decode_tps,
            "draft_n": speculative.drafted,
            "draft_n_accepted": speculative.accepted,
        },
    }
    if logprobs:
        content["logprobs"] = [asdict(one) for one in output.logprobs]
    if output.error:
        content["error"] = output.error
    return content


def figures(outputs: Sequence[Output], seconds: float, asked: Asked) -> str:
    """What the rounds gave, in one line. `seconds` is the time all the outputs took together."""
    tokens = sum(len(output.tokens) for output in outputs)
    total = combine([output.speculative for output in outputs])
    speed = outputs[0].timings.decode_tps if len(outputs) == 1 else tokens / seconds
    each = tokens / total.rounds if total.rounds else 0.0
    parts = [
        *([count(len(asked.prompts), "prompt")] if asked.answers > 1 else []),
        *([count(asked.answers, "answer")] if asked.completions > 1 else []),
        f"{count(tokens, 'token')} in {count(total.rounds, 'round')} ({each:.2f} a round)",
        f"{speed:.1f} tok/s",
        drafting(total, asked.depth),
    ]
    late = sum(output.finish_reason == "deadline" for output in outputs)
    if late:
        parts.append(f"{late} of them ended at the deadline" if len(outputs) > 1 else "ended at the deadline")
    return ", ".join(parts)


def drafting(total: Speculative, asked: int | None) -> str:
    """Who drafted, how deep and how well, or why nobody did. `asked` is None where the depth was chosen by itself."""
    if not total.drafted:
        return f"no drafts: {total.reason}" if total.reason else "no drafts"
    each = total.drafted / total.rounds
    depth = f"auto ({each:.1f} drafts a window)" if asked is None else str(asked)
    pairs = zip(total.accepted_by_position, total.drafted_by_position, strict=True)
    rates = " ".join(f"{accepted / drafted:.0%}" for accepted, drafted in pairs if drafted)
    return f"{total.used} at depth {depth}, accepted by position: {rates}"


def combine(parts: Sequence[Speculative]) -> Speculative:
    """Several requests' drafting as if it were one's."""
    drafters: dict[str, tuple[int, int]] = {}
    for name, (drafted, accepted) in chain.from_iterable(part.drafters.items() for part in parts):
        before = drafters.get(name, (0, 0))
        drafters[name] = (before[0] + drafted, before[1] + accepted)
    windows = chain.from_iterable(part.depths for part in parts)
    return Speculative(
        requested=parts[0].requested,
        used="+".join(sorted(drafters)) or "none",
        reason=next((part.reason for part in parts if part.reason), ""),
        depth=max(part.depth for part in parts),
        rounds=sum(part.rounds for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        drafted_by_position=_sums(part.drafted_by_position for part in parts),
        accepted_by_position=_sums(part.accepted_by_position for part in parts),
        drafters=dict(sorted(drafters.items())),
        depths=tuple((depth, sum(rounds for _, rounds in same)) for depth, same in groupby(windows, itemgetter(0))),
    )


def _sums(rows: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*rows, fillvalue=0))


def details(model: str, load_s: float, device: str, outputs: Sequence[Output]) -> list[str]:
    """What -v adds: the load and the prompts, then where the time went and how deep the windows were."""
    timings = [output.timings for output in outputs]
    prompt, cached = (sum(getattr(one, name) for one in timings) for name in ("prompt_tokens", "cached_tokens"))
    prefill_s = sum(one.prefill_s for one in timings)
    speed = (prompt - cached) / prefill_s if prefill_s else 0.0
    found = f" ({cached} cached)" if cached else ""
    seconds = [(name[:-2], statistics.fmean(getattr(one, name) for one in timings)) for name in SECONDS]
    spent = ", ".join(f"{name} {mean:.3f} s" for name, mean in seconds)
    return [
        f"{model} on {device}, loaded in {load_s:.2f} s, prompt {count(prompt, 'token')}{found} at {speed:.1f} tok/s",
        f"{'an answer on average: ' if len(outputs) > 1 else ''}{spent}{_windows(outputs)}",
    ]


def _windows(outputs: Sequence[Output]) -> str:
    """Windows by the number of drafts in them."""
    counted: Counter[int] = Counter()
    for depth, rounds in chain.from_iterable(output.speculative.depths for output in outputs):
        counted[depth] += rounds
    told = " ".join(f"{depth}x{rounds}" for depth, rounds in sorted(counted.items()))
    return f", depths {told}" if told else ""


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
