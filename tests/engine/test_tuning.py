"""What rounds cost: measured on a backend that keeps a clock of its own, kept in a file, and read again."""

import json
import logging
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import headlong
from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine import tuning
from headlong.engine.request import RoundResult
from headlong.engine.roundcost import KINDS, RoundCosts
from headlong.errors import Fault, UserError
from tests.engine.conftest import byte_tokenizer

PACE = {"plain": 1.0, "sampled": 1.5}


def count_up(history):
    return (history[-1] + 1) % 100


def verify_s(kind, tokens):
    """Steps at the edges of tiles, as GPUs have them."""
    return PACE[kind] * (2e-3 + 5e-5 * tokens + 1e-3 * ((tokens - 1) // 16))


def draft_s(rows, depth):
    return (4e-4 + 1e-5 * rows) + (depth - 1) * (2e-4 + 1e-5 * rows) if depth else 3e-5


class Timed:
    def __init__(self, result):
        self.result = lambda: result


class Clocked(FakeBackend):
    """One round in seven is a spike."""

    chance = random.Random(0)

    def round(self, plan):
        kept = super().round(plan).result().kept
        kinds = {"plain" if self.rows[part.row].start.sampling.greedy else "sampled" for part in plan}
        (kind,) = kinds
        spike = 20.0 if self.chance.random() < 1 / 7 else 1.0
        tokens, deepest = sum(part.verify + 1 for part in plan), max(part.draft for part in plan)
        return Timed(RoundResult(kept, spike * verify_s(kind, tokens), spike * draft_s(len(plan), deepest)))


@pytest.fixture
def measured():
    """A tuning that has run, and the labels it gave."""

    def run(backend=Clocked, right=(True, False), **limits):
        Clocked.chance.seed(0)
        fake = backend(count_up, right=right, limits=fake_limits(**{"context": 256, "page": 16, "chunk": 32, **limits}))
        made = tuning.Tuning(fake)
        labels = list(made.measure())
        return made, labels

    return run


def test_every_kind_and_size_of_round_is_run(measured):
    made, labels = measured(rows=6)
    assert len(labels) == made.steps
    wanted = {(rows, width) for rows in (1, 2, 4, 6) for width in (1, 2, 3, 5, 9)}
    for kind in KINDS:
        assert {(size.rows, size.width) for size in made.seconds if size.kind == kind} == wanted
    for plan in made.backend.rounds:
        (verify,) = {part.verify for part in plan}
        assert all(part.draft == verify for part in plan)
        assert all(part.drafts is not None and len(part.drafts) == verify for part in plan)


def test_the_sizes_take_turns(measured):
    """Each is visited in every pass, in another order, so that a machine that slows down slows all of them."""
    _, labels = measured(rows=8)
    passes = [labels[start : start + 4] for start in range(0, len(labels), 4)]
    orders = [tuple(label.rpartition(" ")[2] for label in each) for each in passes]
    assert all(sorted(order) == ["1", "2", "4", "8"] for order in orders)
    assert len(set(orders)) > 3


def test_the_costs_are_those_of_the_machine(measured):
    made, _ = measured(rows=16)
    costs = made.costs()
    for kind in KINDS:
        for rows in (1, 2, 4, 8, 16):
            for width in (1, 2, 3, 5, 9):
                wanted = verify_s(kind, rows * width)
                assert costs.verify(kind, rows * width) == pytest.approx(wanted, rel=0.04), (kind, rows, width)
            for depth in (1, 2, 4, 8):
                assert costs.draft(kind, [rows] * depth) == pytest.approx(draft_s(rows, depth), rel=0.04)
        assert costs.draft(kind, []) == pytest.approx(3e-5, rel=0.04)
        assert costs.of(kind).verify.knot(16).settled


def test_a_model_without_a_head_is_measured_without_drafts(measured):
    made, _ = measured(rows=2, head=False)
    assert {part.draft for plan in made.backend.rounds for part in plan} == {0}
    costs = made.costs()
    assert costs.verify("plain", 18) == pytest.approx(verify_s("plain", 18), rel=0.04)
    assert not costs.of("plain").first.known


@pytest.mark.parametrize("right", [(True,), (False,)])
@pytest.mark.parametrize(
    "limits",
    [
        {"context": 64, "page": 4, "chunk": 8},
        {"context": 16, "page": 4, "chunk": 8},
        {"context": 3, "page": 1, "chunk": 1},
        {"context": 4096, "page": 16, "chunk": 32, "pages": 3 * 40 + 1},
        {"depth": 2},
    ],
    ids=str,
)
def test_rounds_stay_inside_small_rows(measured, limits, right):
    """The fake refuses a plan that leaves the context or its pages, or takes another row's."""
    made, _ = measured(right=right, rows=3, **limits)
    widths = {size.width for size in made.seconds}
    assert 1 in widths
    assert made.costs().of("plain").verify.known
    assert made.backend.rows == {}


def test_the_rows_are_given_back_after_an_interrupt():
    class Interrupted(Clocked):
        def round(self, plan):
            if len(self.rounds) > 40:
                raise KeyboardInterrupt
            return super().round(plan)

    backend = Interrupted(count_up, limits=fake_limits(rows=4, context=256))
    with pytest.raises(KeyboardInterrupt):
        list(tuning.Tuning(backend).measure())
    assert backend.rows == {}


def test_a_backend_without_a_clock_is_a_fault(measured):
    made, _ = measured(backend=FakeBackend, rows=1)
    with pytest.raises(Fault, match="does not tell the seconds of its rounds"):
        made.costs()


# --- the file ----------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A model's folder, and a cache to keep things in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    (folder / "mtp").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"1234")
    (folder / "mtp" / "weights.safetensors").write_bytes(b"12")
    return folder


@pytest.fixture
def limits():
    return replace(fake_limits(), device="abacus in beads")


@pytest.fixture
def costs():
    made = RoundCosts()
    for _ in range(4):
        made.record("plain", 3, 0.5, [1, 1], 0.25)
        made.record("sampled", 8, 0.75, [], 0.0)
    return made


@pytest.fixture
def kept(folder, limits, costs):
    path = tuning.where(folder, limits)
    tuning.write(path, costs, {"model": "m"})
    return path


def test_the_file_lies_in_the_cache(folder, limits, tmp_path, monkeypatch):
    path = tuning.where(folder, limits)
    assert path == tuning.where(folder, limits)
    assert path.parent == tmp_path / "cache" / "headlong" / "tune"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning.where(folder, limits) == tmp_path / "home" / ".cache" / "headlong" / "tune" / path.name


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text("{ }"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"12345"),
        lambda folder: (folder / "mtp" / "weights.safetensors").unlink(),
        lambda folder: (folder / "model.safetensors").rename(folder / "other.safetensors"),
    ],
    ids=["config", "size", "head", "name"],
)
def test_another_model_has_another_file(folder, limits, change):
    before = tuning.where(folder, limits)
    change(folder)
    assert tuning.where(folder, limits) != before


