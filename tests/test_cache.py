"""The caches of keys and of latents: who owns which page, what the tables say, and that a call that
raises changes nothing."""

import contextlib
import copy
import itertools

import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils import _pytree as pytree

import attnops
from attnops.cache import LatentCache, PagedBatch, PagedCache
from attnops.core.errors import (
    CacheError,
    InvalidInput,
    NoKernel,
    OutOfPages,
    RequestTooLong,
    TooManyRequests,
    UnknownRequest,
)
from attnops.core.kernel import kernels_of
from attnops.ops import copy_kv
from tests.modules import cu, poisoned, refused


def make(
    num_pages=8,
    page_size=4,
    max_requests=4,
    max_pages_per_request=4,
    num_layers=2,
    dtype=torch.float32,
    **more,
):
    return PagedCache(
        num_layers,
        num_pages,
        page_size,
        1,
        1,
        max_requests=max_requests,
        max_pages_per_request=max_pages_per_request,
        dtype=dtype,
        device="cpu",
        **more,
    )


def snapshot(cache):
    ledger = copy.deepcopy(vars(cache._ledger))
    return ledger, [
        t.clone().view(torch.uint8) for t in tensors(cache)
    ]  # as bytes, because NaN is not NaN


def tensors(cache):
    return [cache.page_table, cache.seq_lens, *itertools.chain(*cache.layers)]


def same(a, b):
    return (
        a[0].keys() == b[0].keys()
        and all(a[0][k] == b[0][k] for k in a[0])
        and all(map(torch.equal, a[1], b[1]))
    )


@contextlib.contextmanager
def unchanged(cache, error):
    before = snapshot(cache)
    with pytest.raises(error) as caught:
        yield caught
    assert same(before, snapshot(cache))


def write(cache, slots, tokens):
    """Token t's key is t in layer 0 and t + 0.5 in layer 1, its value the negative. slots: of each
    layer."""
    for layer, ((k, v), own) in enumerate(zip(cache.layers, slots, strict=True)):
        new = torch.tensor(tokens, dtype=k.dtype)[own >= 0] + layer / 2
        k.view(-1)[own[own >= 0]] = new
        v.view(-1)[own[own >= 0]] = -new


def slots_of(cache, request, start=0):
    return [cache.slots(request, start, layer=layer) for layer in range(len(cache.layers))]


