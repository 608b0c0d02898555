"""All that crosses rings: what is asked, what a step is told to do, and what comes back. Plain data, no tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from headlong.errors import UserError
from headlong.settings import MAX_DEPTH, REQUEST_DRAFT_KINDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")
MOST_LOGPROBS = 20
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
        _check_kinds(self)
        _within("temperature", self.temperature, 0.0, 100.0)
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise UserError(
                f"temperature is {self.temperature}; it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}."
            )
        _within("top_k", self.top_k, 0, math.inf)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _within("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _within("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _within("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        for token, bias in self.logit_bias.items():
            _within(f"logit_bias of token {token}", bias, -1e4, 1e4)
        if self.top_p == 0.0:
            raise UserError("top_p is 0; it must be above 0 (use temperature 0 for greedy decoding).")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must be between 0 and {2**63 - 1}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise UserError(f"{name} is {value}; it must be {bound}.")


@dataclass(frozen=True)
class Constraint:
    """What a text must be, as one of four kinds."""

    kind: str  # one of CONSTRAINTS
    source: str | Sequence[str]  # "choice" has several texts, the others (a "grammar" is Lark's) one

    def __post_init__(self) -> None:
        if self.kind not in CONSTRAINTS:
            raise UserError(f"the constraint's kind is {self.kind!r}; it must be one of {', '.join(CONSTRAINTS)}.")
        if self.kind != "choice":
            if not isinstance(self.source, str):
                raise UserError(f"{self.kind} is {self.source!r}; it must be a text.")
        elif not is_sequence(self.source) or not all(isinstance(text, str) for text in self.source):
            raise UserError(f"choice is {self.source!r}; it must be a list of texts.")
        else:
            object.__setattr__(self, "source", tuple(self.source))


@dataclass(frozen=True)
class Request:
    """One sequence to produce."""

    prompt: str | Sequence[int]
    max_tokens: int = 256
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    min_tokens: int = 0  # neither an end token nor a stop string ends the text before
    ignore_eos: bool = False
    constraint: Constraint | None = None
    logprobs: int | None = None  # likeliest tokens told beside each token; 0: the token's own logprob alone
    depth: int | None = None  # drafts a round; None: chosen for you
    draft_kind: str = "auto"  # "none": plain decoding, in the same rounds as everyone else
    prediction: str | Sequence[int] | None = None  # a text the answer is expected to resemble
    priority: int = 0  # the higher, the sooner it gets a row
    deadline_s: float | None = None  # seconds after submission at which it ends, complete or not

    def __post_init__(self) -> None:
        _check_kinds(self)
        if any(not text for text in self.stop):
            raise UserError("a stop string is empty; give at least one character or leave it out.")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens is {self.max_tokens}; it must be at least 1.")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise UserError(f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens, {self.max_tokens}.")
        if self.constraint is not None and self.ignore_eos:
            raise UserError("ignore_eos was given with a constraint, whose text must be able to end; leave one out.")
        if self.logprobs is not None:
            _within("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.deadline_s is not None:
            _within("deadline_s", self.deadline_s, 0.0, math.inf)
        self._check_drafting()

    def _check_drafting(self) -> None:
        if self.depth is not None and not 0 <= self.depth <= MAX_DEPTH:
            raise UserError(f"depth is {self.depth}; it must be auto or between 0 and {MAX_DEPTH}.")
        if self.draft_kind not in REQUEST_DRAFT_KINDS:
            raise UserError(f"draft_kind is {self.draft_kind!r}; it must be one of {', '.join(REQUEST_DRAFT_KINDS)}.")
        if self.draft_kind == "prediction" and self.prediction is None:
            raise UserError("draft_kind is 'prediction' and no prediction was given; give one or leave draft_kind out.")


# --- what fields hold, for callers without a type checker --------------------------------------------------------


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)  # numpy's integers are not int


def is_sequence(value: object) -> bool:
    """Whether it is things in order, an array's too, rather than text or bytes."""
    if isinstance(value, str | bytes | bytearray | memoryview):
        return False
    return isinstance(value, Sequence) or bool(getattr(value, "ndim", 0))


