"""Eager calls like one made before skip checks and selection, and the dispatcher too, unless something else must see them."""

import itertools
import sys
import threading
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core import eager_cache
from attnops.core.errors import InvalidInput, NoGradient, NoKernel
from attnops.core.kernel import _REGISTRY, Kernel, generation
from attnops.core.problem import Target, pretend
from attnops.core.record import FLOATS
from attnops.kernels.torch import flex
from attnops.ops import merge_states
from attnops.ops.attention.merge import MERGE, MERGE_STATES
from attnops.ops.attention.record import ATTENTION
from attnops.ops.pages.record import PAGED
from attnops.testing import Features, Source, make_call
from tests.lowering.models import compiled_code, kernel_calls


@pytest.fixture(autouse=True, params=["TensorGuards", "Likeness"])
def looked(request, monkeypatch):
    """How often each op looked at a call, checked it and chose a kernel; nothing is remembered at the start."""
    if request.param == "Likeness":
        monkeypatch.setattr(eager_cache, "_TensorGuards", None)
    elif eager_cache._TensorGuards is None:
        pytest.skip("this torch has no TensorGuards")
    counts, real = Counter(), eager_cache.checked
    for op in (ATTENTION, PAGED):
        op.seen.clear()
        op.patterns.clear()

    def checked(op, call):
        counts[op.name] += 1
        return real(op, call)

    monkeypatch.setattr(eager_cache, "checked", checked)
    return counts


NUMBERS = itertools.count()


def qkv(b=2, s=3, k=5, **kw):
    return torch.randn(b, s, 4, 8, **kw), torch.randn(b, k, 2, 8, **kw), torch.randn(b, k, 2, 8, **kw)


@torch.no_grad()
def test_the_second_call_goes_straight_and_gives_the_same(looked):
    q, k, v = qkv()
    first, second = attnops.attention(q, k, v, causal=True), attnops.attention(q, k, v, causal=True)
    assert torch.equal(first, second) and looked["attention"] == 1
    other = attnops.attention(*qkv(), causal=True)
    assert other.shape == first.shape and looked["attention"] == 1
    call = make_call("paged_attention", Source(0), (1, 2), (5, 9), 4, Features(), padding=0)
    names = ("query", "k_pages", "v_pages", "page_table", "seq_lens", "cu_seqlens_q")
    given = [call.arguments[n] for n in names]
    a, b = (attnops.paged_attention(*given, max_seqlen_q=2) for _ in range(2))
    assert torch.equal(a, b) and looked["paged_attention"] == 1


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda q, k, v: ((q[:, :2], k, v), {}),
        lambda q, k, v: ((q.transpose(0, 1).contiguous().transpose(0, 1), k, v), {}),
        lambda q, k, v: ((q.double(), k.double(), v.double()), {}),
        lambda q, k, v: ((q, k, v), {"causal": True}),
        lambda q, k, v: ((q, k, v), {"scale": 0.25}),
        lambda q, k, v: ((q, k, v), {"return_lse": True}),
        lambda q, k, v: ((q, k, v), {"kernel": "reference"}),
        lambda q, k, v: ((q, k, v), {"sinks": torch.zeros(4)}),
        lambda q, k, v: ((q, k, v), {"softcap": True}),
        lambda q, k, v: ((q, k, v), {"attention_chunk": 2}),
    ],
)
def test_another_call_is_looked_at_again(looked, change):
    q, k, v = qkv()
    attnops.attention(q, k, v)
    args, kwargs = change(q, k, v)
    attnops.attention(*args, **kwargs)
    assert looked["attention"] == 2


@torch.no_grad()
def test_errors_are_those_of_the_first_call(looked):
    q, k, v = qkv()
    wrong = {
        "value.shape[0]": (q, k, v[:1]),
        "key.dtype": (q, k.bfloat16(), v.bfloat16()),
        "key.device": (q, k.to("meta"), v),
    }
    for known in (False, True):
        if known:
            attnops.attention(q, k, v)
        for field, args in wrong.items():
            for _ in range(2):
                with pytest.raises(InvalidInput) as caught:
                    attnops.attention(*args)
                assert caught.value.field == field
    with pytest.raises(NoKernel):
        attnops.attention(q, k, v, sinks=torch.zeros(4), kernel="sdpa")


