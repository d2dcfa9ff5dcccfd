"""Gradients by autograd, against autograd of the plain formula in every dtype.

tests/ops/test_random_gradients.py asks every kernel of a gradient for every feature; here are the
ways to it.
"""

from typing import Any

import pytest
import torch
from torch import func
from torch.autograd import forward_ad, grad

import attnops
from attnops.core import eager_cache
from attnops.core.errors import NoGradient
from attnops.core.op import OPS
from attnops.core.select import active_policy
from attnops.testing import Call, Features, Source, make_call
from tests.formula import clean, formula
from tests.ops.calls import FUNCTIONS, good

F64 = torch.float64
INF = float("inf")

# Sizes are the smallest that tell a wrong index from a right one.
SMALL: dict[str, Any] = {"dtype": F64, "head_dim": 3, "q_heads": 2, "kv_heads": 1}
ALL = Features(**SMALL, causal=True, window=(2, -1), softcap=0.8, sinks=F64, v_head_dim=2)
BIASED = Features(**SMALL, mask="additive", mask_shape="b", softcap=0.9)
LEAVES = ("query", "key", "value", "sinks", "mask")


def leaves(call, names=LEAVES):
    """The call with fresh leaves, finite masks among them: a finite difference of -inf is none."""

    def change(n, t):
        t = t.nan_to_num(neginf=-1.0) if n == "mask" and t.dtype != torch.bool else t
        return (
            t.detach()
            .clone()
            .requires_grad_(
                n in names
                and t.is_floating_point()
                and not (n == "mask" and call.op != "attention")
            )
        )

    return call.map(change)


def outputs_of(call):
    """(the op's output and lse, the tensors that require a gradient)."""
    results = getattr(torch.ops.attnops, call.op).default(
        *call.args, **call.kwargs, policy=active_policy()
    )
    return results, {n: t for n, t in call.tensors().items() if t.requires_grad}


def dense(features, sizes=(2, 3, 4)):
    return make_call("attention", Source(5), *sizes, features)


def packed(features, lengths=((2, 0, 3), (4, 1, 3))):
    return make_call("varlen_attention", Source(5), *lengths, features, padding=(1, 2))


GRADED = {
    "dense": dense(ALL),
    "bias": dense(BIASED),
    "bias_of_heads": dense(Features(**SMALL, mask="additive", mask_shape="h")),
    "bool": dense(Features(**SMALL, mask="bool")),
    "tall": dense(Features(**SMALL, causal=True), (1, 4, 2)),
    "ranges": make_call(
        "attention", Source(5), 2, 2, 5, ALL, kv_start=(1, 0), kv_end=(5, 3), index=torch.int32
    ),
    "packed": packed(ALL),
    "packed_plain": packed(Features(**SMALL)),
    "fewer_keys": packed(ALL, ((3, 2), (1, 0))),
}


# The plain formula, differentiated by torch -------------------------------------------------------


def loss(output, lse):
    """A number of both results, in which no entry has the weight of another."""
    a, b = (Source(9).normal(*x.shape, dtype=F64) for x in (output, lse))
    return (output.double() * a).sum() + (torch.where(lse == -INF, 0.0, lse.double()) * b).sum()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("with_lse", [True, False], ids=["lse", "output"])
@pytest.mark.parametrize("case", GRADED)
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(F64, 1e-6), (torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)],
    ids=str,
)
def test_gradients_equal_autograd_of_the_formula(dtype, rtol, case, with_lse):
    call = clean(GRADED[case].map(lambda n, t: t.to(dtype) if t.dtype == F64 else t))
    call = leaves(call.with_(return_lse=True))
    results, given = outputs_of(call)

    def of(output, lse):
        return grad(loss(output, lse if with_lse else lse.detach()), list(given.values()))

    for got, want in zip(of(*results), of(*formula(call)), strict=True):
        torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * (1 + float(want.abs().max())))


# Which gradients there are ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [("query",), ("mask",), ("query", "mask"), ("key", "sinks")], ids="-".join
)
def test_only_what_is_asked_for(names):
    call = dense(Features(**SMALL, sinks=F64, mask="additive", mask_shape="b"))
    found = []
    for some in (LEAVES, names):
        (output, _), given = outputs_of(leaves(call, some))
        found.append(dict(zip(given, grad(output.sum(), list(given.values())), strict=True)))
    assert set(found[1]) == set(names)
    for name, got in found[1].items():
        torch.testing.assert_close(got, found[0][name])


def test_lse_alone_and_output_alone():
    q, k, v = (torch.randn(1, 3, 2, 4, requires_grad=True) for _ in range(3))
    out, lse = attnops.attention(q, k, v, return_lse=True)
    gq, gk, gv = grad(lse.sum(), (q, k, v), retain_graph=True)
    assert (gv == 0).all()
    want = grad(
        formula(
            Call("attention", {"query": q, "key": k, "value": v, "scale": 0.5, "causal": False})
        )[1].sum(),
        (q, k),
    )
    torch.testing.assert_close((gq, gk), want)
    torch.testing.assert_close(
        grad(out.sum(), (q, k, v)),
        grad(attnops.attention(q, k, v, return_lse=False).sum(), (q, k, v)),
    )


