"""The prefix cache."""

from dataclasses import dataclass
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headlong.engine.pages import PagePool
from headlong.engine.prefix import STRIDE, Match, PrefixCache, common_chunks
from headlong.engine.request import Limits
from headlong.errors import Fault

PAGE, CHUNK = 2, 4
PAGE_BYTES, STATE_BYTES = 10, 100
CHUNK_BYTES = CHUNK // PAGE * PAGE_BYTES
PLENTY = 10**9
REPEATABLE = settings(derandomize=True, database=None, deadline=None)


@dataclass(frozen=True)
class State:
    """What a row remembers after `tokens`, made when the token after them was known."""

    tokens: tuple[int, ...]
    after: int
    nbytes: int = STATE_BYTES


def limits(pages=64, page=PAGE, chunk=CHUNK, page_bytes=PAGE_BYTES):
    return Limits(4, 1 << 20, page, chunk, pages, 1000, 0, "none", "", page_bytes=page_bytes)


def chunks(*names, after=0):
    """A prompt of full chunks, each of one token repeated, and its last token."""
    return (*(name for name in names for _ in range(CHUNK)), after)


class Rig:
    """A cache over a pool, and rows that put prompts into it."""

    def __init__(self, budget=PLENTY, pages=64):
        self.pool = PagePool(pages)
        self.cache = PrefixCache(limits(pages), self.pool, budget)

    def prefill(self, prompt, *states):
        """Prefill a prompt's full chunks from the first one on, saving states after some; returns the row's pages."""
        last = (len(prompt) - 1) // CHUNK * CHUNK
        pages = self.pool.take(last // PAGE)
        for end in range(CHUNK, last + 1, CHUNK):
            saved = State(prompt[:end], prompt[end]) if end // CHUNK in states else None
            self.cache.add(prompt, end, pages[: end // PAGE], saved)
        return pages

    def keep(self, prompt, *states):
        """The same by a row that ends at once."""
        self.pool.give(self.prefill(prompt, *states))
        self.cache.check()

    def found(self, prompt):
        """Chunks found with a state, and chunks known."""
        match = self.cache.find(prompt)
        return match.length // CHUNK, match.shared // CHUNK


# --- finding ---------------------------------------------------------------------------------------------------------


def test_an_empty_cache_finds_nothing():
    rig = Rig()
    for prompt in ((), (1,), chunks(1, 2)):
        assert rig.cache.touch(prompt) == 0
        assert rig.cache.find(prompt) == Match(0, (), None, 0)


def test_a_prompt_finds_the_pages_and_the_state_of_its_beginning():
    rig, prompt = Rig(), chunks(1, 2, after=3)
    pages = rig.prefill(prompt, 2)
    assert rig.cache.find([*prompt, 9, 9, 9, 9]) == Match(8, pages, State(prompt[:8], 3), 8)
    assert [rig.pool.holders(page) for page in pages] == [2] * 4  # row and cache: finding takes nothing


def test_without_a_state_chunks_are_known_and_not_found():
    rig = Rig()
    rig.keep(chunks(1, 2, 3), 1)
    match = rig.cache.find(chunks(1, 2, 3))
    assert (match.length, match.shared, len(match.pages)) == (4, 12, 2)
    assert match.saved == State((1,) * 4, 2)


@pytest.mark.parametrize(
    ("prompt", "length"),
    [
        (chunks(1, 2, after=3), 8),  # as long as was cached
        (chunks(1, 2, after=4), 4),  # the second chunk's last pair had another token
        (chunks(1, 2)[:-1], 4),  # its last token is not prefilled
        (chunks(1, after=2), 4),
        (chunks(1, after=3), 0),
        (chunks(1)[:-1], 0),
        ((1, 1, 1, 9, *chunks(2, after=3)), 0),
        ((9, *chunks(1, 2, after=3)), 0),
        (chunks(2, after=3), 0),  # a chunk elsewhere is another chunk
    ],
)
def test_coverage_ends_before_the_last_token_and_depends_on_the_one_after(prompt, length):
    rig = Rig()
    rig.keep(chunks(1, 2, after=3), 1, 2)
    match = rig.cache.find(prompt)
    assert match.length == match.shared == length


def test_a_known_chunk_keeps_its_own_pages_and_state():
    rig = Rig()
    first = rig.prefill(chunks(1, 2, after=3), 2)
    second = rig.prefill(chunks(1, 2, 3), 1, 2, 3)
    assert rig.cache.find(chunks(1, 2, 3)).pages == first + second[4:]
    assert (rig.cache.nodes, rig.cache.bytes) == (3, 3 * (CHUNK_BYTES + STATE_BYTES))
    rig.pool.check(held=[*first, *second, *rig.cache.held_pages()])


def test_missing_chunks_come_in_with_a_later_one():
    rig, prompt = Rig(), chunks(1, 2, 3)
    pages = rig.pool.take(7)  # one more than the prompt fills
    rig.cache.add(prompt, 12, pages, State(prompt[:12], 0))
    assert rig.cache.find(prompt).pages == pages[:6]
    assert rig.cache.nodes == 3


@pytest.mark.parametrize(("end", "pages"), [(0, 4), (2, 4), (12, 6), (8, 3)])
def test_only_full_chunks_before_the_last_token_are_cached(end, pages):
    rig = Rig()
    with pytest.raises(Fault, match=f"ends at {end} of 9 tokens"):
        rig.cache.add(chunks(1, 2), end, rig.pool.take(pages), None)


# --- where states are saved ------------------------------------------------------------------------------------------


def test_states_are_saved_at_the_end_at_the_branch_and_every_so_often():
    cache = Rig().cache
    prompt = (0,) * (20 * CHUNK + 1)
    stride = STRIDE * CHUNK
    assert cache.save_at(prompt, Match(0, (), None, 0)) == {stride, 2 * stride, 20 * CHUNK}
    assert cache.save_at(prompt, Match(0, (), None, 12)) == {12, stride, 2 * stride, 20 * CHUNK}
    assert cache.save_at(prompt, Match(stride, (), None, stride)) == {2 * stride, 20 * CHUNK}
    assert cache.save_at(prompt, Match(20 * CHUNK, (), None, 20 * CHUNK)) == frozenset()


@pytest.mark.parametrize(("length", "last"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_state_is_saved_before_the_last_token(length, last):
    assert Rig().cache.save_at((0,) * length, Match(0, (), None, 0)) == ({last} if last else set())


def test_the_second_prompt_saves_where_it_leaves_the_first_and_the_third_finds_it():
    rig = Rig()
    rig.keep(chunks(1, 2, 3, 4), 4)
    second = chunks(1, 2, 5, 6)
    match = rig.cache.find(second)
    assert (match.length, match.shared) == (0, 4)  # another token comes after the second chunk
    assert rig.cache.save_at(second, match) == {4, 16}
    rig.keep(second, 1, 4)
    assert rig.found(chunks(1, 2, 7)) == (1, 1)


# --- budget ----------------------------------------------------------------------------------------------------------


def test_without_a_budget_nothing_is_kept():
    rig = Rig()
    rig.cache = PrefixCache(limits(page_bytes=0), rig.pool, 0)  # though pages be free of charge
    rig.keep(chunks(1, 2), 2)
    assert (rig.cache.nodes, rig.pool.free) == (0, 64)
    assert rig.cache.save_at(chunks(1, 2), Match(0, (), None, 0)) == frozenset()


@pytest.mark.parametrize("use", [PrefixCache.find, PrefixCache.touch])
def test_what_was_used_longest_ago_goes_first(use):
    rig = Rig(budget=3 * (CHUNK_BYTES + STATE_BYTES))
    for name in (1, 2, 3):
        rig.keep(chunks(name), 1)
    use(rig.cache, chunks(1))
    rig.keep(chunks(4), 1)
    assert [rig.found(chunks(name))[0] for name in (1, 2, 3, 4)] == [1, 0, 1, 1]
    assert rig.pool.free == 64 - 6


@pytest.mark.parametrize("again", [(1,), ()])
def test_adding_a_known_chunk_again_is_a_use_of_it_and_its_state(again):
    rig = Rig(budget=2 * (CHUNK_BYTES + STATE_BYTES))
    rig.keep(chunks(1), 1)
    rig.keep(chunks(2), 1)
    rig.keep(chunks(1), *again)
    rig.keep(chunks(3), 1)
    assert [rig.found(chunks(name))[0] for name in (1, 2, 3)] == [1, 0, 1]


def test_a_lookup_uses_chunks_that_have_no_state_too():
    rig = Rig(budget=2 * CHUNK_BYTES)
    rig.keep(chunks(1))
    rig.keep(chunks(2))
    rig.cache.find(chunks(1))
    rig.keep(chunks(3))
    assert [rig.found(chunks(name))[1] for name in (1, 2, 3)] == [1, 0, 1]


def test_a_leaf_goes_before_the_chunks_that_led_to_it():
    rig = Rig(budget=4 * CHUNK_BYTES + 2 * STATE_BYTES)
    rig.keep(chunks(1, 2, 3), 1, 3)
    rig.cache.find(chunks(1, after=2))  # the state after the first chunk is younger than the leaf now
    rig.keep(chunks(9), 1)
    assert rig.found(chunks(1, 2, 3)) == (1, 2)
    assert rig.found(chunks(9)) == (1, 1)


def test_an_old_state_that_prompts_pass_by_goes_alone():
    rig = Rig(budget=4 * CHUNK_BYTES + 2 * STATE_BYTES)
    rig.keep(chunks(1, 2, 3), 1, 3)
    rig.keep(chunks(9), 1)
    assert rig.found(chunks(1, 2, 9)[:9]) == (0, 1)  # its chunk is still known
    assert rig.found(chunks(1, 2, 3)) == (3, 3)
    assert rig.found(chunks(9)) == (1, 1)


def test_chunks_that_lead_to_no_state_any_more_go_next():
    rig = Rig(budget=4 * CHUNK_BYTES + 2 * STATE_BYTES)
    rig.keep(chunks(1, 2, 3), 3)
    rig.keep(chunks(8), 1)
    rig.keep(chunks(9, 8, 7), 3)
    assert rig.found(chunks(1, 2, 3)) == (0, 0)
    assert rig.found(chunks(8)) == (1, 1)
    assert rig.found(chunks(9, 8, 7)) == (3, 3)


def test_an_old_state_without_chunks_below_it_takes_its_chunk_with_it():
    rig = Rig(budget=3 * (CHUNK_BYTES + STATE_BYTES), pages=12)
    rig.keep(chunks(1, 2), 1, 2)
    rig.prefill(chunks(8), 1)  # its row holds on to it
    rig.found(chunks(1, 2))  # passes by the first state
    assert rig.cache.make_room(rig.pool.free + 1)
    rig.keep(chunks(9, 7), 1, 2)
    assert rig.found(chunks(1, after=2)) == (0, 0)
    assert rig.found(chunks(8)) == (1, 1)
    assert rig.found(chunks(9, 7)) == (2, 2)


def test_a_prompt_that_cannot_fit_evicts_nothing():
    rig = Rig(budget=2 * CHUNK_BYTES + STATE_BYTES)
    rig.keep(chunks(1), 1)
    long = chunks(5, 6, 7, 5, 5, 5, 5, 5)
    pages = rig.pool.take(16)
    rig.cache.add(long, 32, pages, None)
    rig.cache.add(long, 12, pages, State(long[:12], 5))
    rig.cache.add(long, 8, pages, State(long[:8], 7, STATE_BYTES + 1))
    assert rig.found(chunks(1)) == (1, 1)
    rig.cache.add(long, 8, pages, State(long[:8], 7))
    assert rig.found(chunks(1)) == (0, 0)
    assert rig.found(long) == (2, 2)
    assert rig.cache.bytes == rig.cache.budget


def test_a_growing_prompt_drops_its_own_older_states_before_its_chunks():
    rig = Rig(budget=4 * CHUNK_BYTES + STATE_BYTES)
    rig.keep(chunks(1, 2, 3, 4), 1, 2, 3, 4)
    assert rig.cache.find(chunks(1, 2, 3, 4)).length == 16
    assert rig.cache.bytes == rig.cache.budget


# --- room ------------------------------------------------------------------------------------------------------------


def test_room_is_made_from_the_oldest_and_no_more_than_asked():
    rig = Rig(pages=8)
    for name in (1, 2, 3):
        rig.keep(chunks(name), 1)
    rig.cache.find(chunks(1))
    assert rig.cache.make_room(2)
    assert rig.cache.nodes == 3
    assert rig.cache.make_room(3)
    assert rig.pool.free == 4
    assert [rig.found(chunks(name))[0] for name in (1, 2, 3)] == [1, 0, 1]


@pytest.mark.parametrize(("asked", "made", "left"), [(4, True, [1, 0]), (5, False, [1, 1]), (7, False, [1, 1])])
def test_chunks_that_rows_hold_are_passed_over_and_what_would_not_help_is_not_evicted(asked, made, left):
    rig = Rig(pages=6)
    rig.prefill(chunks(1), 1)
    rig.keep(chunks(2), 1)
    assert rig.cache.make_room(asked) == made
    assert [rig.found(chunks(name))[0] for name in (1, 2)] == left


def test_a_held_chunk_below_a_free_one_does_not_keep_it():
    rig = Rig(pages=8)
    first = rig.prefill(chunks(1, after=2), 1)
    second = rig.prefill(chunks(1, 2), 2)  # its first chunk is not cached: there is one already
    rig.pool.give(first)
    assert rig.pool.free == 2
    assert rig.cache.make_room(4)
    assert rig.cache.nodes == 0
    rig.cache.check()
    rig.pool.check(held=second)


# --- the check -------------------------------------------------------------------------------------------------------


def twice_in_the_tree(rig):
    first, second = rig.cache._used
    rig.pool.share(first.pages)
    rig.pool.give(second.pages)
    second.pages = first.pages


BREAKS = {
    "bytes": lambda rig: setattr(rig.cache, "bytes", 0),
    "1 allowed": lambda rig: setattr(rig.cache, "budget", 1),
    "cached and free": lambda rig: rig.pool.give(rig.cache.find(chunks(1, 2)).pages[:1]),
    "evicted before one below it": lambda rig: rig.cache._used.move_to_end(next(iter(rig.cache._used))),
    "not in their order of use": lambda rig: rig.cache._used.update({next(iter(rig.cache._used)): PLENTY}),
    "different nodes": lambda rig: rig.cache._roots.clear(),
    "hold different nodes": lambda rig: rig.cache._state_used.clear(),
    "one that another has too": twice_in_the_tree,
    "another token": lambda rig: setattr(rig.cache._roots[chunks(1, after=2)], "key", chunks(1, after=3)),
}


@pytest.mark.parametrize("told", BREAKS)
def test_the_check_finds_what_is_broken(told):
    rig = Rig()
    rig.keep(chunks(1, 2), 2)
    rig.cache.check()
    BREAKS[told](rig)
    with pytest.raises(Fault, match=told):
        rig.cache.check()


# --- against a naive reference ---------------------------------------------------------------------------------------

PROMPTS = st.lists(st.integers(0, 1), max_size=11).map(tuple)  # few tokens, short chunks: beginnings are often shared


@REPEATABLE
@given(PROMPTS, PROMPTS, st.integers(1, 4))
def test_common_chunks_are_those_whose_tokens_and_next_token_are_equal(one, other, chunk):
    shared = [end for end in range(0, 12, chunk) if end and len(one) > end and one[: end + 1] == other[: end + 1]]
    assert common_chunks(one, list(other), chunk) == max(shared, default=0)


@settings(REPEATABLE, max_examples=300)
@given(st.lists(st.tuples(PROMPTS, st.sets(st.integers(1, 5))), max_size=12), PROMPTS, st.sampled_from([1, 2]))
def test_with_room_for_all_the_cache_finds_what_a_list_of_all_prefixes_has(prompts, last, page):
    pool = PagePool(200)
    cache = PrefixCache(limits(pages=200, page=page, chunk=2), pool, PLENTY)
    known, states = {}, {}  # tokens with the one after them: the pages of the last chunk; the state
    for prompt, wanted in [*prompts, (last, set())]:
        ends = range(2, len(prompt), 2)
        shared = max((end for end in ends if prompt[: end + 1] in known), default=0)
        length = max((end for end in ends if prompt[: end + 1] in states), default=0)
        pages = tuple(one for end in range(2, length + 1, 2) for one in known[prompt[: end + 1]])
        assert cache.find(prompt) == Match(length, pages, states.get(prompt[: length + 1]), shared)
        row = pool.take(len(prompt) // page)
        for end in ends:
            saved = State(prompt[:end], prompt[end]) if end // 2 in wanted else None
            if end // 2 % 2 or saved:  # some chunks come in with later ones
                cache.add(prompt, end, row, saved)
                for upto in range(2, end + 1, 2):
                    known.setdefault(prompt[: upto + 1], row[(upto - 2) // page : upto // page])
                if saved:
                    states.setdefault(prompt[: end + 1], saved)
        cache.check()
    assert cache.nodes == len(known)
    assert cache.bytes == PAGE_BYTES * sum(map(len, known.values())) + STATE_BYTES * len(states)


class Poisoned(PagePool):
    """Pages with what rows wrote into them; what is free holds nothing."""

    def __init__(self, count):
        super().__init__(count)
        self.written = {}

    def give(self, pages):
        freed = super().give(pages)
        for page in freed:
            self.written.pop(page)
        return freed


class Serving(RuleBasedStateMachine):
    """Rows that find, prefill, save and end in any order, over a cache with little room. Chunks are of two tokens."""

    @initialize(page=st.sampled_from([1, 2]), budget=st.sampled_from([0, 60, 250, 450, 1000]), count=st.integers(6, 24))
    def open(self, page, budget, count):
        self.limits = limits(count, page, chunk=2)
        self.pool = Poisoned(count)
        self.cache = PrefixCache(self.limits, self.pool, budget)
        self.rows = []  # prompt and pages
        self.saved = {None}

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.clear()
            assert self.cache.nodes == self.cache.bytes == 0
            for _, pages in self.rows:
                self.pool.give(pages)
            assert self.pool.free == self.pool.count

    def content(self, prompt, place):
        """What a page holds depends on all tokens up to its chunk's end and on the one after it."""
        end = (place * self.limits.page // 2 + 1) * 2
        return place, prompt[: end + 1]

    @rule(prompt=PROMPTS)
    def start(self, prompt):
        touched, match = self.cache.touch(prompt), self.cache.find(prompt)
        assert match.length == touched
        assert match.shared % 2 == 0
        assert match.length <= match.shared <= max(0, len(prompt) - 1)
        assert len(match.pages) * self.limits.page == match.length
        written = [self.pool.written[page] for page in match.pages]
        assert written == [self.content(prompt, place) for place in range(len(written))]
        assert match.saved in self.saved
        if match.length:
            assert (match.saved.tokens, match.saved.after) == (prompt[: match.length], prompt[match.length])
        self.pool.share(match.pages)
        self.rows.append((prompt, list(match.pages)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), states=st.lists(st.sampled_from([None, 0, 50, 100, 400]), min_size=1, max_size=5))
    def prefill(self, data, states):
        prompt, pages = data.draw(st.sampled_from(self.rows))
        for state in states:
            end = len(pages) * self.limits.page + 2
            if end < len(prompt) and self.cache.make_room(2 // self.limits.page):
                self.prefill_chunk(prompt, pages, end, state)
                self.holds()

    def prefill_chunk(self, prompt, pages, end, state):
        for page in self.pool.take(2 // self.limits.page):
            self.pool.written[page] = self.content(prompt, len(pages))
            pages.append(page)
        saved = None if state is None else State(prompt[:end], prompt[end], state)
        self.saved.add(saved)
        before = self.cache.nodes
        self.cache.add(prompt, end, pages, saved)
        if self.cache.budget >= max(1, len(pages) * PAGE_BYTES + (state or 0)):
            match = self.cache.find(prompt)
            assert match.shared >= end
            assert saved is None or match.length >= end
        else:
            assert self.cache.nodes == before

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data):
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.pool.give(row[1])

    @rule(pages=st.integers(0, 26))
    def make_room(self, pages):
        held = {page for _, own in self.rows for page in own}
        most = self.pool.free + len(set(self.cache.held_pages()) - held)
        before = self.cache.nodes, self.pool.free
        assert self.cache.make_room(pages) == (pages <= most)
        if pages <= before[1] or pages > most:
            assert (self.cache.nodes, self.pool.free) == before
        else:
            assert pages <= self.pool.free < pages + 2 // self.limits.page

    @invariant()
    def holds(self):
        if hasattr(self, "cache"):
            assert self.cache.bytes <= self.cache.budget
            self.cache.check()
            self.pool.check(held=[*self.cache.held_pages(), *(page for _, own in self.rows for page in own)])


TestServing = Serving.TestCase
TestServing.settings = settings(REPEATABLE, max_examples=150, stateful_step_count=40)


def test_ten_thousand_chunks_are_evicted_one_by_one_in_no_time():
    count = 10_000
    pool = PagePool(2 * count + 2)
    cache = PrefixCache(limits(2 * count + 2), pool, count * (CHUNK_BYTES + STATE_BYTES))
    started = process_time()
    for name in range(2 * count):  # the second half each evict one
        pages = pool.take(2)
        cache.add(chunks(name), CHUNK, pages, State((name,) * CHUNK, 0))
        pool.give(pages)
    assert cache.nodes == count
    assert process_time() - started < 5  # half a second, and more than five if each eviction looked at all nodes
    cache.check()
