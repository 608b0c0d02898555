"""Mixes on the scripted backend: engines of random limits, and all that can be seen of a backend made of plain ints."""

from dataclasses import dataclass, replace
from random import Random

from headlong.backends.fake import FakeBackend, fake_limits
from headlong.engine.engine import Engine
from headlong.engine.request import Limits, Request, RoundResult
from headlong.engine.stops import StopStrings
from headlong.engine.text import Text
from headlong.settings import DRAFT_KINDS, Settings
from tests.engine.conftest import END, byte_tokenizer
from tests.engine.mix import CONSTRAINTS, Mixer, Play, Played, Taste, alone
from tests.engine.scripted import MIXED, RIGHT, WRONG, walk

TEXT = Text(byte_tokenizer())
END_TOKEN = TEXT.encode(END)[0]
VOCAB = 300
POISON = -7
TASTE = Taste(prompt_tokens=range(200))
CONSTRAINED = replace(TASTE, constraints=CONSTRAINTS)


def wander(history):
    """Like `walk`, with an end now and then."""
    return END_TOKEN if sum(history) % 23 == 0 else walk(history)


def repeat(history):
    """Mostly what it said five tokens ago; how long depends on all that was said."""
    return wander(history) if len(history) < 6 or sum(history) % 9 == 0 else history[-5]


@dataclass(frozen=True)
class Told:
    tokens: tuple[int, ...]
    text: str
    finish_reason: str


def scripted(script):
    """The oracle: what a script says to a request, read off token by token."""

    def plain(request: Request) -> Told:
        decoder, stops = TEXT.decoder(request.prompt), StopStrings(request.stop)
        history, shown, reason = tuple(request.prompt), "", "length"
        prompt = len(history)
        while len(history) - prompt < request.max_tokens:
            token = script(history)
            is_end = token == END_TOKEN and not request.ignore_eos
            if is_end and len(history) - prompt >= request.min_tokens:
                reason = "stop"
                break
            history += (token + is_end,)  # a quiet token gives way to the next one
            piece = decoder.push(history[-1])
            shown += piece if len(history) - prompt < request.min_tokens else stops.push(piece)
            if stops.complete:
                return Told(history[prompt:], shown, "stop")
        return Told(history[prompt:], shown + stops.push(decoder.flush()) + stops.flush(), reason)

    return plain


@dataclass(frozen=True)
class Timed:
    """A round with seconds, so that depths are chosen and change."""

    kept: list
    verify_s: float
    draft_s: float

    def result(self):
        return RoundResult(self.kept, self.verify_s, self.draft_s)


class TimedFake(FakeBackend):
    """A token costs a share of a round, and so does a draft; every few rounds are slower."""

    token_cost = draft_cost = 0.0

    def round(self, plan):
        kept = super().round(plan).kept
        slow = 1.3 if len(self.rounds) % 7 == 0 else 1.0
        tokens = sum(1 + part.verify for part in plan)
        drafts = sum(part.draft for part in plan)
        return Timed(kept, slow * 1e-3 * (1 + self.token_cost * tokens), slow * 1e-3 * self.draft_cost * drafts)


def draw_limits(random: Random) -> Limits:
    page = random.choice((1, 2, 4))
    context = random.choice((24, 40, 64))
    limits = fake_limits(
        rows=random.choice((1, 3, 5, 8)),
        context=context,
        page=page,
        chunk=page * random.choice((1, 2, 4)),
        vocab=VOCAB,
        depth=random.choice((8, 8, 3, 1, 0)),
        head=random.randrange(5) > 0,
        pieces=random.choice((1, 2, 3, 6)),
    )
    whole = -(-context // page)  # what one sequence may fill
    pages = random.choice((limits.pages, whole, whole, whole, whole, whole * 3 // 2, max(1, whole // 2)))
    return replace(limits, pages=pages, overlaps=random.randrange(3) == 0)


def draw_engine(random: Random) -> Engine:
    limits = draw_limits(random)
    fake = TimedFake(
        random.choice((wander, wander, repeat)),
        right=random.choice((RIGHT, WRONG, MIXED, MIXED)),
        knows=random.randrange(3) > 0 and not limits.overlaps,  # whose drafts are planned for before they are known
        limits=limits,
    )
    fake.token_cost, fake.draft_cost = random.choice(((0.0, 0.0), (0.02, 0.05), (0.5, 0.3)))
    few_prefixes = random.choice((2, 5, 9)) * limits.chunk * 8 + 250
    settings = Settings(
        budget=random.choice((0, 0, 1, limits.chunk, 3 * limits.chunk)),
        prefix_bytes=random.choice((0, 1 << 30, 1 << 30, few_prefixes)),
        queue=random.choice((1024, 1024, 1, 3)),
        draft_kind=random.choice(("auto", "auto", "auto", *DRAFT_KINDS)),
    )
    engine = Engine(fake, TEXT, "fake", (END_TOKEN,), settings)
    engine.backend = fake
    return engine


class Check:
    """Scheduler and backend agree about rows and pages; what is free is overwritten, what is cached stays as it was."""

    def __init__(self, engine: Engine) -> None:
        self.fake, self.loop, self.scheduler = engine.backend, engine._loop, engine._loop.scheduler

    def __call__(self) -> None:
        self.scheduler.check()
        self._check_rows()
        self._check_prefixes()
        self._poison()

    def _check_rows(self) -> None:
        jobs = {job.row: job for job in self.scheduler.running if job.started and job.aside is None}
        assert set(jobs) == set(self.fake.rows)
        for number, row in self.fake.rows.items():
            job = jobs[number]
            gave, left = self._under_way().get(job.index, (0, job.drafting.left))
            assert (row.length, row.pages, row.prompt) == (job.length + gave, job.pages, job.prompt)
            assert row.start.seed == job.seed or job.index < 0
            assert len(row.drafts) == left

    def _under_way(self) -> dict[int, tuple[int, int]]:
        """By job: the tokens and the drafts of a round that the engine has not looked at yet."""
        flight = self.loop._flight
        if flight is None:
            return {}
        kept = {each.row: each for each in flight.handle.kept}
        return {p.job.index: (len(kept[p.plan.row].tokens), len(kept[p.plan.row].left)) for p in flight.parts}

    def _check_prefixes(self) -> None:
        size = self.fake.limits.page
        for node in self.scheduler.prefix._used:
            found = tuple(self.fake.cells[page * size + offset] for page in node.pages for offset in range(size))
            assert found == node.key[:-1], "a cached page was written"

    def _poison(self) -> None:
        size = self.fake.limits.page
        for page in self.scheduler.pool._free:
            for offset in range(size):
                self.fake.cells[page * size + offset] = POISON


def constrained(script):
    """The oracle of texts that a grammar shapes: an engine that never drafts, with nothing else to do."""
    unconstrained = scripted(script)
    lonely = Engine(
        FakeBackend(script, limits=fake_limits(rows=1, vocab=VOCAB, head=False)),
        TEXT,
        "alone",
        (END_TOKEN,),
        Settings(prefix_bytes=0, draft_kind="none"),
    )
    shaped = alone(lonely)
    return lambda request: shaped(request) if request.constraint else unconstrained(request)


def play_one(random: Random, count: int, taste: Taste = TASTE) -> Played:
    """One engine, one mix."""
    engine = draw_engine(random)
    oracle = constrained if taste.constraints else scripted
    mixer = Mixer(random, engine.limits, taste, oracle(engine.backend._script))
    check = Check(engine)
    check()
    played = Play(engine, mixer.draw(count), mixer.plain, check).run()
    assert not engine.backend.rows
    return played
