"""Calls with heads before tokens: what is known of them, what must not be, and that it gives what the op gives, bit for bit."""

import threading
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.errors import InvalidInput, NoKernel
from attnops.kernel import _REGISTRY, Kernel, register, renew
from attnops.ops import _direct, heads_first
from attnops.problem import Extent, Target, alike, pretend
from attnops.testing import Features, Mismatch, Source, builders, check_kernel

if _direct.TensorGuards is None:
    pytest.skip("this torch has no TensorGuards", allow_module_level=True)

PLAIN = {
    "mask": None, "sinks": None, "kv_start": None, "kv_end": None, "scale": 0.5, "causal": True, "window_left": -1, "softcap": 0.0,
    "kernel": None,
}  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_known():
    heads_first._SEEN.clear()


def qkv(b=2, s=1, k=5, heads=4, **kw):
    return torch.randn(b, heads, s, 8, **kw), torch.randn(b, 2, k, 8, **kw), torch.randn(b, 2, k, 8, **kw)


def known(q, k, v, **more):
    return heads_first.known(q, k, v, **PLAIN | more)


def attend(q, k, v, **more):
    """As transformers' attention function asks."""
    asked = PLAIN | more
    run = heads_first.known(q, k, v, **asked)
    if run is not None:
        return run(q, k, v, *(asked[n] for n in ("mask", "sinks", "kv_start", "kv_end")))
    return heads_first.attention(q, k, v, **asked)


def through_the_op(q, k, v, **more):
    asked = PLAIN | more
    window = (asked.pop("window_left"), -1)
    return attnops.attention(*(x.transpose(1, 2) for x in (q, k, v)), window=window, **asked)


def seen_twice(*tensors, **more):
    """The result of a call that is known, after it was compared with that of the op."""
    want = through_the_op(*tensors, **more)
    first, second = attend(*tensors, **more), attend(*tensors, **more)
    assert torch.equal(first, want) and torch.equal(second, want) and second.is_contiguous()
    return second


@torch.no_grad()
@pytest.mark.parametrize("heads", [2, 4, 8])
@pytest.mark.parametrize(("s", "k"), [(1, 1), (1, 9), (5, 5), (5, 9)])
def test_a_known_call_gives_what_the_op_gives(heads, s, k):
    q, key, value = qkv(s=s, k=k, heads=heads)
    masks = (None, torch.rand(2, 1, s, k) > 0.3, torch.randn(2, heads, s, k), torch.randn(1, 1, 1, k).double())
    for mask in masks:
        for more in ({}, {"causal": False}, {"scale": None}, {"window_left": 1}, {"softcap": 2.0}, {"sinks": torch.randn(heads)}):
            seen_twice(q, key, value, mask=mask, **more)
            assert known(q, key, value, mask=mask, **more) is not None
    seen_twice(q, key, value, kv_start=torch.zeros(2, dtype=torch.int64), kv_end=torch.full((2,), k))
    seen_twice(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, key, value)))


@torch.no_grad()
@pytest.mark.parametrize("masked", [False, True])
def test_one_token_over_keys_that_grow(masked):
    """Looked at once for all numbers of keys with one extent; of other strides too, for a cache is laid out in more than one way."""
    looked, lengths = set(), range(1, 90)
    for n in lengths:
        q, key, value = qkv(k=n)
        mask = torch.rand(2, 1, 1, n) > 0.2 if masked else None
        assert (known(q, key, value, mask=mask) is not None) == (Extent.of(n) in looked)
        looked.add(Extent.of(n))
        assert torch.equal(attend(q, key, value, mask=mask), through_the_op(q, key, value, mask=mask))
        strided = torch.randn(2, 2, 100, 8)[:, :, :n]
        assert known(q, strided, value, mask=mask) is not None
        assert torch.equal(attend(q, strided, value, mask=mask), through_the_op(q, strided, value, mask=mask))
    assert len(looked) == len({alike(n) for n in lengths})


def test_alike_are_sizes_of_one_extent():
    extents = [Extent.of(n) for n in range(700)]
    for n in range(600):
        first, last = alike(n)
        assert first <= n <= last and {*extents[first : last + 1]} == {extents[n]}
        assert extents[last + 1] != extents[n] and (first == 0 or extents[first - 1] != extents[n])


