"""The paged cache: who owns which page, what the tables say, and that a call that raises changes nothing."""

import contextlib
import copy

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils import _pytree as pytree

import attnops
from attnops.cache import PagedBatch, PagedCache
from attnops.core.errors import CacheError, InvalidInput, NoKernel, OutOfPages, RequestTooLong, TooManyRequests, UnknownRequest
from attnops.core.kernel import kernels_of
from attnops.ops import copy_kv


def make(num_pages=8, page_size=4, max_requests=4, max_pages_per_request=4, num_layers=2, dtype=torch.float32, **more):
    return PagedCache(
        num_layers, num_pages, page_size, 1, 1, max_requests=max_requests, max_pages_per_request=max_pages_per_request, dtype=dtype,
        device="cpu", **more,
    )  # fmt: skip


def snapshot(cache):
    ledger = copy.deepcopy(vars(cache._ledger))
    return ledger, [t.clone().view(torch.uint8) for t in tensors(cache)]  # as bytes, because NaN is not NaN


def tensors(cache):
    return [cache.page_table, cache.seq_lens, *cache.k_pages, *cache.v_pages]


def same(a, b):
    return a[0].keys() == b[0].keys() and all(a[0][k] == b[0][k] for k in a[0]) and all(map(torch.equal, a[1], b[1]))


@contextlib.contextmanager
def unchanged(cache, error):
    before = snapshot(cache)
    with pytest.raises(error) as caught:
        yield caught
    assert same(before, snapshot(cache))


def write(cache, slots, tokens):
    """Token t's key is t in layer 0, t + 0.5 in layer 1 ..., its value the negative. slots: of each layer, or the same for all."""
    for layer, (k, v) in enumerate(zip(cache.k_pages, cache.v_pages, strict=True)):
        own = slots[layer] if isinstance(slots, list) else slots
        new = torch.tensor(tokens, dtype=k.dtype)[own >= 0] + layer / 2
        k.view(-1)[own[own >= 0]] = new
        v.view(-1)[own[own >= 0]] = -new


def slots_of(cache, request, start=0):
    return [cache.slots(request, start, layer=layer) for layer in range(len(cache.layers))]


