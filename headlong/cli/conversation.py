"""A conversation: its messages, and the JSON file that they are kept in."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headlong.cli.prompts import decode, read_file
from headlong.errors import UserError

ROLES = ("system", "user", "assistant")
FORM = 'a JSON list of {"role": "system|user|assistant", "content": "..."}'


@dataclass(frozen=True)
class Message:
    """One message. An answer may have been stopped, and its reasoning stands apart."""

    role: str
    content: str
    reasoning_content: str = ""  # as chat templates call it
    stopped: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value or name in ("role", "content")}


class Conversation:
    """What was said so far. The system message stands apart from the others and before them."""

    def __init__(self, system: str | None = None) -> None:
        self.system = system
        self.messages: list[Message] = []

    def whole(self, messages: Sequence[Message]) -> list[Message]:
        """These messages, the system message first."""
        return [*([] if self.system is None else [Message("system", self.system)]), *messages]

    def asked(self) -> list[Message]:
        """The messages up to the last question."""
        places = [place for place, message in enumerate(self.messages) if message.role == "user"]
        if not places:
            raise UserError("nothing was asked yet; say something first.")
        return self.messages[: places[-1] + 1]

    def undo(self) -> str:
        """Take the last question back, with what followed; the question."""
        asked = self.asked()
        self.messages = asked[:-1]
        return asked[-1].content

    def save(self, path: Path) -> int:
        """Write all messages, over a conversation but over nothing else; how many there are."""
        if path.exists():
            try:
                read_messages(path)
            except UserError as error:
                raise UserError(f"{path} is there and holds no conversation; choose another name.") from error
        messages = [message.as_dict() for message in self.whole(self.messages)]
        try:
            path.write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror}); choose another name.") from error
        return len(messages)

    def load(self, path: Path) -> int:
        """Read messages in place of those there are; how many."""
        messages = read_messages(path)
        self.system = messages[0].content if messages and messages[0].role == "system" else None
        self.messages = messages if self.system is None else messages[1:]
        return len(messages)


def read_messages(path: Path) -> list[Message]:
    content = decode(read_file(path, "name a file that /save wrote"), str(path))
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON ({error.msg}); {FORM} is wanted.") from error
    if isinstance(found, dict):  # as APIs take and give them
        found = found.get("messages")
    if not isinstance(found, list):
        raise UserError(f"{path} holds no messages; {FORM} is wanted.")
    return [_message(one, place, path) for place, one in enumerate(found)]


def _message(found: object, place: int, path: Path) -> Message:
    where = f"message {place + 1} of {path}"
    if not isinstance(found, dict) or not isinstance(found.get("content"), str):
        raise UserError(f"{where} has no text as its content; {FORM} is wanted.")
    if found.get("role") not in ROLES or (found["role"] == "system" and place):
        raise UserError(f"{where} is of {found.get('role')!r}; user or assistant is wanted, or system in the first.")
    reasoning = found.get("reasoning_content")
    return Message(
        found["role"], found["content"], reasoning if isinstance(reasoning, str) else "", bool(found.get("stopped"))
    )
