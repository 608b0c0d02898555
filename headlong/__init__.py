"""Headlong runs language models with their own multi-token-prediction heads: faster, and exactly the same text."""

import logging
from dataclasses import fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from headlong.engine.backend import open_backend
from headlong.engine.engine import Engine
from headlong.engine.request import Constraint, Emitted, Output, Request, Sampling
from headlong.errors import DraftError, Fault, QueueFull, UserError
from headlong.settings import Settings
from headlong.version import __version__

if TYPE_CHECKING:
    from headlong.checkpoint.checkpoint import Checkpoint

__all__ = [
    "Constraint",
    "Emitted",
    "Engine",
    "Fault",
    "Output",
    "QueueFull",
    "Request",
    "Sampling",
    "Settings",
    "UserError",
    "__version__",
    "load",
]


def load(name: "str | PathLike[str] | None" = None, *, require_draft: bool = False, **settings: Any) -> Engine:
    """Open a model folder or a hub name; without a name, the small model that comes with the package.

    `settings` are the fields of `Settings`. A model that cannot draft runs plain and every answer says so; with
    `require_draft` it is refused.
    """
    chosen = _settings(settings)

    from headlong.checkpoint.checkpoint import open_checkpoint  # these are slow to import
    from headlong.checkpoint.find import DEFAULT
    from headlong.engine import tuning
    from headlong.engine.text import Text

    checkpoint = open_checkpoint(DEFAULT if name is None else name)
    if chosen.draft_kind == "none" or (not checkpoint.head.found and chosen.draft_kind != "ngram"):
        _accept_plain(checkpoint, chosen, require_draft)
    text = Text.from_folder(checkpoint.folder)
    backend = open_backend(checkpoint, chosen)
    costs = tuning.read(tuning.where(checkpoint.folder, backend.limits))
    return Engine(backend, text, checkpoint.name, checkpoint.config.eos_token_ids, chosen, costs)


def _settings(given: dict[str, Any]) -> Settings:
    known = [field.name for field in fields(Settings)]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise UserError(f"{', '.join(unknown)} is not a setting; those are {', '.join(known)}.")
    return Settings(**given)


def _accept_plain(checkpoint: "Checkpoint", settings: Settings, require_draft: bool) -> None:
    """Refuse a model that cannot draft where drafting was asked for; warn where its config led one to expect it."""
    if require_draft and settings.draft_kind == "none":
        raise DraftError("drafting is required and the draft kind is none; leave one of the two out.")
    if require_draft:
        raise DraftError(f"{checkpoint.name} cannot draft, and drafting is required: {checkpoint.head.reason}")
    if settings.draft_kind == "mtp":
        raise UserError(f"{checkpoint.name} cannot draft, so draft kind must be auto or none: {checkpoint.head.reason}")
    if settings.draft_kind == "auto" and checkpoint.config.promises_head:
        logging.getLogger("headlong").warning("%s runs without drafts: %s", checkpoint.name, checkpoint.head.reason)