def read(cache, request):
    """The tokens of a request, found as a kernel finds them: through its row of the tables. Of a window the last ones must be there."""
    row = cache.row(request)
    length = int(cache.seq_lens[row])
    found = []
    for layer, (k, v) in enumerate(zip(cache.k_pages, cache.v_pages, strict=True)):
        table, window = cache.tables[cache.table_of[layer]], cache.windows[cache.table_of[layer]]
        at = torch.arange(max(0, length - window + 1) if window else 0, length)
        pages = table[row].long()[at // cache.page_size % table.shape[1]]
        keys, values = (x[pages, at % cache.page_size].flatten() for x in (k, v))
        assert torch.equal(keys, -values)
        found.append((keys - layer / 2).int().tolist())
    whole = found[0] if not cache.windows[cache.table_of[0]] else None
    assert whole is None or all(tokens == whole[len(whole) - len(tokens) :] for tokens in found)
    return found[0]


def append(cache, request, tokens):
    start = cache.length(request)
    cache.extend(request, len(tokens))
    write(cache, slots_of(cache, request, start), tokens)


# The machine ------------------------------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Any sequence of calls, beside a plain dictionary of what each request should hold."""

    @initialize(
        page_size=st.sampled_from((1, 3, 4)), pages=st.integers(6, 20), rows=st.integers(3, 6), width=st.integers(2, 9),
        window=st.sampled_from((0, 2, 5)),
    )  # fmt: skip
    def start(self, page_size, pages, rows, width, window):
        self.cache = make(pages, page_size, rows, width, windows=(0, window), max_new_tokens=4)
        for pool in (*self.cache.k_pages, *self.cache.v_pages):
            pool.fill_(float("nan"))
        self.model: dict[int, list[int]] = {}
        self.gone: list[int] = []
        self.next = 1
        self.addresses = [t.data_ptr() for t in tensors(self.cache)]
        self.alloc(5)

    def tokens(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    @contextlib.contextmanager
    def maybe(self, *errors):
        """The call may raise one of `errors`, and then nothing has changed. Yields a list, filled if it raised."""
        before = snapshot(self.cache)
        raised: list[Exception] = []
        try:
            yield raised
        except errors as error:
            raised.append(error)
            assert same(before, snapshot(self.cache))

    def live(self, data):
        return data.draw(st.sampled_from(sorted(self.model)))

    @precondition(lambda self: len(self.model) < 4)
    @rule(count=st.integers(0, 9))
    def alloc(self, count):
        fits = self.fits(count)
        with self.maybe(OutOfPages, TooManyRequests, RequestTooLong) as raised:
            request = self.cache.alloc(count)
            assert request not in self.model and request not in self.gone
            self.model[request] = self.tokens(count)
            write(self.cache, slots_of(self.cache, request), self.model[request])
        assert fits is not bool(raised)

    def fits(self, *given):
        before = snapshot(self.cache)
        found = self.cache.fits(*given)
        assert same(before, snapshot(self.cache))
        return found

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 6))
    def extend(self, data, count):
        request = self.live(data)
        with self.maybe(OutOfPages, RequestTooLong):
            tokens = self.tokens(count)
            append(self.cache, request, tokens)
            self.model[request] += tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def batch(self, data):
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1, unique=True))
        counts = [data.draw(st.integers(0, 4)) for _ in chosen]
        fits = self.fits(counts, chosen)
        with self.maybe(OutOfPages, RequestTooLong) as raised:
            step = self.cache.batch(chosen, counts)
            tokens = [self.tokens(n) for n in counts]
            slots = [step.of(table).slots for table in self.cache.table_of]
            write(self.cache, slots, [t for new in tokens for t in new])
            for request, new in zip(chosen, tokens, strict=True):
                self.model[request] += new
            self.describes(step, chosen, counts)
        assert fits is not bool(raised)

    def describes(self, step, chosen, counts):
        rows = [self.cache.row(r) for r in chosen]
        assert torch.equal(step.page_table, self.cache.page_table[rows])
        assert step.seq_lens.tolist() == [len(self.model[r]) for r in chosen]
        assert step.cu_seqlens_q.tolist() == [sum(counts[:i]) for i in range(len(counts) + 1)]
        assert step.max_seqlen_q == max(counts)
        where = [(len(self.model[r]) - n + i) for r, n in zip(chosen, counts, strict=True) for i in range(n)]
        assert step.positions.tolist() == where
        slots = [self.cache.slots(r, len(self.model[r]) - n) for r, n in zip(chosen, counts, strict=True)]
        assert torch.equal(step.slots, torch.cat(slots))
        assert [t.dtype for t in (step.page_table, step.seq_lens, step.cu_seqlens_q)] == [torch.int32] * 3
        assert step.slots.dtype == step.positions.dtype == torch.int64

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data):
        request = self.live(data)
        with self.maybe(TooManyRequests):
            used = self.cache.used_pages
            self.model[child := self.cache.fork(request)] = list(self.model[request])
            assert child != request and self.cache.used_pages == used

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def truncate(self, data):
        request = self.live(data)
        length = data.draw(st.integers(0, len(self.model[request]) + 2))
        lost = length > len(self.model[request])
        for pool in self.cache._ledger.pools:
            first = self.cache._ledger.get(request).high - pool.columns * self.cache.page_size
            lost |= pool.window > 0 and length > 0 and length - pool.window + 1 < first and first > 0
        with self.maybe(InvalidInput) as raised:
            self.cache.truncate(request, length)
            del self.model[request][length:]
        assert bool(raised) == lost

    @precondition(lambda self: len(self.model) > 2)
    @rule(data=st.data())
    def free(self, data):
        request = self.live(data)
        self.cache.free(request)
        del self.model[request]
        self.gone.append(request)

    @precondition(lambda self: self.gone)
    @rule(data=st.data(), call=st.sampled_from(["free", "fork", "length", "row", "slots", "batch", "extend", "truncate", "fits"]))
    def use_after_free(self, data, call):
        request = data.draw(st.sampled_from(self.gone))
        given = {
            "extend": (request, 1), "truncate": (request, 0), "batch": ([*self.model, request],), "fits": (1, [request]),
        }.get(call, (request,))  # fmt: skip
        with unchanged(self.cache, UnknownRequest):
            getattr(self.cache, call)(*given)

    @precondition(lambda self: len(self.gone) > 5)
    @rule()
    def reset(self):
        self.cache.reset()
        self.gone += self.model
        self.model = {}
        assert self.cache.used_pages == 0

    @invariant()
    def contents(self):
        for request, tokens in self.model.items():
            assert self.cache.length(request) == len(tokens)
            assert read(self.cache, request) == tokens

    @invariant()
    def owners(self):
        if not hasattr(self, "cache"):
            return
        cache, ledger = self.cache, self.cache._ledger
        assert cache.requests == tuple(self.model)
        assert cache.free_pages + cache.used_pages == sum(pool.num_pages - 1 for pool in ledger.pools)
        for i, pool in enumerate(ledger.pools):
            owners = [page for entry in ledger.requests.values() for page in entry.pages[i]]
            assert 0 not in owners and 0 not in pool.free
            assert pool.refs == [owners.count(page) for page in range(pool.num_pages)]
            assert sorted({*owners} | {*pool.free}) == list(range(1, pool.num_pages))
            assert not {*owners} & {*pool.free} and len(pool.free) == len({*pool.free})
        rows = [entry.row for entry in ledger.requests.values()]
        assert sorted(rows + ledger.free_rows) == list(range(cache.seq_lens.shape[0]))
        for entry in ledger.requests.values():
            for table, pages in zip(cache.tables, entry.pages, strict=True):
                line = table[entry.row].tolist()
                assert len(pages) == min(-(-entry.length // cache.page_size), len(line)) and len(set(pages)) == len(pages)
                assert line == pages + [0] * (len(line) - len(pages))
            assert cache.seq_lens[entry.row] == entry.length
        for row in ledger.free_rows:
            assert not any(table[row].any() for table in cache.tables) and cache.seq_lens[row] == 0

    @invariant()
    def tensors_stay(self):
        if hasattr(self, "cache"):
            assert [t.data_ptr() for t in tensors(self.cache)] == self.addresses
            assert all(pool[0].isnan().all() for pool in (*self.cache.k_pages, *self.cache.v_pages)), "the null page was written"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

LONGER = {"settings": settings(max_examples=120, stateful_step_count=40, deadline=None)}
TestMachineForLonger = pytest.mark.full(type("TestMachineForLonger", (Machine.TestCase,), LONGER))


# By hand ----------------------------------------------------------------------------------------------------------------


def test_a_fork_shares_until_one_writes():
    cache = make()
    a = cache.alloc(0)
    append(cache, a, [1, 2, 3, 4, 5, 6])
    b = cache.fork(a)
    assert cache.used_pages == 2
    append(cache, b, [70])
    assert cache.used_pages == 3, "the half-full page was copied, the full one is shared"
    append(cache, a, [80])
    assert cache.used_pages == 3, "what the copy left behind is nobody else's"
    assert (read(cache, a), read(cache, b)) == ([1, 2, 3, 4, 5, 6, 80], [1, 2, 3, 4, 5, 6, 70])
    cache.free(a)
    assert read(cache, b) == [1, 2, 3, 4, 5, 6, 70] and cache.used_pages == 2


def test_a_fork_at_a_page_end_copies_nothing():
    cache = make()
    a = cache.alloc(4)
    write(cache, cache.slots(a), [1, 2, 3, 4])
    b = cache.fork(a)
    cache.batch([a, b], 1)
    assert cache.used_pages == 3


def test_of_three_that_outgrow_a_page_together_two_copy():
    cache = make(page_size=4, num_pages=8)
    a = cache.alloc(2)
    write(cache, cache.slots(a), [1, 2])
    family = [a, cache.fork(a), cache.fork(a)]
    step = cache.batch(family, 1)
    write(cache, step.slots, [10, 20, 30])
    assert [read(cache, r) for r in family] == [[1, 2, 10], [1, 2, 20], [1, 2, 30]]
    assert cache.used_pages == 3


def test_truncate_into_a_shared_page_then_write():
    cache = make()
    a = cache.alloc(8)
    write(cache, cache.slots(a), list(range(1, 9)))
    b = cache.fork(a)
    cache.truncate(b, 3)
    append(cache, b, [50, 60])
    assert (read(cache, a), read(cache, b)) == (list(range(1, 9)), [1, 2, 3, 50, 60])


def test_a_copy_needs_a_page_too():
    cache = make(num_pages=2)
    a = cache.alloc(2)
    b = cache.fork(a)
    with unchanged(cache, OutOfPages) as caught:
        cache.extend(b, 1)
    assert (caught.value.needed, caught.value.free, caught.value.total) == (1, 0, 1)
    cache.free(a)
    cache.extend(b, 1)


def test_float8_pages_are_copied_in_one_launch(monkeypatch):
    calls = []
    monkeypatch.setattr("attnops.cache.paged.copy_kv", lambda *given: calls.append(given) or copy_kv(*given))
    cache = make(dtype=torch.float8_e4m3fn)
    a = cache.alloc(2)
    for pool in (*cache.k_pages, *cache.v_pages):
        pool[1, :2, 0, 0] = torch.tensor([2.0, 3.0]).to(pool.dtype)
    b = cache.fork(a)
    cache.extend(b, 1)
    page = int(cache.page_table[cache.row(b), 0])
    assert page != 1
    assert all(pool[page, :2].flatten().tolist() == [2.0, 3.0] for pool in (*cache.k_pages, *cache.v_pages))
    assert len(calls) == 1 and len({t.untyped_storage()._cdata for t in (*cache.k_pages, *cache.v_pages)}) == 4


@pytest.mark.parametrize(
    "write", [lambda cache, fork: cache.extend(fork, 1), lambda cache, fork: cache.batch([fork])], ids=["extend", "batch"]
)
def test_a_failing_copy_leaves_the_cache_as_it_was(write):
    cache = make()
    fork = cache.fork(cache.alloc(5))
    before = snapshot(cache)
    with attnops.use(deny=tuple(f"copy_kv:{kernel}" for kernel in kernels_of("copy_kv"))), pytest.raises(NoKernel):
        write(cache, fork)
    assert same(snapshot(cache), before)
    write(cache, fork)
    assert cache.length(fork) == 6


def test_a_failing_metadata_op_leaves_the_cache_as_it_was(monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    cache = make()
    a = cache.alloc(2)
    b = cache.fork(a)
    monkeypatch.setattr("attnops.cache.step.slot_mapping", fail)
    before = snapshot(cache)
    free = cache._ledger.pools[0].free
    with pytest.raises(MemoryError):
        cache.batch([a, b], [3, 5])
    after = snapshot(cache)
    for pages in after[1][2:]:  # what free pages hold is nobody's
        pages[free] = 0
    assert same(before, after)
    monkeypatch.undo()
    cache.batch([a, b], [3, 5])


def test_made_and_used_in_any_mode():
    with torch.inference_mode():
        cache = make()
        a = cache.alloc(3)
        step = cache.batch([a], 2)
    assert not any(t.is_inference() for t in [*tensors(cache), step.page_table, step.slots, step.positions, cache.slots(a)])
    with torch.enable_grad():
        cache.extend(a, 1)
    assert not any(t.requires_grad for t in tensors(cache))


@pytest.mark.parametrize(
    ("counts", "running", "fits"),
    [
        (8, (), True),
        (9, (), False),
        ((4, 4), (), True),
        ((4, 5), (), False),
        (9, (0,), True),
        (12, (0,), False),
        ((3, 8), (0,), True),
        ((4, 8), (0,), False),
        ((1, 1, 1), (0,), True),
        ((0, 0, 0), (), False),
        ((0, 0), (), True),
        ((), (), True),
    ],
    ids=str,
)
def test_what_fits(counts, running, fits):
    """Beside a request of 5 tokens, in 2 of 4 pages and 1 of 3 rows; a request has at most 4 pages."""
    cache = make(num_pages=5, max_requests=3)
    request = cache.alloc(5)
    before = snapshot(cache)
    assert cache.fits(counts, [request] * len(running)) is fits
    assert same(before, snapshot(cache))


def test_a_window_fits_whatever_its_length():
    cache = make(num_pages=8, page_size=2, max_pages_per_request=64, windows=(4, 4), max_new_tokens=2)
    assert cache.fits(100) and cache.fits([100, 100]) and not cache.fits(129)


def test_shapes():
    cache = PagedCache(3, 5, 2, 4, 8, 6, max_requests=7, max_pages_per_request=9, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert [tuple(t.shape) for t in cache.k_pages] == [(5, 2, 4, 8)] * 3
    assert [tuple(t.shape) for t in cache.v_pages] == [(5, 2, 4, 6)] * 3
    assert cache.page_table.shape == (7, 9) and cache.seq_lens.shape == (7,)
    assert not any(t.any() for t in tensors(cache))
    assert (cache.free_pages, cache.used_pages, cache.requests) == (4, 0, ())


def test_a_batch_is_frozen_and_a_pytree():
    cache = make()
    step = cache.batch([cache.alloc()], 3)
    with pytest.raises(AttributeError):
        setattr(step, "max_seqlen_q", 4)  # noqa: B010
    leaves, spec = pytree.tree_flatten(step)
    again = pytree.tree_unflatten(leaves, spec)
    assert isinstance(again, PagedBatch) and again.slots is step.slots


# Errors -----------------------------------------------------------------------------------------------------------------

GOOD = {
    "num_layers": 1, "num_pages": 4, "page_size": 2, "num_kv_heads": 1, "head_dim": 2, "max_requests": 2, "max_pages_per_request": 3,
    "dtype": torch.float32, "device": "cpu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "want"),
    [
        ("num_layers", 0, ">= 1"),
        ("num_pages", 1, ">= 2 (pages, the null page included)"),
        ("page_size", 0, ">= 1 (tokens)"),
        ("page_size", 2.0, ">= 1 (tokens)"),
        ("num_kv_heads", -1, ">= 1"),
        ("head_dim", 0, ">= 1"),
        ("v_head_dim", 0, ">= 1"),
        ("max_requests", 0, ">= 1"),
        ("max_pages_per_request", "3", ">= 1"),
        ("max_requests", True, ">= 1"),
        ("dtype", torch.int64, "bfloat16"),
        ("dtype", "float32", "float32"),
    ],
    ids=str,
)
def test_bad_builds(field, value, want):
    with pytest.raises(InvalidInput) as caught:
        PagedCache(**{**GOOD, field: value})
    assert caught.value.field == field and want in caught.value.want and str(value) in str(caught.value)


@pytest.mark.parametrize(
    ("call", "error", "found"),
    [
        (lambda c, a: c.alloc(-1), InvalidInput, {"field": "num_tokens", "got": -1}),
        (lambda c, a: c.alloc(2.5), InvalidInput, {"field": "num_tokens", "got": "2.5"}),
        (lambda c, a: c.alloc(17), RequestTooLong, {"got": 17, "limit": 16}),
        (lambda c, a: c.alloc(13), OutOfPages, {"needed": 4, "free": 3, "total": 4}),
        (lambda c, a: (c.alloc(), c.alloc()), TooManyRequests, {"limit": 2}),
        (lambda c, a: (c.fork(a), c.fork(a)), TooManyRequests, {"limit": 2}),
        (lambda c, a: c.extend(a, -1), InvalidInput, {"field": "num_tokens", "got": -1}),
        (lambda c, a: c.extend(a, 15), RequestTooLong, {"request": ..., "got": 17, "limit": 16}),
        (lambda c, a: c.extend(10**9, 1), UnknownRequest, {"request": 10**9}),
        (lambda c, a: c.extend("a", 1), UnknownRequest, {"request": "a"}),
        (lambda c, a: c.extend([a], 1), UnknownRequest, {"request": ...}),
        (lambda c, a: c.free(True), UnknownRequest, {"request": True}),
        (lambda c, a: c.free(make().alloc()), UnknownRequest, {"request": ...}),
        (lambda c, a: c.fork(None), UnknownRequest, {"request": None}),
        (lambda c, a: c.truncate(a, 3), InvalidInput, {"field": "length", "got": 3}),
        (lambda c, a: c.truncate(a, -1), InvalidInput, {"field": "length", "got": -1}),
        (lambda c, a: c.slots(a, 0, 3), InvalidInput, {"field": "start, stop", "got": (0, 3)}),
        (lambda c, a: c.slots(a, 2, 1), InvalidInput, {"field": "start, stop", "got": (2, 1)}),
        (lambda c, a: c.batch([], []), InvalidInput, {"field": "requests", "got": ()}),
        (lambda c, a: c.batch(a, 1), InvalidInput, {"field": "requests"}),
        (lambda c, a: c.batch([a, a], 1), InvalidInput, {"field": "requests"}),
        (lambda c, a: c.batch([a], [1, 2]), InvalidInput, {"field": "new_tokens", "got": "2 counts"}),
        (lambda c, a: c.batch([a], [-3]), InvalidInput, {"field": "new_tokens[0]", "got": -3}),
        (lambda c, a: c.batch([a], True), InvalidInput, {"field": "new_tokens[0]", "got": True}),
        (lambda c, a: c.batch([a, 10**9], 1), UnknownRequest, {"request": 10**9}),
        (lambda c, a: c.batch([a], [15]), RequestTooLong, {"got": 17, "limit": 16}),
        (lambda c, a: c.fits(-1), InvalidInput, {"field": "new_tokens[0]", "got": -1}),
        (lambda c, a: c.fits([1, 2.5]), InvalidInput, {"field": "new_tokens[1]", "got": "2.5"}),
        (lambda c, a: c.fits(1, a), InvalidInput, {"field": "requests"}),
        (lambda c, a: c.fits([1, 1], [a, a]), InvalidInput, {"field": "requests"}),
        (lambda c, a: c.fits([], [a]), InvalidInput, {"field": "new_tokens", "got": "0 counts"}),
        (lambda c, a: c.fits([1, 1], [a, 10**9]), UnknownRequest, {"request": 10**9}),
    ],
)
def test_bad_calls(call, error, found):
    cache = make(num_pages=5, max_requests=2)
    request = cache.alloc(2)
    write(cache, cache.slots(request), [1, 2])
    before = snapshot(cache)
    with pytest.raises(error) as caught:
        call(cache, request)
    if error is not TooManyRequests:  # there the first of two calls went through
        assert same(before, snapshot(cache))
    assert isinstance(caught.value, CacheError | InvalidInput)
    for name, value in found.items():
        assert value is ... or getattr(caught.value, name) == value
    assert str(found.get("got", "")) in str(caught.value)


def test_a_batch_is_all_or_none():
    cache = make(num_pages=5, max_requests=3)
    a, b = cache.alloc(4), cache.alloc(4)
    with unchanged(cache, OutOfPages) as caught:
        cache.batch([a, b], [5, 4])
    assert (caught.value.needed, caught.value.free, caught.value.total) == (3, 2, 4)
    with unchanged(cache, RequestTooLong):
        cache.batch([a, b], [1, 13])


def test_double_free():
    cache = make()
    a = cache.alloc(3)
    cache.free(a)
    with unchanged(cache, UnknownRequest) as caught:
        cache.free(a)
    assert str(a) in str(caught.value) and "freed twice" in str(caught.value)


def test_forks_beyond_the_rows():
    cache = make(max_requests=1)
    a = cache.alloc(3)
    for call in (cache.alloc, lambda: cache.fork(a)):
        with unchanged(cache, TooManyRequests):
            call()
