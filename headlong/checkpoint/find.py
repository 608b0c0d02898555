"""From a name to a folder: one that is here, one fetched from the Hugging Face Hub, or the one in the package."""

import re
from os import PathLike
from pathlib import Path

from headlong.checkpoint.embedded import embedded
from headlong.errors import UserError

DEFAULT = "nano"  # the model that comes with the package; a folder of that name is ./nano
HUB_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")
WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "merges.txt", "vocab.txt", "mtp/*")
UNWANTED = ("*.bin", "*.gguf", "*.pt", "*.pth")


def find(name: str | PathLike[str]) -> Path:
    """The folder of a model. A text of the form org/name or org/name@revision may be fetched; a path is a path."""
    if name == DEFAULT:
        return embedded()
    if not name:
        raise UserError("the model's name is empty: give a model's folder, or a Hugging Face id such as org/name.")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise UserError(f"{name} is a file: give the folder that holds the model's config.json and weights.")
    match = HUB_NAME.fullmatch(str(name))
    if match is None or str(name).startswith("."):
        raise UserError(f"{name} is no folder here: give a model's folder, or a Hugging Face id such as org/name.")
    return _fetch(match["repo"], match["revision"])


def _fetch(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors

    # the bases of the Hub's own error hold those of whichever HTTP library it uses
    unreachable: tuple[type[BaseException], ...] = (
        *errors.HfHubHTTPError.__bases__,
        errors.EntryNotFoundError,
        OSError,
    )
    try:
        return _snapshot(repo, revision, cached=False)
    except errors.GatedRepoError as error:
        advice = "its owner asks for your consent: accept the terms on its page, then run `hf auth login`"
        raise UserError(f"{repo} is no folder here and could not be fetched, as {advice}.") from error
    except errors.RepositoryNotFoundError as error:
        advice = "the Hub has no such public model: check the spelling, or run `hf auth login` if it is private"
        raise UserError(f"{repo} is no folder here and could not be fetched, as {advice}.") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{repo} has no revision {revision}: give one of the branches, tags or commits it has."
        ) from error
    except errors.HFValidationError as error:
        raise UserError(f"{repo} is no folder here and no Hugging Face id: give a folder, or org/name.") from error
    except unreachable as error:
        cause = error
    try:
        return _snapshot(repo, revision, cached=True)
    except unreachable:
        raise UserError(
            f"{repo} is no folder here, is not in the cache, and could not be fetched ({_short(cause)}): "
            f"check the network, or give the folder of a model."
        ) from cause


def _snapshot(repo: str, revision: str | None, cached: bool) -> Path:
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=list(WANTED),
        ignore_patterns=list(UNWANTED),
        local_files_only=cached,
    )
    return Path(folder)


def _short(error: BaseException) -> str:
    """The cause in a few words: the innermost error names it best, its first line says enough."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".:")
