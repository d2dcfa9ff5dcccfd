"""attnops' scaled_dot_product_attention has torch's arguments, results and gradients."""

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention as renamed
from torch.utils.checkpoint import checkpoint

import attnops
from attnops.adapters import recomputed
from attnops.adapters.callers import callers
from attnops.adapters.sdpa import scaled_dot_product_attention
from attnops.core.errors import InvalidInput, NoKernel, UnknownKernel
from tests.adapters import helpers
from tests.adapters.helpers import Calls, Graphs

LEAD = {3: (4,), 4: (2, 4), 5: (2, 3, 4)}
MASKS = {
    "bool": (2, 4, 5, 7),
    "rows": (5, 7),
    "keys": (2, 1, 1, 7),
    "heads": (1, 4, 5, 7),
    "queries": (2, 1, 5, 1),
    "3d": (4, 5, 7),
}
lengths = pytest.mark.parametrize(("queries", "keys"), [(6, 6), (5, 7), (7, 5)])


def qkv(lead=(2, 4), queries=5, keys=7, kv_heads=None):
    kv_lead = lead if kv_heads is None else (*lead[:-1], kv_heads)
    shapes = [(*lead, queries, 8), (*kv_lead, keys, 8), (*kv_lead, keys, 6)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def check(tensors, *, ours=True, **options):
    """Results and gradients are torch's, by our op or by torch's own."""
    torch.manual_seed(1)
    with Calls() as calls:
        got = scaled_dot_product_attention(*tensors, **options)
    assert [name for name in calls.names if name.startswith("attnops::")] == [
        "attnops::attention"
    ] * ours
    torch.manual_seed(1)
    want = F.scaled_dot_product_attention(*tensors, **options)
    torch.testing.assert_close(got, want)
    leaves = [x for x in (*tensors, options.get("attn_mask")) if x is not None and x.requires_grad]
    weight = torch.randn_like(want)
    grads = [torch.autograd.grad((x * weight).sum(), leaves) for x in (got, want)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dims", LEAD)
@lengths
@pytest.mark.parametrize("is_causal", [False, True])
def test_shapes_and_causal(dims, queries, keys, is_causal):
    check(qkv(LEAD[dims], queries, keys), is_causal=is_causal, scale=0.3)


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("additive", [False, True])
def test_masks(kind, additive):
    mask = (
        torch.randn(MASKS[kind], requires_grad=True) if additive else torch.rand(MASKS[kind]) > 0.3
    )
    if not additive:
        mask[..., 0] = True  # torch gives NaN to a query without keys
    check(qkv(), attn_mask=mask)


def test_a_query_without_keys_gives_zero():
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    got = scaled_dot_product_attention(*qkv(), mask)
    assert not got[:, :, 2].any() and got[:, :, [0, 1, 3, 4]].all()


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@lengths
def test_causal_biases(make, queries, keys):
    """As objects they are tensors of two or so matrices of uninitialised memory."""
    tensors = qkv(LEAD[4], queries, keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bias = make(queries, keys)
    with Calls() as calls:
        got = scaled_dot_product_attention(*tensors, attn_mask=bias)
    assert calls.names == ["attnops::attention"]
    seen = (
        slice(max(queries - keys, 0), None) if make is causal_lower_right else slice(None)
    )  # torch gives NaN to the others
    want = F.scaled_dot_product_attention(*tensors, attn_mask=bias)
    torch.testing.assert_close(got[:, :, seen], want[:, :, seen])
    assert not got.isnan().any()


class Biased(torch.nn.Module):
    def forward(self, q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, bias)


class Tagged(torch.Tensor):
    """A mask of which only this class knows that it masks nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            args = (*args[:3], 0 * args[3], *args[4:])
        return super().__torch_function__(func, types, args, kwargs)


KINDS = {
    "a bias": (lambda: causal_lower_right(5, 7), 1),
    "a bias of other sizes": (lambda: causal_upper_left(2, 3), 1),
    "a class of its own": (lambda: torch.randn(5, 7).as_subclass(Tagged), 0),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_classes_of_masks_in_a_patched_module(kind, compiled):
    model, tensors, graphs, calls = Biased(), [x.detach() for x in qkv()], Graphs(), Calls()
    make, ours = KINDS[kind]
    mask = make()
    want = model(*tensors, mask)
    with attnops.patch(model), nullcontext() if compiled else calls:
        run = torch.compile(model, fullgraph=True, backend=graphs) if compiled else model
        torch.testing.assert_close(run(*tensors, mask), want)
    assert ours == (
        sum(graphs.count("attnops.attention"))
        if compiled
        else calls.names.count("attnops::attention")
    )


def layouts(*shape):
    """Tensors `[B, H, S, D]` as models hand them to SDPA."""
    batch, heads, tokens, width = shape
    yield torch.randn(shape)
    yield torch.randn(batch, tokens, heads, width).transpose(1, 2)
    yield torch.randn(batch, tokens, 3, heads, width)[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize(
    "how", ["plain", "causal", "mask", "a mask with grad", "wide values", "grouped", "5 dims"]
)
def test_the_result_lies_in_memory_as_torchs(how):
    options = {"plain": {}, "causal": {"is_causal": True}, "grouped": {"enable_gqa": True}}.get(
        how, {}
    )
    if "mask" in how:
        options["attn_mask"] = torch.zeros(5, 7, requires_grad="grad" in how)
    for query, key in zip(
        layouts(2, 4, 5, 8), layouts(2, 2 if how == "grouped" else 4, 7, 8), strict=True
    ):
        tensors = [query, key, key[..., :6] if how == "wide values" else key]
        if how == "5 dims":
            tensors = [x[None] for x in tensors]
        got, want = (
            call(*tensors, **options)
            for call in (scaled_dot_product_attention, F.scaled_dot_product_attention)
        )
        assert got.stride()[-4:] == want.stride()[-4:], query.stride()


@pytest.mark.parametrize("mixed", [False, True])
def test_autocast(mixed):
    """Also of a query and a key that a norm has left in float32."""
    query, key, value = qkv()
    value = value.bfloat16() if mixed else value
    with torch.autocast("cpu", torch.bfloat16), Calls() as calls:
        got = scaled_dot_product_attention(query, key, value)
    assert calls.names == ["attnops::attention"]
    with torch.autocast("cpu", torch.bfloat16):
        want = F.scaled_dot_product_attention(query, key, value)
        assert (
            scaled_dot_product_attention(query.double(), key.double(), value.double()).dtype
            == torch.float64
        )
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def broadcast():
    query, key, value = qkv()
    return query, key[:1], value[:1]


def distributed():
    tensors = qkv()
    tensors[0].placements = ()
    return tensors


CALLS = {
    "grouped heads": (lambda: qkv(kv_heads=2), {"enable_gqa": True}, True),
    "a batch that is broadcast": (broadcast, {}, False),
    "a mask beside 5 dims": (lambda: qkv(LEAD[5]), {"attn_mask": torch.randn(5, 7)}, False),
    "2 dims": (lambda: [x[0, 0] for x in qkv()], {}, False),
    "dropout": (qkv, {"dropout_p": 0.5}, False),
    "a tensor as scale": (qkv, {"scale": torch.tensor(0.3)}, False),
    "no dims of heads": (
        lambda: [torch.ones(2, 4, 5, n, requires_grad=True) for n in (0, 0, 6)],
        {},
        False,
    ),
    "a distributed tensor": (distributed, {}, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_whose_call_it_is(name):
    make, options, ours = CALLS[name]
    check(make(), ours=ours, **options)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_recorded_and_meta_calls_are_torchs():
    query, key, value = (x.detach() for x in qkv())
    assert scaled_dot_product_attention(*(x.to("meta") for x in (query, key, value))).shape == (
        2,
        4,
        5,
        6,
    )
    traced = torch.jit.trace(
        lambda q, k, v: scaled_dot_product_attention(q, k, v), (query, key, value)
    )
    torch.testing.assert_close(
        traced(key, query, query), F.scaled_dot_product_attention(key, query, query)
    )


def test_torchs_errors():
    query, key, value = (x.detach() for x in qkv())
    for given, options, text in (
        ((query, key, value, torch.ones(5, 7)), {"is_causal": True}, "is_causal"),
        ((query, key.double(), value), {}, "dtype"),
        ((query, key, value, torch.zeros(5, 7, dtype=torch.float64)), {}, ""),
        (qkv(kv_heads=2), {}, ""),
    ):
        with pytest.raises(RuntimeError, match=text):
            scaled_dot_product_attention(*given, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_forced_kernel():
    tensors = qkv()
    torch.testing.assert_close(
        scaled_dot_product_attention(*tensors, kernel="reference"),
        F.scaled_dot_product_attention(*tensors),
    )
    scaled_dot_product_attention(*tensors, dropout_p=0.1, kernel="reference")
    small = [x[0, 0] for x in tensors]
    for given, kernel, error in (
        (tensors, "no_such", UnknownKernel),
        (tensors, "fa3", NoKernel),
        (small, "no_such", UnknownKernel),
    ):
        with pytest.raises(error):
            scaled_dot_product_attention(*given, kernel=kernel)
    nested = [
        torch.nested.nested_tensor([torch.randn(n, 4, 8) for n in (3, 5)], layout=to)
        for to in (torch.strided, torch.jagged)
    ]
    for given in (small, *([x.transpose(1, 2)] * 3 for x in nested)):
        with pytest.raises(
            InvalidInput,
            match=r"does not take (a (nested tensor|NestedTensor)|query, key and value)",
        ):
            scaled_dot_product_attention(*given, kernel="reference")


# Methods that call torch's function ---------------------------------------------------------------

X = (1, 2, 3, 4)


def by_function(query):
    return F.scaled_dot_product_attention(query, query, query)


def scaled_dot_product_attention_of_ours(query):
    return query


class Calling(torch.nn.Module):
    """Ways to call torch's function, and names that look like it."""

    def by_module(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    def by_another_name(self, x):
        return renamed(x, x, x)

    def by_import(self, x):
        from torch.nn.functional import scaled_dot_product_attention

        return scaled_dot_product_attention(x, x, x)

    def by_local_module(self, x):
        import torch.nn.functional as functional

        return functional.scaled_dot_product_attention(x, x, x)

    def by_function(self, x):
        return by_function(x)

    def by_function_of_a_module(self, x):
        return helpers.attend(x)

    def in_a_closure(self, x):
        return (lambda y: F.scaled_dot_product_attention(y, y, y))(x)

    def scaled_dot_product_attention(self, x):
        return x

    def not_a_call(self, x):
        return (
            self.scaled_dot_product_attention(x)
            + self.part.scaled_dot_product_attention(x)
            + scaled_dot_product_attention_of_ours(x)
        )


class Derived(Calling):
    """A method that calls the one it overrides."""

    def by_function(self, x):
        return 2 * super().by_function(x)


@pytest.mark.parametrize("cls", [Calling, Derived])
def test_methods_that_call_it_are_found_and_switched(cls):
    names = [name for name in vars(Calling) if name.startswith(("by_", "in_"))]
    if cls is Calling:
        assert callers(cls) == tuple(names) and len(names) == 7
    model, x = cls(), torch.randn(X)
    want = [getattr(model, name)(x) for name in names]
    with attnops.patch(model) as handle:
        assert len(handle.report().rows) == 1
        for name, before in zip(names, want, strict=True):
            with Calls() as calls:
                torch.testing.assert_close(getattr(model, name)(x), before)
            assert calls.names == ["attnops::attention"], name


class Checkpointing(torch.nn.Module):
    """Methods that recompute another method, or functions, which are no methods."""

    def attend(self, x):
        return F.scaled_dot_product_attention(x, x, x)

    def of_a_method(self, x):
        return checkpoint(self.attend, x, use_reentrant=False)

    def of_a_method_that_is_reentrant(self, x):
        return checkpoint(self.attend, x, use_reentrant=True)

    def of_a_closure(self, x):
        return checkpoint(lambda y: F.scaled_dot_product_attention(y, y, x), x, use_reentrant=False)

    def of_a_function(self, x):
        return checkpoint(by_function, x, use_reentrant=False)

    def of_torchs_own(self, x):
        return checkpoint(F.scaled_dot_product_attention, x, x, x, use_reentrant=False)

    def of_checkpoints(self, x):
        def inner(y):
            return checkpoint(by_function, y.sin(), use_reentrant=False).cos() + by_function(y)

        return checkpoint(inner, x, use_reentrant=False)

    def of_a_checkpoint_alone(self, x):
        return checkpoint(
            lambda y: checkpoint(by_function, y, use_reentrant=False), x, use_reentrant=False
        )


@pytest.mark.parametrize("how", ["eager", "in a checkpoint", "frames are not found"])
@pytest.mark.parametrize("name", [name for name in vars(Checkpointing) if name.startswith("of_")])
def test_what_a_checkpoint_recomputes_calls_it_again(name, how, monkeypatch):
    model, x = Checkpointing(), torch.randn(X, requires_grad=True)
    getattr(model, name)(x).square().sum().backward()
    want, x.grad = x.grad, None
    if how == "frames are not found":
        monkeypatch.setattr(recomputed, "frame", lambda hook: None)
    with attnops.patch(model), Calls() as calls:
        run = getattr(model, name)
        output = checkpoint(run, x, use_reentrant=False) if how == "in a checkpoint" else run(x)
        output.square().sum().backward()
    torch.testing.assert_close(x.grad, want)
    forward = {name for name in calls.names if "backward" not in name}
    torchs = how == "frames are not found" and "method" not in name
    assert forward == {
        "aten::_scaled_dot_product_flash_attention_for_cpu" if torchs else "attnops::attention"
    }


def test_a_compiled_checkpoint():
    model, x = Checkpointing(), torch.randn(X, requires_grad=True)
    [want] = torch.autograd.grad(model.of_a_closure(x).square().sum(), x)
    with attnops.patch(model):
        run = torch.compile(model.of_a_closure, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(*torch.autograd.grad(run(x).square().sum(), x), want)
