"""Eager calls like one made before skip checks and selection, and the dispatcher too, unless
something else must see them."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import attnops
from attnops.core import eager_cache
from attnops.core.errors import InvalidInput, NoGradient, NoKernel
from attnops.core.kernel import _REGISTRY, generation
from attnops.core.problem import Target, pretend
from attnops.kernels.torch import flex
from attnops.ops.attention.record import ATTENTION
from attnops.ops.pages.record import PAGED
from attnops.testing import Features, Source, make_call, oracle
from tests.lowering.models import compiled_code, kernel_calls
from tests.ops.calls import good


@pytest.fixture(autouse=True, params=["TensorGuards", "Likeness"])
def looked(request, monkeypatch):
    """How often each op looked at a call, checked it and chose a kernel; nothing is remembered at
    the start."""
    if request.param == "Likeness":
        monkeypatch.setattr(eager_cache, "TensorGuards", None)
    elif eager_cache.TensorGuards is None:
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


def qkv(b=2, s=3, k=5, **kw):
    return (
        torch.randn(b, s, 4, 8, **kw),
        torch.randn(b, k, 2, 8, **kw),
        torch.randn(b, k, 2, 8, **kw),
    )


@torch.no_grad()
def test_the_second_call_goes_straight_and_gives_the_same(looked):
    q, k, v = qkv()
    first, second = attnops.attention(q, k, v, causal=True), attnops.attention(q, k, v, causal=True)
    assert torch.equal(first, second) and looked["attention"] == 1
    other = attnops.attention(*qkv(), causal=True)
    assert other.shape == first.shape and looked["attention"] == 1
    given = good("paged_attention")
    a, b = (attnops.paged_attention(**given).clone() for _ in range(2))
    assert torch.equal(a, b) and looked["paged_attention"] == 1


CHANGES = [
    lambda q: {"query": q[:, :2]},
    lambda q: {"query": q.transpose(0, 1).contiguous().transpose(0, 1)},
    lambda q: {"sinks": torch.zeros(4)},
    lambda q: {"causal": True},
    lambda q: {"scale": 0.25},
    lambda q: {"return_lse": True},
    lambda q: {"kernel": "reference"},
    lambda q: {"softcap": True},
]


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_another_call_is_looked_at_again(looked, change):
    given = dict(zip(("query", "key", "value"), qkv(), strict=True))
    attnops.attention(**given)
    attnops.attention(**given | change(given["query"]))
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
        got, code = compiled_code(
            lambda: torch.compile(lambda q: attnops.attention(q, k, v), fullgraph=True)(q)
        )
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
    assert (
        looked["attention"] <= 2
    )  # TensorGuards tell a call from below the dispatcher from one from above
    with pytest.raises(InvalidInput, match="softcap"):
        attnops.attention(q, k, v, softcap=[1.0])


@torch.no_grad()
def test_one_tensor_given_twice(looked):
    q, k, _ = qkv()
    v = k.clone()
    want = attnops.attention(q, k, k)
    for _ in range(3):
        assert torch.equal(attnops.attention(q, k, v), want)
        assert torch.equal(attnops.attention(q, k, k), want)
    assert looked["attention"] == 1
    with pytest.raises(InvalidInput, match="value"):
        attnops.attention(q, k, v[:1])
    for _ in range(3):
        attnops.attention(q, q, q)
    assert looked["attention"] == 3


def python_calls(run):
    """How many functions of Python a call enters before its kernel's own."""
    entered = []
    run()
    sys.setprofile(
        lambda frame, event, arg: entered.append(frame.f_code.co_name) if event == "call" else None
    )
    try:
        run()
    finally:
        sys.setprofile(None)
    return entered.index("stop")


@torch.no_grad()
def test_one_tensor_in_two_places_is_found_as_fast_as_two_tensors(looked, monkeypatch):
    """One more function looks whether it is one."""
    if eager_cache.TensorGuards is None:
        pytest.skip("Likeness is Python, and enters functions for every tensor")

    def stop(call):
        return call[0], call[1]

    monkeypatch.setattr(eager_cache, "checked", lambda op, call: stop)
    q, k, v = qkv()
    two, one = (
        python_calls(lambda x=x: ATTENTION(ATTENTION.call(q, k, x, scale=1.0))) for x in (v, k)
    )
    assert one == two + 1 <= 9


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

    def work():
        with torch.no_grad():
            for s in range(1, 20):
                assert torch.equal(attnops.attention(q, k, v), want)
                assert attnops.attention(q[:, : s % 3], k, v).shape[1] == s % 3

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(work) for _ in range(4)]:
            done.result()


