"""What answers cost and what drafting did for them, in the words of the APIs."""

from collections.abc import Sequence
from typing import Any

from headlong.engine.request import Output
from headlong.engine.stats import combine
from headlong.server.events import Finish

MS = 1000.0


def outputs_of(finishes: Sequence[Finish]) -> list[Output]:
    return [finish.output for finish in sorted(finishes, key=lambda finish: finish.choice)]


def prompt_outputs(outputs: Sequence[Output], prompts: int) -> Sequence[Output]:
    """One output for each prompt: the answers to one share it."""
    return outputs[:: max(1, len(outputs) // prompts)]


def usage(finishes: Sequence[Finish], prompts: int) -> dict[str, Any]:
    """Tokens, as OpenAI counts them."""
    outputs = outputs_of(finishes)
    asked = sum(output.prompt_tokens for output in prompt_outputs(outputs, prompts))
    given = sum(len(output.tokens) for output in outputs)
    predicted = [output.speculative.drafters.get("prediction", (0, 0)) for output in outputs]
    accepted = sum(kept for _, kept in predicted)
    return {
        "prompt_tokens": asked,
        "completion_tokens": given,
        "total_tokens": asked + given,
        "prompt_tokens_details": {"cached_tokens": cached(finishes, prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(finish.reasoning_tokens for finish in finishes),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(drafted for drafted, _ in predicted) - accepted,
        },
    }


def cached(finishes: Sequence[Finish], prompts: int) -> int:
    return sum(output.timings.cached_tokens for output in prompt_outputs(outputs_of(finishes), prompts))


def speculative(finishes: Sequence[Finish]) -> dict[str, Any]:
    total = combine([output.speculative for output in outputs_of(finishes)])
    names = ("requested", "used", "reason", "depth", "rounds", "drafted", "accepted")
    return {
        **{name: getattr(total, name) for name in names},
        "drafted_by_position": list(total.drafted_by_position),
        "accepted_by_position": list(total.accepted_by_position),
        "mean_length": total.mean_length,
    }


def timings(finishes: Sequence[Finish]) -> dict[str, Any]:
    """Milliseconds, under llama.cpp's names. Answers run side by side, so several take as long as the longest."""
    outputs = outputs_of(finishes)
    all_timings = [output.timings for output in outputs]
    longest = max(all_timings, key=lambda one: one.decode_s)
    prompt_n = sum(one.prompt_tokens - one.cached_tokens for one in all_timings)
    prompt_s = sum(one.prefill_s for one in all_timings)
    predicted_n = sum(one.tokens for one in all_timings)
    return {
        "queue_ms": max(one.queue_s for one in all_timings) * MS,
        "cache_n": sum(one.cached_tokens for one in all_timings),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_s * MS,
        "prompt_per_second": prompt_n / prompt_s if prompt_s else 0.0,
        "predicted_n": predicted_n,
        "predicted_ms": longest.decode_s * MS,
        "predicted_per_second": predicted_n / longest.decode_s if longest.decode_s else 0.0,
        "verify_ms": longest.verify_s * MS,
        "draft_ms": longest.draft_s * MS,
        "host_ms": longest.host_s * MS,
        "draft_n": sum(output.speculative.drafted for output in outputs),
        "draft_n_accepted": sum(output.speculative.accepted for output in outputs),
    }
