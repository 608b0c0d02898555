"""What people ask for, made into requests that can run, or refused with the reason."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict

from headlong.engine.answer import Answer
from headlong.engine.depth import DepthController
from headlong.engine.proposals import Ngram, Prediction, Proposer
from headlong.engine.request import CONSTRAINTS, Constraint, Limits, Request, Sampling, is_sequence, is_whole
from headlong.engine.scene import HEAD
from headlong.engine.scheduler import Job, pages_for
from headlong.engine.stats import Counts, drafters_of, plain_reason
from headlong.engine.totals import Totals
from headlong.engine.windows import Drafting
from headlong.errors import UserError
from headlong.settings import Settings

if TYPE_CHECKING:
    from headlong.engine.constraint import Grammars, Guide
    from headlong.engine.text import Text

Prompt = str | Sequence[int]

SAMPLING_NAMES = tuple(field.name for field in fields(Sampling))
OWN_NAMES = ("prompt", "sampling", "constraint")  # of a request, made here from what is asked
REQUEST_NAMES = tuple(field.name for field in fields(Request) if field.name not in OWN_NAMES)
MOST_COMPLETIONS = 128


class Options(TypedDict, total=False):
    """The fields of `Request` and `Sampling` by name; their defaults and meaning are there. None is the default too.

    `n` asks for several answers to each prompt; the i-th of a seeded request is the one that seed + i gives.
    One of the four constraints says what a text must be: a JSON schema (an object, or its JSON), a regular expression,
    one of several texts, or a Lark grammar.
    """

    n: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    ignore_eos: bool
    logprobs: int | None
    json_schema: str | bool | Mapping[str, Any] | None
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None
    depth: int | None
    draft_kind: str
    prediction: str | Sequence[int] | None
    priority: int
    deadline_s: float | None
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
    return not is_sequence(prompts) or (len(prompts) > 0 and is_whole(prompts[0]))


def one_answer(prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> bool:
    return one_prompt(prompts) and options.get("n") in (None, 1)


def requests_from(prompts: Prompt | Sequence[Prompt], options: Mapping[str, Any]) -> list[Request]:
    """The requests for every prompt, all with the same options; `n` for each, one after the other."""
    known = (*REQUEST_NAMES, *CONSTRAINTS, "n", *SAMPLING_NAMES)
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise UserError(f"{', '.join(unknown)} is not an option of a request; those are {', '.join(known)}.")
    given = {name: value for name, value in options.items() if value is not None}
    sampling = Sampling(**{name: value for name, value in given.items() if name in SAMPLING_NAMES})
    rest = {name: value for name, value in given.items() if name in REQUEST_NAMES}
    stop = rest.pop("stop", ())
    rest["stop"] = (stop,) if isinstance(stop, str) else tuple(stop) if is_sequence(stop) else stop
    rest["constraint"] = constraint_from({name: given[name] for name in CONSTRAINTS if name in given})
    count = given.get("n", 1)
    if not is_whole(count) or not 1 <= count <= MOST_COMPLETIONS:
        raise UserError(f"n is {count!r}; it must be a whole number between 1 and {MOST_COMPLETIONS}.")
    each: Sequence[Any] = [prompts] if one_prompt(prompts) else prompts
    samplings = [_seeded(sampling, place) for place in range(count)]
    return [Request(prompt, sampling=one, **rest) for prompt in each for one in samplings]


def _seeded(sampling: Sampling, place: int) -> Sampling:
    return sampling if sampling.seed is None else replace(sampling, seed=(sampling.seed + place) % 2**63)


def constraint_from(given: Mapping[str, Any]) -> Constraint | None:
    """The one constraint among `json_schema`, `regex`, `choice` and `grammar`, if there is one."""
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} were given; a text can have one constraint: leave the others out.")
    for kind, source in given.items():
        if kind == "json_schema" and not isinstance(source, str):
            return Constraint(kind, _as_json(source))
        return Constraint(kind, source)
    return None


def _as_json(schema: object) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"json_schema is not JSON ({error}); it must be an object, or its JSON as a text.") from error


class Intake:
    """Checks requests against one engine, and makes of them what runs."""

    def __init__(
        self,
        text: "Text",
        limits: Limits,
        settings: Settings,
        eos: Collection[int],
        depths: DepthController,
        totals: Totals,
    ) -> None:
        self.text, self.limits, self.settings = text, limits, settings
        self.eos, self.depths, self.totals = eos, depths, totals
        self._grammars: Grammars | None = None
        self._compiling = Lock()

    def accept(self, request: Request, index: int, since: float) -> Answer:
        """Of what was asked for at `since`; tokenizing and compiling are part of its wait."""
        prompt = prompt_ids("the prompt", request.prompt, self.text)
        refuse_unfit(request, prompt, self.limits)
        drafting = self._drafting(request, prompt)
        reason = plain_reason(request, self.limits, self.settings)
        requested = self.settings.draft_kind if request.draft_kind == "auto" else request.draft_kind
        job = Job(
            index,
            prompt,
            request.max_tokens,
            drafting,
            priority=request.priority,
            sampled=not _is_greedy(request),
        )
        counts = Counts(self._asked(request), requested, reason, lambda: drafting.depth.why, self.totals)
        return Answer(request, job, counts, self.text.decoder(prompt), self.eos, since)

    def _drafting(self, request: Request, prompt: tuple[int, ...]) -> Drafting:
        guide, prediction = self._guide(request), self._prediction(request)
        if plain_reason(request, self.limits, self.settings):
            return Drafting(self.depths.row(0), guide=guide)
        drafters = drafters_of(request, self.limits, self.settings)
        proposers: list[Proposer] = []
        if "ngram" in drafters:
            proposers.append(Ngram(prompt))
        if "prediction" in drafters and prediction is not None:
            proposers.append(Prediction(prediction))
        drawn = request.sampling.seed is None and not request.sampling.greedy
        # A grammar rules drafts out, however sure the head is. And under the rejection rule what was drawn must not
        # decide where a window ends, but how sure the head is of a draft depends on those before it.
        depth = self.depths.row(self._asked(request), sifted=not (guide or drawn))
        return Drafting(depth, HEAD in drafters, proposers, guide, drawn)

    def _asked(self, request: Request) -> int | None:
        return None if request.depth is None else min(request.depth, self.limits.depth)

    def _prediction(self, request: Request) -> tuple[int, ...] | None:
        """The tokens expected, checked even where nobody drafts them."""
        if request.prediction is None:
            return None
        tokens = prompt_ids("the prediction", request.prediction, self.text)
        _refuse_strange_ids("the prediction", tokens, self.limits)
        return tokens

    def _guide(self, request: Request) -> "Guide | None":
        if request.constraint is None:
            return None
        with self._compiling:
            if self._grammars is None:
                from headlong.engine.constraint import Grammars

                self._grammars = Grammars(self.text.to_json(), self.limits.vocab, self.eos)
        return self._grammars.compile(request.constraint, request.min_tokens)


def _is_greedy(request: Request) -> bool:
    sampling = request.sampling
    return replace(sampling, seed=None) == Sampling() and request.constraint is None


def prompt_ids(what: str, given: str | Sequence[int], text: "Text") -> tuple[int, ...]:
    if isinstance(given, str):
        return tuple(text.encode(given))
    strangers = [token for token in given if not is_whole(token)]
    if strangers:
        raise UserError(f"{what} holds {strangers[0]!r}; it must be text or a sequence of token ids.")
    return tuple(int(token) for token in given)


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
    pages = pages_for(count, wanted, limits)
    if pages > limits.pages:
        raise UserError(
            f"the request may need {pages} pages of {limits.page} tokens and the cache has {limits.pages}; "
            "ask for fewer tokens or shorten the prompt."
        )


def longest_answer(prompt: int, limits: Limits) -> int:
    """The most tokens that may be asked for after a prompt of so many."""
    held = limits.pages * limits.page  # with the drafts of the last round, unless the context ends before
    most = limits.context if held >= limits.context else held - limits.depth
    return max(0, most - prompt)


def _refuse_strange_ids(where: str, tokens: Sequence[int], limits: Limits) -> None:
    strange = next((token for token in tokens if not 0 <= token < limits.vocab), None)
    if strange is not None:
        raise UserError(f"{where} holds token {strange}; the model's tokens are 0 to {limits.vocab - 1}.")
