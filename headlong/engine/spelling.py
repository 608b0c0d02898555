"""Every token's bytes, as far as a tokenizer tells them."""

import re
from collections.abc import Callable

from tokenizers import Tokenizer

from headlong.errors import UserError

SPECIAL = b"\xff"  # before the name of a special token; no text holds this byte


def spellings(tokenizer: Tokenizer) -> list[bytes]:
    """Every token's bytes, special tokens marked; none for ids that nothing is known of."""
    vocab: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    spell = _speller_of(tokenizer)
    tokens = [b""] * (max(vocab.values()) + 1)
    for name, token in vocab.items():
        tokens[token] = spell(name)
    for token, added in tokenizer.get_added_tokens_decoder().items():
        name = added.content
        is_special = added.special or (name.startswith("<") and name.endswith(">"))  # as llguidance's grammars have it
        tokens[token] = (SPECIAL if is_special else b"") + name.encode()
    return tokens


def _speller_of(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How a token's name tells its bytes: tokenizers have two ways."""
    decoder: bytes = tokenizer.decoder.__getstate__() if tokenizer.decoder else b""
    if b'"ByteLevel"' in decoder:
        return _spell_mapped
    if b'"ByteFallback"' in decoder:
        return _spell_named
    raise UserError("the tokenizer's tokens do not tell their bytes; leave the constraint or the logprobs out.")


def _spell_mapped(name: str) -> bytes:
    try:
        return name.translate(BYTE_OF_LETTER).encode("latin-1")
    except UnicodeEncodeError:
        return b""


def _spell_named(name: str) -> bytes:
    found = re.fullmatch("<0x([0-9A-Fa-f]{2})>", name)
    return bytes.fromhex(found[1]) if found else name.replace("▁", " ").encode()


def _byte_of_letter() -> dict[int, int]:
    """Byte-level tokenizers write a byte as its own letter if it has one to show, else as the next past 255."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return dict(zip(shown, shown, strict=True)) | {256 + place: byte for place, byte in enumerate(hidden)}


BYTE_OF_LETTER = _byte_of_letter()
