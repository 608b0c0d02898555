"""The PyTorch backend: a model, its cache and its rounds behind the engine's protocol."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headlong.backends.torch.cache import MAX_WIDTH, Cache
from headlong.backends.torch.chain import Chain
from headlong.backends.torch.drafters import Drafter, HeadDrafter
from headlong.backends.torch.gpu.paths import reason_against
from headlong.backends.torch.gpu.rounds import DEPTHS, SIZES, GraphRounds
from headlong.backends.torch.loader import Loader
from headlong.backends.torch.memory import Room, pages_that_fit
from headlong.backends.torch.models import FAMILIES
from headlong.backends.torch.native.library import DEFAULT_THREADS, library, torch_threads
from headlong.backends.torch.round import Rounds
from headlong.backends.torch.saved import Aside, Settled
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.request import Chunk, Limits, RowPlan, Saved, Start
from headlong.errors import Fault, UserError
from headlong.settings import MAX_DEPTH, Settings

if TYPE_CHECKING:
    from headlong.engine.backend import Handle

DEFAULT_CONTEXT = 16384
MOST_PREFIXES = 16  # times the pages of all rows: a small model's prefixes need not fill the budget


class TorchBackend:
    """Rows of one model on one device."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, drafter: Drafter | None = None) -> None:
        self.device = device_of(settings.device)
        dtype = dtype_of(settings.dtype, self.device)
        self.threads = settings.threads or DEFAULT_THREADS
        lib = library() if self.device.type == "cpu" else None
        if lib:
            lib.use_threads(self.threads)
        # Beside our own threads torch's would spin after each call of theirs, so it keeps to the caller's.
        self.pass_threads = 1 if lib else self.threads
        config = checkpoint.config
        context = settings.context or min(config.max_position_embeddings, DEFAULT_CONTEXT)
        if context > config.max_position_embeddings:
            raise UserError(
                f"context is {context}; the model's own limit is {config.max_position_embeddings}: ask for less."
            )
        with_head = checkpoint.head.found and settings.draft_kind in ("auto", "mtp")
        with self._at_work():
            loader = Loader(checkpoint.weights, dtype, self.device)
            self.model = FAMILIES[config.family](config, loader, context + 2 * MAX_WIDTH, with_head)
            checkpoint.weights.check_all_used(ignore_head=not with_head)
            reason = "" if with_head else _no_draft_reason(checkpoint, settings)
            shape, about = self.model.cache_shape, _describe(self.device, dtype, self.threads)
            page_bytes = shape.page_bytes(settings.page, dtype)
            rounds, spare = _rounds(self.device)
            limits = _limits(settings, context, config.vocab_size, page_bytes, reason, about)
            if spare:
                limits = replace(limits, depths=DEPTHS, sizes=SIZES)
            elif self.device.type == "cpu":
                limits = replace(limits, pieces=self.model.layer_count)
            if self.device.type == "cuda":
                states = (settings.rows + spare) * shape.state_bytes(dtype)
                left = Room.of(self.device).for_pages(settings.memory_fraction, states)
                least = _pages_a_row(settings, context)
                limits = replace(limits, pages=pages_that_fit(limits.pages, least, page_bytes, left, settings))
            self.limits = limits
            cache = Cache(shape, self.limits, dtype, self.device, spare)
            chain = Chain(cache.rows, config.vocab_size, self.device)
            if drafter is None and self.model.head is not None:
                drafter = HeadDrafter(self.model.head, cache, chain)
            self.rounds = rounds(self.model, cache, chain, drafter)
        self.left = [0] * self.limits.rows  # drafts each row's last pass left
        self.starts: dict[int, Start] = {}

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Whatever is computed: a thread has a GPU of its own, which may be another than ours."""
        with torch.inference_mode(), torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            yield

    def start(self, start: Start) -> None:
        row = start.row
        with self._at_work():
            self.rounds.cache.start(row)
            self.rounds.chain.start(start)
            self.rounds.start(start)
            if isinstance(start.saved, Settled):
                self.rounds.cache.attach(row, start.pages)
                self.rounds.cache.load(row, start.saved)
        self.left[row], self.starts[row] = 0, start

    def fork(self, row: int, start: Start, pages: Sequence[int]) -> None:
        self.start(replace(start, saved=self.save(row)))
        self.starts[start.row] = start
        if pages:
            with self._at_work():
                self.rounds.cache.grow(start.row, pages)
                self.rounds.cache.copy_last_page(row, start.row)

    def prefill(self, chunk: Chunk, pieces: int = 1) -> bool:
        if chunk.start % self.limits.chunk:
            raise Fault(f"a chunk starts at {chunk.start}; chunks start at multiples of {self.limits.chunk}.")
        with self._at_work(), torch_threads(self.pass_threads):
            if chunk.row not in self.rounds.reading:
                self.rounds.cache.grow(chunk.row, chunk.pages)
            complete = self.rounds.prefill(chunk, pieces)
        if complete:
            self.left[chunk.row] = chunk.draft
        return complete

    def round(self, plan: Sequence[RowPlan]) -> "Handle":
        for row in plan:
            found = self.left[row.row] if row.drafts is None else len(row.drafts)
            if row.verify > found or row.verify > MAX_DEPTH:
                raise Fault(f"row {row.row} is to verify {row.verify} drafts but has {found}.")
            if row.drafts and not 0 <= min(row.drafts) <= max(row.drafts) < self.limits.vocab:
                raise Fault(f"row {row.row} is given drafts {row.drafts}; tokens are 0 to {self.limits.vocab - 1}.")
        with self._at_work(), torch_threads(self.pass_threads):
            for row in plan:
                self.rounds.cache.grow(row.row, row.pages)
            handle = self.rounds.run(plan)
        for row in plan:
            self.left[row.row] = handle.left.get(row.row, row.draft)
        return handle

    def save(self, row: int) -> Settled:
        with self._at_work():
            return self.rounds.cache.settled(row)

    def set_aside(self, row: int) -> Aside:
        rounds, backlog = self.rounds, self.rounds.drafter.backlog if self.rounds.drafter else None
        with self._at_work():
            aside = Aside(
                self.starts[row],
                {name: view.clone() for name, view in rounds.views(row).items()},
                rounds.cache.copy_pages(row),
                width=rounds.cache.widths[row],
                late=backlog.most[row] if backlog else 0,
                left=self.left[row],
            )
        self.release(row)
        return aside

    def bring_back(self, row: int, saved: Saved, pages: Sequence[int]) -> None:
        assert isinstance(saved, Aside)
        self.start(replace(saved.start, row=row, length=0, pages=(), saved=None))
        rounds = self.rounds
        with self._at_work():
            rounds.cache.grow(row, pages)
            rounds.cache.put_pages(row, saved.pages)
            views = rounds.views(row)
            for name, tensor in saved.tensors.items():
                views[name].copy_(tensor)
        rounds.cache.widths[row], self.left[row] = saved.width, saved.left
        if rounds.drafter and rounds.drafter.backlog:
            rounds.drafter.backlog.most[row] = saved.late

    def release(self, row: int) -> None:
        self.rounds.reading.pop(row, None)
        with self._at_work():
            self.rounds.cache.release(row)
        self.left[row] = 0


def _rounds(device: torch.device) -> tuple[type[Rounds], bool]:
    """How rounds run there, and whether they need a row that is nobody's."""
    return (GraphRounds, True) if device.type == "cuda" and not reason_against(device) else (Rounds, False)


