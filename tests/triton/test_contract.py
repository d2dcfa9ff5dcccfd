"""Every kernel of Triton through the interpreter keeps its op's contract: the grid of problems,
random calls, opcheck."""

from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from attnops.core.kernel import all_kernels, kernels_of
from attnops.core.problem import pretend
from attnops.testing import CASES
from attnops.testing.calls import equip
from tests.ops.strategies import CALLS
from tests.ops.test_opcheck import check as opcheck, telling
from tests.triton.checks import MODES, SM90, check, triton
from tests.triton.process import interpreted
from tests.triton.test_decode import many_splits
from tests.triton.test_far import taken
from tests.triton.test_numerics import strided, transposed

OWN_GRID = ("decode_attention",)
"""tests/triton/test_decode.py splits its calls in ways of its own."""

OPS = [k.op for k in all_kernels() if k.name == "triton" and k.op not in OWN_GRID]
ATTENTION = (
    "paged_attention",
    "mla_attention",
    "attention",
    "varlen_attention",
    "merge_state",
    "merge_states",
)
GRADIENTS = ("attention_backward", "varlen_attention_backward")
ROUND = (
    "lookup_drafts",
    "accept",
    "advance_rows",
    "next_inputs",
    "accept_sampled",
    "build_tree",
    "tree_mask",
)
DATA = (
    "write_kv",
    "write_latent",
    "write_latent_packed",
    "copy_kv",
    "kv_indices",
    "decode_rows",
    "named_pages",
)
RANDOM = dict.fromkeys((*ATTENTION, *DATA, *ROUND, "route"), 20) | {
    "linear": 15,
    "rms_norm": 15,
    "experts": 12,
    "decode_attention": 12,
}
"""Random calls of an op. Gradients have calls of their own: tests/triton/test_gradient.py."""


def swept(op: str) -> pytest.MarkDecorator:
    return pytest.mark.sweep(7 if op in (*ATTENTION, *GRADIENTS) else 3)


GRID = [
    pytest.param(op, case.label, id=str(case), marks=swept(op)) for op in OPS for case in CASES[op]
]


@pytest.mark.parametrize(("op", "label"), GRID)
@interpreted
def test_grid(op: str, label: str) -> None:
    [case] = [c for c in CASES[op] if c.label == label]
    if (figures := check(case.call())).refused:
        pytest.skip(str(figures))


SWEEPS = dict.fromkeys(ATTENTION, 3) | dict.fromkeys(DATA, 9)
DRAWN = [
    pytest.param(op, count, marks=pytest.mark.sweep(SWEEPS.get(op, 1)))
    for op, count in RANDOM.items()
]
DRAWN += [pytest.param(op, 2 * count, marks=pytest.mark.full) for op, count in RANDOM.items()]


@pytest.mark.parametrize(("op", "examples"), DRAWN)
@interpreted
def test_random_calls(op: str, examples: int) -> None:
    @given(data=st.data())
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def run(data: Any) -> None:
        call = data.draw(CALLS[op])
        if op in OWN_GRID:
            with many_splits():
                check(call)
        elif op in ATTENTION:
            check(
                call,
                data.draw(st.sampled_from(MODES)),
                refused=("dtype", "kv_dtype", "last_dim_contiguous"),
            )
        else:
            check(call)

    run()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("op", [op for op in OPS if op not in GRADIENTS])
@interpreted
def test_opcheck(op: str) -> None:
    kernel = triton(op)
    with pretend(SM90):
        taken = [c for c in CASES[op] if not kernel.refusals(c.call().problem)]
        for case in telling(taken, 2):
            opcheck(op, "triton", equip(kernel, case.call()))


@pytest.mark.sweep(3)
@pytest.mark.parametrize("op", [op for op in CALLS if "triton" in kernels_of(op)])
@interpreted
def test_any_layout(op: str) -> None:
    """Several at once, and no two in the same calls only, so that a stride of one that is taken for
    another's is seen."""
    call = max(taken(op), key=lambda call: len(call.arguments))
    given = {n: t for n, t in call.tensors().items() if not call.spec[n].hint}
    first, deep = (
        [n for n, t in given.items() if t.numel() > 1 and t.dim() > dim] for dim in (0, 1)
    )
    for change, names in ((partial(strided, dim=0), first), (partial(transposed, dim=1), deep)):
        for bit in range(len(names).bit_length()):
            some = [n for at, n in enumerate(names, 1) if at >> bit & 1]
            check(
                call.with_(**{n: change(given[n]) for n in some}),
                "split" if op in ATTENTION else "as_is",
            )
