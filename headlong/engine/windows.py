"""What stands in every row's next window, and how many drafts the head is to leave for the one after."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import accumulate, pairwise
from math import log1p
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from headlong.engine.depth import DepthController, RowDepth, other_crowd
from headlong.engine.proposals import Proposer
from headlong.engine.request import Kept, Limits
from headlong.engine.scene import HEAD

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headlong.engine.constraint import Guide
    from headlong.engine.scheduler import Job

GRAMMAR = "grammar"
NGRAM = "ngram"
MOST_UNASKED = 8  # rounds; as long as a text that is copied may wait to be noticed
PATIENT = 4  # rows, for so many of which n-grams stay unasked for one round more each time that there were none
PACE_ROUNDS = 16  # that a row's pace is the average of
LONG = ", long match"  # added to a proposer's name: what it proposes then is judged apart
LONG_MATCH = 8  # tokens of the text that already followed what is proposed: such drafts are far more often right


class Window(NamedTuple):
    """One row's drafts for a round."""

    drafter: str  # whose drafts they are
    source: str  # of what kind they are, as far as it tells how often such drafts are right
    verify: int
    draft: int  # drafts to leave for the next round
    given: tuple[int, ...] | None = None  # the drafts; None: those that the backend has
    left: int = 0  # of them are the head's, whoever else has the same
    masks: "Callable[[], NDArray[np.int32]] | None" = None
    least: float = 0.0  # chance to be kept that a draft must have to be left


@dataclass(frozen=True)
class Offer:
    """Drafts that stand ready for a row."""

    drafter: str
    source: str
    count: int
    given: tuple[int, ...] | None = None
    goes_on: bool = False  # the same drafter has more, so the head may rest
    left: int = 0  # of them are the head's too

    def first(self, count: int) -> "Offer":
        if count == self.count:
            return self
        return replace(self, count=count, goes_on=False) if count > self.left else _of_head(count, self.source)


NOTHING = Offer("none", "none", 0)


@cache
def _of_head(count: int, source: str = HEAD) -> Offer:
    return Offer(HEAD, source, count, left=count) if count else NOTHING


class Pace:
    """Tokens that a row's rounds give, of late."""

    def __init__(self) -> None:
        self.tokens = 1.0
        self._rounds = 0

    def take(self, tokens: int) -> None:
        self._rounds = min(self._rounds + 1, PACE_ROUNDS)
        self.tokens += (tokens - self.tokens) / self._rounds