def _limits(settings: Settings, context: int, vocab: int, page_bytes: int, reason: str, device: str) -> Limits:
    """`reason` says why the model cannot draft; empty when it can."""
    pages_a_row = _pages_a_row(settings, context)
    on_cpu = "CPU thread" in device
    return Limits(
        rows=settings.rows,
        context=context,
        page=settings.page,
        chunk=settings.chunk or settings.page * (1 if on_cpu else 8),
        pages=_pages(settings, pages_a_row, page_bytes),
        vocab=vocab,
        depth=MAX_DEPTH,
        drafter="none" if reason else "mtp",
        no_draft_reason=reason,
        page_bytes=page_bytes,
        overlaps=not on_cpu,
        device=device,
    )


def _pages_a_row(settings: Settings, context: int) -> int:
    return -(-(context + 2 * MAX_WIDTH) // settings.page)


def _pages(settings: Settings, pages_a_row: int, page_bytes: int) -> int:
    """Enough for every row and the cached prefixes beside them, unless a number of tokens was set for all."""
    if settings.cache_tokens:
        return -(-settings.cache_tokens // settings.page)
    rows = settings.rows * pages_a_row
    return rows + min(settings.prefix_bytes // page_bytes, MOST_PREFIXES * rows)


def _describe(device: torch.device, dtype: torch.dtype, threads: int) -> str:
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        against = reason_against(device)
        kernels = f"plain PyTorch ({against})" if against else "compiled kernels"
        return f"{torch.cuda.get_device_name(device)} in {name} with {kernels}"
    kernels = "compiled kernels" if library() else "plain PyTorch"
    return f"{threads} CPU thread{'s' if threads > 1 else ''} in {name} with {kernels}"


def _no_draft_reason(checkpoint: Checkpoint, settings: Settings) -> str:
    asked = settings.draft_kind
    return checkpoint.head.reason if asked in ("auto", "mtp") else f"draft kind {asked} was asked for"


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name!r} but torch sees no CUDA device; use --device cpu or a CUDA build of torch.")
    return torch.device(name)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cpu" and name != "float32":
        raise UserError(f"dtype is {name} on a CPU; CPUs run in float32: leave --dtype out or use --device cuda.")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
