"""Text in and out: the tokenizer, the chat template and incremental decoding."""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders

from headlong.engine.spelling import SPECIAL, spellings
from headlong.engine.template import ChatTemplate
from headlong.errors import UserError

UNKNOWN = "\ufffd"  # what a tokenizer prints for bytes that are not a character (yet)
LONGEST_PART = 3  # bytes that may still become one character
LONGEST_WAIT = 20  # tokens looked back at; half of them hold LONGEST_PART broken characters of 3 bytes


class Text:
    """What a model folder says about text."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None = None) -> None:
        tokenizer.no_truncation()  # some folders ship a training length here
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, content in added.items() if content.special)
        self._alone: dict[int, str | None] = {}
        # Whether a text is its tokens' bytes, one after another.
        self.joins = isinstance(tokenizer.decoder, decoders.ByteLevel)

    @classmethod
    def from_folder(cls, folder: Path) -> "Text":
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise UserError(f"{folder} has no tokenizer.json; give a model folder that has one.")
        raw = path.read_text(encoding="utf-8").strip()
        if not (raw.startswith("{") and raw.endswith("}")):
            raise UserError(f"{path} is not whole JSON; download it again.")
        if '"model"' not in raw:
            raise UserError(f"{path} holds no tokenizer; download it again.")
        return cls(Tokenizer.from_str(raw), _read_template(folder))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise UserError("the model has no chat template; use --raw, or give the prompt as text or token ids.")
        return self._template

    def has_token(self, name: str) -> bool:
        """Whether a text is a token of its own, such as a tag that a model was trained on."""
        return self._tokenizer.token_to_id(name) is not None

    def encode(self, text: str) -> list[int]:
        """A raw prompt's ids. Special tokens may be written out in the text, and the tokenizer adds its own."""
        return list(self._tokenizer.encode(_whole(text)).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """A conversation's ids, ending where the assistant is to speak."""
        return self.encode_rendered(self.chat_template.render(messages))

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of what a chat template has written, special tokens and all."""
        return list(self._tokenizer.encode(_whole(text), add_special_tokens=False).ids)

    def to_json(self) -> str:
        """The whole tokenizer, for others who must know every token."""
        return str(self._tokenizer.to_str())

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def bytes_of(self, token: int) -> bytes:
        """One token's own bytes, which need not be whole characters; none for ids the tokenizer does not know."""
        return self._spellings[token].removeprefix(SPECIAL) if token < len(self._spellings) else b""

    def alone(self, token: int) -> str | None:
        """The text of a token by itself; None where it cannot have any: of special tokens and unknown ids."""
        if token not in self._alone:
            shows = token not in self._special and self._tokenizer.id_to_token(token) is not None
            self._alone[token] = self.decode([token]) if shows else None
        return self._alone[token]

    @cached_property
    def _spellings(self) -> list[bytes]:
        return spellings(self._tokenizer)

    def decoder(self, prompt: Sequence[int] = ()) -> "Decoder":
        """A decoder for what follows the prompt."""
        return Decoder(self, prompt)


class Decoder:
    """Turns tokens into text one at a time, in constant time, showing only what later tokens cannot change.

    A token's text may depend on its neighbours (bytes of one character, a space before a word), so the pending
    tokens are decoded after the last settled ones and the settled text is taken off the front. Tokens settle
    when their text ends in a whole character.
    """

    def __init__(self, text: Text, prompt: Sequence[int] = ()) -> None:
        self._text = text
        self._pending: list[int] = []
        self._shown = 0  # characters of the pending tokens' text already returned
        self._settle([token for token in prompt[-LONGEST_WAIT:] if text.alone(token) is not None])
        if UNKNOWN in self._settled_text:  # the prompt was cut inside a character
            self._settle([])

    def push(self, token: int) -> str:
        """The text that is now certain."""
        alone = self._text.alone(token)
        if alone is None:
            return ""
        if alone and self._text.joins and not self._pending and UNKNOWN not in alone:
            self._settled, self._settled_text = [token], alone  # whole characters after whole ones
            return alone
        self._pending.append(token)
        fresh = self._fresh()
        unsure = min(LONGEST_PART, len(fresh) - len(fresh.rstrip(UNKNOWN)))
        shown = self._show(fresh[: len(fresh) - unsure])
        if fresh and not unsure:
            self._settle(self._pending)
        elif len(self._pending) > LONGEST_WAIT:
            self._forget_front(len(fresh) - self._shown)
        return shown

    def flush(self) -> str:
        """What was held back, once no more tokens can come."""
        shown = self._show(self._fresh())
        self._settle(self._pending)
        return shown

    def _fresh(self) -> str:
        """The pending tokens' text."""
        whole = self._text.decode(self._settled + self._pending)
        if whole.startswith(self._settled_text):
            return whole[len(self._settled_text) :]
        return self._text.decode(self._pending)  # bad bytes changed how the settled ones read

    def _show(self, text: str) -> str:
        shown = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return shown

    def _settle(self, tokens: list[int]) -> None:
        alone = self._text.alone(tokens[0]) if len(tokens) == 1 else None
        self._settled, self._settled_text = tokens, self._text.decode(tokens) if alone is None else alone
        self._pending, self._shown = [], 0

    def _forget_front(self, unshown: int) -> None:
        """Every pending token ends inside a character: keep the newest, counting what is shown from the end."""
        recent = self._pending[-LONGEST_WAIT // 2 :]
        self._settle([])
        self._pending, self._shown = recent, max(0, len(self._text.decode(recent)) - unshown)


def _read_template(folder: Path) -> ChatTemplate | None:
    """The chat template: a file of its own, or a field of tokenizer_config.json (one, or several with names)."""
    config: dict[str, Any] = {}
    if (path := folder / "tokenizer_config.json").is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not JSON ({error}); download it again.") from error
        if not isinstance(config, dict):
            raise UserError(f"{path} holds a {type(config).__name__}; a JSON object is wanted: download it again.")
    source = config.get("chat_template")
    if (path := folder / "chat_template.jinja").is_file():
        source = path.read_text(encoding="utf-8")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return ChatTemplate(source, _named_tokens(config)) if source else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, which a config gives as text or as an object with the text inside."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _whole(text: str) -> str:
    """The text itself, if it can be written down: half of a pair of surrogates is no character."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text holds half a character at position {error.start}; leave it out.") from None
    return text
