"""The PyTorch backend: a model, its cache and its rounds behind the engine's protocol."""

from collections.abc import Sequence

import torch

from headlong.backends.torch.cache import MAX_WIDTH, Cache
from headlong.backends.torch.chain import Chain
from headlong.backends.torch.drafters import Drafter, HeadDrafter
from headlong.backends.torch.loader import Loader
from headlong.backends.torch.models import FAMILIES
from headlong.backends.torch.native.library import DEFAULT_THREADS, library, torch_threads
from headlong.backends.torch.round import RoundHandle, Rounds
from headlong.checkpoint.checkpoint import Checkpoint
from headlong.engine.request import Chunk, Limits, RowPlan, Sampling
from headlong.errors import Fault, UserError
from headlong.settings import MAX_DEPTH, Settings

DEFAULT_CONTEXT = 16384


class TorchBackend:
    """Rows of one model on one device."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings, drafter: Drafter | None = None) -> None:
        self.device = _device(settings.device)
        dtype = _dtype(settings.dtype, self.device)
        self.threads = settings.threads or DEFAULT_THREADS
        lib = library() if self.device.type == "cpu" else None
        if lib:
            lib.use_threads(self.threads)
        # Beside our own threads torch's would spin after each call of theirs, so in rounds it keeps to the caller's.
        self.round_threads = 1 if lib else self.threads
        config = checkpoint.config
        context = settings.context or min(config.max_position_embeddings, DEFAULT_CONTEXT)
        if context > config.max_position_embeddings:
            raise UserError(
                f"context is {context}; the model's own limit is {config.max_position_embeddings}: ask for less."
            )
        with_head = checkpoint.head.found and settings.draft_kind != "none"
        with torch.inference_mode():
            loader = Loader(checkpoint.weights, dtype, self.device)
            self.model = FAMILIES[config.family](config, loader, context + 2 * MAX_WIDTH, with_head)
            checkpoint.weights.check_all_used(ignore_head=not with_head)
            reason = "" if with_head else _no_draft_reason(checkpoint, settings)
            self.limits = _limits(
                settings, context, config.vocab_size, reason, _describe(self.device, dtype, self.threads)
            )
            cache = Cache(self.model.cache_shape, self.limits, dtype, self.device)
            chain = Chain(self.limits.rows, config.vocab_size, self.device)
            if drafter is None and self.model.head is not None:
                drafter = HeadDrafter(self.model.head, cache, chain)
            self.rounds = Rounds(self.model, cache, chain, drafter)
        self.left = [0] * self.limits.rows  # drafts each row's last pass left

    def start(self, row: int, prompt: Sequence[int], sampling: Sampling, seed: int) -> None:
        with torch.inference_mode():
            self.rounds.cache.start(row)
            self.rounds.chain.start(row, prompt, sampling, seed)
            self.rounds.start(row, prompt[-1])
        self.left[row] = 0

    def prefill(self, chunk: Chunk) -> None:
        if chunk.start % self.limits.chunk:
            raise Fault(f"a chunk starts at {chunk.start}; chunks start at multiples of {self.limits.chunk}.")
        with torch.inference_mode(), torch_threads(self.threads):
            self.rounds.cache.grow(chunk.row, chunk.pages)
            self.rounds.prefill(chunk)
        self.left[chunk.row] = chunk.draft

    def round(self, plan: Sequence[RowPlan]) -> RoundHandle:
        for row in plan:
            if row.verify > self.left[row.row]:
                raise Fault(f"row {row.row} is to verify {row.verify} drafts but has {self.left[row.row]}.")
        with torch.inference_mode(), torch_threads(self.round_threads):
            for row in plan:
                self.rounds.cache.grow(row.row, row.pages)
            handle = self.rounds.run(plan)
        for row in plan:
            self.left[row.row] = row.draft
        return handle

    def release(self, row: int) -> None:
        with torch.inference_mode():
            self.rounds.cache.release(row)
        self.left[row] = 0


def _limits(settings: Settings, context: int, vocab: int, no_draft_reason: str, device: str) -> Limits:
    pages_a_row = -(-(context + 2 * MAX_WIDTH) // settings.page)
    return Limits(
        rows=settings.rows,
        context=context,
        page=settings.page,
        chunk=settings.chunk,
        pages=settings.rows * pages_a_row,
        vocab=vocab,
        depth=0 if no_draft_reason else MAX_DEPTH,
        drafter="none" if no_draft_reason else "mtp",
        no_draft_reason=no_draft_reason,
        device=device,
    )


def _describe(device: torch.device, dtype: torch.dtype, threads: int) -> str:
    name = str(dtype).removeprefix("torch.")
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)} in {name}"
    kernels = "compiled kernels" if library() else "plain PyTorch"
    return f"{threads} CPU thread{'s' if threads > 1 else ''} in {name} with {kernels}"


def _no_draft_reason(checkpoint: Checkpoint, settings: Settings) -> str:
    return "draft kind none was asked for" if settings.draft_kind == "none" else checkpoint.head.reason


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device is {name!r} but torch sees no CUDA device; use --device cpu or a CUDA build of torch.")
    return torch.device(name)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if device.type == "cpu" and name != "float32":
        raise UserError(f"dtype is {name} on a CPU; CPUs run in float32: leave --dtype out or use --device cuda.")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