def read(cache, request, layer):
    """The last tokens of a request, found as a kernel finds them: through its row of the tables.
    All of them without a window."""
    row, (k, v), pool = cache.row(request), cache.layers[layer], cache.table_of[layer]
    table, window = cache.tables[pool], cache.windows[pool]
    length = int(cache.seq_lens[row])
    at = torch.arange(max(0, length - window + 1) if window else 0, length)
    pages = table[row].long()[at // cache.page_size % table.shape[1]]
    keys, values = (x[pages, at % cache.page_size].flatten() for x in (k, v))
    assert torch.equal(keys, -values)
    return (keys - layer / 2).int().tolist()


# The machine --------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Any sequence of calls, beside a plain dictionary of what each request should hold."""

    @initialize(
        page_size=st.sampled_from((1, 3, 4)),
        pages=st.integers(6, 20),
        rows=st.integers(3, 6),
        width=st.integers(2, 9),
        window=st.sampled_from((0, 2, 5)),
    )
    def start(self, page_size, pages, rows, width, window):
        self.cache = poisoned(
            make(pages, page_size, rows, width, windows=(0, window), max_new_tokens=4)
        )
        self.model = {}
        self.gone = []
        self.next = 1
        self.addresses = [t.data_ptr() for t in tensors(self.cache)]
        self.alloc(5)

    def tokens(self, count):
        self.next += count
        return list(range(self.next - count, self.next))

    @contextlib.contextmanager
    def maybe(self, *errors):
        """The call may raise one of `errors`, and then nothing has changed. Yields a list, filled
        if it raised."""
        before = snapshot(self.cache)
        raised = []
        try:
            yield raised
        except errors as error:
            raised.append(error)
            assert same(before, snapshot(self.cache))

    def fits(self, *given):
        with self.maybe():
            return self.cache.fits(*given)

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

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(0, 6))
    def extend(self, data, count):
        request = self.live(data)
        with self.maybe(OutOfPages, RequestTooLong):
            self.cache.extend(request, count)
            tokens = self.tokens(count)
            write(self.cache, slots_of(self.cache, request, len(self.model[request])), tokens)
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
            write(
                self.cache,
                [step.of(table).slots for table in self.cache.table_of],
                list(itertools.chain(*tokens)),
            )
            for request, new in zip(chosen, tokens, strict=True):
                self.model[request] += new
            self.describes(step, chosen, counts)
        assert fits is not bool(raised)

    def describes(self, step, chosen, counts):
        assert torch.equal(
            step.page_table, self.cache.page_table[[self.cache.row(r) for r in chosen]]
        )
        assert step.seq_lens.tolist() == [len(self.model[r]) for r in chosen]
        assert torch.equal(step.cu_seqlens_q, cu(counts)) and step.max_seqlen_q == max(counts)
        new = [
            (r, len(self.model[r]) - n, len(self.model[r]))
            for r, n in zip(chosen, counts, strict=True)
        ]
        assert step.positions.tolist() == [
            at for _, start, stop in new for at in range(start, stop)
        ]
        assert torch.equal(step.slots, torch.cat([self.cache.slots(*each) for each in new]))
        assert {t.dtype for t in (step.page_table, step.seq_lens, step.cu_seqlens_q)} == {
            torch.int32
        }
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
            lost |= (
                pool.window > 0 and length > 0 and length - pool.window + 1 < first and first > 0
            )
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
    @rule(
        data=st.data(),
        call=st.sampled_from(
            ["free", "fork", "length", "row", "slots", "batch", "extend", "truncate", "fits"]
        ),
    )
    def use_after_free(self, data, call):
        request = data.draw(st.sampled_from(self.gone))
        many = {
            "extend": (request, 1),
            "truncate": (request, 0),
            "batch": ([*self.model, request],),
            "fits": (1, [request]),
        }
        with unchanged(self.cache, UnknownRequest):
            getattr(self.cache, call)(*many.get(call, (request,)))

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
            assert read(self.cache, request, 0) == tokens
            last = read(self.cache, request, 1)
            assert last == tokens[len(tokens) - len(last) :]

    @invariant()
    def owners(self):
        cache, ledger = self.cache, self.cache._ledger
        assert cache.requests == tuple(self.model)
        assert cache.free_pages + cache.used_pages == sum(
            pool.num_pages - 1 for pool in ledger.pools
        )
        for i, pool in enumerate(ledger.pools):
            owners = [page for entry in ledger.requests.values() for page in entry.pages[i]]
            assert pool.refs == [owners.count(page) for page in range(pool.num_pages)]
            assert sorted({*owners} | {*pool.free}) == list(range(1, pool.num_pages)), (
                "not the null page"
            )
            assert not {*owners} & {*pool.free} and len(pool.free) == len({*pool.free})
        rows = {entry.row: entry for entry in ledger.requests.values()}
        assert sorted([*rows, *ledger.free_rows]) == list(range(cache.seq_lens.shape[0]))
        for row, length in enumerate(cache.seq_lens.tolist()):
            assert length == (rows[row].length if row in rows else 0)
            for i, table in enumerate(cache.tables):
                line, pages = table[row].tolist(), rows[row].pages[i] if row in rows else []
                assert len(pages) == min(-(-length // cache.page_size), len(line)) and len(
                    set(pages)
                ) == len(pages)
                assert line == pages + [0] * (len(line) - len(pages))

    @invariant()
    def tensors_stay(self):
        assert [t.data_ptr() for t in tensors(self.cache)] == self.addresses
        assert all(pool[0].isnan().all() for pool in itertools.chain(*self.cache.layers)), (
            "the null page was written"
        )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)