@dataclass
class Drafting:
    """Who may draft for one request, and what is known of how well they do."""

    depth: RowDepth
    uses_head: bool = False
    proposers: Sequence[Proposer] = ()
    guide: "Guide | None" = None
    drawn: bool = False  # by the rejection rule, which holds only if what was drawn does not decide who drafts
    pace: Pace = field(default_factory=Pace)
    left: int = 0  # drafts that the head has left for the next window
    cut: bool = False  # it was to leave more, which were too unlikely to be kept
    known: tuple[int, ...] = field(default=())  # those drafts, where the host was told

    @property
    def silent(self) -> bool:
        """Whether nobody but the head has drafts for the next window."""
        return not (self.guide or any(map(self._speaks, self.proposers)))

    def _speaks(self, proposer: Proposer) -> bool:
        """Whether a proposer is to be heard: where a short match and the head differ, it errs."""
        return proposer.name != NGRAM or not self.uses_head or proposer.matches(LONG_MATCH)

    def offer(self, most: int, head_alone: bool = False) -> Offer:
        """The drafts that are expected to give most tokens."""
        if most <= 0:
            return NOTHING
        count = min(self.left, most)
        left = count if self.drawn else self._valid(self.known, count)
        if head_alone:
            return _of_head(left)
        offers = [offer for offer in (_of_head(left), *self._others(most, left)) if offer.count]
        if len(offers) > 1:
            return max(offers, key=lambda each: sum(self.reach(each)))
        return offers[0] if offers else NOTHING

    def _others(self, most: int, left: int) -> list[Offer]:
        """What stands ready beside so many drafts of the head."""
        offers = []
        if self.guide:
            offers.append(self._given(GRAMMAR, GRAMMAR, self.guide.forced(2 * most), most))
        for proposer in self.proposers:
            if self._speaks(proposer):
                offers.append(self._proposed(proposer, most, left))
        return offers

    def _proposed(self, proposer: Proposer, most: int, left: int) -> Offer:
        """Where an n-gram and the head differ the head is right two times in three; where they agree, what the n-gram
        has after the head's drafts is nearly always right."""
        source = proposer.name + (LONG if proposer.matches(LONG_MATCH) else "")
        tokens = proposer.propose(2 * most)
        if self.drawn or not left or proposer.name != NGRAM:
            return self._given(proposer.name, source, tokens, most)
        return self._given(proposer.name, source, tokens, most, left) if tokens[:left] == self.known[:left] else NOTHING

    def _given(self, drafter: str, source: str, tokens: tuple[int, ...], most: int, left: int = 0) -> Offer:
        count = self._valid(tokens, min(len(tokens), most))
        if count <= left:
            return NOTHING
        return Offer(drafter, source, count, tokens[:count], count == most < len(tokens), left)

    def _valid(self, tokens: Sequence[int], count: int) -> int:
        """How many of the first drafts the grammar allows."""
        return self.guide.valid(tokens[:count]) if self.guide and count else count

    @cached_property
    def patient(self) -> bool:
        """Whether nothing but n-grams may stand ready beside the head's drafts, and nobody asked for some."""
        return self.depth.asked is None and self.guide is None and self.foreseeable

    @property
    def foreseeable(self) -> bool:
        """Whether the head may fill the next window, so that nobody need know the text for it."""
        if self.proposers and not self.uses_head:
            return False
        return all(proposer.name == NGRAM for proposer in self.proposers)

    def lost(self, most: int, now: Window) -> float:
        """What the drafts that a round under way leaves are expected to give less than others that stand ready, in the
        log of tokens."""
        ahead = 1 + now.verify
        sure = len(self.guide.forced(most + ahead)) - ahead if self.guide and most > 0 else 0
        others = float(max(0, sure))
        if any(proposer.matches(LONG_MATCH) for proposer in self.proposers):
            others = max(others, sum(self.depth.reach(NGRAM + LONG, most)))
        return max(0.0, log1p(others) - log1p(sum(self.depth.reach(HEAD, now.draft)))) if others else 0.0

    def reach(self, offer: Offer) -> list[float]:
        """How likely each draft, with those before it, is to be kept."""
        return self.depth.left(offer.count) if offer.source == HEAD else self.depth.reach(offer.source, offer.count)

    def gains(self, offer: Offer, repaid: bool) -> list[float]:
        """What each draft behind those that the head has too gives, in rounds as they usually are. Rows that have such
        rounds in turn repay each other for longer ones; those who never have some are not, and a round's further tokens
        are worth ever less."""
        reach = self.reach(offer)
        usual = max(self.pace.tokens, 1.0 + sum(reach[: offer.left]))
        shares = [tokens / usual for tokens in reach[offer.left :]]
        if repaid:
            return shares
        logs = [log1p(all_so_far) for all_so_far in accumulate(shares, initial=0.0)]
        return [after - before for before, after in pairwise(logs)]

    def window(self, offer: Offer, verify: int, draft: int, least: float = 0.0) -> Window:
        """The first drafts of an offer. Masks are computed when asked for, while the target runs."""
        given = None if offer.given is None else offer.given[:verify]
        masks = partial(self._masks, self.guide, verify, given) if self.guide else None
        drafter = offer.drafter if verify else NOTHING.drafter
        least = least if self.depth.sifted else 0.0
        return Window(drafter, offer.source, verify, draft, given, offer.left, masks, least)

    def _masks(self, guide: "Guide", verify: int, given: tuple[int, ...] | None) -> "NDArray[np.int32]":
        """By now the head's drafts are known, if they were not yet when the window was planned."""
        return guide.masks(self.known[:verify] if given is None else given)

    def take(self, kept: Kept, window: Window, tokens: Sequence[int]) -> None:
        """Learn what a round kept; `tokens` are those of it that became text, an end token included."""
        accepted = len(kept.tokens) - 1
        self.pace.take(len(kept.tokens))
        # A draft that was too unlikely counts as one that was not kept: what is planned is what windows then give.
        looked = window.left + (self.cut and window.left == self.left)
        if looked:
            self.depth.record(HEAD, looked, min(accepted, window.left))
        self.left, self.known, self.depth.late = len(kept.left), kept.left, kept.late
        self.cut = self.left < window.draft
        if window.least:
            self.depth.leaving.record(window.draft, self.left)
        if window.verify and window.source != HEAD:
            self.depth.record(window.source, window.verify, accepted)
        if self.guide:
            self.guide.accept(tokens)
        for proposer in self.proposers:
            proposer.extend(tokens)


