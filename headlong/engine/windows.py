"""What stands in every row's next window, and how many drafts the head is to leave for the one after."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import log1p
from typing import TYPE_CHECKING

from headlong.engine.depth import DepthController, RowDepth
from headlong.engine.proposals import Proposer
from headlong.engine.request import Kept, Limits

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from headlong.engine.constraint import Guide
    from headlong.engine.scheduler import Job

HEAD = "mtp"
GRAMMAR = "grammar"
NGRAM = "ngram"
EVEN = 4  # drafts of a round come in multiples of it, or of the rows if there are fewer
LONG_MATCH = 8  # tokens of the text that already followed what is proposed: such drafts are far more often right


@dataclass(frozen=True)
class Window:
    """One row's drafts for a round."""

    drafter: str  # whose drafts they are
    source: str  # of what kind they are, as far as it tells how often such drafts are right
    verify: int
    draft: int  # drafts to leave for the next round
    given: tuple[int, ...] | None = None  # the drafts; None: those that the backend has
    masks: "Callable[[], NDArray[np.int32]] | None" = None


@dataclass(frozen=True)
class Offer:
    """Drafts that stand ready for a row."""

    drafter: str
    source: str
    count: int
    given: tuple[int, ...] | None = None
    goes_on: bool = False  # the same drafter has more, so the head may rest


NOTHING = Offer("none", "none", 0)


@dataclass
class Drafting:
    """Who may draft for one request, and what is known of how well they do."""

    depth: RowDepth
    uses_head: bool = False
    proposers: Sequence[Proposer] = ()
    guide: "Guide | None" = None
    left: int = 0  # drafts that the head has left for the next window
    known: tuple[int, ...] = field(default=())  # those drafts, where the host was told

    def offer(self, most: int, prices: Sequence[float] = ()) -> Offer:
        """The drafts that are expected to give most tokens beyond their prices, and no more of them than give any."""
        if self.depth.asked is not None:
            prices = ()
        offers = [self._worthwhile(offer, prices) for offer in self._offers(most)]
        return max(
            [offer for offer in offers if offer.count], key=lambda each: self._gain(each, prices), default=NOTHING
        )

    def _worthwhile(self, offer: Offer, prices: Sequence[float]) -> Offer:
        """The head's drafts were planned and made with the others'; all of them are verified."""
        if offer.given is None or not prices:
            return offer
        count, gives = 0, 1.0
        for likely, price in zip(self.reach(offer), prices, strict=False):
            if price and likely <= price * gives:
                break
            count, gives = count + 1, gives + likely
        return offer if count == offer.count else replace(offer, count=count, goes_on=False)

    def _offers(self, most: int) -> list[Offer]:
        if most <= 0:
            return []
        offers = [Offer(HEAD, HEAD, self._valid(self.known, min(self.left, most)))]
        if self.guide:
            offers.append(self._given(GRAMMAR, GRAMMAR, self.guide.forced(2 * most), most))
        for proposer in self.proposers:
            tokens, long = proposer.propose(2 * most), proposer.match >= LONG_MATCH
            if long or proposer.name != NGRAM or not self.uses_head:  # where a short match and the head differ, it errs
                source = f"{proposer.name}, long match" if long else proposer.name
                offers.append(self._given(proposer.name, source, tokens, most))
        return offers

    def _given(self, drafter: str, source: str, tokens: tuple[int, ...], most: int) -> Offer:
        count = self._valid(tokens, min(len(tokens), most))
        return Offer(drafter, source, count, tokens[:count], goes_on=count == most < len(tokens))

    def _valid(self, tokens: Sequence[int], count: int) -> int:
        """How many of the first drafts the grammar allows."""
        return self.guide.valid(tokens[:count]) if self.guide and count else count

    def _gain(self, offer: Offer, prices: Sequence[float]) -> float:
        """In the log of the row's tokens, as depths are chosen."""
        return log1p(sum(self.reach(offer))) - sum(prices[: offer.count])

    @property
    def foreseeable(self) -> bool:
        """Whether the head alone fills the next window, so that nobody need know the text for it."""
        if self.guide or (self.proposers and not self.uses_head):
            return False
        return all(proposer.name == NGRAM and proposer.match < LONG_MATCH for proposer in self.proposers)

    def reach(self, offer: Offer) -> list[float]:
        """How likely each draft, with those before it, is to be kept."""
        return self.depth.reach(offer.source, offer.count)

    def window(self, offer: Offer, verify: int, draft: int) -> Window:
        """The first drafts of an offer. Masks are computed when asked for, while the target runs."""
        guide, drafts = self.guide, (self.known if offer.given is None else offer.given)[:verify]
        return Window(
            offer.drafter if verify else NOTHING.drafter,
            offer.source,
            verify,
            draft,
            given=None if offer.given is None else offer.given[:verify],
            masks=None if guide is None else lambda: guide.masks(drafts),
        )

    def take(self, kept: Kept, window: Window, tokens: Sequence[int]) -> None:
        """Learn what a round kept; `tokens` are those of it that became text, an end token included."""
        self.left, self.known = len(kept.left), kept.left
        if window.verify:
            self.depth.record(window.source, window.verify, len(kept.tokens) - 1)
        if self.guide:
            self.guide.accept(tokens)
        for proposer in self.proposers:
            proposer.extend(tokens)


