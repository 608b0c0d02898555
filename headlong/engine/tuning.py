"""What rounds cost on this machine: measured on an idle backend, kept in a file, read when a model is loaded."""

import hashlib
import json
import logging
import math
import os
import platform
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headlong.engine.backend import Backend
from headlong.engine.request import Chunk, Limits, RoundResult, RowPlan, Sampling, Start
from headlong.engine.roundcost import KINDS, VERSION, KindCosts, RoundCosts
from headlong.errors import Fault, UserError

FORMAT = 1  # of the file
SAMPLINGS = {"plain": Sampling(), "sampled": Sampling(temperature=0.8, seed=0)}
WIDTHS = (1, 2, 3, 5, 9)  # tokens of a row in a round, where any depth may be chosen; all but one are drafts
PASSES = 5  # over all sizes: a machine that slows down midway slows all of them
VISIT_S = 0.05  # of rounds of one size, in one pass; a round at least
MOST_ROUNDS = 5  # of one visit
PROMPT = 16  # tokens before the first round: few, for every row is prefilled twice in a pass
POSITIONS = 512  # a row's cache: its prompt, and windows of which some are kept
MOST_CLASSES = 16  # of rows, each of twice as many as the one before
WEIGHT = 64  # times each median is fed: more than a curve remembers, so that nothing is left of its prior


@dataclass(frozen=True)
class Size:
    """A kind of round: so many rows of so many tokens each."""

    kind: str
    rows: int
    width: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width


