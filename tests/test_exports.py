"""The public names, what importing them costs, and what `load` refuses."""

import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import headlong
from headlong.backends.fake import FakeBackend
from headlong.errors import DraftError
from tests.engine.conftest import byte_tokenizer

RAISED = ["Fault", "QueueFull", "UserError"]
NAMES = sorted(
    ["Constraint", "Emitted", "Engine", "Output", "Request", "Sampling", "Settings", *RAISED, "__version__", "load"]
)


def test_the_public_names():
    assert sorted(headlong.__all__) == NAMES
    assert all(hasattr(headlong, name) for name in NAMES)


def test_importing_loads_nothing_slow():
    script = (
        "import sys, headlong; print(*{'torch', 'numpy', 'tokenizers', 'jinja2', 'rich', 'mlx'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """`load` with a scripted model in place of a real one; the argument is the head's reason to be missing."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))

    def opened_with(reason="", promises_head=True):
        head = SimpleNamespace(found=not reason, reason=reason)
        config = SimpleNamespace(eos_token_ids=(256,), vocab_size=300, promises_head=promises_head)
        checkpoint = SimpleNamespace(name="tiny", folder=Path(tmp_path), config=config, head=head)
        monkeypatch.setattr("headlong.checkpoint.checkpoint.open_checkpoint", lambda name: checkpoint)
        monkeypatch.setattr(headlong, "open_backend", lambda checkpoint, settings: FakeBackend(lambda history: 5))

    return opened_with


def test_a_model_is_loaded(opened):
    opened()
    engine = headlong.load("tiny", rows=2, require_draft=True)
    assert engine.name == "tiny"
    assert engine.settings == headlong.Settings(rows=2)
    assert engine.generate([1, 2], max_tokens=3).tokens == (5, 5, 5)


def test_unknown_settings_are_refused():
    with pytest.raises(headlong.UserError, match=r"rowz is not a setting; those are device, .*draft_kind, threads\.$"):
        headlong.load("tiny", rowz=2)


def test_a_head_that_was_asked_for_must_be_there(opened):
    opened("its files have no head.")
    with pytest.raises(DraftError, match=r"tiny cannot draft, and drafting is required: its files have no head\.$"):
        headlong.load("tiny", require_draft=True)
    with pytest.raises(headlong.UserError, match="tiny cannot draft, so draft kind must be auto or none: its files"):
        headlong.load("tiny", draft_kind="mtp")


def test_drafting_cannot_be_required_and_turned_off(opened):
    opened()
    with pytest.raises(DraftError, match="leave one of the two out"):
        headlong.load("tiny", draft_kind="none", require_draft=True)


@pytest.mark.parametrize(
    ("promises_head", "draft_kind", "warnings"), [(True, "auto", 1), (False, "auto", 0), (True, "none", 0)]
)
def test_a_promised_head_that_is_missing_is_warned_of(opened, caplog, promises_head, draft_kind, warnings):
    opened("its files have no head.", promises_head)
    with caplog.at_level(logging.WARNING, logger="headlong"):
        headlong.load("tiny", draft_kind=draft_kind)
    assert len(caplog.records) == warnings
    assert all(record.getMessage().endswith("its files have no head.") for record in caplog.records)