class Windows:
    """Plans the windows of all rows together, since what a draft costs depends on everybody's."""

    def __init__(self, limits: Limits, controller: DepthController) -> None:
        self.limits = limits
        self.controller = controller
        self._tokens = self._deepest = 0  # of the last round: what it was run with, and drafts that the head left

    def prices(self, kind: str, rows: int) -> list[float]:
        """By position: what a draft must add, as a share of its row's tokens, to be verified in the next round."""
        limits = self.limits
        price = self.controller.price(kind, max(self._tokens, limits.sizes.rows(rows)), rows)
        free = self._deepest if limits.sizes.padded else 0  # the head's drafts make windows so wide anyhow
        return [0.0] * free + [price] * (limits.depth - free)

    def offer(self, job: "Job", prices: Sequence[float] = ()) -> Offer:
        return job.drafting.offer(self._most(job), prices)

    def expected(self, job: "Job", window: Window) -> Offer:
        """What there will be to verify when a round with this window, which is under way, has ended."""
        count = min(window.draft, self._most(job))
        return Offer(HEAD, HEAD, count) if count else NOTHING

    def _most(self, job: "Job") -> int:
        # A round yields verify + 1 tokens at most: what goes past the last wanted token is waste.
        return min(job.drafting.depth.most, job.remaining - 1, self.limits.context - job.reach - 1)

    def plan(self, offered: "Sequence[tuple[Job, Offer]]", kind: str) -> "list[tuple[Job, Window]]":
        depths = [job.drafting.depth for job, _ in offered]
        reaches = [job.drafting.reach(offer) for job, offer in offered]
        verify = [offer.count for _, offer in offered]
        if not self.limits.sizes.padded:
            verify = _evened(verify, depths, reaches)
        self._tokens = self.limits.sizes.tokens(verify) if verify else 0
        for (job, offer), count in zip(offered, verify, strict=True):
            job.drafting.depth.cap = self._cap(job, offer, job.reach + count + 1, job.remaining - 2)
        draft = self.controller.plan(depths, kind)
        self._deepest = max(draft, default=0)
        return [
            (job, job.drafting.window(offer, count, leave))
            for (job, offer), count, leave in zip(offered, verify, draft, strict=True)
        ]

    def first(self, job: "Job", running: "Sequence[Job]", kind: str) -> int:
        """Drafts for a row's first round among those that run, to be made with the last chunk of its prompt."""
        drafting = job.drafting
        if drafting.guide:
            return 0  # the host must know a constrained row's drafts
        drafting.depth.cap = self._cap(job, NOTHING, job.prefill_end, job.max_tokens - 1)
        return self.controller.plan([*(each.drafting.depth for each in running), drafting.depth], kind)[-1]

    def _cap(self, job: "Job", offer: Offer, written: int, wanted: int) -> int:
        """Most drafts that the head may leave after position `written` - 1; its cache stays inside the context too."""
        if not job.drafting.uses_head or offer.goes_on:
            return 0
        return max(0, min(wanted, self.limits.context - written))


def _evened(verify: list[int], depths: Sequence[RowDepth], reaches: Sequence[Sequence[float]]) -> list[int]:
    """Without the least likely drafts, so that rounds come in fewer sizes: a backend is fastest in sizes it knows."""
    step = min(len(verify), EVEN)
    free = [place for place, depth in enumerate(depths) if depth.asked is None and not depth.probe.launched]
    if sum(verify) < step or not any(verify[place] for place in free):
        return verify
    verify = list(verify)
    for _ in range(sum(verify) % step):
        drafting = [place for place in free if verify[place]]
        if drafting:
            verify[min(drafting, key=lambda place: reaches[place][verify[place] - 1])] -= 1
    return verify
