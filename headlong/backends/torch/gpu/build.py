"""Kernels that the host launches, and a rehearsal of launches in which all that are missing are built side by side."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import triton
from torch.overrides import TorchFunctionMode

MOST_KERNELS = 64  # that wait at once: a thread each, which costs nothing
EMPTY = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided}

_builders: ContextVar["Builders | None"] = ContextVar("builders", default=None)


class Kernel:
    """A function of Triton's that the host launches: kernel[grid](...)."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        builders = _builders.get()
        if builders is None:
            launch: Callable[..., object] = self.function[grid]
            return launch

        def build(*given: object, **options: object) -> None:
            with torch._C.DisableTorchFunction():  # Triton asks tensors much, and is not to ask `_Zeros`
                builders.build(self.function.warmup(*given, grid=grid, **options))

        return build


def run_built(run: Callable[[], None]) -> None:
    """Run something that launches kernels; if any of them is missing, after all that are have been built."""
    try:
        with triton.AsyncCompileMode(_Nobody()):
            run()
    except _Missing:
        with rehearsal():
            run()
        run()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Kernels launched in here are built, as many at once as the host has cores, and not run. All else runs, on zeros
    where a kernel would have written, so that whatever is looked up by them is there."""
    with ThreadPoolExecutor(os.cpu_count()) as compilers, ThreadPoolExecutor(MOST_KERNELS) as linkers:
        builders = Builders(linkers)
        with triton.AsyncCompileMode(compilers), _Zeros():
            before = _builders.set(builders)
            try:
                yield
            finally:
                _builders.reset(before)
        builders.wait()


class Builders:
    """Threads that make kernels ready to be launched, each as soon as it is compiled."""

    def __init__(self, threads: Executor) -> None:
        self.threads = threads
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else -1  # threads begin with none
        self.under_way: dict[int, Future[None]] = {}  # by kernel

    def build(self, kernel: Any) -> None:
        """Of one that is compiled, or being compiled."""
        if id(kernel) not in self.under_way:
            # What is being compiled is taken from the compiler: only one thread may ask a FutureKernel for it.
            coming = kernel.future if isinstance(kernel, triton.FutureKernel) else None
            self.under_way[id(kernel)] = self.threads.submit(self._make_ready, kernel, coming)

    def wait(self) -> None:
        for built in self.under_way.values():
            built.result()

    def _make_ready(self, kernel: Any, coming: "Future[Any] | None") -> None:
        compiled = coming.result() if coming else kernel
        with torch.cuda.device(self.device):
            compiled.run  # noqa: B018  when first asked for it Triton builds what launches a kernel, and loads both


class _Missing(Exception):
    """A kernel is to be launched that has not been built."""


class _Nobody(Executor):
    """Builds nothing."""

    def submit(self, *_: Any, **__: Any) -> Any:
        raise _Missing


class _Zeros(TorchFunctionMode):
    """Memory that nothing was written to is zeros."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **kwargs or {})
        return found.zero_() if function in EMPTY else found