@torch.no_grad()
def test_a_new_kernel_a_policy_and_a_target_are_noticed(looked):
    q, k, v = qkv()
    attnops.attention(q, k, v)
    with attnops.use(kernel="reference"):
        attnops.attention(q, k, v)
    with pretend(Target("cpu", 0, ("nothing",))):
        attnops.attention(q, k, v)
    assert looked["attention"] == 3
    before = generation()
    _REGISTRY.generation += 1
    try:
        attnops.attention(q, k, v)
    finally:
        _REGISTRY.generation = before
    assert looked["attention"] == 4


def test_whoever_must_see_the_op_does(looked):
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

    class Sub(torch.Tensor):
        pass

    with torch.no_grad():
        attnops.attention(q, k, v)
        for mode in (Dispatch, Function):
            with mode():
                attnops.attention(q, k, v)
            assert torch.ops.attnops.attention.default in seen
            seen.clear()
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert attnops.attention(q, k, v).shape == q.shape
        assert isinstance(attnops.attention(q.as_subclass(Sub), k, v), Sub)
        with torch.profiler.profile() as profile:
            attnops.attention(q, k, v)
        assert "attnops::attention" in {e.key for e in profile.key_averages()}
    assert attnops.attention(q.requires_grad_(), k, v).requires_grad
    with torch.no_grad():
        assert not attnops.attention(q, k, v).requires_grad  # q is another kind of argument now


def test_compiled_code_has_the_op(looked):
    q, k, v = qkv()
    with torch.no_grad():
        want = attnops.attention(q, k, v)
        attnops.attention(q, k, v)
        got, code = compiled_code(lambda: torch.compile(lambda q: attnops.attention(q, k, v), fullgraph=True)(q))
    torch.testing.assert_close(got, want)
    assert [c.partition(".")[0] for c in kernel_calls(code)] == ["attention"]
    assert looked["attention"] == 1


@torch.no_grad()
def test_equal_windows_of_other_types_are_not_alike(looked):
    q, k, v = qkv()
    for _ in range(2):
        attnops.attention(q, k, v, window=(1, 0))
        attnops.attention(q, k, v, window=(-1, -1))
    assert looked["attention"] == 2
    want = attnops.attention(q, k, v, window=(1, 0))
    assert torch.equal(attnops.attention(q, k, v, window=[1, 0]), want) and looked["attention"] == 2
    for _ in range(2):
        for window in ((1.0, 0), (-1.5, -1), ("1", 0), ([], 0)):
            with pytest.raises(InvalidInput, match="window_left"):
                attnops.attention(q, k, v, window=window)
        for window in ((1, 0, 0), (1,), "10"):
            with pytest.raises(InvalidInput) as caught:
                attnops.attention(q, k, v, window=window)
            assert caught.value.field == "window"


@torch.no_grad()
def test_numbers_that_the_dispatcher_converts_are_the_call_that_they_become(looked):
    q, k, v = qkv()
    want = attnops.attention(q, k, v, scale=1.0)
    for _ in range(3):
        assert torch.equal(attnops.attention(q, k, v, scale=1), want)
    assert looked["attention"] <= 2  # TensorGuards tell a call from below the dispatcher from one from above
    with pytest.raises(InvalidInput, match="softcap"):
        attnops.attention(q, k, v, softcap=[1.0])


@torch.no_grad()
def test_arguments_that_a_kernel_does_not_know_are_refused(looked):
    def twice(call):
        return call.query * 2, call.query.new_empty(0)

    name = f"twice{next(NUMBERS)}"
    kernel = Kernel(name, "attention", twice, dtypes=FLOATS, cost_us=lambda p: 1e9)
    attnops.core.kernel.register(kernel)
    try:
        q, k, v = qkv()
        for _ in range(3):
            assert torch.equal(attnops.attention(q, k, v, kernel=name), q * 2)
        assert looked["attention"] == 1
        with pytest.raises(NoKernel, match="attention_chunk=2"):
            attnops.attention(q, k, v, attention_chunk=2, kernel=name)
    finally:
        del _REGISTRY.kernels["attention"][name]
        _REGISTRY.generation += 1