LONGER = {"settings": settings(max_examples=120, stateful_step_count=40, deadline=None)}
TestMachineForLonger = pytest.mark.full(type("TestMachineForLonger", (Machine.TestCase,), LONGER))


# By hand ------------------------------------------------------------------------------------------


def made(kind, **more):
    """A cache of keys and values, or of latents, of 7 pages of 4 tokens."""
    if kind == "keys":
        return make(**more)
    sizes = {
        "num_tokens": 28,
        "latent_dim": 6,
        "rope_dim": 2,
        "max_requests": 4,
        "max_tokens_per_request": 16,
        "page_size": 4,
    }
    return LatentCache(2, **sizes | {"dtype": torch.float32, "device": "cpu"} | more)


KINDS = pytest.mark.parametrize("kind", ["keys", "latents"])


@KINDS
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str
)
def test_a_fork_shares_until_one_writes(kind, dtype, monkeypatch):
    """The half-full page is then copied, of all layers in one launch. Of a last page that is full
    nothing is."""
    calls = []
    monkeypatch.setattr(
        "attnops.cache.paged.copy_kv",
        lambda *given, **more: calls.append(given) or copy_kv(*given, **more),
    )
    cache = made(kind, dtype=dtype)
    pools = list(itertools.chain(*cache.layers))
    a = cache.alloc(6)
    for pool in pools:
        pool[2, :2] = torch.full(pool[2, :2].shape, 3.0).to(dtype)
    b = cache.fork(a)
    assert cache.used_pages == 2
    step = cache.batch([a, b], 1)
    (first, copied), (again, kept) = step.page_table[:, :2].tolist()
    assert first == again == 1 and copied != kept == 2 and cache.used_pages == 3
    assert all(pool[copied, :2].float().eq(3).all() for pool in pools)
    assert len(calls) == 1 and len({pool.untyped_storage()._cdata for pool in pools}) == len(pools)
    full = cache.alloc(4)
    cache.batch([full, cache.fork(full)], 1)
    assert len(calls) == 1 and cache.used_pages == 6


@pytest.mark.parametrize(
    "write",
    [lambda cache, fork: cache.extend(fork, 1), lambda cache, fork: cache.batch([fork])],
    ids=["extend", "batch"],
)
def test_a_failing_copy_leaves_the_cache_as_it_was(write):
    cache = make()
    fork = cache.fork(cache.alloc(5))
    with (
        attnops.use(deny=tuple(f"copy_kv:{kernel}" for kernel in kernels_of("copy_kv"))),
        unchanged(cache, NoKernel),
    ):
        write(cache, fork)
    write(cache, fork)
    assert cache.length(fork) == 6


@pytest.mark.parametrize(
    "part", ["step.slot_mapping", "latent.prefix_chunks", "latent.shared_prefix"]
)
def test_a_failing_description_leaves_the_cache_as_it_was(monkeypatch, part):
    def fail(*_, **__):
        raise MemoryError

    cache = made("latents")
    a = cache.alloc(6)
    b = cache.fork(a)
    before = snapshot(cache)
    monkeypatch.setattr(f"attnops.cache.{part}", fail)
    free = cache._ledger.pools[0].free
    with pytest.raises(MemoryError):
        cache.batch([a, b], [3, 5], prefix_tokens=4, share=True)
    for pages in itertools.chain(*cache.layers):  # what free pages hold is nobody's
        pages[free] = 0
    assert same(before, snapshot(cache))
    monkeypatch.undo()
    cache.batch([a, b], [3, 5])


@KINDS
def test_made_and_used_in_any_mode(kind):
    with torch.inference_mode():
        cache = made(kind)
        a = cache.alloc(9)
        given = {"prefix_tokens": 4, "share": True} if kind == "latents" else {}
        step = cache.batch([a, cache.fork(a)], 2, **given)
    leaves = [x for x in pytree.tree_leaves(step) if isinstance(x, torch.Tensor)]
    assert len(leaves) > 10 or kind == "keys"
    assert not any(t.is_inference() for t in [*tensors(cache), *leaves, cache.slots(a)])
    with torch.enable_grad():
        cache.extend(a, 1)
    assert not any(t.requires_grad for t in tensors(cache))


