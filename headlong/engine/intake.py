"""What people ask for, made into requests that can run, or refused with the reason."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict

from headlong.engine.request import Limits, Request, Sampling
from headlong.engine.scheduler import pages_for
from headlong.engine.stats import depth_of
from headlong.errors import UserError

if TYPE_CHECKING:
    from headlong.engine.text import Text

Prompt = str | Sequence[int]

SAMPLING_NAMES = tuple(field.name for field in fields(Sampling))
REQUEST_NAMES = tuple(field.name for field in fields(Request) if field.name not in ("prompt", "sampling"))


class Options(TypedDict, total=False):
    """The fields of `Request` and `Sampling` by name; their defaults and meaning are there."""

    max_tokens: int
    stop: str | Sequence[str]
    depth: int | None
    draft: bool
    ignore_eos: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None


def one_prompt(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a prompt of its own, text or token ids, rather than a list of them."""
    return isinstance(prompts, str) or (len(prompts) > 0 and _is_id(prompts[0]))


def requests_from(prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> list[Request]:
    """One request for every prompt, all with the same options."""
    unknown = sorted(set(options) - set(REQUEST_NAMES) - set(SAMPLING_NAMES))
    if unknown:
        known = ", ".join(REQUEST_NAMES + SAMPLING_NAMES)
        raise UserError(f"{', '.join(unknown)} is not an option of a request; those are {known}.")
    sampling = Sampling(**{name: value for name, value in options.items() if name in SAMPLING_NAMES})
    rest = {name: value for name, value in options.items() if name in REQUEST_NAMES}
    stop = rest.pop("stop", ())
    rest["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    each: Sequence[Any] = [prompts] if one_prompt(prompts) else prompts
    return [Request(prompt, sampling=sampling, **rest) for prompt in each]


def _is_id(token: object) -> bool:
    return isinstance(token, Integral)  # numpy's integers are not int


def prompt_ids(request: Request, text: "Text") -> tuple[int, ...]:
    if isinstance(request.prompt, str):
        return tuple(text.encode(request.prompt))
    strangers = [token for token in request.prompt if not _is_id(token)]
    if strangers:
        raise UserError(f"the prompt holds {strangers[0]!r}; a prompt is text or a sequence of token ids.")
    return tuple(int(token) for token in request.prompt)


def refuse_unfit(request: Request, prompt: Sequence[int], limits: Limits) -> None:
    """Raise the reason why a request can never run here, if there is one."""
    count, wanted = len(prompt), request.max_tokens
    if not prompt:
        raise UserError("the prompt has no tokens; give at least one.")
    _refuse_strange_ids("the prompt", prompt, limits)
    _refuse_strange_ids("logit_bias", tuple(request.sampling.logit_bias), limits)
    if count >= limits.context:
        raise UserError(
            f"the prompt has {count} tokens and the context {limits.context}, which must also hold the answer; "
            "shorten the prompt or load the model with a longer context."
        )
    if count + wanted > limits.context:
        raise UserError(
            f"the prompt has {count} tokens and max_tokens is {wanted}, together more than the context of "
            f"{limits.context}; ask for at most {limits.context - count} or load the model with a longer context."
        )
    pages = pages_for(count, wanted, depth_of(request, limits), limits)
    if pages > limits.pages:
        raise UserError(
            f"the request may need {pages} pages of {limits.page} tokens and the cache has {limits.pages}; "
            "ask for fewer tokens or shorten the prompt."
        )


def _refuse_strange_ids(where: str, tokens: Sequence[int], limits: Limits) -> None:
    strange = next((token for token in tokens if not 0 <= token < limits.vocab), None)
    if strange is not None:
        raise UserError(f"{where} holds token {strange}; the model's tokens are 0 to {limits.vocab - 1}.")