class Kind(NamedTuple):
    """What a field of some annotation holds: in words, how it is told, and how it is kept."""

    wanted: str
    holds: Callable[[Any], bool]
    kept: Callable[[Any], Any] = lambda value: value

    def of(self, name: str, value: object) -> Any:
        if not self.holds(value):
            raise UserError(f"{name} is {value!r}; it must be {self.wanted}.")
        return self.kept(value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of a whole number
        return math.inf if value > 0 else -math.inf


def _biases(given: Mapping[Any, Any]) -> dict[int, float]:
    return {
        WHOLE.of("a token of logit_bias", token): NUMBER.of(f"logit_bias of token {token}", bias)
        for token, bias in given.items()
    }


WHOLE = Kind("a whole number", is_whole, int)
NUMBER = Kind("a number", lambda value: isinstance(value, Real) and not isinstance(value, bool), _float)
KINDS: dict[Any, Kind] = {
    bool: Kind("True or False", lambda value: isinstance(value, bool)),
    int: WHOLE,
    float: NUMBER,
    str: Kind("a text", lambda value: isinstance(value, str)),
    str | Sequence[int]: Kind(
        "text or a sequence of token ids", lambda value: isinstance(value, str) or is_sequence(value)
    ),
    tuple[str, ...]: Kind(
        "a tuple of strings",
        lambda value: isinstance(value, tuple) and all(isinstance(text, str) for text in value),
    ),
    Mapping[int, float]: Kind("a mapping of token ids to numbers", lambda value: isinstance(value, Mapping), _biases),
    Sampling: Kind("a Sampling", lambda value: isinstance(value, Sampling)),
    Constraint: Kind("a Constraint", lambda value: isinstance(value, Constraint)),
}
KINDS |= {annotation | None: kind for annotation, kind in KINDS.items()}


def _check_kinds(given: Sampling | Request) -> None:
    """Every field holds what its annotation says, numpy's numbers as Python's. None only where it is the default."""
    for each in fields(given):
        value = getattr(given, each.name)
        if value is not None or each.default is not None:
            object.__setattr__(given, each.name, KINDS[each.type].of(each.name, value))


# --- engine to backend -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """What a round is run as. Without buckets every row costs what it brings. With them all windows are as wide as the
    widest, all rows draft as often as the deepest, and there are as many as the next bucket has."""

    buckets: tuple[int, ...] = ()  # of rows

    @property
    def padded(self) -> bool:
        return bool(self.buckets)

    def rows(self, count: int) -> int:
        """That so many rows are run as."""
        return next((size for size in self.buckets if count <= size), count)

    def tokens(self, verify: Sequence[int]) -> int:
        """In all windows together, by the drafts that each row has."""
        if self.padded:
            return self.rows(len(verify)) * (1 + max(verify))
        return len(verify) + sum(verify)

    def growing(self, verify: Sequence[int], places: Sequence[int]) -> list[int]:
        """The same, and again after each of these places got one more draft."""
        first = self.tokens(verify)
        if not self.padded:
            return list(range(first, first + len(places) + 1))
        counts, sizes = list(verify), [first]
        for place in places:
            counts[place] += 1
            sizes.append(max(sizes[-1], self.rows(len(verify)) * (1 + counts[place])))
        return sizes

    def steps(self, draft: Sequence[int]) -> list[int]:
        """Rows in each of the head's steps, by the drafts that each row is to have next."""
        depth = max(draft)
        if self.padded:
            return [self.rows(len(draft))] * depth
        return [sum(each > step for each in draft) for step in range(depth)]


RAGGED = Sizes()


@dataclass(frozen=True)
class Limits:
    """What an opened backend can hold."""

    rows: int
    context: int
    page: int
    chunk: int
    pages: int  # pages that may be handed to rows; their ids are 0 .. pages - 1
    vocab: int
    depth: int  # most drafts a round, whoever makes them
    drafter: str  # what the backend itself drafts with: "mtp" or "none"
    no_draft_reason: str  # why drafter is "none"; empty otherwise
    depths: tuple[int, ...] = ()  # to choose from where nobody asked for one; all, if none are named
    sizes: Sizes = RAGGED  # what rounds are run as
    page_bytes: int = 0  # of one page in all layers
    overlaps: bool = False  # whether the host is free while a round runs
    pieces: int = 1  # that a chunk can be run in, its bits the same
    device: str = ""  # where and in which type it runs, for people to read


class Saved(Protocol):
    """A row's memory kept aside by a backend; the engine only holds it, counts its bytes and hands it back."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Start:
    """A row's beginning. With `saved`, its first `length` positions are in the cache already, in `pages`."""

    row: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int  # the request's own, or one drawn for it when sampling.seed is None
    quiet: tuple[int, ...] = ()  # tokens that may not come among the first `min_tokens`
    min_tokens: int = 0
    logprobs: int | None = None
    masked: bool = False  # every round brings masks
    follows: bool = True  # the head keeps up with the row, so that it can draft
    length: int = 0
    pages: Sequence[int] = ()
    saved: Saved | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a prompt for one row. Chunks start at multiples of the chunk length."""

    row: int
    start: int
    tokens: Sequence[int]
    after: int  # the prompt token that follows the chunk: the head learns pairs (hidden i, token i + 1)
    pages: Sequence[int]  # pages the row gains with this chunk
    draft: int = 0  # drafts to leave for the row's first round; 0 except in the last chunk


class RowPlan(NamedTuple):
    """One row's part in a round. A tuple, as all that rows have made anew in every round: those take least time."""

    row: int
    verify: int  # drafts that stand in this round's window
    draft: int  # drafts the backend is to leave for the next round
    pages: Sequence[int] = ()  # pages the row gains now
    drafts: tuple[int, ...] | None = None  # the window's drafts; None: the first of those the last round left
    masks: "Callable[[], NDArray[np.int32]] | None" = None  # [verify + 1, ceil(vocab / 32)] bits of tokens allowed
    least: float = 0.0  # chance to be kept that a draft must have to be left, where the backend can tell; 0: any


@dataclass(frozen=True)
class Logprob:
    """How likely the model itself, before the sampling chain, found a token, and its likeliest ones."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Kept(NamedTuple):
    """What a round gave one row."""

    row: int
    tokens: tuple[int, ...]  # between 1 and verify + 1; all but the last were drafts
    verified: int
    left: tuple[int, ...] = ()  # drafts left for the next round
    logprobs: tuple[Logprob, ...] = ()  # one a token, where they were asked for
    late: int = 0  # tokens of it that the head has yet to take in, at most


@dataclass(frozen=True)
class RoundResult:
    """What a round gave, and the seconds of its two halves."""

    kept: list[Kept]
    verify_s: float = 0.0
    draft_s: float = 0.0
    cold: bool = False  # it took longer than the next ones like it will
    cold_drafts: bool = False  # its drafts did
    prompt_s: float = 0.0  # of the chunks since the round before, where a device runs them behind the host
    late: int = 0  # tokens of earlier rounds that the head took in
    late_s: float = 0.0  # that part of draft_s
    steps: Sequence[int] | None = None  # rows in each of the head's steps, where it may have made fewer than planned


# --- engine to people --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emitted:
    """One token of one request, with the text it completes (often a piece, sometimes nothing yet).

    When an end token ends a request it comes as the last one here; `Output.tokens` leaves it out. A request that ends
    without a token (cancelled, past its deadline, refused by a fault) ends with token None.
    """

    index: int
    token: int | None
    text: str
    position: int  # of the draft in its round that the target agreed with, from 1; 0: the target's own token
    finish_reason: str | None = None  # on the last one: "stop", "length", "cancelled", "deadline" or "fault"
    logprob: Logprob | None = None
    output: "Output | None" = None  # on the last one of a stream: all that the request gave

    @property
    def drafted(self) -> bool:
        return self.position > 0


@dataclass(frozen=True)
class Speculative:
    """What drafting did for one request."""

    requested: str
    used: str  # the drafters whose proposals stood in windows, joined by "+"; "none"
    reason: str  # why nothing, or nothing any more, was drafted
    depth: int  # the asked depth, or the deepest of those chosen
    rounds: int
    drafted: int
    accepted: int
    drafted_by_position: tuple[int, ...]
    accepted_by_position: tuple[int, ...]
    drafters: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # drafted and accepted by each
    depths: tuple[tuple[int, int], ...] = ()  # windows in order: drafts in them, and how many such in a row

    @property
    def mean_length(self) -> float:
        """Tokens a round: 1 + accepted drafts / rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class Timings:
    """Seconds of one request. Those of calls that it shared with others are counted whole."""

    prefill_s: float
    decode_s: float  # from the first round to the last, waits for other prompts' chunks included
    prompt_tokens: int
    tokens: int
    queue_s: float = 0.0
    verify_s: float = 0.0
    draft_s: float = 0.0
    host_s: float = 0.0  # planning, recording and text
    cached_tokens: int = 0  # of the prompt, found in the prefix cache

    @property
    def prompt_tps(self) -> float:
        """Of the prompt tokens that were not cached."""
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tps(self) -> float:
        return self.tokens / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Output:
    """One finished request."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str  # empty while more may come
    prompt_tokens: int
    speculative: Speculative
    timings: Timings
    logprobs: tuple[Logprob, ...] = ()
    stopped_by: str = ""  # the stop string that ended it, if one did
    error: str = ""  # what went wrong where finish_reason is "fault"
