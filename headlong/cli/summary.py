"""Answers in numbers: the line of figures, what -v adds to it, and the record that --json prints."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain, takewhile
from typing import Any

from headlong.engine.request import Output, Speculative
from headlong.engine.stats import combine

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


def verdict(plain: Output, drafted: Output) -> str:
    """How two answers to one prompt compare."""
    both = plain.timings.decode_tps, drafted.timings.decode_tps
    speed = f"{both[1] / both[0]:.2f} times as fast with drafts" if all(both) else "too short to compare speeds"
    if plain.text == drafted.text:
        return f"{speed}, identical text"
    pairs = zip(plain.text, drafted.text, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return f"{speed}, but the texts differ from character {same + 1} on"


def details(model: str, load_s: float, device: str, outputs: Sequence[Output]) -> list[str]:
    """What -v adds: the load and the prompts, then where the time went and how deep the windows were."""
    prompts, seconds = spent(outputs)
    return [f"{model} on {device}, loaded in {load_s:.2f} s, {prompts}", seconds]


def spent(outputs: Sequence[Output]) -> list[str]:
    """What the prompts took, then where the time went and how deep the windows were."""
    timings = [output.timings for output in outputs]
    prompt, cached = (sum(getattr(one, name) for one in timings) for name in ("prompt_tokens", "cached_tokens"))
    prefill_s = sum(one.prefill_s for one in timings)
    speed = (prompt - cached) / prefill_s if prefill_s else 0.0
    found = f" ({cached} cached)" if cached else ""
    seconds = [(name[:-2], statistics.fmean(getattr(one, name) for one in timings)) for name in SECONDS]
    shown = ", ".join(f"{name} {mean:.3f} s" for name, mean in seconds)
    return [
        f"prompt {count(prompt, 'token')}{found} at {speed:.1f} tok/s",
        f"{'an answer on average: ' if len(outputs) > 1 else ''}{shown}{_windows(outputs)}",
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