def test_no_graph_without_grad_mode():
    q = torch.randn(1, 3, 2, 4, requires_grad=True)
    with torch.no_grad():
        assert not attnops.attention(q, q, q).requires_grad
    with torch.inference_mode():
        assert attnops.attention(q, q, q, return_lse=True)[1].is_inference()
    out, lse = attnops.attention(q.detach(), q.detach(), q.detach(), return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad


def test_inputs_in_any_layout_get_gradients_of_their_shape():
    wide = torch.randn(2, 4, 3, 3, 8, dtype=F64, requires_grad=True)
    q, k, v = wide.unbind(3)
    out = attnops.attention(q, k, v, causal=True)
    [got] = grad(out.transpose(0, 1).sum(), [wide])
    dense_copies = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
    want = torch.stack(grad(attnops.attention(*dense_copies, causal=True).sum(), dense_copies), 3)
    torch.testing.assert_close(got, want)


# Merges -------------------------------------------------------------------------------------------

MERGES = {
    "merge_state": lambda outputs, lses: attnops.merge_state(
        outputs[:, 0], lses[:, 0], outputs[:, 1], lses[:, 1]
    ),
    "merge_states": attnops.ops.merge_states,
}


def parts(op, empty=0.0, lse=-INF):
    """Outputs in float64 and lses of the parts of a merge. Empty ones hold NaN, and the lse that is
    given."""
    source, shape = Source(7), (5, 2 if op == "merge_state" else 4, 2)
    hidden = source.chance(*shape, p=empty)
    hidden[0] = empty > 0
    outputs, lses = source.normal(*shape, 3, dtype=F64), source.normal(*shape)
    outputs = outputs.masked_fill(hidden[..., None], float("nan"))
    lses = lses.masked_fill(hidden, lse)
    return outputs.requires_grad_(), lses.requires_grad_()


def exactly_merged(outputs, lses):
    """The merge written out in float64, without the guards for what is empty."""
    return (outputs * lses.double().softmax(1)[..., None]).sum(1), lses.double().logsumexp(1)


@pytest.mark.parametrize("op", MERGES)
def test_gradients_of_a_merge(op):
    """The second ones, too. lses are float32."""
    run, given = MERGES[op], parts(op)

    def derivatives(merge):
        first = grad(loss(*merge(*given)), given, create_graph=True)
        alone = grad(
            merge(*given)[1].double().sum(), given, allow_unused=True, materialize_grads=True
        )
        return *first, *alone, grad(first[0].square().sum(), given[1])[0]

    torch.testing.assert_close(derivatives(run), derivatives(exactly_merged), atol=2e-6, rtol=2e-6)
    for one in range(2):
        only = [x.detach().requires_grad_(i == one) for i, x in enumerate(given)]
        torch.testing.assert_close(
            grad(loss(*run(*only)), only[one])[0],
            derivatives(exactly_merged)[one],
            atol=2e-6,
            rtol=2e-6,
        )
    plain = tuple(x.detach() for x in given)
    found = func.grad(lambda *x: loss(*run(*x)), (0, 1))(*plain)
    torch.testing.assert_close(found, derivatives(run)[:2])
    with pytest.raises(NoGradient, match=rf"^{op}: got a forward-mode tangent"):
        func.jvp(run, plain, plain)


@pytest.mark.parametrize("lse", [INF, -INF])
@pytest.mark.parametrize("op", MERGES)
def test_empty_parts_of_a_merge_have_gradient_zero(op, lse):
    outputs, lses = parts(op, 0.6, lse)
    hidden = lses == lse
    assert hidden.all(1).any() and not hidden.all()
    for g in grad(loss(*MERGES[op](outputs, lses)), (outputs, lses)):
        assert (g[hidden] == 0).all() and (g[~hidden] != 0).any() and torch.isfinite(g).all()


# torch.func, and forward mode ---------------------------------------------------------------------


def differentiable():
    """Each differentiable op as a function of its query, and that query."""
    q, k, v = (torch.randn(1, 3, 2, 4, dtype=F64) for _ in range(3))
    cu = torch.tensor([0, 3], dtype=torch.int32)
    return {
        "attention": (lambda q: attnops.attention(q, k, v, causal=True), q),
        "varlen_attention": (
            lambda q: attnops.varlen_attention(
                q[0], k[0], v[0], cu, cu, max_seqlen_q=3, max_seqlen_k=3
            ),
            q,
        ),
    }


@pytest.mark.parametrize("name", differentiable())
def test_second_derivatives_are_refused_by_name(name):
    f, q = differentiable()[name]
    leaf = q.clone().requires_grad_()
    # A graph of a gradient is no harm until it is differentiated.
    [first] = grad(f(leaf).square().sum(), leaf, create_graph=True)
    refused = pytest.raises(NoGradient, match=rf"^{name}_backward: .*no gradient")
    with refused:
        grad(first.sum(), leaf)
    with refused:
        func.grad(lambda q: func.grad(lambda q: f(q).square().sum())(q).sum())(q)


@pytest.mark.parametrize("name", differentiable())
def test_torch_func_in_reverse(name):
    f, q = differentiable()[name]
    leaf = q.clone().requires_grad_()
    [want] = grad(f(leaf).square().sum(), leaf)

    def number(q):
        return f(q).square().sum()

    torch.testing.assert_close(func.grad(number)(q), want)
    torch.testing.assert_close(func.vjp(number, q)[1](torch.ones((), dtype=F64))[0], want)
    torch.testing.assert_close(func.jacrev(number)(q), want)
    torch.testing.assert_close(
        func.vmap(func.grad(number))(torch.stack([q, q])), torch.stack([want, want])
    )
    torch.testing.assert_close(func.vmap(f)(torch.stack([q, q])), torch.stack([f(q), f(q)]))


@pytest.mark.parametrize("likeness", [False, True])
@pytest.mark.parametrize("name", differentiable())
def test_gradients_of_a_batch(name, likeness, monkeypatch):
    """Also after a gradient of one output, whose kernel is remembered."""
    monkeypatch.setattr(eager_cache, "TensorGuards", None if likeness else eager_cache.TensorGuards)
    for op in OPS.values():
        monkeypatch.setattr(op, "seen", {})
    f, q = differentiable()[name]
    leaf = q.clone().requires_grad_()
    output = f(leaf)
    batch = torch.randn(3, *output.shape, dtype=F64)
    want = torch.stack([grad(output, leaf, one, retain_graph=True)[0] for one in batch])
    torch.testing.assert_close(grad(output, leaf, batch, is_grads_batched=True)[0], want)
    both = [
        torch.autograd.functional.jacobian(lambda q: f(q).sum(-1), q, vectorize=vectorize)
        for vectorize in (True, False)
    ]
    torch.testing.assert_close(*both)


@pytest.mark.parametrize("name", differentiable())
def test_forward_mode_is_refused(name):
    f, q = differentiable()[name]
    refused = pytest.raises(
        NoGradient,
        match=r"attention: got a forward-mode tangent on query, want none .*vjp, grad or jacrev",
    )
    for run in (lambda: func.jvp(f, (q,), (torch.ones_like(q),)), lambda: func.jacfwd(f)(q)):
        with refused:
            run()
    f(q)  # what serves such calls from now on is asked no more
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level(), refused as found:
            f(forward_ad.make_dual(q, torch.ones_like(q)))
        assert found.value.forward and found.value.fields == ("query",)
    assert torch.isfinite(f(q)).all()


@pytest.mark.parametrize("mode", ["jvp", "grad"])
@pytest.mark.parametrize("op", ["paged_attention", "write_kv", "mla_attention"])
def test_an_op_without_gradient_refuses_torch_func(op, mode):
    given = good(op)
    name, x = next((n, t) for n, t in given.items() if torch.is_tensor(t))

    def of(x):
        FUNCTIONS[op](**given | {name: x})
        return x.sum()

    of(x)
    with pytest.raises(NoGradient, match=rf"^{op}: "):
        func.grad(of)(x) if mode == "grad" else func.jvp(of, (x,), (x,))


def without_gradient():
    """Calls of ops that have a gradient, but none of these: others are in
    tests/ops/test_bad_inputs.py."""
    x, mask = torch.zeros(2, 2, 4, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
    low, one = torch.zeros(1, 2, 2, 4, dtype=torch.int8), torch.ones(1)
    packs = {"max_seqlen_q": 2, "max_seqlen_k": 2}
    cu = torch.tensor([0, 2], dtype=torch.int32)
    return {
        "quantised": lambda: attnops.attention(x[None], low, low, k_scale=one, v_scale=one),
        "scales": lambda: attnops.attention(
            x.detach()[None], low, low, k_scale=one.requires_grad_(), v_scale=torch.ones(1)
        ),
        "packed_quantised": lambda: attnops.varlen_attention(
            x, low[0], low[0], cu, cu, **packs, k_scale=one, v_scale=one
        ),
        "packed_mask": lambda: attnops.varlen_attention(x, x, x, cu, cu, **packs, mask=mask),
    }


@pytest.mark.parametrize("name", without_gradient())
def test_no_gradient(name):
    call = without_gradient()[name]
    with pytest.raises(NoGradient, match="want no gradient"):
        call()
    with pytest.raises(Exception, match="want no gradient"):
        torch.compile(call, backend="aot_eager", fullgraph=True)()
    with torch.no_grad():
        call()
