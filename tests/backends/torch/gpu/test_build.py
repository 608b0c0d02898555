"""A rehearsal builds what would be launched, runs none of it, and lets everything else run on zeros."""

import threading
from inspect import signature

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.runtime._async_compile import active_mode  # noqa: E402

from headlong.backends.torch.gpu.build import Kernel, rehearsal, run_built  # noqa: E402

FUTURE_ARGUMENTS = len(signature(triton.FutureKernel).parameters)  # the last is the future


class Script:
    """Stands for a function of Triton's: notes what is asked of it."""

    def __init__(self):
        self.launched, self.built, self.ready = [], [], 0

    def __getitem__(self, grid):
        return lambda *given, **options: self.launched.append((grid, given, options))

    def warmup(self, *given, grid, **options):
        self.built.append((grid, given, options))
        return self

    @property
    def run(self):
        """As of a compiled kernel: asked for when it is to be ready for a launch."""
        self.ready += 1


def test_launches_are_builds_in_a_rehearsal_and_launches_again_after_it():
    script = Script()
    kernel = Kernel(script)
    kernel[(1,)]("before")
    with rehearsal():
        kernel[(2, 3)]("in it", num_warps=4)
        kernel[(2, 3)]("again", num_warps=4)
    assert script.ready == 1
    kernel[(1,)]("after")
    assert script.built == [((2, 3), ("in it",), {"num_warps": 4}), ((2, 3), ("again",), {"num_warps": 4})]
    assert [given for _, given, _ in script.launched] == [("before",), ("after",)]


def test_what_is_being_compiled_is_made_ready_when_it_is():
    script = Script()
    with rehearsal():
        mode = active_mode.get()
        coming = triton.FutureKernel(*[lambda _: None] * (FUTURE_ARGUMENTS - 1), mode.executor.submit(lambda: script))
        script.warmup = lambda grid: coming
        Kernel(script)[(1,)]()
    assert script.ready == 1


def test_a_kernel_that_cannot_be_loaded_breaks_the_rehearsal():
    class Broken(Script):
        @property
        def run(self):
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"), rehearsal():
        Kernel(Broken())[(1,)]()


def test_a_rehearsal_that_breaks_is_over():
    script = Script()
    with pytest.raises(KeyError), rehearsal():
        raise KeyError
    Kernel(script)[(1,)]()
    assert len(script.launched) == 1
    with rehearsal():  # and another can begin
        Kernel(script)[(1,)]()
    assert len(script.built) == 1


class Jitted(Script):
    """Built when it is first launched, like a function of Triton's: by whoever builds in this thread."""

    def __init__(self, there=False):
        super().__init__()
        self.there = there

    def __getitem__(self, grid):
        def launch():
            builder = active_mode.get()
            if builder and not self.there:
                builder.executor.submit(lambda: None)
            self.there = True
            self.launched.append(grid)

        return launch

    def warmup(self, *given, grid):
        self.there = True
        return super().warmup(*given, grid=grid)


def test_what_is_there_runs_once_without_a_rehearsal():
    script = Jitted(there=True)
    run_built(lambda: Kernel(script)[(1,)]())
    assert (len(script.launched), len(script.built)) == (1, 0)


def test_what_is_missing_is_built_before_anything_behind_it_runs():
    there, missing, behind = Jitted(there=True), Jitted(), Jitted()

    def run():
        for script in (there, missing, behind):
            Kernel(script)[(1,)]()

    run_built(run)
    assert [len(script.launched) for script in (there, missing, behind)] == [2, 1, 1]
    assert [len(script.built) for script in (there, missing, behind)] == [1, 1, 1]
    assert active_mode.get() is None


def test_another_threads_kernels_are_built_meanwhile():
    script = Jitted()

    def run():
        thread = threading.Thread(target=Kernel(script)[(1,)])
        thread.start()
        thread.join()

    run_built(run)
    assert (len(script.launched), len(script.built), script.there) == (1, 0, True)


def test_a_fault_is_not_taken_for_a_missing_kernel():
    calls = []

    def run():
        calls.append(1)
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        run_built(run)
    assert len(calls) == 1
    assert active_mode.get() is None


@pytest.fixture
def spoilt_memory():
    """Nothing is zero by chance: torch fills what it hands out with its largest numbers."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1, dtype=torch.long).item() > 0
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("spoilt_memory")
def test_memory_that_no_kernel_wrote_is_zeros_so_that_it_can_be_looked_up_by():
    table = torch.arange(12.0).view(3, 4)
    with torch.inference_mode(), rehearsal():
        made = [
            torch.empty(50, dtype=torch.long),
            torch.empty_like(table, dtype=torch.long),
            table.new_empty(7, 2),
            torch.empty_strided((3, 4), (1, 3)),
            table.new_empty_strided((3, 4), (1, 3)),
            torch.empty((2, 3, 4, 5), memory_format=torch.channels_last),
        ]
        assert all(tensor.count_nonzero() == 0 for tensor in made)
        assert table[made[0].clamp(max=2)].shape == (50, 4)  # what is computed is computed
        assert (table + 1).sum() == 78
