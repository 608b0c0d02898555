"""The fields of a config, each asked for by name and type."""

from collections.abc import Mapping
from typing import Any

from headlong.errors import UserError

REQUIRED = object()


class Fields:
    """A JSON object of config.json. A field that is null counts as absent."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw

    def has(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def any(self, name: str, default: Any = REQUIRED) -> Any:
        value = self._raw.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UserError(f"config.json has no {name}, which a {self.text('model_type', 'model')} needs: add it.")
        return default

    def whole(self, name: str, default: Any = REQUIRED, least: int = 1) -> int:
        value = self.any(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"config.json has {name} = {value!r}; a whole number of at least {least} is wanted.")
        return value

    def number(self, name: str, default: Any = REQUIRED) -> float:
        value = self.any(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise UserError(f"config.json has {name} = {value!r}; a number above 0 is wanted.")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> bool:
        value = self.any(name, default)
        if not isinstance(value, bool):
            raise UserError(f"config.json has {name} = {value!r}; true or false is wanted.")
        return value

    def text(self, name: str, default: Any = REQUIRED) -> str:
        value = self.any(name, default)
        if not isinstance(value, str):
            raise UserError(f"config.json has {name} = {value!r}; a text is wanted.")
        return value

    def wholes(self, name: str, default: Any = REQUIRED) -> tuple[int, ...]:
        value = self.any(name, default)
        if not isinstance(value, list | tuple) or any(isinstance(n, bool) or not isinstance(n, int) for n in value):
            raise UserError(f"config.json has {name} = {value!r}; a list of whole numbers is wanted.")
        return tuple(value)

    def inner(self, name: str) -> "Fields":
        """An object within; empty when it is not there."""
        value = self.any(name, {})
        if not isinstance(value, dict):
            raise UserError(f"config.json has {name} = {value!r}; an object is wanted.")
        return Fields(value)

    def only(self, name: str, wanted: Any) -> None:
        """Refuse any value but one; absent means that one."""
        value = self.any(name, wanted)
        if value != wanted:
            raise UserError(f"config.json has {name} = {value!r}; this version runs models with {wanted!r} only.")