@torch.no_grad()
def test_one_tensor_given_twice(looked):
    q, k, _ = qkv()
    for _ in range(3):
        attnops.attention(q, k, k)
    assert looked["attention"] == 1
    for _ in range(3):
        attnops.attention(q, q, q)
    assert looked["attention"] == 2
    v = k.clone()
    for _ in range(2):
        want = attnops.attention(q, k, k)
        assert torch.equal(attnops.attention(q, k, v), want)
    assert looked["attention"] == 2


@torch.no_grad()
def test_one_tensor_given_twice_after_calls_with_two(looked):
    q, k, v = qkv()
    attnops.attention(q, k, v)
    for _ in range(3):
        attnops.attention(q, k, k)
        attnops.attention(q, k, v)
    assert looked["attention"] <= 2


def python_calls(run):
    """How many functions of Python a call enters, its kernel's own left out."""
    entered = []

    def look(frame, event, arg):
        if event == "call":
            entered.append(frame.f_code.co_name)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered.index("stop")


@torch.no_grad()
def test_a_call_like_the_one_before_costs_the_same_in_every_op(looked, monkeypatch):
    """One tensor in two places is found as fast as two tensors are: one more function looks whether it is one."""
    if eager_cache._TensorGuards is None:
        pytest.skip("Likeness is Python, and enters functions for every tensor")

    def stop(call):
        return call[0], call[1]

    monkeypatch.setattr(eager_cache, "checked", lambda op, call: stop)
    output, lse, (q, k, v) = torch.randn(3, 4, 8), torch.randn(3, 4), qkv()
    merged = {
        "merge_state": lambda: attnops.merge_state(output, lse, output.clone(), lse.clone()),
        "merge_states": lambda: merge_states(output[:, None], lse[:, None]),
        "attention": lambda: ATTENTION(ATTENTION.call(q, k, v, scale=1.0)),
    }
    twice = {
        "merge_state": lambda: attnops.merge_state(output, lse, output, lse),
        "merge_state of one lse": lambda: attnops.merge_state(output, lse, output.clone(), lse),
        "attention": lambda: ATTENTION(ATTENTION.call(q, k, k, scale=1.0)),
    }

    def counted(run):
        for op in (ATTENTION, MERGE, MERGE_STATES):
            op.seen.clear()
        run()
        return python_calls(run)

    known, repeated = ({name: counted(run) for name, run in runs.items()} for runs in (merged, twice))
    assert known["merge_state"] == known["merge_states"] and known["attention"] < known["merge_state"] <= 9
    assert repeated["merge_state"] == repeated["merge_state of one lse"] == known["merge_state"] + 1
    assert repeated["attention"] == known["attention"] + 1


@torch.no_grad()
def test_what_is_remembered_is_bounded(looked):
    _, k, v = qkv()
    for s in range(1, 30):
        attnops.attention(torch.randn(2, s, 4, 8), k, v)
    assert [len(kept) for kept in ATTENTION.seen.values()] == [eager_cache.SHAPES]
    for i in range(eager_cache.KINDS + 5):
        attnops.attention(*qkv(), scale=1.0 + i)
    assert len(ATTENTION.seen) <= eager_cache.KINDS
    assert len(ATTENTION.patterns) <= eager_cache.KINDS


def test_threads_share_it(looked):
    q, k, v = qkv()
    with torch.no_grad():
        want = attnops.attention(q, k, v)
    wrong = []

    def work():
        with torch.no_grad():
            for s in range(1, 20):
                if not torch.equal(attnops.attention(q, k, v), want) or attnops.attention(q[:, : s % 3], k, v).shape[1] != s % 3:
                    wrong.append(s)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@torch.no_grad()
