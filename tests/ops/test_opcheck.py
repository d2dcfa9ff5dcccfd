"""torch.library.opcheck on every overload of every op: the op's own dispatch, and each kernel as a
compiled graph calls it."""

from functools import cache

import pytest
import torch

from attnops.core.kernel import kernels_of
from attnops.core.select import choose
from attnops.ops import OPS
from attnops.testing import CASES, Call, Features, Source, check_kernel, make_call
from tests.helpers import ready_process
from tests.ops.calls import OVERLOADS

# What opcheck says of itself is noise; what our own code is told must be an error.
pytestmark = [
    pytest.mark.filterwarnings("error::DeprecationWarning:attnops"),
    pytest.mark.filterwarnings("error::FutureWarning:attnops"),
    pytest.mark.filterwarnings(
        "error:.*(autograd kernel|alias|requires_grad|non-leaf|not writable):UserWarning"
    ),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    # Of torch 2.15, which looks at the gradients of all inputs.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
    ),
]

CALLS, OF_A_KERNEL = 5, 2
"""Calls an op is checked with, and a kernel's overload, of which check_kernel looks at schema and
fake on the whole grid."""

CHECKS = {
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
}
"""What opcheck runs; a version of torch that drops one shall be noticed."""

BLIND = "not implemented for 'Float8"
"""Where test_schema itself fails: torch.allclose, by which it sees mutation, knows no float8."""

DIFFERENTIABLE = [(op, name) for op, name in OVERLOADS if OPS[op].autograd is not None]


def calls_of(name):
    return CALLS if name == "default" else OF_A_KERNEL


def telling(cases, count):
    """Some of the cases, which together show as many words of the labels, hence features, as
    possible."""
    left, seen, out = [*cases], set(), []
    while left and len(out) < count:
        best = max(left, key=lambda c: len(set(words(c)) - seen))
        left.remove(best)
        seen |= set(words(best))
        out.append(best)
    return out


def words(case):
    return case.label.replace("_", "-").split("-")


@cache
def accepted(op, name):
    """Telling ones among the cases that an overload takes."""
    return telling([c for c in CASES[op] if accepts(op, name, c)], calls_of(name))


def accepts(op, name, case):
    return name == "default" or not kernels_of(op)[name].refusals(problem_of(case))


@cache
def problem_of(case):
    """Asked for every kernel of its op, and the inputs of some cases are millions of random
    numbers."""
    return case.call().problem


def check(op, name, call):
    overload = getattr(OPS[op].packet, name)
    results = torch.library.opcheck(overload, call.args, call.kwargs, raise_exception=False)
    assert set(results) >= CHECKS
    if BLIND in str(results["test_schema"]):
        # check_kernel looks for undeclared mutation and aliasing too.
        results["test_schema"] = "SUCCESS"
        kernel = kernels_of(op)[name] if name != "default" else choose(call.problem)
        assert not check_kernel(kernel, call.map(lambda _, t: t.detach())).refused
    failed = {test: error for test, error in results.items() if error != "SUCCESS"}
    if failed:
        why = next(e for e in failed.values() if isinstance(e, Exception))
        raise AssertionError(f"opcheck of {overload}: {', '.join(failed)}") from why


@pytest.mark.sweep(17)
@pytest.mark.parametrize(
    ("op", "name", "nth"), [(op, name, n) for op, name in OVERLOADS for n in range(calls_of(name))]
)
def test_opcheck(op, name, nth):
    cases = accepted(op, name)
    if not cases:
        why = kernels_of(op)[name].refusals(CASES[op][0].call().problem)
        pytest.skip("; ".join(map(str, why)) or "refuses every case")
    if nth >= len(cases):
        pytest.skip(f"takes {len(cases)} cases of the grid only")
    check(op, name, cases[nth].call())


# An operator checked by opcheck may not have a view for an output of no elements, so lse is asked
# for.
GRAD_FEATURES = {
    "plain": Features(lse=True, head_dim=8),
    "all": Features(
        lse=True,
        causal=True,
        window=(3, -1),
        softcap=2.0,
        sinks=torch.float32,
        v_head_dim=12,
        head_dim=8,
    ),
    "mask": Features(lse=True, mask="additive", head_dim=8),
    "no_lse": Features(head_dim=8),
    "bfloat16": Features(lse=True, causal=True, dtype=torch.bfloat16, head_dim=8),
}


PLAIN = {
    "merge_state": ((5, 2, 4),),
    "merge_states": ((5, 3, 2, 4),),
    "causal_conv1d": ((3, 2), 4, 3),
    "gated_delta_rule": ((3, 2), 1, 2, 4, 3),
    "mamba2_scan": ((3, 2), 1, 2, 4, 3, {"dt_softplus": True}),
}
"""Rows of ops that have none of the features."""
SQUARE = ("bfloat16",)
"""As many queries as keys; the others have fewer. Some kernels differentiate one and not the
other."""


def grad_call(op, name) -> Call:
    source, features, square = Source(1), GRAD_FEATURES[name], name in SQUARE
    if op in PLAIN:
        written = [a.name for a in OPS[op].spec.args if a.written]
        call = make_call(op, source, *PLAIN[op], features.dtype)
        return call.map(
            lambda n, t: t.requires_grad_(n not in written) if t.is_floating_point() else t
        )
    if op == "attention":
        call = make_call("attention", source, 2, 5, 5 if square else 7, features)
    else:
        call = make_call(
            "varlen_attention",
            source,
            (3, 2),
            (3, 2) if square else (4, 3),
            features,
            padding=(0, 0),
        )
    differentiable = ("query", "key", "value", "sinks") + (("mask",) if op == "attention" else ())
    return call.map(
        lambda n, t: t.requires_grad_() if n in differentiable and t.is_floating_point() else t
    )


@pytest.mark.sweep(17)
@pytest.mark.parametrize("features", GRAD_FEATURES, ids=str)
@pytest.mark.parametrize(("op", "name"), DIFFERENTIABLE, ids=lambda v: v)
def test_opcheck_with_gradients(op, name, features):
    call = grad_call(op, features)
    if op in PLAIN and features not in ("plain", "bfloat16"):
        pytest.skip("the op has no such feature")
    # Training asks every kernel for lse: the backward needs it.
    asked = (call if op in PLAIN else call.with_(return_lse=True)).problem
    if name != "default" and (refused := kernels_of(op)[name].refusals(asked)):
        pytest.skip("; ".join(map(str, refused)))
    check(op, name, call)


def test_the_overloads_are_the_default_and_the_kernels():
    # In a process of its own: what tests register leaves its overloads behind, for torch has no way
    # to take one back.
    ready_process("""
from attnops.core.kernel import all_kernels
from attnops.ops import OPS
made = {(name, overload) for name, op in OPS.items() for overload in op.packet.overloads()}
assert made == {(name, "default") for name in OPS} | {(k.op, k.name) for k in all_kernels()}, made
""")


def test_what_a_compiler_wants_of_an_overload():
    """A custom lowering loses the default constraint; without the tag inputs may arrive in other
    strides."""
    for op, name in OVERLOADS:
        overload, default = (getattr(OPS[op].packet, n) for n in (name, "default"))
        assert torch.Tag.needs_exact_strides in overload.tags, (op, name)
        assert str(overload._schema).replace(f"{op}.{name}(", f"{op}(") == str(default._schema)
        # Inductor takes an op with such an argument for an out= variant and refuses to lower it.
        assert "out" not in {a.name for a in default._schema.arguments}
