"""Random mixes of requests, played on any engine step by step and held against what each gives alone and plain."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Protocol

from headlong.engine.engine import Engine
from headlong.engine.intake import drafters_of, refuse_unfit
from headlong.engine.request import Constraint, Emitted, Limits, Output, Request, Sampling
from headlong.errors import QueueFull, UserError
from headlong.settings import MAX_DEPTH, REQUEST_DRAFT_KINDS

LONGEST_PLAY = 100_000  # steps
SUMS = 'start: part ("+" part){0,3}\npart: /[1-9][0-9]?/'
CONSTRAINTS = (
    Constraint("regex", "[a-z]{2,9}( and [A-Z]{1,5})?"),
    Constraint("choice", ("yes", "no", "nobody", "perhaps not")),
    Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
    Constraint("grammar", SUMS),
)


class Plain(Protocol):
    """What a request gives alone and without drafts; an `Output` is one."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def text(self) -> str: ...
    @property
    def finish_reason(self) -> str: ...


Oracle = Callable[[Request], Plain]


@dataclass(frozen=True)
class Ask:
    """A request, the step before which it arrives, and after how many more it is cancelled."""

    request: Request
    arrives: int
    cancelled_after: int | None = None


@dataclass(frozen=True)
class Taste:
    """What the requests of a mix are like."""

    prompt_tokens: Sequence[int]  # of which prompts are made
    longest_answer: int = 24
    longest_prompt: int = 0  # 0: as long as fits
    temperatures: Sequence[float] = (0.0, 0.0, 0.8)
    constraints: Sequence[Constraint] = ()


@dataclass
class Played:
    """What happened while mixes were played."""

    counts: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: "Played") -> "Played":
        return Played(self.counts + other.counts, self.reasons + other.reasons)

    def __str__(self) -> str:
        told = self.counts + Counter({f"ended by {reason}": count for reason, count in self.reasons.items()})
        return ", ".join(f"{name} {count}" for name, count in sorted(told.items()))


# --- what is asked -----------------------------------------------------------------------------------------------


