"""Texts that must be something: a JSON schema, a regular expression, choices or a grammar say which tokens may come."""

import json
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from headlong.engine.request import Constraint
from headlong.engine.spelling import spellings
from headlong.errors import Fault, UserError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

# A space, or a new line and its indentation. llguidance's own whitespace has no end, and models get lost in it.
WHITESPACE = r" |\n[ \t]{0,32}"
WHITESPACE_OPTIONS = {"whitespace_pattern", "whitespace_flexible"}
LONGEST_REASON = 200
NAMES = {"json_schema": "JSON schema", "regex": "regex", "choice": "choice list", "grammar": "Lark grammar"}
ADVICE = {
    "json_schema": "give a JSON object, without keywords that are not supported",
    "regex": "write it in the syntax of Rust's regex, without look-around and back-references",
    "choice": "give at least one text, and no empty one",
    "grammar": "write it in llguidance's Lark syntax, without stop= and max_tokens=",
}


class Grammars:
    """Compiles constraints for one tokenizer. Takes a second with a large one, so make it when it is first needed.

    Several threads may compile at once.
    """

    def __init__(self, tokenizer_json: str, vocab: int, eos: Collection[int]) -> None:
        """`vocab` counts the rows of the model's head, which may be more than the tokenizer has tokens."""
        from llguidance import LLExecutor, LLTokenizer, TokenizerWrapper

        speller = _Speller(Tokenizer.from_str(tokenizer_json))
        known = sorted(token for token in set(eos) if token < len(speller.tokens))
        if not known:
            raise UserError(
                f"the tokenizer knows none of the model's end tokens ({sorted(eos)}), so a constrained text could not"
                " end; leave the constraint out."
            )
        if len(speller.tokens) > vocab:
            raise UserError(
                f"the tokenizer has {len(speller.tokens)} tokens and the model's head {vocab}; leave the constraint"
                " out, or use the tokenizer that belongs to the model."
            )
        speller.eos_token_id = known[0]
        self._tokenizer = LLTokenizer(TokenizerWrapper(speller), eos_token=known)
        self._executor = LLExecutor(num_threads=1)
        self._head = _Head(len(speller.tokens), vocab, eos)

    def compile(self, constraint: Constraint, min_tokens: int = 0) -> "Guide":
        """A guide at the beginning of its text; a UserError says why there is none."""
        from llguidance import LLMatcher

        kind = constraint.kind
        try:
            matcher = LLMatcher(self._tokenizer, _grammar(constraint), log_level=0)
        except (ValueError, RecursionError) as error:
            raise _refusal(kind, str(error)) from error
        guide = Guide(matcher, self._executor, self._head, min_tokens)
        try:
            guide.rehearse()
        except Fault as fault:
            raise _refusal(kind, matcher.get_error()) from fault
        return guide


