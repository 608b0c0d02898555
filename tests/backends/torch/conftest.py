"""Tiny models, each with its kernels and number of threads, and the plain text that everything is held against."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.drafters import Right, Wrong
from headlong.backends.torch.native.library import references_only
from headlong.settings import MAX_DEPTH
from tests import tiny
from tests.backends.torch.driver import Driver, Job, Trace, open_tiny, prompt_of, whole

# Attention in the middle too, so that what it says about a prompt reaches later layers.
TWO = {"full_attention_interval": 2}
WIDE = {"hidden_size": 192, "num_experts_per_tok": 4, "head_dim": 32, "linear_key_head_dim": 24, "vocab_size": 131}
MODELS = {"dense": ("dense", TWO), "moe": ("moe", TWO), "next": ("next", TWO), "wide": ("moe", TWO | WIDE)}


@dataclass
class Bench:
    """One model as one set of kernels runs it. A name is "model-kernels-threads"."""

    folder: Path
    native: bool
    threads: int
    texts: dict[str, Trace] = field(default_factory=dict)

    @contextlib.contextmanager
    def ready(self) -> Iterator["Bench"]:
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            with contextlib.nullcontext() if self.native else references_only():
                yield self
        finally:
            torch.set_num_threads(before)

    def open(self, **options: int) -> TorchBackend:
        return open_tiny(self.folder, **options)

    @property
    def vocab(self) -> int:
        return 131 if self.folder.name.startswith("wide") else 128

    def prompt(self, length: int, salt: int = 0) -> list[int]:
        return prompt_of(length, self.vocab, salt)

    def plain(self, job: Job, count: int) -> Trace:
        """The job decoded without drafts, alone in a fresh backend; long enough for drafts past `count`."""
        key = f"{job.prompt} {job.sampling} {count}"
        if key not in self.texts:
            driver = Driver(self.open(rows=1, context=max(256, len(job.prompt) + count + 4 * MAX_DEPTH)))
            alone = Job(job.prompt, job.sampling, seed=job.seed)
            self.texts[key] = driver.run([alone], count + MAX_DEPTH + 1)[0]
        return self.texts[key]

    def drafter(self, name: str, jobs: Mapping[int, Job], count: int) -> Right | None:
        """right, wrong or head; the first two know the plain text of every row, and guess at unseeded ones."""
        if name == "head":
            return None
        texts = {row: whole(job, self.plain(job, count)) for row, job in jobs.items()}
        return {"right": Right, "wrong": Wrong}[name](texts, self.vocab)

    def run(self, jobs: Mapping[int, Job], count: int, drafter: str = "head", context: int = 256) -> dict[int, Trace]:
        backend = self.open(drafter=self.drafter(drafter, jobs, count), rows=max(jobs) + 1, context=context)
        return Driver(backend).run(jobs, count)

    def differences(self, jobs: Mapping[int, Job], count: int, drafter: str = "head") -> dict[int, str]:
        """By row, how a run of these jobs together differs from each alone and plain. Unseeded rows may."""
        texts = {row: self.plain(job, count) for row, job in jobs.items() if promised(job)}
        traces = self.run(jobs, count, drafter)
        found = {row: traces[row].difference(texts[row], count) for row in texts}
        return {row: difference for row, difference in found.items() if difference}


def promised(job: Job) -> bool:
    return job.sampling.greedy or job.sampling.seed is not None


@pytest.fixture(scope="session")
def benches(tmp_path_factory):
    """Made when first asked for, kept with their plain texts."""
    made: dict[str, Bench] = {}

    def get(name: str) -> Bench:
        model, kernels, threads = name.split("-")
        if name not in made:
            kind, options = MODELS[model]
            folder = tiny.write(tmp_path_factory.mktemp("models") / model, kind, **options)
            made[name] = Bench(folder, kernels == "native", int(threads))
        return made[name]

    return get


@pytest.fixture
def bench(request, benches):
    with benches(request.param).ready() as ready:
        yield ready
