"""A tiny checkpoint in the place of the model that comes with the package."""

from pathlib import Path

import pytest

from headlong.checkpoint import embedded
from tests import tiny
from tests.quantised import quantise


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quantise(tiny.write(folder, with_tokenizer=True, agreeable=True, tied=True))
    (folder / "README.md").write_text("A card.\n")
    embedded.write_sums(folder)
    monkeypatch.setattr(embedded, "FOLDER", folder)
    return folder