class Batch:
    """Rows of an idle backend with one sampling, driven round by round; each has its own stretch of pages."""

    def __init__(self, backend: Backend, sampling: Sampling) -> None:
        self._backend, self._sampling, self._limits = backend, sampling, backend.limits
        self._stretch = self._limits.pages // self._limits.rows
        self._room = min(self._limits.context, self._stretch * self._limits.page)
        self._lengths: dict[int, int] = {}
        self._pages: dict[int, int] = {}  # how many each row has

    def round(self, rows: int, width: int) -> RoundResult:
        """One round of the first rows, each with a window of so many tokens and as many drafts after it."""
        draft = width - 1 if self._limits.drafter != "none" else 0
        for row in range(rows):
            if row not in self._lengths or self._lengths[row] + width + draft > self._room:
                self._start(row)
        plans = [
            RowPlan(row, width - 1, draft, self._grow(row, width + draft), drafts=self._tokens(row, width - 1))
            for row in range(rows)
        ]
        result = self._backend.round(plans).result()
        for kept in result.kept:
            self._lengths[kept.row] += len(kept.tokens)
        return result

    def release(self) -> None:
        for row in list(self._lengths):
            self._release(row)

    def _start(self, row: int) -> None:
        self._release(row)
        prompt = self._tokens(row, max(1, min(PROMPT, self._room // 4)))
        self._lengths[row] = self._pages[row] = 0
        self._backend.start(Start(row, prompt, self._sampling, seed=row))
        last, chunk = len(prompt) - 1, self._limits.chunk
        for start in range(0, last, chunk):
            tokens = prompt[start : min(start + chunk, last)]
            pages = self._grow(row, len(tokens))
            self._backend.prefill(Chunk(row, start, tokens, prompt[start + len(tokens)], pages))
            self._lengths[row] += len(tokens)

    def _release(self, row: int) -> None:
        if self._lengths.pop(row, None) is not None:
            self._backend.release(row)

    def _grow(self, row: int, more: int) -> range:
        """Pages the row gains so that it covers so many more positions."""
        first, needed = self._pages[row], -(-(self._lengths[row] + more) // self._limits.page)
        self._pages[row] = max(first, needed)
        return range(row * self._stretch + first, row * self._stretch + self._pages[row])

    def _tokens(self, row: int, count: int) -> tuple[int, ...]:
        """Any tokens do, as long as rows differ."""
        return tuple((7919 * (place + 1) + 104729 * row) % self._limits.vocab for place in range(count))


@dataclass
class Tuning:
    """Rounds of every size, timed by the backend itself."""

    backend: Backend
    seconds: dict[Size, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))  # verify, draft

    @property
    def batches(self) -> list[int]:
        return batches(self.backend.limits.rows)

    @property
    def widths(self) -> list[int]:
        return widths(self.backend.limits)

    @property
    def steps(self) -> int:
        """How often `measure` hands something out."""
        return PASSES * len(KINDS) * len(self.batches)

    def measure(self) -> Iterator[str]:
        """Measure; what is measured next is named just before."""
        for number in range(PASSES):
            order = random.Random(number)
            for kind in KINDS:
                batch = Batch(self.backend, SAMPLINGS[kind])
                try:
                    for rows in order.sample(self.batches, len(self.batches)):
                        yield f"pass {number + 1} of {PASSES}, {kind}, rows: {rows}"
                        for width in order.sample(self.widths, len(self.widths)):
                            self._visit(batch, Size(kind, rows, width))
                finally:
                    batch.release()

    def _visit(self, batch: Batch, size: Size) -> None:
        """Rounds of one size in a row; the first one finds another size's caches and does not count."""
        batch.round(size.rows, size.width)
        rounds: list[tuple[float, float]] = []
        for _ in range(MOST_ROUNDS):
            result = batch.round(size.rows, size.width)
            if not (result.cold or result.cold_drafts):
                rounds.append((result.verify_s, result.draft_s))
            if sum(map(sum, rounds)) >= VISIT_S:
                break
        if rounds:
            self.seconds[size] += rounds

    def costs(self) -> RoundCosts:
        """Curves through the medians, as a later load will find them."""
        costs = RoundCosts()
        for kind in KINDS:
            medians = self._medians(kind)
            first = min(medians, key=lambda size: size.tokens)
            costs.record(kind, first.tokens, medians[first][0], [], 0.0, rows=first.rows)
            # To the curves themselves: `record` would take what they still lack for the machine's speed of the moment.
            for _ in range(WEIGHT):
                self._feed(costs.of(kind), medians)
        return RoundCosts.from_json(costs.to_json())

    def _medians(self, kind: str) -> dict[Size, tuple[float, float]]:
        medians = {}
        for size, rounds in self.seconds.items():
            if size.kind == kind:
                verify_s, draft_s = (statistics.median(half) for half in zip(*rounds, strict=True))
                medians[size] = verify_s, draft_s
        if not medians or any(verify_s <= 0.0 for verify_s, _ in medians.values()):
            raise Fault("the backend does not tell the seconds of its rounds.")
        return medians

    def _feed(self, curves: KindCosts, medians: Mapping[Size, tuple[float, float]]) -> None:
        for size, (verify_s, draft_s) in medians.items():
            curves.verify.observe(size.tokens, verify_s)
            curves.verify_of(size.rows).observe(size.tokens, verify_s)
            steps = [size.rows] * (size.width - 1) if self.backend.limits.drafter != "none" else []
            # Only rounds with a single step tell it from further ones, so they count as much as the others together.
            for _ in range(3 if len(steps) == 1 else 1):
                if draft_s > 0.0 or not steps:
                    curves.record_draft(steps, draft_s, woken=False)


def batches(most: int) -> list[int]:
    """The sizes of batches that are measured: powers of two, and the largest."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


def widths(limits: Limits) -> list[int]:
    """Of windows that are measured: those for which there is room behind a prompt, with as many drafts."""
    usual = (1, *(1 + depth for depth in limits.depths)) if limits.depths else WIDTHS
    return [width for width in usual if width == 1 or (width <= limits.depth + 1 and 4 * width <= limits.context)]


# --- the file ----------------------------------------------------------------------------------------------------


def folder_of(name: str) -> Path:
    """The folder of a model that was loaded by this name."""
    from headlong.checkpoint.find import find

    return find(name)


def where(folder: Path, limits: Limits) -> Path:
    """The file for a model on a machine. Other weights, another device, dtype or number of threads have another."""
    files = folder.rglob("*.safetensors")
    weights = sorted((path.relative_to(folder).as_posix(), path.stat().st_size) for path in files)
    config = folder / "config.json"
    content = hashlib.sha256(config.read_bytes() if config.is_file() else b"").hexdigest()
    facts = json.dumps([FORMAT, VERSION, content, weights, limits.device, cpu_name()])
    key = hashlib.sha256(facts.encode()).hexdigest()[:32]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "headlong" / "tune" / f"{key}.json"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def read(path: Path) -> RoundCosts | None:
    """What was kept; None where nothing was, or nothing that can be used."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or data["costs"]["version"] != VERSION:
            raise ValueError("it is of another version")
        _refuse_unsound(data["costs"]["kinds"])
        return RoundCosts.from_json(data["costs"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        logging.getLogger("headlong").warning(
            "%s cannot be used (%s), so depths are found without it; run 'headlong tune' to make it anew.", path, reason
        )
        return None


def _refuse_unsound(kinds: Mapping[str, Any]) -> None:
    """Numbers that would break rounds later."""
    for kind in KINDS:
        curves = dict(kinds[kind])
        if not 0 <= float(curves.pop("idle")) < math.inf:
            raise ValueError(f"the idle seconds of {kind} rounds")
        of_rows = dict(curves.pop("rows"))
        if not all(0 <= int(rows) < MOST_CLASSES for rows in of_rows):
            raise ValueError(f"the classes of rows of {kind} rounds")
        every = [*curves.values(), *of_rows.values()]
        for place, (seconds, weight) in (item for curve in every for item in curve.items()):
            if int(place) < 1 or not 0 < float(seconds) < math.inf or not 0 <= float(weight) < math.inf:
                raise ValueError(f"the seconds at {place} of {kind} rounds")


def write(path: Path, costs: RoundCosts, about: Mapping[str, str]) -> None:
    """Keep costs, whole or not at all; `about` is for people who look into the file."""
    content = {"format": FORMAT, **about, "costs": costs.to_json()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            made.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            made.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror}); set XDG_CACHE_HOME to another folder."
        ) from error
