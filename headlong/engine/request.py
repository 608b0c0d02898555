"""All that crosses rings: what is asked, what a step is told to do, and what comes back. Plain data, no tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headlong.errors import UserError
from headlong.settings import AUTO_DEPTH, MAX_DEPTH

LOWEST_TEMPERATURE = 1e-5  # below it scores overflow


@dataclass(frozen=True)
class Sampling:
    """The sampling chain, in the order it is applied. The defaults are greedy decoding.

    Repetition penalty counts the prompt and the output; presence and frequency count the output alone.
    With a seed the text is a function of the request; without one it is drawn from the same distribution.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}."
            )
        _whole("top_k", self.top_k)
        _within("top_k", self.top_k, 0, math.inf)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _within("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for token, bias in self.logit_bias.items():
            _whole("a token of logit_bias", token)
            _within(f"logit_bias of token {token}", bias, -1e4, 1e4)
        if self.top_p == 0.0:
            raise UserError("top_p is 0; it must be above 0 (use temperature 0 for greedy decoding).")
        if self.seed is not None:
            _whole("seed", self.seed)
            if not 0 <= self.seed < 2**63:
                raise UserError(f"seed is {self.seed}; it must be between 0 and {2**63 - 1}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _whole(name: str, value: object) -> None:
    if not isinstance(value, int):
        raise UserError(f"{name} is {value!r}; it must be a whole number.")


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise UserError(f"{name} is {value}; it must be {bound}.")


@dataclass(frozen=True)
class Request:
    """One sequence to produce."""

    prompt: str | Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    depth: int | None = None  # drafts a round; None: chosen for you
    draft: bool = True  # False: plain decoding, in the same rounds as everyone else
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens)
        if self.depth is not None:
            _whole("depth", self.depth)
        stop: object = self.stop  # callers without a type checker give a bare string
        if not isinstance(stop, tuple) or not all(isinstance(text, str) for text in stop):
            raise UserError(f"stop is {stop!r}; it must be a tuple of strings.")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if self.depth is not None and not 0 <= self.depth <= MAX_DEPTH:
            raise UserError(f"depth is {self.depth}; it must be auto or between 0 and {MAX_DEPTH}.")
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty; give at least one character or leave it out.")

    @property
    def drafts_a_round(self) -> int:
        if not self.draft:
            return 0
        return AUTO_DEPTH if self.depth is None else self.depth


# --- engine to backend -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What an opened backend can hold."""

    rows: int
    context: int
    page: int
    chunk: int
    pages: int  # pages that may be handed to rows; their ids are 0 .. pages - 1
    vocab: int
    depth: int  # most drafts a round; 0 when nothing can draft
    drafter: str  # "mtp" or "none"
    no_draft_reason: str  # why drafter is "none"; empty otherwise
    device: str = ""  # where and in which type it runs, for people to read


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt for one row. Chunks start at multiples of the chunk length."""

    row: int
    start: int
    tokens: Sequence[int]
    after: int  # the prompt token that follows the chunk: the head learns pairs (hidden i, token i + 1)
    pages: Sequence[int]  # pages the row gains with this chunk
    draft: int = 0  # drafts to leave for the row's first round; 0 except in the last chunk


@dataclass(frozen=True)
class RowPlan:
    """One row's part in a round."""

    row: int
    verify: int  # drafts of the last round that stand in this round's window
    draft: int  # drafts to leave for the next round
    pages: Sequence[int] = ()  # pages the row gains now


@dataclass(frozen=True)
class Kept:
    """What a round gave one row."""

    row: int
    tokens: tuple[int, ...]  # between 1 and verify + 1; all but the last were drafts
    verified: int


# --- engine to people --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """One token of one request, with the text it completes (often a piece, sometimes nothing yet).

    When an end token ends a request it comes as the last one here; `Output.tokens` leaves it out.
    """

    index: int
    token: int
    text: str
    drafted: bool  # it was a draft that the target agreed with
    finish_reason: str | None = None  # "stop" or "length" on the last one


@dataclass(frozen=True)
class Speculative:
    """What drafting did for one request."""

    requested: str
    used: str
    reason: str
    depth: int
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]

    @property
    def mean_length(self) -> float:
        """Tokens a round: 1 + accepted drafts / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Timings:
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    tokens: int

    @property
    def prompt_tps(self) -> float:
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Output:
    """One finished request."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    speculative: Speculative
    timings: Timings
