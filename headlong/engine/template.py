"""A model's chat template: messages in, prompt text out."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headlong.errors import UserError


class ChatTemplate:
    """A template from a model folder. It is code from elsewhere, so it runs in a sandbox."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the names of special tokens that the template may use, such as bos_token."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))  # that it asks for
        except jinja2.TemplateError as error:
            raise UserError(f"the model's chat template does not parse ({error}); use --raw.") from error
        self.source = source
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt's text, which ends where the assistant is to speak. `variables` are the template's own."""
        given = {**self._tokens, **(variables or {}), "messages": messages, "add_generation_prompt": True}
        try:
            return self._template.render(given)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise UserError(f"the chat template refuses these messages: {error}.") from error


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    """jinja2's own escapes for HTML, and models were trained on plain JSON."""
    return json.dumps(value, indent=indent, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