@torch.no_grad()
def test_a_kernel_compiled_at_its_first_use_serves_both_ways(looked, monkeypatch):
    """What flex compiled for a call through the dispatcher is what the direct call after it runs:
    autograd's keys are off in both."""
    graphs = []
    kernel = torch.compile(
        flex_attention,
        backend=lambda graph, _: graphs.append(graph) or graph.forward,
        dynamic=False,
    )
    monkeypatch.setattr(flex, "_call", lambda device: kernel)
    q, k, v = (t.repeat(1, 4, 1, 4) for t in qkv())
    for _ in range(3):
        attnops.attention(q, k, v, softcap=2.0, kernel="flex")
    assert looked["attention"] == 1 and len(graphs) == 1


# With gradients -----------------------------------------------------------------------------------


def leaves(*tensors):
    return [t.clone().requires_grad_() for t in tensors]


@pytest.mark.parametrize(
    "features", [{}, {"return_lse": True}, {"sinks": True}, {"kernel": "reference"}], ids=str
)
def test_training_calls_like_one_before_go_straight_and_give_the_same_gradients(
    looked, features, monkeypatch
):
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
        found.append(
            torch.autograd.grad((output.square().sum() + lse.sum()), given, allow_unused=True)
        )
    assert looked["attention"] == 1 and not seen, (
        "a call is looked at once, and its gradient goes past the dispatcher"
    )
    for other in found[1:]:
        assert all(
            a is b is None or torch.equal(a, b) for a, b in zip(found[0], other, strict=True)
        )


def test_who_asks_for_other_gradients_gets_them(looked):
    q, k, v = qkv(k=3)
    for names in ((0,), (1, 2), (0, 1, 2), (0,)):
        given = [t.clone().requires_grad_(i in names) for i, t in enumerate((q, k, v))]
        for _ in range(2):
            got = torch.autograd.grad(
                attnops.attention(*given, causal=True).sum(), [given[i] for i in names]
            )
        want = torch.autograd.grad(
            attnops.attention(*(all3 := leaves(q, k, v)), causal=True).sum(), all3
        )
        assert all(torch.allclose(g, want[i], atol=1e-6) for g, i in zip(got, names, strict=True))
    with torch.no_grad():
        assert not attnops.attention(q, k, v, causal=True).requires_grad
    assert not attnops.attention(q, k, v, causal=True).requires_grad
    assert not attnops.attention(*given, causal=True).detach().requires_grad


def test_a_graph_of_a_remembered_gradient_is_refused_when_differentiated():
    q, k, v = leaves(*qkv(k=3))
    for _ in range(3):
        [first] = torch.autograd.grad(
            attnops.attention(q, k, v).square().sum(), [q], create_graph=True
        )
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
    out, lse = torch.ops.attnops.attention.default(
        a, b, c, scale=8**-0.5, causal=True, return_lse=True
    )
    torch.testing.assert_close(both, torch.autograd.grad(out.sum() + lse.sum(), a)[0])


# What is data alone -------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_temperatures_are_those_of_the_call(looked, softcap):
    """A call like one before goes straight to the kernel with its own factors; a call without any
    is another."""
    f = Features(causal=True, softcap=softcap, scale=4.0, temperature=True)
    first = make_call("paged_attention", Source(2), (3, 1, 7), (9, 40, 7), 16, f, padding=0)
    second = first.with_(temperature=first.arguments["temperature"].flip(0) + 0.5)
    for call in (first, first, second, first.with_(temperature=None), first):
        output = torch.full_like(call.arguments["output"], float("nan"))
        PAGED(call.with_(output=output).record)
        torch.testing.assert_close(output.double(), oracle(call)["output"], rtol=1e-4, atol=1e-4)
    assert looked["paged_attention"] == 2