def test_another_machine_has_another_file(folder, limits, monkeypatch):
    before = tuning.where(folder, limits)
    assert tuning.where(folder, replace(limits, device="abacus in stones")) != before
    assert tuning.where(folder, replace(limits, rows=99, context=7)) == before
    monkeypatch.setattr(tuning, "cpu_name", lambda: "Antikythera")
    assert tuning.where(folder, limits) != before


def test_what_is_in_the_folder_beside_the_model_does_not_matter(folder, limits):
    before = tuning.where(folder, limits)
    (folder / "README.md").write_text("hello")
    assert tuning.where(folder, limits) == before


def test_what_is_kept_is_read_again(kept, costs):
    assert tuning.read(kept).to_json() == costs.to_json()
    assert json.loads(kept.read_text())["model"] == "m"
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_nothing_kept_is_nothing_said(folder, limits, caplog):
    assert tuning.read(tuning.where(folder, limits)) is None
    assert not caplog.records


def broken(kept, change):
    data = json.loads(kept.read_text())
    change(data)
    kept.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept.write_text(""),
        lambda kept: kept.write_text("[1, 2]"),
        lambda kept: kept.write_text("null"),
        lambda kept: kept.write_bytes(b"\xff"),
        lambda kept: kept.write_text(kept.read_text()[:-20]),
        lambda kept: broken(kept, lambda data: data.update(format=0)),
        lambda kept: broken(kept, lambda data: data["costs"].update(version="other")),
        lambda kept: broken(kept, lambda data: data["costs"].pop("kinds")),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"].pop("sampled")),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"]["plain"].pop("verify")),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"]["plain"].update(idle=-1)),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"]["plain"]["verify"].update({"3": [-1.0, 1.0]})),
        lambda kept: broken(
            kept, lambda data: data["costs"]["kinds"]["plain"]["verify"].update({"3": [math.nan, 1.0]})
        ),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"]["plain"]["first"].update({"0": [1.0, 1.0]})),
        lambda kept: broken(kept, lambda data: data["costs"]["kinds"]["plain"]["first"].update({"1": [1.0]})),
        lambda kept: (kept.unlink(), kept.mkdir()),
    ],
)
def test_a_damaged_file_is_a_warning_and_no_more(kept, damage, caplog):
    damage(kept)
    with caplog.at_level(logging.WARNING, logger="headlong"):
        assert tuning.read(kept) is None
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{kept} cannot be used (")
    assert record.getMessage().endswith("run 'headlong tune' to make it anew.")


def test_a_file_is_replaced_whole_or_not_at_all(kept, costs, monkeypatch):
    before = kept.read_text()

    def interrupted(self, *args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning.write(kept, costs, {})
    monkeypatch.undo()
    assert kept.read_text() == before
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]


def test_a_place_that_cannot_be_written_is_told(tmp_path, costs):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\); set XDG_CACHE_HOME to another folder"):
        tuning.write(tmp_path / "file" / "tune" / "x.json", costs, {})


@pytest.fixture
def load(folder, limits, monkeypatch):
    """`headlong.load` with a scripted model in place of a real one."""
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = SimpleNamespace(eos_token_ids=(256,), promises_head=True)
    checkpoint = SimpleNamespace(name="m", folder=folder, config=config, head=SimpleNamespace(found=True, reason=""))
    monkeypatch.setattr("headlong.checkpoint.checkpoint.open_checkpoint", lambda name: checkpoint)
    backend = FakeBackend(count_up, limits=limits)
    monkeypatch.setattr(headlong, "open_backend", lambda checkpoint, settings: backend)
    return headlong.load


def test_a_load_starts_from_what_is_kept(load, kept, costs):
    assert load("m").depths.costs.to_json() == costs.to_json()
    kept.unlink()
    assert not load("m").depths.costs.of("plain").verify.known


def test_a_load_goes_on_without_a_damaged_file(load, kept, caplog):
    kept.write_text("{")
    engine = load("m")
    assert "cannot be used" in caplog.text
    assert engine.generate([1, 2], max_tokens=3).tokens == (3, 4, 5)


def test_the_folder_of_a_model_is_found_again(folder):
    assert tuning.folder_of(str(folder)) == folder
