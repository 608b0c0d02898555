"""Prompts: the sets a bench brings along, and those in people's files."""

import gzip
import json
import tomllib
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from headlong.errors import UserError

SETS = ("code", "prose", "chat", "rewrite")
CHAT_SETS = ("chat", "rewrite")
FIELDS = ("prompt", "text", "turns", "question", "messages")  # of a line of JSON; the first that is there counts
RAW_FIELDS = ("prompt", "text")
FORM = f"a line is one JSON object with the field {', '.join(FIELDS[:-1])} or {FIELDS[-1]}"

Message = Mapping[str, Any]
Prompt = str | tuple[Message, ...]


@dataclass(frozen=True)
class PromptSet:
    """A text is to be continued as it is; messages go through the model's chat template."""

    name: str
    prompts: tuple[Prompt, ...]

    def pick(self, limit: int) -> list[tuple[int, Prompt]]:
        """So many of them with their places, from 1; evenly spaced, for files are often sorted by kind. 0 is all."""
        count = len(self.prompts)
        taken = min(limit or count, count)
        places = [number * count // taken for number in range(taken)]
        return [(place + 1, self.prompts[place]) for place in places]


def built_in(name: str) -> PromptSet:
    texts = tomllib.loads(files("headlong.cli").joinpath("prompts.toml").read_text("utf-8"))[name]
    return PromptSet(name, tuple(as_user(text) if name in CHAT_SETS else text for text in texts))


def as_user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def read_set(path: Path) -> PromptSet:
    """A file of JSON lines or, by any other name, of one user's message a line; either may be gzipped."""
    name = path.name.removesuffix(".gz")
    text = decode(_unpacked(path), str(path))
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{path} holds no prompt; write one on each line.")
    if name.endswith((".jsonl", ".json")):
        prompts = [_from_json(line, f"{path}, line {number}") for number, line in lines]
    else:
        prompts = [as_user(line.rstrip("\r")) for _, line in lines]
    return PromptSet(Path(name).stem, tuple(prompts))


def _unpacked(path: Path) -> bytes:
    content = read_file(path)
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} is not a whole gzip file ({error}); download it again or unpack it.") from error


def _from_json(line: str, where: str) -> Prompt:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}); {FORM}.") from error
    field = next((name for name in FIELDS if isinstance(content, dict) and name in content), None)
    if field is None:
        raise UserError(f"{where} holds no prompt; {FORM}.")
    value = content[field]
    if field == "messages":
        return _messages(value, where)
    if field == "turns":
        value = value[0] if isinstance(value, list) and value else None
    if not isinstance(value, str) or not value.strip():
        raise UserError(f"{where}: {field} holds no text; {FORM}.")
    return value if field in RAW_FIELDS else as_user(value)


def _messages(value: object, where: str) -> tuple[Message, ...]:
    whole = isinstance(value, list) and all(
        isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str)
        for one in value
    )
    if not isinstance(value, list) or not value or not whole:
        raise UserError(f"{where}: messages must be a list of objects with role and content, both texts.")
    return tuple(value)


def check_names(sets: Sequence[PromptSet]) -> None:
    names = [each.name for each in sets]
    double = next((name for name in names if names.count(name) > 1), None)
    if double:
        raise UserError(f"two sets are called {double}; rename a file or leave one out.")


def read_file(path: Path, wanted: str = "give a file with one prompt a line") -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); {wanted}.") from error


def decode(text: bytes, source: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{source} is not UTF-8 (byte {error.start}); save it as UTF-8.") from error