class Guide:
    """One request's way through its grammar. For one thread at a time.

    What is allowed after some tokens depends on these tokens alone, not on how they came or what was asked before.
    """

    def __init__(self, matcher: "LLMatcher", executor: "LLExecutor", head: "_Head", min_tokens: int) -> None:
        """No end token comes before so many others, unless nothing else may."""
        self._matcher = matcher
        self._executor = executor
        self._head = head
        self._over = False  # nothing but end tokens may follow
        self._sure: tuple[int, ...] = ()  # the next tokens, as far as they are known to be the only choice
        self._written = 0  # tokens of the text
        self._min_tokens = min_tokens

    @property
    def complete(self) -> bool:
        """Whether nothing but an end token may follow."""
        return self._over

    def accept(self, tokens: Sequence[int]) -> None:
        """Go on by tokens that became part of the text, an end token included."""
        text = self._before_end(tokens)
        if text and (self._over or not self._matcher.consume_tokens(text)):
            raise Fault(f"the constraint does not allow the tokens {text} ({_reason(self._matcher.get_error())}).")
        goes_on = self._sure[: len(text)] == tuple(text)
        self._sure = self._sure[len(text) :] if goes_on else ()
        self._written += len(text)
        self._over = self._over or len(text) < len(tokens) or self._matcher.is_stopped()

    def valid(self, drafts: Sequence[int]) -> int:
        """How many leading drafts are allowed, each after those before it."""
        text = [] if self._over else self._before_end(drafts)
        taken = 0
        while taken < len(text) and self._take(text[taken], self._sure[taken : taken + 1]):
            taken += 1
        self._back(taken)
        ends = list(takewhile(self._head.eos.__contains__, drafts[taken:]))
        may_end = ends and self._head.may_end(self.masks(drafts[:taken])[taken])
        return taken + len(ends) if may_end else taken

    def forced(self, most: int) -> tuple[int, ...]:
        """Tokens that come now whatever the model says: each is the only one its mask leaves. Often there are none.

        An end token is never among them.
        """
        taken = 0
        while not self._over and taken < most:
            if taken == len(self._sure):
                self._sure += tuple(self._matcher.compute_ff_tokens()[:1])
            sure = self._sure[taken : taken + 1]
            if not sure or sure[0] in self._head.eos or not self._matcher.consume_tokens([*sure]):
                break
            taken += 1
        self._back(taken)
        return self._sure[:taken]

    def masks(self, drafts: Sequence[int]) -> NDArray[np.int32]:
        """[drafts + 1, ceil(vocab / 32)]: the bits of the tokens allowed after none, one, .. all of the valid drafts.

        No row is empty: where the grammar is at its end, and after an end token, all end tokens are allowed; where it
        could end and go on, unless there are too few tokens. Rows that follow a draft which is not valid mean nothing.
        """
        head = self._head
        # A head may draft a token that the tokenizer does not have.
        text = [] if self._over else list(takewhile(range(head.known).__contains__, self._before_end(drafts)))
        open_rows = 0 if self._over else len(text) + 1
        rows = self._fill(text) if open_rows else np.zeros((0, head.known_words), np.int32)
        if rows.shape != (shape := (len(drafts) + 1, head.words)):
            some, rows = rows, np.zeros(shape, np.int32)
            rows[:open_rows, : head.known_words] = some
        # A few words: in an array's own operations most of the time would go to calling them.
        for place, row in enumerate(rows):
            if place >= open_rows or head.may_end(row):
                self._put_ends(row, self._written + place)
        return rows

    def rehearse(self) -> None:
        """One step there and back, at the start: a Fault where the grammar allows nothing, or no way back."""
        self._check()
        (row,) = self.masks(())
        self._head.forbid_ends(row)
        filled = np.flatnonzero(row)
        self._over = not filled.size
        if filled.size:
            bits = np.unpackbits(row[filled[:1]].view(np.uint8), bitorder="little")
            self._matcher.consume_tokens([32 * int(filled[0]) + int(bits.argmax())])
            self._back(1)

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        """The matcher is never given an end token: some grammars would not come back from it."""
        return list(takewhile(lambda token: token not in self._head.eos, tokens))

    def _take(self, token: int, sure: Sequence[int]) -> bool:
        """Step over a token if the mask allows it. A matcher takes any spelling of a text that its mask forces."""
        only = sure or self._matcher.compute_ff_tokens()[:1]
        fits = token == only[0] if only else 0 <= token < self._head.known
        return fits and self._matcher.try_consume_tokens([token]) == 1

    def _put_ends(self, row: NDArray[np.int32], written: int) -> None:
        """All end tokens in the mask after so many tokens, if one may come: one is as good as another. Or none."""
        if written < self._min_tokens:
            self._head.forbid_ends(row)
            if row.any():
                return
        self._head.allow_ends(row)

    def _fill(self, drafts: list[int]) -> NDArray[np.int32]:
        """[drafts + 1, known words]; in one call, since each one gives the interpreter away."""
        rows = np.empty((len(drafts) + 1, self._head.known_words), np.int32)
        rows[:] = self._head.known_ends
        place, size = rows.__array_interface__["data"][0], self._head.known_words * rows.itemsize
        if drafts:
            rooms = [(self._matcher, 0, drafts)]
            self._executor.unsafe_compute_mask_ptr_with_draft_token(rooms, place, size, len(rows))
        else:
            self._matcher.unsafe_compute_mask_ptr(place, size)
        self._check()
        return rows

    def _back(self, count: int) -> None:
        self._matcher.rollback(count)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise Fault(f"the constraint could not be followed ({_reason(self._matcher.get_error())}).")