@pytest.mark.parametrize(
    ("counts", "running", "fits"),
    [
        (8, 0, True),
        ((4, 5), 0, False),
        (9, 1, True),
        (12, 1, False),
        ((3, 8), 1, True),
        ((4, 8), 1, False),
        ((0, 0, 0), 0, False),
        ((), 0, True),
    ],
    ids=str,
)
def test_what_fits(counts, running, fits):
    """Beside a request of 5 tokens, in 2 of 4 pages and 1 of 3 rows; a request has at most 4
    pages."""
    cache = make(num_pages=5, max_requests=3)
    request = cache.alloc(5)
    assert cache.fits(counts, [request] * running) is fits


def test_a_window_fits_whatever_its_length():
    cache = make(
        num_pages=8, page_size=2, max_pages_per_request=64, windows=(4, 4), max_new_tokens=2
    )
    assert cache.fits(100) and cache.fits([100, 100]) and not cache.fits(129)


def test_shapes():
    sizes = {"max_requests": 7, "dtype": torch.bfloat16, "device": torch.device("cpu")}
    keys = PagedCache(3, 5, 2, 4, 8, 6, max_pages_per_request=9, **sizes)
    latents = LatentCache(3, 1000, max_tokens_per_request=300, page_size=32, **sizes)
    for cache, shapes, table, pages in (
        (keys, ((5, 2, 4, 8), (5, 2, 4, 6)), (7, 9), 4),
        (latents, ((33, 32, 576),), (7, 12), 32),
    ):
        assert [tuple(tuple(x.shape) for x in layer) for layer in cache.layers] == [shapes] * 3
        assert cache.page_table.shape == table and cache.seq_lens.shape == (7,)
        assert not any(t.any() for t in tensors(cache)) and cache.workspace is None
        assert (cache.free_pages, cache.used_pages, cache.requests) == (pages, 0, ())


def test_a_batch_is_frozen_and_a_pytree():
    cache = make()
    step = cache.batch([cache.alloc()], 3)
    with pytest.raises(AttributeError):
        setattr(step, "max_seqlen_q", 4)  # noqa: B010
    again = pytree.tree_unflatten(*reversed(pytree.tree_flatten(step)))
    assert isinstance(again, PagedBatch) and again.slots is step.slots


# Errors -------------------------------------------------------------------------------------------

# Each with a method and its arguments; "a" and "b" stand for the two requests of a busy cache.
BAD = [
    ("num_tokens: got -1", "alloc", -1),
    ("num_tokens: got 2.5", "extend", "a", 2.5),
    ("length: got 3", "truncate", "a", 3),
    ("length: got -1", "truncate", "a", -1),
    ("start, stop: got (0, 3)", "slots", "a", 0, 3),
    ("start, stop: got (2, 1)", "slots", "a", 2, 1),
    ("requests: got (", "batch", ["a", "a"], 1),
    ("requests: got ", "batch", "a", 1),
    ("new_tokens: got 2 counts", "batch", ["a"], [1, 2]),
    ("new_tokens[0]: got -3", "batch", ["a"], [-3]),
    ("new_tokens[0]: got True", "batch", ["a"], True),
    ("new_tokens[1]: got 2.5", "fits", [1, 2.5]),
    ("new_tokens: got 0 counts", "fits", [], ["a"]),
    ("requests: got (", "fits", [1, 1], ["a", "a"]),
    ("requests: got ", "fits", 1, "a"),
]
OF_LATENTS = [
    ("prefix_tokens: got 0", {"prefix_tokens": 0}),
    ("prefix_tokens: got 1.5", {"prefix_tokens": 1.5}),
    ("share: got 1", {"share": 1}),
]
UNKNOWN = [("extend", ["a"], 1), ("free", True), ("free", make().alloc()), ("fork", None)]
FULL = [
    (RequestTooLong, {"got": 17, "limit": 16}, "alloc", 17),
    (RequestTooLong, {"got": 17, "limit": 16}, "batch", ["a", "b"], [1, 13]),
    (OutOfPages, {"needed": 3, "free": 2, "total": 4}, "alloc", 9),
    (OutOfPages, {"needed": 3, "free": 2, "total": 4}, "batch", ["a", "b"], [7, 4]),
]