@torch.no_grad()
def test_numbers_of_keys_that_differ_are_an_error():
    q, key, value = qkv(k=40)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    attend(q, key, value), attend(q, key, value, mask=mask)
    for bad, field in (((q, key, value[:, :, :39]), "value.shape[1]"), ((q, key[:, :, :39], value), "value.shape[1]")):
        with pytest.raises(InvalidInput) as caught:
            attend(*bad)
        assert caught.value.field == field
    for wrong in (mask[..., :39], mask[..., :1], mask[0]):
        with pytest.raises(InvalidInput, match="mask"):
            attend(q, key, value, mask=wrong)
    none = key[:, :, :0]
    for _ in range(2):  # of no keys nothing is known but of no keys
        assert not attend(q, none, none.clone()).any()
    assert known(q, key, value) is not None and known(q, key[:, :, :20], value[:, :, :20]) is None


CHANGES = {
    "batch": lambda q, k, v: ((q[:1], k[:1], v[:1]), {}),
    "queries": lambda q, k, v: ((q.repeat(1, 1, 2, 1), k, v), {}),
    "heads": lambda q, k, v: ((q.repeat(1, 2, 1, 1), k, v), {}),
    "dtype": lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
    "last stride": lambda q, k, v: ((q, torch.randn(2, 2, 5, 16)[..., ::2], v), {}),
    "query strides": lambda q, k, v: ((q.transpose(0, 1).contiguous().transpose(0, 1), k, v), {}),
    "subclass": lambda q, k, v: ((q.as_subclass(Sub), k, v), {}),
    "gradient": lambda q, k, v: ((q.clone().requires_grad_(), k, v), {}),
    "mask": lambda q, k, v: ((q, k, v), {"mask": torch.ones(2, 1, 1, 5, dtype=torch.bool)}),
    "sinks": lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(4)}),
    "start": lambda q, k, v: ((q, k, v), {"kv_start": torch.zeros(2, dtype=torch.int32)}),
    "end": lambda q, k, v: ((q, k, v), {"kv_end": torch.full((2,), 5)}),
    "scale": lambda q, k, v: ((q, k, v), {"scale": 0.25}),
    "no scale": lambda q, k, v: ((q, k, v), {"scale": None}),
    "causal": lambda q, k, v: ((q, k, v), {"causal": False}),
    "window": lambda q, k, v: ((q, k, v), {"window_left": 2}),
    "softcap": lambda q, k, v: ((q, k, v), {"softcap": 1.0}),
    "kernel": lambda q, k, v: ((q, k, v), {"kernel": "reference"}),
}


class Sub(torch.Tensor):
    pass


@torch.no_grad()
@pytest.mark.parametrize("what", CHANGES)
def test_another_call_is_not_known(what):
    q, k, v = qkv()
    attend(q, k, v)
    assert known(q, k, v) is not None
    other, more = CHANGES[what](q, k, v)
    assert known(*other, **more) is None
    want = through_the_op(*other, **more)
    assert all(torch.equal(attend(*other, **more), want) for _ in range(2))


@torch.no_grad()
def test_masks_of_another_kind_are_not_known():
    q, k, v = qkv()
    mask = torch.rand(2, 1, 1, 5) > 0.3
    for one in (mask, mask.float(), mask[:1], mask.expand(2, 4, 1, 5)):
        assert known(q, k, v, mask=one) is None
        seen_twice(q, k, v, mask=one)


@torch.no_grad()
def test_policy_target_kernels_and_tables_are_noticed():
    q, k, v = qkv()
    attend(q, k, v)
    with attnops.use(kernel="reference"):
        assert known(q, k, v) is None
        attend(q, k, v)
    with pretend(Target("cpu", 0, ("nothing",))):
        assert known(q, k, v) is None
    assert known(q, k, v) is not None
    renew()
    assert known(q, k, v) is None
    attend(q, k, v)
    kernel = Kernel("cheapest", "attention", lambda q, *_, **__: (torch.full_like(q, 7.0), q.new_empty(0)), cost_us=lambda p: 0.0)
    register(kernel)
    try:
        assert all(bool((attend(q, k, v) == 7.0).all()) for _ in range(2))
        with attnops.use(deny=("cheapest",)):
            assert not bool((attend(q, k, v) == 7.0).any())
    finally:
        del _REGISTRY.kernels["attention"]["cheapest"]
        renew()
    assert all(torch.equal(attend(q, k, v), through_the_op(q, k, v)) for _ in range(2))
    with pytest.raises(NoKernel):
        attend(q, k, v, kernel="sdpa", sinks=torch.zeros(4))


