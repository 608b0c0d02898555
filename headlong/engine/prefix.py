"""Which prompts share a cached prefix."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from headlong.engine.pages import PagePool
from headlong.engine.request import Limits, Saved
from headlong.errors import Fault

STRIDE = 8  # chunks from one state to the next in a prompt of which nothing is known yet

Key = tuple[int, ...]  # a chunk's tokens and the one after it: the head's last pair is made with that one


@dataclass(frozen=True)
class Match:
    """How much of a prompt is cached. Its pages are only the cache's until they are shared."""

    length: int  # tokens whose pages, and the state after them, are there
    pages: tuple[int, ...]
    saved: Saved | None
    shared: int  # tokens that were in a prompt before, with or without a state after them


@dataclass(eq=False, repr=False)
class Node:
    """One full chunk of a prompt, after the chunks above it."""

    key: Key
    pages: tuple[int, ...]
    siblings: "dict[Key, Node]"  # the children among which it stands, itself included
    children: "dict[Key, Node]" = field(default_factory=dict)
    saved: Saved | None = None  # what a row remembers after this chunk


class PrefixCache:
    """A tree of full prompt chunks that holds their pages and, after some of them, a state to go on from.

    What was used longest ago goes first, whether a chunk or a state. A chunk is used together with those above it and
    before them, so the oldest one has no children. A state is used when it is saved or found: one that prompts only
    pass by grows old and goes alone, and its chunk still leads to those below it.
    """

    def __init__(self, limits: Limits, pool: PagePool, budget: int) -> None:
        self.budget = budget  # bytes
        self.bytes = 0
        self.lookups = 0
        self.hits = 0
        self.tokens_found = 0
        self._limits = limits
        self._pool = pool
        self._roots: dict[Key, Node] = {}
        self._clock = 0
        self._used: OrderedDict[Node, int] = OrderedDict()  # when, oldest first
        self._state_used: OrderedDict[Node, int] = OrderedDict()  # the same of nodes' states

    @property
    def nodes(self) -> int:
        return len(self._used)

    def held_pages(self) -> Iterator[int]:
        """The pages that the cache holds."""
        for node in self._used:
            yield from node.pages

    # --- before a prompt is prefilled ----------------------------------------------------------------------------

    def touch(self, prompt: Sequence[int]) -> int:
        """How many tokens `find` would find; they are the last to go from now on."""
        return self._usable(prompt)[1] * self._limits.chunk

    def _usable(self, prompt: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes of a prompt, used now, and how many there are up to the last one with a state."""
        path = self._known(prompt)
        depth = max((place for place, node in enumerate(path, 1) if node.saved is not None), default=0)
        self._use(path, path[depth - 1] if depth else None)
        return path, depth

    def find(self, prompt: Sequence[int]) -> Match:
        """The longest part of a prompt that need not be prefilled; what is known of the prompt is used now."""
        path, depth = self._usable(prompt)
        pages = tuple(page for node in path[:depth] for page in node.pages)
        saved = path[depth - 1].saved if depth else None
        return Match(depth * self._limits.chunk, pages, saved, len(path) * self._limits.chunk)

    def count(self, match: Match) -> None:
        """Count what a request found. Idle turns look too, and so does a prompt that begins anew: nobody asked."""
        self.lookups += 1
        self.hits += match.length > 0
        self.tokens_found += match.length

    def save_at(self, prompt: Sequence[int], match: Match) -> frozenset[int]:
        """Where chunks end after which a state is worth saving, when the prompt is prefilled from the match on.

        Those are where the next turn of a chat goes on, where this prompt leaves the known ones, and every so often.
        """
        if not self.budget:
            return frozenset()
        chunk = self._limits.chunk
        last = (len(prompt) - 1) // chunk * chunk
        ends = {last, match.shared, *range(0, last, STRIDE * chunk)}
        return frozenset(end for end in ends if end > match.length)

    def make_room(self, pages: int) -> bool:
        """Whether the pool has so many free pages, by evicting; where that cannot be reached, nothing is evicted.

        Chunks whose pages a row holds too free nothing. They stay, unless they are below one that must go.
        """
        missing = pages - self._pool.free
        evicted = []
        for node in self._used:
            if missing <= 0:
                break
            freed = sum(self._pool.holders(page) == 1 for page in node.pages)
            if freed:
                evicted.append(node)
                missing -= freed
        if missing > 0:
            return False
        for node in evicted:
            self._remove(node)
        return True

    # --- while a prompt is prefilled -----------------------------------------------------------------------------

    def add(self, prompt: Sequence[int], end: int, pages: Sequence[int], saved: Saved | None) -> None:
        """Keep the chunks up to `end`, in which a row's first pages are, and the state after them, if they fit."""
        limits = self._limits
        if end % limits.chunk or not 0 < end < len(prompt) or len(pages) * limits.page < end:
            raise Fault(f"a chunk that ends at {end} of {len(prompt)} tokens, in {len(pages)} pages, was cached.")
        path = self._known(prompt[: end + 1])
        if len(path) * limits.chunk == end and path[-1].saved is not None:
            saved = path[-1].saved
        needed = end // limits.page * limits.page_bytes + (saved.nbytes if saved is not None else 0)
        if not self.budget or needed > self.budget:
            return
        self._extend(path, prompt, end, pages)
        if saved is not None:
            self._attach(path[-1], saved)
        self._use(path, path[-1] if saved is not None else None)
        self._trim()

    def _extend(self, path: list[Node], prompt: Sequence[int], end: int, pages: Sequence[int]) -> None:
        """Make the path reach `end`, with a row's pages for what is missing."""
        chunk, page = self._limits.chunk, self._limits.page
        for stop in range((len(path) + 1) * chunk, end + 1, chunk):
            siblings = path[-1].children if path else self._roots
            node = Node(_key(prompt, stop, chunk), tuple(pages[(stop - chunk) // page : stop // page]), siblings)
            self._pool.share(node.pages)
            siblings[node.key] = node
            path.append(node)
            self.bytes += len(node.pages) * self._limits.page_bytes

    def _attach(self, node: Node, saved: Saved) -> None:
        if node.saved is None:
            node.saved = saved
            self.bytes += saved.nbytes

    def _known(self, prompt: Sequence[int]) -> list[Node]:
        """The nodes of a prompt's chunks, from the first, as far as there are any."""
        path: list[Node] = []
        children = self._roots
        for end in range(self._limits.chunk, len(prompt), self._limits.chunk):
            node = children.get(_key(prompt, end, self._limits.chunk))
            if node is None:
                break
            path.append(node)
            children = node.children
        return path

    def _use(self, path: Sequence[Node], stateful: Node | None) -> None:
        """A path is used now, and the state of one of its nodes."""
        self._clock += 1
        for node in reversed(path):
            self._used[node] = self._clock
            self._used.move_to_end(node)
        if stateful is not None:
            self._state_used[stateful] = self._clock
            self._state_used.move_to_end(stateful)

    # --- eviction ------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every prompt; the counts of lookups stay."""
        for node in list(self._roots.values()):
            self._remove(node)

    def _trim(self) -> None:
        """Evict until the budget is kept. The path that was used last is the last to go."""
        while self.bytes > self.budget:
            leaf, leaf_used = next(iter(self._used.items()))
            stateful, state_used = next(iter(self._state_used.items()), (leaf, leaf_used))
            if state_used >= leaf_used:
                self._remove(leaf)
            elif stateful.children:
                self._drop_state(stateful)
            else:
                self._remove(stateful)  # nothing would lead a prompt to it without its state

    def _remove(self, node: Node) -> None:
        """Forget a chunk and those below it."""
        del node.siblings[node.key]
        for gone in (node, *_below(node.children)):
            self._drop_state(gone)
            del self._used[gone]
            self._pool.give(gone.pages)
            self.bytes -= len(gone.pages) * self._limits.page_bytes

    def _drop_state(self, node: Node) -> None:
        if node.saved is not None:
            self.bytes -= node.saved.nbytes
            node.saved = None
            del self._state_used[node]

    # --- invariants ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Tree, orders, bytes and pages agree."""
        tree = _below(self._roots)
        stateful = [node for node in tree if node.saved is not None]
        if set(tree) != set(self._used) or set(stateful) != set(self._state_used):
            raise Fault("the prefix tree and its orders of use hold different nodes.")
        self._check_order(tree)
        counted = sum(node.saved.nbytes for node in stateful if node.saved is not None)
        pages = list(self.held_pages())
        counted += len(pages) * self._limits.page_bytes
        if counted != self.bytes or counted > self.budget:
            raise Fault(f"cached prefixes take {counted} bytes; {self.bytes} were counted and {self.budget} allowed.")
        if len(pages) * self._limits.page != len(tree) * self._limits.chunk or len(set(pages)) != len(pages):
            raise Fault("a cached chunk has too many or too few pages, or one that another has too.")
        free = [page for page in pages if not self._pool.holders(page)]
        if free:
            raise Fault(f"pages {free} are cached and free.")

    def _check_order(self, tree: Sequence[Node]) -> None:
        """Children go before their parents and begin with the token that these were made with."""
        for order in (self._used, self._state_used):
            if list(order.values()) != sorted(order.values()):
                raise Fault("prefixes are not in their order of use.")
        place = {node: number for number, node in enumerate(self._used)}
        for node in tree:
            for child in node.children.values():
                if place[child] > place[node]:
                    raise Fault("a cached chunk would be evicted before one below it.")
                if child.key[0] != node.key[-1]:
                    raise Fault("a cached chunk begins with another token than the one before it was made with.")


def common_chunks(one: Sequence[int], other: Sequence[int], chunk: int) -> int:
    """Tokens of the full chunks, each with the token after it, with which two prompts both begin."""
    shared = 0
    for end in range(chunk, min(len(one), len(other)), chunk):
        if _key(one, end, chunk) != _key(other, end, chunk):
            break
        shared = end
    return shared


def _key(prompt: Sequence[int], end: int, chunk: int) -> Key:
    return tuple(prompt[end - chunk : end + 1])


def _below(children: dict[Key, Node]) -> list[Node]:
    """All nodes of these subtrees."""
    found: list[Node] = []
    waiting = list(children.values())
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting.extend(node.children.values())
    return found