class Mixer:
    """Draws the requests of a mix. `random` may be hypothesis's, so that what fails is made small."""

    def __init__(self, random: Random, limits: Limits, taste: Taste, plain: Oracle) -> None:
        self.random, self.limits, self.taste = random, limits, taste
        self.plain = remembered(plain)
        self._prompts: list[tuple[int, ...]] = []

    def draw(self, count: int) -> list[Ask]:
        """At least so many requests, in the order in which they arrive."""
        asks: list[Ask] = []
        arrives = 0
        while len(asks) < count:
            arrives += self.random.choice((0, 0, 1, 3, 15))
            asks += [Ask(request, arrives, self._cancelled()) for request in self._requests()]
        return asks

    def _chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == one_in - 1

    def _cancelled(self) -> int | None:
        return self.random.randrange(12) if self._chance(6) else None

    def _requests(self) -> list[Request]:
        """One request, or several answers to one."""
        request = self._request()
        count = self.random.choice((1, 1, 1, 2, 3))
        seed = request.sampling.seed
        if seed is None:
            return [request] * count
        return [replace(request, sampling=replace(request.sampling, seed=seed + place)) for place in range(count)]

    def _request(self) -> Request:
        prompt = self._prompt()
        self._prompts.append(prompt)
        bare = Request(
            prompt,
            self._fitting(prompt),
            self._sampling(),
            ignore_eos=self._chance(4),
            logprobs=self.random.choice((None, None, None, 0, 2)),
        )
        if self.taste.constraints and self._chance(3):
            bare = replace(bare, constraint=self.random.choice(self.taste.constraints), ignore_eos=False)
        bare = replace(
            bare,
            min_tokens=self.random.randint(1, bare.max_tokens) if self._chance(4) else 0,
            priority=self.random.choice((0, 0, 0, 1, -1)),
            deadline_s=self.random.choice((0.0, 0.02, 60.0, 60.0)) if self._chance(8) else None,
        )
        return self._drafting(replace(bare, stop=self._stops(bare) if self._chance(3) else ()))

    def _sampling(self) -> Sampling:
        """Often with some steps of the chain; some draws have no seed."""
        temperature = self.random.choice(self.taste.temperatures)
        seed = self.random.randrange(5) if temperature and not self._chance(5) else None
        return Sampling(temperature, seed=seed, **(self._steps_of_chain() if self._chance(3) else {}))

    def _steps_of_chain(self) -> dict[str, Any]:
        random, bias = self.random, (-100.0, -2.0, 0.5, 3.0)
        steps = {
            "repetition_penalty": random.choice((0.8, 1.3)),
            "presence_penalty": random.choice((-0.5, 0.7)),
            "frequency_penalty": random.choice((-0.2, 0.4)),
            "logit_bias": {random.randrange(self.limits.vocab): random.choice(bias) for _ in range(9)},
            "top_k": random.choice((1, 4, 30)),
            "top_p": random.choice((0.3, 0.9)),
            "min_p": random.choice((0.02, 0.2)),
            "xtc_probability": random.choice((0.5, 1.0)),
        }
        return {name: steps[name] for name in random.sample(sorted(steps), random.choice((1, 1, 2, 4)))}

    def _prompt(self) -> tuple[int, ...]:
        """One of those before, the beginning of one and something else, or a new one; often a few chunks long."""
        if self._prompts and self._chance(4):
            return self.random.choice(self._prompts)
        chunk = self.limits.chunk
        longest = min(self.limits.context - 1, self.limits.pages * self.limits.page - self.limits.depth - 1)
        longest = max(1, min(longest, self.taste.longest_prompt or longest))
        near = self.random.randrange(longest // chunk + 1) * chunk + self.random.choice((-1, 0, 1, 1, 2, chunk // 2))
        length = min(max(1, near), longest)
        shared: tuple[int, ...] = ()
        if self._prompts and self._chance(2):
            other = self.random.choice(self._prompts)
            shared = other[: self.random.choice((1, 2, len(other))) * chunk + self.random.choice((-1, 0, 1))]
        tokens, first, step = self.taste.prompt_tokens, self.random.randrange(7), self.random.randrange(1, 4)
        fresh = tuple(tokens[(first + step * place) % len(tokens)] for place in range(length))
        return (shared + fresh)[:length]

    def _fitting(self, prompt: tuple[int, ...]) -> int:
        wanted = self.random.randint(1, self.taste.longest_answer)
        while wanted > 1:
            try:
                refuse_unfit(Request(prompt, wanted), prompt, self.limits)
            except UserError:
                wanted -= 1
            else:
                break
        return wanted

    def _stops(self, request: Request) -> tuple[str, ...]:
        """Pieces of the text that would come, and one that would not."""
        text = self.plain(request).text
        stops = []
        for _ in range(self.random.choice((1, 1, 2))):
            at = self.random.randrange(len(text) + 1)
            stops.append(text[at : at + self.random.choice((1, 2, 5))] or "nowhere")
        return tuple(stops)

    def _drafting(self, request: Request) -> Request:
        depth = self.random.choice((None, None, self.random.randint(0, MAX_DEPTH)))
        prediction = self._prediction(request) if self._chance(3) else None
        kinds = [kind for kind in REQUEST_DRAFT_KINDS if kind != "prediction" or prediction is not None]
        return replace(request, depth=depth, prediction=prediction, draft_kind=self.random.choice(["auto", *kinds]))

    def _prediction(self, request: Request) -> tuple[int, ...]:
        """The right text, a wrong one, the right one with something left out or put in, or as far as somewhere."""
        right, wrong = self.plain(request).tokens, tuple(self.taste.prompt_tokens[:9])
        at = self.random.randrange(len(right) + 1)
        less, more = right[:at] + right[at + 2 :], right[:at] + wrong[:3] + right[at:]
        return self.random.choice((right, wrong, less, more, right[:at] + wrong))


def _random(request: Request) -> bool:
    """Whether its text is another one each time."""
    return not request.sampling.greedy and request.sampling.seed is None


def remembered(plain: Oracle) -> Oracle:
    """Asks an oracle once for requests that only differ in what must not matter."""
    known: dict[str, Plain] = {}

    def once(request: Request) -> Plain:
        bare = replace(request, depth=None, draft_kind="none", prediction=None, priority=0, deadline_s=None)
        key = repr(bare)
        if key not in known:
            known[key] = plain(bare)
        return known[key]

    return once


def fits(constraint: Constraint, text: str) -> bool:
    """Whether a whole text is what its constraint says."""
    if constraint.kind == "json_schema":
        return _is_json(text)
    if constraint.kind == "choice":
        return text in constraint.source
    pattern = r"[1-9]\d?(\+[1-9]\d?){0,3}" if constraint.kind == "grammar" else str(constraint.source)
    return re.fullmatch(pattern, text) is not None


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def alone(engine: Engine) -> Oracle:
    """What an engine that has nothing else to do gives. For real models, whose script nobody knows."""

    def plain(request: Request) -> Output:
        assert not engine.busy
        index = engine.submit(request)
        while engine.busy:
            engine.step()
        return engine.output(index)

    return plain


# --- what happens ------------------------------------------------------------------------------------------------


class Play:
    """One mix on one engine. Whatever does not hold is an AssertionError that says of which request."""

    def __init__(self, engine: Engine, asks: Sequence[Ask], plain: Oracle, check: Callable[[], None]) -> None:
        self.engine, self.plain, self.check = engine, plain, check
        self.played = Played()
        self._coming = list(asks)
        self._asked: dict[int, Ask] = {}  # by index
        self._cancels: dict[int, list[int]] = {}  # indices by step
        self._cancelled: set[int] = set()
        self._emitted: dict[int, list[Emitted]] = {}

    def run(self) -> Played:
        scheduler = self.engine._loop.scheduler
        scheduler.prefix.clear()
        hits, found = scheduler.prefix.hits, scheduler.prefix.tokens_found
        wait, scheduler.make_wait = scheduler.make_wait, self._counting(scheduler.make_wait)
        step = 0
        while self._coming or self.engine.busy:
            assert step < LONGEST_PLAY, "nothing comes to an end"
            self._arrive(step)
            for index in self._cancels.pop(step, ()):
                self._cancelled.add(index)
                self.engine.cancel(index)
                self.check()
            self._step()
            step += 1
        scheduler.make_wait = wait
        for index, ask in self._asked.items():
            self._judge(index, ask)
        self._end()
        self.played.counts.update(
            requests=len(self._asked),
            steps=step,
            prefix_hits=scheduler.prefix.hits - hits,
            prefix_tokens=scheduler.prefix.tokens_found - found,
        )
        return self.played

    def _counting(self, make_wait: Callable[..., None]) -> Callable[..., None]:
        def counted(job, aside):  # type: ignore[no-untyped-def]
            self.played.counts["preemptions"] += 1
            self.played.counts["preempted_prompts"] += aside is None
            make_wait(job, aside)

        return counted

    def _arrive(self, step: int) -> None:
        engine = self.engine
        while self._coming and self._coming[0].arrives <= step:
            ask = self._coming[0]
            room = engine.limits.rows + engine.settings.queue
            open_ = sum(answer.finish_reason is None for answer in engine._answers.values())
            try:
                index = engine.submit(ask.request)
            except QueueFull:
                assert open_ == room, f"{open_} requests are open, {room} may be, and one was refused"
                self.played.counts["refused"] += 1
                return  # it comes again before the next step
            assert open_ < room, f"{open_} requests were open, {room} may be, and one more was taken"
            self._coming.pop(0)
            self._asked[index] = ask
            self._emitted[index] = []
            if ask.cancelled_after is not None:
                self._cancels.setdefault(step + ask.cancelled_after, []).append(index)

    def _step(self) -> None:
        if not self.engine.busy:
            self.engine.rest()
            self.check()
            return
        for emitted in self.engine.step():
            mine = self._emitted[emitted.index]
            assert not mine or mine[-1].finish_reason is None, f"request {emitted.index} goes on after its end"
            mine.append(emitted)
        self.check()

    def _judge(self, index: int, ask: Ask) -> None:
        output = self.engine.output(index)
        reason, request = output.finish_reason, ask.request
        self.played.reasons[reason] += 1
        self.played.counts["faults"] += reason == "fault"
        assert reason != "fault", f"{output.error} in {request}"
        self._judge_stream(index, output)
        self._judge_end(index, output, request)
        self._judge_form(output, request)
        if _random(request):
            self.played.counts["random"] += 1
        else:
            self._judge_text(output, request)
        self._judge_counts(output, request)

    def _judge_end(self, index: int, output: Output, request: Request) -> None:
        """Whether it may have ended so."""
        reason = output.finish_reason
        assert reason != "cancelled" or index in self._cancelled, f"nobody cancelled {request}"
        assert reason != "deadline" or request.deadline_s is not None, f"there was no deadline for {request}"
        if request.deadline_s == 0.0:
            assert reason in ("deadline", "cancelled")
            assert (output.tokens, output.text) == ((), ""), f"{output.text!r} came after its deadline, of {request}"

    def _judge_form(self, output: Output, request: Request) -> None:
        """What holds of every text, random or not."""
        count, reason = len(output.tokens), output.finish_reason
        assert count <= request.max_tokens
        if reason == "length":
            assert count == request.max_tokens, f"{count} tokens of {request}"
        if reason == "stop" and request.constraint is None:
            assert count >= request.min_tokens, f"{count} tokens of {request}"
        if reason == "stop" and request.constraint and not output.stopped_by:
            assert fits(request.constraint, output.text), f"{output.text!r} of {request}"
            self.played.counts["whole"] += 1
            self.played.counts["whole_early"] += count < request.min_tokens
        if request.logprobs is not None:
            assert tuple(one.token for one in output.logprobs) == output.tokens

    def _judge_text(self, output: Output, request: Request) -> None:
        """Of a text that depends on nothing but its request."""
        plain, reason = self.plain(request), output.finish_reason
        got, wanted = (output.tokens, output.text, reason), (plain.tokens, plain.text, plain.finish_reason)
        if reason in ("stop", "length"):
            assert got == wanted, f"{got}, alone {wanted}: {request}"
            if request.logprobs is not None and isinstance(plain, Output):  # a script knows no logprobs
                assert output.logprobs == plain.logprobs, f"{output.logprobs}, alone {plain.logprobs}: {request}"
            return
        assert plain.tokens[: len(output.tokens)] == output.tokens, f"{got}, alone {wanted}: {request}"
        decoder = self.engine.text.decoder(request.prompt)
        written = "".join(decoder.push(token) for token in output.tokens)
        assert output.text == written, f"{got}, its tokens say {written!r}: {request}"

    def _judge_stream(self, index: int, output: Output) -> None:
        """What was handed out step by step is the whole."""
        emitted = self._emitted[index]
        tokens = tuple(one.token for one in emitted if one.token is not None)
        ended_by_token = emitted and emitted[-1].finish_reason == "stop" and tokens != output.tokens
        text = "".join(one.text for one in emitted)
        if index in self._cancelled and not (emitted and emitted[-1].finish_reason):  # who cancels is told no more
            assert output.tokens[: len(tokens)] == tokens
            assert output.text.startswith(text)
            return
        assert (tokens[:-1] if ended_by_token else tokens) == output.tokens
        assert text == output.text
        assert [one.finish_reason for one in emitted if one.finish_reason] == [output.finish_reason]

    def _judge_counts(self, output: Output, request: Request) -> None:
        spent = output.speculative
        self.played.counts.update(rounds=spent.rounds, drafted=spent.drafted, accepted=spent.accepted)
        assert 0 <= spent.accepted <= spent.drafted
        assert spent.accepted <= len(output.tokens) + 1 <= spent.rounds + spent.accepted + 1
        assert all(drafts <= self.engine.limits.depth for drafts, _ in spent.depths)
        used = set(spent.used.split("+")) - {"none", "grammar"}
        assert used <= set(drafters_of(request, self.engine.limits, self.engine.settings))

    def _end(self) -> None:
        """Nothing is left behind."""
        engine, scheduler = self.engine, self.engine._loop.scheduler
        while engine.rest():
            self.check()
        with engine.idle_backend():  # whoever rests gives back its row
            pass
        assert not engine.busy
        assert not engine._answers
        assert not engine._outboxes
        assert not engine._loop.answers
        assert not scheduler.busy
        scheduler.prefix.clear()
        scheduler.check()
        assert scheduler.pool.free == engine.limits.pages
        self.check()


def play(engine: Engine, asks: Sequence[Ask], plain: Oracle, check: Callable[[], None] | None = None) -> Played:
    """Play a mix to its end. `check` is called after every step and every cancellation."""
    return Play(engine, asks, plain, check or engine._loop.scheduler.check).run()
