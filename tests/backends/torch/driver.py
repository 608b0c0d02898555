"""Rows driven by hand: the test says who arrives when, how deep each round drafts, and who sits out."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headlong.backends.torch.backend import TorchBackend
from headlong.backends.torch.chain import Needs, Seen
from headlong.backends.torch.drafters import Drafter, Proposal, Right
from headlong.backends.torch.native.tape import Taped
from headlong.backends.torch.pairs import Feed
from headlong.checkpoint.checkpoint import open_checkpoint
from headlong.engine.pages import PagePool
from headlong.engine.request import Chunk, RowPlan, Sampling, Start
from headlong.settings import MAX_DEPTH, Settings

PAGE, CHUNK = 16, 32

Depth = Callable[[int], int]  # of a row's own round number


def fixed(depth: int) -> Depth:
    return lambda _: depth


PLAIN = fixed(0)


def changing(salt: int) -> Depth:
    """Another depth every round, 0 and the deepest among them."""
    return lambda turn: random.Random(f"{salt} {turn}").choice((0, 1, 2, 3, 5, MAX_DEPTH))


def prompt_of(length: int, vocab: int, salt: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * salt + length)
    return torch.randint(vocab, (length,), generator=generator).tolist()


def open_tiny(folder: Path, drafter: Drafter | None = None, rows: int = 16, context: int = 256) -> TorchBackend:
    settings = Settings(
        device="cpu", rows=rows, page=PAGE, chunk=CHUNK, context=context, threads=torch.get_num_threads()
    )
    return TorchBackend(open_checkpoint(str(folder)), settings, drafter)


@dataclass
class Job:
    """One sequence and the way it is run."""

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    depth: Depth = PLAIN
    arrives: int = 0  # the step in which it starts
    at_once: bool = True  # its whole prompt in one step; else a piece of a chunk, between the others' rounds
    pieces: int = 1  # of every chunk
    fewer: Callable[[int, int], int] = lambda turn, left: left  # of the drafts left, how many a round verifies
    least: Callable[[int], float] = lambda turn: 0.0  # chance that drafts must have to be left
    rests: Callable[[int], bool] = lambda step: False  # whether it sits a step out
    seed: int = 0  # of an unseeded row


@dataclass
class Trace:
    """What a row produced, and the bits it was chosen from."""

    tokens: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [vocab] each
    scores: list[Tensor] = field(default_factory=list)  # after the sampling chain
    kept: list[int] = field(default_factory=list)  # tokens by round
    rounds: int = 0

    def difference(self, other: "Trace", count: int) -> str:
        """Where the first `count` tokens, logits or scores differ; empty when they do not, to the last bit."""
        if len(self.tokens) < count or len(other.tokens) < count:
            return f"only {len(self.tokens)} and {len(other.tokens)} tokens"
        for i in range(count):
            for name in ("logits", "scores"):
                mine, theirs = getattr(self, name)[i], getattr(other, name)[i]
                if not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)):
                    return f"{name} of token {i} differ by {(mine - theirs).abs().nan_to_num().max():.1e}"
            if self.tokens[i] != other.tokens[i]:
                return f"token {i} is {self.tokens[i]} and {other.tokens[i]}"
        return ""


class Driver:
    """Keeps pages and lengths as an engine would, and records what the target said about every kept token."""

    def __init__(self, backend: TorchBackend) -> None:
        self.backend, self.limits = backend, backend.limits
        self.pool = PagePool(self.limits.pages)
        self.pages: dict[int, list[int]] = {}
        self.length: dict[int, int] = {}
        self.jobs: dict[int, Job] = {}
        self.chunks: dict[int, Chunk] = {}  # under way
        self.traces: dict[int, Trace] = {}
        self._logits = torch.empty(0)
        self._scores: dict[tuple[int, int], Tensor] = {}
        self._record()

    def _record(self) -> None:
        """Keep what the target says in a round: its logits [N, V], and scores by row and position where rows ask."""
        rounds, chain = self.backend.rounds, self.backend.rounds.chain
        apply = chain.apply

        def recording(verify: Taped) -> Any:
            def verified(*given: Any) -> tuple[Tensor, ...]:
                found = verify(*given)
                self._logits, self._scores = found[3].clone(), {}
                return found

            verified.tapes, verified.once_s = verify.tapes, 0.0
            return verified

        def applied(logits: Tensor, rows: Tensor, needs: Needs, positions: Tensor, seen: Seen) -> Tensor:
            scores = apply(logits, rows, needs, positions, seen)
            for row, at, mine in zip(rows.tolist(), positions.tolist(), scores.clone(), strict=True):
                for position, score in zip(at, mine, strict=True):
                    self._scores.setdefault((row, position), score)  # the target comes before the drafter
            return scores

        rounds.verify, rounds.verify_and_rest = recording(rounds.verify), recording(rounds.verify_and_rest)
        chain.apply = applied

    def start(self, row: int, job: Job) -> None:
        self.jobs[row], self.traces[row] = job, Trace()
        self.pages[row], self.length[row] = [], 0
        seed = job.seed if job.sampling.seed is None else job.sampling.seed
        self.backend.start(Start(row, job.prompt, job.sampling, seed))

    def fork(self, row: int, to: int, job: Job) -> None:
        """Begin another row where this one's prompt, which is its own too, has come in."""
        length, mine = self.length[row], self.pages[row]
        shared = tuple(mine[: length // self.limits.page])
        self.pool.share(shared)
        self.jobs[to], self.traces[to], self.length[to] = job, Trace(), length
        self.pages[to] = [*shared]
        seed = job.seed if job.sampling.seed is None else job.sampling.seed
        start = Start(to, job.prompt, job.sampling, seed, length=length, pages=shared)
        self.backend.fork(row, start, self._grow(to, length))

    def waiting(self, row: int) -> bool:
        """Whether some of the prompt is still to come."""
        return self.length[row] < len(self.jobs[row].prompt) - 1

    def prefill(self, row: int) -> None:
        """Run the next chunk of a prompt, or a piece of it."""
        job = self.jobs[row]
        chunk = self.chunks.pop(row, None) or self._chunk(row)
        if self.backend.prefill(chunk, job.pieces):
            self.length[row] += len(chunk.tokens)
        else:
            self.chunks[row] = chunk

    def _chunk(self, row: int) -> Chunk:
        job, start = self.jobs[row], self.length[row]
        end = min(start + self.limits.chunk, len(job.prompt) - 1)
        draft = job.depth(-1) if end == len(job.prompt) - 1 else 0
        return Chunk(row, start, job.prompt[start:end], job.prompt[end], self._grow(row, end + draft), draft)

    def round(self, rows: Sequence[int]) -> None:
        plan = [self._plan(row) for row in rows]
        results = self.backend.round(plan).result().kept
        windows = self._logits.split([row.verify + 1 for row in plan])
        for row, result, logits in zip(plan, results, windows, strict=True):
            trace, kept, length = self.traces[result.row], len(result.tokens), self.length[result.row]
            assert 1 <= kept <= row.verify + 1
            trace.tokens += result.tokens
            trace.logits += logits[:kept]
            trace.scores += [self._scores.get((row.row, length + j + 1), logits[j]) for j in range(kept)]
            trace.kept.append(kept)
            trace.rounds += 1
            self.length[result.row] += kept

    def release(self, row: int) -> list[int]:
        """The pages that are free again."""
        self.backend.release(row)
        freed = self.pages.pop(row)
        self.pool.give(freed)
        self.chunks.pop(row, None)
        del self.jobs[row], self.length[row]
        return freed

    def run(self, jobs: Sequence[Job] | Mapping[int, Job], count: int, keep: bool = False) -> dict[int, Trace]:
        """All jobs until each has `count` tokens. A step is a piece of every waiting prompt, then a round."""
        jobs = jobs if isinstance(jobs, Mapping) else dict(enumerate(jobs))
        step = 0
        while any(row not in self.jobs or len(self.traces[row].tokens) < count for row in jobs):
            for row, job in jobs.items():
                if job.arrives == step:
                    self.start(row, job)
                while row in self.jobs and self.waiting(row):
                    self.prefill(row)
                    if not job.at_once:
                        break
            ready = [row for row in jobs if row in self.jobs and not self.waiting(row) and not jobs[row].rests(step)]
            ready = [row for row in ready if len(self.traces[row].tokens) < count]
            if ready:
                self.round(ready)
            step += 1
            assert step < 100 * count, "the rows do not get on"
        if not keep:
            for row in jobs:
                self.release(row)
        return {row: self.traces[row] for row in jobs}

    def _plan(self, row: int) -> RowPlan:
        job, turn = self.jobs[row], self.traces[row].rounds
        verify, draft = job.fewer(turn, self.backend.left[row]), job.depth(turn)
        pages = self._grow(row, self.length[row] + verify + 1 + draft)
        return RowPlan(row, verify, draft, pages, least=job.least(turn))

    def _grow(self, row: int, positions: int) -> tuple[int, ...]:
        gained = self.pool.take(max(0, -(-positions // self.limits.page) - len(self.pages[row])))
        self.pages[row] += gained
        return gained


class Mixture(Right):
    """Right where a coin that belongs to the row and position says so."""

    name = "mixture"

    def __init__(self, sequences: Mapping[int, Sequence[int]], vocab: int, chance: float, salt: int = 0) -> None:
        super().__init__(sequences, vocab)
        self.chance, self.salt = chance, salt

    def draft(self, feed: Feed, depths: Sequence[int], least: Sequence[float]) -> Proposal:
        tokens = super().draft(feed, depths, least).tokens
        for b, (row, length) in enumerate(zip(feed.layout.rows, feed.lengths.tolist(), strict=True)):
            for j in range(tokens.shape[1]):
                # The round's length is part of the coin, so a position once rejected is not rejected for ever.
                if random.Random(f"{self.salt} {row} {length} {j}").random() > self.chance:
                    tokens[b, j] = (tokens[b, j] + 1 + j) % self.vocab
        return Proposal(tokens, certain=True)


def whole(job: Job, plain: Trace) -> list[int]:
    """A job's prompt and the text that plain decoding gave it, for drafters that know."""
    return [*job.prompt, *plain.tokens]
