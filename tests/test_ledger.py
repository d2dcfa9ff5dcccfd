"""The ledger of pages beside a plain memory: which tokens of a window are still there, and which
pages are copied."""

import itertools

import pytest

from attnops.cache.ledger import Layer, Ledger, Room
from attnops.core.errors import InvalidInput

PAGE, NEW, WINDOW = 2, 3, 3


def ledger(window=0, pages=40, rows=4):
    return Ledger(
        Room(
            [Layer(((1, 1),) * 2, window)], pages, PAGE, rows, 20, NEW, 40, "max_pages_per_request"
        )
    )


def begin(book, tokens):
    change = book.alloc(tokens)
    book.commit(change)
    return change[0].request


class Memory:
    """A request with a window, and what was last written into each slot."""

    def __init__(self):
        self.book, self.tokens, self.held, self.names = ledger(WINDOW), [], {}, itertools.count()
        self.request = begin(self.book, 0)

    def append(self, count):
        start = len(self.tokens)
        self.book.commit(self.book.append([(self.request, count)]))
        self.tokens += [next(self.names) for _ in range(count)]
        slots = self.book.slots(self.request, start, start + count)
        assert min(slots) >= 0
        self.held |= dict(zip(slots, self.tokens[start:], strict=True))

    def truncate(self, length):
        """Exactly where the next query finds all tokens of its window."""
        seen = self.tokens[max(0, length - WINDOW + 1) : length]
        if set(seen) <= set(self.held.values()):
            self.book.commit(self.book.truncate(self.request, length))
            del self.tokens[length:]
            return
        with pytest.raises(
            InvalidInput, match="a window of 3 needs tokens whose pages were used again"
        ):
            self.book.truncate(self.request, length)

    def check(self):
        """Every token has the slot that holds it, or -1 where none does."""
        slots = {token: slot for slot, token in self.held.items()}
        assert self.book.get(self.request).length == len(self.tokens)
        assert self.book.slots(self.request, 0, len(self.tokens)) == [
            slots.get(token, -1) for token in self.tokens
        ]


@pytest.mark.parametrize("cuts", [*itertools.product(range(6), repeat=2)], ids=str)
def test_tokens_are_where_their_slots_say(cuts):
    """As many tokens as the pages have room for, and more; then fewer, and more again, twice; then
    none, and a few."""
    for steps in (1, 2, 3, 4):
        memory = Memory()
        for cut in (*cuts, 0):
            for _ in range(steps):
                memory.append(NEW)
                memory.check()
            memory.truncate(max(0, len(memory.tokens) - cut))
            memory.check()
        memory.truncate(0)
        memory.append(NEW)
        memory.check()


def copies(book, change):
    return [
        pair
        for pairs in book.edits(change)[len(book.pools) : 2 * len(book.pools)]
        for pair in pairs
    ]


@pytest.mark.parametrize("sharers", [1, 2, 3, 4])
def test_the_last_that_outgrows_a_shared_page_keeps_it(sharers):
    """So that as many free pages suffice as there are others."""
    book = ledger(pages=1 + sharers)
    family = [begin(book, 1)]
    for _ in range(sharers - 1):
        change = book.fork(family[0])
        book.commit(change)
        family.append(change[0].request)
    [page] = book.get(family[0]).pages[0]
    change = book.append([(request, 1) for request in family])
    assert len(copies(book, change)) == sharers - 1
    book.commit(change)
    assert book.get(family[-1]).pages[0] == [page]
    assert (
        len({book.get(request).pages[0][0] for request in family}) == sharers
        and not book.pools[0].free
    )


def test_a_shared_page_is_copied_where_a_window_comes_round_to_it():
    """What lies behind the new token is in the window again when that one is taken back."""
    book = ledger(WINDOW)
    request = begin(book, 6)  # all that three pages hold
    book.commit(book.fork(request))
    old = book.get(request).pages[0][0]
    change = book.append([(request, 1)])
    [(source, new)] = copies(book, change)
    book.commit(change)
    assert source == old != new and book.slots(request, 1, 2) == [new * PAGE + 1]
    book.commit(book.truncate(request, 3))