def busy(kind):
    """A cache of 4 pages of 4 tokens and 3 rows, and two requests, of 2 and 4 tokens."""
    cache = made(kind, max_requests=3, **{"num_pages": 5} if kind == "keys" else {"num_tokens": 16})
    return cache, cache.alloc(2), cache.alloc(4)


def call(cache, requests, method, *args):
    ids = dict(zip("ab", requests, strict=True))
    return getattr(cache, method)(*pytree.tree_map(lambda x: ids.get(x, x), args))


@pytest.mark.parametrize("row", BAD)
def test_bad_calls(row):
    cache, *requests = busy("keys")
    text, *asked = row
    before = snapshot(cache)
    refused(lambda: call(cache, requests, *asked), text)
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(("text", "more"), OF_LATENTS)
def test_bad_steps_of_latents(text, more):
    cache, request, _ = busy("latents")
    before = snapshot(cache)
    refused(lambda: cache.batch([request], **more), text)
    assert same(before, snapshot(cache))


@pytest.mark.parametrize("asked", UNKNOWN)
def test_unknown_requests(asked):
    cache, *requests = busy("keys")
    with unchanged(cache, UnknownRequest):
        call(cache, requests, *asked)


@KINDS
@pytest.mark.parametrize("row", FULL)
def test_no_room(kind, row):
    cache, *requests = busy(kind)
    error, found, *asked = row
    with unchanged(cache, error) as caught:
        call(cache, requests, *asked)
    assert found.items() <= vars(caught.value).items() and isinstance(caught.value, CacheError)


def test_no_rows():
    cache = make(max_requests=1)
    a = cache.alloc(3)
    for call in (cache.alloc, lambda: cache.fork(a)):
        with unchanged(cache, TooManyRequests) as caught:
            call()
        assert caught.value.limit == 1


@pytest.mark.parametrize("windows", [None, (0, 8)], ids=["whole", "windows"])
def test_an_idle_step(windows):
    """No request brings a token, as in a process that waits for others: nothing changes, and layers
    give nothing."""
    more = {} if windows is None else {"windows": windows, "max_new_tokens": 4}
    cache = make(**more)
    cache.extend(cache.alloc(), 3)
    before = snapshot(cache)
    batch = cache.batch([])
    for each in (batch, *batch.others):
        assert each.page_table.shape[0] == each.seq_lens.numel() == each.slots.numel() == 0
        assert each.cu_seqlens_q.tolist() == [0] and each.max_seqlen_q == 0
    layer, empty = attnops.nn.Attention(1, 1, head_dim=1), torch.empty(0, 1, 1)
    given = {"k_pages": cache.k_pages[0], "v_pages": cache.v_pages[0]}
    for call in (layer, torch.compile(layer, backend="eager")):
        assert call(empty, empty, empty, batch=batch, **given).shape == (0, 1, 1)
    ledger, held = snapshot(cache)
    assert ledger == before[0] and all(map(torch.equal, held, before[1]))


def test_an_idle_step_over_latents():
    cache = LatentCache(
        1,
        8,
        latent_dim=4,
        rope_dim=2,
        max_requests=2,
        max_tokens_per_request=8,
        page_size=4,
        dtype=torch.float32,
        device="cpu",
    )
    for more in ({}, {"share": True}, {"prefix_tokens": 4, "share": True}):
        batch = cache.batch([], **more)
        assert batch.page_table.shape[0] == 0 and batch.cu_seqlens_q.tolist() == [0]
        assert batch.prefix == () and batch.shared is None and batch.plan is None