def test_a_kernel_compiled_at_its_first_use_serves_both_ways(looked, monkeypatch):
    """What flex compiled for a call through the dispatcher is what the direct call after it runs: autograd's keys are off in both."""
    graphs = []
    kernel = torch.compile(flex_attention, backend=lambda graph, _: graphs.append(graph) or graph.forward, dynamic=False)
    monkeypatch.setattr(flex, "_call", lambda device: kernel)
    q, k, v = (t.repeat(1, 4, 1, 4) for t in qkv())
    for _ in range(3):
        attnops.attention(q, k, v, softcap=2.0, kernel="flex")
    assert looked["attention"] == 1 and len(graphs) == 1


# With gradients -------------------------------------------------------------------------------------------------------


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize("features", [{}, {"return_lse": True}, {"sinks": True}, {"kernel": "reference"}], ids=str)
def test_training_calls_like_one_before_go_straight_and_give_the_same_gradients(looked, features, monkeypatch):
    given = leaves(*qkv(k=3), torch.randn(4))
    q, k, v, sinks = given
    more = {**features, "causal": True} | ({"sinks": sinks} if "sinks" in features else {})
    seen = []
    default = torch.ops.attnops.attention_backward.default

    def counted(*args, **kwargs):
        seen.append(args)
        return default(*args, **kwargs)

    counted._schema = default._schema
    monkeypatch.setattr(torch.ops.attnops.attention_backward, "default", counted)
    found = []
    for _ in range(3):
        result = attnops.attention(q, k, v, **more)
        output, lse = result if isinstance(result, tuple) else (result, torch.zeros(()))
        found.append(torch.autograd.grad((output.square().sum() + lse.sum()), given, allow_unused=True))
    assert looked["attention"] == 1 and not seen, "a call is looked at once, and its gradient goes past the dispatcher"
    for other in found[1:]:
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_who_asks_for_other_gradients_gets_them(looked):
    q, k, v = qkv(k=3)
    for names in ((0,), (1, 2), (0, 1, 2), (0,)):
        given = [t.clone().requires_grad_(i in names) for i, t in enumerate((q, k, v))]
        for _ in range(2):
            got = torch.autograd.grad(attnops.attention(*given, causal=True).sum(), [given[i] for i in names])
        want = torch.autograd.grad(attnops.attention(*(all3 := leaves(q, k, v)), causal=True).sum(), all3)
        assert all(torch.allclose(g, want[i], atol=1e-6) for g, i in zip(got, names, strict=True))
    with torch.no_grad():
        assert not attnops.attention(q, k, v, causal=True).requires_grad
    assert not attnops.attention(q, k, v, causal=True).requires_grad
    assert not attnops.attention(*given, causal=True).detach().requires_grad


def test_a_graph_of_a_remembered_gradient_is_refused_when_differentiated():
    q, k, v = leaves(*qkv(k=3))
    for _ in range(3):
        [first] = torch.autograd.grad(attnops.attention(q, k, v).square().sum(), [q], create_graph=True)
    with pytest.raises(NoGradient, match="attention_backward"):
        torch.autograd.grad(first.sum(), q)


def test_gradients_of_lse_and_of_outputs_may_take_other_kernels():
    """On a CPU aten_flash has no gradient of lse."""
    q, k, v = leaves(*qkv(k=3))
    for _ in range(2):
        out, lse = attnops.attention(q, k, v, causal=True, return_lse=True)
        alone = torch.autograd.grad(out.sum(), q, retain_graph=True)[0]
        both = torch.autograd.grad(out.sum() + lse.sum(), q)[0]
        assert not torch.allclose(alone, both)
    a, b, c = (t.detach().clone().requires_grad_() for t in (q, k, v))
    out, lse = torch.ops.attnops.attention.default(a, b, c, scale=8**-0.5, causal=True, return_lse=True)
    torch.testing.assert_close(both, torch.autograd.grad(out.sum() + lse.sum(), a)[0])


def test_packed_training_calls_give_the_same_gradients():
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = leaves(torch.randn(6, 4, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8))
    found = []
    for _ in range(3):
        out = attnops.varlen_attention(q, k, v, cu, cu, max_seqlen_q=3, max_seqlen_k=3, causal=True)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
