"""Every kernel on every point of the grid, against the exact result; and the reference against the
plain formula."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

import attnops
from attnops.core.kernel import all_kernels, kernels_of
from attnops.ops import OPS
from attnops.ops.attention import reference as formulas
from attnops.testing import (
    CASES,
    Features,
    Pages,
    Source,
    check_kernel,
    gradient_call,
    make_call,
    oracle,
)
from tests.checks import results, right_or_skipped, runs_here
from tests.formula import clean, formula, gradients
from tests.ops.strategies import CALLS

INF = float("inf")


def points(kernel):
    """The cases of its op; the first alone, for its text, where the machine is what the kernel
    refuses, and not the case."""
    cases = CASES[kernel.op]
    return cases if runs_here(kernel) else cases[:1]


GRID = [
    pytest.param(k, c, id=f"{c.op}-{k.name}-{c.label}") for k in all_kernels() for c in points(k)
]


@pytest.mark.sweep(7)
@pytest.mark.parametrize(("kernel", "case"), GRID)
def test_kernel(kernel, case):
    right_or_skipped(kernel, case.call())


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", list(OPS))
@pytest.mark.parametrize("examples", [15, pytest.param(30, marks=pytest.mark.full)])
def test_random_calls(op, examples):
    """Features the grid does not combine, on lengths it does not have."""

    @given(data=st.data())
    @settings(max_examples=examples)
    def run(data):
        call = data.draw(CALLS[op])
        for kernel in kernels_of(op).values():
            assert check_kernel(kernel, call).worst <= 1.0

    run()


@pytest.mark.parametrize("op", OPS)
def test_every_grid_point_is_answered(op):
    """A point that the reference refuses would be left untested without a word. A label names
    one."""
    cases = CASES[op]
    assert len({case.label for case in cases}) == len(cases) > 0
    for case in cases:
        assert not kernels_of(op)["reference"].refusals(case.call().problem), str(case)


# The reference itself -----------------------------------------------------------------------------


BY_FORMULA = ("attention", "varlen_attention", "paged_attention", "mla_attention")


@pytest.mark.sweep(3)
@pytest.mark.parametrize("case", [c for op in BY_FORMULA for c in CASES[op]], ids=str)
def test_reference_equals_the_formula(case):
    call = clean(case.call())
    got, (wanted, lse) = oracle(call), formula(call)
    torch.testing.assert_close(got["output"], wanted, rtol=1e-11, atol=1e-11)
    if "lse" in call.arguments or "return_lse" in call.arguments:
        torch.testing.assert_close(got["lse"].double(), lse, rtol=1e-6, atol=1e-6)


LOUD = {
    "attention": (1, 3, 5),
    "varlen_attention": ((2, 3), (4, 3)),
    "paged_attention": ((1, 2), (5, 4), 2),
    "mla_attention": ((1, 2), (5, 4), 2),
}


def loud(op, sign, sinks):
    """A call whose logits are about 46,000, of one sign, and differ by little."""
    dims = {
        "q_heads": 2,
        "kv_heads": 1,
        "head_dim": 4,
        "v_head_dim": 3 if op == "mla_attention" else None,
    }
    f = Features(dtype=torch.float64, causal=True, sinks=torch.float64 if sinks else None, **dims)
    packed = {} if op == "attention" else {"padding": (0, 0) if op == "varlen_attention" else 0}
    pages = {"pages": Pages(wider=0, spare=0)} if len(LOUD[op]) == 3 and op != "attention" else {}
    call = make_call(op, Source(0), *LOUD[op], f, **packed, **pages)

    def change(n, t):
        t = t.double() if t.is_floating_point() else t
        if n in ("query", "q_nope", "q_pe"):
            return (1 + t / 64).round(decimals=2)
        if n in ("key", "k_pages", "latent_pages"):
            return sign * 23_000.0 * (1 + (t * 16).round() / 2**18)
        return t.sign() * 46_000 * sign + t if n == "sinks" else t

    return call.map(change).with_(scale=0.5)


def narrow(call):
    return call.map(lambda n, t: t.float() if t.is_floating_point() else t)


def widened(call):
    return call.map(lambda n, t: t.double() if t.is_floating_point() else t)


def output_of(call):
    return results(OPS[call.op].reference, call)["output"]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("op", BY_FORMULA)
def test_the_reference_is_exact_at_large_logits(op, sign, sinks, monkeypatch):
    """In float32, too, whose steps at 46,000 are 1 / 256: exp(logit - lse) would be off by as
    much."""
    call = loud(op, sign, sinks)
    torch.testing.assert_close(output_of(call), formula(call)[0], rtol=1e-9, atol=1e-9)
    found = formulas.scores

    # Of float32's own products and sums nothing is asked here: both are given the same logits.
    def of_float32(query, key, see, mask, rules, temperature=None):
        return (
            found(query.double(), key.double(), see, mask, rules, temperature)
            .float()
            .to(query.dtype)
        )

    monkeypatch.setattr(formulas, "scores", of_float32)
    got, want = output_of(narrow(call)).double(), output_of(widened(narrow(call)))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * float(want.abs().max() + 1))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_references_gradient_is_exact_at_large_logits(sign, sinks):
    back = gradient_call(Source(1), widened(narrow(loud("attention", sign, sinks))))
    reference = OPS["attention_backward"].reference
    exact = reference(back.record)
    for a, b in zip(exact, gradients(back).values(), strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-6, atol=1e-7 * float(b.abs().max() + 1) if b.numel() else 0.0
        )
    # A saved lse of float32 says nothing: one that is off changes nothing.
    off = back.with_(lse=back.arguments["lse"] + 0.01)
    assert all(map(torch.equal, reference(off.record), exact))
    assert torch.isfinite(reference(narrow(back).record)[2]).all()


# Merges -------------------------------------------------------------------------------------------


def test_merge_of_far_apart_sides_does_not_overflow():
    a, b = torch.ones(1, 1, 4), -torch.ones(1, 1, 4)
    out, lse = attnops.merge_state(
        a, torch.tensor([[1e30]]), b, torch.tensor([[-1e30]]), kernel="reference"
    )
    assert torch.equal(out, a)
    assert lse.item() == pytest.approx(1e30)


@given(st.integers(1, 4), st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=30)
def test_attention_over_parts_of_the_keys_merges_to_the_whole(tokens, parts, seed):
    """All parts at once, or one after the other."""
    source, keys = Source(seed), sum(parts)
    q = source.normal(1, tokens, 4, 8, dtype=torch.float64)
    k, v = (source.normal(1, keys, 2, 8, dtype=torch.float64) for _ in range(2))
    whole, whole_lse = (x[0] for x in attnops.attention(q, k, v, return_lse=True))
    found = [
        attnops.attention(q, a, b, return_lse=True)
        for a, b in zip(k.split(parts, 1), v.split(parts, 1), strict=True)
    ]
    outputs, lses = ([x[0] for x in each] for each in zip(*found, strict=True))
    merged = outputs[0], lses[0]
    for output, lse in zip(outputs[1:], lses[1:], strict=True):
        merged = attnops.merge_state(*merged, output, lse)
    for got, got_lse in (
        merged,
        attnops.ops.merge_states(torch.stack(outputs, 1), torch.stack(lses, 1)),
    ):
        torch.testing.assert_close(got, whole, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(got_lse, whole_lse, rtol=1e-6, atol=1e-6)


def test_default_scale_is_one_over_root_d():
    q, k, v = (torch.randn(1, 3, 2, 9) for _ in range(3))
    assert torch.equal(attnops.attention(q, k, v), attnops.attention(q, k, v, scale=1 / 3))