def test_whoever_must_see_the_op_does():
    q, k, v = qkv()
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    with torch.no_grad():
        attend(q, k, v)
        for mode in (Dispatch, Function):
            with mode():
                attend(q, k, v)
            assert torch.ops.attnops.attention.default in seen
            seen.clear()
        with torch.profiler.profile() as profile:
            attend(q, k, v)
        assert "attnops::attention" in {e.key for e in profile.key_averages()}
        with torch.autocast("cpu", torch.bfloat16):
            assert known(q, k, v) is None
            attend(q, k, v)
            assert known(q, k, v) is None
        assert len(heads_first._SEEN) == 1
        graphs = []
        torch.compile(partial(attend, mask=None), backend=lambda graph, _: graphs.append(graph) or graph.forward, fullgraph=True)(q, k, v)
        assert torch.ops.attnops.attention.default in {n.target for n in graphs[0].graph.nodes}
    assert known(q, k, v) is None  # grad mode
    grads = []
    for call in (attend, attend, through_the_op):
        leaf = q.clone().requires_grad_()
        call(leaf, k, v).square().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[2])


@torch.inference_mode()
def test_in_inference_mode():
    q, k, v = qkv()
    seen_twice(q, k, v)
    assert known(q, k, v) is not None
    with torch.inference_mode(False), torch.no_grad():
        assert known(*qkv()) is None


@torch.no_grad()
def test_numbers_of_another_type_and_tensors_that_come_twice():
    q, k, v = qkv()
    attend(q, k, v, scale=1.0)
    assert known(q, k, v, scale=1.0) is not None
    for scale in (1, True):
        assert known(q, k, v, scale=scale) is None
        if scale is not True:
            assert torch.equal(attend(q, k, v, scale=scale), attend(q, k, v, scale=1.0))
    for window in (-1.0, 2.5):
        with pytest.raises(RuntimeError, match="window_left"):
            attend(q, k, v, window_left=window)
    for _ in range(2):
        assert torch.equal(attend(q, k, k), through_the_op(q, k, k))
    with pytest.raises(InvalidInput):
        attend(q, k, v, scale=float("nan"))


@torch.no_grad()
def test_what_is_kept_is_bounded():
    _, k, v = qkv()
    for s in range(1, 30):
        attend(torch.randn(2, 4, s, 8), k, v)
    assert [len(kept) for kept in heads_first._SEEN.values()] == [heads_first.SHAPES]
    for i in range(heads_first.KINDS + 5):
        attend(*qkv(), scale=1.0 + i)
    assert len(heads_first._SEEN) <= heads_first.KINDS


def test_threads_share_it():
    q, k, v = qkv()
    with torch.no_grad():
        want = attend(q, k, v)
    wrong = []

    def work():
        with torch.no_grad(), attnops.use(prefer=("sdpa",)):
            for n in range(3, 60):
                if not torch.equal(attend(q, k, v), want) or attend(*qkv(s=n % 3, k=n)).shape != (2, n % 3, 4, 8):
                    wrong.append(n)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@torch.no_grad()
def test_a_kernel_is_asked_once_and_checked():
    asked = []

    def turned(query, *args, **kwargs):
        asked.append((query.shape, kwargs["policy"]))
        return lambda q, k, v, *others: q.transpose(1, 2).contiguous() * 2

    def run(query, *_, **__):
        return query.contiguous() * 2, query.new_empty(0)

    register(Kernel("doubles", "attention", run, heads_first=turned, cost_us=lambda p: 1e9))
    try:
        for n in (129, 130, 144):
            q, k, v = qkv(k=n)
            assert torch.equal(attend(q, k, v, kernel="doubles"), q.transpose(1, 2) * 2)
        assert asked == [((2, 1, 4, 8), "kernel=attention:doubles")]
    finally:
        del _REGISTRY.kernels["attention"]["doubles"]
        renew()
    sdpa = attnops.kernel.kernels_of("attention")["sdpa"]
    call = builders.dense(Source(0), 2, 1, 9, Features())
    wrong = Kernel("sdpa", "attention", sdpa.run, heads_first=lambda *a, **kw: lambda q, *_: q.transpose(1, 2) * 2)
    strided = Kernel("sdpa", "attention", sdpa.run, heads_first=lambda *a, **kw: lambda q, *_: torch.zeros(2, 4, 2, 8).transpose(1, 2))
    assert check_kernel(sdpa, call).worst <= 1.0
    for kernel, text in ((wrong, "off by"), (strided, "contiguous")):
        with pytest.raises(Mismatch, match=text):
            check_kernel(kernel, call)


@torch.no_grad()
def test_without_guards_of_torch_every_call_goes_through_the_op(monkeypatch):
    monkeypatch.setattr(heads_first, "TensorGuards", None)
    tensors = qkv()
    assert torch.equal(attend(*tensors), through_the_op(*tensors)) and known(*tensors) is None