class Windows:
    """Plans the windows of all rows together, since what a draft costs depends on everybody's."""

    def __init__(self, limits: Limits, controller: DepthController) -> None:
        self.limits = limits
        self.controller = controller
        self._rows = 0  # in the last round
        self._refused = 0  # times in a row that drafts beside the head's were not worth it
        self._unasked = 0  # rounds for which nobody is asked for such drafts
        self._quiet = 0  # times in a row that no patient row had any
        self._unheard = 0  # rounds for which those are not asked
        self._bare = False  # the next round is to tell what one without drafts costs
        self._bystanders = False  # some row of the last round never drafts, and only loses by others' drafts

    def offer(self, job: "Job") -> Offer:
        drafting = job.drafting
        head_alone = self._passes_over(drafting) or drafting.silent
        if head_alone and not drafting.left:
            return NOTHING
        return drafting.offer(self._most(job), head_alone)

    def _passes_over(self, drafting: Drafting) -> bool:
        """Whether a row is not asked for drafts beside the head's just now. The head gives more for what rows lend that
        never draft, and the search costs them time too."""
        unheard = self._unheard > 0 or self._bystanders
        return (self._unasked > 0 and drafting.depth.asked is None) or (unheard and drafting.patient)

    def expected(self, job: "Job", window: Window) -> Offer:
        """What there will be to verify when a round with this window, which is under way, has ended."""
        return _of_head(max(0, min(window.draft, self._most(job))))

    def foreseeable(self, flying: "Sequence[tuple[Job, Window]]", kind: str) -> bool:
        """Whether the head fills the windows after those under way: it alone can, or what others have ready is not
        worth the wait."""
        jobs = [job for job, _ in flying]
        if not all(job.drafting.foreseeable for job in jobs):
            return False
        if self._unasked or self._bare:
            return True
        most = [self._most(job) for job in jobs]
        lost = [
            0.0 if self._passes_over(job.drafting) else job.drafting.lost(count, now)
            for (job, now), count in zip(flying, most, strict=True)
        ]
        if not any(lost):
            return True
        soon = [now.draft for _, now in flying]
        late = [there if less else here for less, here, there in zip(lost, soon, most, strict=True)]
        sizes = self.limits.sizes.tokens(soon), self.limits.sizes.tokens(late)
        return not self.controller.worth_waiting(kind, len(jobs), sizes, sum(lost))

    def _most(self, job: "Job") -> int:
        # A round yields verify + 1 tokens at most: what goes past the last wanted token is waste.
        most = job.drafting.depth.most if job.drafting.depth.asked is not None or not self._bare else 0
        return min(most, job.remaining - 1, self.limits.context - job.reach - 1)

    def plan(self, offered: "Sequence[tuple[Job, Offer]]", kind: str) -> "list[tuple[Job, Window]]":
        if other_crowd(len(offered), self._rows):
            self._refused = self._quiet = self._unasked = self._unheard = 0
        self._rows, self._unasked = len(offered), max(0, self._unasked - 1)
        self._bystanders = any(job.drafting.depth.asked == 0 for job, _ in offered)
        self._listen(offered)
        offered = self._worthwhile(offered, kind)
        rests = self._rests(offered)
        for job, offer in offered:
            job.drafting.depth.cap = 0 if rests else self._cap(job, job.reach + offer.count + 1, job.remaining - 2)
        draft = self.controller.plan([job.drafting.depth for job, _ in offered], kind)
        self._bare = self.controller.anchors
        return [
            (job, job.drafting.window(offer, offer.count, leave, self.controller.least))
            for (job, offer), leave in zip(offered, draft, strict=True)
        ]

    def _listen(self, offered: "Sequence[tuple[Job, Offer]]") -> None:
        """Rows that could only have n-grams are asked ever less often while none of them has any."""
        if self._unheard or self._bystanders:
            self._unheard = max(0, self._unheard - 1)
            return
        quiet = all(offer.given is None for job, offer in offered if job.drafting.patient)
        self._quiet = self._quiet + 1 if quiet else 0
        self._unheard = min(self._quiet * (len(offered) // PATIENT), MOST_UNASKED)

    def _worthwhile(self, offered: "Sequence[tuple[Job, Offer]]", kind: str) -> "Sequence[tuple[Job, Offer]]":
        """Of the drafts that nobody planned or asked for, those that make rows faster, all taken together.

        The head's drafts were planned and made with the others'; all of them are verified.
        """
        counts = [offer.count for _, offer in offered]
        gains = []  # of each further draft, in rounds of its row as they usually are
        for place, (job, offer) in enumerate(offered):
            if offer.given is not None and job.drafting.depth.asked is None:
                gains += [(gain, place) for gain in job.drafting.gains(offer, repaid=not self._bystanders)]
                counts[place] = offer.left
        if not gains:
            return offered
        gains.sort(key=itemgetter(0), reverse=True)  # a row's own become ever less, so they stay in their order
        sizes = self.limits.sizes.growing(counts, [place for _, place in gains])
        gained = list(accumulate((gain for gain, _ in gains), initial=0.0))
        best = self.controller.best_of(kind, len(offered), sizes, gained)
        self._refused = 0 if best else self._refused + 1
        self._unasked = min(self._refused, MOST_UNASKED)
        for _, place in gains[:best]:
            counts[place] += 1
        return [(job, offer.first(count)) for (job, offer), count in zip(offered, counts, strict=True)]

    def first(self, job: "Job", running: "Sequence[Job]", kind: str) -> int:
        """Drafts for a row's first round among those that run, to be made with the last chunk of its prompt."""
        drafting = job.drafting
        # The host must know a constrained row's drafts. And where rounds are captured, one more of them takes less time
        # than drafts outside of them, which the host launches step by step.
        if drafting.guide or self.limits.sizes.padded:
            return 0
        drafting.depth.cap = self._cap(job, job.prefill_end, job.max_tokens - 1)
        return self.controller.first(drafting.depth, [each.drafting.depth for each in running], kind)

    def _rests(self, offered: "Sequence[tuple[Job, Offer]]") -> bool:
        """Whether the head has nothing to do, since others have enough for every row. For some rows alone it would save
        next to nothing, and where rounds are padded nothing at all."""
        return not self.limits.sizes.padded and all(offer.goes_on for job, offer in offered if job.drafting.uses_head)

    def _cap(self, job: "Job", written: int, wanted: int) -> int:
        """Most drafts that the head may leave after position `written` - 1; its cache stays inside the context too."""
        return max(0, min(wanted, self.limits.context - written)) if job.drafting.uses_head else 0