class _Head:
    """The shape of a mask, and where the end tokens lie in it."""

    def __init__(self, known: int, vocab: int, eos: Collection[int]) -> None:
        self.known = known  # tokens of the tokenizer
        self.words, self.known_words = -(-vocab // 32), -(-known // 32)
        self.eos = frozenset(token for token in eos if token < vocab)
        ends = np.zeros((2, self.words), np.uint32)
        for token in self.eos:
            ends[:, token // 32] |= np.array([1, token < known], np.uint32) << np.uint32(token % 32)
        # The words that hold end tokens, and their bits.
        self.ends = [(int(column), ends[0, column].view(np.int32)) for column in np.flatnonzero(ends[0])]
        self.known_ends = ends[1, : self.known_words].view(np.int32)  # those that the tokenizer has

    def may_end(self, row: NDArray[np.int32]) -> bool:
        """Whether a mask allows one of the end tokens."""
        return any(row[column] & bits for column, bits in self.ends)

    def allow_ends(self, row: NDArray[np.int32]) -> None:
        for column, bits in self.ends:
            row[column] |= bits

    def forbid_ends(self, row: NDArray[np.int32]) -> None:
        for column, bits in self.ends:
            row[column] &= ~bits


class _Speller:
    """A tokenizer as llguidance wants it. What it is for: tokens for a text that a grammar forces.

    Left to itself llguidance tokenizes such a text as if it were a prompt: what reads like a special token becomes
    one, and a normalizer changes letters. Either breaks the grammar.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = spellings(tokenizer)
        self.special_token_ids: Sequence[int] = ()  # those in `tokens` are marked
        self.bos_token_id: int | None = None
        self.eos_token_id = 0

    def __call__(self, text: str) -> list[int]:
        """The usual tokens; where these do not spell the text, the longest that do."""
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        raw = text.encode()
        return tokens if b"".join(self.tokens[token] for token in tokens) == raw else self._longest(raw)

    def _longest(self, raw: bytes) -> list[int]:
        tokens, place = [], 0
        while place < len(raw):
            pieces = (raw[place:end] for end in range(min(len(raw), place + self._most), place, -1))
            piece = next(piece for piece in pieces if piece in self._ids)
            tokens.append(self._ids[piece])
            place += len(piece)
        return tokens

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {spelling: token for token, spelling in enumerate(self.tokens)}

    @cached_property
    def _most(self) -> int:
        return max(map(len, self.tokens))


def _grammar(constraint: Constraint) -> str:
    """The constraint in llguidance's words; a ValueError says what is wrong with it."""
    from llguidance import LLMatcher, regex_to_lark

    source = constraint.source
    if not isinstance(source, str):
        return LLMatcher.grammar_from_regex(_alternatives(source))
    if constraint.kind == "json_schema":
        return _schema_grammar(source)
    if constraint.kind == "grammar":
        if source.lstrip().startswith("{"):  # llguidance's own form, which may hold more than a grammar
            raise ValueError("it is JSON")
        return LLMatcher.grammar_from_lark(source)
    if (len(source) - len(source.rstrip("\\"))) % 2:  # llguidance would drop it
        raise ValueError("it ends in a backslash that escapes nothing")
    return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(source, 'd')}/")  # "d": of digits, 0 to 9 alone


def _schema_grammar(source: str) -> str:
    from llguidance import LLMatcher

    schema = json.loads(source)
    if schema is True:  # JSON Schema's other way to say {}
        source, schema = "{}", {}
    if not isinstance(schema, dict):
        raise ValueError("it is not a JSON object")
    own = schema.get("x-guidance")
    chosen = isinstance(own, dict) and own.keys() & WHITESPACE_OPTIONS
    return LLMatcher.grammar_from_json_schema(source, defaults={} if chosen else {"whitespace_pattern": WHITESPACE})


def _alternatives(texts: Sequence[str]) -> str:
    if not texts:
        raise ValueError("it is empty")
    if not all(texts):
        raise ValueError("one of its texts is empty")
    return "|".join("".join(map(_literal, text)) for text in texts)


def _literal(letter: str) -> str:
    return letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}"


def _refusal(kind: str, message: str) -> UserError:
    return UserError(f"the {NAMES[kind]} does not compile ({_reason(message)}); {ADVICE[kind]}.")


def _reason(message: str) -> str:
    """The line that matters of an error's many."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]  # of a regex
    reason = (told or lines or ["the text is over"])[0].rpartition("(in regex): ")[2]
    if reason == "NoExtensionBias":
        return "no token may come next"
    reason = re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"line \1, column \2: ", reason)  # of a grammar
    return reason.rstrip(".:")[:LONGEST_REASON]
