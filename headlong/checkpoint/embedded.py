"""The model that comes with the package: where it lies, and whether every byte of it is as it was published."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from headlong.errors import UserError

FOLDER = Path(__file__).parents[1] / "assets" / "nano"
SUMS = "sums.json"  # file name → SHA-256
SUMMED = (".json", ".jinja", ".safetensors")  # all that is read of a model
NEEDED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
MEND = "reinstall headlong, which it is a part of"


def embedded() -> Path:
    """The model's folder, once its files are found to be whole."""
    for name, wanted in _read_sums(FOLDER / SUMS).items():
        path = FOLDER / name
        found = _sum(path)
        if found != wanted:
            raise UserError(f"{path} is damaged (its SHA-256 is {found[:8]}… and {wanted[:8]}… is wanted): {MEND}.")
    return FOLDER


def write_sums(folder: Path) -> Path:
    """Publish a model's folder: write the sums of its files beside them."""
    paths = [path for path in sorted(folder.iterdir()) if path.suffix in SUMMED and path.name != SUMS]
    target = folder / SUMS
    target.write_text(json.dumps({path.name: _sum(path) for path in paths}, indent=2) + "\n", encoding="utf-8")
    return target


def _sum(path: Path) -> str:
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_sums(path: Path) -> dict[str, str]:
    with _opened(path) as file:
        content = file.read()
    try:
        sums = json.loads(content)
    except ValueError as error:  # bad JSON and bad UTF-8 alike
        raise UserError(f"{path} is damaged ({error}): {MEND}.") from error
    if not isinstance(sums, dict) or not sums.keys() >= NEEDED or not all(isinstance(s, str) for s in sums.values()):
        raise UserError(f"{path} is damaged (it does not hold the sums of {', '.join(sorted(NEEDED))}): {MEND}.")
    return sums


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:
        with path.open("rb") as file:
            yield file
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing: {MEND}.") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): {MEND}.") from error
